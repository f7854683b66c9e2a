"""Who pays for a failure: the worker, the pair, the budget or the request. On virtual time."""

import asyncio

import pytest
from scripted_worker import parked, token
from virtual_cluster import (
    TOKEN_S,
    Asked,
    VirtualCluster,
    VirtualWorker,
    fail_with,
    failed,
    once,
    one_by_one,
    play,
    silent_after,
    slowly,
    two_by_two,
)
from virtual_time import virtual

from neuron_di.clock import now_s
from neuron_di.errors import PeerGone, RemoteProtocolError
from neuron_di_proxy.breaker import FAILURES_MAX, OPEN_S
from neuron_di_proxy.failure import failure_of
from neuron_di_proxy.recovery import BUDGET_BURST

GONE = PeerGone("the connection ended")
STEP_FAILED = failed("worker_failed")
GAVE_UP = failed("kv_missing", 502, fault="peer")
CORRUPT = failed("kv_corrupt", 502, fault="peer")
REFUSED = failed("peer_refused", 502, fault="peer", retryable=False)


def states(cluster):
    return {r.record.worker_id: r.state for r in cluster.health.reports()}


def pairs_of(asked):
    return [attempt[:2] for attempt in asked.attempts()]


# A step that fails: the worker's fault or the request's.


def fail_at(index):
    """No worker computes this token."""

    async def script(leg):
        async for event in play(leg):
            if getattr(event, "index", 0) >= index:
                yield STEP_FAILED
            else:
                yield event

    return script


@pytest.mark.parametrize("index", [0, 1, 3])
@virtual
async def test_a_request_that_makes_steps_fail_everywhere_harms_no_worker(index):
    async with two_by_two(retries_max=5, continuations_max=5) as cluster:
        for worker in cluster.workers.values():
            worker.script = fail_at(index)
        for _ in range(3 * FAILURES_MAX):
            asked = await cluster.ask()
            assert failure_of(asked.error).code == "worker_failed"
            assert len({each[4] for each in asked.attempts()}) == 2  # and never a third
            assert asked.indices == list(range(index))
            await asyncio.sleep(1.0)
        assert set(states(cluster).values()) == {"up"}


@pytest.mark.parametrize("role", ["p", "d"])
@virtual
async def test_a_worker_whose_steps_fail_though_another_manages_them_is_left_alone(role):
    async with two_by_two() as cluster:
        cluster.workers[f"{role}1"].script = fail_with(STEP_FAILED)
        for _ in range(4 * FAILURES_MAX):
            assert (await cluster.ask()).is_complete
            await asyncio.sleep(1.0)
            if "broken" in states(cluster).values():
                break
        assert states(cluster) == dict.fromkeys(cluster.workers, "up") | {f"{role}1": "broken"}


@virtual
async def test_one_request_counts_once_against_a_breaker():
    async with VirtualCluster(
        VirtualWorker("p1", "prefill"),
        *(VirtualWorker(f"d{i}", "decode") for i in range(3)),
        continuations_max=9,
    ) as cluster:
        blames = []
        blame = cluster.health.blame

        def note(record, error, *, is_certain=True):
            blames.append((record.worker_id, failure_of(error).code, is_certain))
            blame(record, error, is_certain=is_certain)

        cluster.health.blame = note
        cluster.workers["d0"].script = fail_with(STEP_FAILED, after=1)
        cluster.workers["d1"].script = fail_with(GONE, after=2)
        asked = await cluster.ask()
        assert asked.is_complete
        assert [each for each in blames if each[2]] == [
            ("d0", "worker_failed", True),
            ("d1", "peer_gone", True),
        ]


@virtual
async def test_a_lone_worker_may_try_a_failed_step_again():
    async with one_by_one() as cluster:
        cluster.workers["d1"].script = once(fail_with(STEP_FAILED))
        assert (await cluster.ask()).is_complete


# The budget: a worker's death is not the requests' fault.


