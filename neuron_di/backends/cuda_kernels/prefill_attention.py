"""Attention of prompts' chunks: each request's newest positions over all of its keys in the pool.

Dimensions: T positions of all chunks, one request's behind another's, R requests, H query heads,
K KV heads, D head dim, N blocks of a table.

A program has a tile of one request's positions and one head. It goes through the keys from
position 0 up (or where the first window begins) in tiles whose borders are multiples of the
tile's size, whatever the chunk: so a position's result does not depend on how its prompt was cut.
"""

from dataclasses import dataclass

from torch import Tensor

from neuron_di.backends.cuda_kernels.key_tiles import (
    fold_keys,
    head_tile_of,
    layer_of,
)
from neuron_di.backends.cuda_kernels.triton_language import jit_for_any, tl


@dataclass(frozen=True, slots=True)
class _Tile:
    num_positions: int
    num_keys: int
    num_warps: int
    num_stages: int


# By (bytes of a number, head dim padded to a power of two). Untuned: chosen so that the compiler
# spills no register, and in 16 bits uses Hopper's matrix unit, whose tiles are 64 rows high.
_TILES = {
    (2, 64): _Tile(128, 64, 8, 3),
    (2, 128): _Tile(128, 64, 8, 3),
    (2, 256): _Tile(128, 32, 8, 2),
    (4, 64): _Tile(32, 32, 8, 2),
    (4, 128): _Tile(32, 16, 8, 2),
    (4, 256): _Tile(16, 16, 8, 2),
}


def attend_prefill(
    query_THD: Tensor,
    pool_NLCKSD: Tensor,
    layer: int,
    table_RN: Tensor,
    first_row_R1: Tensor,
    length_R: Tensor,
    *,
    rows_max: int,
    window: int | None = None,
) -> Tensor:
    """The attended values [T, H, D], in the queries' dtype, contiguous.

    Request r's queries are the rows [first_row_R1[r], first_row_R1[r + 1]) of `query_THD`, which
    may be part of wider rows, and they are its last positions: `length_R[r]` counts all of its KV,
    theirs included. All of it is in the pool, in the blocks that `table_RN` names in order. These
    three are int32. `rows_max`, at least the most rows of any request, decides the grid: no number
    of the device is read for it. Rows beyond the last request's are not written.
    """
    _, num_heads, head_dim = query_THD.shape
    num_kv_heads, block_size = pool_NLCKSD.shape[3:5]
    kv_NCKSD = layer_of(pool_NLCKSD, layer)
    assert query_THD.stride()[1:] == (head_dim, 1), query_THD.stride()
    assert query_THD.dtype == pool_NLCKSD.dtype, (query_THD.dtype, pool_NLCKSD.dtype)
    assert table_RN.stride(1) == 1, table_RN.stride()
    head_tile = head_tile_of(head_dim)
    tile = _TILES[query_THD.element_size(), max(head_tile, 64)]
    out_THD = query_THD.new_empty(query_THD.shape)
    grid = (-(-rows_max // tile.num_positions), num_heads, len(length_R))
    _attend_tile[grid](
        query_THD,
        kv_NCKSD,
        table_RN,
        first_row_R1,
        length_R,
        out_THD,
        query_THD.stride(0),
        table_RN.stride(0),
        kv_NCKSD.stride(0),
        WINDOW=window or 0,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEAD_TILE=head_tile,
        BLOCK_SIZE=block_size,
        TILE_T=tile.num_positions,
        TILE_X=tile.num_keys,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out_THD


@jit_for_any("tables", "first_rows", "lengths", "stride_table")
def _attend_tile(
    query: tl.tensor,
    kv: tl.tensor,
    tables: tl.tensor,
    first_rows: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    stride_query: tl.tensor,
    stride_table: tl.tensor,
    stride_block: tl.tensor,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_X: tl.constexpr,
) -> None:
    """A tile of one request's positions, one query head."""
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    # The last tile sees the most keys: begun first, it does not run on when all others are done.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_T
    first_row = tl.load(first_rows + request)
    num_rows = tl.load(first_rows + request + 1) - first_row
    if row < num_rows:
        length = tl.load(lengths + request)
        row_T = row + tl.arange(0, TILE_T)
        dim_D = tl.arange(0, HEAD_TILE)
        is_used_TD = (row_T < num_rows)[:, None] & (dim_D < HEAD_DIM)[None, :]
        index_T = (first_row + row_T).to(tl.int64)
        q_TD = tl.load(
            query + (index_T * stride_query)[:, None] + (head * HEAD_DIM + dim_D)[None, :],
            mask=is_used_TD,
            other=0.0,
        )
        first = length - num_rows + row  # this tile's first position
        # Rows behind the request's last see what that one sees: some key, which NaN needs not.
        position_T = tl.minimum(first + tl.arange(0, TILE_T), length - 1)
        end = tl.minimum(first + TILE_T, length)
        begin = 0
        full_end = (first + 1) // TILE_X * TILE_X  # before it, every query sees every key
        if WINDOW > 0:
            begin = tl.maximum(first - WINDOW + 1, 0) // TILE_X * TILE_X
            full_end = begin

        _, total_T, sum_TD = fold_keys(
            q_TD,
            kv + head // (NUM_HEADS // NUM_KV_HEADS) * (BLOCK_SIZE * HEAD_DIM),
            tables + request * stride_table,
            stride_block,
            begin,
            full_end,
            end,
            position_T,
            IS_ALL_MASKED=1 if WINDOW > 0 else 0,
            WINDOW=WINDOW,
            NUM_KV_HEADS=NUM_KV_HEADS,
            HEAD_DIM=HEAD_DIM,
            BLOCK_SIZE=BLOCK_SIZE,
            TILE_X=TILE_X,
        )
        to_TD = out + ((index_T * NUM_HEADS + head) * HEAD_DIM)[:, None] + dim_D[None, :]
        mean_TD = sum_TD / total_T[:, None]
        tl.store(to_TD, mean_TD.to(out.dtype.element_ty), mask=is_used_TD)
