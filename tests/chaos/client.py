"""A streaming client that trusts nobody: it notes what came, when, and how it ended."""

import asyncio
import contextlib
import json
import socket
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal
from urllib.parse import urlsplit

import h11

from neuron_di.clock import now_s

ANSWER_TIMEOUT_S = 60.0  # then a request counts as stuck
READ_BYTES = 1 << 16

# How a stream ended: with [DONE]; with an error, as its status or as an event; with neither
# but in good order; by a broken connection; not at all; or because the client left.
End = Literal["done", "error", "silent", "cut", "stuck", "left"]


@dataclass(slots=True)
class Stream:
    """One answer as it arrived. Times are seconds on `clock.now_s`."""

    started_s: float = field(default_factory=now_s)
    end: End | None = None
    error_code: str = ""
    answer_id: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    documents: list[dict[str, Any]] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)  # of each document
    flaws: list[str] = field(default_factory=list)  # what no stream may do, whatever its text
    num_finishes: int = 0

    @property
    def tokens(self) -> list[str]:
        """The tokens, readable, in the order of arrival."""
        return [token for choice in self._choices() for token in choice["logprobs"]["tokens"]]

    @property
    def logprobs(self) -> list[float]:
        return [
            value for choice in self._choices() for value in choice["logprobs"]["token_logprobs"]
        ]

    @property
    def text(self) -> str:
        return "".join(c["text"] for d in self.documents for c in d.get("choices", []))

    @property
    def finish_reason(self) -> str | None:
        reasons = [c["finish_reason"] for d in self.documents for c in d.get("choices", [])]
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def usage(self) -> tuple[int, ...] | None:
        """Tokens of the prompt, of the answer, and together. None: it was not said."""
        said = [usage for document in self.documents if (usage := document.get("usage"))]
        keys = ("prompt_tokens", "completion_tokens", "total_tokens")
        return tuple(said[-1][key] for key in keys) if said else None

    def continued(self) -> tuple[int, str]:
        """How often it says that it was continued, and how well; once, in its last choice."""
        said = [document["neuron_di"] for document in self.documents if "neuron_di" in document]
        return (said[-1]["continued"], said[-1]["grade"]) if said else (0, "")

    def gap_s(self) -> float:
        """The longest time between two things that arrived, the request itself being the first."""
        times = [self.started_s, *self.arrived_s]
        return max((b - a for a, b in pairwise(times)), default=0.0)

    def _choices(self) -> list[dict[str, Any]]:
        choices = [choice for document in self.documents for choice in document.get("choices", [])]
        return [choice for choice in choices if choice["logprobs"]]


@dataclass(slots=True, kw_only=True)
class Manners:
    """How a client behaves."""

    leave: asyncio.Event | None = None  # hang up once this is set
    half_close: bool = False  # send no more after the request, and say so
    read_on: asyncio.Event | None = None  # read only while this is set
    bytes_per_s: float | None = None


async def ask(url: str, body: dict[str, Any], manners: Manners | None = None) -> Stream:
    """Send one streaming request and read its answer to the end, whatever that is."""
    stream = Stream()
    manners = manners or Manners()
    reading = asyncio.create_task(_converse(url, body, manners, stream))
    leaving = asyncio.create_task(manners.leave.wait()) if manners.leave is not None else None
    waits = {reading, leaving} if leaving is not None else {reading}
    await asyncio.wait(waits, timeout=ANSWER_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    if not reading.done():
        stream.end = "left" if leaving is not None and leaving.done() else "stuck"
        reading.cancel()
        await asyncio.wait({reading})
    if leaving is not None:
        leaving.cancel()
    if not reading.cancelled():
        reading.result()
    return stream


async def _converse(url: str, body: dict[str, Any], manners: Manners, stream: Stream) -> None:
    parts = urlsplit(url)
    sock = socket.socket()
    if manners.read_on is not None or manners.bytes_per_s is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    writer = None
    try:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (parts.hostname, parts.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
        payload = json.dumps(body).encode()
        head = [
            ("Host", parts.netloc),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(payload))),
            ("Connection", "close"),
        ]
        http = h11.Connection(h11.CLIENT)
        for event in (
            h11.Request(method="POST", target="/v1/completions", headers=head),
            h11.Data(data=payload),
            h11.EndOfMessage(),
        ):
            writer.write(http.send(event) or b"")
        if manners.half_close:
            writer.write_eof()
        await _read(http, reader, manners, stream)
    except (ConnectionError, OSError):
        stream.end = "cut"
    finally:
        if writer is not None:
            writer.transport.abort()
        else:
            sock.close()


async def _read(
    http: h11.Connection, reader: asyncio.StreamReader, manners: Manners, stream: Stream
) -> None:
    """Feed what arrives to the HTTP parser and take its events apart."""
    status, rest = 0, b""
    while True:
        try:
            event = http.next_event()
        except h11.RemoteProtocolError:  # the connection ended within the answer
            stream.end = "cut"
            return
        if event is h11.NEED_DATA:
            http.receive_data(await _some(reader, manners))
        elif isinstance(event, h11.Response):
            status = event.status_code
            stream.headers = {k.decode().lower(): v.decode() for k, v in event.headers}
        elif isinstance(event, h11.Data):
            rest += bytes(event.data)
            if status == 200:
                *whole, rest = rest.split(b"\n\n")
                for each in whole:
                    _take(each, stream)
        elif isinstance(event, h11.EndOfMessage):
            if status != 200:
                stream.end = "error"
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    stream.error_code = json.loads(rest)["error"]["code"] or ""
                if not stream.error_code:
                    stream.flaws.append(f"status {status} without an error document")
            elif rest:
                stream.flaws.append("the stream ended within an event")
            if stream.end is None:
                stream.end = "silent"
            return
        else:
            stream.end = "cut"
            return


async def _some(reader: asyncio.StreamReader, manners: Manners) -> bytes:
    if manners.read_on is not None:
        await manners.read_on.wait()
    if manners.bytes_per_s is None:
        return await reader.read(READ_BYTES)
    await asyncio.sleep(0.1)
    return await reader.read(max(1, int(manners.bytes_per_s / 10)))


def _take(event: bytes, stream: Stream) -> None:
    """One SSE event."""
    lines = [line for line in event.split(b"\n") if not line.startswith(b":")]  # idle comments
    if not lines:
        return
    if stream.end is not None:
        stream.flaws.append(f"something came after {stream.end}")
    if len(lines) != 1 or not lines[0].startswith(b"data: "):
        stream.flaws.append("not an event of data")
        return
    payload = lines[0].removeprefix(b"data: ")
    if payload == b"[DONE]":
        stream.end = "done"
        return
    document = json.loads(payload)
    if "error" in document:
        stream.end = "error"
        stream.error_code = document["error"]["code"] or ""
        return
    if stream.num_finishes and document["choices"]:
        stream.flaws.append("a choice came after the finish reason")
    stream.num_finishes += sum(c["finish_reason"] is not None for c in document["choices"])
    stream.answer_id = document["id"]
    stream.documents.append(document)
    stream.arrived_s.append(now_s())
