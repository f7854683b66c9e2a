"""What a receive may touch, of few runs and of many: both are checked, each in its own way."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_di.errors import RemoteProtocolError
from neuron_di.kv import Runs, ids_below
from neuron_di.kv.runs import FEW
from neuron_di.transfer.run_bounds import runs_refusal

SOURCE, DESTINATION = 300, 200  # bytes of the memories
MAX, MIN = 2**63 - 1, -(2**63)
EDGES = [MIN, MIN + 1, -1, 0, 1, 7, DESTINATION - 1, DESTINATION, SOURCE, SOURCE + 1, MAX - 1, MAX]
numbers = st.sampled_from(EDGES) | st.integers(-2, SOURCE + 2)
runs = st.tuples(numbers, numbers, numbers)


def runs_of(rows: list[tuple[int, int, int]]) -> Runs:
    """(source, destination, length) each."""
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    return Runs(
        source_offsets=columns[0].copy(),
        destination_offsets=columns[1].copy(),
        lengths=columns[2].copy(),
    )


def is_right(rows: list[tuple[int, int, int]]) -> bool:
    """By a list of every byte."""
    written: set[int] = set()
    for source, destination, length in rows:
        if length <= 0 or source < 0 or source + length > SOURCE:
            return False
        if destination < 0 or destination + length > DESTINATION:
            return False
        bytes_of_it = set(range(destination, destination + length))
        if written & bytes_of_it:
            return False
        written |= bytes_of_it
    return bool(rows)


def check(rows: list[tuple[int, int, int]]) -> None:
    refusal = runs_refusal(runs_of(rows), SOURCE, DESTINATION)
    assert isinstance(refusal, RemoteProtocolError | None)
    assert (refusal is None) == is_right(rows)


@settings(deadline=None)
@given(rows=st.lists(runs, max_size=4))
def test_few_runs_of_any_numbers(rows: list[tuple[int, int, int]]) -> None:
    check(rows)


@settings(deadline=None)
@given(rows=st.lists(runs, max_size=2), data=st.data())
def test_any_runs_among_many_good_ones(
    rows: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    good = [(n, DESTINATION - 1 - n, 1) for n in range(FEW + 4)]
    check(data.draw(st.permutations([*good, *rows])))


@settings(deadline=None)
@given(data=st.data())
def test_many_runs_that_touch_or_overlap(data: st.DataObject) -> None:
    """Of one length, or of several: their order is found in another way."""
    lengths = data.draw(st.sampled_from([(1,), (4,), (1, 2, 6)]))
    starts = st.integers(0, DESTINATION - 1)
    rows = data.draw(
        st.lists(st.tuples(st.just(0), starts, st.sampled_from(lengths)), min_size=FEW + 1)
    )
    check(rows)
    apart, end = [], 0
    for length in (row[2] for row in rows):
        apart.append((0, end, length))
        end += length
    check(data.draw(st.permutations(apart)))


@pytest.mark.parametrize("count", [0, 1, FEW, FEW + 1, 300])
@pytest.mark.parametrize("as_array", [False, True])
def test_ids_of_a_pool_are_told_from_others(count: int, *, as_array: bool) -> None:
    ids = list(range(count))
    given_ids = np.array(ids, np.int64) if as_array else ids
    found = ids_below(given_ids, max(count, 1))
    assert found is not None
    assert found.dtype == np.int64
    assert found.tolist() == ids
    if count:
        for place in (0, count // 2, count - 1):
            for wrong in (-1, count, MAX, MIN):
                bad = ids.copy()
                bad[place] = wrong
                assert ids_below(np.array(bad, np.int64) if as_array else bad, count) is None


@pytest.mark.parametrize("wrong", [2**63, 2**64, -(2**63) - 1, None, [1, 2], "none"])
@pytest.mark.parametrize("count", [0, FEW + 1])
def test_what_is_no_id_at_all_is_none_of_a_pool(wrong: object, count: int) -> None:
    assert ids_below([*range(count), wrong], 100) is None  # type: ignore[list-item]
