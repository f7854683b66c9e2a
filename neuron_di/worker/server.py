"""The worker's port: legs over leg links, and HTTP for whoever asks how it is.

Next: neuron_di/worker/prefill_worker.py, neuron_di/worker/decode_worker.py
"""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from neuron_di.config import cannot_listen
from neuron_di.errors import (
    CapacityError,
    LocalProtocolError,
    NeuronDiError,
    WorkerFailed,
)
from neuron_di.obs import LimitedLogger, get_logger
from neuron_di.wire import (
    Decoder,
    Failed,
    Finished,
    LegEvent,
    Released,
    WorkerStatus,
    decode_leg_decoder,
    encode_json,
    prefill_leg_decoder,
)
from neuron_di.wire.codec import LEG_BYTES_MAX
from neuron_di.wire.leg_link import LegKind
from neuron_di.worker.admin_api import add_admin_routes
from neuron_di.worker.leg_link_server import End, LegLinkServer, Say
from neuron_di.worker.leg_report import crash_of, failed
from neuron_di.worker.orders import Orders
from neuron_di.worker.tokenize_api import add_tokenize_routes
from neuron_di.worker.worker import Worker

_log = get_logger(__name__)
_limited = LimitedLogger(__name__)  # a client's wrong requests fail legs, too

BACKLOG = 1024
BODY_TIMEOUT_S = 30.0  # a proxy sends one at once

# Answers one kind of leg, given what the proxy said of it.
Run = Callable[[Any], AsyncGenerator[LegEvent, None]]


def make_app(worker: Worker, orders: Orders | None = None) -> web.Application:
    """The worker's HTTP routes. Without `orders` it takes none."""
    app = web.Application(client_max_size=LEG_BYTES_MAX, middlewares=[_read_body])

    async def status(_: web.Request) -> web.Response:
        body: WorkerStatus = worker.status()
        return web.Response(body=encode_json(body), content_type="application/json")

    app.router.add_get("/status", status)
    add_tokenize_routes(app, worker.prompts)
    if orders is not None:
        add_admin_routes(app, orders)
    return app


@web.middleware
async def _read_body(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """A body that is not what its head says, or late, is its sender's fault, whoever answers."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            await request.read()  # which keeps it
    except TimeoutError:
        raise web.HTTPRequestTimeout(text="the body did not come in time") from None
    except web.RequestPayloadError:
        raise web.HTTPBadRequest(text="the body cannot be read") from None
    return await handler(request)


class _HttpLog(logging.Logger):
    """What aiohttp says. Of what is not HTTP, which anybody can send, a few lines only."""

    def handle(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            _limited.warning("http_refused", reason=type(error).__name__)
        else:
            logging.getLogger(self.name).handle(record)


def runs_of(worker: Worker) -> dict[LegKind, tuple[Decoder[Any], Run]]:
    """Those legs its role answers: how each is read, and what answers it."""
    runs: dict[LegKind, tuple[Decoder[Any], Run]] = {}
    if worker.prefill is not None:
        runs["prefill"] = (prefill_leg_decoder, worker.prefill.run)
    if worker.decode is not None:
        runs["decode"] = (decode_leg_decoder, worker.decode.run)
    if worker.combined is not None:
        runs["whole"] = (prefill_leg_decoder, worker.combined.run)
    return runs


class LegAnswers:
    """Answers legs, each in a task of its own. `open` is what a LegLinkServer is made with."""

    def __init__(
        self,
        runs: dict[LegKind, tuple[Decoder[Any], Run]],
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._runs = runs
        self._is_draining = is_draining
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, kind: LegKind, document: bytes, say: Say) -> End:
        """Begin a leg. Its last event is terminal, also when it crashes."""
        task = asyncio.create_task(self._answer(kind, document, say))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task.cancel

    def events(self, kind: LegKind, document: bytes) -> AsyncGenerator[LegEvent, None]:
        """What a leg has to say. Raises what it is refused for, and so may each event."""
        if self._is_draining():
            raise CapacityError("this worker is draining")
        if kind not in self._runs:
            raise WorkerFailed(f"this worker answers no {kind} legs")
        decoder, run = self._runs[kind]
        return run(decoder.decode(document))

    async def ended(self) -> None:
        """Wait until every leg that was cancelled has let go of what it held."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, kind: LegKind, document: bytes, say: Say) -> None:
        event: LegEvent | None = None
        try:
            async with aclosing(self.events(kind, document)) as events:
                async for event in events:
                    say(event)
            if not isinstance(event, Finished | Released | Failed):
                raise LocalProtocolError("the leg ended without its last event")
        except NeuronDiError as error:
            _limited.info("leg_failed", kind=kind, code=error.code)
            say(failed(error))
        except Exception as error:
            _log.exception("leg_crashed", kind=kind)
            say(failed(crash_of(error)))


def bind(host: str, port: int) -> socket.socket:
    """Take a worker's address; 0 takes any free port. ConfigError when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise cannot_listen(host, port, error) from None


@asynccontextmanager
async def listening(
    worker: Worker,
    host: str,
    port: int,
    *,
    orders: Orders | None = None,
    sock: socket.socket | None = None,
) -> AsyncIterator[int]:
    """Serve the worker at an address; gives the port, of which 0 takes any free one.

    Raises ConfigError when the address cannot be had. Legs that still run at the end are ended.
    A `sock` that is bound there stays its owner's: who connects when nobody serves waits.
    """
    # A closed connection cancels what it asked for.
    runner = web.AppRunner(
        make_app(worker, orders),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=1.0,
        logger=_HttpLog("aiohttp.server", logging.INFO),
    )
    await runner.setup()
    answers = LegAnswers(runs_of(worker), lambda: worker.is_draining)
    assert runner.server is not None, "it is set up"
    links = LegLinkServer(answers.open, runner.server, worker.status)
    worker.on_state = links.say_status
    telling = asyncio.create_task(_tell_failure(worker, links))
    try:
        loop = asyncio.get_running_loop()
        listener = bind(host, port) if sock is None else sock.dup()
        server = await loop.create_server(links, sock=listener, backlog=BACKLOG)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            links.close()
            await answers.ended()
    finally:
        worker.on_state = lambda: None  # these links are nobody's any more
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        await runner.cleanup()


async def _tell_failure(worker: Worker, links: LegLinkServer) -> None:
    """Who has legs here must not learn a second later that they are lost."""
    await worker.engine_failed.wait()
    links.say_status()
