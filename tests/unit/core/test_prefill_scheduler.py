"""Seed N-56 to N-59: one prompt at a time, parked until it is pulled."""

import pytest
from core_kit import (
    NUM_SCHEDULES,
    RANDOM_SCHEDULES,
    RUNNING,
    TRANSFERRING,
    WAITING,
    SchedulerMachine,
    Transfer,
    make_received,
    make_request,
)
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from memory_kit import is_whole

from neuron_di.core import BlockCount, BlockPool, PrefillScheduler
from neuron_di.errors import LocalProtocolError


class PrefillMachine(SchedulerMachine):
    """Prompts run in chunks, are parked or ended by their first token, are pulled in any order.

    A reader of a request that was given up looks at its blocks until it ends, and must find them
    as they were. What could not be copied to where it is kept ends its request.
    """

    moves = {(WAITING, RUNNING), (RUNNING, TRANSFERRING)}  # noqa: RUF012

    def make_scheduler(self, chunk_tokens, waiting_max, prefixes):
        return PrefillScheduler(
            self.pool,
            block_size=self.block_size,
            batch_size=self.batch_size,
            chunk_tokens=chunk_tokens,
            waiting_max=waiting_max,
            prefixes=prefixes,
        )

    def num_at_start(self, request):
        return request.num_prefilled

    def num_at_most(self, request):
        return request.num_prefilled

    def give_up(self, request, is_held):
        if not is_held:
            self.scheduler.finish(request, "cancelled")
            return
        reader = Transfer(request)
        if reader.block_ids:
            self.quarantine.append(reader)
        self.scheduler.finish(request, "cancelled", reader)

    @rule(ends_at_once=st.booleans(), copy_fails=st.booleans())
    def step(self, ends_at_once=False, copy_fails=False):
        running = self.of(RUNNING)
        may_start = len(self.of(TRANSFERRING)) < self.batch_size and not self.is_head_stuck()
        waiting = self.of(WAITING)
        chunk = self.scheduler.schedule()
        self.only_legal_moves()
        self.quarantine = [reader for reader in self.quarantine if not reader.is_ended]
        assert len(self.of(RUNNING)) <= 1
        if chunk is None:
            assert not running
            assert not may_start
            return
        if running:
            assert chunk.request is running[0]
        else:
            assert may_start
            assert chunk.request is waiting[0]
        request = chunk.request
        assert chunk.start == request.num_computed
        assert is_whole(chunk, self.chunk_tokens)
        if not self.kv.compute(chunk, copy_fails):
            self.scheduler.finish(request, "error")
            return
        if chunk.is_last:
            request.generated.append(7)
        if chunk.is_last and ends_at_once:
            self.scheduler.finish(request, "stop")
        elif chunk.is_last:
            self.scheduler.park(request)
            assert request.status is TRANSFERRING

    @precondition(lambda self: self.of(TRANSFERRING))
    @rule(index=st.integers(0, 9))
    def release(self, index):
        parked = self.of(TRANSFERRING)
        request = parked[index % len(parked)]
        self.kv.check(request, request.num_prefilled)
        self.scheduler.release(request)
        assert request.finish_reason is None

    @precondition(lambda self: any(not reader.is_ended for reader in self.quarantine))
    @rule(index=st.integers(0, 9))
    def end_reader(self, index):
        reading = [reader for reader in self.quarantine if not reader.is_ended]
        reader = reading[index % len(reading)]
        self.kv.check(reader.request, reader.request.num_computed, reader.block_ids)
        reader.end()

    def end_transfers(self):
        while any(not reader.is_ended for reader in self.quarantine):
            self.end_reader(0)
        for request in self.of(TRANSFERRING):
            self.scheduler.release(request)


@pytest.mark.timeout(300)
def test_random_schedules():
    run_state_machine_as_test(PrefillMachine, settings=RANDOM_SCHEDULES)
    assert PrefillMachine.num_schedules >= NUM_SCHEDULES
    assert PrefillMachine.num_reused >= NUM_SCHEDULES // 50


@pytest.fixture
def scheduler():
    return PrefillScheduler(BlockPool(8), block_size=4, batch_size=2, chunk_tokens=8, waiting_max=9)


def run_prompt(scheduler):
    """Compute every chunk of the next prompt, without parking it."""
    while True:
        chunk = scheduler.schedule()
        chunk.mark_computed()
        if chunk.is_last:
            return chunk.request


def test_a_prompt_runs_in_chunks(scheduler):
    request = make_request("a", num_prompt=18)
    scheduler.add(request)
    spans = []
    for _ in range(3):
        chunk = scheduler.schedule()
        spans.append((chunk.start, chunk.end, chunk.is_last))
        chunk.mark_computed()
    assert spans == [(0, 8, False), (8, 16, False), (16, 18, True)]
    assert len(request.block_ids) == 5


