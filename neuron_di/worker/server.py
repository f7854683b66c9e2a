"""The worker's HTTP front: one POST per leg, answered as JSON lines while the leg runs.

A connection that closes cancels its handler, and with it the leg: that is how the proxy, or
the client behind it, takes a request back.

Next: neuron_di/worker/prefill_worker.py, neuron_di/worker/decode_worker.py
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from aiohttp import web

from neuron_di.errors import CapacityError, LocalProtocolError, NeuronDiError
from neuron_di.obs import get_logger
from neuron_di.wire import (
    Decoder,
    LegEvent,
    WorkerStatus,
    decode_leg_decoder,
    encode_json,
    prefill_leg_decoder,
)
from neuron_di.wire.codec import LEG_BYTES_MAX
from neuron_di.worker.leg_report import failed
from neuron_di.worker.worker import Worker

_log = get_logger(__name__)

ALIVE_INTERVAL_S = 1.0
# A proxy that reads or acknowledges nothing for so long is gone. It may have a client that does
# not read, which it ends by itself before this.
ORPHAN_TIMEOUT_S = 45.0

LegT = TypeVar("LegT")
RunLeg = Callable[[LegT], AsyncGenerator[LegEvent, None]]


def make_app(worker: Worker) -> web.Application:
    """The worker's routes: those legs its role answers, and its status."""
    app = web.Application(client_max_size=LEG_BYTES_MAX)

    async def status(_: web.Request) -> web.Response:
        body: WorkerStatus = worker.status()
        return web.Response(body=encode_json(body), content_type="application/json")

    app.router.add_get("/status", status)
    if worker.prefill is not None:
        app.router.add_post(
            "/legs/prefill", _leg_handler(worker, prefill_leg_decoder, worker.prefill.run)
        )
    if worker.decode is not None:
        app.router.add_post(
            "/legs/decode", _leg_handler(worker, decode_leg_decoder, worker.decode.run)
        )
    if worker.combined is not None:
        app.router.add_post(
            "/legs/whole", _leg_handler(worker, prefill_leg_decoder, worker.combined.run)
        )
    return app


def _leg_handler(
    worker: Worker, decoder: Decoder[LegT], run: RunLeg[LegT]
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        try:
            if worker.is_draining:
                raise CapacityError("this worker is draining")
            leg = decoder.decode(await request.read())
            _limit_silence(request)
            await answer.prepare(request)
            async with _kept_alive(answer), aclosing(run(leg)) as events:
                async for event in events:
                    await _write(answer, encode_json(event) + b"\n")
        except ConnectionError:
            return answer  # nobody is left to be told
        except NeuronDiError as error:
            await _fail(request, answer, error)
        except Exception:
            _log.exception("leg_crashed", path=request.path)
            await _fail(request, answer, LocalProtocolError("internal error"))
        with contextlib.suppress(ConnectionError):
            await answer.write_eof()
        return answer

    return handle


def _limit_silence(request: web.Request) -> None:
    """Let the kernel end a connection whose other host vanished without a word."""
    if request.transport is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        timeout_ms = round(ORPHAN_TIMEOUT_S * 1000)
        connection = request.transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


@asynccontextmanager
async def _kept_alive(answer: web.StreamResponse) -> AsyncIterator[None]:
    """Write an empty line now and then: a request that queues is not a worker that died."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(ALIVE_INTERVAL_S)
            await answer.write(b"\n")

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def _write(answer: web.StreamResponse, line: bytes) -> None:
    """Write, or give the leg up: ConnectionError when the proxy leaves a full connection unread."""
    try:
        async with asyncio.timeout(ORPHAN_TIMEOUT_S):
            await answer.write(line)
    except TimeoutError:
        raise ConnectionResetError("the proxy does not read") from None


async def _fail(request: web.Request, answer: web.StreamResponse, error: NeuronDiError) -> None:
    _log.info("leg_failed", path=request.path, code=error.code)
    with contextlib.suppress(ConnectionError):
        if not answer.prepared:
            await answer.prepare(request)
        await answer.write(encode_json(failed(error)) + b"\n")
