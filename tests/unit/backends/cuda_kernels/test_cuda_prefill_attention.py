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

from neuron_di.backends.cuda_kernels import attend_prefill


def queries(num_rows, num_heads, kv):
    """Part of wider rows, as they come from the QKV product; NaN where no row may look."""
    shape = (num_rows, num_heads + 2 * kv.num_kv_heads, kv.head_dim)
    qkv = torch.full(shape, torch.nan, dtype=kv.dtype, device=DEVICE)
    qkv[:, :num_heads] = randn(num_rows, num_heads, kv.head_dim, dtype=kv.dtype, seed=99)
    return qkv[:, :num_heads]


def first_rows(num_rows):
    return int32([sum(num_rows[:number]) for number in range(len(num_rows) + 1)])


def attend(kv, query, num_rows, window=None):
    """Each request's last `num_rows` positions, one request's behind another's."""
    return attend_prefill(
        query,
        kv.pool,
        kv.layer,
        kv.table,
        first_rows(num_rows),
        kv.length,
        rows_max=max(num_rows),
        window=window,
    )


def attend_chunk(kv, query, start, end, window=None):
    """Positions [start, end) of the only request, of which `query` has all."""
    return attend_prefill(
        query[start:end],
        kv.pool,
        kv.layer,
        kv.table,
        int32([0, end - start]),
        int32([end]),
        rows_max=end - start,
        window=window,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "group", "window"),
    [(64, 1, None), (64, 8, 20), (80, 4, None), (128, 8, None), (128, 1, 50), (16, 2, 1)],
)
def test_each_position_attends_to_those_before_it(dtype, head_dim, group, window):
    lengths, num_rows = [1, 17, 100, 75], [1, 5, 100, 30]
    kv = PagedKv(lengths, dtype=dtype, head_dim=head_dim, num_kv_heads=1 if group == 8 else 2)
    query = queries(sum(num_rows), group * kv.num_kv_heads, kv)
    got = attend(kv, query, num_rows, window)
    assert got.is_contiguous()
    wanted = [
        attend_reference(rows, kv.pool, kv.layer, table, length, window)
        for rows, table, length in zip(query.split(num_rows), kv.table, lengths, strict=True)
    ]
    assert_close(got, torch.cat(wanted))


@pytest.mark.parametrize("block_size", [1, 5, 64, 128])
def test_a_block_may_be_smaller_or_larger_than_a_tile(block_size):
    kv = PagedKv([130], block_size=block_size)
    query = queries(70, 4, kv)
    wanted = attend_reference(query, kv.pool, kv.layer, kv.table[0], 130)
    assert_close(attend(kv, query, [70]), wanted)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_position_has_the_same_bits_wherever_its_prompt_is_cut(dtype, window):
    kv = PagedKv([150], dtype=dtype)
    query = queries(150, 2, kv)
    whole = attend(kv, query, [150], window)
    for cut in (1, 64, 77):
        chunks = [attend_chunk(kv, query, *span, window) for span in ((0, cut), (cut, 150))]
        assert_same_bits(torch.cat(chunks), whole)


def test_a_request_has_the_same_bits_alone_and_beside_others():
    num_rows = [20, 33, 70]
    kv = PagedKv([20, 90, 70])
    query = queries(sum(num_rows), 4, kv)
    together = attend(kv, query, num_rows)
    alone = attend_prefill(
        query[20:53],
        kv.pool,
        kv.layer,
        kv.table[1:2],
        int32([0, 33]),
        int32([90]),
        rows_max=33,
    )
    assert_same_bits(alone, together[20:53])


def test_blocks_before_all_windows_are_not_read():
    kv = PagedKv([100])
    query = queries(10, 4, kv)
    wanted = attend_reference(query, kv.pool, kv.layer, kv.table[0], 100, 20)
    kv.table[0, :4] = NOWHERE  # position 90 sees 71 to 90
    assert_close(attend(kv, query, [10], window=20), wanted)


def test_a_request_may_have_no_rows_and_a_grid_may_be_too_large():
    kv = PagedKv([40, 25])
    query = queries(10, 4, kv)
    got = attend_prefill(
        query, kv.pool, kv.layer, kv.table, int32([0, 0, 10]), kv.length, rows_max=300
    )
    assert_close(got, attend_reference(query, kv.pool, kv.layer, kv.table[1], 25))
