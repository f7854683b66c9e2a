import asyncio

import pytest
from aiohttp import web
from scripted_worker import (
    ScriptedWorker,
    finished,
    make_record,
    parked,
    released,
    token,
)

from neuron_di.config import LimitOptions
from neuron_di.errors import CapacityError, PeerGone, PeerTimeout, RemoteProtocolError
from neuron_di.types import RequestId
from neuron_di.wire import DecodeLeg, Failed, SamplingParams, encode_json
from neuron_di_proxy.failure import LegFailed
from neuron_di_proxy.worker_client import WorkerClient

MESSAGE = DecodeLeg(
    request_id=RequestId("r1"),
    attempt=0,
    sampling=SamplingParams(),
    prefill=make_record("p1", "prefill").peer_address(),
    timeout_s=60.0,
)


@pytest.fixture
async def worker(stack):
    return await stack.enter_async_context(ScriptedWorker("d1", "decode"))


@pytest.fixture
async def client(stack):
    return await stack.enter_async_context(WorkerClient(LimitOptions()))


@pytest.fixture
def open_leg(stack):
    async def open_leg(client, worker):
        """A leg whose first event is being waited for, and the same leg as the worker sees it."""
        leg = client.open_leg(worker.record, "decode", MESSAGE)
        stack.callback(leg.close)
        first = asyncio.create_task(leg.next())
        return leg, first, await worker.next_leg()

    return open_leg


async def test_the_worker_gets_the_message_as_it_was_sent(client, worker, open_leg):
    _leg, first, seen = await open_leg(client, worker)
    assert seen.message == MESSAGE
    await seen.finish(finished(1))
    await first


async def test_events_come_in_order_however_the_bytes_are_cut(client, worker, open_leg):
    raw = b"".join(encode_json(e) + b"\n" for e in (token(1, "é\n"), token(2), finished(3)))
    leg, first, seen = await open_leg(client, worker)
    for cut in range(len(raw)):
        await seen.send_bytes(raw[cut : cut + 1])
        await asyncio.sleep(0)
    seen.ended.set()
    assert [await first, await leg.next(), await leg.next()] == [
        token(1, "é\n"),
        token(2),
        finished(3),
    ]


async def test_many_events_in_one_packet_and_blank_lines_are_read(client, worker, open_leg):
    leg, first, seen = await open_leg(client, worker)
    await seen.send_bytes(encode_json(token(1)) + b"\n\n\n" + encode_json(token(2)) + b"\n")
    await seen.finish(finished(3))
    assert [await first, await leg.next(), await leg.next()] == [token(1), token(2), finished(3)]


async def test_a_connection_is_used_again_after_a_complete_leg(client, worker, open_leg):
    connections = []
    for _ in range(3):
        _, first, seen = await open_leg(client, worker)
        connections.append(seen._request.transport)
        await seen.finish(released())
        await first
    assert connections == connections[:1] * 3


async def test_closing_a_leg_ends_it_at_the_worker(client, worker, open_leg):
    leg, first, seen = await open_leg(client, worker)
    await seen.send(token(1))
    await first
    leg.close()
    await seen.closed.wait()


async def test_cancelling_the_wait_for_an_answer_ends_the_leg_at_the_worker(
    client, worker, open_leg
):
    _, first, seen = await open_leg(client, worker)
    first.cancel()
    await seen.closed.wait()


async def test_a_failed_leg_raises_the_workers_own_words(client, worker, open_leg):
    failed = Failed(
        code="context_exceeded", message="too long", http_status=400, retryable=False, param="p"
    )
    _, first, seen = await open_leg(client, worker)
    await seen.finish(failed)
    with pytest.raises(LegFailed) as error:
        await first
    assert error.value.failed == failed


async def test_a_refusal_with_a_status_of_its_own_is_read_too(client, worker, open_leg):
    failed = Failed(code="over_capacity", message="full", http_status=503, retryable=True)
    _, first, seen = await open_leg(client, worker)
    await seen.answer_with(503)
    await seen.finish(failed)
    with pytest.raises(LegFailed, match="full"):
        await first


