"""The head of an HTTP/1 request: read strictly, because two readings of one head are a way in.

What a proxy before us could take for another message is refused: bare line ends, two lengths, a
length beside a transfer coding, codings we do not undo.

A client sends the same head again and again, but for a few values. So what was read of a head is
kept without those values, and a head that differs in nothing else is not taken apart again. A head
with a key in any other place than those values is not kept.
"""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple
from urllib.parse import unquote

import httptools
import msgspec

from neuron_di.errors import BadRequest, ClientError

HEADERS_MAX = 100
KNOWN_MAX = 64  # heads that are kept
KNOWN_BYTES_MAX = 1024  # of one of them, its values included

# Headers whose values differ between a client's requests, written in the usual way: other ways
# are read too, but stay part of what is kept. What is found here is passed on by the parser as it
# is, whatever it says; a length is looked at again.
_CHANGING = re.compile(
    rb"\n([Cc]ontent-[Ll]ength|[Aa]uthorization|[Xx]-[Rr]equest-[Ii][Dd]|[Tt]raceparent)"
    rb": ([!-~]+(?: [!-~]+)?)\r"
)
# Headers whose values are secret. A head is kept only when they were cut out of it.
_SECRET = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"})
_ONCE = ("host", "content-length", "transfer-encoding", "authorization", "x-request-id")
_LENGTH_DIGITS_MAX = 18
_VERSIONS: dict[str, Literal["1.0", "1.1"]] = {"1.0": "1.0", "1.1": "1.1"}

_EMPTY_LINES_MAX = 4  # before a request line
_TLS_HELLO = b"\x16\x03"  # a record of a handshake, of any version


class HeadTooLarge(ClientError):
    """Raised when a request's head is larger than a limit."""

    http_status = 431
    code = "request_header_fields_too_large"


class NotHttp(ClientError):
    """Raised when a connection begins with something else than HTTP."""


class RequestHead(msgspec.Struct, frozen=True):
    """A request as its head states it. `path` has no query; `headers` go by lower-case name."""

    method: str
    path: str
    version: Literal["1.0", "1.1"]
    headers: dict[str, str]
    body_bytes: int | None  # None: chunked
    keeps_alive: bool
    wants_continue: bool

    @property
    def route(self) -> str:
        """The path as routes are named: any other way to write it means the same."""
        return "/" + unquote(self.path).lstrip("/")


class _Fields:
    """What the parser reports."""

    def __init__(self) -> None:
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_complete = False

    def on_url(self, target: bytes) -> None:
        self.target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.is_complete = True


class _Known(NamedTuple):
    """A head that was read, without the values of `changing`."""

    head: RequestHead
    changing: tuple[str, ...]  # names, in the order of their lines
    has_length: bool  # among them

    def with_values(self, values: Sequence[bytes]) -> RequestHead | None:
        """The head with these values in their places. None: a length that has to be refused."""
        headers, body_bytes = self.head.headers.copy(), self.head.body_bytes
        for name, value in zip(self.changing, values, strict=True):
            headers[name] = value.decode("ascii")
        if self.has_length:
            length = headers["content-length"]
            if len(length) > _LENGTH_DIGITS_MAX or not length.isdigit():
                return None
            body_bytes = int(length)
        return msgspec.structs.replace(self.head, headers=headers, body_bytes=body_bytes)


_known: dict[tuple[bytes, ...], _Known] = {}  # oldest first


def drop_empty_lines(received: bytearray) -> None:
    """Some clients send one behind a body: it is no part of the next request."""
    for _ in range(_EMPTY_LINES_MAX):
        if not received.startswith(b"\r\n"):
            break
        del received[:2]


def check_begun(received: bytearray, num_head_bytes: int, bytes_max: int) -> None:
    """Raises for what need not be waited for: HeadTooLarge, or NotHttp for a client's TLS."""
    if num_head_bytes > bytes_max:
        raise _too_long(bytes_max)
    if received.startswith(_TLS_HELLO):
        raise NotHttp("this port speaks HTTP without TLS: use http://")


def read_head(raw: bytes) -> RequestHead:
    """As `parse_head`, which is not asked again for a head that is known."""
    if len(raw) > KNOWN_BYTES_MAX:
        return parse_head(raw)
    pieces = _CHANGING.split(raw)  # what stands between, a name, its value, and so on
    values = pieces[2::3]
    del pieces[2::3]
    key = tuple(pieces)
    known = _known.get(key)
    if known is not None and (head := known.with_values(values)) is not None:
        return head
    head = parse_head(raw)
    if known is None:
        _keep(key, values, head)
    return head


