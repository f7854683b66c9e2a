"""Each pair of workers proves that it can hand over. On virtual time."""

import asyncio

import msgspec
import pytest
from scripted_worker import receipt, token
from virtual_cluster import (
    VirtualCluster,
    VirtualWorker,
    fail_with,
    failed,
    once,
    one_by_one,
    play,
    silent_after,
    two_by_two,
)
from virtual_time import virtual

from neuron_di.errors import PeerGone, PeerTimeout
from neuron_di.wire import Released
from neuron_di_proxy.route import Route
from neuron_di_proxy.self_test import ID_PREFIX, LOOK_INTERVAL_S, RETRY_S, TEST_TIMEOUT_S


def outcomes(cluster):
    return {
        (r.prefill.worker_id, r.decode.worker_id): (r.outcome, r.reason)
        for r in cluster.pairs.results()
    }


@virtual
async def test_every_pair_is_tested_once_one_at_a_time():
    async with two_by_two() as cluster:
        open_now = []

        def open_leg(record, kind, leg, before=cluster.open_leg):
            open_now.append(sum(not leg.is_closed for leg in cluster.legs))
            return before(record, kind, leg)

        cluster.open_leg = open_leg
        await cluster.start_self_test()
        await asyncio.sleep(60.0)
        assert set(outcomes(cluster)) == {(p, d) for p in ("p1", "p2") for d in ("d1", "d2")}
        assert set(outcomes(cluster).values()) == {("ok", "")}
        assert open_now == [0, 1] * 4


@virtual
async def test_a_test_is_a_small_request_whose_kv_takes_more_than_one_block():
    async with one_by_one() as cluster:
        await cluster.start_self_test()
        await asyncio.sleep(1.0)
        prefill, decode = (leg.message for leg in cluster.legs)
        assert msgspec.json.decode(prefill.prompt) == [0, 1] * 9
        assert prefill.sampling == decode.sampling
        assert (prefill.sampling.max_tokens, prefill.sampling.temperature) == (2, 0.0)
        assert prefill.sampling.ignore_eos
        assert prefill.request_id.startswith(ID_PREFIX)


async def no_kv(leg):
    async for event in play(leg):
        if isinstance(event, Released):
            event = Released(receipt=receipt("p1", "prefill"))
        yield event


async def without_bytes(leg):
    async for event in play(leg):
        if hasattr(event, "num_generated"):
            event = msgspec.structs.replace(event, receipt=receipt("d1", "decode"))
        yield event


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        (play, fail_with(PeerGone("d1 is gone")), "d1 is gone"),
        (play, fail_with(failed("kv_corrupt", 502)), "kv_corrupt"),
        (silent_after(2), silent_after(0), "not complete in time"),
        (no_kv, without_bytes, "no KV was handed over"),
    ],
)
@virtual
async def test_a_pair_that_fails_is_avoided_and_says_why(prefill, decode, reason):
    async with two_by_two() as cluster:
        cluster.workers["p1"].script = prefill
        cluster.workers["d1"].script = decode
        for name in ("p1", "d1"):  # with others these two work
            bad, good = cluster.workers[name].script, play
            other = "d1" if name == "p1" else "p1"

            def script(leg, bad=bad, good=good, other=other):
                return (bad if partner(cluster, leg) == other else good)(leg)

            cluster.workers[name].script = script
        await cluster.start_self_test()
        await asyncio.sleep(5.0 if "in time" not in reason else 35.0)
        assert outcomes(cluster)["p1", "d1"][0] == "failed"
        assert reason in outcomes(cluster)["p1", "d1"][1]
        assert [o for o, _ in outcomes(cluster).values()].count("ok") == 3
        routes = [cluster.router.pick("tiny") for _ in range(8)]
        ids = {(route.prefill.worker_id, route.decode.worker_id) for route in routes}
        assert ("p1", "d1") not in ids
        assert len(ids) >= 2


def partner(cluster, leg):
    """The worker at the other end of a leg's hand-over."""
    same = [each for each in cluster.legs if each.message.request_id == leg.message.request_id]
    return next(each.worker_id for each in same if each is not leg)


@virtual
async def test_a_failed_pair_is_used_where_there_is_no_other_and_tried_again_later():
    async with one_by_one() as cluster:
        cluster.workers["d1"].script = once(fail_with(failed()))
        await cluster.start_self_test()
        await asyncio.sleep(RETRY_S - 1.0)
        assert outcomes(cluster)["p1", "d1"][0] == "failed"
        assert len(cluster.legs) == 2
        records = [worker.record for worker in cluster.workers.values()]
        assert cluster.router.pick("tiny") == Route(*records)
        await asyncio.sleep(1.0 + 2 * LOOK_INTERVAL_S)
        assert outcomes(cluster) == {("p1", "d1"): ("ok", "")}


