"""HTTP/2: how streams end that were not read or were reset, and connections after them."""

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from h2_client import H2Client
from raw_http import RawClient
from running_proxy import AT_ONCE, RunningProxy
from scripted_worker import finished, token

from neuron_di.config import FrontOptions, ProxyOptions

ASKED = {"model": "tiny", "prompt": "hi", "max_tokens": 2000}
WHOLE = json.dumps(ASKED).encode()
STREAM = json.dumps(ASKED | {"stream": True}).encode()
PATH = "/v1/completions"
PATIENCE_S = 30


def say_much(num_tokens, size):
    async def script(leg):
        tokens = (token(index, "x" * size) for index in range(1, num_tokens))
        await leg.finish(*tokens, finished(num_tokens))

    return script


async def with_limits(stack, cluster, front=FrontOptions(), **limits):  # noqa: B008
    config = ProxyOptions(limits=replace(AT_ONCE, **limits), front=front)
    return await stack.enter_async_context(RunningProxy(config, cluster.proxy.directory.records))


async def test_a_stream_whose_client_stalls_ends_with_an_error(stack, playing):
    """And the connection goes on: without a word the client would wait for ever."""
    playing.decode.script = say_much(60, 3000)
    proxy = await with_limits(stack, playing, send_timeout_s=0.3)
    async with RawClient(proxy.address) as raw, asyncio.timeout(PATIENCE_S):
        client = H2Client(raw, window=100)
        client.ask(1, PATH, STREAM)
        await client.until_over(1)
        client.ask(3, "/live")
        await client.until_over(3)
    assert client.reset == {1}
    assert len(client.bodies[1]) == 100
    assert (client.statuses[3], client.ended) == (200, {3})


async def test_who_reads_a_large_whole_answer_slowly_but_steadily_gets_all(stack, playing):
    """In much more time than a client has to read something."""
    playing.decode.script = say_much(30, 50_000)
    proxy = await with_limits(stack, playing, send_timeout_s=1.0)
    async with RawClient(proxy.address) as raw, asyncio.timeout(PATIENCE_S):
        client = H2Client(raw, window=65536)
        client.ask(1, PATH, WHOLE)
        num_read = 0
        while 1 not in client.ended:
            assert await client.hear()
            assert not client.reset
            if more := len(client.bodies.get(1, b"")) - num_read:
                num_read += more
                await asyncio.sleep(0.06)
                if 1 not in client.ended:
                    client.open_window(1, more)
    assert len(json.loads(client.bodies[1])["choices"][0]["text"]) > 29 * 50_000


async def reset(client):
    client.ask(1, "/live")
    client.reset_stream(1)


async def reset_in_mid_answer(client):
    client.ask(1, PATH, STREAM)
    while not client.bodies.get(1):
        await client.hear()
    client.reset_stream(1)


async def ask_for_a_websocket(client):
    client.ask(1, "/live", method="CONNECT")


@pytest.mark.parametrize("misuse", [reset, reset_in_mid_answer, ask_for_a_websocket])
async def test_b06_a_connection_without_a_request_ends_whatever_was_before(stack, playing, misuse):
    front = FrontOptions(keep_alive_s=0.3)
    playing.decode.script = say_much(200, 3000)
    proxy = await with_limits(stack, playing, front)
    async with RawClient(proxy.address) as raw, asyncio.timeout(PATIENCE_S):
        client = H2Client(raw, window=5000)
        await misuse(client)
        while await client.hear():
            pass
    assert await proxy.num_running() == 0


async def test_who_leaves_with_the_last_byte_of_a_body_has_nothing_computed(cluster):
    """Of workers that never end an answer by themselves."""
    head = {":method": "POST", ":path": PATH, ":scheme": "http", ":authority": "a"}
    head["content-type"] = "application/json"
    streams = range(1, 21, 2)
    async with RawClient(cluster.proxy.address) as raw, asyncio.timeout(PATIENCE_S):
        client = H2Client(raw)
        for stream in streams:
            client.state.send_headers(stream, list(head.items()))
            client.state.send_data(stream, WHOLE)
        client.ask(21, "/live")
        await client.until_over(21)  # all of them have begun by now
        for stream in streams:
            client.state.end_stream(stream)
            client.state.reset_stream(stream)
        client.ask(23, "/live")
        await client.until_over(23)
        while await cluster.proxy.num_running():
            pass


async def test_what_was_not_sent_of_broken_streams_is_not_kept(stack, playing, monkeypatch):
    """Though another one goes on, on the same connection."""
    from neuron_di_proxy import hypercorn_side

    kept = []
    make = hypercorn_side._Buffers.__setitem__

    def note(buffers, stream_id, buffer):
        make(buffers, stream_id, buffer)
        kept.append(buffers)

    monkeypatch.setattr(hypercorn_side._Buffers, "__setitem__", note)
    playing.decode.script = say_much(30, 50_000)
    proxy = await with_limits(stack, playing, send_timeout_s=0.3)
    async with RawClient(proxy.address) as raw, asyncio.timeout(PATIENCE_S):
        client = H2Client(raw, window=100)
        for stream in range(1, 21, 2):
            client.ask(stream, PATH, WHOLE)
        for stream in range(1, 21, 2):
            await client.until_over(stream)
        client.ask(21, "/live")
        await client.until_over(21)
        assert client.reset == set(range(1, 21, 2))
        assert sum(len(each.buffer) for each in kept[0].values()) == 0


async def test_limits_of_bodies_are_the_same_however_a_path_is_written(stack, playing):
    proxy = await with_limits(stack, playing)
    large = json.dumps({"model": "tiny", "prompt": "x" * 100_000}).encode()
    async with AsyncExitStack() as own:
        raw = await own.enter_async_context(RawClient(proxy.address))
        client = H2Client(raw)
        for stream, path in enumerate((PATH, "/" + PATH, "/v1/%63ompletions")):
            client.ask(2 * stream + 1, path, large)
            await client.until_over(2 * stream + 1)
    assert set(client.statuses.values()) == {200}
