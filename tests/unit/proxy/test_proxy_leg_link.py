"""A link under a worker that talks in pieces, talks nonsense, falls silent or leaves."""

import asyncio
import socket

import pytest
from leg_ear import MESSAGE, Ear, closed, open_leg
from scripted_worker import ScriptedWorker, finished, make_record, parked, released, token

from neuron_di.config import LimitOptions
from neuron_di.errors import CapacityError, PeerGone, PeerTimeout, RemoteProtocolError
from neuron_di.types import RequestId
from neuron_di.wire import DecodeLeg, PromptReport, SamplingParams, TokenLogprob, TokenLogprobs
from neuron_di.wire.leg_link import MAGIC, Told, encode_frame
from neuron_di_proxy import leg_link
from neuron_di_proxy.worker_client import WorkerClient


@pytest.fixture
async def worker(stack):
    return await stack.enter_async_context(ScriptedWorker("d1", "decode"))


async def test_events_come_in_order_however_the_bytes_are_cut(client, worker):
    likely = TokenLogprobs(TokenLogprob("x", -0.5, [120], 7), [])
    told = [
        Told([(0, 1, 101, "é\n"), (0, 2, 102, "")], [(0, token(3, logprobs=likely))]),
        Told([], [(0, token(4))]),
        Told([], []),
        Told([(0, 5, 105, "x" * 1000)], [(0, finished(6))]),
    ]
    raw = b"".join(encode_frame(each) for each in told)
    _leg, ear, seen = await open_leg(client, worker)
    for cut in range(len(raw)):
        await seen.send_bytes(raw[cut : cut + 1])
    assert [await ear.next() for _ in range(6)] == [
        token(1, "é\n"),
        token(2, ""),
        token(3, logprobs=likely),
        token(4),
        token(5, "x" * 1000),
        finished(6),
    ]


async def test_who_waits_for_a_token_may_read_it_before_its_answers_end(
    client, worker, monkeypatch
):
    _leg, ear, seen = await open_leg(client, worker)
    heard_then = []
    monkeypatch.setattr(leg_link, "sched_yield", lambda: heard_then.append(ear.said.qsize()))
    await seen.send_bytes(encode_frame(Told([(0, 1, 101, "a")], [])))
    assert await ear.next() == token(1, "a")
    assert heard_then == []  # nothing else is to be done
    await seen.send_bytes(encode_frame(Told([(0, 2, 102, "b")], [(0, finished(3))])))
    assert [await ear.next() for _ in range(2)] == [token(2, "b"), finished(3)]
    assert heard_then == [1]


async def test_many_frames_in_one_packet_are_read(client, worker):
    _leg, ear, seen = await open_leg(client, worker)
    frames = [Told([(0, index, 100 + index, "")], []) for index in range(1, 9)]
    await seen.send_bytes(b"".join(encode_frame(frame) for frame in frames))
    assert [await ear.next() for _ in frames] == [token(index, "") for index in range(1, 9)]


async def test_an_event_of_many_megabytes(client, worker):
    report = PromptReport(text="x" * (8 << 20), token_ids=list(range(70_000)))
    _leg, ear, seen = await open_leg(client, worker)
    await seen.finish(token(0, prompt=report), finished(1))
    assert (await ear.next()).prompt == report
    assert await ear.next() == finished(1)


async def test_closing_a_leg_ends_it_at_the_worker_and_is_not_heard_of(client, worker):
    leg, ear, seen = await open_leg(client, worker)
    _, other, beside = await open_leg(client, worker)
    await seen.send(token(1))
    assert await ear.next() == token(1)
    leg.close()
    leg.close()
    await closed(seen)
    # What it says all the same, too late or out of its mind, is nothing to anybody.
    await seen.send_bytes(encode_frame(Told([(0, 2, 2, ""), (77, 0, 0, "")], [(0, finished(3))])))
    await beside.finish(finished(1))
    assert await other.next() == finished(1)
    assert ear.said.empty()


