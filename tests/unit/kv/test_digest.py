"""A digest tells every bit, every place and every owner apart."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_di.kv import KvIdentity, KvLayout, KvPool, block_digests
from neuron_di.types import BlockId, Incarnation, RequestId, WorkerId

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
IDENTITY = KvIdentity(
    worker_id=WorkerId("prefill-0"),
    incarnation=Incarnation("i"),
    request_id=RequestId("r"),
    attempt=1,
    layout_digest="l",
)


class Memory:
    """Blocks that are not in a pool."""

    def __init__(self, *blocks: bytes) -> None:
        self._blocks = blocks

    def view(self, block_id: BlockId) -> memoryview:
        return memoryview(self._blocks[block_id])


def digests(*blocks: bytes, identity: KvIdentity = IDENTITY) -> list[int]:
    return block_digests(Memory(*blocks), list(map(BlockId, range(len(blocks)))), identity)


def test_equal_bytes_of_one_identity_have_equal_digests_on_both_sides():
    assert digests(b"a" * 64, b"b" * 64) == digests(b"a" * 64, b"b" * 64)


def test_a_digest_is_a_number_of_64_bits_for_each_block():
    numbers = digests(*(bytes([n]) * 32 for n in range(50)))
    assert len(set(numbers)) == 50
    assert all(0 <= number < 1 << 64 for number in numbers)
    assert max(numbers).bit_length() > 56


@given(block=st.binary(min_size=1, max_size=300), data=st.data())
def test_any_flipped_bit_shows(block, data):
    bit = data.draw(st.integers(0, 8 * len(block) - 1))
    spoiled = bytearray(block)
    spoiled[bit // 8] ^= 1 << (bit % 8)
    assert digests(block) != digests(bytes(spoiled))


def test_equal_blocks_in_different_places_differ():
    first, second = digests(b"x" * 64, b"x" * 64)
    assert first != second


@pytest.mark.parametrize("name", [field.name for field in fields(KvIdentity)])
def test_every_part_of_the_identity_counts(name):
    other = replace(IDENTITY, **{name: 2 if name == "attempt" else "other"})
    assert set(digests(b"x" * 64, b"x" * 64)).isdisjoint(
        digests(b"x" * 64, b"x" * 64, identity=other)
    )


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
        assert block_digests(pool, [BlockId(2), BlockId(0)], IDENTITY) == digests(*blocks)
        assert block_digests(pool, [], IDENTITY) == []
    finally:
        pool.close()