@pytest.mark.parametrize("end", ["kill", "freeze", "restart"])
@virtual
async def test_300_streams_go_on_when_their_worker_is_lost(end):
    async with two_by_two() as cluster:
        for worker in cluster.workers.values():
            worker.script = slowly(0.5)
        asked = [cluster.request() for _ in range(600)]
        tasks = [asyncio.create_task(cluster.ask(each)) for each in asked]
        await asyncio.sleep(2.2)  # the streams have begun
        getattr(cluster.workers["d1"], end)()
        await asyncio.gather(*tasks)
        assert all(each.is_complete for each in asked)
        lost = [each for each in asked if len(each.record.attempts) > 1]
        assert len(lost) == 300
        assert {each.attempts()[0][4] for each in lost} == {"d1"}
        assert cluster.runner.budget.left == BUDGET_BURST


@virtual
async def test_a_broken_connection_to_a_worker_that_lives_is_charged():
    async with two_by_two() as cluster:
        cluster.workers["d1"].script = once(fail_with(GONE, after=1))
        assert (await cluster.ask()).is_complete
        assert cluster.runner.budget.left == BUDGET_BURST - 1


@virtual
async def test_a_lost_worker_does_not_lift_a_requests_own_limit():
    async with two_by_two(continuations_max=0) as cluster:
        cluster.workers["d1"].script = silent_after(2)
        asking = asyncio.create_task(cluster.ask())
        await asyncio.sleep(5 * TOKEN_S)
        cluster.workers["d1"].kill()
        assert (await asking).error is not None


# A breaker's trial.


@virtual
async def test_a_long_stream_is_not_a_long_trial():
    async with one_by_one(retries_max=0, continuations_max=0) as cluster:
        for _ in range(FAILURES_MAX):
            await asyncio.sleep(1.0)
            for worker in cluster.workers.values():
                cluster.health.blame(worker.record, RemoteProtocolError("garbage"))
        for worker in cluster.workers.values():
            worker.script = slowly(1.0)
        await asyncio.sleep(OPEN_S)
        first = cluster.request()
        task = asyncio.create_task(cluster.ask(first))
        await asyncio.sleep(1.5)
        for worker in cluster.workers.values():
            assert not cluster.health.is_usable(worker.record)
        await asyncio.sleep(1.0)
        assert not any(leg.is_closed for leg in cluster.legs)  # parked, and the first token
        for worker in cluster.workers.values():
            assert cluster.health.is_usable(worker.record)
        assert (await cluster.ask()).is_complete
        assert set(states(cluster).values()) == {"up"}
        assert (await task).is_complete


# Accusations.


async def run_two(prefill, decode) -> tuple[VirtualCluster, Asked]:
    async with two_by_two() as cluster:
        cluster.workers["p1"].script, cluster.workers["d1"].script = prefill, decode
        return cluster, await cluster.ask()


def after_s(script, wait_s):
    async def later(leg):
        async for event in script(leg):
            if not hasattr(event, "index"):
                await asyncio.sleep(wait_s)
            yield event

    return later


def park_and(error):
    async def script(leg):
        yield token(0)
        yield parked()
        await asyncio.sleep(TOKEN_S)
        yield error

    return script


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("word", "blamed"), [(CORRUPT, "p1"), (failed("kv_changed", 502), "d1"), (GONE, "d1")]
)
@virtual
async def test_decodes_own_word_says_why_it_gave_up(first, word, blamed):
    late_s = 0.5 if first == "prefill" else 0.0
    _, asked = await run_two(park_and(GAVE_UP), after_s(fail_with(word), late_s))
    assert asked.is_complete
    assert asked.attempts()[0][3:] == (word.code, blamed)


@pytest.mark.parametrize("script", [fail_with(GAVE_UP), park_and(GAVE_UP)])
@virtual
async def test_decode_that_says_nothing_is_blamed_soon(script):
    _, asked = await run_two(script, silent_after(0))
    assert asked.is_complete
    assert asked.attempts()[0][3:] == ("kv_missing", "d1")
    assert now_s() < 1.5


