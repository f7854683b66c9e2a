"""One request to one endpoint, and what came back, byte by byte.

The client knows HTTP and nothing of OpenAI's documents: how a stream is framed is part of what is
looked at, so nobody may mend it on the way.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from neuron_di.errors import PeerError, PeerGone, PeerTimeout
from neuron_di.testing.conformance.finding import shorten

Json = dict[str, Any]
Side = Literal["A", "B"]
BODY_BYTES_MAX = 16 << 20  # of an answer
TIMEOUT_S = 120.0  # of an exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What to send. `body` is sent as JSON, or as it is where it is bytes."""

    path: str
    body: Json | bytes | None = None
    method: Literal["GET", "POST"] = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A response. `headers` by lower-case name; `body` as it came, without HTTP's framing."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def content_type(self) -> str:
        """Without its parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def document(self) -> Any:
        """The body as JSON; None where it is none."""
        return read_json(self.body)[0]

    def doubled_keys(self) -> list[str]:
        """The keys that an object of the body has twice."""
        return read_json(self.body)[1]

    def error(self) -> Json | None:
        """The error in an error document."""
        document = self.document()
        error = document.get("error") if isinstance(document, dict) else None
        return error if isinstance(error, dict) else None

    def in_words(self) -> str:
        """The status, and the error's message or what else the body is: not long, printable."""
        error = self.error()
        if error is not None:
            return f"status {self.status}: {shorten(error.get('message'))}"
        return f"status {self.status}, {shorten(self.content_type)}"


class Endpoint:
    """An OpenAI endpoint. `url` may end with `/v1` or not. The session is its caller's."""

    def __init__(
        self,
        side: Side,
        url: str,
        session: aiohttp.ClientSession,
        *,
        model: str = "",
        key: str | None = None,
    ) -> None:
        self.side: Side = side
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._session = session
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)

    async def send(self, ask: Ask) -> Heard:
        """Send and read to the end. Raises PeerError where no response comes, or one without end.

        A response that breaks off is a response: its body ends where the connection did.
        """
        data = ask.body if ask.body is None or isinstance(ask.body, bytes) else to_bytes(ask.body)
        headers = {"Content-Type": "application/json", **self._headers, **ask.headers}
        try:
            async with self._session.request(
                ask.method,
                self.url + ask.path,
                data=data,
                headers=headers,
                timeout=self._timeout,
                allow_redirects=False,  # elsewhere is another server
            ) as response:
                body = await _read(response)
                known = {name.lower(): value for name, value in response.headers.items()}
                return Heard(status=response.status, headers=known, body=body)
        except TimeoutError:
            raise PeerTimeout(f"{self.url} did not answer in {self._timeout.total:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            number = getattr(error, "errno", None) or 0  # aiohttp's own words are a riddle
            words = os.strerror(number) if number > 0 else error
            raise PeerGone(f"no endpoint answers at {self.url}: {words}") from None

    async def find_model(self) -> Json:
        """The entry of /v1/models for `model`, or the first one, which becomes `model`."""
        heard = await self.send(Ask(path="/v1/models", method="GET"))
        document = heard.document() if heard.status == 200 else None
        entries = document.get("data") if isinstance(document, dict) else None
        listed = entries if isinstance(entries, list) else []
        known = [each for each in listed if isinstance(each, dict) and "id" in each]
        if not known:
            raise PeerError(f"{self.url} lists no model at /v1/models ({heard.in_words()})")
        named = [each for each in known if each["id"] == self.model]
        if self.model and not named:
            raise PeerError(f"{self.url} has no model {self.model!r}")
        entry: Json = (named or known)[0]
        self.model = str(entry["id"])
        return entry


def read_json(text: bytes | str) -> tuple[Any, list[str]]:
    """A document, None where it is none, and the keys that an object in it has twice."""
    doubled: list[str] = []

    def make(pairs: list[tuple[str, Any]]) -> Json:
        if len(dict(pairs)) < len(pairs):
            counted = Counter(key for key, _ in pairs)
            doubled.extend(key for key, count in counted.items() if count > 1)
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=make), doubled
    except (ValueError, RecursionError):
        return None, []


def to_bytes(document: Any) -> bytes:
    """A document as a request's body."""
    return json.dumps(document).encode()


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    try:
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > BODY_BYTES_MAX:
                mebibytes = BODY_BYTES_MAX >> 20
                raise PeerError(f"{response.url} answers with more than {mebibytes} MiB")
    except aiohttp.ClientPayloadError:
        pass  # it was cut: what there is shows where
    return bytes(body)
