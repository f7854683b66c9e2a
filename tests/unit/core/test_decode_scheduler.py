"""N-13 to N-15 and N-60 to N-64: received before it runs, and never on foreign KV."""

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

from neuron_di.core import BlockCount, BlockPool, DecodeScheduler
from neuron_di.errors import LocalProtocolError, PeerGone, Preempted


class DecodeMachine(SchedulerMachine):
    """Transfers end in any order, well or badly, long after their request left too.

    An ended transfer has written its KV to its blocks, whoever owns them by then: KV that is
    reused too early is found out when a batch reads it.
    """

    moves = {(WAITING, TRANSFERRING), (TRANSFERRING, RUNNING)}  # noqa: RUF012

    def make_scheduler(self, chunk_tokens, waiting_max, prefixes):
        return DecodeScheduler(
            self.pool,
            block_size=self.block_size,
            batch_size=self.batch_size,
            waiting_max=waiting_max,
            reserve_tokens=self.reserve_tokens,
        )

    def new_request(self, num_prompt, num_more, num_given, age, ids):
        num_given = max(1, num_given)
        return make_received(
            len(self.requests),
            num_prompt=num_prompt,
            max_tokens=num_given + num_more,
            num_given=num_given,
            age=age,
        )

    def started_transfers(self):
        return [t for t in self.transfers if t.request.status is TRANSFERRING]

    def is_due(self, transfer):
        """True for a failed transfer whose request was not finished yet."""
        return transfer.failure is not None and transfer.request.status is TRANSFERRING

    @rule(finishes_failed=st.booleans(), starts_transfers=st.booleans())
    def step(self, finishes_failed=True, starts_transfers=True):
        if finishes_failed:
            self.finish_failed()
        running = self.scheduler_running()
        batch = self.scheduler.schedule()
        self.only_legal_moves()
        # N-15: all that has arrived joins this very batch, behind those that ran before.
        ready = [request for request in running if not self.is_full(request)]
        assert (list(batch.requests) if batch else []) == ready
        assert set(running) == set(self.of(RUNNING))
        if finishes_failed:  # only the first may have to wait, for what comes free by itself
            assert ready in (running, running[1:])
        self.transfers = [t for t in self.transfers if not t.is_ended or self.is_due(t)]
        self.quarantine = [t for t in self.quarantine if not t.is_ended]
        # N-62: who still waits has no slot, or no blocks.
        is_full = len(self.of(RUNNING, TRANSFERRING)) == self.batch_size
        assert is_full or self.is_head_stuck()
        if starts_transfers:
            self.start_transfers()
        if batch is not None:
            self.decode(batch)

    def scheduler_running(self):
        """Who must be in the next batch, in order: ran before, or is received by now."""
        admitted = self.of(TRANSFERRING)
        arrived = [t.request for t in self.transfers if t.is_ended and not t.failure]
        joins = [request for request in admitted if request in arrived]
        self.batch = self.order_of_start(self.of(RUNNING)) + joins
        return self.batch

    def order_of_start(self, running):
        """In which their transfers ended."""
        return [request for request in getattr(self, "batch", []) if request in running]

    def finish_failed(self):
        failed = [t for t in self.transfers if self.is_due(t)]
        told = self.scheduler.failures()
        by_transfers = {told for told in told if not isinstance(told[1], Preempted)}
        assert {(t.request, t.failure) for t in failed} == by_transfers
        self.let_go(told)

    def start_transfers(self):
        being_received = [t.request for t in self.started_transfers()]
        to_start = self.scheduler.transfers_to_start()
        assert to_start == [r for r in self.of(TRANSFERRING) if r not in being_received]
        for request in to_start:
            transfer = Transfer(request)
            self.transfers.append(transfer)
            self.scheduler.transfer_started(request, transfer)

    def decode(self, batch):
        self.kv.compute(batch)
        for request in batch.requests:
            request.generated.append(7)
            if len(request.generated) == request.max_tokens:
                self.scheduler.finish(request, "length")

    @precondition(lambda self: any(not t.is_ended for t in self.transfers))
    @rule(index=st.integers(0, 9), fails=st.booleans())
    def end_transfer(self, index, fails=False):
        in_flight = [t for t in self.transfers if not t.is_ended]
        transfer = in_flight[index % len(in_flight)]
        self.kv.write(transfer.request, transfer.block_ids, 0, transfer.request.num_prefilled)
        transfer.end(PeerGone("the prefill worker left") if fails else None)

    def end_transfers(self):
        while any(not t.is_ended for t in self.transfers):
            self.end_transfer(0)