@pytest.mark.parametrize("is_prefill_first", [True, False])
@pytest.mark.parametrize("script", [fail_with, park_and])
@virtual
async def test_two_that_accuse_each_other_do_not_wait_for_each_other(script, is_prefill_first):
    never = failed("kv_missing", 502, fault="peer")
    late = after_s(fail_with(never), 0.2 if is_prefill_first else 0.0)
    _, asked = await run_two(script(GAVE_UP), late)
    assert asked.is_complete
    assert asked.attempts()[0][3] == "kv_missing"
    assert pairs_of(asked)[1] == ("p2", "d2")
    assert now_s() < 0.5


@virtual
async def test_decode_that_has_the_kv_goes_on_though_prefill_heard_nothing_of_it():
    async def silent_prefill(leg):
        yield token(0)
        yield parked()
        yield GAVE_UP

    _, asked = await run_two(silent_prefill, slowly(0.6))
    assert asked.is_complete
    assert len(asked.record.attempts) == 1


@virtual
async def test_an_accusation_opens_no_breaker_and_both_ends_are_avoided():
    async with two_by_two() as cluster:

        async def script(leg):
            cluster.router.pick("tiny")  # meanwhile another request takes the other workers
            yield CORRUPT

        cluster.workers["d1"].script = script
        for _ in range(2 * FAILURES_MAX):
            asked = await cluster.ask()
            assert asked.is_complete
            if len(asked.record.attempts) > 1:
                prefill, decode = pairs_of(asked)[0]
                assert prefill not in pairs_of(asked)[1]
                assert decode not in pairs_of(asked)[1]
            await asyncio.sleep(1.0)
        assert set(states(cluster).values()) == {"up"}


@virtual
async def test_a_worker_that_will_not_work_with_its_partner_works_with_another():
    async def script(leg):
        if leg.message.prefill.worker_id == "p1":
            yield REFUSED
        else:
            async for event in play(leg):
                yield event

    async with VirtualCluster(
        *(VirtualWorker(name, "prefill") for name in ("p1", "p2")),
        VirtualWorker("d1", "decode", script),
    ) as cluster:
        for number in range(2 * FAILURES_MAX):
            asked = await cluster.ask()
            assert asked.is_complete
            assert pairs_of(asked) == [("p1", "d1")] * (number == 0) + [("p2", "d1")]
        [result] = cluster.pairs.results()
        assert (result.prefill.worker_id, result.outcome) == ("p1", "failed")
        assert set(states(cluster).values()) == {"up"}


@virtual
async def test_a_refusal_is_tried_elsewhere_once():
    async with two_by_two(retries_max=9) as cluster:
        for name in ("d1", "d2"):
            cluster.workers[name].script = fail_with(REFUSED)
        asked = await cluster.ask()
        assert failure_of(asked.error).code == "peer_refused"
        assert pairs_of(asked) == [("p1", "d1"), ("p2", "d2")]


# What a continuation keeps.


@virtual
async def test_a_continuation_keeps_the_context_that_it_began_with():
    sizes = {"p1": 512, "p2": 2048, "p3": 256, "d1": 1024, "d2": 256, "d3": 4096}
    async with VirtualCluster(
        *(
            VirtualWorker(name, "prefill" if name[0] == "p" else "decode", context_tokens=size)
            for name, size in sizes.items()
        )
    ) as cluster:
        cluster.workers["d1"].script = fail_with(GONE, after=2)
        asked = await cluster.ask()
        assert asked.is_complete
        assert pairs_of(asked) == [("p1", "d1"), ("p2", "d3")]
        assert {leg.message.context_tokens for leg in cluster.legs} == {512}


@virtual
async def test_an_attempt_that_gave_nothing_sets_no_context():
    sizes = {"b1": 4096, "b2": 512}
    async with VirtualCluster(
        *(VirtualWorker(name, "both", context_tokens=size) for name, size in sizes.items())
    ) as cluster:
        cluster.workers["b1"].script = fail_with(failed())
        asked = await cluster.ask()
        assert asked.is_complete
        assert [leg.message.context_tokens for leg in cluster.legs] == [4096, 512]
