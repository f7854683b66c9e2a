"""HTTP/2: hypercorn serves the Quart application on connections that the front gives it.

hypercorn keeps a connection until it ends. It does not bound the time until a first request, and
what a client sends between two requests (a PING is enough) makes it wait on. It takes all that is
written for a client that reads nothing. These are bounded here. And a response that was broken off
ends its stream with an error, where hypercorn would say nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import islice
from typing import Any

from h2.errors import ErrorCodes
from h2.events import PriorityUpdated, RequestReceived
from h2.exceptions import ProtocolError
from hypercorn.asyncio.lifespan import Lifespan
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h2 import (
    BUFFER_HIGH_WATER,
    BUFFER_LOW_WATER,
    BufferCompleteError,
    H2Protocol,
    StreamBuffer,
)
from hypercorn.typing import ASGIFramework, LifespanState
from hypercorn.typing import Event as IOEvent
from hypercorn.utils import wrap_app
from priority.priority import MissingStreamError

from neuron_di.clock import now_s
from neuron_di.config import FrontOptions
from neuron_di.obs import get_logger
from neuron_di_proxy.send_deadline import NEVER, SendDeadline
from neuron_di_proxy.socket_rest import is_quiet, unsent_of

_READ_BYTES_MAX = 8 << 10
_REQUESTS_MAX = 1 << 30  # of a connection: hypercorn's own 1000 would end busy ones

_log = get_logger(__name__)


class HypercornSide:
    """Serves connections that are handed over, while entered through `start` and `stop`."""

    def __init__(self, app: ASGIFramework, options: FrontOptions, send_timeout_s: float) -> None:
        self.app = app
        self._send_timeout_s = send_timeout_s
        self._loop = asyncio.get_running_loop()
        self._options = options
        self._config = config = _config(options)
        self._app = wrap_app(app, config.wsgi_max_body_size, "asgi")
        self._context = WorkerContext(None)
        self._state: LifespanState = {}
        self._lifespan = Lifespan(self._app, config, self._loop, self._state)
        self._held: dict[asyncio.Task[None], _Held] = {}
        self._resting: dict[_Held, None] = {}  # without a request; since longest first

    async def start(self) -> None:
        """Start the application. Raises what its start-up raises."""
        self._lifespan_task = self._loop.create_task(self._lifespan.handle_lifespan())
        await self._lifespan.wait_for_startup()
        if self._lifespan_task.done():
            self._lifespan_task.result()

    async def stop(self, timeout_s: float) -> None:
        """End all connections, those that are busy after `timeout_s` too, then the application."""
        await self._context.terminated.set()
        if self._held:
            _, late = await asyncio.wait(list(self._held), timeout=timeout_s)
            for task in late:
                self._held[task].abort()
                task.cancel()
            if late:
                await asyncio.wait(late)
        await self._lifespan.wait_for_shutdown()
        self._lifespan_task.cancel()
        await asyncio.wait((self._lifespan_task,))

    def hold(
        self, transport: asyncio.Transport, received: bytes, on_end: Callable[[], None]
    ) -> None:
        """Serve a connection that has received this much. `on_end` is called once it is over."""
        reader = _Reader(loop=self._loop)
        protocol = _Feeding(reader, self._loop)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        held = _Held(
            self._app,
            self._loop,
            self._config,
            self._context,
            self._state,
            reader,
            writer,
            options=self._options,
            send_timeout_s=self._send_timeout_s,
            resting=self._resting,
        )
        if received:
            reader.feed_data(received)
        transport.resume_reading()
        task = self._loop.create_task(held.run())
        self._held[task] = held

        def ended(task: asyncio.Task[None]) -> None:
            del self._held[task]
            self._resting.pop(held, None)
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, OSError):  # which is the client's end
                _log.exception("connection_failed", raised=error)
            on_end()

        task.add_done_callback(ended)

    def sweep(self, at_s: float) -> None:
        """End connections whose client takes too long to begin a request."""
        for held in list(self._held.values()):
            try:
                held.sweep(at_s)
            except Exception as error:  # a bug, and no reason to keep no deadline any more
                _log.exception("sweep_failed", raised=error)
                held.abort()

    def end_a_resting_one(self, looked_at_max: int) -> bool:
        """End whoever has been without a request for longest; of so many. Who is not quiet yet
        goes behind."""
        for held in list(islice(self._resting, looked_at_max)):
            del self._resting[held]
            if held.writer.transport.is_closing():  # its place is free in a moment
                return True
            if is_quiet(held.writer.transport):
                held.say_goodbye()
                held.abort()
                return True
            self._resting[held] = None
        return False


class _Held(TCPServer):
    """hypercorn's connection. It is among `resting` while it has no request."""

    def __init__(
        self,
        *of_hypercorn: Any,
        options: FrontOptions,
        send_timeout_s: float,
        resting: dict["_Held", None],
    ) -> None:
        super().__init__(*of_hypercorn)
        self._deadline_s = now_s() + options.header_timeout_s  # for the next request's whole head
        self._send_deadline = SendDeadline(send_timeout_s)
        self._keep_alive_s = options.keep_alive_s
        self._is_gone = False
        self._resting = resting
        resting[self] = None

    def sweep(self, at_s: float) -> None:
        if self._deadline_s == NEVER:
            protocol = self.protocol.protocol
            # Of a stream that its client has reset, and of one that hypercorn has refused by
            # itself, it does not say that it is over.
            if isinstance(protocol, H2Protocol) and all(
                stream.closed for stream in protocol.streams.values()
            ):
                self._rest(at_s)
        num_unsent = unsent_of(self.writer.transport)
        self._send_deadline.see(num_unsent, at_s)  # a busy one's, too: its streams share it
        if num_unsent:  # who still reads a response is not idle
            self._deadline_s = max(self._deadline_s, at_s + self._keep_alive_s)
        if at_s >= min(self._deadline_s, self._send_deadline.at_s):
            self.abort()

    def say_goodbye(self) -> None:
        """Tell the client that it may send elsewhere what it sends now."""
        wrapper = getattr(self, "protocol", None)  # there is none before hypercorn has begun
        protocol = None if wrapper is None else wrapper.protocol
        if isinstance(protocol, H2Protocol):
            with suppress(ProtocolError):
                protocol.connection.close_connection()
                self.writer.write(protocol.connection.data_to_send())

    def abort(self) -> None:
        self.writer.transport.abort()

    def _rest(self, at_s: float) -> None:
        self._deadline_s = at_s + self._keep_alive_s
        self._resting[self] = None

    def _work(self) -> None:
        self._deadline_s = NEVER
        self._resting.pop(self, None)

    async def _read_data(self) -> None:
        await super()._read_data()
        # hypercorn would keep the connection, already left, until it has been idle for too long.
        self._is_gone = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        if self._is_gone and isinstance(event, Updated):
            return
        protocol = self.protocol.protocol
        # Before, hypercorn takes HTTP/2's preface for a request of HTTP/1.1.
        if isinstance(protocol, H2Protocol):
            if not isinstance(protocol.streams, _Streams):
                protocol.streams = _Streams(protocol)
                protocol.stream_buffers = _Buffers(self.context.event_class)
                decoder = protocol.connection.decoder  # what it refuses ends the whole connection
                heads_max = 2 * self.config.h2_max_header_list_size
                decoder.max_header_list_size = max(decoder.max_header_list_size, heads_max)
                served = _served(protocol, self.writer.transport)
                protocol._create_stream = served  # type: ignore  # noqa: SLF001, PGH003
                protocol._priority_updated = _unheeded  # type: ignore  # noqa: SLF001, PGH003
            if isinstance(event, Updated):
                if event.idle:
                    self._rest(now_s())
                else:
                    self._work()
                if reset := protocol.connection.data_to_send():  # by `_Streams`, or `_served`
                    await self._write(reset)
        if isinstance(event, RawData):
            await self._write(event.data)
        else:
            await super().protocol_send(event)

    async def _write(self, data: bytes) -> None:
        """At once, where hypercorn waits for a lock before: who waits may be cancelled, and without
        a frame of headers that was made all later ones of the connection would be read wrongly."""
        try:
            self.writer.write(data)
            async with self.send_lock:
                await self.writer.drain()
        except (ConnectionError, RuntimeError):
            await self.protocol.handle(Closed())


