"""A process of the registry benchmark that works as the product does.

    python -m benchmarks.registry_part '{"role": "watch", "registry": "etcd", …}'

`serve` is the proxy's own registry; `announce` holds some workers' announcers, each with its own
connection; `watch` is a proxy's directory. On one event loop, as in a proxy or worker; commands
are read in a thread beside it.
"""

import asyncio
import contextlib
import functools
import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import uvloop

from benchmarks.registry_seen import (
    Changes,
    Seen,
    answer_commands,
    answer_of_announcer,
    answer_of_watcher,
    say,
)
from neuron_di.config import EtcdOptions
from neuron_di.etcd import open_registry
from neuron_di.registry import Announcer, Directory, EmbeddedRegistry, RegistryServer
from neuron_di.types import Incarnation, WorkerId
from neuron_di.wire import PROTOCOL_VERSION, WorkerRecord


def record_of(worker: str, number: int) -> WorkerRecord:
    """A record as a real decode worker's; `number` stands in its load."""
    return WorkerRecord(
        protocol_version=PROTOCOL_VERSION,
        worker_id=WorkerId(worker),
        incarnation=Incarnation("5f3c9a7e1b2d4c6f8a90b1c2d3e4f506"),
        role="decode",
        state="ready",
        pid=4711,
        model="meta-llama/Llama-3.1-8B-Instruct",
        model_digest="0123456789abcdef" * 4,
        layout_digest="fedcba9876543210" * 4,
        context_tokens=131_072,
        host="10.0.0.1",
        api_port=int(worker.rpartition("-")[2]),
        signal_host="10.0.0.1",
        signal_port=0,
        signal_key="a" * 40,
        transfer=["shm@0123abcd"],
        started_unix_s=1_790_000_000.0,
        numerics="cpu-f32",
        connections=[f"prefill-{index}" for index in range(4)],
        num_legs=number,
        slots=64,
        num_vocab=128_256,
    )


def opened(settings: dict[str, Any]) -> Any:
    """The registry that these settings name; entered, it can announce and watch."""
    if settings["registry"] == "embedded":
        return open_registry(f"tcp://{settings['address']}", EtcdOptions())
    return open_registry(None, EtcdOptions(etcd=(settings["address"],)))


async def serve(settings: dict[str, Any]) -> None:
    async with RegistryServer(EmbeddedRegistry(), f"tcp://{settings['address']}"):
        say("ready")
        await asyncio.Event().wait()


async def announce(settings: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    announcers: dict[str, Announcer] = {}

    def on_change(worker: str) -> None:
        loop.call_soon_threadsafe(announcers[worker].record_changed)

    changes = Changes(settings["workers"], on_change)
    async with AsyncExitStack() as stack:
        registries = [await stack.enter_async_context(opened(settings)) for _ in changes.numbers]

        async def begin() -> None:
            for worker, registry in zip(changes.numbers, registries, strict=True):
                # What is announced is a copy: it must not change under the announcer.
                record = functools.partial(_record_now, changes, worker)
                announcers[worker] = Announcer(registry, record, ttl_s=settings["ttl_s"])
                await stack.enter_async_context(announcers[worker])

        def begin_from_thread() -> None:
            asyncio.run_coroutine_threadsafe(begin(), loop).result()

        await asyncio.to_thread(
            answer_commands,
            lambda command: answer_of_announcer(command, changes, begin_from_thread),
        )


def _record_now(changes: Changes, worker: str) -> WorkerRecord:
    return record_of(worker, changes.numbers[worker])


async def watch(settings: dict[str, Any]) -> None:
    seen = Seen()
    async with opened(settings) as registry, Directory(registry) as directory:

        async def follow() -> None:
            epoch = 0
            while True:
                for record in directory.workers():
                    seen.note(record.worker_id, record.num_legs)
                epoch = await directory.wait_changed(epoch)

        following = asyncio.create_task(follow())
        try:
            await asyncio.to_thread(
                answer_commands, lambda command: answer_of_watcher(command, seen)
            )
        finally:
            following.cancel()


ROLES = {"serve": serve, "announce": announce, "watch": watch}

if __name__ == "__main__":
    chosen = json.loads(sys.argv[1])
    with (
        contextlib.suppress(KeyboardInterrupt),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(ROLES[chosen["role"]](chosen))
