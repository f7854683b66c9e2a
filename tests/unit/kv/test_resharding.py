"""KV of one layout in blocks of another, against a copy of single vectors."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_kit import converted, memory_of, move_flat, noise, numbers, pool_numbers

from neuron_di.errors import ConfigError, LocalProtocolError
from neuron_di.kv import (
    DTYPE_BYTES,
    KvIdentity,
    KvLayout,
    Memory,
    Resharding,
    block_digests,
    whole_block_runs,
)
from neuron_di.types import Incarnation, RequestId, WorkerId
from neuron_di_bindings import run_copy

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")
IDENTITY = KvIdentity(
    worker_id=WorkerId("w"),
    incarnation=Incarnation("i"),
    request_id=RequestId("r"),
    attempt=1,
    layout_digest="l",
)
NUM_BLOCKS = 48
COMPILED = run_copy.is_compiled()


@pytest.fixture(params=["compiled", "plain"])
def way(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(run_copy, "_IS_COMPILED", False)
    elif not COMPILED:
        pytest.skip("the compiled copies are not built")


@st.composite
def layout_pairs(draw, ranks_max=64):
    num_kv_heads = draw(st.sampled_from([1, 2, 3, 4, 8, 12]))
    dims, layers = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    possible = [
        ranks
        for ranks in range(1, ranks_max + 1)
        if num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0
    ]

    def layout():
        return KvLayout(
            num_layers=layers,
            num_kv_heads=num_kv_heads,
            head_dim=dims,
            block_size=draw(st.sampled_from([1, 2, 3, 4, 16])),
            dtype=draw(st.sampled_from(list(DTYPE_BYTES))),
            num_ranks=draw(st.sampled_from(possible)),
        )

    return layout(), layout()


def filled(layout, block_ids, kv):
    """A pool with this request in it. kv: [L, C, heads, tokens, D]."""
    pool = noise(NUM_BLOCKS * layout.block_bytes, 1)
    write(layout, pool, block_ids, kv)
    return pool


def write(layout, pool, block_ids, kv):
    array = pool_numbers(layout, pool)
    for token in range(kv.shape[3]):
        block, position = divmod(token, layout.block_size)
        for rank in range(layout.num_ranks):
            heads = list(layout.heads_of(rank))
            array[block_ids[block], rank, :, :, :, position] = kv[:, :, heads, token]


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60
)
@given(layouts=layout_pairs(), num_tokens=st.integers(0, 40), seed=st.integers(0, 1000))
def test_tokens_arrive_where_attention_reads_them(way, layouts, num_tokens, seed):
    source, destination = layouts
    chooser = random.Random(seed)
    source_ids = chooser.sample(range(NUM_BLOCKS), source.num_blocks_for(num_tokens))
    destination_ids = chooser.sample(range(NUM_BLOCKS), destination.num_blocks_for(num_tokens))
    shape = (source.num_layers, 2, source.num_kv_heads, num_tokens, source.head_dim)
    kv = numbers(shape, source.dtype, seed)
    pool = filled(source, source_ids, kv)
    resharding = Resharding(source, destination)

    landing = noise(resharding.landing_bytes(num_tokens), 2)
    runs = resharding.landing_runs(source_ids, num_tokens)
    assert runs.num_bytes == kv.nbytes  # used tokens only, each head once
    move_flat(runs, pool, landing)

    def digests(layout, memory, ids):
        return block_digests(memory_of(memory), ids, IDENTITY, layout, num_tokens)

    there = digests(source, pool, source_ids)
    assert digests(resharding.landing, landing, range(len(source_ids))) == there

    own = noise(NUM_BLOCKS * destination.block_bytes, 3)
    expected = own.copy()
    write(destination, expected, destination_ids, converted(kv, source.dtype, destination.dtype))
    resharding.place(memory_of(landing), memory_of(own), destination_ids, num_tokens)
    assert np.array_equal(own, expected)


@settings(deadline=None, max_examples=40)
@given(layouts=layout_pairs(ranks_max=8), data=st.data())
def test_a_request_may_arrive_in_pieces(layouts, data):
    source, destination = layouts
    num_tokens = data.draw(st.integers(1, 40))
    source_ids = list(range(source.num_blocks_for(num_tokens)))
    destination_ids = list(range(destination.num_blocks_for(num_tokens)))[::-1]
    shape = (source.num_layers, 2, source.num_kv_heads, num_tokens, source.head_dim)
    kv = numbers(shape, source.dtype, 5)
    pool = filled(source, source_ids, kv)
    own = noise(NUM_BLOCKS * destination.block_bytes, 3)
    expected = own.copy()
    write(destination, expected, destination_ids, converted(kv, source.dtype, destination.dtype))

    resharding = Resharding(source, destination)
    blocks = data.draw(st.integers(1, 3))
    pieces = list(range(0, len(source_ids), blocks))
    for first in data.draw(st.permutations(pieces)):
        first_token = first * source.block_size
        count = min(num_tokens - first_token, blocks * source.block_size)
        landing = noise(resharding.landing_bytes(count), 2)
        ids = source_ids[first : first + blocks]
        move_flat(resharding.landing_runs(ids, count), pool, landing)
        resharding.place(
            memory_of(landing), memory_of(own), destination_ids, count, first_token=first_token
        )
    assert np.array_equal(own, expected)


def runs_as_rows(runs):
    return list(
        zip(
            (runs.source_offsets // LAYOUT.block_bytes).tolist(),
            (runs.destination_offsets // LAYOUT.block_bytes).tolist(),
            (runs.lengths // LAYOUT.block_bytes).tolist(),
            strict=True,
        )
    )


@pytest.mark.parametrize(
    ("source_ids", "destination_ids", "expected"),
    [
        ([], [], []),
        ([5], [7], [(5, 7, 1)]),
        (range(10), range(20, 30), [(0, 20, 10)]),
        ([1, 2, 3], [7, 6, 5], [(1, 7, 1), (2, 6, 1), (3, 5, 1)]),
        ([1, 2, 3, 5, 6], [4, 5, 9, 10, 11], [(1, 4, 2), (3, 9, 1), (5, 10, 2)]),
        ([3, 3], [1, 2], [(3, 1, 1), (3, 2, 1)]),
    ],
)
def test_blocks_that_are_neighbours_at_both_ends_are_one_run(source_ids, destination_ids, expected):
    runs = whole_block_runs(LAYOUT, source_ids, destination_ids)
    assert runs_as_rows(runs) == expected
    arrays = whole_block_runs(LAYOUT, np.array(source_ids, int), np.array(destination_ids, int))
    assert runs_as_rows(arrays) == expected


def test_whole_blocks_of_lists_of_different_lengths_are_refused():
    with pytest.raises(LocalProtocolError):
        whole_block_runs(LAYOUT, [1, 2], [1])


@pytest.mark.parametrize(
    ("layout", "num_tokens", "expected"),
    [
        (LAYOUT, 12, 1),  # neighbours, all full
        (LAYOUT, 13, 2 * 2 * 2),  # the last: a head of K or V of a layer each, the first joined
        (replace(LAYOUT, num_ranks=2), 12, 1),
        (replace(LAYOUT, num_ranks=4), 12, 3 * 2),  # each block: every second rank
        (replace(LAYOUT, num_ranks=4), 13, 3 * 2 + 2 * 2 * 2),
        (LAYOUT, 0, 0),
    ],
)
def test_runs_into_landing_memory_are_as_few_as_can_be(layout, num_tokens, expected):
    ids = range(3, 3 + layout.num_blocks_for(num_tokens))
    runs = Resharding(layout, LAYOUT).landing_runs(ids, num_tokens)
    assert len(runs) == expected


def test_numbers_are_converted_only_from_one_format_to_another():
    """NaN keeps its bits where nothing is converted."""
    landing = np.full(LAYOUT.block_bytes, 0xFF, np.uint8)
    own = np.zeros(LAYOUT.block_bytes, np.uint8)
    other = replace(LAYOUT, num_ranks=2)
    Resharding(LAYOUT, other).place(memory_of(landing), memory_of(own), [0], 4)
    assert (own == 0xFF).all()


@pytest.mark.parametrize(
    "other",
    [{"num_layers": 3}, {"num_kv_heads": 4}, {"head_dim": 8}],
    ids=lambda other: next(iter(other)),
)
def test_kv_of_another_model_is_refused(other):
    with pytest.raises(ConfigError, match=next(iter(other))):
        Resharding(LAYOUT, replace(LAYOUT, **other))


def test_a_layout_that_cannot_be_is_refused():
    """It comes from another process."""
    three = replace(LAYOUT, num_kv_heads=3)
    with pytest.raises(ConfigError, match="3 KV heads cannot be shared by 2 ranks"):
        Resharding(replace(three, num_ranks=2), three)
    with pytest.raises(ConfigError, match="bytes"):
        Resharding(replace(LAYOUT, block_size=1 << 50), LAYOUT)


@pytest.mark.parametrize(
    ("block_ids", "num_tokens", "first_token"),
    [
        ([0, 1], 9, 0),  # too few blocks
        ([0, 1], 5, 4),
        ([0, NUM_BLOCKS], 8, 0),
        ([0, -1], 8, 0),
        ([0, 1], 8, -4),
        ([0, 1], -1, 0),
        ([0, 1 << 62], 8, 0),
        ([0, 1], 1 << 62, 0),
        ([0, 1], 4, 1 << 62),
    ],
)
def test_nothing_is_placed_outside_of_the_blocks(block_ids, num_tokens, first_token):
    resharding = Resharding(LAYOUT, replace(LAYOUT, num_ranks=2))
    landing = noise(3 * LAYOUT.block_bytes, 0)
    own = np.zeros(NUM_BLOCKS * LAYOUT.block_bytes, np.uint8)
    with pytest.raises(LocalProtocolError):
        resharding.place(
            memory_of(landing), memory_of(own), block_ids, num_tokens, first_token=first_token
        )
    assert not own.any()


def test_nothing_is_read_outside_of_the_landing_memory():
    resharding = Resharding(LAYOUT, replace(LAYOUT, num_ranks=2))
    landing = noise(LAYOUT.block_bytes, 0)
    own = np.zeros(NUM_BLOCKS * LAYOUT.block_bytes, np.uint8)
    with pytest.raises(LocalProtocolError):
        resharding.place(memory_of(landing), memory_of(own), [0, 1], 5)
    assert not own.any()


@pytest.mark.parametrize(("ids", "num_tokens"), [([0], 5), ([0, 1], 4), ([], 1), ([0], -1)])
def test_blocks_that_do_not_fit_the_tokens_are_refused(ids, num_tokens):
    with pytest.raises(LocalProtocolError):
        Resharding(LAYOUT, LAYOUT).landing_runs(ids, num_tokens)


def test_landing_memory_has_each_head_once():
    for num_ranks in (1, 2, 4, 8, 32):
        layout = replace(LAYOUT, num_kv_heads=4, num_ranks=num_ranks)
        kv_bytes = 3 * replace(layout, num_ranks=1).block_bytes
        resharding = Resharding(layout, replace(layout, num_ranks=1, block_size=8))
        assert resharding.landing_bytes(3 * layout.block_size) == kv_bytes


def test_an_empty_request_needs_no_memory():
    resharding = Resharding(LAYOUT, replace(LAYOUT, block_size=8))
    assert resharding.landing_bytes(0) == 0
    resharding.place(Memory(0, 0), Memory(0, 0), [], 0)