def _served(
    protocol: H2Protocol, transport: asyncio.WriteTransport
) -> Callable[[RequestReceived], Coroutine[Any, Any, None]]:
    """How `protocol` takes a request: whatever hypercorn would fail with ends that stream alone.

    And those that hypercorn has refused by itself, which it would keep until the end, go then.
    A client that resets its requests at once may send any number of them, in few bytes: one is
    begun in a turn of the loop, so that others have theirs, and those that were reset go.
    """
    create = protocol._create_stream  # noqa: SLF001

    async def take(request: RequestReceived) -> None:
        await asyncio.sleep(0)
        if transport.is_closing():
            return
        for stream_id in [each for each, stream in protocol.streams.items() if stream.closed]:
            protocol.streams.pop(stream_id)
        fields = dict(request.headers)
        method, path = fields[b":method"], fields.get(b":path")  # there is none in a plain CONNECT
        if path is not None and path.isascii() and method.isascii():
            await create(request)
        else:
            with suppress(ProtocolError):  # it is over
                protocol.connection.reset_stream(request.stream_id, ErrorCodes.PROTOCOL_ERROR)

    return take


async def _unheeded(_: PriorityUpdated) -> None:
    """RFC 9113 (5.3.2) deprecates what a client says of priorities. hypercorn would keep it, also
    of streams that never begin, and fail with the thousandth."""


