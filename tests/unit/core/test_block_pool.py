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
    """Owners take, keep and return blocks at random; plain sets say what must be free.

    `unused` are those that hold nothing. What is kept goes as it came: in whole pieces.
    """

    @initialize(num_blocks=st.integers(0, 40))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.pool.forget = self.forget
        self.unused = set(range(num_blocks))
        self.kept = []  # the oldest first
        self.owned = []
        self.num_missing = []  # blocks that `forget` was asked for

    def forget(self, num_blocks):
        self.num_missing.append(num_blocks)
        while num_blocks > 0:
            num_blocks -= len(self.kept[0])
            self.let_go(0)

    @rule(num_blocks=st.integers(0, 12))
    def allocate(self, num_blocks):
        num_kept, num_unused = sum(map(len, self.kept)), len(self.unused)
        self.num_missing.clear()
        if num_blocks > num_unused + num_kept:
            with pytest.raises(CapacityError):
                self.pool.allocate(num_blocks)
            assert not self.num_missing
            return
        block_ids = self.pool.allocate(num_blocks)
        assert self.num_missing == [num_blocks - num_unused][: num_blocks > num_unused]
        assert len(block_ids) == num_blocks
        assert set(block_ids) <= self.unused
        assert len(runs_of(block_ids)) == fewest_runs(self.unused, num_blocks)
        self.unused -= set(block_ids)
        self.owned.append(block_ids)

    @precondition(lambda self: self.owned)
    @rule(index=st.integers(0, 99))
    def give_back(self, index):
        block_ids = self.owned.pop(index % len(self.owned))
        self.pool.free(block_ids)
        self.unused |= set(block_ids)

    @precondition(lambda self: self.owned)
    @rule(index=st.integers(0, 99))
    def keep(self, index):
        block_ids = self.owned.pop(index % len(self.owned))
        self.pool.keep(block_ids)
        self.kept.append(block_ids)

    @precondition(lambda self: self.kept)
    @rule(index=st.integers(0, 99))
    def let_go(self, index):
        block_ids = self.kept.pop(index % len(self.kept))
        self.pool.let_go(block_ids)
        self.unused |= set(block_ids)

    @rule(block_id=st.integers(-45, 45))
    def give_back_what_is_not_taken_or_not_kept(self, block_id):
        if not any(block_id in block_ids for block_ids in self.owned):
            for give_back in (self.pool.free, self.pool.keep):
                with pytest.raises(LocalProtocolError):
                    give_back([block_id])
        if not any(block_id in block_ids for block_ids in self.kept):
            with pytest.raises(LocalProtocolError):
                self.pool.let_go([block_id])

    @invariant()
    def adds_up(self):
        num_kept = sum(map(len, self.kept))
        assert (self.pool.num_unused, self.pool.num_kept) == (len(self.unused), num_kept)
        assert self.pool.num_free == len(self.unused) + num_kept
        self.pool.check_integrity(self.owned, self.kept)


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


@pytest.mark.parametrize(
    ("owned", "kept"),
    [
        ([[0, 1]], []),
        ([[0, 1]], [[2]]),
        ([[0, 1]], [[2, 3], [3]]),
        ([[0, 1]], [[2, 3, 4]]),
        ([[0, 1]], [[2, 3, 0]]),
        ([[0, 1, 2]], [[2, 3]]),
        ([[0, 1, 2, 3]], []),
        ([], [[0, 1, 2, 3]]),
        ([[0, 1]], [[2, 3, 6]]),
        ([[0, 1]], [[2, 3, -1]]),
    ],
    ids=[
        "all kept ones lost",
        "a kept one lost",
        "kept twice",
        "kept and unused",
        "kept and owned",
        "owned and kept",
        "kept ones owned",
        "owned ones kept",
        "foreign",
        "negative",
    ],
)
def test_check_integrity_finds_kept(owned, kept):
    pool = BlockPool(6)
    assert pool.allocate(2) == [0, 1]
    pool.keep(pool.allocate(2))
    pool.check_integrity([[0], [1]], [[3], [2]])
    with pytest.raises(LocalProtocolError):
        pool.check_integrity(owned, kept)


