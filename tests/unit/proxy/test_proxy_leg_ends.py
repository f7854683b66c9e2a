"""A crowd of answers that end together does not keep the loop from everything else."""

import asyncio

import pytest
from leg_ear import MESSAGE, Ear, open_leg
from scripted_worker import ScriptedWorker, finished, token

from neuron_di.errors import PeerGone
from neuron_di.wire import Failed, Finished, Parked
from neuron_di.wire.leg_link import Told, encode_frame
from neuron_di_proxy import leg_link
from neuron_di_proxy.failure import LegFailed

AT_ONCE = leg_link._ENDS_PER_TURN
NUM = 2 * AT_ONCE + 3


@pytest.fixture
async def worker(stack):
    return await stack.enter_async_context(ScriptedWorker("d1", "decode"))


class Crowd:
    """Legs of one link. Notes what each hears, and in which turn of the loop."""

    def __init__(self, num):
        self.heard = [[] for _ in range(num)]
        self.turns = []
        self.then = lambda _: None
        self._now = 0
        asyncio.get_running_loop().call_soon(self._turn)

    @classmethod
    async def open(cls, client, worker, num=NUM):
        crowd = cls(num)
        crowd.legs = [client.open_leg(worker.record, "decode", MESSAGE) for _ in range(num)]
        for each, leg in enumerate(crowd.legs):
            leg.open(lambda said, each=each: crowd._hear(each, said))
        crowd.seen = [await worker.next_leg() for _ in range(num)]
        return crowd

    def _turn(self):
        self._now += 1
        asyncio.get_running_loop().call_soon(self._turn)

    def _hear(self, each, said):
        self.heard[each].append(said)
        self.turns.append(self._now)
        self.then(each)

    async def all_heard(self):
        async with asyncio.timeout(10):
            while not all(self.heard):  # noqa: ASYNC110 - they are called, and call nobody
                await asyncio.sleep(0)

    async def end(self):
        """Let the worker say, in one frame, that all answers are over."""
        ends = [(number, finished(1)) for number in range(len(self.legs))]
        await self.seen[0].send_bytes(encode_frame(Told([], ends)))


async def test_some_end_in_each_turn_of_the_loop_and_in_order(client, worker):
    crowd = await Crowd.open(client, worker)
    order = []
    crowd.then = order.append
    await crowd.end()
    await crowd.all_heard()
    assert crowd.heard == [[finished(1)]] * NUM
    assert order == list(range(NUM))
    first = crowd.turns[0]
    assert [crowd.turns.count(first + each) for each in range(3)] == [AT_ONCE, AT_ONCE, 3]


async def test_what_comes_meanwhile_is_heard_before_the_last_of_them(client, worker):
    crowd = await Crowd.open(client, worker)
    _leg, ear, _seen = await open_leg(client, worker)
    missing = []

    def hear(said):
        missing.append(crowd.heard.count([]))
        ear(said)

    client._links[next(iter(client._links))]._hears[NUM] = hear
    ends = [(number, finished(1)) for number in range(NUM)]
    raw = encode_frame(Told([], ends)) + encode_frame(Told([(NUM, 1, 101, "a")], []))
    await crowd.seen[0].send_bytes(raw)
    assert await ear.next() == token(1, "a")
    assert missing == [NUM - AT_ONCE]
    await crowd.all_heard()


async def test_two_crowds_end_one_after_the_other(client, worker):
    crowd = await Crowd.open(client, worker)
    order = []
    crowd.then = order.append
    halves = (range(0, NUM, 2), range(1, NUM, 2))
    frames = [Told([], [(number, finished(1)) for number in half]) for half in halves]
    await crowd.seen[0].send_bytes(b"".join(encode_frame(frame) for frame in frames))
    await crowd.all_heard()
    assert order == [*halves[0], *halves[1]]
    assert max(crowd.turns.count(turn) for turn in crowd.turns) <= AT_ONCE


async def test_who_was_told_the_end_hears_it_though_the_link_breaks(client, worker):
    crowd = await Crowd.open(client, worker)
    _leg, beside, _seen = await open_leg(client, worker)
    (link,) = client._links.values()
    crowd.then = lambda _: link.end(PeerGone("the worker is gone"))  # with the first one
    await crowd.end()
    await crowd.all_heard()
    assert crowd.heard == [[finished(1)]] * NUM
    assert isinstance(await beside.next(), PeerGone)
    assert not link.has_legs
    assert not link.lanes


