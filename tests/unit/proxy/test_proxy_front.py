"""One connection to the front: its requests in order, its answers as they come, its end."""

import asyncio
import json

import pytest
import uvloop
from raw_http import RawClient, get, post
from running_proxy import AT_ONCE, RunningProxy, until
from scripted_worker import finished, parked, play_prefill, released, token

from neuron_di.config import FrontOptions, ProxyOptions
from neuron_di_proxy import front_connection
from neuron_di_proxy.front_connection import PIPELINED_BYTES_MAX
from neuron_di_proxy.reply import PING

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy")

PATH = "/v1/completions"
WHOLE = {"model": "tiny", "prompt": "hi"}
STREAM = WHOLE | {"stream": True}
PING_CHUNK = b"%x\r\n%b\r\n" % (len(PING), PING)


@pytest.fixture
async def raw(cluster):
    async with RawClient(cluster.proxy.address) as client:
        yield client


@pytest.fixture(scope="module")
def event_loop_policy():
    """The event loop that the proxy's process has; other tests run the front on asyncio's."""
    return uvloop.EventLoopPolicy()


async def another_proxy(stack, cluster, **front):
    """The same workers behind a proxy with these options."""
    config = ProxyOptions(limits=AT_ONCE, front=FrontOptions(**front))
    return await stack.enter_async_context(RunningProxy(config, cluster.proxy.directory.records))


async def nobody_is_served(proxy):
    async def is_so():
        return await proxy.num_running() == 0

    await until(is_so)


async def test_requests_of_one_connection_one_after_another(playing, raw):
    for _ in range(3):
        raw.send(post(PATH, WHOLE))
        response = await raw.response()
        assert response.status == 200
        assert json.loads(response.body)["choices"][0]["text"]
    raw.send(post(PATH, WHOLE, "Connection: close"))
    assert (await raw.response()).header("connection") == "close"
    assert await raw.end() == b""


async def test_b09_pipelined_requests_are_answered_in_their_order(playing, raw):
    ids = [f"request-{number}" for number in range(20)]
    raw.send(b"\r\n".join(post(PATH, STREAM, f"X-Request-Id: {each}") for each in ids))
    seen = [(await raw.response()).header("x-request-id") for _ in ids]
    assert seen == ids