async def test_a_leg_that_is_closed_while_it_is_told_something_hears_no_more(client, worker):
    _, ear, seen = await open_leg(client, worker)
    heard = []

    def hear(said):
        heard.append(said)
        second.close()

    second = client.open_leg(worker.record, "decode", MESSAGE)
    second.open(hear)
    await worker.next_leg()
    await seen.send_bytes(
        encode_frame(Told([(1, 1, 101, " upon"), (1, 2, 102, " a")], [(1, finished(3))]))
    )
    await seen.finish(released())
    assert await ear.next() == released()
    assert heard == [token(1)]


@pytest.mark.parametrize(
    "raw",
    [
        b"garbage\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        (1 << 30).to_bytes(4, "big"),
        b"\0\0\0\1\xc1",
        b"\0\0\0\0",
        encode_frame(Told([(0, 1)], [])),
        encode_frame(Told([], [(0, {"type": "nonsense"})])),
        encode_frame(Told([], [(0, {"type": "token"})])),
        b"\0\0\0\7\x92\x91\x94\0\0\0\xa1\xff\x90",
    ],
)
async def test_nonsense_ends_every_leg_of_the_link_and_no_other(client, worker, raw, stack):
    other = await stack.enter_async_context(ScriptedWorker("d2", "decode"))
    _, ear, seen = await open_leg(client, worker)
    _, beside, seen_beside = await open_leg(client, worker)
    _, elsewhere, seen_elsewhere = await open_leg(client, other)
    await seen.send_bytes(raw)
    for each in (ear, beside):
        error = await each.next()
        assert isinstance(error, RemoteProtocolError)
        assert "d1 cannot be understood" in error.message
    await closed(seen)
    await closed(seen_beside)
    await seen_elsewhere.finish(finished(1))
    assert await elsewhere.next() == finished(1)
    _, again, seen_again = await open_leg(client, worker)
    await seen_again.finish(finished(1))
    assert await again.next() == finished(1)


async def test_a_frame_without_end_is_not_collected(client, worker):
    _, ear, seen = await open_leg(client, worker)
    await seen.send_bytes((leg_link.FROM_WORKER_BYTES_MAX + 1).to_bytes(4, "big"))
    assert isinstance(await ear.next(), RemoteProtocolError)
    await closed(seen)


async def test_a_worker_that_hangs_up(client, worker):
    _, ear, seen = await open_leg(client, worker)
    _, beside, _ = await open_leg(client, worker)
    await seen.send(token(1), parked())
    assert [await ear.next(), await ear.next()] == [token(1), parked()]
    seen.hang_up()
    assert isinstance(await ear.next(), PeerGone)
    assert isinstance(await beside.next(), PeerGone)
    _, again, seen_again = await open_leg(client, worker)
    await seen_again.finish(finished(1))
    assert await again.next() == finished(1)


async def test_a_worker_that_is_silent(worker):
    async with WorkerClient(LimitOptions(idle_timeout_s=0.05)) as client:
        _, ear, seen = await open_leg(client, worker)
        assert isinstance(await ear.next(), PeerTimeout)
        await closed(seen)
        assert client._links == {}


async def test_a_worker_that_only_says_that_it_lives(worker):
    async with WorkerClient(LimitOptions(idle_timeout_s=0.2)) as client:
        _, ear, seen = await open_leg(client, worker)
        link = client._links[next(iter(client._links))]
        for _ in range(12):  # looks, of which seven in silence would be too many
            link._watch()
            await seen.keep_alive()
            while link.num_silent:  # noqa: ASYNC110 - until it has arrived
                await asyncio.sleep(0)
        await seen.finish(finished(1))
        assert await ear.next() == finished(1)