@virtual
async def test_a_busy_worker_has_not_failed():
    async with one_by_one() as cluster:
        cluster.workers["d1"].script = once(fail_with(failed("over_capacity", 503)))
        await cluster.start_self_test()
        await asyncio.sleep(0.3)
        assert outcomes(cluster) == {}
        await asyncio.sleep(1.0)
        assert outcomes(cluster) == {("p1", "d1"): ("ok", "")}


def slow_prefill(error):
    async def script(leg):
        await asyncio.sleep(TEST_TIMEOUT_S + 1.0 if error is None else 20.0)
        yield error or token(0)

    return script


@pytest.mark.parametrize("error", [None, failed("deadline_exceeded", 504), PeerTimeout("silent")])
@virtual
async def test_a_test_that_waits_for_prefill_in_vain_says_nothing(error):
    async with one_by_one() as cluster:
        cluster.workers["p1"].script = once(slow_prefill(error))
        await cluster.start_self_test()
        await asyncio.sleep(TEST_TIMEOUT_S + 1.0 if error is None else 21.0)
        assert outcomes(cluster) == {}
        assert len(cluster.legs) == 2  # and is not tried again at once
        await asyncio.sleep(RETRY_S)
        assert outcomes(cluster) == {("p1", "d1"): ("ok", "")}


@virtual
async def test_a_pair_that_breaks_later_is_found_by_the_first_request_that_it_fails():
    async def break_d1(leg):
        is_bad = partner(cluster, leg) == "p1"
        script = fail_with(failed("kv_corrupt", 502, fault="peer")) if is_bad else play
        async for event in script(leg):
            yield event

    async with two_by_two() as cluster:
        await cluster.start_self_test()
        await asyncio.sleep(5.0)
        assert set(outcomes(cluster).values()) == {("ok", "")}
        cluster.workers["d1"].script = break_d1
        asked = await cluster.ask()
        assert asked.is_complete
        assert asked.attempts() == [
            ("p1", "d1", 0, "kv_corrupt", "p1"),
            ("p2", "d2", 1, None, None),
        ]
        await asyncio.sleep(1.0)
        assert outcomes(cluster)["p1", "d1"] == ("failed", "failed: kv_corrupt")
        num_legs = len(cluster.legs)
        cluster.workers["d1"].script = play
        await asyncio.sleep(RETRY_S + 5.0)
        assert outcomes(cluster)["p1", "d1"] == ("ok", "")
        assert len(cluster.legs) == num_legs + 2  # only the doubted pair, and once
        assert {r.state for r in cluster.health.reports()} == {"up"}


@virtual
async def test_doubts_about_processes_that_are_gone_are_forgotten():
    async with one_by_one() as cluster:
        cluster.pairs.doubt(*(worker.record for worker in cluster.workers.values()))
        cluster.pairs.keep_only(())
        assert not cluster.pairs._doubted


@virtual
async def test_a_model_too_small_for_the_test_is_not_degraded():
    refusal = failed("context_length_exceeded", 400, fault="client", retryable=False)
    async with one_by_one() as cluster:
        cluster.workers["p1"].script = fail_with(refusal)
        await cluster.start_self_test()
        await asyncio.sleep(60.0)
        assert outcomes(cluster)["p1", "d1"][0] == "skipped"
        assert len(cluster.legs) == 2


@virtual
async def test_a_restarted_worker_is_tested_again_and_its_predecessor_forgotten():
    async with one_by_one() as cluster:
        await cluster.start_self_test()
        await asyncio.sleep(1.0)
        cluster.workers["d1"].restart()
        cluster.relist()
        await asyncio.sleep(2.0)
        [result] = cluster.pairs.results()
        assert result.decode == cluster.workers["d1"].record
        assert len(cluster.legs) == 4


@virtual
async def test_workers_that_do_not_fit_or_do_not_live_are_not_tested():
    async with VirtualCluster(
        VirtualWorker("p1", "prefill"),
        VirtualWorker("d1", "decode", layout_digest="other"),
        VirtualWorker("d2", "decode", state="starting"),
        VirtualWorker("d3", "decode"),
        VirtualWorker("b1", "both"),
    ) as cluster:
        cluster.workers["d3"].kill()
        await asyncio.sleep(1.0)
        await cluster.start_self_test()
        await asyncio.sleep(5.0)
        assert cluster.legs == []


@virtual
async def test_nothing_is_tested_after_the_end():
    async with one_by_one() as cluster:
        cluster.workers["d1"].script = silent_after(0)
        await cluster.start_self_test()
        await asyncio.sleep(1.0)
        assert not cluster.are_all_legs_closed()
    assert cluster.are_all_legs_closed()
