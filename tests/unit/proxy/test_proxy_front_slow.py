"""Clients that read slowly, leave early, or send too much: who is served to the end, who is not."""

import asyncio
from dataclasses import replace

import h2.connection
import h2.events
import pytest
import uvloop
from leg_ear import closed
from raw_http import RawClient, get, post
from running_proxy import AT_ONCE, RunningProxy
from scripted_worker import finished, parked, play_decode, play_prefill, released, token

from neuron_di.config import FrontOptions, ProxyOptions
from neuron_di.wire import PromptReport
from neuron_di_proxy import server
from neuron_di_proxy.front_connection import PIPELINED_BYTES_MAX, FrontConnection
from neuron_di_proxy.reply import UNREAD_BYTES_MAX
from neuron_di_proxy.service import Exchange

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy")

PATH = "/v1/completions"
WHOLE = {"model": "tiny", "prompt": "hi"}
STREAM = WHOLE | {"stream": True}
MUCH = 16 << 20  # bytes of text: more than the sockets' own buffers hold
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HTTP2_SETTINGS = b"\0\0\0\4\0\0\0\0\0"


@pytest.fixture(scope="module")
def event_loop_policy():
    """The event loop that the proxy's process has; other tests run the front on asyncio's."""
    return uvloop.EventLoopPolicy()


@pytest.fixture
async def raw(cluster):
    async with RawClient(cluster.proxy.address) as client:
        yield client


async def another_proxy(stack, cluster, *, takes_hot=True, limits=AT_ONCE, **front):
    """The same workers behind a proxy with these options."""
    config = ProxyOptions(limits=limits, front=FrontOptions(**front))
    records = cluster.proxy.directory.records
    return await stack.enter_async_context(RunningProxy(config, records, takes_hot=takes_hot))


def say_first(**of_token):
    """A prefill worker whose first token has this."""

    async def script(leg):
        await leg.send(token(leg.first_index, **of_token), parked(), released())

    return script


def compute_until(event, begun):
    """A prefill worker that takes its time."""

    async def script(leg):
        begun.set()
        await event.wait()
        await play_prefill(leg)

    return script


async def read_slowly(reader):
    num_bytes = 0
    while data := await reader.read(256 << 10):
        num_bytes += len(data)
        await asyncio.sleep(0.02)
    return num_bytes


async def test_connections_that_their_clients_closed_count_no_more(stack, playing):
    proxy = await another_proxy(stack, playing, connections_max=4)
    for _ in range(8):
        async with RawClient(proxy.address) as raw:
            raw.send(get("/health"))
            assert (await raw.response()).status == 200


async def test_http2_connections_that_their_clients_closed_count_no_more(stack, playing):
    proxy = await another_proxy(stack, playing, connections_max=4)
    for _ in range(8):
        http2 = h2.connection.H2Connection()
        http2.initiate_connection()
        pseudo = {":method": "GET", ":path": "/health", ":scheme": "http", ":authority": "a"}
        http2.send_headers(1, list(pseudo.items()), end_stream=True)
        async with RawClient(proxy.address) as raw:
            raw.send(http2.data_to_send())
            is_answered = False
            while not is_answered:
                async with asyncio.timeout(10):
                    data = await raw.reader.read(65536)
                assert data
                events = http2.receive_data(data)
                is_answered = any(isinstance(each, h2.events.StreamEnded) for each in events)


async def test_a_failing_connection_does_not_end_the_deadlines_of_others(
    stack, playing, monkeypatch
):
    proxy = await another_proxy(stack, playing, header_timeout_s=0.2)

    def fail(self):
        raise KeyError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(FrontConnection, "_be_late", fail)
        async with RawClient(proxy.address) as raw:
            raw.send(b"POST")
            assert await raw.end() == b""
    async with RawClient(proxy.address) as raw:
        raw.send(b"POST")
        assert (await raw.response()).status == 408


@pytest.mark.parametrize("takes_hot", [True, False], ids=["front", "hypercorn"])
async def test_an_answer_that_nobody_ends_is_broken_off(stack, playing, monkeypatch, takes_hot):
    proxy = await another_proxy(stack, playing, takes_hot=takes_hot, ping_interval_s=0.1)

    async def fail(self, body, reply):
        reply.begin(200, [("content-type", "text/event-stream")], length=None)
        reply.write(b"data: x\n\n")
        raise KeyError("a bug")

    monkeypatch.setattr(Exchange, "answer", fail)
    async with RawClient(proxy.address) as raw:
        raw.send(post(PATH, STREAM))
        assert not (await raw.end()).endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("takes_hot", [True, False], ids=["front", "hypercorn"])
