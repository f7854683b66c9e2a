from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_di.kv import DTYPE_BYTES, KvLayout

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=32, block_size=16, dtype="float32")


def test_equal_layouts_have_equal_digests():
    assert replace(LAYOUT).digest() == LAYOUT.digest()


def test_every_field_is_in_the_digest():
    changed = {
        "num_layers": 4,
        "num_kv_heads": 3,
        "head_dim": 64,
        "block_size": 8,
        "dtype": "bfloat16",
    }
    assert set(changed) == set(KvLayout.__dataclass_fields__)
    digests = {replace(LAYOUT, **{name: value}).digest() for name, value in changed.items()}
    assert len(digests | {LAYOUT.digest()}) == len(changed) + 1


def test_swapped_numbers_of_equal_size_have_different_digests():
    swapped = replace(LAYOUT, num_kv_heads=LAYOUT.block_size, block_size=LAYOUT.num_kv_heads)
    assert swapped.block_bytes == LAYOUT.block_bytes
    assert swapped.digest() != LAYOUT.digest()


@pytest.mark.parametrize(("dtype", "num_bytes"), DTYPE_BYTES.items())
def test_block_bytes(dtype, num_bytes):
    assert replace(LAYOUT, dtype=dtype).block_bytes == 3 * 2 * 2 * 16 * 32 * num_bytes
    assert LAYOUT.block_shape == (3, 2, 2, 16, 32)


@given(num_tokens=st.integers(0, 10_000), block_size=st.integers(1, 64))
def test_blocks_hold_the_tokens_and_none_is_spare(num_tokens, block_size):
    num_blocks = replace(LAYOUT, block_size=block_size).num_blocks_for(num_tokens)
    assert (num_blocks - 1) * block_size < num_tokens <= num_blocks * block_size
