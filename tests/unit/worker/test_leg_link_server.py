"""The worker's end of a leg link: what leaves together, who is ended when, and who is not."""

import asyncio
import socket

import pytest
from link_kit import WAIT_S, CountingTransport, LinkServer, RawLink

from neuron_di.engine import Emitted
from neuron_di.types import RequestId, WorkerId
from neuron_di.wire import (
    EVENT_BYTES_MAX,
    Failed,
    Finished,
    LegReceipt,
    Parked,
    PromptReport,
    Released,
    Token,
    TokenLogprob,
    TokenLogprobs,
    encode_msgpack,
)
from neuron_di.wire.leg_link import (
    FROM_PROXY_BYTES_MAX,
    FROM_WORKER_BYTES_MAX,
    MAGIC,
    CloseLeg,
    OpenLeg,
    ProxyAlive,
    encode_frame,
)
from neuron_di.worker import leg_link_server
from neuron_di.worker.live_legs import LiveLegs
from neuron_di.worker.server import LegAnswers

LIKELY = TokenLogprobs(TokenLogprob("x", -0.5, [120], 7), [])
RECEIPT = LegReceipt(worker_id=WorkerId("w"), role="both", pid=1)
FINISHED = Finished(reason="length", num_prompt=1, num_generated=1, receipt=RECEIPT)


def token(index, **fields):
    return Token(index=index, token_id=100 + index, text="x", **fields)


def plain(number, index):
    return (number, index, 100 + index, "x")


@pytest.fixture
async def server():
    async with LinkServer() as server:
        yield server


@pytest.fixture
async def link(server):
    async with RawLink(server.port) as link:
        yield link


async def opened(server, link, count=1):
    """So many legs, numbered from 0."""
    link.send(*(OpenLeg(number, "whole", b"%d" % number) for number in range(count)))
    return list(await server.num_opened(count))


async def test_the_tokens_of_a_step_leave_in_one_write():
    """With what answers legs in a worker: a table, a queue, a generator and a task per leg."""
    live = LiveLegs(1000, 1000)
    keys = [(RequestId(f"r{number}"), 0) for number in range(64)]

    async def run(number):
        with live.open(keys[number], WAIT_S) as queue:
            while True:
                yield (await queue.get()).token

    class AsNumber:
        def decode(self, document):
            return int(document)

    answers = LegAnswers({"whole": (AsNumber(), run)})
    async with LinkServer(open_here=answers.open) as server, RawLink(server.port) as link:
        link.send(*(OpenLeg(number, "whole", b"%d" % number) for number in range(64)))
        async with asyncio.timeout(WAIT_S):
            while len(live) < 64:  # noqa: ASYNC110 - until all are opened
                await asyncio.sleep(0)
        (at_worker,) = server.server.links
        counting = at_worker._transport = CountingTransport(at_worker._transport)
        for step in range(3):
            live.dispatch([Emitted(key, token(step)) for key in keys])
            told = await link.next()
            assert sorted(told.tokens) == [plain(number, step) for number in range(64)]
            assert told.events == []
            assert counting.num_writes == step + 1
    await answers.ended()
    assert len(live) == 0


async def test_within_a_leg_the_order_stays_whatever_an_event_carries(server, link):
    first, second = await opened(server, link, 2)
    first.say(token(0))
    first.say(token(1, logprobs=LIKELY))
    second.say(token(0))
    first.say(token(2))
    first.say(Parked(num_prompt=3))
    second.say(token(1))
    first.say(FINISHED)
    told = await link.next()
    assert told.tokens == [plain(0, 0), plain(1, 0), plain(1, 1)]
    assert told.events == [
        (0, token(1, logprobs=LIKELY)),
        (0, token(2)),
        (0, Parked(num_prompt=3)),
        (0, FINISHED),
    ]
    second.say(Released(receipt=RECEIPT))
    assert (await link.next()).events == [(1, Released(receipt=RECEIPT))]


async def test_large_events_travel_alone_so_that_no_frame_is_too_large(server, link):
    reports = [PromptReport(text="y" * (EVENT_BYTES_MAX - 1000), token_ids=[]) for _ in range(3)]
    legs = await opened(server, link, 3)
    for leg, report in zip(legs, reports, strict=True):
        leg.say(token(0, prompt=report))
        leg.say(token(1))
    num_events, following = [], []
    while len(following) < 3:
        told = await link.next()
        num_events.append(len(told.events))
        following += told.tokens
    assert max(num_events) == 1
    assert sum(num_events) == 3
    assert sorted(following) == [plain(number, 1) for number in range(3)]