async def test_a_proxy_that_stood_still_reads_before_it_judges(worker):
    async with WorkerClient(LimitOptions(idle_timeout_s=0.2)) as client:
        _, ear, seen = await open_leg(client, worker)
        await seen.send(token(1))
        socket_of_test = socket.socketpair()
        socket_of_test[0].settimeout(0.5)
        with pytest.raises(TimeoutError):  # the loop stands still, longer than a silence may be
            socket_of_test[0].recv(1)
        for each in socket_of_test:
            each.close()
        assert await ear.next() == token(1)
        await seen.finish(finished(2))
        assert await ear.next() == finished(2)


async def test_a_worker_that_takes_nothing_is_given_no_more(client, worker, monkeypatch):
    _, ear, seen = await open_leg(client, worker)
    (link,) = worker.links
    link._transport.pause_reading()
    monkeypatch.setattr(leg_link, "UNSENT_BYTES_MAX", 1 << 20)
    prompt = DecodeLeg(
        request_id=RequestId("r" * 128),
        attempt=0,
        sampling=SamplingParams(stop=("x" * (4 << 20),)),
        prefill=MESSAGE.prefill,
        timeout_s=60.0,
    )
    ears = [Ear() for _ in range(6)]
    for each in ears:
        client.open_leg(worker.record, "decode", prompt).open(each)
        await asyncio.sleep(0)
    assert isinstance(await ears[-1].next(), CapacityError)
    await seen.finish(finished(1))
    assert await ear.next() == finished(1)


async def test_something_that_speaks_another_protocol(client):
    async def greet(reader, writer):
        assert (await reader.read(len(MAGIC))) == MAGIC
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        record = make_record("x1", "decode", server.sockets[0].getsockname()[1])
        ear = Ear()
        client.open_leg(record, "decode", MESSAGE).open(ear)
        assert isinstance(await ear.next(), RemoteProtocolError)


async def test_legs_of_one_turn_are_sent_by_one_call(client, worker, monkeypatch):
    await open_leg(client, worker)
    (link,) = client._links.values()
    transport = link._transport
    written = []

    class Counting:
        """The transport, and what it is given."""

        def __getattr__(self, name):
            return getattr(transport, name)

        def writelines(self, frames):
            written.append(list(frames))
            transport.writelines(frames)

    monkeypatch.setattr(link, "_transport", Counting())
    num = leg_link._SENT_TOGETHER - 1
    ears = [Ear() for _ in range(num)]
    legs = [client.open_leg(worker.record, "decode", MESSAGE) for _ in ears]
    for leg, ear in zip(legs, ears, strict=True):
        leg.open(ear)
    legs[1].close()  # never sent
    for ear in (ears[0], *ears[2:]):
        seen = await worker.next_leg()
        await seen.finish(finished(1))
        assert await ear.next() == finished(1)
    assert [len(frames) for frames in written] == [num - 1]
    assert ears[1].said.empty()
    await open_leg(client, worker)
    assert [len(frames) for frames in written] == [num - 1, 1]


async def test_who_waits_for_legs_of_a_crowd_may_begin_with_the_first_of_them(
    client, worker, monkeypatch
):
    await open_leg(client, worker)
    (link,) = client._links.values()
    num_written = []
    monkeypatch.setattr(
        leg_link,
        "sched_yield",
        lambda: num_written.append(link._transport.get_write_buffer_size()),
    )
    for _ in range(2 * leg_link._SENT_TOGETHER + 1):
        client.open_leg(worker.record, "decode", MESSAGE).open(Ear())
    for _ in range(2 * leg_link._SENT_TOGETHER + 1):
        await worker.next_leg()
    assert num_written == [0] * 2  # nothing is left to be written; the last one is no crowd


async def test_legs_of_a_turn_in_which_the_link_ends_hear_of_it(client, worker):
    await open_leg(client, worker)
    (link,) = client._links.values()
    ear = Ear()
    client.open_leg(worker.record, "decode", MESSAGE).open(ear)
    link.end(PeerGone("the worker is gone"))
    assert isinstance(await ear.next(), PeerGone)
    await open_leg(client, worker)
    assert len(worker.legs) == 2
