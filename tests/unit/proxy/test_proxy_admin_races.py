"""Several proxies let workers go at the same time: whoever asks, one of each role stays.

Real workers, on the loop of the test; real proxies, which know nothing of each other.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from running_proxy import AT_ONCE, RunningProxy, until
from scripted_worker import make_record

from neuron_di.config import EngineOptions, ProxyOptions, WorkerOptions
from neuron_di.testing import write_random_checkpoint
from neuron_di.types import Incarnation, Role
from neuron_di.wire.admin import PrepareDrain, PrepareRole
from neuron_di.worker import Worker, load_model
from neuron_di.worker.orders import Orders
from neuron_di.worker.role_epochs import EpochParts, run_epochs
from neuron_di.worker.server import bind, listening

ENGINE = EngineOptions(
    block_size=4, threads=1, chunk_tokens=16, prefill_batch=2, decode_batch=2, context_tokens=64
)


class LiveWorker:
    """A decode worker that takes orders. `running` ends with it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.sock = bind("127.0.0.1", 0)
        self.stop = asyncio.Event()
        self.worker: Worker
        self.orders = Orders(lambda _: None, drain_timeout_s=5.0)
        port = self.sock.getsockname()[1]
        model = load_model(str(folder), "tiny", "decode", ENGINE)

        async def assemble(role: Role) -> Worker:
            options = WorkerOptions(
                model=str(folder), role=role, worker_id=name, port=port, engine=ENGINE
            )
            self.worker = Worker(options, model)
            return self.worker

        parts = EpochParts(
            assemble=assemble,
            listening=lambda worker, orders: listening(
                worker, "127.0.0.1", port, orders=orders, sock=self.sock
            ),
            announced=lambda _: nullcontext(None),
            on_ready=lambda _: self.is_ready.set(),
        )
        self.is_ready = asyncio.Event()
        self.running = asyncio.create_task(run_epochs("decode", self.orders, parts, self.stop))
        self.running.add_done_callback(lambda _: self.sock.close())  # as a process' end does

    async def end(self) -> None:
        self.stop.set()
        await self.running


class Cluster:
    """Two decode workers, and two proxies that list both and a prefill worker beside them."""

    workers: list[LiveWorker]
    proxies: list[RunningProxy]

    async def order(self, proxy: int, **fields: Any) -> str:
        """What the last line of a drain says, or the code of its refusal."""
        async with self.proxies[proxy].http.post("/admin/drain", json=fields) as response:
            lines = [json.loads(line) async for line in response.content]
        return lines[-1].get("phase") or lines[-1]["error"]["code"]

    def forget(self, number: int) -> None:
        """The registry has lost a worker, as it does when its lease is revoked."""
        name = self.workers[number].worker.worker_id
        for proxy in self.proxies:
            records = proxy.directory.records
            proxy.directory.records = [each for each in records if each.worker_id != name]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    write_random_checkpoint(tmp_path, "llama")
    cluster = Cluster()
    async with AsyncExitStack() as stack:
        cluster.workers = [LiveWorker(tmp_path, name) for name in ("d0", "d1")]
        for live in cluster.workers:
            stack.push_async_callback(live.end)
            await live.is_ready.wait()
        records = [each.worker.record() for each in cluster.workers]
        prefill = make_record("p", "prefill", 1, model="tiny")
        prefill = msgspec.structs.replace(prefill, model_digest=records[0].model_digest)
        config = ProxyOptions(limits=AT_ONCE)
        cluster.proxies = [
            await stack.enter_async_context(RunningProxy(config, [prefill, *records]))
            for _ in range(2)
        ]
        for proxy in cluster.proxies:
            await until(partial(_are_up, proxy))
        yield cluster


async def _are_up(proxy: RunningProxy) -> bool:
    status = (await proxy.get("/status"))[1]
    health = {each["record"]["worker_id"]: each["health"] for each in status["workers"]}
    return (health["d0"], health["d1"]) == ("up", "up")


async def test_two_proxies_do_not_let_the_last_two_go(cluster: Cluster) -> None:
    said = await asyncio.gather(cluster.order(0, worker="d0"), cluster.order(1, worker="d1"))
    assert "last_worker" in said
    assert not all(live.running.done() for live in cluster.workers)
    for live, words in zip(cluster.workers, said, strict=True):
        if words == "last_worker":  # as if nobody had asked
            status = live.worker.status()
            assert (status.record.state, status.is_leaving) == ("ready", False)


async def test_one_that_is_about_to_leave_elsewhere_does_not_count(cluster: Cluster) -> None:
    other = cluster.workers[1]
    order = PrepareDrain(incarnation=Incarnation(other.worker.record().incarnation))
    ticket = other.orders.prepare_drain(order).ticket
    assert ticket is not None
    assert await cluster.order(0, worker="d0") == "last_worker"
    other.orders.abort(ticket)
    following = asyncio.create_task(cluster.order(0, worker="d0"))
    await cluster.workers[0].running
    cluster.forget(0)
    assert await following == "done"


async def test_two_drains_of_one_worker_are_one(cluster: Cluster) -> None:
    following = asyncio.gather(cluster.order(0, worker="d0"), cluster.order(1, worker="d0"))
    await cluster.workers[0].running
    cluster.forget(0)
    assert await following == ["done", "done"]


async def test_what_is_meant_is_done_whatever_is_prepared(cluster: Cluster) -> None:
    live = cluster.workers[0]
    incarnation = live.worker.record().incarnation
    live.orders.prepare(PrepareRole(incarnation=incarnation, role="prefill"))
    assert await cluster.order(0, worker="d0") == "order_in_progress"
    following = asyncio.create_task(cluster.order(0, worker="d0", force=True))
    await live.running
    cluster.forget(0)
    assert await following == "done"
