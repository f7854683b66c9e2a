"""HTTP/2: hypercorn serves the Quart application on connections that the front gives it.

hypercorn keeps a connection until it ends. It does not bound the time until a first request, and
what a client sends between two requests (a PING is enough) makes it wait on. And it takes all that
is written for a client that reads nothing. These are bounded here.
"""

import asyncio
import logging
from collections.abc import Callable
from itertools import islice
from typing import Any

from hypercorn.asyncio.lifespan import Lifespan
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Event, Updated
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

from neuron_di.clock import now_s
from neuron_di.config import FrontOptions
from neuron_di.obs import get_logger
from neuron_di_proxy.front_sweep import NEVER

_REQUESTS_MAX = 1 << 30  # of a connection: hypercorn's own 1000 would end busy ones

_log = get_logger(__name__)


class HypercornSide:
    """Serves connections that are handed over, while entered through `start` and `stop`."""

    def __init__(self, app: ASGIFramework, options: FrontOptions) -> None:
        self.app = app
        self._loop = asyncio.get_running_loop()
        self._options = options
        self._config = config = _config(options)
        self._app = wrap_app(app, config.wsgi_max_body_size, "asgi")
        self._context = WorkerContext(None)
        self._state: LifespanState = {}
        self._lifespan = Lifespan(self._app, config, self._loop, self._state)
        self._held: dict[asyncio.Task[None], _Held] = {}

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
        reader = asyncio.StreamReader(loop=self._loop)
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
        )
        if received:
            reader.feed_data(received)
        transport.resume_reading()
        task = self._loop.create_task(held.run())
        self._held[task] = held

        def ended(task: asyncio.Task[None]) -> None:
            del self._held[task]
            error = None if task.cancelled() else task.exception()
            if error is not None:
                _log.exception("connection_failed", raised=error)
            on_end()

        task.add_done_callback(ended)

    def sweep(self, at_s: float) -> None:
        """End connections whose client takes too long to begin a request."""
        for held in list(self._held.values()):
            if at_s >= held.deadline_s:
                held.abort()

    def end_a_resting_one(self, looked_at_max: int) -> bool:
        """End the oldest connection without a request; of so many. Who has one goes behind."""
        for task, held in list(islice(self._held.items(), looked_at_max)):
            if held.deadline_s != NEVER:
                held.abort()
                return True
            self._held[task] = self._held.pop(task)
        return False


class _Held(TCPServer):
    """hypercorn's connection. `deadline_s` is when the next request must have come, whole head."""

    def __init__(self, *of_hypercorn: Any, options: FrontOptions) -> None:
        super().__init__(*of_hypercorn)
        self.deadline_s = now_s() + options.header_timeout_s
        self._keep_alive_s = options.keep_alive_s
        self._is_gone = False

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
                protocol.streams = _Streams(protocol.streams)
                protocol.stream_buffers = _Buffers(self.context.event_class)
            if isinstance(event, Updated):
                self.deadline_s = now_s() + self._keep_alive_s if event.idle else NEVER
        await super().protocol_send(event)

    def abort(self) -> None:
        self.deadline_s = NEVER
        self.writer.transport.abort()


class _Streams(dict[int, Any]):
    """hypercorn's streams. A request that is refused early may still send its body: it is dropped,
    where hypercorn would end the connection with a KeyError."""

    def __missing__(self, _: int) -> "_EndedStream":
        return _EndedStream()


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
