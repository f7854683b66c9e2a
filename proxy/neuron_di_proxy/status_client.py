"""Asks workers how they are, over a connection to each that is kept.

The same question comes twice a second for each worker that says nothing on its link, as long as the
proxy runs: it is one small HTTP request each time, made without a general client.
"""

import asyncio
from typing import Any, NamedTuple

import httptools

from neuron_di.errors import RemoteProtocolError
from neuron_di.wire.announce import STATUS_BYTES_MAX

ANSWER_BYTES_MAX = STATUS_BYTES_MAX + (16 << 10)  # body and head

_Place = tuple[str, int]  # host, port


class StatusAnswer(NamedTuple):
    """What came back: the HTTP status, and the body of at most ANSWER_BYTES_MAX."""

    http_status: int
    body: bytes


class StatusClient:
    """Connections to any number of workers. Owned by one event loop; close it at the end."""

    def __init__(self) -> None:
        self._kept: dict[_Place, _Connection] = {}

    async def ask(self, host: str, port: int) -> StatusAnswer:
        """`GET /status` there. Cancelling it ends the connection.

        Raises OSError when nobody is there, or who was there hung up, UnicodeError for a host
        name that cannot be one, and RemoteProtocolError for what is no answer.
        """
        place = host, port
        kept = self._kept.pop(place, None)
        if kept is not None and not kept.is_over:
            try:
                return await self._ask(place, kept)
            except ConnectionResetError:
                pass  # a server may end a connection that is idle: that says nothing of it
        self._kept = {at: each for at, each in self._kept.items() if not each.is_over}
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda: _Connection(loop, place), host, port)
        return await self._ask(place, made)

    def close(self) -> None:
        """End the connections that are kept. May be called twice."""
        for connection in self._kept.values():
            connection.abort()
        self._kept.clear()

    async def _ask(self, place: _Place, connection: "_Connection") -> StatusAnswer:
        try:
            answer = await connection.ask()
        except BaseException:
            connection.abort()
            raise
        if connection.is_over or place in self._kept:
            connection.abort()
        else:
            self._kept[place] = connection
        return answer


class _Connection(asyncio.Protocol):
    """One connection to one worker. One question at a time; over after anything unusual."""

    def __init__(self, loop: asyncio.AbstractEventLoop, place: _Place) -> None:
        host, port = place
        name = b"[%b]" % host.encode() if ":" in host else host.encode("idna")
        self._question = b"GET /status HTTP/1.1\r\nHost: %b:%d\r\n\r\n" % (name, port)
        self._loop = loop
        self._transport: Any = None
        self._waiting: asyncio.Future[StatusAnswer] | None = None
        self._body: list[bytes] = []
        self._num_bytes = 0  # of this answer
        self.is_over = False

    async def ask(self) -> StatusAnswer:
        """Not while another question is open."""
        if self.is_over:  # between the loop's turns
            raise ConnectionResetError("the worker hung up")
        self._parser: Any = httptools.HttpResponseParser(self)
        self._body.clear()
        self._num_bytes = 0
        self._waiting = self._loop.create_future()
        self._transport.write(self._question)
        try:
            return await self._waiting
        finally:
            self._waiting = None

    def abort(self) -> None:
        self.is_over = True
        self._transport.abort()

    # What the transport calls.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._waiting is None or self._waiting.done():  # nobody asked
            self.abort()
            return
        self._num_bytes += len(data)
        if self._num_bytes > ANSWER_BYTES_MAX:
            self._fail(RemoteProtocolError("a status of too many bytes"))
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(RemoteProtocolError("what answers does not speak HTTP"))

    def connection_lost(self, _: Exception | None) -> None:
        self._fail(ConnectionResetError("the worker hung up"))

    # What the parser calls.

    def on_body(self, piece: bytes) -> None:
        self._body.append(piece)

    def on_message_complete(self) -> None:
        answer = StatusAnswer(self._parser.get_status_code(), b"".join(self._body))
        if self._waiting is not None and not self._waiting.done():
            self.is_over = not self._parser.should_keep_alive()
            self._waiting.set_result(answer)
        else:  # a second answer
            self.is_over = True

    def _fail(self, error: Exception) -> None:
        self.is_over = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
