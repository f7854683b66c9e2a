import asyncio
import contextlib
import json
import socket
from dataclasses import replace

import aiohttp
import pytest
from running_proxy import AT_ONCE, RunningProxy
from scripted_worker import finished, parked, released, token

from neuron_di.config import FrontOptions, ProxyOptions
from neuron_di.errors import ConfigError
from neuron_di_proxy.server import bind

STREAM = {"model": "tiny", "prompt": "hi", "stream": True}


def test_a_port_in_use_is_said():
    with contextlib.closing(bind(ProxyOptions(port=0))) as sock:
        port = sock.getsockname()[1]
        assert port > 0
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*in use"):
            bind(ProxyOptions(port=port))


def test_an_address_that_is_not_ours_is_said():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*address of this machine"):
        bind(ProxyOptions(host="192.0.2.1", port=0, front=FrontOptions(insecure=True)))


@pytest.mark.parametrize("host", ["x" * 64, "256.0.0.1.", "a b"])
def test_a_name_that_is_none_is_said_before_who_could_reach_it(host):
    with pytest.raises(ConfigError, match=f"cannot listen on {host}: .*address of this machine"):
        bind(ProxyOptions(host=host, port=0))


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only some systems have it")
def test_the_system_ends_connections_that_are_never_read():
    config = ProxyOptions(port=0, limits=replace(AT_ONCE, send_timeout_s=3.0))
    with contextlib.closing(bind(config)) as sock:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 6000


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_b56_an_address_that_others_reach_needs_keys_or_an_operator_who_insists(host):
    with pytest.raises(ConfigError, match=f"{host} can be reached.*--api-keys.*--insecure"):
        bind(ProxyOptions(host=host, port=0))


def test_b56_an_operator_who_insists_serves_everybody():
    config = ProxyOptions(host="0.0.0.0", port=0, front=FrontOptions(insecure=True))
    with contextlib.closing(bind(config)) as sock:
        assert sock.getsockname()[0] == "0.0.0.0"


def test_b56_with_keys_any_address_will_do():
    config = ProxyOptions(host="0.0.0.0", port=0, front=FrontOptions(api_keys="keys.toml"))
    with contextlib.closing(bind(config)) as sock:
        assert sock.getsockname()[0] == "0.0.0.0"


@pytest.mark.parametrize(
    ("host", "front", "warns"),
    [
        ("0.0.0.0", {}, True),
        ("127.0.0.1", {}, False),
        ("0.0.0.0", {"tls_cert": "cert.pem", "tls_key": "key.pem"}, False),
    ],
)
def test_b56_keys_that_cross_a_network_readable_are_warned_of(host, front, warns, caplog):
    config = ProxyOptions(host=host, port=0, front=FrontOptions(api_keys="keys.toml", **front))
    bind(config).close()
    assert ("keys_in_the_clear" in caplog.text) == warns


def test_b56_without_options_only_this_machine_is_served():
    assert ProxyOptions().host == "127.0.0.1"
    for host in ("127.0.0.1", "127.0.0.2", "localhost"):
        with contextlib.closing(bind(ProxyOptions(host=host, port=0))) as sock:
            assert sock.getsockname()[0].startswith("127.")


def test_several_processes_share_a_port_that_no_other_proxy_has():
    config = ProxyOptions(port=0, front=FrontOptions(processes=2))
    with contextlib.closing(bind(config)) as first:
        same = replace(config, port=first.getsockname()[1])
        with contextlib.closing(bind(same, is_first=False)) as second:
            assert second.getsockname() == first.getsockname()
        with pytest.raises(ConfigError, match="in use"):
            bind(same)


@pytest.mark.skipif(not socket.has_ipv6, reason="this host has no IPv6")
def test_ipv6():
    with contextlib.closing(bind(ProxyOptions(host="::1", port=0))) as sock:
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
    config = ProxyOptions(limits=replace(AT_ONCE, drain_timeout_s=0.05))
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
