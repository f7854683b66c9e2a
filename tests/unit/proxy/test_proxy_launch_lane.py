"""Steady tokens that take a lane: what an attempt knows of them, and when it takes them back."""

import asyncio
from functools import partial

import pytest
from laned_run import PAIR, STALL_S, WHOLE, Refuses, half_open, running, texts
from scripted_worker import finished, parked, released, token
from virtual_time import virtual

from neuron_di.clock import now_s
from neuron_di.errors import PeerTimeout, RemoteProtocolError
from neuron_di_proxy.leg_merge import LANE_TRY_TOKENS
from neuron_di_proxy.token_lane import IS_COMPILED

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="the extension for tokens was not built")


@pytest.mark.parametrize("route", [PAIR, WHOLE])
@virtual
async def test_steady_tokens_reach_the_client_and_are_counted(route):
    with running(route) as run:
        leg = await run.steady()
        for index in range(2, 50):
            assert leg.tell(index) == []
        assert run.emitted == [0, 1]
        assert run.rig.received() == texts(*range(2, 50))
        assert run.rig.ids[2:] == [100 + index for index in range(2, 50)]
        leg.say(finished(50))
        if route is PAIR:
            run.legs["prefill"].say(released())
        assert await run.task == finished(50)
        assert run.attempt.num_tokens == 50


@virtual
async def test_a_decode_that_is_alone_takes_the_lane_with_its_first_token():
    with running() as run:
        await asyncio.sleep(0)
        run.legs["prefill"].say(token(0), parked(), released())
        leg = run.legs["decode"]
        for index in range(1, 5):
            assert leg.tell(index) == []
        assert run.emitted == [0]
        assert run.rig.received() == texts(*range(1, 5))
        leg.say(finished(5))
        assert await run.task == finished(5)
        assert run.attempt.num_tokens == 5
        assert run.attempt.decode == finished(5).receipt


@virtual
async def test_a_decode_that_is_alone_may_stall_before_and_after_its_first_token():
    for num_told in 0, 1:
        with running() as run:
            await asyncio.sleep(0)
            run.legs["prefill"].say(token(0), parked(), released())
            await asyncio.sleep(0.9 * STALL_S)
            run.legs["decode"].tell(*range(1, 1 + num_told))
            begun_s = now_s()
            with pytest.raises(PeerTimeout, match="d1 sent no token"):
                await run.task
            wait_s = STALL_S if num_told else 0.1 * STALL_S
            assert now_s() - begun_s == pytest.approx(wait_s, abs=0.01)
            assert run.attempt.num_tokens == 1 + num_told


@virtual
async def test_a_decode_that_is_tried_is_praised_with_its_first_token():
    with running() as run:
        breaker = half_open(run.health, PAIR.decode)
        await asyncio.sleep(0)
        assert not breaker.admits()
        run.legs["prefill"].say(token(0), parked(), released())
        leg = run.legs["decode"]
        assert leg.tell(1) == [1], "a lane would praise it later"
        assert breaker.admits()
        assert leg.tell(2) == []
        leg.say(finished(3))
        assert await run.task == finished(3)


@virtual
async def test_a_decode_that_takes_the_lane_at_once_is_praised_when_it_is_next_heard():
    with running() as run:
        await asyncio.sleep(0)
        breaker = half_open(run.health, PAIR.decode)  # while the request runs
        run.legs["prefill"].say(token(0), parked(), released())
        run.legs["decode"].tell(1)
        assert breaker._num_good == 0
        run.legs["decode"].say(finished(2))
        await run.task
        assert breaker._num_good == 1


@virtual
async def test_an_end_that_counts_other_tokens_is_not_believed():
    with running() as run:
        leg = await run.steady()
        leg.tell(2, 3)
        leg.say(finished(5))
        with pytest.raises(RemoteProtocolError, match="of which 4 came"):
            await run.task
        assert run.attempt.num_tokens == 4


@pytest.mark.parametrize("index", [1, 2, 4])
@virtual
async def test_a_token_that_is_not_due_ends_the_attempt(index):
    with running() as run:
        leg = await run.steady()
        leg.tell(2)
        assert leg.tell(index, 3) == [index, 3], "nothing overtakes"
        with pytest.raises(RemoteProtocolError, match="3 was due"):
            await run.task
        assert run.rig.received() == texts(2)
        assert run.attempt.blamed.worker_id == "d1"
        assert leg.is_closed


@virtual
async def test_after_a_token_that_was_heard_the_lane_goes_on():
    with running() as run:
        leg = await run.steady()
        leg.tell(2)
        leg.say(token(3))
        assert leg.tell(4, 5) == []
        assert run.emitted == [0, 1, 3]
        assert run.rig.received() == texts(2, 4, 5)
        leg.say(finished(6))
        run.legs["prefill"].say(released())
        await run.task


@pytest.mark.parametrize("route", [PAIR, WHOLE])
@virtual
async def test_an_answer_that_becomes_plain_text_later_takes_a_lane_then(route):
    with running(route, has_lane=lambda: run.num_asked > 2) as run:
        leg = await run.steady()
        is_heard = [leg.tell(index) == [index] for index in range(2, 3 * LANE_TRY_TOKENS)]
        num_heard = is_heard.count(True)
        assert is_heard == sorted(is_heard, reverse=True)
        assert 2 + num_heard == 2 * LANE_TRY_TOKENS
        assert run.num_asked == 3
        run.task.cancel()
        await asyncio.sleep(0)


@virtual
async def test_a_stall_counts_from_the_lanes_last_token():
    with running() as run:
        leg = await run.steady()
        for index in range(2, 20):
            await asyncio.sleep(0.9 * STALL_S)
            leg.tell(index)
        last_s = now_s()
        with pytest.raises(PeerTimeout, match="d1 sent no token"):
            await run.task
        assert now_s() - last_s == pytest.approx(STALL_S, abs=0.01)
        assert run.attempt.num_tokens == 20


@virtual
async def test_the_deadline_ends_it_however_many_tokens_come():
    with running() as run:
        leg = await run.steady()
        index = 2
        while not run.task.done():
            await asyncio.sleep(STALL_S / 2)
            if not run.task.done():
                leg.tell(index)
                index += 1
        assert run.attempt.num_tokens == index
        with pytest.raises(Exception, match="not complete in time"):
            await run.task


@pytest.mark.parametrize("how", ["cancelled", "failed"])
@virtual
async def test_what_comes_after_the_end_reaches_nobody(how):
    with running() as run:
        leg = await run.steady()
        leg.tell(2)
        if how == "cancelled":
            run.task.cancel()
        else:
            leg.say(PeerTimeout("d1 is silent"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert run.task.done()
        assert leg.tell(3) == [3]
        assert run.rig.received() == texts(2)
        assert run.attempt.num_tokens == 3
        assert len(run.rig.ids) == 3
        assert run.task.cancelled() or run.task.exception()


@virtual
async def test_what_prefill_says_meanwhile_changes_nothing():
    with running() as run:
        leg = await run.steady()
        leg.tell(2)
        run.legs["prefill"].say(released())
        assert leg.tell(3) == []
        leg.say(finished(4))
        assert await run.task == finished(4)
        assert run.rig.received() == texts(2, 3)
        assert run.attempt.prefill == released().receipt


@virtual
async def test_a_bug_of_a_lane_is_told_and_is_no_workers_fault():
    with running() as run:
        run.rig.lane = partial(run.rig.lane, record=Refuses())
        leg = await run.steady()
        assert leg.tell(2, 3) == [3]
        with pytest.raises(ZeroDivisionError):
            await run.task
        assert run.attempt.blamed is None
        assert leg.is_closed
