"""An HTTP client that knows when each piece of an answer came.

Own, over asyncio and httptools, because it must not be what is measured: the time is taken once for
each packet, in the callback that has it, and nothing is looked at before the answer is over.
"""

import asyncio
import ssl
from array import array
from dataclasses import dataclass, field
from typing import Literal, cast

import httptools

from neuron_di.clock import now_s
from neuron_di.proxy_call import check_address, check_key

End = Literal["whole", "cut", "timeout", "connection"]

ANSWER_BYTES_MAX = 256 << 20


@dataclass(slots=True)
class Heard:
    """A response, or as much as came of it. `pieces[i]` came at `times_s[i]`.

    whole: to its end; cut: it began, and its connection ended too early; connection: there was
    none, or it ended before the answer began; timeout: it was given up.
    """

    end: End = "connection"
    status: int = 0
    pieces: list[bytes] = field(default_factory=list)
    times_s: "array[float]" = field(default_factory=lambda: array("d"))
    end_s: float = float("nan")
    why: str = ""
    num_bytes: int = 0

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


class _Connection(asyncio.Protocol):
    """One connection, one request at a time. httptools calls the methods `on_…`."""

    def __init__(self, client: "HttpClient") -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._heard = Heard()
        self._over: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._is_whole = self._is_kept = self._says_its_end = False
        self.has_answered = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, heard: Heard) -> None:
        """Send, and note in `heard` what comes, until the answer is over."""
        assert self._transport is not None
        assert self._over is None
        if not self.is_open:  # lost before its first request
            heard.why = "it closed the connection"
            return
        self._heard = heard
        self._parser = httptools.HttpResponseParser(self)
        self._is_whole = self._is_kept = self._says_its_end = self.has_answered = False
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._over
        finally:
            self._over = None
            if self._is_whole and self._is_kept and self.is_open:
                self._client.take_back(self)
            else:
                self._transport.abort()
            self._parser, self._heard = None, Heard()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class

    def data_received(self, data: bytes) -> None:
        at_s = now_s()
        if self._parser is None or self._over is None or self._over.done():
            self._close("it sent something that belongs to no answer")
            return
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._close(f"it answered what is not HTTP/1.1: {error}")
        heard = self._heard
        if self._parts:
            piece = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            heard.pieces.append(piece)
            heard.times_s.append(at_s)
            heard.num_bytes += len(piece)
            if heard.num_bytes > ANSWER_BYTES_MAX:
                self._close(f"its answer is longer than {ANSWER_BYTES_MAX >> 20} MiB")
        if self._is_whole:
            self._end("whole", at_s)

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_header(self, name: bytes, _value: bytes) -> None:
        self._says_its_end |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._heard.status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self._is_kept = self._parser.should_keep_alive()  # known only now: later it says no
        # A 1xx answer comes before the answer.
        self._is_whole = self._heard.status >= 200

    def connection_lost(self, error: Exception | None) -> None:
        self._client.forget(self)
        if self._over is not None and not self._over.done():
            if self._heard.status and not (error or self._heard.why or self._says_its_end):
                self._end("whole", now_s())  # as of HTTP/1.0: the connection's end is its end
                return
            self._heard.why = self._heard.why or (
                str(error) if error else "it closed the connection"
            )
            self._end("cut" if self._heard.status else "connection", now_s())

    def abort(self) -> None:
        """Close it, whatever is on its way."""
        if self._transport is not None:
            self._transport.abort()

    def _close(self, why: str) -> None:
        self._heard.why = why
        self.abort()

    def _end(self, end: End, at_s: float) -> None:
        self._heard.end, self._heard.end_s = end, at_s
        if self._over is not None and not self._over.done():
            self._over.set_result(None)


class HttpClient:
    """Requests to one server. Connections are kept and used again; `close` ends them."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """`url` may end with `/v1` or not. ConfigError when it is none."""
        parts = check_address(url)
        check_key(key)
        assert parts.hostname is not None, "it was checked"
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._authority = parts.netloc
        self._authorization = f"authorization: Bearer {key}\r\n" if key is not None else ""
        self._idle: dict[_Connection, None] = {}
        self._all: set[_Connection] = set()
        self._lost = asyncio.Event()
        self.num_reconnects = 0  # requests sent again: the server had closed a kept connection

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request. They can be made before it is their time."""
        head = (
            f"{method} {self._root}{path} HTTP/1.1\r\nhost: {self._authority}\r\n"
            f"user-agent: neuron-di-bench\r\naccept: */*\r\n{self._authorization}"
        )
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return head.encode() + b"\r\n" + body

    async def send(self, request: bytes, timeout_s: float) -> Heard:
        """Send, and read to the end. Raises nothing: what went wrong is in what is returned."""
        heard = Heard()
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(request, heard)
        except TimeoutError:
            heard.end, heard.why = "timeout", f"not over after {timeout_s:g} s"
        except OSError as error:  # TLS's errors, too
            heard.end, heard.why = "connection", error.strerror or str(error)
        if heard.end_s != heard.end_s:
            heard.end_s = now_s()
        return heard

    async def _send(self, request: bytes, heard: Heard) -> None:
        while self._idle:
            connection, _ = self._idle.popitem()  # the one used last is the likeliest to be open
            if connection.is_open:
                await connection.ask(request, heard)
                if heard.end != "connection" or connection.has_answered:
                    return
                # The server closed it while the request was on its way: every client tries again.
                self.num_reconnects += 1
                heard.why, heard.end_s = "", float("nan")
                break
        connection = await self._connect()
        await connection.ask(request, heard)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self), self._host, self._port, ssl=self._ssl
        )
        self._all.add(connection)
        return connection

    def take_back(self, connection: _Connection) -> None:
        """A connection whose answer is over."""
        self._idle[connection] = None

    def forget(self, connection: _Connection) -> None:
        """A connection that is lost."""
        self._idle.pop(connection, None)
        self._all.discard(connection)
        self._lost.set()

    async def close(self) -> None:
        """End all connections, at once."""
        for connection in list(self._all):
            if connection.is_open:
                connection.abort()
        while self._all:
            await self._lost.wait()
            self._lost.clear()
