import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from launch_run import Run
from running_proxy import AT_ONCE, RunningProxy
from scripted_worker import ScriptedWorker, play_decode, play_prefill

from neuron_di.config import LimitOptions, ProxyOptions
from neuron_di_proxy.route import Route
from neuron_di_proxy.worker_client import WorkerClient


class Cluster:
    """One prefill and one decode worker behind a proxy."""

    def __init__(self, prefill: ScriptedWorker, decode: ScriptedWorker, proxy: RunningProxy):
        self.prefill = prefill
        self.decode = decode
        self.proxy = proxy


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def cluster(stack: AsyncExitStack) -> Cluster:
    """Workers that hand every leg to the test."""
    prefill = await stack.enter_async_context(ScriptedWorker("p1", "prefill"))
    decode = await stack.enter_async_context(ScriptedWorker("d1", "decode"))
    proxy = await stack.enter_async_context(
        RunningProxy(ProxyOptions(limits=AT_ONCE), [prefill.record, decode.record])
    )
    return Cluster(prefill, decode, proxy)


@pytest.fixture
async def playing(cluster: Cluster) -> Cluster:
    """Workers that answer every request with five tokens."""
    cluster.prefill.script = play_prefill
    cluster.decode.script = play_decode(5)
    return cluster


@pytest.fixture
async def client(stack: AsyncExitStack) -> WorkerClient:
    return await stack.enter_async_context(WorkerClient(LimitOptions()))


@pytest.fixture
async def prefill(stack: AsyncExitStack) -> ScriptedWorker:
    return await stack.enter_async_context(ScriptedWorker("p1", "prefill"))


@pytest.fixture
async def decode(stack: AsyncExitStack) -> ScriptedWorker:
    return await stack.enter_async_context(ScriptedWorker("d1", "decode"))


@pytest.fixture
async def run(
    client: WorkerClient, prefill: ScriptedWorker, decode: ScriptedWorker
) -> AsyncIterator[Run]:
    """A first attempt over both."""
    run = Run(client, Route(prefill.record, decode.record))
    yield run
    run.task.cancel()
    await asyncio.gather(run.task, return_exceptions=True)
