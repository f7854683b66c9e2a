"""Seed N-16: prefill goes first whenever the batch has a free slot, and stalls everybody."""

import pytest
from core_kit import (
    NUM_SCHEDULES,
    RANDOM_SCHEDULES,
    RUNNING,
    WAITING,
    SchedulerMachine,
    make_request,
)
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from memory_kit import is_whole

from neuron_di.core import BlockPool, CombinedScheduler, DecodeBatch, PrefillChunk


class CombinedMachine(SchedulerMachine):
    """Prompts and decode steps take turns on one worker."""

    moves = {(WAITING, RUNNING)}  # noqa: RUF012

    def make_scheduler(self, chunk_tokens, waiting_max, prefixes):
        return CombinedScheduler(
            self.pool,
            block_size=self.block_size,
            batch_size=self.batch_size,
            chunk_tokens=chunk_tokens,
            waiting_max=waiting_max,
            reserve_tokens=self.reserve_tokens,
            prefixes=prefixes,
        )

    @rule(stops=st.booleans(), copy_fails=st.booleans())
    def step(self, stops=False, copy_fails=False):
        self.let_go(self.scheduler.failures())
        running = self.of(RUNNING)
        prefilling = [r for r in running if r.num_computed < r.num_prefilled]
        may_start = len(running) < self.batch_size and not self.is_head_stuck()
        waiting = self.of(WAITING)
        plan = self.scheduler.schedule()
        self.only_legal_moves()
        if prefilling:
            expected = prefilling
        elif may_start:
            expected = waiting[:1]
        else:
            assert (list(plan.requests) if plan else []) == running
            assert plan is None or isinstance(plan, DecodeBatch)
            if plan is None:
                return
            expected = running
        if prefilling or may_start:
            assert isinstance(plan, PrefillChunk)
            assert [plan.request] == expected
            assert is_whole(plan, self.chunk_tokens)
        if not self.kv.compute(plan, copy_fails):
            self.scheduler.finish(plan.request, "error")
            return
        if isinstance(plan, PrefillChunk) and not plan.is_last:
            return
        for request in expected:
            request.generated.append(7)
            if stops or len(request.generated) == request.max_tokens:
                self.scheduler.finish(request, "length")


@pytest.mark.timeout(300)
def test_random_schedules():
    run_state_machine_as_test(CombinedMachine, settings=RANDOM_SCHEDULES)
    assert CombinedMachine.num_schedules >= NUM_SCHEDULES
    assert CombinedMachine.num_reused >= NUM_SCHEDULES // 50


@pytest.fixture
def scheduler():
    return CombinedScheduler(
        BlockPool(16), block_size=4, batch_size=2, chunk_tokens=4, waiting_max=9, reserve_tokens=99
    )


def run_step(scheduler):
    """One step; what was computed: a prompt's span, or the batch's names."""
    plan = scheduler.schedule()
    plan.mark_computed()
    if isinstance(plan, PrefillChunk):
        if plan.is_last:
            plan.request.generated.append(7)
        return plan.request.request_id, plan.start, plan.end
    for request in plan.requests:
        request.generated.append(7)
    return [request.request_id for request in plan.requests]


def test_the_chunks_of_a_prompt_run_back_to_back_and_stall_decode(scheduler):
    scheduler.add(make_request("a", num_prompt=4, max_tokens=9))
    assert run_step(scheduler) == ("a", 0, 4)
    assert run_step(scheduler) == ["a"]
    scheduler.add(make_request("b", num_prompt=10, max_tokens=9))
    assert [run_step(scheduler) for _ in range(4)] == [
        ("b", 0, 4),
        ("b", 4, 8),
        ("b", 8, 10),
        ["a", "b"],
    ]


def test_given_tokens_are_computed_behind_the_prompt_before_decode_goes_on(scheduler):
    scheduler.add(make_request("a", num_prompt=6, max_tokens=9, num_given=5))
    assert [run_step(scheduler) for _ in range(5)] == [
        ("a", 0, 4),
        ("a", 4, 6),
        ("a", 6, 10),
        ("a", 10, 11),
        ["a"],
    ]
    scheduler.check_integrity()


def test_a_full_batch_decodes_before_the_next_prompt(scheduler):
    requests = [make_request(name, num_prompt=4, max_tokens=9) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    assert [run_step(scheduler) for _ in range(4)] == [
        ("a", 0, 4),
        ("b", 0, 4),
        ["a", "b"],
        ["a", "b"],
    ]
    scheduler.finish(requests[0], "stop")
    assert run_step(scheduler) == ("c", 0, 4)
    assert run_step(scheduler) == ["b", "c"]


def test_a_prompt_cancelled_between_chunks_leaves_the_others_decoding(scheduler):
    first = make_request("a", num_prompt=4, max_tokens=9)
    second = make_request("b", num_prompt=10, max_tokens=9)
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(second)
    assert run_step(scheduler) == ("b", 0, 4)
    scheduler.finish(second, "cancelled")
    assert run_step(scheduler) == ["a"]
    scheduler.check_integrity()
