"""A digest tells every bit that was used, every place and every owner apart, and nothing else."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_di.errors import LocalProtocolError
from neuron_di.kv import KvIdentity, KvLayout, KvPool, Memory, block_digests
from neuron_di.types import BlockId, Incarnation, RequestId, WorkerId

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
WIDE = KvLayout(num_layers=2, num_kv_heads=2, head_dim=3, block_size=4, dtype="bfloat16")
REPLICATED = replace(WIDE, num_ranks=4)
IDENTITY = KvIdentity(
    worker_id=WorkerId("prefill-0"),
    incarnation=Incarnation("i"),
    request_id=RequestId("r"),
    attempt=1,
    layout_digest="l",
)


def digests(*blocks, layout=LAYOUT, identity=IDENTITY, num_tokens=None, first_place=0):
    """Of blocks that are not in a pool."""
    array = np.frombuffer(b"".join(blocks), np.uint8).copy()
    if num_tokens is None:
        num_tokens = len(blocks) * layout.block_size
    memory = Memory(array.ctypes.data, array.nbytes)
    ids = range(len(blocks))
    return block_digests(memory, ids, identity, layout, num_tokens, first_place=first_place)


def block(letter: bytes, layout=LAYOUT) -> bytes:
    return letter * layout.block_bytes


def noise(layout, seed=0) -> np.ndarray:
    """[R, L, C, K, S, bytes of a vector]"""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, layout.block_bytes, np.uint8).reshape(
        layout.num_ranks, *layout.rank_shape[:4], -1
    )


def test_equal_bytes_of_one_identity_have_equal_digests_on_both_sides():
    assert digests(block(b"a"), block(b"b")) == digests(block(b"a"), block(b"b"))


def test_a_digest_is_a_number_of_64_bits_for_each_block():
    numbers = digests(*(block(bytes([n])) for n in range(50)))
    assert len(set(numbers)) == 50
    assert all(0 <= number < 1 << 64 for number in numbers)
    assert max(numbers).bit_length() > 56


@given(data=st.data())
@pytest.mark.parametrize("layout", [LAYOUT, WIDE])
def test_any_flipped_bit_shows(layout, data):
    whole = noise(layout).tobytes()
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    spoiled = bytearray(whole)
    spoiled[bit // 8] ^= 1 << (bit % 8)
    assert digests(whole, layout=layout) != digests(bytes(spoiled), layout=layout)


@pytest.mark.parametrize("layout", [LAYOUT, WIDE, replace(WIDE, num_ranks=2), REPLICATED])
@pytest.mark.parametrize("num_used", [1, 3, 4])
def test_what_counts_is_what_tokens_use_in_each_head_once(layout, num_used):
    """Byte by byte: whether a change shows."""
    original = noise(layout)
    expected = digests(original.tobytes(), layout=layout, num_tokens=num_used)
    for index in np.ndindex(*original.shape):
        rank, token = index[0], index[4]
        counts = token < num_used and rank % layout.num_replicas == 0
        changed = original.copy()
        changed[index] ^= 1
        now = digests(changed.tobytes(), layout=layout, num_tokens=num_used)
        assert (now != expected) == counts, index


def test_only_the_last_block_is_partly_used():
    first, last = noise(WIDE, 1), noise(WIDE, 2)
    expected = digests(first.tobytes(), last.tobytes(), layout=WIDE, num_tokens=6)
    last[:, :, :, :, 2:] ^= 1
    assert digests(first.tobytes(), last.tobytes(), layout=WIDE, num_tokens=6) == expected
    first[:, :, :, :, 3:] ^= 1
    assert digests(first.tobytes(), last.tobytes(), layout=WIDE, num_tokens=6) != expected


def test_equal_blocks_in_different_places_differ():
    first, second = digests(block(b"x"), block(b"x"))
    assert first != second


def test_later_blocks_alone_have_the_digests_that_they_have_among_all():
    blocks = [block(bytes([n])) for n in range(5)]
    assert digests(*blocks[2:], num_tokens=11, first_place=2) == digests(*blocks, num_tokens=19)[2:]


@pytest.mark.parametrize("name", [field.name for field in fields(KvIdentity)])
def test_every_part_of_the_identity_counts(name):
    other = replace(IDENTITY, **{name: 2 if name == "attempt" else "other"})
    blocks = block(b"x"), block(b"x")
    assert set(digests(*blocks)).isdisjoint(digests(*blocks, identity=other))


@given(st.lists(st.text(max_size=6), min_size=4, max_size=4), st.data())
def test_no_two_identities_are_written_alike(texts, data):
    """Text that moves from one field to the next makes another identity."""
    names = ("worker_id", "incarnation", "request_id", "layout_digest")
    others = data.draw(st.permutations(texts))
    one = KvIdentity(attempt=1, **dict(zip(names, texts, strict=True)))
    other = KvIdentity(attempt=1, **dict(zip(names, others, strict=True)))
    assert (one == other) == (one.seed() == other.seed())


def test_fields_do_not_run_into_each_other():
    one = replace(IDENTITY, worker_id=WorkerId("ab"), incarnation=Incarnation("c"))
    other = replace(IDENTITY, worker_id=WorkerId("a"), incarnation=Incarnation("bc"))
    assert one.seed() != other.seed()


def test_a_pool_is_read_block_by_block_in_the_order_given():
    pool = KvPool.create(LAYOUT, 4, Incarnation("i"))
    try:
        for n in range(4):
            pool.tensor()[n] = n
        blocks = [bytes(pool.view(BlockId(n))) for n in (2, 0)]
        assert all(len(block) == LAYOUT.block_bytes for block in blocks)
        memory = pool.memory()
        ids = [BlockId(2), BlockId(0)]
        assert block_digests(memory, ids, IDENTITY, LAYOUT, 8) == digests(*blocks)
        assert block_digests(memory, [], IDENTITY, LAYOUT, 0) == []
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("block_ids", "num_tokens"), [([0], 5), ([0, 1], 4), ([2], 4), ([-1], 4), ([], 1)]
)
def test_blocks_that_do_not_fit_the_memory_or_the_tokens_are_refused(block_ids, num_tokens):
    array = np.zeros(2 * LAYOUT.block_bytes, np.uint8)
    memory = Memory(array.ctypes.data, array.nbytes)
    with pytest.raises(LocalProtocolError):
        block_digests(memory, block_ids, IDENTITY, LAYOUT, num_tokens)