async def test_many_events_that_are_said_at_once_are_several_frames(server, link):
    """As when the loop stood still while the engine did not."""
    (leg,) = await opened(server, link)
    candidate = TokenLogprob(" word", -1.0, list(b" word"), 20_000)
    likely = TokenLogprobs(candidate, [candidate] * 20)
    num_said = 2 * FROM_WORKER_BYTES_MAX // len(encode_msgpack(likely))
    for index in range(num_said):
        leg.say(token(index, logprobs=likely))
    heard = []
    while len(heard) < num_said:
        heard += [event.index for _, event in (await link.next()).events]
    assert heard == list(range(num_said))


async def test_large_events_wait_until_the_proxy_has_read(server, link, monkeypatch):
    monkeypatch.setattr(leg_link_server, "UNREAD_BYTES_MAX", EVENT_BYTES_MAX)
    report = PromptReport(text="y" * (EVENT_BYTES_MAX - 1000), token_ids=[])
    legs = await opened(server, link, 4)
    link.reader._transport.pause_reading()
    for leg in legs:
        leg.say(token(0, prompt=report))
        leg.say(token(1))
        await asyncio.sleep(0)
    assert not any(leg.ended.is_set() for leg in legs)
    link.send(CloseLeg(3))
    async with asyncio.timeout(WAIT_S):
        await legs[3].ended.wait()
    legs[0].say(FINISHED)
    link.reader._transport.resume_reading()
    said = {number: [] for number in range(4)}
    while len(said[1]) + len(said[2]) < 4:
        told = await link.next()
        for number, index, *_ in told.tokens:
            said[number].append(index)
        for number, event in told.events:
            said[number].append(event if event == FINISHED else event.index)
    assert said == {0: [0, 1, FINISHED], 1: [0, 1], 2: [0, 1], 3: []}


async def test_an_event_that_is_larger_than_any_frame_fails_its_leg_alone(server, link):
    leg, other = await opened(server, link, 2)
    leg.say(token(0, prompt=PromptReport(text="y" * EVENT_BYTES_MAX, token_ids=[])))
    leg.say(token(1))
    other.say(token(0))
    ((number, event),) = (await link.next()).events
    assert (number, type(event), event.http_status) == (0, Failed, 413)
    assert leg.ended.is_set()
    assert (await link.next()).tokens == [plain(1, 0)]


async def test_a_leg_that_is_closed_is_ended_and_says_no_more(server, link):
    first, second = await opened(server, link, 2)
    link.send(CloseLeg(0), CloseLeg(0), CloseLeg(99))
    async with asyncio.timeout(WAIT_S):
        await first.ended.wait()
    first.say(token(0))
    second.say(token(0))
    assert (await link.next()).tokens == [plain(1, 0)]
    assert not second.ended.is_set()


async def test_a_leg_that_is_over_is_not_ended_again(server, link):
    (leg,) = await opened(server, link)
    leg.say(FINISHED)
    leg.say(token(1))
    assert (await link.next()).events == [(0, FINISHED)]
    link.writer.close()
    async with asyncio.timeout(WAIT_S):
        while server.server.links:  # noqa: ASYNC110 - until it has noticed
            await asyncio.sleep(0)
    assert not leg.ended.is_set()


async def test_the_end_of_a_link_ends_its_legs_and_no_others(server, link):
    async with RawLink(server.port) as other:
        legs = await opened(server, link, 2)
        other.send(OpenLeg(0, "decode", b"other"))
        *_, beside = await server.num_opened(3)
        assert (beside.kind, beside.document) == ("decode", b"other")
        link.writer.transport.abort()
        async with asyncio.timeout(WAIT_S):
            for leg in legs:
                await leg.ended.wait()
        legs[0].say(token(0))  # nobody is left to hear it
        beside.say(token(5))
        assert (await other.next()).tokens == [plain(0, 5)]
        assert not beside.ended.is_set()


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        (FROM_PROXY_BYTES_MAX + 1).to_bytes(4, "big"),
        b"\0\0\0\0",
        b"\0\0\0\1\xc1",
        b"\0\0\0\3\x91\xa1\xff",
        b"\0\0\0\2\x91\x01",
        bytes(encode_frame(OpenLeg(0, "whole", b"again"))),
        bytes(encode_frame(OpenLeg(1, "nonsense", b""))),
        bytes(encode_frame(OpenLeg(-1, "whole", b""))),
    ],
)
async def test_a_proxy_that_cannot_be_understood_is_ended_and_no_other(server, link, raw):
    (leg,) = await opened(server, link)
    async with RawLink(server.port) as other:
        other.send(OpenLeg(0, "whole", b""))
        await server.num_opened(2)
        link.writer.write(raw)
        assert await link.is_ended()
        assert leg.ended.is_set()
        assert len(server.legs) == 2
        server.legs[1].say(token(0))
        assert (await other.next()).tokens == [plain(0, 0)]