async def test_one_that_is_closed_before_its_turn_hears_nothing(client, worker):
    crowd = await Crowd.open(client, worker)
    closed = NUM - 1

    def then(each):
        if each == 0:
            crowd.legs[closed].close()

    crowd.then = then
    await crowd.end()
    crowd.heard[closed].append("nothing")
    await crowd.all_heard()
    await asyncio.sleep(0)
    assert crowd.heard == [[finished(1)]] * closed + [["nothing"]]


async def test_the_first_last_word_counts(client, worker):
    crowd = await Crowd.open(client, worker)
    failed = Failed(code="worker_failed", message="broken", http_status=500, retryable=True)
    said = [(number, word) for number in range(NUM) for word in (failed, finished(1))]
    await crowd.seen[0].send_bytes(encode_frame(Told([], said)))
    await crowd.all_heard()
    assert [len(each) for each in crowd.heard] == [1] * NUM
    assert all(isinstance(each[0], LegFailed) for each in crowd.heard)


async def test_what_a_worker_says_of_itself_is_heard_behind_them(client, worker):
    """It may say that it has failed: then who has not heard how a leg ended would never."""
    crowd = await Crowd.open(client, worker)
    (link,) = client._links.values()
    heard_then = []

    def lose(_):
        heard_then.append(sum(map(bool, crowd.heard)))
        for leg in crowd.legs:
            leg.close()

    link._on_status = lose
    ends = [(number, finished(1)) for number in range(NUM)]
    words = encode_frame(Told([], [], worker._status_now()))
    await crowd.seen[0].send_bytes(encode_frame(Told([], ends)) + 2 * words)
    await crowd.all_heard()
    assert crowd.heard == [[finished(1)]] * NUM
    assert heard_then == [NUM], "once, of two words of which the second is as new as the first"


async def test_nothing_is_heard_of_a_leg_behind_its_last_word(client, worker):
    crowd = await Crowd.open(client, worker)
    ends = [(number, finished(1)) for number in range(NUM)]
    late = [(number, 1, 101, "late") for number in range(NUM)]
    raw = encode_frame(Told([], ends)) + encode_frame(Told(late, [(NUM - 1, Parked(num_prompt=1))]))
    await crowd.seen[0].send_bytes(raw)
    await crowd.all_heard()
    assert crowd.heard == [[finished(1)]] * NUM


async def test_ends_of_legs_that_are_not_there_are_not_kept(client, worker):
    crowd = await Crowd.open(client, worker)
    (link,) = client._links.values()
    most = 0

    def then(_):
        nonlocal most
        most = max(most, len(link._ends))

    crowd.then = then
    strange = [(number, finished(1)) for number in range(NUM, NUM + 2000)]
    ends = [(number, finished(1)) for number in range(NUM)]
    await crowd.seen[0].send_bytes(encode_frame(Told([], ends + strange)))
    await crowd.all_heard()
    assert most == NUM - 1


async def test_one_that_breaks_at_its_end_keeps_no_other_from_it(client, worker):
    crowd = await Crowd.open(client, worker)
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: reported.append(what))

    def then(each):
        if each == AT_ONCE:  # the first one of a later turn
            raise RuntimeError("a bug")

    crowd.then = then
    await crowd.end()
    await crowd.all_heard()
    assert [isinstance(each[0], Finished) for each in crowd.heard] == [True] * NUM
    assert [str(each["exception"]) for each in reported] == ["a bug"]


async def test_the_last_word_of_a_leg_that_was_never_sent_keeps_no_other_from_its_own(
    client, worker, monkeypatch
):
    """A worker that is out of its mind may say so before the leg is refused for want of room."""
    crowd = await Crowd.open(client, worker)
    _leg, beside, _seen = await open_leg(client, worker)
    (link,) = client._links.values()
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: reported.append(what))
    monkeypatch.setattr(leg_link, "UNSENT_BYTES_MAX", -1)
    unsent = Ear()
    client.open_leg(worker.record, "decode", MESSAGE).open(unsent)
    ends = [(number, finished(1)) for number in [*range(NUM), NUM + 1]]
    link.hear_told([], encode_frame(Told([], ends))[4:], [])
    await asyncio.sleep(0)  # now it is refused, while its last word waits for its turn
    link.end(PeerGone("the worker is gone"))
    assert isinstance(await beside.next(), PeerGone)
    assert await unsent.next() == finished(1)
    assert crowd.heard == [[finished(1)]] * NUM
    assert reported == []
