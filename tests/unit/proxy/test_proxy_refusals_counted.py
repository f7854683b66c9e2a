"""Whatever the proxy refuses shows in its metrics, whichever way the request came."""

import asyncio

import pytest
from key_files import write_key_file
from prometheus_client.parser import text_string_to_metric_families
from raw_http import RawClient, post
from running_proxy import AT_ONCE, RunningProxy, until

from neuron_di.config import FrontOptions, ProxyOptions
from neuron_di_proxy import socket_rest
from neuron_di_proxy.key_file import KeyRecord, make_key

PATH = "/v1/completions"
LATE_ACK_S = 0.3  # after which a client's kernel has said what it received
WHOLE = {"model": "tiny", "prompt": "hi"}
FRONT = FrontOptions(
    header_timeout_s=0.3, body_timeout_s=0.3, body_bytes_max=4096, connections_max=8
)
# What is sent, and the status and the code it is refused with.
BY_BOTH_WAYS = {
    "packed": (post(PATH, WHOLE, "Content-Encoding: gzip"), 415, "unsupported_content_encoding"),
    "large": (post(PATH, b" " * 5000), 413, "request_too_large"),
    "late body": (post(PATH, b"{}")[:-1], 408, "request_timeout"),
    "wrong id": (post(PATH, WHOLE, "X-Request-Id: not good"), 400, "invalid_request"),
    "wrong field": (post(PATH, WHOLE | {"n": 0}), 400, "invalid_request"),
    "unknown model": (post(PATH, WHOLE | {"model": "x"}), 404, "model_not_found"),
}
# Of heads that hypercorn cannot read it tells nobody.
BY_THE_FRONT = {
    "no head": (b"nothing\r\n\r\n", 400, "invalid_request"),
    "large head": (
        b"POST / HTTP/1.1\r\nA: " + b"a" * 20_000,
        431,
        "request_header_fields_too_large",
    ),
    "late head": (b"POST / HT", 408, "request_timeout"),
}
WAYS = [
    *((case, takes_hot) for case in BY_BOTH_WAYS for takes_hot in (True, False)),
    *((case, True) for case in BY_THE_FRONT),
]


async def scrape(proxy):
    async with proxy.http.get("/metrics") as response:
        text = await response.text()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


async def refused(proxy):
    """What was refused or failed, by code."""
    return {
        sample.labels["code"]: sample.value
        for sample in await scrape(proxy)
        if sample.name == "neuron_di_requests_total"
        and sample.labels["outcome"] == "error"
        and sample.value
    }


async def connections(proxy):
    """(open, refused)"""
    values = {sample.name: sample.value for sample in await scrape(proxy) if not sample.labels}
    return values["neuron_di_connections"], values["neuron_di_connections_refused_total"]


@pytest.mark.parametrize(("case", "takes_hot"), WAYS)
async def test_a_refusal_is_counted_once(playing, stack, case, takes_hot):
    data, status, code = {**BY_BOTH_WAYS, **BY_THE_FRONT}[case]
    records = playing.proxy.directory.records
    config = ProxyOptions(limits=AT_ONCE, front=FRONT)
    proxy = await stack.enter_async_context(RunningProxy(config, records, takes_hot=takes_hot))
    async with RawClient(proxy.address) as raw:
        raw.send(data)
        assert (await raw.response()).status == status
    assert await refused(proxy) == {code: 1}


@pytest.mark.parametrize("takes_hot", [True, False])
async def test_a_wrong_key_is_counted_once(playing, stack, tmp_path, takes_hot):
    key_id, text, digest = make_key()
    path = tmp_path / "keys.toml"
    write_key_file(path, {key_id: KeyRecord(tenant="t", sha256=digest, operator=True)})
    config = ProxyOptions(limits=AT_ONCE, front=FrontOptions(api_keys=str(path)))
    records = playing.proxy.directory.records
    proxy = await stack.enter_async_context(RunningProxy(config, records, takes_hot=takes_hot))
    proxy.http.headers["Authorization"] = f"Bearer {text}"
    async with RawClient(proxy.address) as raw:
        raw.send(post(PATH, WHOLE))
        assert (await raw.response()).status == 401
    assert await refused(proxy) == {"invalid_api_key": 1}


async def test_connections_are_counted_open_and_refused(playing, stack, monkeypatch):
    monkeypatch.setattr(socket_rest, "QUIET_S", 0.0)
    config = ProxyOptions(limits=AT_ONCE, front=FrontOptions(connections_max=3))
    records = playing.proxy.directory.records
    proxy = await stack.enter_async_context(RunningProxy(config, records))
    assert await connections(proxy) == (1, 0), "asked on one that rests then"
    request = post(PATH, WHOLE, "Connection: close")
    busy = []
    for _ in range(3):  # the last of them takes the place of the resting one
        await asyncio.sleep(LATE_ACK_S)
        busy.append(await stack.enter_async_context(RawClient(proxy.address)))
        busy[-1].send(request[:-5])
    await asyncio.sleep(LATE_ACK_S)
    for _ in range(3):
        async with RawClient(proxy.address) as raw:
            assert await raw.end() == b""
    first, *others = busy
    first.send(request[-5:])
    assert (await first.response()).status == 200
    assert await first.end() == b""
    assert await connections(proxy) == (3, 4)
    for raw in others:
        raw.send(request[-5:])
        assert (await raw.response()).status == 200
        assert await raw.end() == b""

    async def is_left() -> bool:
        return await connections(proxy) == (1, 4)

    await until(is_left)
