"""What is reckoned for transfers of blocks, compiled and plain, against plain loops."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuron_di_bindings import block_runs
from neuron_di_bindings.block_runs import Words

MAX, MIN = 2**63 - 1, -(2**63)
COMPILED = block_runs._IS_COMPILED

both_ways = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100
)


@pytest.fixture(params=["compiled", "plain"], autouse=True)
def way(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(block_runs, "_IS_COMPILED", False)
    elif not COMPILED:
        pytest.skip("the compiled part is not built")
    return request.param


@pytest.mark.parametrize(
    "numbers", [[], [3], [MIN, -1, 0, MAX], [True, np.int64(4)], list(range(99))]
)
@pytest.mark.parametrize("kind", [list, tuple, lambda numbers: np.array(numbers, np.int64)])
def test_numbers_are_read_as_they_are(numbers, kind):
    found = block_runs.as_int64(kind(numbers))
    assert found.dtype == np.int64
    assert found.tolist() == numbers


@pytest.mark.parametrize("wrong", [2**63, -(2**63) - 1, None, "none", [1]])
def test_what_is_no_number_of_64_bits_is_refused(wrong):
    with pytest.raises((OverflowError, TypeError, ValueError)):
        block_runs.as_int64([1, wrong])


def joined(sources, destinations, block_bytes):
    runs = []
    before = None
    for pair in zip(sources, destinations, strict=True):
        if before is not None and pair == (before[0] + 1, before[1] + 1):
            runs[-1][2] += block_bytes
        else:
            runs.append([pair[0] * block_bytes, pair[1] * block_bytes, block_bytes])
        before = pair
    return runs


@both_ways
@given(
    pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12),
    length=st.integers(1, 5),
    step=st.sampled_from([1, 2]),
)
def test_neighbours_at_both_ends_are_one_run(pairs, length, step):
    pairs = [(a + i, b + i) for a, b in pairs for i in range(length)]
    sources, destinations = (
        np.repeat(np.array(ids), step)[::step] for ids in zip(*pairs, strict=True)
    )
    rows = block_runs.join_blocks(sources, destinations, 48)
    assert all(row.dtype == np.int64 for row in rows)
    assert np.array(rows).T.tolist() == joined(*zip(*pairs, strict=True), 48)


@pytest.mark.parametrize("step", [1, 2])
def test_ids_of_a_pool_are_told_from_others(step):
    for count in (0, 1, 40):
        ids = np.arange(count * step)[::step] // step
        assert block_runs.are_below(ids, count)
        for place in range(count):
            for wrong in (-1, count, MAX, MIN):
                bad = ids.copy()
                bad[place] = wrong
                assert not block_runs.are_below(bad, count)


TAG, NUMBER_MAX = 5 << 56, (1 << 56) - 1


@pytest.mark.parametrize("kind", [list, tuple, lambda numbers: np.array(numbers, np.uint64)])
def test_words_are_compared_whole(kind):
    table = np.array([0, TAG | 7, TAG | NUMBER_MAX, 6 << 56 | 7, 7], np.uint64)
    words, ids = Words(table, TAG, NUMBER_MAX), np.array([1, 2])
    assert block_runs.are_words(words, ids, kind([7, NUMBER_MAX]))
    assert block_runs.are_words(words, [1, 2], kind([7, NUMBER_MAX]))
    assert block_runs.are_words(words, ids[:0], kind([]))
    assert not block_runs.are_words(words, ids, kind([7]))
    assert not block_runs.are_words(words, ids, kind([8, NUMBER_MAX]))
    assert not block_runs.are_words(words, np.array([3]), kind([7]))
    assert not block_runs.are_words(words, np.array([4]), kind([7]))
    assert block_runs.are_words(Words(table), ids, kind([TAG | 7, TAG | NUMBER_MAX]))
    # Numbers are anybody's: one that brings the tag's own bits, or another's, is none.
    assert not block_runs.are_words(words, np.array([1]), kind([TAG | 7]))
    both = Words(np.array([7 << 56], np.uint64), TAG, NUMBER_MAX)
    assert not block_runs.are_words(both, np.array([0]), kind([2 << 56]))


@pytest.mark.parametrize("number", [-1, 2**64, 2**64 + 7, -(2**64) + 7])
def test_a_number_that_is_no_word_is_not_the_tables(number):
    words = Words(np.array([7, 2**64 - 1], np.uint64))
    assert not block_runs.are_words(words, np.array([0]), [number])
    assert not block_runs.are_words(words, np.array([1]), [number])


@pytest.mark.parametrize("wrong", [-1, 5, MAX, MIN])
def test_no_word_outside_of_the_table_is_read(wrong):
    words = Words(np.zeros(5, np.uint64))
    with pytest.raises(IndexError):
        block_runs.are_words(words, np.array([0, wrong]), [0, 0])