@pytest.mark.parametrize("greeting", [b"\0neuron-di legs 9\n", b"\0" * 40, b"\0neuron-di leg\n"])
async def test_a_greeting_of_another_version_is_refused(server, greeting):
    async with RawLink(server.port, greeting=greeting) as link:
        assert await link.is_ended()
    assert server.legs == []


async def test_frames_arrive_however_they_are_cut(server):
    document = bytes(range(256)) * 300
    async with RawLink(server.port, greeting=b"") as link:
        raw = MAGIC + encode_frame(OpenLeg(0, "prefill", b"x")) + encode_frame(ProxyAlive())
        for cut in range(len(raw)):
            link.writer.write(raw[cut : cut + 1])
            await asyncio.sleep(0)
        await server.num_opened(1)
        raw = bytes(encode_frame(OpenLeg(1, "prefill", document)))
        for start in range(0, len(raw), 10_001):
            link.writer.write(raw[start : start + 10_001])
            await asyncio.sleep(0)
        link.send(CloseLeg(0))
        legs = await server.num_opened(2)
        assert legs[1].document == document
        async with asyncio.timeout(WAIT_S):
            await legs[0].ended.wait()


async def test_the_kernel_ends_a_link_whose_host_vanished(server, link):
    await opened(server, link)
    (at_worker,) = server.server.links
    connection = at_worker._transport.get_extra_info("socket")
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 45_000


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(leg_link_server, "ALIVE_INTERVAL_S", 0.01)
    monkeypatch.setattr(leg_link_server, "ORPHAN_TIMEOUT_S", 0.1)


async def test_a_link_with_nothing_to_say_shows_that_the_worker_lives(hurried, server, link):
    (leg,) = await opened(server, link)
    for _ in range(30):
        link.send(ProxyAlive())
        told = await link.next_frame()
        assert (told.tokens, told.events) == ([], [])
    assert not leg.ended.is_set()


async def test_a_proxy_that_says_nothing_is_gone(hurried, server, link):
    (leg,) = await opened(server, link)
    assert await link.is_ended()
    assert leg.ended.is_set()


async def fill(leg):
    """Say more than the sockets between here and there hold."""
    for index in range(400):
        leg.say(Token(index=index, token_id=1, text="x" * (1 << 16)))
        await asyncio.sleep(0)


async def test_a_proxy_that_does_not_read_is_gone(hurried, server, monkeypatch):
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT")  # which ends it as well
    async with RawLink(server.port) as link:
        await _leave_unread(server, link)


async def _leave_unread(server, link):
    (leg,) = await opened(server, link)
    link.reader._transport.pause_reading()
    await fill(leg)
    async with asyncio.timeout(WAIT_S):
        while not leg.ended.is_set():
            link.send(ProxyAlive())
            await asyncio.sleep(0.005)
    assert server.server.links == set()


async def test_what_a_proxy_leaves_unread_is_bounded(server, link, monkeypatch):
    monkeypatch.setattr(leg_link_server, "UNREAD_BYTES_MAX", 1 << 20)
    (leg,) = await opened(server, link)
    link.reader._transport.pause_reading()
    await fill(leg)
    assert leg.ended.is_set()
    assert server.server.links == set()


async def test_a_connection_that_says_nothing_is_closed(server, monkeypatch):
    monkeypatch.setattr(leg_link_server, "HELLO_TIMEOUT_S", 0.02)
    async with RawLink(server.port, greeting=b"") as link:
        assert await link.is_ended()


async def test_what_was_said_is_sent_before_the_server_ends_a_link(server, link):
    (leg,) = await opened(server, link)
    leg.say(token(0))
    server.server.close()
    assert leg.ended.is_set()
    assert (await link.next()).tokens == [plain(0, 0)]
    assert await link.is_ended()