class _Streams(dict[int, Any]):
    """hypercorn's streams. A request that is refused early may still send its body: it is dropped,
    where hypercorn would end the connection with a KeyError."""

    def __init__(self, protocol: H2Protocol) -> None:
        super().__init__(protocol.streams)
        self._protocol = protocol

    def __missing__(self, _: int) -> "_EndedStream":
        return _EndedStream()

    def pop(self, stream_id: int, *default: Any) -> Any:
        """The stream is over, for whatever reason. What was not sent of it never will be."""
        buffer = self._protocol.stream_buffers.get(stream_id)
        if isinstance(buffer, _Buffer) and not buffer.complete:
            buffer.drop()
            with suppress(ProtocolError):  # as where the client has reset it itself
                self._protocol.connection.reset_stream(stream_id, ErrorCodes.INTERNAL_ERROR)
            with suppress(MissingStreamError):
                self._protocol.priority.unblock(stream_id)  # hypercorn's sender forgets it then
        return super().pop(stream_id, *default)


class _Buffers(dict[int, StreamBuffer]):
    """What streams have written, each in a `_Buffer` in place of hypercorn's. None is there yet."""

    def __init__(self, event_class: type[IOEvent]) -> None:
        super().__init__()
        self._event_class = event_class

    def __setitem__(self, stream_id: int, _: StreamBuffer) -> None:
        super().__setitem__(stream_id, _Buffer(self._event_class))


class _Buffer(StreamBuffer):
    """hypercorn's lets whoever writes go on each time that its sender looks, also where the
    client's window takes nothing. Here who writes waits until most was taken, and `send_in_time`
    of `app.py` bounds that."""

    def drop(self) -> None:
        """Nothing of it is to be sent any more."""
        self._complete = True
        self.buffer.clear()

    async def push(self, data: bytes) -> None:
        if self._complete:
            raise BufferCompleteError
        self.buffer.extend(data)
        await self._is_empty.clear()
        if len(self.buffer) >= BUFFER_HIGH_WATER:
            await self._paused.clear()
            await self._paused.wait()

    async def pop(self, max_length: int) -> bytes:
        data = bytes(self.buffer[:max_length])
        del self.buffer[:max_length]
        if len(self.buffer) < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self.buffer:
            await self._is_empty.set()
        return data


class _EndedStream:
    async def handle(self, event: object) -> None:
        """Drop what comes too late."""


class _Reader(asyncio.StreamReader):
    """Gives hypercorn a little at a time: of frames as small as can be, what it asks for would
    take the event loop a quarter of a second."""

    async def read(self, n: int = -1) -> bytes:
        return await super().read(min(n, _READ_BYTES_MAX) if n >= 0 else n)


class _Feeding(asyncio.StreamReaderProtocol):
    """Feeds hypercorn's reader."""

    def __init__(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(reader, loop=loop)
        self._own_reader = reader  # the base class keeps only a weak one


def _config(options: FrontOptions) -> Config:
    config = Config()
    config.keep_alive_timeout = options.keep_alive_s
    config.keep_alive_max_requests = _REQUESTS_MAX
    config.h2_max_header_list_size = options.header_bytes_max
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn.error")
    return config