@pytest.mark.timeout(300)
def test_random_schedules():
    run_state_machine_as_test(DecodeMachine, settings=RANDOM_SCHEDULES)
    assert DecodeMachine.num_schedules >= NUM_SCHEDULES


def make_scheduler(num_blocks=8, batch_size=2, reserve_tokens=99):
    pool = BlockPool(num_blocks)
    limits = {"batch_size": batch_size, "waiting_max": 9, "reserve_tokens": reserve_tokens}
    return pool, DecodeScheduler(pool, block_size=4, **limits)


def start_all(scheduler):
    """Start every transfer that is due; by request name."""
    transfers = {}
    for request in scheduler.transfers_to_start():
        transfers[request.request_id] = Transfer(request)
        scheduler.transfer_started(request, transfers[request.request_id])
    return transfers


def test_a_full_batch_starts_no_transfer():
    """N-13: with batch size 1 busy, nothing is pulled until it frees."""
    _, scheduler = make_scheduler(batch_size=1)
    first, second = (make_received(name, num_prompt=4) for name in "ab")
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule()
    transfers = start_all(scheduler)
    assert list(transfers) == ["a"]
    transfers["a"].end()
    assert scheduler.schedule().requests == (first,)
    assert scheduler.transfers_to_start() == []
    scheduler.finish(first, "stop")
    scheduler.schedule()
    assert scheduler.transfers_to_start() == [second]


def test_others_decode_during_a_transfer_and_it_joins_the_next_batch():
    """N-14, N-15."""
    _, scheduler = make_scheduler()
    first, second = (make_received(name, num_prompt=4, max_tokens=9) for name in "ab")
    scheduler.add(first)
    scheduler.schedule()
    start_all(scheduler)["a"].end()
    scheduler.add(second)
    assert scheduler.schedule().requests == (first,)
    transfer = start_all(scheduler)["b"]
    for _ in range(3):
        batch = scheduler.schedule()
        assert batch.requests == (first,)
        batch.mark_computed()
    transfer.end()
    assert scheduler.schedule().requests == (first, second)
    assert (first.num_computed, second.num_computed) == (7, 4)


def test_blocks_are_quarantined_until_their_transfer_is_done():
    """N-64: nobody gets blocks that a transfer may still write to."""
    pool, scheduler = make_scheduler(num_blocks=2)
    first, second = (make_received(name, num_prompt=5) for name in "ab")
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule()
    transfer = start_all(scheduler)["a"]
    scheduler.finish(first, "cancelled")
    assert scheduler.num_transferring == 0
    assert scheduler.schedule() is None
    assert scheduler.transfers_to_start() == []
    assert pool.num_free == 0
    scheduler.check_integrity()
    transfer.end(PeerGone("late"))
    scheduler.schedule()
    assert scheduler.transfers_to_start() == [second]


def test_a_quarantined_request_takes_no_slot():
    _, scheduler = make_scheduler(batch_size=1)
    first, second = (make_received(name, num_prompt=4) for name in "ab")
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule()
    start_all(scheduler)
    scheduler.finish(first, "cancelled")
    scheduler.schedule()
    assert scheduler.transfers_to_start() == [second]
    scheduler.finish(second, "cancelled")
    assert not scheduler.is_idle()


def test_without_a_started_transfer_blocks_are_free_at_once():
    pool, scheduler = make_scheduler()
    request = make_received("a", num_prompt=4)
    scheduler.add(request)
    scheduler.schedule()
    scheduler.finish(request, "error")
    assert pool.num_free == 8
    with pytest.raises(LocalProtocolError):
        scheduler.transfer_started(request, Transfer(request))


def test_a_failed_transfer_keeps_its_slot_until_it_is_finished():
    pool, scheduler = make_scheduler(batch_size=1)
    request = make_received("a", num_prompt=4)
    scheduler.add(request)
    scheduler.schedule()
    error = PeerGone("the prefill worker left")
    start_all(scheduler)["a"].end(error)
    assert scheduler.schedule() is None
    assert scheduler.failures() == [(request, error)]
    assert request.status is TRANSFERRING
    scheduler.finish(request, "error")
    assert scheduler.failures() == []
    assert pool.num_free == 8


def test_a_large_reserve_is_for_all_tokens():
    """Then a request that runs never gives way."""
    _, scheduler = make_scheduler()
    scheduler.add(make_received("a", num_prompt=4, max_tokens=13))  # 16 positions
    scheduler.add(make_received("b", num_prompt=4, max_tokens=14))  # 17 positions: one block more
    scheduler.schedule()
    assert [len(r.block_ids) for r in scheduler.transfers_to_start()] == [4]


