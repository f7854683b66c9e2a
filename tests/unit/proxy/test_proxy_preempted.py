"""Requests that a worker let go for older ones: nothing failed, so nothing is spent."""

import asyncio

import pytest
from virtual_cluster import TOKEN_S, fail_with, failed, once, one_by_one, play, two_by_two
from virtual_time import virtual

from neuron_di.clock import now_s

GAVE_WAY = failed("preempted", 503)


@pytest.mark.parametrize("continuations_max", [0, 1])
@virtual
async def test_who_gives_way_to_others_goes_on_as_often_as_it_takes(continuations_max):
    scripts = [fail_with(GAVE_WAY, after=1)] * 3 + [play]
    async with one_by_one(continuations_max=continuations_max, queue_timeout_s=0.5) as cluster:
        decode = cluster.workers["d1"]
        decode.script = lambda leg: scripts.pop(0)(leg)
        before = cluster.runner.budget.left
        asked = await cluster.ask()
        assert asked.is_complete
        assert [each.code for each in asked.record.attempts] == ["preempted"] * 3 + [None]
        assert cluster.runner.budget.left >= before
        assert all(each.blamed is None for each in asked.record.attempts)


@virtual
async def test_it_goes_on_at_workers_with_room_where_there_are_some():
    async with two_by_two() as cluster:
        cluster.workers["d1"].script = fail_with(GAVE_WAY, after=2)
        cluster.workers["d2"].script = play
        asked = await cluster.ask()
        assert asked.is_complete
        assert [each[1] for each in asked.attempts()] in (["d1", "d2"], ["d2"])


async def refuse(_):
    yield failed("over_capacity", 503)


@pytest.mark.parametrize("is_behind_a_token", [False, True])
@virtual
async def test_refusals_after_that_cost_nothing_either(is_behind_a_token):
    refused = fail_with(failed("over_capacity", 503)) if is_behind_a_token else refuse
    scripts = [fail_with(GAVE_WAY, after=1), refused, refused, refused, play]
    async with one_by_one(continuations_max=1, retries_max=1) as cluster:
        cluster.workers["d1"].script = lambda leg: scripts.pop(0)(leg)
        asked = await cluster.ask()
        assert asked.is_complete
        assert len(asked.record.attempts) == 5
        assert cluster.runner.budget.left == 100


@virtual
async def test_it_waits_for_a_worker_that_drains_and_starts_again():
    async with one_by_one(queue_timeout_s=5.0) as cluster:
        decode = cluster.workers["d1"]
        decode.script = once(fail_with(GAVE_WAY, after=2))
        asking = asyncio.create_task(cluster.ask())
        await asyncio.sleep(2.5 * TOKEN_S)
        cluster.directory.records = [cluster.workers["p1"].record]
        await asyncio.sleep(60.0)
        cluster.relist()
        assert (await asking).is_complete


@virtual
async def test_one_that_finds_no_room_any_more_ends_at_its_deadline():
    async with one_by_one(queue_timeout_s=5.0, request_timeout_s=40.0) as cluster:
        scripts = [fail_with(GAVE_WAY, after=2)]
        cluster.workers["d1"].script = lambda leg: (scripts.pop() if scripts else refuse)(leg)
        asked = await cluster.ask()
        assert asked.error is not None
        assert len(asked.record.emitted) == 3
        first, *others = asked.record.attempts
        assert first.emitted == ()
        assert len(others) > 10
        assert len({id(each.emitted) for each in others}) == 1  # kept once
        assert now_s() == pytest.approx(40.0, abs=2.0)
