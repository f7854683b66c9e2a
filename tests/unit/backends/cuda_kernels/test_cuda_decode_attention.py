import pytest
import torch

pytest.importorskip("triton", reason="Triton, of the extra `dev`, is missing")

from kernel_kit import (
    DEVICE,
    DTYPES,
    NOWHERE,
    PagedKv,
    assert_close,
    assert_same_bits,
    int32,
    randn,
)
from reference_kernels import attend_reference

from neuron_di.backends.cuda_kernels import (
    INVARIANT_SPLITS,
    attend_decode,
    num_decode_splits,
)

# Nothing, one key, a full block, one more, several tiles, and a whole one at the end.
LENGTHS = [0, 1, 16, 17, 75, 128]


def queries(kv, num_heads, seed=99):
    """Part of wider rows, as they come from the QKV product; NaN where no row may look."""
    num_rows, num_kinds = len(kv.lengths), num_heads + 2 * kv.num_kv_heads
    qkv = torch.full((num_rows, num_kinds, kv.head_dim), torch.nan, dtype=kv.dtype, device=DEVICE)
    qkv[:, :num_heads] = randn(num_rows, num_heads, kv.head_dim, dtype=kv.dtype, seed=seed)
    return qkv[:, :num_heads]


def attend(kv, query, *, num_splits, window=None, rows=slice(None)):
    return attend_decode(
        query[rows],
        kv.pool,
        kv.layer,
        kv.table[rows],
        kv.length[rows],
        num_splits=num_splits,
        window=window,
    )


def expected(kv, query, window=None):
    rows = [
        attend_reference(row[None], kv.pool, kv.layer, table, length, window)[0]
        if length
        else torch.zeros_like(row)
        for row, table, length in zip(query, kv.table, kv.lengths, strict=True)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "group", "num_splits", "window"),
    [
        (64, 1, 1, None),
        (64, 8, 4, None),
        (80, 4, 4, None),
        (128, 8, 1, 20),
        (128, 1, 3, None),
        (64, 3, 4, 20),
        (16, 2, 2, 1),
        (256, 1, 2, None),
    ],
)
def test_each_row_attends_to_its_own_keys(dtype, head_dim, group, num_splits, window):
    kv = PagedKv(LENGTHS, dtype=dtype, head_dim=head_dim, num_kv_heads=1 if group == 8 else 2)
    query = queries(kv, group * kv.num_kv_heads)
    got = attend(kv, query, num_splits=num_splits, window=window)
    assert got.is_contiguous()
    assert_close(got, expected(kv, query, window))


@pytest.mark.parametrize("block_size", [1, 5, 64, 128])
def test_a_block_may_be_smaller_or_larger_than_a_tile(block_size):
    kv = PagedKv([70, 1, 128, 129], block_size=block_size)
    query = queries(kv, 4)
    assert_close(attend(kv, query, num_splits=2), expected(kv, query))


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("num_splits", [1, INVARIANT_SPLITS])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(num_splits, window):
    kv = PagedKv([100, 0, 333, 16], dtype=torch.bfloat16)
    query = queries(kv, 8)
    batch = attend(kv, query, num_splits=num_splits, window=window)
    for row in (0, 2, 3):
        alone = attend(kv, query, num_splits=num_splits, window=window, rows=slice(row, row + 1))
        assert_same_bits(alone[0], batch[row])


def test_a_row_that_fills_a_bucket_gives_zeros_and_disturbs_nobody():
    kv = PagedKv([40, 0, 20])
    query = queries(kv, 4)
    calm = attend(kv, query, num_splits=4)
    query[1] = torch.nan
    got = attend(kv, query, num_splits=4)
    assert_same_bits(got, calm)
    assert not got[1].any()


def test_nan_in_a_key_that_counts_is_not_hidden():
    kv = PagedKv([40, 100])
    kv.pool[kv.table[1, 2], kv.layer, 0, 0, 3] = torch.nan
    got = attend(kv, queries(kv, 4), num_splits=4)
    assert got[1, :2].isnan().all()
    assert got[1, 2:].isfinite().all()
    assert got[0].isfinite().all()


def test_blocks_before_the_window_are_not_read():
    kv = PagedKv([100, 49])
    query = queries(kv, 4)
    wanted = expected(kv, query, window=20)
    kv.table[0, :5] = NOWHERE  # it sees 80 to 99
    kv.table[1, :1] = NOWHERE  # 29 to 48
    assert_close(attend(kv, query, num_splits=2, window=20), wanted)


def test_rows_may_be_positions_of_one_request():
    """As a replay computes them: each sees the keys before it, in the same blocks."""
    kv = PagedKv([50])
    kv.lengths = [48, 49, 50]
    kv.table = kv.table.expand(3, -1)
    kv.length = int32(kv.lengths)
    query = queries(kv, 4)
    assert_close(attend(kv, query, num_splits=2), expected(kv, query))


def test_a_small_batch_is_cut_into_more_parts():
    splits = [num_decode_splits(rows, 8, 132) for rows in (1, 2, 4, 8, 16, 32, 64, 1024)]
    assert splits == sorted(splits, reverse=True)
    assert splits[0] == 64
    assert splits[-1] == 1
    assert all(num & (num - 1) == 0 for num in splits)
