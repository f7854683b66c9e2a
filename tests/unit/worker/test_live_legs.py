"""The table of live legs: its bounds, its fence, and the time each leg has."""

import asyncio

import pytest
from worker_kit import collect, decode_leg, until

from neuron_di.clock import Deadline
from neuron_di.engine import Broken, Emitted
from neuron_di.errors import (
    BadRequest,
    CapacityError,
    DeadlinePassed,
    KvMissing,
    Preempted,
    StaleAttempt,
)
from neuron_di.types import RequestId
from neuron_di.wire import Token
from neuron_di.worker.live_legs import LegQueue, LiveLegs

R = RequestId("r")
LONG_S = 60.0


def emitted(key, index=0):
    return Emitted(key, Token(index=index, token_id=1, text=""))


async def test_events_reach_their_leg_and_no_other():
    legs = LiveLegs(8, 16)
    with legs.open((R, 0), LONG_S) as one, legs.open((RequestId("s"), 0), LONG_S) as other:
        legs.dispatch([emitted(("s", 0)), emitted((R, 0)), emitted(("gone", 0))])
        assert (await one.get()).key == (R, 0)
        assert (await other.get()).key == ("s", 0)
        assert len(legs) == 2
    assert len(legs) == 0
    legs.dispatch([emitted((R, 0))])  # nobody is there, which harms nobody


async def test_a_leg_that_runs_is_not_opened_twice():
    legs = LiveLegs(8, 16)
    with legs.open((R, 0), LONG_S):
        with pytest.raises(BadRequest, match="run here already"), legs.open((R, 0), LONG_S):
            pass
        assert (R, 0) in legs


async def test_more_legs_than_the_limit_are_refused():
    legs = LiveLegs(1, 16)
    second = legs.open((RequestId("s"), 0), LONG_S)
    with legs.open((R, 0), LONG_S), pytest.raises(CapacityError), second:
        pass
    with legs.open((RequestId("s"), 0), LONG_S):
        pass


async def test_an_earlier_attempt_is_refused_also_when_the_later_one_is_over():
    legs = LiveLegs(8, 16)
    with legs.open((R, 2), LONG_S), pytest.raises(StaleAttempt), legs.open((R, 1), LONG_S):
        pass
    with pytest.raises(StaleAttempt), legs.open((R, 0), LONG_S):
        pass
    with legs.open((R, 2), LONG_S), legs.open((R, 3), LONG_S):
        pass


async def test_a_later_attempt_ends_an_earlier_one_that_runs():
    legs = LiveLegs(8, 16)
    with legs.open((R, 0), LONG_S) as old:
        legs.dispatch([emitted((R, 0))])
        with legs.open((R, 5), LONG_S) as new:
            assert isinstance(await old.get(), Emitted)
            assert isinstance((await old.get()).error, StaleAttempt)
            assert new._queue.empty()


async def test_a_refused_attempt_does_not_fence():
    legs = LiveLegs(2, 16)
    with legs.open((R, 0), LONG_S) as old, legs.open((RequestId("another"), 0), LONG_S):
        with pytest.raises(CapacityError), legs.open((RequestId("third"), 1), LONG_S):
            pass
        assert old._queue.empty()
    with legs.open((RequestId("third"), 0), LONG_S):
        pass


async def test_an_earlier_attempt_does_not_take_the_place_of_a_later():
    legs = LiveLegs(1, 16)
    with legs.open((R, 0), LONG_S) as old, legs.open((R, 1), LONG_S):
        assert isinstance((await old.get()).error, StaleAttempt)


async def test_what_is_remembered_of_attempts_is_bounded():
    legs = LiveLegs(8, 16)
    for n in range(100):
        with legs.open((RequestId(f"r{n}"), 3), LONG_S):
            pass
    assert len(legs._latest) == 16
    with pytest.raises(StaleAttempt), legs.open((RequestId("r99"), 0), LONG_S):
        pass
    with legs.open((RequestId("r0"), 0), LONG_S):  # too long ago
        pass


async def test_a_leg_whose_time_is_over_says_so():
    with pytest.raises(DeadlinePassed):
        await LegQueue(Deadline.after(0.01)).get()


async def test_what_came_in_time_is_said_in_time():
    queue = LegQueue(Deadline.after(0.0))
    queue.put(emitted((R, 0)))
    assert isinstance(await queue.get(), Emitted)
    with pytest.raises(DeadlinePassed):
        await queue.get()


# Waiting for something else than the queue


async def interrupted(queue, wait):
    with queue.interruptible():
        await wait


async def test_a_broken_leg_ends_what_it_waits_for():
    queue, never = LegQueue(Deadline.after(LONG_S)), asyncio.Event()
    leg = asyncio.create_task(interrupted(queue, never.wait()))
    await asyncio.sleep(0)
    queue.put(emitted((R, 0)))  # which is for later
    await asyncio.sleep(0)
    assert not leg.done()
    queue.put(Broken((R, 0), StaleAttempt("a later attempt took over")))
    with pytest.raises(StaleAttempt):
        await leg
    assert not leg.cancelled()
    assert leg.cancelling() == 0


async def test_cancelling_a_leg_that_waits_is_not_taken_for_its_end():
    queue, never = LegQueue(Deadline.after(LONG_S)), asyncio.Event()
    leg = asyncio.create_task(interrupted(queue, never.wait()))
    await asyncio.sleep(0)
    leg.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leg


async def test_broken_and_cancelled_at_once_is_cancelled():
    queue, never = LegQueue(Deadline.after(LONG_S)), asyncio.Event()
    leg = asyncio.create_task(interrupted(queue, never.wait()))
    await asyncio.sleep(0)
    queue.put(Broken((R, 0), StaleAttempt("a later attempt took over")))
    leg.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leg


async def test_what_fails_by_itself_keeps_its_reason():
    async def fail():
        raise KvMissing("gone")

    queue = LegQueue(Deadline.after(LONG_S))
    with pytest.raises(KvMissing):
        await interrupted(queue, fail())
    queue.put(Broken((R, 0), StaleAttempt("a later attempt took over")))
    assert isinstance(await queue.get(), Broken)  # nobody is interrupted any more


async def test_an_earlier_attempt_that_waits_for_prefill_is_ended(prefill, decode):
    """The whole of it: its lookup, its place in the table, and what prefill knows of it."""
    table = prefill.prefill._send_buffer.lookup_dict
    old = asyncio.create_task(collect(decode.decode.run(decode_leg("r", prefill))))
    await until(lambda: (R, 0) in table)
    new = asyncio.create_task(collect(decode.decode.run(decode_leg("r", prefill, attempt=1))))
    with pytest.raises(StaleAttempt):
        await old
    await until(lambda: list(table) == [(R, 1)])
    new.cancel()
    await asyncio.gather(new, return_exceptions=True)
    await until(lambda: table == {})


async def test_one_that_gave_way_to_others_has_not_failed():
    """It goes on, here or elsewhere: a drain during which that happens is a clean one."""
    legs = LiveLegs(8, 16)
    with pytest.raises(Preempted), legs.open((R, 0), LONG_S):
        raise Preempted("older requests needed its blocks")
    with pytest.raises(KvMissing), legs.open((R, 1), LONG_S):
        raise KvMissing("gone")
    assert (legs.tally.num_preempted, legs.tally.num_finished) == (1, 0)
    assert legs.tally.failed == {"kv_missing": 1}
