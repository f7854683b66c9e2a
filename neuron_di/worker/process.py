"""The worker process: load, announce, serve legs, drain, end."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import uvloop

from neuron_di.config import HandOverOptions, WorkerOptions, is_loopback
from neuron_di.errors import ConfigError, LocalProtocolError
from neuron_di.obs import LaunchReport, get_logger, say
from neuron_di.registry import Announcer, RegistryClient
from neuron_di.worker.model import LoadedModel, load_model
from neuron_di.worker.server import listening
from neuron_di.worker.worker import Worker

_log = get_logger(__name__)


def run_worker(options: WorkerOptions) -> None:
    """Run one worker until SIGTERM or SIGINT; it drains first. ConfigError if it cannot start."""
    _check(options.hand_over)
    if not options.insecure and not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} can be reached from other machines, and a worker does whatever "
            "it is asked: listen on loopback, or say --insecure where that network is trusted"
        )
    if options.core is not None:
        _pin(options.core)
    is_child = options.parent_pid is not None

    def on_progress(done_bytes: int, total_bytes: int) -> None:
        if is_child:
            say(LaunchReport(event="loading", done_bytes=done_bytes, total_bytes=total_bytes))

    model = load_model(
        options.model,
        options.model_name,
        options.role,
        options.engine,
        num_siblings=options.num_siblings,
        on_progress=on_progress,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options, model))


def _check(limits: HandOverOptions) -> None:
    if limits.peer_silence_s < 2 * limits.heartbeat_s:
        raise ConfigError(
            f"--peer-silence-s {limits.peer_silence_s:g} is less than two heartbeats "
            f"(--heartbeat-s {limits.heartbeat_s:g}): every link would break"
        )


def _pin(core: int) -> None:
    try:
        os.sched_setaffinity(0, {core})
    except OSError as error:
        raise ConfigError(f"cannot pin this worker to core {core}: {error}") from None


async def _serve(options: WorkerOptions, model: LoadedModel) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    worker = Worker(options, model)
    try:
        async with _served(worker, options), _announced(worker, options) as announcer:
            url = worker.record().url()
            _log.info("ready", worker=worker.worker_id, url=url)
            if options.parent_pid is not None:
                say(LaunchReport(event="ready", url=url, worker_id=worker.worker_id))
            await _first_of(stop, worker.engine_failed)
            worker.set_state("draining")
            if announcer is not None:
                announcer.record_changed()
            if not await worker.drain(options.drain_timeout_s):
                _log.warning("drain_incomplete", num_legs=len(worker.legs))
    finally:
        await worker.close()
    if worker.engine_failed.is_set():
        raise LocalProtocolError("the engine has failed; the log says why")


async def _first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


@contextlib.asynccontextmanager
async def _served(worker: Worker, options: WorkerOptions) -> AsyncIterator[None]:
    async with listening(worker, options.host, options.port) as port:
        worker.api_port = port
        worker.set_state("ready")
        yield


@contextlib.asynccontextmanager
async def _announced(worker: Worker, options: WorkerOptions) -> AsyncIterator[Announcer | None]:
    if options.registry is None:
        yield None
        return
    async with (
        RegistryClient(options.registry) as registry,
        Announcer(registry, worker.record) as announcer,
    ):
        yield announcer
