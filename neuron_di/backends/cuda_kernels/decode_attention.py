"""Attention of a decode step: one query position per request, over its keys in the paged pool.

Dimensions: B rows, H query heads, K KV heads, G = H / K, D head dim, N blocks of a table,
P splits of a row's keys.

A row's keys are cut into P parts that run beside each other, and a second kernel joins them
(flash-decoding: https://crfm.stanford.edu/2023/10/12/flashdecoding.html). Where the cuts are
depends on the row's own length and on P, and the grid on shapes only. So a CUDA graph serves all
lengths, and with the same P a row's result does not depend on who shares the batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from neuron_di.backends.cuda_kernels.key_tiles import (
    fold_keys,
    head_tile_of,
    layer_of,
)
from neuron_di.backends.cuda_kernels.triton_language import (
    jit,
    jit_for_any,
    next_power_of_2,
    tl,
)

# Of the batch-invariant mode: the same for every batch and length.
INVARIANT_SPLITS = 16
_SPLITS_MAX = 64
_PROGRAMS_PER_MULTIPROCESSOR = 4  # enough that loads of one hide the waiting of another: untuned


@dataclass(frozen=True, slots=True)
class _Tile:
    num_keys: int
    num_warps: int
    num_stages: int


# By (bytes of a number, head dim padded to a power of two). Untuned: chosen so that the compiler
# spills no register and that two or more programs fit into a multiprocessor's shared memory.
_TILES = {
    (2, 64): _Tile(64, 4, 4),
    (2, 128): _Tile(64, 4, 3),
    (2, 256): _Tile(32, 4, 3),
    (4, 64): _Tile(32, 4, 3),
    (4, 128): _Tile(32, 8, 3),
    (4, 256): _Tile(16, 8, 2),
}
_GROUP_ROWS_MIN = 16  # rows of the matrix unit's smallest tile


def num_decode_splits(num_rows: int, num_kv_heads: int, num_multiprocessors: int) -> int:
    """How many parts to cut each row's keys into, so that this batch fills the device.

    A power of two. For a bucket of a CUDA graph, take it of the bucket's rows. A result depends
    on it by rounding: the batch-invariant mode takes INVARIANT_SPLITS instead.
    """
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors
    return min(next_power_of_2(max(1, wanted // (num_rows * num_kv_heads))), _SPLITS_MAX)


def attend_decode(
    query_BHD: Tensor,
    pool_NLCKSD: Tensor,
    layer: int,
    table_BN: Tensor,
    length_B: Tensor,
    *,
    num_splits: int,
    window: int | None = None,
) -> Tensor:
    """The attended values [B, H, D], in the queries' dtype, contiguous.

    `query_BHD` may be part of wider rows; its scale is 1 / sqrt(D). `table_BN`, int32, names each
    row's blocks in order, `length_B`, int32, how many positions of KV it has, the newest included:
    what lies behind is not read, nor is the table's rest. A row of length 0, such as one that only
    fills a bucket, gives zeros. `window` is the number of positions that one sees.
    """
    num_rows, num_heads, head_dim = query_BHD.shape
    num_kv_heads, block_size = pool_NLCKSD.shape[3:5]
    kv_NCKSD = layer_of(pool_NLCKSD, layer)
    assert query_BHD.stride()[1:] == (head_dim, 1), query_BHD.stride()
    assert query_BHD.dtype == pool_NLCKSD.dtype, (query_BHD.dtype, pool_NLCKSD.dtype)
    assert table_BN.stride(1) == 1, table_BN.stride()
    head_tile = head_tile_of(head_dim)
    tile = _TILES[query_BHD.element_size(), max(head_tile, 64)]
    out_BHD = query_BHD.new_empty(num_rows, num_heads, head_dim)
    partial_BHPD, weight_BHP = out_BHD, out_BHD  # one split is the result, and has no weight
    if num_splits > 1:
        shape = (num_rows, num_heads, num_splits)
        partial_BHPD = query_BHD.new_empty(*shape, head_dim, dtype=torch.float32)
        weight_BHP = query_BHD.new_empty(shape, dtype=torch.float32)
    group = num_heads // num_kv_heads
    _attend_split[(num_splits, num_kv_heads, num_rows)](
        query_BHD,
        kv_NCKSD,
        table_BN,
        length_B,
        partial_BHPD,
        weight_BHP,
        query_BHD.stride(0),
        table_BN.stride(0),
        kv_NCKSD.stride(0),
        NUM_SPLITS=num_splits,
        WINDOW=window or 0,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_ROWS=max(_GROUP_ROWS_MIN, next_power_of_2(group)),
        HEAD_DIM=head_dim,
        HEAD_TILE=head_tile,
        BLOCK_SIZE=block_size,
        TILE_X=tile.num_keys,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if num_splits > 1:
        _join_splits[(num_heads, num_rows)](
            partial_BHPD,
            weight_BHP,
            out_BHD,
            NUM_HEADS=num_heads,
            NUM_SPLITS=num_splits,
            SPLIT_TILE=next_power_of_2(num_splits),
            HEAD_DIM=head_dim,
            HEAD_TILE=head_tile,
            num_warps=4,
        )
    return out_BHD


@jit_for_any("tables", "lengths", "stride_table")
def _attend_split(
    query: tl.tensor,
    kv: tl.tensor,
    tables: tl.tensor,
    lengths: tl.tensor,
    partials: tl.tensor,
    weights: tl.tensor,
    stride_query: tl.tensor,
    stride_table: tl.tensor,
    stride_block: tl.tensor,
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_X: tl.constexpr,
) -> None:
    """One split of one row, for all query heads of one KV head: its keys are read once."""
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    # Whole tiles, counted from position 0: the cuts move with the row's own length only.
    first_tile = first // TILE_X
    num_tiles = tl.cdiv(length, TILE_X) - first_tile
    split_tiles = tl.cdiv(num_tiles, NUM_SPLITS)
    begin = (first_tile + split * split_tiles) * TILE_X
    end = tl.minimum(begin + split_tiles * TILE_X, length)

    group_G = tl.arange(0, GROUP_ROWS)
    dim_D = tl.arange(0, HEAD_TILE)
    head_G = kv_head * GROUP + group_G
    is_used_GD = (group_G < GROUP)[:, None] & (dim_D < HEAD_DIM)[None, :]
    q_GD = tl.load(
        query + row * stride_query + head_G[:, None] * HEAD_DIM + dim_D[None, :],
        mask=is_used_GD,
        other=0.0,
    )
    peak_G, total_G, sum_GD = fold_keys(
        q_GD,
        kv + kv_head * (BLOCK_SIZE * HEAD_DIM),
        tables + row * stride_table,
        stride_block,
        begin,
        begin,
        end,
        tl.zeros([GROUP_ROWS], tl.int32) + (length - 1),
        IS_ALL_MASKED=1,
        WINDOW=WINDOW,
        NUM_KV_HEADS=NUM_KV_HEADS,
        HEAD_DIM=HEAD_DIM,
        BLOCK_SIZE=BLOCK_SIZE,
        TILE_X=TILE_X,
    )
    total_G = tl.where(begin < end, total_G, 1.0)
    mean_GD = sum_GD / total_G[:, None]
    slot_G = (row * (NUM_KV_HEADS * GROUP) + head_G) * NUM_SPLITS + split
    to_GD = slot_G[:, None] * HEAD_DIM + dim_D[None, :]
    if NUM_SPLITS == 1:
        tl.store(partials + to_GD, mean_GD.to(partials.dtype.element_ty), mask=is_used_GD)
    else:
        # Of an empty split only this is written: -inf, which says that there is nothing else.
        tl.store(weights + slot_G, peak_G + tl.log2(total_G), mask=group_G < GROUP)
        is_there_G1 = (peak_G != -float("inf"))[:, None]
        tl.store(partials + to_GD, mean_GD, mask=is_used_GD & is_there_G1)


@jit
def _join_splits(
    partials: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
) -> None:
    """The mean of one head's splits, each by its weight, which is the log2 of its total."""
    first = tl.program_id(1).to(tl.int64) * NUM_HEADS + tl.program_id(0)
    split_P = tl.arange(0, SPLIT_TILE)
    dim_D = tl.arange(0, HEAD_TILE)
    log_P = tl.load(
        weights + first * NUM_SPLITS + split_P, mask=split_P < NUM_SPLITS, other=-float("inf")
    )
    peak = tl.max(log_P, 0)
    is_there_P = log_P != -float("inf")  # NaN is there, and shows in the result
    weight_P = tl.where(is_there_P, tl.exp2(log_P - tl.where(peak > -float("inf"), peak, 0.0)), 0.0)
    partial_PD = tl.load(
        partials + (first * NUM_SPLITS + split_P)[:, None] * HEAD_DIM + dim_D[None, :],
        mask=is_there_P[:, None] & (dim_D < HEAD_DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(weight_P, 0)
    joined_D = tl.sum(partial_PD * weight_P[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    to_D = out + first * HEAD_DIM + dim_D
    tl.store(to_D, joined_D.to(out.dtype.element_ty), mask=dim_D < HEAD_DIM)
