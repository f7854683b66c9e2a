"""A first token that takes a lane: what an attempt knows of it, and who closes the lane."""

import asyncio

import pytest
from lane_rig import Rig, event_of, payload_of
from laned_run import PAIR, WHOLE, Refuses, half_open, running
from scripted_worker import finished, parked, released, token
from virtual_time import virtual

from neuron_di.clock import now_s
from neuron_di.errors import PeerTimeout, RemoteProtocolError
from neuron_di_proxy.token_lane import IS_COMPILED, relay_told

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="the extension for tokens was not built")


async def launched():
    """The legs are open, and the first token may come."""
    for _ in range(2):
        await asyncio.sleep(0)


@pytest.mark.parametrize("route", [PAIR, WHOLE])
@virtual
async def test_the_first_token_takes_a_lane(route):
    with running(route, has_first_lane=True) as run:
        await launched()
        await asyncio.sleep(1)
        first = run.legs["prefill" if route is PAIR else "whole"]
        assert first.tell(0) == []
        assert run.rig.events == [event_of("t0")], "the answer has to be begun"
        assert run.rig.record.first_token_s == run.rig.record.last_token_s == now_s() > 0
        if route is PAIR:
            first.say(parked(), released())
            assert run.legs["decode"].tell(1, 2) == []
            run.legs["decode"].say(finished(3))
        else:
            assert first.tell(1, 2) == [1, 2]
            first.say(finished(3))
        assert await run.task == finished(3)
        assert run.attempt.num_tokens == 3
        assert run.rig.ids == [100, 101, 102]


@virtual
async def test_an_answer_of_one_token_takes_a_lane():
    with running(has_first_lane=True) as run:
        await launched()
        run.legs["prefill"].tell(0)
        run.legs["prefill"].say(finished(1))
        assert await run.task == finished(1)
        assert run.attempt.num_tokens == 1


@virtual
async def test_a_second_token_of_prefill_is_refused_before_anybody_sees_it():
    with running(has_first_lane=True) as run:
        await launched()
        assert run.legs["prefill"].tell(0, 1) == [1]
        with pytest.raises(RemoteProtocolError, match="may not happen"):
            await run.task
        assert run.rig.ids == [100]
        assert run.attempt.num_tokens == 1
        assert run.attempt.blamed.worker_id == "p1"


@pytest.mark.parametrize("text", ["", "t1"])
@virtual
async def test_a_first_token_that_is_not_due_or_no_text_is_heard(text):
    with running(has_first_lane=True) as run:
        await launched()
        leg, index = run.legs["prefill"], 1 if text else 0
        others, _, _ = relay_told(payload_of([(7, index, 100, text)]), leg.lanes, now_s())
        assert others == [(7, index, 100, text)]
        leg.say(token(index, text))
        if text:
            with pytest.raises(RemoteProtocolError, match="0 was due"):
                await run.task
        else:
            assert run.emitted == [0]
            run.task.cancel()
            await asyncio.gather(run.task, return_exceptions=True)
        assert run.rig.events == []


@virtual
async def test_decode_that_speaks_first_closes_the_first_tokens_lane():
    with running(has_first_lane=True) as run:
        await launched()
        run.legs["decode"].say(token(1))
        assert run.legs["prefill"].tell(0) == [0]
        assert run.emitted == [0]
        run.legs["prefill"].say(parked())
        assert run.emitted == [0, 1]
        assert run.legs["decode"].tell(2) == []
        run.task.cancel()
        await asyncio.gather(run.task, return_exceptions=True)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@virtual
async def test_a_failure_after_the_first_token_counts_it(side):
    with running(has_first_lane=True) as run:
        await launched()
        run.legs["prefill"].tell(0)
        run.legs[side].say(PeerTimeout("silent"))
        with pytest.raises(PeerTimeout):
            await run.task
        assert run.attempt.num_tokens == 1
        assert run.attempt.blamed.worker_id == ("p1" if side == "prefill" else "d1")


@virtual
async def test_a_client_that_leaves_after_the_first_token_leaves_no_lane():
    with running(has_first_lane=True) as run:
        await launched()
        run.legs["prefill"].tell(0)
        run.task.cancel()
        await asyncio.gather(run.task, return_exceptions=True)
        assert run.attempt.num_tokens == 1
        assert run.legs["prefill"].tell(1) == [1]
        assert run.rig.ids == [100]


@virtual
async def test_a_prefill_that_is_tried_is_heard_at_once():
    with running(WHOLE, has_first_lane=True) as run:
        breaker = half_open(run.health, WHOLE.decode)
        await launched()
        assert run.legs["whole"].tell(0) == [0], "a lane would praise it later"
        assert breaker.admits()
        run.task.cancel()
        await asyncio.gather(run.task, return_exceptions=True)


@virtual
async def test_a_failure_of_the_first_tokens_lane_ends_the_attempt():
    with running(has_first_lane=True) as run:
        run.rig.record = Refuses()
        await launched()
        run.legs["prefill"].tell(0)
        with pytest.raises(ZeroDivisionError):
            await run.task


@virtual
async def test_a_worker_that_does_it_all_is_praised_for_its_first_token():
    with running(WHOLE, has_first_lane=True) as run:
        await launched()
        breaker = half_open(run.health, WHOLE.decode)  # while the request runs
        run.legs["whole"].tell(0)
        run.legs["whole"].say(PeerTimeout("silent"))
        with pytest.raises(PeerTimeout):
            await run.task
        assert breaker._num_good == 1


def test_a_first_lane_takes_one_token_even_while_that_is_written():
    rig = Rig()
    begun = []

    def begin(event):
        begun.append(event)
        others, _, _ = relay_told(payload_of([(7, 1, 101, "t1")]), lanes, 2.0)
        assert others == [(7, 1, 101, "t1")]

    lanes = {7: rig.lane(write=begin, begun=lambda: None)}
    relay_told(payload_of([(7, 0, 100, "t0")]), lanes, 1.0)
    assert begun == [event_of("t0")]
    assert rig.ids == [100]
    rig.close()
