from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from running_proxy import RunningProxy
from scripted_worker import ScriptedWorker, play_decode, play_prefill

from neuron_di_proxy.config import ProxyConfig


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
        RunningProxy(ProxyConfig(drain_timeout_s=2), [prefill.record, decode.record])
    )
    return Cluster(prefill, decode, proxy)


@pytest.fixture
async def playing(cluster: Cluster) -> Cluster:
    """Workers that answer every request with five tokens."""
    cluster.prefill.script = play_prefill
    cluster.decode.script = play_decode(5)
    return cluster