async def test_b09_a_flood_of_pipelined_requests_is_dropped(cluster, raw):
    raw.send(post(PATH, STREAM))
    prefill_leg = await cluster.prefill.next_leg()
    await prefill_leg.send(token(0))
    await raw.read_head()
    await raw.chunk()
    request = post(PATH, STREAM)
    flood = request * (PIPELINED_BYTES_MAX // len(request))
    for _ in range(100):
        raw.send(flood)
        await raw.writer.drain()
    assert await cluster.proxy.num_running() == 1  # the others are not even begun
    await prefill_leg.send(parked(), released())
    await (await cluster.decode.next_leg()).finish(finished(1))
    assert (await raw.end()).count(b"HTTP/1.1") == 0
    assert len(cluster.prefill.legs) == 1


async def test_what_comes_with_the_next_request_waits_for_it(playing, raw):
    first, second = post(PATH, WHOLE), post(PATH, WHOLE)
    raw.send(first + second[:100])
    assert (await raw.response()).status == 200
    raw.send(second[100:])
    assert (await raw.response()).status == 200


async def test_a_request_that_comes_byte_by_byte(playing, raw):
    for byte in post(PATH, WHOLE):
        raw.send(bytes([byte]))
        await asyncio.sleep(0)
    assert (await raw.response()).status == 200


async def test_a_chunked_request(playing, raw):
    body = json.dumps(WHOLE).encode()
    raw.send(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        + b"0\r\n\r\n"
    )
    assert (await raw.response()).status == 200
    raw.send(post(PATH, WHOLE))
    assert (await raw.response()).status == 200


async def test_a_client_that_asks_whether_to_continue(playing, raw):
    body = json.dumps(WHOLE).encode()
    raw.send(post(PATH, body, "Expect: 100-continue")[: -len(body)])
    assert (await raw.read_head())[0] == "HTTP/1.1 100 Continue"
    raw.send(body)
    assert (await raw.response()).status == 200


async def test_who_is_refused_is_not_asked_to_continue(raw):
    body = b"x" * (17 << 20)
    raw.send(post(PATH, body, "Expect: 100-continue")[: -len(body)])
    assert (await raw.read_head())[0] == "HTTP/1.1 413 "


async def test_http_1_0(playing, raw):
    raw.send(post(PATH, STREAM, version="1.0"))
    response = await raw.response()
    assert response.header("transfer-encoding") is None
    assert response.header("connection") == "close"
    assert response.body.endswith(b"data: [DONE]\n\n")
    assert await raw.end() == b""


async def test_a_client_that_leaves_ends_its_legs(cluster, raw):
    raw.send(post(PATH, STREAM))
    prefill_leg, decode_leg = await cluster.prefill.next_leg(), await cluster.decode.next_leg()
    await prefill_leg.send(token(0))
    await raw.read_head()
    raw.writer.transport.abort()
    await prefill_leg.closed.wait()
    await decode_leg.closed.wait()
    await nobody_is_served(cluster.proxy)


@pytest.mark.parametrize("body", [WHOLE, STREAM])
async def test_a_client_that_closes_before_the_first_byte_ends_its_legs(cluster, raw, body):
    raw.send(post(PATH, body))
    prefill_leg, decode_leg = await cluster.prefill.next_leg(), await cluster.decode.next_leg()
    raw.writer.close()
    await prefill_leg.closed.wait()
    await decode_leg.closed.wait()


@pytest.mark.parametrize("body", [WHOLE, STREAM])
async def test_a_client_that_only_shuts_down_its_side_gets_its_answer(cluster, raw, body):
    raw.send(post(PATH, body))
    prefill_leg, decode_leg = await cluster.prefill.next_leg(), await cluster.decode.next_leg()
    raw.shut_down()
    status_line, _ = await raw.read_head()
    assert status_line == "HTTP/1.1 102 Processing"  # a probe: is anybody there?
    await prefill_leg.finish(token(0), parked(), released())
    await decode_leg.finish(token(1), finished(2))
    response = await raw.response()
    assert response.status == 200
    assert b"Once" in response.body
    assert await raw.end() == b""


async def test_a_bug_behind_an_answer_is_said_and_ends_the_connection(playing, raw, monkeypatch):
    said = []

    def fail(_self):
        raise RuntimeError("a bug")

    monkeypatch.setattr(front_connection.FrontConnection, "_wait_for_head", fail)
    monkeypatch.setattr(
        front_connection._log, "exception", lambda event, **what: said.append((event, what))
    )
    raw.send(post(PATH, WHOLE))
    assert (await raw.response()).status == 200
    assert await raw.end() == b""
    assert [(event, str(what["raised"])) for event, what in said] == [("front_failed", "a bug")]
    await nobody_is_served(playing.proxy)


async def test_requests_sent_before_shutting_down_are_all_answered(playing, raw):
    raw.send(post(PATH, WHOLE) * 3)
    raw.shut_down()
    for _ in range(3):
        assert (await raw.response()).status == 200
    assert await raw.end() == b""


@pytest.mark.parametrize("statuses", [[415] * 5, [200, 415], [200, 415, 415, 200]])
async def test_requests_that_are_refused_are_answered_as_well_then(playing, raw, statuses):
    refused = post(PATH, WHOLE, "Content-Type: text/plain")
    raw.send(b"".join(post(PATH, WHOLE) if each == 200 else refused for each in statuses))
    raw.shut_down()
    assert [(await raw.response()).status for _ in statuses] == statuses
    assert await raw.end() == b""


async def test_half_a_request_behind_the_last_one_is_not_waited_for(playing, raw):
    raw.send(post(PATH, WHOLE) + post(PATH, WHOLE)[:-1])
    raw.shut_down()
    assert (await raw.response()).status == 200
    assert await raw.end() == b""


@pytest.mark.parametrize("body", [WHOLE, STREAM])
async def test_a_client_that_left_in_a_later_request_ends_its_legs(cluster, raw, body):
    raw.send(post(PATH, body) * 2)
    raw.shut_down()
    prefill_leg, decode_leg = await cluster.prefill.next_leg(), await cluster.decode.next_leg()
    await prefill_leg.finish(token(0), parked(), released())
    await decode_leg.finish(token(1), finished(2))
    assert (await raw.response()).status == 200
    prefill_leg, decode_leg = await cluster.prefill.next_leg(), await cluster.decode.next_leg()
    status_line, _ = await raw.read_head()
    assert status_line == "HTTP/1.1 102 Processing"
    raw.writer.close()  # says nothing: it had said that it sends no more
    async with asyncio.timeout(10):
        await prefill_leg.closed.wait()
        await decode_leg.closed.wait()


async def test_a_silent_stream_says_that_it_lives(cluster, stack):
    proxy = await another_proxy(stack, cluster, ping_interval_s=0.1)
    raw = await stack.enter_async_context(RawClient(proxy.address))
    raw.send(post(PATH, STREAM))
    prefill_leg, decode_leg = await cluster.prefill.next_leg(), await cluster.decode.next_leg()
    await prefill_leg.finish(token(0), parked(), released())
    await raw.read_head()
    assert b"Once" in await raw.chunk()
    for _ in range(3):
        assert await raw.chunk() == PING_CHUNK
    await decode_leg.finish(token(1), finished(2))
    rest = b""
    while b"[DONE]" not in rest:
        rest += await raw.chunk()
    assert b" upon" in rest


async def test_nothing_is_sent_before_the_first_token(cluster, stack):
    proxy = await another_proxy(stack, cluster, ping_interval_s=0.05)
    raw = await stack.enter_async_context(RawClient(proxy.address))
    raw.send(post(PATH, STREAM))
    prefill_leg = await cluster.prefill.next_leg()
    await asyncio.sleep(0.3)
    await prefill_leg.break_off()
    assert (await raw.response()).status == 500


async def test_other_routes_are_answered_on_the_same_connection(playing, raw):
    raw.send(get("/health") + get("/v1/models") + post(PATH, STREAM))
    health, models, answer = [await raw.response() for _ in range(3)]
    assert json.loads(health.body)["status"] == "ok"
    assert [each["id"] for each in json.loads(models.body)["data"]] == ["tiny"]
    assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_a_connection_has_hot_requests_and_others_in_turn(playing, raw):
    raw.send(post(PATH, WHOLE) + get("/version"))
    assert (await raw.response()).status == 200
    assert "version" in json.loads((await raw.response()).body)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get(PATH), 405),
        (get("/nothing"), 404),
        (post("/v1/completions/", b"{}"), 404),
        (b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", 404),
    ],
)
async def test_what_no_route_takes(raw, request_, status):
    raw.send(request_)
    assert (await raw.response()).status == status