def test_one_token_per_transfer():
    _, scheduler = make_scheduler()
    request = make_received("a", num_prompt=4)
    scheduler.add(request)
    scheduler.schedule()
    start_all(scheduler)
    with pytest.raises(LocalProtocolError):
        scheduler.transfer_started(request, Transfer(request))


def test_only_requests_with_a_first_token_and_more_to_come_are_added():
    _, scheduler = make_scheduler()
    with pytest.raises(LocalProtocolError):
        scheduler.add(make_request("a", num_prompt=4))
    with pytest.raises(LocalProtocolError):
        scheduler.add(make_received("b", num_prompt=4, max_tokens=1))
    with pytest.raises(LocalProtocolError):
        scheduler.add(make_received("c", num_prompt=4, max_tokens=3, num_given=3))
    with pytest.raises(LocalProtocolError):  # with KV of its newest token
        scheduler.add(make_request("d", num_prompt=4, max_tokens=4, num_given=3))
    assert scheduler.is_idle()


def test_a_request_with_many_given_tokens_goes_on_behind_them():
    _, scheduler = make_scheduler()
    request = make_received("a", num_prompt=4, max_tokens=9, num_given=5)
    scheduler.add(request)
    scheduler.schedule()
    assert len(request.block_ids) == 3  # of 12 positions: the last token needs none
    start_all(scheduler)["a"].end()
    assert scheduler.schedule().requests == (request,)
    assert request.num_computed == 8


def test_every_place_of_a_block_is_counted():
    _, scheduler = make_scheduler(num_blocks=9, batch_size=2)
    requests = [make_received(name, num_prompt=2 + 4 * i) for i, name in enumerate("abc")]
    for request in requests:
        scheduler.add(request)
    scheduler.schedule()
    transfers = start_all(scheduler)
    scheduler.finish(requests[1], "cancelled")
    transfers["a"].end()
    scheduler.schedule()
    assert scheduler.count_blocks() == BlockCount(
        total=9, free=0, running=2, receiving=4, quarantined=3
    )
    transfers["b"].end()
    scheduler.schedule()
    assert scheduler.count_blocks() == BlockCount(total=9, free=3, running=2, receiving=4)


def make_exchanging(exchanged):
    """A scheduler of blocks 10 to 17. What is put into `exchanged` has changed hands."""

    def exchanges():
        told = list(exchanged)
        exchanged.clear()
        return told

    pool = BlockPool.of(range(10, 18), exchanges)
    return DecodeScheduler(pool, block_size=4, batch_size=4, waiting_max=4, reserve_tokens=99)


class Exchanged:
    """A transfer that is done at its second look: by then blocks have changed hands."""

    def __init__(self, exchanged, exchanges):
        self._exchanged, self._exchanges = exchanged, exchanges

    def is_done(self):
        self._exchanged += self._exchanges
        self._exchanges = []
        return True

    def error(self):
        return None


def test_a_request_runs_on_the_blocks_that_came_for_its_own():
    exchanged = []
    scheduler = make_exchanging(exchanged)
    request = make_received("a", num_prompt=5, max_tokens=8)
    scheduler.add(request)
    assert scheduler.schedule() is None
    assert request.block_ids == [10, 11, 12]
    # It is said to be here at the very moment at which its blocks are exchanged.
    scheduler.transfer_started(request, Exchanged(exchanged, [(10, 3), (11, 40)]))
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.requests == (request,)
    assert request.block_ids == [3, 40, 12]
    scheduler.check_integrity()
    assert scheduler.count_blocks() == BlockCount(total=8, free=5, running=3)
    scheduler.finish(request, "stop")
    assert scheduler.is_idle()
    scheduler.check_integrity()
    assert scheduler.count_blocks() == BlockCount(total=8, free=8)


def test_a_request_that_ends_while_its_blocks_are_exchanged_gives_back_those_that_came():
    exchanged = []
    scheduler = make_exchanging(exchanged)
    request = make_received("a", num_prompt=5, max_tokens=8)
    scheduler.add(request)
    scheduler.schedule()
    transfer = Transfer(request)
    scheduler.transfer_started(request, transfer)
    exchanged += [(10, 3), (11, 40)]
    scheduler.follow_exchanges()  # as the engine does before it gives blocks up
    scheduler.finish(request, "cancelled")
    scheduler.check_integrity()
    assert scheduler.count_blocks() == BlockCount(total=8, free=5, quarantined=3)
    transfer.end()
    scheduler.schedule()
    scheduler.check_integrity()
    assert scheduler.count_blocks() == BlockCount(total=8, free=8)
