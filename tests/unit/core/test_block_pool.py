"""Blocks are handed out once, in few runs, and come back once."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from neuron_di.core import BlockPool
from neuron_di.errors import CapacityError, LocalProtocolError


def runs_of(block_ids):
    """Lengths of the contiguous runs, in the order given."""
    lengths = []
    for index, block_id in enumerate(block_ids):
        if index and block_id == block_ids[index - 1] + 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def fewest_runs(free, wanted):
    """How many runs the longest ones, taken first, need."""
    num_runs = 0
    for length in sorted(runs_of(sorted(free)), reverse=True):
        if wanted <= 0:
            break
        wanted -= length
        num_runs += 1
    return num_runs


class PoolMachine(RuleBasedStateMachine):
    """Owners take and return blocks at random; a plain set says what must be free."""

    @initialize(num_blocks=st.integers(0, 40))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.free = set(range(num_blocks))
        self.owned = []

    @rule(num_blocks=st.integers(0, 12))
    def allocate(self, num_blocks):
        if num_blocks > len(self.free):
            with pytest.raises(CapacityError):
                self.pool.allocate(num_blocks)
            return
        block_ids = self.pool.allocate(num_blocks)
        assert len(block_ids) == num_blocks
        assert set(block_ids) <= self.free
        assert len(runs_of(block_ids)) == fewest_runs(self.free, num_blocks)
        self.free -= set(block_ids)
        self.owned.append(block_ids)

    @precondition(lambda self: self.owned)
    @rule(index=st.integers(0, 99))
    def give_back(self, index):
        block_ids = self.owned.pop(index % len(self.owned))
        self.pool.free(block_ids)
        self.free |= set(block_ids)

    @rule(block_id=st.integers(-3, 45))
    def give_back_what_is_not_taken(self, block_id):
        if not any(block_id in block_ids for block_ids in self.owned):
            with pytest.raises(LocalProtocolError):
                self.pool.free([block_id])

    @invariant()
    def adds_up(self):
        assert self.pool.num_free == len(self.free)
        self.pool.check_integrity(self.owned)


@pytest.mark.timeout(300)
def test_random_allocations():
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            max_examples=500, stateful_step_count=30, deadline=None, database=None, print_blob=True
        ),
    )


def make_fragmented(num_blocks, taken):
    """A pool in which exactly these blocks are taken."""
    pool = BlockPool(num_blocks)
    pool.allocate(num_blocks)
    pool.free([block_id for block_id in range(num_blocks) if block_id not in taken])
    return pool


def test_freed_neighbours_become_one_run():
    pool = BlockPool(6)
    first, second, third = pool.allocate(2), pool.allocate(2), pool.allocate(2)
    pool.free(third)
    pool.free(first)
    pool.free(second)
    assert pool.allocate(6) == [0, 1, 2, 3, 4, 5]


def test_the_smallest_run_that_is_long_enough_is_taken():
    pool = make_fragmented(12, taken={4, 7})  # free: 0-3, 5-6, 8-11
    assert pool.allocate(2) == [5, 6]
    assert pool.allocate(4) == [0, 1, 2, 3]


def test_the_longest_run_goes_first_when_none_is_long_enough():
    pool = make_fragmented(12, taken={1, 7})  # free: 0, 2-6, 8-11
    assert pool.allocate(6) == [2, 3, 4, 5, 6, 0]


def test_too_few_blocks_take_none():
    pool = make_fragmented(4, taken={1})
    with pytest.raises(CapacityError, match=r"4 .* 3 "):
        pool.allocate(4)
    assert pool.num_free == 3


def test_a_bad_free_gives_nothing_back():
    pool = BlockPool(4)
    block_ids = pool.allocate(2)
    for bad in ([*block_ids, 3], [*block_ids, 4], [*block_ids, -1], [*block_ids, block_ids[0]]):
        with pytest.raises(LocalProtocolError):
            pool.free(bad)
    assert pool.num_free == 2
    pool.check_integrity([block_ids])


@pytest.mark.parametrize(
    "owned",
    [[[0]], [[0, 1], [1]], [[0, 1, 2]], [[0, 1, 4]], [[0, 1, -1]], []],
    ids=["lost", "owned twice", "owned and free", "foreign", "negative", "all lost"],
)
def test_check_integrity_finds(owned):
    pool = BlockPool(4)
    assert pool.allocate(2) == [0, 1]
    pool.check_integrity([[0], [1]])
    with pytest.raises(LocalProtocolError):
        pool.check_integrity(owned)


def make_shared(block_ids, exchanged):
    """A pool of these blocks. What is put into `exchanged` has changed hands."""

    def exchanges():
        told = list(exchanged)
        exchanged.clear()
        return told

    return BlockPool.of(block_ids, exchanges)


def test_a_pool_of_some_blocks_hands_out_these_only():
    pool = BlockPool.of([9, 3, 4, 5])
    assert (pool.num_blocks, pool.num_free) == (4, 4)
    assert pool.allocate(3) == [3, 4, 5]
    pool.check_integrity([[3, 4, 5]])
    for foreign in (0, 8, 10, 100, -1):
        with pytest.raises(LocalProtocolError):
            pool.free([foreign])
    with pytest.raises(CapacityError):
        pool.allocate(2)
    assert pool.allocate(1) == [9]


def test_a_block_that_came_takes_the_place_of_the_one_that_went():
    exchanged = []
    pool = make_shared([0, 1, 2, 3], exchanged)
    first, second = pool.allocate(2), pool.allocate(1)
    exchanged += [(1, 700), (2, 5), (5, 1)]
    pool.follow_exchanges([first, second])
    assert (first, second) == ([0, 700], [1])
    assert (pool.num_blocks, pool.num_free) == (4, 1)
    pool.check_integrity([first, second])
    pool.free(first)
    pool.free(second)
    assert sorted(pool.allocate(4)) == [0, 1, 3, 700]


@pytest.mark.parametrize("exchange", [(3, 9), (7, 9), (0, 1), (0, 3)])
def test_an_exchange_that_cannot_be_is_a_bug(exchange):
    exchanged = [exchange]
    pool = make_shared([0, 1, 3], exchanged)
    held = pool.allocate(2)
    with pytest.raises(LocalProtocolError):
        pool.follow_exchanges([held])
