"""The proxy's client of workers: legs over real links, status over real HTTP."""

import asyncio
import os
import resource
import socket

import pytest
from aiohttp import web
from leg_ear import MESSAGE, Ear, closed, open_leg
from msgspec.structs import replace
from scripted_worker import ScriptedWorker, finished, make_record, released, token

from neuron_di.config import LimitOptions
from neuron_di.errors import PeerGone, PeerTimeout, RemoteProtocolError, TooLarge
from neuron_di.wire import Failed, SamplingParams
from neuron_di.wire.codec import LEG_BYTES_MAX
from neuron_di_proxy.failure import LegFailed
from neuron_di_proxy.worker_client import WorkerClient


@pytest.fixture
async def worker(stack):
    return await stack.enter_async_context(ScriptedWorker("d1", "decode"))


async def test_the_worker_gets_the_message_as_it_was_sent(client, worker):
    _leg, ear, seen = await open_leg(client, worker)
    assert (seen.kind, seen.message) == ("decode", MESSAGE)
    await seen.finish(finished(1))
    assert await ear.next() == finished(1)


async def test_all_legs_at_a_worker_share_one_connection(client, worker):
    legs = [await open_leg(client, worker) for _ in range(3)]
    (link,) = worker.links
    await legs[1][2].finish(released())
    assert await legs[1][1].next() == released()
    for index in (2, 0):
        await legs[index][2].send(token(index))
    assert await legs[0][1].next() == token(0)
    assert await legs[2][1].next() == token(2)
    await open_leg(client, worker)
    assert worker.links == [link]
    assert link._transport.get_extra_info("socket").getsockopt(
        socket.IPPROTO_TCP, socket.TCP_NODELAY
    )


async def test_a_leg_that_no_link_carries_fails_alone(client, worker):
    _bystander, other_ear, seen = await open_leg(client, worker)
    too_much = SamplingParams(stop=("x" * LEG_BYTES_MAX,))
    ear = Ear()
    leg = client.open_leg(worker.record, "decode", replace(MESSAGE, sampling=too_much))
    leg.open(ear)
    assert ear.said.empty()
    assert isinstance(await ear.next(), TooLarge)
    leg.close()
    await seen.finish(finished(1))
    assert await other_ear.next() == finished(1)
    assert len(worker.legs) == 1


async def test_legs_that_open_before_there_is_a_connection_all_arrive(client, worker):
    ears = [Ear() for _ in range(5)]
    legs = [client.open_leg(worker.record, "decode", MESSAGE) for _ in ears]
    for leg, ear in zip(legs, ears, strict=True):
        leg.open(ear)
    legs[1].close()  # never sent
    for ear in (ears[0], *ears[2:]):
        seen = await worker.next_leg()
        await seen.finish(finished(1))
        assert await ear.next() == finished(1)
    assert len(worker.legs) == 4
    assert ears[1].said.empty()


async def test_another_process_at_the_same_address_gets_a_link_of_its_own(client, worker):
    await open_leg(client, worker)
    worker.restart()
    await open_leg(client, worker)
    assert len(worker.links) == 2


async def test_a_leg_closed_before_it_opens_is_never_sent(client, worker):
    leg = client.open_leg(worker.record, "decode", MESSAGE)
    leg.close()
    leg.open(Ear())
    await open_leg(client, worker)
    assert len(worker.legs) == 1


async def test_a_failed_leg_is_the_workers_own_words(client, worker):
    failed = Failed(
        code="context_exceeded", message="too long", http_status=400, retryable=False, param="p"
    )
    _, ear, seen = await open_leg(client, worker)
    await seen.finish(failed)
    error = await ear.next()
    assert isinstance(error, LegFailed)
    assert error.failed == failed


async def test_a_worker_that_is_not_there(client, worker):
    await worker.stop()
    ears = [Ear(), Ear()]
    for ear in ears:
        client.open_leg(worker.record, "decode", MESSAGE).open(ear)
        assert ear.said.empty()  # never from within `open`
    for ear in ears:
        assert isinstance(await ear.next(), PeerGone)
    assert client._links == {}


@pytest.fixture
def deaf_address():
    """An address that takes no more connections: neither accepted nor refused."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        waiting = [socket.socket() for _ in range(8)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        yield address
        for each in waiting:
            each.close()


async def test_that_no_descriptor_is_left_here_is_no_word_on_the_worker(client, worker):
    ear = Ear()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        client.open_leg(worker.record, "decode", MESSAGE).open(ear)
        error = await ear.next()
        with pytest.raises(PeerGone, match="Too many open files"):
            await client.status(worker.record)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert isinstance(error, PeerGone)
    assert error.message == "worker d1 is gone (Too many open files)"


async def test_a_worker_that_cannot_be_reached_in_time(deaf_address):
    async with WorkerClient(LimitOptions(connect_timeout_s=0.1)) as client:
        ear = Ear()
        record = make_record("x1", "decode", deaf_address[1])
        client.open_leg(record, "decode", MESSAGE).open(ear)
        error = await ear.next()
        assert isinstance(error, PeerTimeout)
        assert "cannot be reached in time" in error.message


async def test_closing_the_client_ends_every_leg(worker):
    client = WorkerClient(LimitOptions())
    async with client:
        _, ear, seen = await open_leg(client, worker)
        await client.close()
        assert isinstance(await ear.next(), PeerGone)
        await closed(seen)
        late = Ear()
        leg = client.open_leg(worker.record, "decode", MESSAGE)
        leg.open(late)
        assert late.said.empty()
        assert isinstance(await late.next(), PeerGone)
        client.open_leg(worker.record, "decode", MESSAGE).close()


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