def test_schedule_repeats_a_chunk_that_was_not_computed(scheduler):
    scheduler.add(make_request("a", num_prompt=18))
    assert scheduler.schedule() == scheduler.schedule()


def test_the_next_prompt_starts_while_the_last_one_is_pulled(scheduler):
    first, second = make_request("a", num_prompt=4), make_request("b", num_prompt=4)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.park(run_prompt(scheduler))
    assert scheduler.schedule().request is second
    assert (first.status, second.status) == (TRANSFERRING, RUNNING)


def test_nothing_starts_while_batch_size_are_parked(scheduler):
    requests = [make_request(name, num_prompt=4) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    for _ in range(2):
        scheduler.park(run_prompt(scheduler))
    assert scheduler.schedule() is None
    scheduler.release(requests[1])
    assert scheduler.schedule().request is requests[2]


def test_a_prompt_that_ends_with_its_first_token_leaves_at_once(scheduler):
    request = make_request("a", num_prompt=4)
    scheduler.add(request)
    scheduler.finish(run_prompt(scheduler), "stop")
    assert request.finish_reason == "stop"
    assert scheduler.is_idle()


def test_given_tokens_are_computed_behind_the_prompt_and_parked_with_it(scheduler):
    request = make_request("a", num_prompt=10, max_tokens=20, num_given=9)
    scheduler.add(request)
    spans = []
    for _ in range(4):
        chunk = scheduler.schedule()
        spans.append((chunk.start, chunk.end, chunk.is_replay, chunk.is_last))
        chunk.mark_computed()
    assert spans == [
        (0, 8, False, False),
        (8, 10, False, False),
        (10, 18, True, False),
        (18, 19, True, True),
    ]
    assert len(request.block_ids) == 5
    scheduler.park(request)


def test_a_request_must_be_prefilled_whole(scheduler):
    with pytest.raises(LocalProtocolError):
        scheduler.add(make_received("a", num_prompt=4, num_given=2))
    assert scheduler.is_idle()


def test_blocks_that_a_peer_may_read_are_quarantined(scheduler):
    requests = [make_request(name, num_prompt=12) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    for _ in range(2):
        scheduler.park(run_prompt(scheduler))
    reader = Transfer(requests[0])
    scheduler.finish(requests[0], "cancelled", held_by=reader)
    assert scheduler.num_transferring == 1  # its slot is free, its blocks are not
    assert scheduler.schedule() is None
    assert scheduler.count_blocks() == BlockCount(
        total=8, free=2, running=0, parked=3, quarantined=3
    )
    scheduler.finish(requests[1], "cancelled")
    scheduler.finish(requests[2], "cancelled")
    assert not scheduler.is_idle()
    scheduler.check_integrity()
    reader.end()
    assert scheduler.schedule() is None
    assert scheduler.is_idle()
    assert scheduler.count_blocks() == BlockCount(total=8, free=8)


def test_blocks_whose_reader_is_done_are_free_at_once(scheduler):
    request = make_request("a", num_prompt=12)
    scheduler.add(request)
    scheduler.park(run_prompt(scheduler))
    reader = Transfer(request)
    reader.end()
    scheduler.finish(request, "error", held_by=reader)
    assert scheduler.is_idle()
    assert scheduler.count_blocks().free == 8


def test_a_waiting_request_holds_nothing_to_quarantine(scheduler):
    request = make_request("a", num_prompt=12)
    scheduler.add(request)
    scheduler.finish(request, "cancelled", held_by=Transfer(request))
    assert scheduler.is_idle()


def test_an_unfinished_prompt_is_not_parked(scheduler):
    request = make_request("a", num_prompt=9)
    scheduler.add(request)
    scheduler.schedule().mark_computed()
    with pytest.raises(LocalProtocolError):
        scheduler.park(request)
    assert request.status is RUNNING


def test_a_finished_prompt_must_be_parked_or_finished_before_the_next_step(scheduler):
    scheduler.add(make_request("a", num_prompt=4))
    run_prompt(scheduler)
    with pytest.raises(LocalProtocolError):
        scheduler.schedule()


def test_only_a_parked_request_is_released(scheduler):
    request = make_request("a", num_prompt=4)
    scheduler.add(request)
    with pytest.raises(LocalProtocolError):
        scheduler.release(request)
    scheduler.park(run_prompt(scheduler))
    scheduler.release(request)
    with pytest.raises(LocalProtocolError):
        scheduler.release(request)
    assert scheduler.is_idle()
