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
        "num_ranks": 2,
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
    assert LAYOUT.rank_shape == (3, 2, 2, 16, 32)


@given(num_tokens=st.integers(0, 10_000), block_size=st.integers(1, 64))
def test_blocks_hold_the_tokens_and_none_is_spare(num_tokens, block_size):
    num_blocks = replace(LAYOUT, block_size=block_size).num_blocks_for(num_tokens)
    assert (num_blocks - 1) * block_size < num_tokens <= num_blocks * block_size


@pytest.mark.parametrize(
    ("num_kv_heads", "num_ranks", "expected"),
    [
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (4, 4, [[0], [1], [2], [3]]),
        (2, 4, [[0], [0], [1], [1]]),  # replicas are neighbours
        (1, 3, [[0], [0], [0]]),
    ],
)
def test_each_head_is_on_its_ranks(num_kv_heads, num_ranks, expected):
    layout = replace(LAYOUT, num_kv_heads=num_kv_heads, num_ranks=num_ranks)
    assert [list(layout.heads_of(rank)) for rank in range(num_ranks)] == expected
    assert layout.num_replicas == max(1, num_ranks // num_kv_heads)
    assert layout.rank_bytes == 3 * 2 * len(expected[0]) * 16 * 32 * 4
    assert layout.block_bytes == num_ranks * layout.rank_bytes


@pytest.mark.parametrize(
    ("changed", "with_conversion", "without"),
    [
        ({"num_ranks": 2}, True, True),
        ({"block_size": 8}, True, True),
        ({"dtype": "float16"}, True, False),
        ({"num_layers": 4}, False, False),
        ({"num_kv_heads": 4}, False, False),
        ({"head_dim": 64}, False, False),
    ],
)
def test_which_pools_can_exchange_kv(changed, with_conversion, without):
    other = replace(LAYOUT, **changed)
    for converts, expected in ((True, with_conversion), (False, without)):
        ours, theirs = (one.exchange_digest(converts=converts) for one in (LAYOUT, other))
        assert (ours == theirs) == expected
    ours, theirs = LAYOUT.exchange_digest(converts=True), LAYOUT.exchange_digest(converts=False)
    assert ours != theirs
