"""HTTP/2 clients that do not read: their slots are free in time, and little waits for them."""

import asyncio
import json
from dataclasses import replace

import h2.connection
import h2.events
import h2.settings
import pytest
from raw_http import RawClient, post
from running_proxy import AT_ONCE, RunningProxy
from scripted_worker import finished, play_prefill, token

from neuron_di.config import FrontOptions, ProxyOptions
from neuron_di_proxy import socket_rest
from neuron_di_proxy.hypercorn_side import _Buffer

ASKED = {"model": "tiny", "prompt": "hi", "max_tokens": 2000}
BODY = json.dumps(ASKED | {"stream": True}).encode()
PATIENCE_S = 30


class Client:
    """A connection with one stream. Its window takes 100 bytes until it is opened."""

    def __init__(self, raw: RawClient) -> None:
        self.raw = raw
        self.state = h2.connection.H2Connection()
        self.state.initiate_connection()
        self.state.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 100})
        pseudo = {":method": "POST", ":path": "/v1/completions", ":scheme": "http"}
        pseudo[":authority"] = "a"
        self.state.send_headers(1, [*pseudo.items(), ("content-type", "application/json")])
        self.state.send_data(1, BODY, end_stream=True)
        raw.send(self.state.data_to_send())

    async def text(self, window: int) -> bytes:
        """All of the stream, through a window of so many bytes that is opened again and again."""
        self.state.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.raw.send(self.state.data_to_send())
        content = b""
        while data := await self.raw.reader.read(65536):
            for event in self.state.receive_data(data):
                if isinstance(event, h2.events.DataReceived):
                    content += event.data
                    size = event.flow_controlled_length
                    self.state.acknowledge_received_data(size, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded):
                    return content
            self.raw.send(self.state.data_to_send())
        raise AssertionError("the connection ended before the response")


@pytest.fixture
async def impatient(stack, cluster):
    limits = replace(AT_ONCE, send_timeout_s=0.3)
    records = cluster.proxy.directory.records
    return await stack.enter_async_context(RunningProxy(ProxyOptions(limits=limits), records))


@pytest.mark.parametrize("size", [20, 60_000])
async def test_b25_a_client_that_reads_nothing_leaves_its_slot(cluster, impatient, size):
    cluster.prefill.script = play_prefill
    num_sent = 0

    async def endless(leg):
        nonlocal num_sent
        while not leg.closed.is_set():
            num_sent += 1
            await leg.send(token(num_sent, "x" * size))
            await asyncio.sleep(0)

    cluster.decode.script = endless
    async with RawClient(impatient.address) as raw:
        Client(raw)
        leg = await cluster.decode.next_leg()
        async with asyncio.timeout(PATIENCE_S):
            await leg.closed.wait()
            while await impatient.num_running():
                pass


async def test_who_reads_slowly_gets_all(playing):
    texts = [f"{index}-" + "x" * 9000 for index in range(1, 30)]

    async def many(leg):
        await leg.finish(
            *(token(index, text) for index, text in enumerate(texts, 1)), finished(len(texts) + 1)
        )

    playing.decode.script = many
    async with RawClient(playing.proxy.address) as raw, asyncio.timeout(PATIENCE_S):
        content = (await Client(raw).text(window=3000)).decode()
    assert content.endswith("data: [DONE]\n\n")
    assert [text in content for text in texts] == [True] * len(texts)


async def test_b06_connections_that_rest_keep_nobody_out(stack, playing, monkeypatch):
    monkeypatch.setattr(socket_rest, "QUIET_S", 0.0)
    front = FrontOptions(connections_max=4)
    records = playing.proxy.directory.records
    proxy = await stack.enter_async_context(
        RunningProxy(ProxyOptions(limits=AT_ONCE, front=front), records)
    )
    raws = []
    for _ in range(8):
        raws.append(raw := await stack.enter_async_context(RawClient(proxy.address)))
        client = Client(raw)
        async with asyncio.timeout(PATIENCE_S):
            assert (await client.text(window=3000)).endswith(b"data: [DONE]\n\n")
    async with asyncio.timeout(PATIENCE_S):
        while await raws[0].reader.read(65536):
            pass  # it ends
    one_more = await stack.enter_async_context(RawClient(proxy.address))
    one_more.send(post("/v1/completions", {"model": "tiny", "prompt": "hi"}))
    assert (await one_more.response()).status == 200


async def test_whoever_writes_waits_until_most_was_taken():
    from hypercorn.asyncio.worker_context import EventWrapper

    buffer = _Buffer(EventWrapper)
    await buffer.push(b"x" * 30_000)  # there is room
    writing = asyncio.create_task(buffer.push(b"y" * 30_000))
    for taken in (0, 0, 20_000, 20_000):
        assert len(await buffer.pop(taken)) == taken
        await asyncio.sleep(0)
        assert not writing.done()
    await buffer.pop(10_000)
    await writing
    assert await buffer.pop(20_000) == b"y" * 10_000
