"""Workers that come and go by the dozen, and what of them is still in this process afterwards.

Proxy, workers, links and sockets are real; only that they are one process is not, so that what one
leaves behind can be counted: tasks, descriptors, sockets of ZMQ, threads, and objects of each kind.
"""

import asyncio
import gc
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import zmq

from neuron_di.config import EngineOptions, EtcdOptions, HandOverOptions, WorkerOptions
from neuron_di.etcd.open_registry import RegistryLike
from neuron_di.types import Role
from neuron_di.worker import Worker, load_model
from neuron_di.worker.orders import Orders
from neuron_di.worker.process import _Process
from neuron_di.worker.role_epochs import EpochParts, run_epochs
from neuron_di.worker.server import bind

START_TIMEOUT_S = 30.0
# How kinds begin of which not one may be left.
EXACT = ("task ", "descriptor", "socket of ZMQ", "thread", "mapped pool")
ENGINE = EngineOptions(
    block_size=4, num_blocks=256, threads=1, chunk_tokens=16, prefill_batch=4, decode_batch=4
)
HAND_OVER = HandOverOptions(heartbeat_s=0.2, peer_silence_s=1.5, peer_connect_timeout_s=1.5)


@asynccontextmanager
async def passing(
    folder: Path, name: str, role: Role, registry: RegistryLike, etcd: EtcdOptions
) -> AsyncIterator[Worker]:
    """A worker from its start to the end of its drain, as its process would run it."""
    options = WorkerOptions(
        model=str(folder),
        role=role,
        worker_id=name,
        model_name="m",
        drain_timeout_s=START_TIMEOUT_S,
        etcd=etcd,
        engine=ENGINE,
        hand_over=HAND_OVER,
    )
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    ready: asyncio.Future[Worker] = loop.create_future()
    model = await loop.run_in_executor(None, load_model, str(folder), "m", role, ENGINE)
    with bind("127.0.0.1", 0) as sock:
        options = replace(options, port=sock.getsockname()[1])
        process = _Process(options, model, sock, registry)
        parts = EpochParts(
            assemble=process.assemble,
            listening=process.listening,
            announced=process.announced,
            on_ready=ready.set_result,
        )
        orders = Orders(process.check_role, drain_timeout_s=options.drain_timeout_s)
        running = asyncio.create_task(run_epochs(role, orders, parts, stop))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not ready.done() and not running.done():  # noqa: ASYNC110 - it is soon
                    await asyncio.sleep(0.01)
            if running.done():
                running.result()
            yield ready.result()
        finally:
            stop.set()
            await running


def census() -> Counter[str]:
    """How many there are of everything that somebody could forget to let go of."""
    gc.collect()
    counted: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        if str(kind.__module__).startswith("neuron_di"):
            counted[f"{kind.__module__}.{kind.__qualname__}"] += 1
        elif issubclass(kind, zmq.Socket) and not each.closed:
            counted["socket of ZMQ"] += 1
    for task in asyncio.all_tasks():
        counted[f"task {getattr(task.get_coro(), '__qualname__', '')}"] += 1
    counted["descriptor"] = len(os.listdir("/proc/self/fd"))
    # Those of the loop's pool stay for its next user.
    counted["thread"] = sum(not t.name.startswith("asyncio_") for t in threading.enumerate())
    with open("/proc/self/maps", encoding="utf-8") as maps:
        counted["mapped pool"] = sum("neuron-di-kv" in line for line in maps)
    return counted
