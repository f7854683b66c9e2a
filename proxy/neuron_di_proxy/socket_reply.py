"""A Reply that is written to its client's transport as it comes: HTTP/1.1, byte by byte ours."""

import asyncio
from collections.abc import Callable
from email.utils import formatdate

from neuron_di.clock import unix_s
from neuron_di.errors import LocalProtocolError
from neuron_di_proxy.histogram import Histogram
from neuron_di_proxy.receipts import RequestRecord
from neuron_di_proxy.reply import (
    EVENT_STREAM,
    LARGE_PIECE_BYTES,
    PING,
    UNREAD_BYTES_MAX,
    Headers,
)
from neuron_di_proxy.token_lane import IS_COMPILED, Lane, Outlet

_PING_CHUNK = b"%x\r\n%b\r\n" % (len(PING), PING)


class _DateHeader:
    """The Date header's line, made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def line(self) -> bytes:
        second = int(unix_s())
        if second != self._second:
            self._second = second
            self._line = b"date: %b\r\n" % formatdate(second, usegmt=True).encode()
        return self._line


_date = _DateHeader()


class SocketReply:
    """One response on a transport that belongs to its connection.

    `closes` and `is_full` are the connection's: it ends with this response; the transport asked
    to wait.
    """

    __slots__ = (
        "_closes",
        "_has_events",
        "_has_length",
        "_is_chunked",
        "_num_large_bytes",
        "_num_silent",
        "_outlet",
        "_transport",
        "has_begun",
        "is_full",
        "is_over",
    )

    def __init__(
        self, transport: asyncio.Transport, outlet: Outlet, *, is_chunked: bool, closes: bool
    ) -> None:
        self._transport = transport
        self._outlet = outlet
        self._is_chunked = is_chunked  # where the length is not known beforehand
        self._closes = closes
        self._has_length = False
        self._has_events = False  # between which a comment may stand
        self._num_large_bytes = 0
        self.has_begun = False
        self.is_over = False
        self.is_full = False
        self._num_silent = 0  # sweeps since something was written

    @property
    def closes(self) -> bool:
        return self._closes

    @closes.setter
    def closes(self, closes: bool) -> None:
        self._closes = closes
        self._outlet.head = None  # it may say otherwise

    def begin(
        self, status: int, headers: Headers, *, length: int | None, first: bytes = b""
    ) -> None:
        if self.has_begun:
            raise LocalProtocolError("a response begins once")
        if length is not None:
            self._has_length, self._is_chunked = True, False
        data = self._head(status, headers, length) + self._framed(first)
        self._outlet.head = None
        self._outlet.block()  # others may have written
        self.has_begun = True  # not before: a head that cannot be encoded must not count as sent
        self._has_events = EVENT_STREAM in headers
        self._write(data)

    def _head(self, status: int, headers: Headers, length: int | None) -> bytes:
        lines = [f"HTTP/1.1 {status} \r\n"]
        lines += [f"{name}: {value}\r\n" for name, value in headers]
        if length is not None:
            lines.append(f"content-length: {length}\r\n")
        head = "".join(lines)
        if head.count("\r") != len(lines) or head.count("\n") != len(lines):
            raise LocalProtocolError("a header of the response has a line end in it")
        tail = _date.line()
        if self._is_chunked:
            tail += b"Transfer-Encoding: chunked\r\n"  # cased as hypercorn's h11 does
        if self._closes:
            tail += b"Connection: close\r\n"
        return b"%b%b\r\n" % (head.encode("latin-1"), tail)

    def write(self, data: bytes) -> None:
        self._write(self._framed(data))

    def lane(
        self,
        frame: tuple[bytes, bytes],
        record: RequestRecord,
        gaps: Histogram,
    ) -> Lane | None:
        if not IS_COMPILED or not self._is_chunked or self.is_over:
            return None
        ids, last_s = record.emitted, record.last_token_s
        return Lane(self._outlet, self.write, *frame, len(ids), record, ids, gaps, last_s)

    def first_lane(
        self,
        frame: tuple[bytes, bytes],
        record: RequestRecord,
        gaps: Histogram,
        headers: Headers,
        on_begun: Callable[[], None],
    ) -> Lane | None:
        if not IS_COMPILED or not self._is_chunked or self.has_begun:
            return None

        def begin(event: bytes) -> None:
            self.begin(200, headers, length=None, first=event)
            on_begun()

        def begun() -> None:
            self.has_begun = self._has_events = True
            on_begun()

        # Made now, while nobody waits for it. It is sent where the lane finds nothing before it.
        self._outlet.block()
        self._outlet.head = self._head(200, headers, None)
        ids, last_s = record.emitted, record.last_token_s
        return Lane(self._outlet, begin, *frame, len(ids), record, ids, gaps, last_s, begun)

    def _framed(self, data: bytes) -> bytes:
        # An empty chunk would read as the end.
        return b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked and data else data

    def _write(self, data: bytes) -> None:
        if self._transport.is_closing():  # it would log a warning for each piece
            return
        self._outlet.write(data)
        if len(data) > LARGE_PIECE_BYTES:
            self._num_large_bytes += len(data)
        elif self.is_full and not self._has_length:
            unread_max = UNREAD_BYTES_MAX + self._num_large_bytes
            if self._transport.get_write_buffer_size() > unread_max:
                self._transport.abort()

    def end(self, last: bytes = b"") -> None:
        self.is_over = True
        data = self._framed(last)
        if self._is_chunked:
            data += b"0\r\n\r\n"
        if data:
            self._write(data)

    @property
    def is_streaming(self) -> bool:
        """Whether a comment may be put between two pieces now."""
        return self._has_events and not self.is_over and self._is_chunked

    def ping(self) -> None:
        """Say that the stream lives."""
        self._outlet.write(_PING_CHUNK)

    def sweep(self, silent_max: float) -> None:
        """Say that the stream lives if nothing was written for more than so many sweeps."""
        if self._outlet.has_written:
            self._outlet.has_written = False
            self._num_silent = 0
        self._num_silent += 1
        if self._num_silent > silent_max:
            self.ping()