@pytest.mark.parametrize(
    ("status", "error"),
    [(503, CapacityError), (404, RemoteProtocolError), (307, RemoteProtocolError)],
)
async def test_a_status_without_words(client, worker, status, error, open_leg):
    _, first, seen = await open_leg(client, worker)
    await seen.answer_with(status)
    seen.ended.set()
    with pytest.raises(error, match=str(status)):
        await first


@pytest.mark.parametrize(
    "line", [b"garbage\n", b'{"type":"token"}\n', b'{"type":"nonsense"}\n', b"\xff\xfe\n", b"[]\n"]
)
async def test_a_line_that_means_nothing(client, worker, line, open_leg):
    leg, first, seen = await open_leg(client, worker)
    await seen.send_bytes(line)
    with pytest.raises(RemoteProtocolError):
        await first
    leg.close()
    await seen.closed.wait()


async def test_a_line_without_end_is_not_collected(client, worker, open_leg):
    leg, first, seen = await open_leg(client, worker)

    async def flood():
        while True:
            await seen.send_bytes(b"x" * 65536)

    flooding = asyncio.create_task(flood())
    with pytest.raises(RemoteProtocolError, match="without end"):
        await first
    leg.close()
    with pytest.raises(ConnectionError):
        await flooding


async def test_events_after_the_terminal_one(client, worker, open_leg):
    _leg, first, seen = await open_leg(client, worker)
    await seen.finish(finished(2), token(2))
    with pytest.raises(RemoteProtocolError, match="went on"):
        await first


async def test_an_answer_that_ends_without_a_terminal_event(client, worker, open_leg):
    leg, first, seen = await open_leg(client, worker)
    await seen.finish(parked())
    await first
    with pytest.raises(PeerGone):
        await leg.next()


async def test_a_worker_that_hangs_up(client, worker, open_leg):
    leg, first, seen = await open_leg(client, worker)
    await seen.send(token(1))
    await first
    seen.hang_up()
    with pytest.raises(PeerGone):
        await leg.next()


async def test_a_worker_that_is_not_there(client, worker):
    await worker.stop()
    with pytest.raises(PeerGone):
        await client.open_leg(worker.record, "decode", MESSAGE).next()


async def test_a_worker_that_is_silent(worker, open_leg):
    async with WorkerClient(LimitOptions(idle_timeout_s=0.05)) as client:
        leg, first, seen = await open_leg(client, worker)
        with pytest.raises(PeerTimeout):
            await first
        leg.close()
        await seen.closed.wait()


async def test_a_leg_that_goes_on_for_ever(worker):
    async def never_end(leg):
        while True:
            await leg.send(token(1))
            await asyncio.sleep(0.01)

    worker.script = never_end
    async with WorkerClient(LimitOptions(request_timeout_s=0.1)) as client:
        leg = client.open_leg(worker.record, "decode", MESSAGE)

        async def read_all():
            while True:
                await leg.next()

        with pytest.raises(PeerTimeout):
            await read_all()
        leg.close()


async def test_something_that_does_not_speak_http(client):
    async def greet(reader, writer):
        await reader.read(1)
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        record = make_record("x1", "decode", server.sockets[0].getsockname()[1])
        with pytest.raises(RemoteProtocolError):
            await client.open_leg(record, "decode", MESSAGE).next()


async def test_status(client, worker):
    assert (await client.status(worker.record)).record == worker.record
    worker.freeze()
    waits_s = (600.0, 0.01)
    asking = [asyncio.create_task(client.status(worker.record, wait_s)) for wait_s in waits_s]
    done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    assert done == {asking[1]}
    with pytest.raises(PeerTimeout, match="did not answer in time"):
        await asking[1]
    worker.thaw()
    assert (await asking[0]).record == worker.record
    await worker.stop()
    with pytest.raises(PeerGone):
        await client.status(worker.record)


@pytest.mark.parametrize("answer", [b"{}", b"HTTP", b"x" * (1 << 20)])
async def test_a_status_that_is_not_one(client, answer):
    async def serve_status(request):
        return web.Response(body=answer)

    app = web.Application()
    app.router.add_get("/status", serve_status)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        with pytest.raises(RemoteProtocolError):
            await client.status(make_record("x1", "decode", runner.addresses[0][1]))
    finally:
        await runner.cleanup()
