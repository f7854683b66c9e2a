"""A worker's death costs latency, not answers. On virtual time, with the default limits."""

import asyncio

import msgspec
import pytest
from scripted_worker import finished, token
from virtual_cluster import (
    NUM_TOKENS,
    REQUEST,
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

from neuron_di.errors import (
    CapacityError,
    PeerGone,
)
from neuron_di.wire import Finished, Parked, PromptOptions
from neuron_di_proxy.failure import LegFailed, failure_of
from neuron_di_proxy.recovery import BUDGET_BURST, RetryBudget

GONE = PeerGone("the connection ended")


@virtual
async def test_an_undisturbed_request_is_one_attempt():
    async with two_by_two() as cluster:
        asked = await cluster.ask()
        assert asked.is_complete
        assert asked.attempts() == [("p1", "d1", 0, None, None)]
        assert asked.record.continued() is None
        assert [leg.message.attempt for leg in cluster.legs] == [0, 0]


@pytest.mark.parametrize("dead", ["p1", "d1"])
@virtual
async def test_before_the_first_token_the_request_moves_to_other_workers(dead):
    async with two_by_two() as cluster:
        cluster.workers[dead].script = fail_with(GONE)
        if dead == "d1":
            cluster.workers["p1"].script = silent_after(0)
        asked = await cluster.ask()
        assert asked.is_complete
        first, second = asked.attempts()
        assert first == ("p1", "d1", 0, "peer_gone", dead)
        assert dead not in second[:2]
        assert {leg.message.request_id for leg in cluster.legs} == {"r1"}
        assert [leg.message.attempt for leg in cluster.legs] == [0, 0, 1, 1]
        assert all(leg.first_index == 0 for leg in cluster.legs)
        assert asked.record.continued() is None  # the client saw nothing of it


@pytest.mark.parametrize("num_given", range(1, NUM_TOKENS))
@virtual
async def test_after_it_the_stream_goes_on_at_the_next_index(num_given):
    async with two_by_two() as cluster:
        cluster.workers["d1"].script = fail_with(GONE, after=num_given - 1)
        asked = await cluster.ask()
        assert asked.is_complete
        assert [each.token_id for each in asked.tokens] == [100 + i for i in range(NUM_TOKENS)]
        first, second = asked.attempts()
        assert first == ("p1", "d1", 0, "peer_gone", "d1")
        assert second[1:4] == ("d2", num_given, None)
        prefill, decode = (leg.message for leg in cluster.legs[2:])
        assert prefill.emitted == tuple(100 + i for i in range(num_given))
        assert decode.num_emitted == num_given
        assert prefill.attempt == decode.attempt == 1
        assert asked.record.continued().continued == 1


@virtual
async def test_each_continuation_is_given_all_that_was_emitted():
    async with VirtualCluster(
        VirtualWorker("p1", "prefill"),
        VirtualWorker("d1", "decode", fail_with(GONE, after=1)),
        VirtualWorker("d2", "decode", fail_with(GONE, after=2)),
        VirtualWorker("d3", "decode"),
    ) as cluster:
        asked = await cluster.ask()
        assert asked.is_complete
        emitted = [leg.message.emitted for leg in cluster.workers["p1"].legs]
        assert [len(ids) for ids in emitted] == [0, 2, 5]
        assert emitted[-1] == (100, 101, 102, 103, 104)
        assert asked.record.continued().continued == 2


@virtual
async def test_emitted_tokens_that_are_the_whole_answer_need_no_further_one():
    async def script(leg):
        if leg.message.emitted:
            yield finished(len(leg.message.emitted), "p1", "stop")
        else:
            async for event in play(leg):
                yield event

    async with one_by_one() as cluster:
        cluster.workers["p1"].script = script
        cluster.workers["d1"].script = fail_with(failed(), after=3)
        asked = await cluster.ask()
        assert (asked.indices, asked.finished.reason) == ([0, 1, 2, 3], "stop")


@pytest.mark.parametrize(
    ("limit", "after", "num_attempts"), [("retries_max", 0, 4), ("continuations_max", 1, 4)]
)
@virtual
async def test_attempts_are_limited_and_the_last_error_is_told(limit, after, num_attempts):
    async with two_by_two(**{limit: 3}) as cluster:
        if after == 0:
            cluster.workers["p1"].script = cluster.workers["p2"].script = silent_after(0)
        for name in ("d1", "d2"):
            cluster.workers[name].script = fail_with(failed(f"trouble in {name}"))
        asked = await cluster.ask()
        assert len(asked.record.attempts) == num_attempts
        last = asked.attempts()[-1]
        assert isinstance(asked.error, LegFailed)
        assert asked.error.failed.code == last[3] == f"trouble in {last[1]}"
        assert asked.finished is None
        assert asked.indices == list(range(len(asked.tokens)))


@virtual
async def test_retries_and_continuations_are_counted_apart():
    async with one_by_one(retries_max=1, continuations_max=1) as cluster:
        cluster.workers["p1"].script = once(fail_with(failed()))
        cluster.workers["d1"].script = once(silent_after(0), once(fail_with(failed(), after=2)))
        asked = await cluster.ask()
        assert asked.is_complete
        assert [each[2] for each in asked.attempts()] == [0, 0, 3]


@virtual
async def test_tokens_of_an_attempt_that_is_over_never_reach_the_client():
    async def late(leg):
        yield token(1)
        await asyncio.sleep(1.0)  # by then it is blamed, and another goes on
        for index in range(2, 6):
            yield token(index, "stale")

    async with two_by_two() as cluster:
        cluster.workers["d1"].script = late
        asking = asyncio.create_task(cluster.ask())
        await asyncio.sleep(0.5)
        first = cluster.workers["d1"].legs[0]
        cluster.workers["d1"].freeze()
        await asyncio.sleep(4.0)
        assert first.is_closed
        cluster.workers["d1"].thaw()
        first.say(token(2, "stale"))
        asked = await asking
        assert asked.is_complete
        assert "stale" not in [each.text for each in asked.tokens]


@pytest.mark.parametrize("wrong", [[0], [2], [1, 1], [1, 3]])
@virtual
async def test_a_worker_that_skips_or_repeats_a_token_is_replaced(wrong):
    async def script(leg):
        for index in wrong:
            yield token(index)

    async with two_by_two() as cluster:
        cluster.workers["d1"].script = script
        asked = await cluster.ask()
        assert asked.is_complete
        assert asked.attempts()[0][3:] == ("remote_protocol_error", "d1")


@virtual
async def test_an_answer_that_lost_its_tail_is_not_complete():
    async def script(leg):
        yield token(1)
        yield finished(NUM_TOKENS)

    async with two_by_two() as cluster:
        cluster.workers["d1"].script = script
        asked = await cluster.ask()
        assert asked.is_complete
        assert asked.attempts()[0][3:] == ("remote_protocol_error", "d1")


@virtual
async def test_without_a_budget_nothing_is_tried_again():
    async with two_by_two(retry_share=0.5) as cluster:
        cluster.workers["d1"].script = fail_with(GONE, after=1)
        cluster.runner.budget.left = 0.4  # with this request's share: not yet 1
        asked = await cluster.ask()
        assert asked.error is GONE
        assert len(asked.record.attempts) == 1


def test_the_budget_is_refilled_by_requests_up_to_its_burst():
    budget = RetryBudget(0.25)
    assert sum(budget.take() for _ in range(500)) == BUDGET_BURST
    for _ in range(3):
        budget.admit()
    assert not budget.take()
    budget.admit()
    assert budget.take()
    assert not budget.take()
    for _ in range(10_000):
        budget.admit()
    assert budget.left == BUDGET_BURST


@pytest.mark.parametrize(
    "failure",
    [
        failed("context_length_exceeded", 400, fault="client", retryable=False),
        failed("invalid_request", 400, fault="client", retryable=True),
        failed("stale_attempt", 502, fault="peer", retryable=False),
    ],
    ids=lambda failure: failure.code,
)
@virtual
async def test_what_another_attempt_cannot_mend_is_told_at_once(failure):
    async with two_by_two() as cluster:
        cluster.workers["p1"].script = fail_with(failure)
        asked = await cluster.ask()
        assert failure_of(asked.error) == failure
        assert len(asked.record.attempts) == 1
        assert cluster.runner.budget.left == BUDGET_BURST
        if failure.fault == "client":
            assert asked.attempts()[0][4] is None


@pytest.mark.parametrize("refusal", [failed("over_capacity", 503), CapacityError("full")])
@virtual
async def test_a_worker_without_room_is_passed_by_and_not_blamed(refusal):
    async with two_by_two() as cluster:
        cluster.workers["d1"].script = fail_with(refusal)
        cluster.workers["p1"].script = once(silent_after(0))
        asked = await cluster.ask()
        assert asked.is_complete
        assert asked.attempts()[0] == ("p1", "d1", 0, "over_capacity", None)
        assert asked.attempts()[1][1] == "d2"
        assert cluster.health.is_usable(cluster.workers["d1"].record)


@virtual
async def test_the_worker_that_its_partner_blames_is_avoided():
    async with VirtualCluster(
        *(VirtualWorker(name, "prefill") for name in ("p1", "p2")), VirtualWorker("d1", "decode")
    ) as cluster:
        cluster.workers["d1"].script = once(fail_with(failed("kv_expired", 502, fault="peer")))
        asked = await cluster.ask()
        assert asked.is_complete
        assert asked.attempts()[0][4] == "p1"
        assert asked.attempts()[1][:2] == ("p2", "d1")


@virtual
async def test_one_worker_that_does_it_all_continues_elsewhere():
    async with VirtualCluster(
        VirtualWorker("b1", "both", fail_with(GONE, after=3), numerics="same"),
        VirtualWorker("b2", "both", numerics="same"),
    ) as cluster:
        asked = await cluster.ask()
        assert asked.is_complete
        assert asked.attempts() == [
            ("b1", "b1", 0, "peer_gone", "b1"),
            ("b2", "b2", 3, None, None),
        ]
        assert cluster.legs[1].message.emitted == (100, 101, 102)
        assert asked.record.continued().grade == "exact"


@virtual
async def test_one_worker_that_does_it_all_may_prefill_for_others_between_two_tokens():
    async def script(leg):
        async for event in play(leg):
            if event == token(3):
                await asyncio.sleep(20.0)
            yield event

    async with VirtualCluster(
        VirtualWorker("b1", "both", script), VirtualWorker("b2", "both"), stall_timeout_s=1.0
    ) as cluster:
        asked = await cluster.ask()
        assert asked.is_complete
        assert len(asked.record.attempts) == 1


@pytest.mark.parametrize("failure", [failed(), failed("over_capacity", 503)])
@pytest.mark.parametrize("bad", ["p1", "d1"])
@virtual
async def test_whoever_failed_or_refused_is_avoided_although_it_is_its_turn(bad, failure):
    async with two_by_two() as cluster:

        async def script(leg):
            cluster.router.pick("tiny")  # meanwhile another request takes p2 and d2
            yield failure

        cluster.workers[bad].script = script
        asked = await cluster.ask()
        assert asked.is_complete
        (first, second) = asked.attempts()
        assert first[:2] == ("p1", "d1")
        assert second[0 if bad == "p1" else 1] != bad


@pytest.mark.parametrize("after", [0, 1, 3])
@virtual
async def test_cached_tokens_are_those_of_the_attempt_that_gave_token_0(after):
    def with_cached(script, num_cached):
        async def cached(leg):
            async for event in script(leg):
                is_parked = isinstance(event, Parked)
                yield Parked(num_prompt=5, num_cached=num_cached) if is_parked else event

        return cached

    async with two_by_two() as cluster:
        broken = fail_with(GONE) if after == 0 else play
        cluster.workers["p1"].script = with_cached(broken, 3)
        cluster.workers["p2"].script = with_cached(play, 4)
        cluster.workers["d1"].script = fail_with(GONE, after=after) if after else play
        asked = await cluster.ask()
        assert asked.is_complete
        assert [each[0] for each in asked.attempts()] == ["p1", "p2"]
        assert asked.finished.num_cached == (4 if after == 0 else 3)
        assert asked.record.finished == asked.finished


@virtual
async def test_one_worker_that_does_it_all_says_what_it_had_cached():
    async def script(leg):
        async for event in play(leg):
            if isinstance(event, Finished):
                event = msgspec.structs.replace(event, num_cached=2)
            yield event

    async with VirtualCluster(VirtualWorker("b1", "both", script)) as cluster:
        assert (await cluster.ask()).finished.num_cached == 2


@pytest.mark.parametrize(("after", "reports"), [(0, [True, True]), (2, [True, False])])
@virtual
async def test_a_prompt_is_reported_until_the_client_has_the_report(after, reports):
    options = PromptOptions(report=True, logprobs=1, add_special_tokens=False)
    async with two_by_two() as cluster:
        cluster.workers["d1"].script = fail_with(GONE, after=after)
        if after == 0:
            cluster.workers["p1"].script = silent_after(0)
        request = msgspec.structs.replace(REQUEST, options=options)
        asked = await cluster.ask(request=request)
        assert asked.is_complete
        seen = [leg.message.options for leg in cluster.legs if leg.worker_id.startswith("p")]
        assert [each.report for each in seen] == reports
        assert [each.logprobs for each in seen] == [1 if each else None for each in reports]
        assert all(each.add_special_tokens is False for each in seen)


@virtual
async def test_a_token_is_counted_before_it_is_given():
    async with one_by_one() as cluster:
        asked = cluster.request()
        seen = []

        def emit(given):
            seen.append((given.index, len(asked.record.emitted), asked.record.attempts[-1].number))

        await cluster.runner.run(REQUEST, asked.record, emit)
        assert seen == [(i, i + 1, 0) for i in range(NUM_TOKENS)]