async def test_http_2_without_tls_is_hypercorns(raw):
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    raw.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
    async with asyncio.timeout(10):
        frame = await raw.reader.readexactly(9)
    assert frame[3] == 4  # its own settings


async def test_a_drain_ends_kept_connections(cluster):
    cluster.prefill.script = play_prefill
    async with RawClient(cluster.proxy.address) as busy, RawClient(cluster.proxy.address) as idle:
        busy.send(post(PATH, STREAM))
        decode_leg = await cluster.decode.next_leg()
        await busy.read_head()
        idle.send(post(PATH, b"{}"))
        assert (await idle.response()).status == 400
        cluster.proxy.shutdown.set()
        while (await cluster.proxy.get("/health"))[0] == 200:
            pass
        idle.send(post(PATH, WHOLE))
        response = await idle.response()
        assert (response.status, response.header("connection")) == (503, "close")
        assert await idle.end() == b""
        await decode_leg.finish(token(1), finished(2))
        assert b"[DONE]" in await busy.end()
    await cluster.proxy.task


async def test_limits_of_the_kept_connection(cluster, stack):
    proxy = await another_proxy(stack, cluster, keep_alive_s=1.0)
    raw = await stack.enter_async_context(RawClient(proxy.address))
    raw.send(post(PATH, b"{}"))
    assert (await raw.response()).status == 400
    assert await raw.end() == b""  # it idled too long