async def test_one_large_event_is_not_what_a_client_leaves_unread(stack, cluster, takes_hot):
    text = "x" * (3 * UNREAD_BYTES_MAX)
    cluster.prefill.script = say_first(prompt=PromptReport(text=text, token_ids=[1]))
    cluster.decode.script = play_decode(5)
    proxy = await another_proxy(stack, cluster, takes_hot=takes_hot)
    async with RawClient(proxy.address) as raw:
        raw.send(post(PATH, STREAM | {"echo": True}))
        response = await raw.response()
    assert len(response.body) > len(text)
    assert response.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("header", ["Connection: keep-alive", "Connection: close"])
async def test_a_client_that_reads_slowly_but_steadily_gets_all(stack, cluster, header):
    cluster.prefill.script = say_first(text="x" * MUCH)
    cluster.decode.script = play_decode(2)
    limits = replace(AT_ONCE, send_timeout_s=1.0)
    # A fraction of the time that this takes: reading is not being idle.
    proxy = await another_proxy(stack, cluster, limits=limits, keep_alive_s=0.1)
    async with RawClient(proxy.address) as raw:
        raw.send(post(PATH, WHOLE, header))
        assert await read_slowly(raw.reader) > MUCH


async def test_who_has_read_all_has_all_the_time_for_the_next_answer(stack, cluster, monkeypatch):
    """A deadline that began while a response was unread ends with the last byte of it."""
    limits = replace(AT_ONCE, send_timeout_s=0.3)
    cluster.prefill.script, cluster.decode.script = play_prefill, play_decode(2)
    proxy = await another_proxy(stack, cluster, limits=limits)
    unsent, is_seen, begun, go_on = [1], *(asyncio.Event() for _ in range(3))

    def look(_):
        is_seen.set()
        return unsent[0]

    monkeypatch.setattr(FrontConnection, "num_unsent", property(look))
    async with RawClient(proxy.address) as raw:
        raw.send(post(PATH, WHOLE))
        assert (await raw.response()).status == 200
        is_seen.clear()
        await is_seen.wait()  # and the deadline runs
        cluster.prefill.script = compute_until(go_on, begun)
        raw.send(post(PATH, STREAM))
        await begun.wait()  # nobody looks at the connection's bytes now
        unsent[0] = 0
        await asyncio.sleep(3 * limits.send_timeout_s)
        go_on.set()
        assert (await raw.response()).body.endswith(b"data: [DONE]\n\n")


async def test_a_drain_waits_for_clients_that_still_read(stack, cluster, monkeypatch):
    monkeypatch.setattr(server, "LAST_WORDS_TIMEOUT_S", 0.05)
    cluster.prefill.script = say_first(text="x" * MUCH)
    cluster.decode.script = play_decode(2)
    proxy = await another_proxy(stack, cluster, limits=replace(AT_ONCE, drain_timeout_s=20))
    async with RawClient(proxy.address) as raw:
        raw.send(post(PATH, WHOLE))
        await raw.read_head()
        proxy.shutdown.set()
        assert await read_slowly(raw.reader) > MUCH


@pytest.mark.parametrize("body", [WHOLE, STREAM], ids=["whole", "stream"])
async def test_an_old_client_that_closes_is_gone(cluster, raw, body):
    raw.send(post(PATH, body, version="1.0"))
    leg = await cluster.prefill.next_leg()
    raw.writer.close()
    await closed(leg)


async def test_a_client_that_leaves_is_noticed_whatever_it_sent_before(cluster, raw):
    raw.send(post(PATH, WHOLE))
    leg = await cluster.prefill.next_leg()
    raw.send(b"x" * (8 * PIPELINED_BYTES_MAX))
    await raw.writer.drain()
    raw.writer.close()
    await closed(leg)


async def test_who_sends_too_much_ahead_gets_its_answer_and_no_other(cluster, raw):
    raw.send(post(PATH, WHOLE))
    leg = await cluster.prefill.next_leg()
    raw.send(b"x" * (PIPELINED_BYTES_MAX + 1))
    for _ in range(3):  # until it has been read
        assert await cluster.proxy.num_running() == 1
    await play_prefill(leg)
    await (await cluster.decode.next_leg()).finish(finished(1))
    response = await raw.response()
    assert (response.status, response.header("connection")) == (200, "close")
    assert await raw.end() == b""


@pytest.mark.parametrize("cut", [1, 18, 20, 23, 24])
async def test_http2_begins_in_pieces(raw, cluster, cut):
    raw.send(HTTP2_PREFACE[:cut])
    await cluster.proxy.num_running()  # until it has been read
    raw.send(HTTP2_PREFACE[cut:] + HTTP2_SETTINGS)
    async with asyncio.timeout(10):
        assert (await raw.reader.readexactly(9))[3:5] == b"\4\0"  # settings of its own
