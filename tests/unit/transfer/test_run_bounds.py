"""What a receive may touch: the quick look, which passes what is right, and the close one agree."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_di.errors import RemoteProtocolError
from neuron_di.kv import Memory, Runs, ids_below
from neuron_di.transfer import BlockSource, Receive
from neuron_di.transfer.run_bounds import OwnMemories, runs_refusal
from neuron_di_bindings.block_runs import are_sound
from neuron_di_bindings.run_copy import is_compiled

MANY = 16
SOURCE, DESTINATION = 300, 200  # bytes of the memories
NUM_BLOCKS = 7
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


def receive_of(runs: Runs, ids: object = (), memory: Memory | None = None) -> Receive:
    source = BlockSource(ids, [0] * len(ids))  # type: ignore[arg-type]
    return Receive(tag=0, runs=runs, memory=memory or Memory(4096, DESTINATION), source=source)


def refusal_of(receive: Receive) -> object:
    own = OwnMemories(Memory(0, 4096))
    own.add(Memory(4096, DESTINATION))
    return own.refusal(receive, peer_bytes=SOURCE, peer_blocks=NUM_BLOCKS)


def is_sound(runs: Runs, ids: object = ()) -> bool:
    columns = runs.source_offsets, runs.destination_offsets, runs.lengths
    return are_sound(*columns, ids, SOURCE, DESTINATION, NUM_BLOCKS)  # type: ignore[arg-type]


def check(rows: list[tuple[int, int, int]]) -> None:
    runs = runs_of(rows)
    for refusal in (runs_refusal(runs, SOURCE, DESTINATION), refusal_of(receive_of(runs))):
        assert isinstance(refusal, RemoteProtocolError | None)
        assert (refusal is None) == is_right(rows)
    if is_compiled():
        assert is_sound(runs) == is_right(rows)


@settings(deadline=None)
@given(rows=st.lists(runs, max_size=4))
def test_few_runs_of_any_numbers(rows: list[tuple[int, int, int]]) -> None:
    check(rows)


@settings(deadline=None)
@given(rows=st.lists(runs, max_size=2), data=st.data())
def test_any_runs_among_many_good_ones(
    rows: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    good = [(n, DESTINATION - 1 - n, 1) for n in range(MANY + 4)]
    check(data.draw(st.permutations([*good, *rows])))


@settings(deadline=None)
@given(data=st.data())
def test_many_runs_that_touch_or_overlap(data: st.DataObject) -> None:
    """Of one length, or of several: their order is found in another way."""
    lengths = data.draw(st.sampled_from([(1,), (4,), (1, 2, 6)]))
    starts = st.integers(0, DESTINATION - 1)
    rows = data.draw(
        st.lists(st.tuples(st.just(0), starts, st.sampled_from(lengths)), min_size=MANY + 1)
    )
    check(rows)
    apart, end = [], 0
    for length in (row[2] for row in rows):
        apart.append((0, end, length))
        end += length
    check(data.draw(st.permutations(apart)))


@pytest.mark.parametrize("count", [0, 1, MANY, MANY + 1, 300])
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
@pytest.mark.parametrize("count", [0, MANY + 1])
def test_what_is_no_id_at_all_is_none_of_a_pool(wrong: object, count: int) -> None:
    assert ids_below([*range(count), wrong], 100) is None  # type: ignore[list-item]


@pytest.mark.parametrize("rows", [[], [(0, 0, 0)], [(0, 0, 8), (8, 8, 0)], [(0, 0, 8), (9, 9, -1)]])
def test_nothing_is_no_run(rows: list[tuple[int, int, int]]) -> None:
    assert not is_right(rows)
    check(rows)


RIGHT = [(0, 8, 8), (8, 0, 8)]


@pytest.mark.parametrize(
    "ids", [[NUM_BLOCKS], [-1], [0, 2**63], [0, None], np.array([0, NUM_BLOCKS])]
)
def test_a_block_outside_of_the_peers_pool_is_refused(ids: object) -> None:
    runs = runs_of(RIGHT)
    assert refusal_of(receive_of(runs, [0, NUM_BLOCKS - 1])) is None
    assert refusal_of(receive_of(runs, np.array([0, NUM_BLOCKS - 1]))) is None
    assert isinstance(refusal_of(receive_of(runs, ids)), RemoteProtocolError)
    assert not is_sound(runs, ids)


@pytest.mark.parametrize("memory", [(4095, 9), (4096, DESTINATION + 1), (4096, 0), (8192, 8)])
def test_memory_that_is_not_registered_is_refused(memory: tuple[int, int]) -> None:
    runs = runs_of([(0, 0, 8)])
    assert refusal_of(receive_of(runs, memory=Memory(4096 + DESTINATION - 8, 8))) is None
    assert isinstance(refusal_of(receive_of(runs, memory=Memory(*memory))), RemoteProtocolError)


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": np.array([8, 8, 8])},
        {"source_offsets": np.array([0, 8], np.int32)},
        {"source_offsets": np.array([0, 8], np.uint64)},
        {"destination_offsets": np.array([8, 0]).view(np.float64)},
        {"destination_offsets": np.array([[0], [8]])},
        {"source_tensors": np.array([0, 0])},
        {"destination_tensors": np.array([0, 0])},
    ],
)
def test_lists_that_do_not_fit_each_other_are_refused(change: dict[str, object]) -> None:
    runs = replace(runs_of(RIGHT), **change)  # type: ignore[arg-type]
    assert isinstance(refusal_of(receive_of(runs)), RemoteProtocolError)
    assert not is_sound(runs) or "tensors" in str(change)


@pytest.mark.parametrize("unit", [1, 1 << 14, 3 << 12])
@pytest.mark.parametrize("count", [3, 200])
def test_runs_far_apart_and_in_any_order_may_be(unit: int, count: int) -> None:
    """Beyond what a bit for each unit is kept for."""
    order = np.random.default_rng(1).permutation(count).astype(np.int64)
    starts = order * (1 << 30) * unit
    runs = Runs(source_offsets=starts, destination_offsets=starts, lengths=np.full(count, unit))
    size = 1 << 62
    own = OwnMemories(Memory(0, size))

    def refusal(runs: Runs) -> object:
        receive = Receive(tag=0, runs=runs, memory=Memory(0, size), source=BlockSource([], []))
        return own.refusal(receive, peer_bytes=1 << 70, peer_blocks=0)

    assert refusal(runs) is None
    wrong = starts.copy()
    wrong[order == 1] += (1 << 30) * unit
    assert isinstance(refusal(replace(runs, destination_offsets=wrong)), RemoteProtocolError)


def test_runs_of_several_bits_in_any_order_overlap_only_where_they_do() -> None:
    """Of 63, 64, 65 … units each, so that they begin and end anywhere in a word of bits."""
    lengths = np.array([63, 64, 65, 1, 128, 130, 2]) * 256
    starts = np.cumsum([0, *lengths[:-1]])
    for order in (np.arange(7)[::-1], np.array([3, 0, 6, 1, 5, 2, 4])):
        size = int(lengths.sum())
        runs = Runs(
            source_offsets=np.zeros(7, np.int64),
            destination_offsets=starts[order],
            lengths=lengths[order],
        )
        own = OwnMemories(Memory(0, size))

        def refusal(runs: Runs, own: OwnMemories = own, size: int = size) -> object:
            receive = Receive(tag=0, runs=runs, memory=Memory(0, size), source=BlockSource([], []))
            return own.refusal(receive, peer_bytes=size, peer_blocks=0)

        assert refusal(runs) is None
        for place in range(7):
            longer = runs.lengths.copy()
            longer[place] += 256
            assert isinstance(refusal(replace(runs, lengths=longer)), RemoteProtocolError)