@pytest.mark.parametrize("count", ["num_free", "num_kept"])
@pytest.mark.parametrize("change", [-1, 1])
def test_check_integrity_finds_a_wrong_count(count, change):
    pool = BlockPool(6)
    owned, kept = pool.allocate(2), pool.allocate(2)
    pool.keep(kept)
    setattr(pool, count, getattr(pool, count) + change)
    with pytest.raises(LocalProtocolError, match="num_"):
        pool.check_integrity([owned], [kept])


def test_kept_blocks_are_free_and_the_last_to_be_taken():
    pool = BlockPool(6)
    kept = pool.allocate(2)
    pool.keep(kept)
    assert (pool.num_free, pool.num_kept, pool.num_unused) == (6, 2, 4)
    assert pool.allocate(4) == [2, 3, 4, 5]
    assert (pool.num_free, pool.num_kept, pool.num_unused) == (2, 2, 0)
    pool.let_go(kept)
    assert (pool.num_free, pool.num_kept, pool.num_unused) == (2, 0, 2)
    assert pool.allocate(2) == [0, 1]


def test_kept_blocks_that_are_needed_are_asked_for_just_then():
    pool, asked = BlockPool(6), []
    pieces = [pool.allocate(2), pool.allocate(2)]
    for piece in pieces:
        pool.keep(piece)

    def forget(num_blocks):
        asked.append(num_blocks)
        pool.let_go(pieces.pop(0))

    pool.forget = forget
    pool.allocate(2)
    assert asked == []
    assert pool.allocate(1) == [0]
    assert asked == [1]
    with pytest.raises(CapacityError, match=r"4 .* 3 "):
        pool.allocate(4)
    assert asked == [1]
    assert pool.allocate(3) == [1, 2, 3]
    assert asked == [1, 2]
    assert pool.num_free == pool.num_kept == 0


def test_who_lets_go_of_too_little_is_found_before_a_block_is_taken():
    pool = BlockPool(4)
    kept = pool.allocate(3)
    pool.keep(kept)
    pool.forget = lambda _: pool.let_go(kept[:1])
    with pytest.raises(LocalProtocolError):
        pool.allocate(4)
    assert (pool.num_free, pool.num_kept) == (4, 2)
    pool.check_integrity([], [kept[1:]])


# Blocks 0 and 1 are taken, 2 and 3 kept, 4 and 5 unused.
@pytest.mark.parametrize("bad", [[0, 1, 1], [0, 2], [0, 4], [0, -1], [0, 6], [0, -4]])
def test_a_bad_keep_keeps_nothing(bad):
    pool = BlockPool(6)
    taken, kept = pool.allocate(2), pool.allocate(2)
    pool.keep(kept)
    with pytest.raises(LocalProtocolError):
        pool.keep(bad)
    assert (pool.num_free, pool.num_kept) == (4, 2)
    pool.check_integrity([taken], [kept])


@pytest.mark.parametrize("bad", [[2, 3, 3], [2, 0], [2, 4], [2, -1], [2, 6], [2, -3]])
def test_a_bad_let_go_lets_go_of_nothing(bad):
    """Block -3 would be block 3, if a list were asked."""
    pool = BlockPool(6)
    taken, kept = pool.allocate(2), pool.allocate(2)
    pool.keep(kept)
    with pytest.raises(LocalProtocolError):
        pool.let_go(bad)
    assert (pool.num_free, pool.num_kept) == (4, 2)
    pool.check_integrity([taken], [kept])


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


def test_a_kept_block_changes_no_hands():
    exchanged = []
    pool = make_shared([0, 1, 2, 3], exchanged)
    owned, kept = pool.allocate(2), pool.allocate(2)
    pool.keep(kept)
    exchanged.append((1, 7))
    pool.follow_exchanges([owned])
    pool.check_integrity([[0, 7]], [[2, 3]])
    exchanged.append((2, 9))
    with pytest.raises(LocalProtocolError):
        pool.follow_exchanges([owned])


@pytest.mark.parametrize("exchange", [(3, 9), (7, 9), (0, 1), (0, 3)])
def test_an_exchange_that_cannot_be_is_a_bug(exchange):
    exchanged = [exchange]
    pool = make_shared([0, 1, 3], exchanged)
    held = pool.allocate(2)
    with pytest.raises(LocalProtocolError):
        pool.follow_exchanges([held])
