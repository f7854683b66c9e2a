import asyncio
import contextlib
import json
import socket
from dataclasses import replace

import aiohttp
import pytest
from running_proxy import AT_ONCE, RunningProxy
from scripted_worker import finished, parked, released, token

from neuron_di.errors import ConfigError
from neuron_di_proxy.config import ProxyConfig
from neuron_di_proxy.server import bind

STREAM = {"model": "tiny", "prompt": "hi", "stream": True}


def test_a_port_in_use_is_said():
    with contextlib.closing(bind(ProxyConfig(port=0))) as sock:
        port = sock.getsockname()[1]
        assert port > 0
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*in use"):
            bind(ProxyConfig(port=port))


def test_an_address_that_is_not_ours_is_said():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        bind(ProxyConfig(host="192.0.2.1", port=0))


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only some systems have it")
def test_the_system_ends_connections_that_are_never_read():
    config = ProxyConfig(port=0, limits=replace(AT_ONCE, send_timeout_s=3.0))
    with contextlib.closing(bind(config)) as sock:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 6000


@pytest.mark.skipif(not socket.has_ipv6, reason="this host has no IPv6")
def test_ipv6():
    with contextlib.closing(bind(ProxyConfig(host="::1", port=0))) as sock:
        assert sock.family == socket.AF_INET6


async def test_draining_lets_running_requests_end_and_takes_no_new_ones(cluster):
    proxy = cluster.proxy
    opening = asyncio.create_task(proxy.http.post("/v1/completions", json=STREAM))
    prefill_leg, decode_leg = await cluster.prefill.next_leg(), await cluster.decode.next_leg()
    await prefill_leg.finish(token(0), parked(), released())
    async with await opening as response:
        proxy.shutdown.set()
        while (await proxy.get("/health"))[0] == 200:
            pass
        async with proxy.http.post("/v1/completions", json=STREAM) as refused:
            assert refused.status == 503
            assert "shutting down" in (await refused.json())["error"]["message"]
        await decode_leg.finish(token(1), finished(2))
        assert (await response.text()).endswith("data: [DONE]\n\n")
    await proxy.task
    with pytest.raises(aiohttp.ClientConnectionError):
        await proxy.http.get("/health")


async def test_a_request_that_outlives_the_drain_is_told_so(cluster, stack):
    config = ProxyConfig(limits=replace(AT_ONCE, drain_timeout_s=0.05))
    proxy = await stack.enter_async_context(RunningProxy(config, cluster.proxy.directory.records))
    opening = asyncio.create_task(proxy.http.post("/v1/completions", json=STREAM))
    prefill_leg, decode_leg = await cluster.prefill.next_leg(), await cluster.decode.next_leg()
    await prefill_leg.send(token(0), parked())
    async with await opening as response:
        proxy.shutdown.set()
        *_, last = (await response.text()).strip().split("\n\n")
        assert "error" in json.loads(last.removeprefix("data: "))
    await prefill_leg.closed.wait()
    await decode_leg.closed.wait()
    await proxy.task