def _keep(key: tuple[bytes, ...], values: Sequence[bytes], head: RequestHead) -> None:
    changing = tuple(name.decode("ascii").lower() for name in key[1::2])
    headers = head.headers
    # A name that comes twice has another value than either of its lines.
    if any(
        headers.get(name) != value.decode() for name, value in zip(changing, values, strict=True)
    ):
        return
    if not _SECRET.isdisjoint(headers.keys() - set(changing)) or b"?" in key[0]:
        return  # a query may be anything, also a key
    if len(_known) >= KNOWN_MAX:
        del _known[next(iter(_known))]
    without = msgspec.structs.replace(head, headers=headers | dict.fromkeys(changing, ""))
    _known[key] = _Known(without, changing, "content-length" in changing)


def parse_head(raw: bytes) -> RequestHead:
    """Read a whole head, its empty line included.

    Raises BadRequest, or HeadTooLarge for too many headers. After that nobody can say where the
    next request begins: the connection must end.
    """
    num_lines = raw.count(b"\r\n")
    if num_lines != raw.count(b"\n") or num_lines != raw.count(b"\r"):
        raise BadRequest("a line of the request's head ends in other bytes than CR LF")
    if raw.find(b"\r\n\r\n") != len(raw) - 4:  # what follows would be read as a body, or not
        raise BadRequest("the request's head does not end with its first empty line")
    if num_lines - 2 > HEADERS_MAX:
        raise _too_many()
    fields = _Fields()
    parser = httptools.HttpRequestParser(fields)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # whoever gets the connection decides whether to
    except httptools.HttpParserError as error:
        raise BadRequest(f"the request's head is not HTTP: {error}") from None
    version = _VERSIONS.get(parser.get_http_version())
    if not fields.is_complete or version is None:
        raise BadRequest("the request is not HTTP/1.0 or HTTP/1.1")
    headers = _joined(fields.headers)
    if version == "1.1" and "host" not in headers:
        raise BadRequest("the header Host is missing")
    return RequestHead(
        method=parser.get_method().decode("ascii"),
        path=_path_of(fields.target),
        version=version,
        headers=headers,
        body_bytes=_body_bytes(headers, version),
        keeps_alive=version == "1.1" and "close" not in _tokens(headers.get("connection")),
        wants_continue=version == "1.1" and "expect" in headers,
    )


def _path_of(target: bytes) -> str:
    """Without the query. Who is named in an absolute form (RFC 9112, 3.2.2) has no meaning here."""
    path = target.partition(b"?")[0].decode("latin-1")
    if not path.startswith("/") and "://" in path:
        path = "/" + path.partition("://")[2].partition("/")[2]
    return path


def check_headers(raw: Sequence[tuple[bytes, bytes]], bytes_max: int) -> dict[str, str]:
    """Read the headers of a request whose head somebody else took apart, by the same rules.

    Returns them by lower-case name. Raises BadRequest or HeadTooLarge.
    """
    if sum(len(name) + len(value) + len(": \r\n") for name, value in raw) > bytes_max:
        raise _too_long(bytes_max)
    if len(raw) > HEADERS_MAX:
        raise _too_many()
    headers = _joined(raw)
    _body_bytes(headers, "1.1")
    return headers


def _joined(raw: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, value in raw:
        name = raw_name.decode("latin-1").lower()
        if name not in headers:
            headers[name] = value.decode("latin-1")
        elif name in _ONCE:
            raise BadRequest(f"the header {name} is there twice")
        else:
            headers[name] += ", " + value.decode("latin-1")
    return headers


def _too_long(bytes_max: int) -> HeadTooLarge:
    return HeadTooLarge(f"the request's head has more than {bytes_max} bytes, the limit")


def _too_many() -> HeadTooLarge:
    return HeadTooLarge(f"a request has at most {HEADERS_MAX} headers")


def _tokens(value: str | None) -> list[str]:
    if value is None:
        return []
    return [token.strip().lower() for token in value.split(",")]


def _body_bytes(headers: dict[str, str], version: str) -> int | None:
    coding, length = headers.get("transfer-encoding"), headers.get("content-length")
    if coding is not None:
        if length is not None or version == "1.0" or coding.strip().lower() != "chunked":
            raise BadRequest("of transfer codings only chunked is known, and without a length")
        return None
    if length is None:
        return 0
    if not (length.isascii() and length.isdigit()) or len(length) > _LENGTH_DIGITS_MAX:
        raise BadRequest("Content-Length is no length")
    return int(length)
