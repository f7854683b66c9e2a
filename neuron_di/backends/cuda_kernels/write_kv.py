"""What lies between a layer's QKV product and its attention, in one launch.

Dimensions: T rows, H query heads, K KV heads, D head dim, R = D / 2, P positions, N blocks.

Each head of a row is normalised (where the family does that), rotated by its position's angles
and rounded once; queries stay where they are, keys and values go into the pool. Pair i of the
rotation is (x[i], x[i + R]), the order of the Hugging Face checkpoints.
"""

from torch import Tensor

from neuron_di.backends.cuda_kernels.key_tiles import layer_of
from neuron_di.backends.cuda_kernels.triton_language import jit_for_any, next_power_of_2, tl

# Untuned. Heads of one row that one program takes: few, so that a step of one row is spread.
_HEADS = 8
_NUM_WARPS = 4


def write_kv_(
    qkv_TXD: Tensor,
    pool_NLCKSD: Tensor,
    layer: int,
    table_TN: Tensor,
    position_T: Tensor,
    cos_PR: Tensor,
    sin_PR: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    rms_eps: float = 0.0,
) -> Tensor:
    """Rotate the queries in place, write keys and values to the pool; return the queries [T, H, D].

    `qkv_TXD` [T, H + 2K, D] is contiguous: queries, keys, values. They come back as a view of it;
    its keys and values stay as they were. Row t's KV goes to position `position_T[t]` of the blocks
    in `table_TN[t]`, both int32. Rows of one request can share a row of the table: `expand` it. A
    row at a negative position, such as one that only fills a bucket, is left alone and writes
    nothing. `cos_PR` and `sin_PR`, float32, are `RopeSpec.angle_tables`. Norms [D]: both, or none.
    """
    num_rows, num_kinds, head_dim = qkv_TXD.shape
    num_kv_heads, block_size = pool_NLCKSD.shape[3:5]
    num_heads = num_kinds - 2 * num_kv_heads
    kv_NCKSD = layer_of(pool_NLCKSD, layer)
    assert qkv_TXD.is_contiguous(), qkv_TXD.stride()
    assert cos_PR.is_contiguous(), cos_PR.stride()
    assert sin_PR.is_contiguous(), sin_PR.stride()
    assert qkv_TXD.dtype == pool_NLCKSD.dtype, (qkv_TXD.dtype, pool_NLCKSD.dtype)
    assert table_TN.stride(1) == 1, table_TN.stride()
    assert (q_norm is None) == (k_norm is None), "queries and keys are normalised, or neither"
    _rotate_and_write[(num_rows, -(-num_kinds // _HEADS))](
        qkv_TXD,
        kv_NCKSD,
        table_TN,
        position_T,
        cos_PR,
        sin_PR,
        qkv_TXD if q_norm is None else q_norm,
        qkv_TXD if k_norm is None else k_norm,
        table_TN.stride(0),
        kv_NCKSD.stride(0),
        rms_eps,
        HAS_NORM=q_norm is not None,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        HALF_TILE=next_power_of_2(head_dim // 2),
        BLOCK_SIZE=block_size,
        TILE_X=_HEADS,
        num_warps=_NUM_WARPS,
    )
    return qkv_TXD[:, :num_heads]


@jit_for_any("tables", "positions", "stride_table")
def _rotate_and_write(
    qkv: tl.tensor,
    kv: tl.tensor,
    tables: tl.tensor,
    positions: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    stride_table: tl.tensor,
    stride_block: tl.tensor,
    rms_eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_X: tl.constexpr,
) -> None:
    """Some heads of one row. X counts its heads: queries, keys, values."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    if position >= 0:
        head_X = tl.program_id(1) * TILE_X + tl.arange(0, TILE_X)
        pair_R = tl.arange(0, HALF_TILE)
        num_kinds: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
        is_there_R = pair_R < HALF
        is_there_XR = (head_X < num_kinds)[:, None] & is_there_R[None, :]
        from_XR = qkv + (row * num_kinds + head_X)[:, None] * (2 * HALF) + pair_R[None, :]
        first_XR = tl.load(from_XR, mask=is_there_XR, other=0.0).to(tl.float32)
        second_XR = tl.load(from_XR + HALF, mask=is_there_XR, other=0.0).to(tl.float32)
        is_query_X1 = (head_X < NUM_HEADS)[:, None]
        is_value_X1 = (head_X >= NUM_HEADS + NUM_KV_HEADS)[:, None]
        a_XR, b_XR = first_XR, second_XR
        if HAS_NORM:
            squares_X = tl.sum(a_XR * a_XR + b_XR * b_XR, 1)
            scale_X1 = (1.0 / tl.sqrt_rn(squares_X / (2 * HALF) + rms_eps))[:, None]
            to_q_R, to_k_R = q_norm + pair_R[None, :], k_norm + pair_R[None, :]
            weight_XR = tl.load(tl.where(is_query_X1, to_q_R, to_k_R), mask=is_there_XR, other=0.0)
            a_XR = a_XR * scale_X1 * weight_XR.to(tl.float32)
            to_q_R, to_k_R = to_q_R + HALF, to_k_R + HALF
            weight_XR = tl.load(tl.where(is_query_X1, to_q_R, to_k_R), mask=is_there_XR, other=0.0)
            b_XR = b_XR * scale_X1 * weight_XR.to(tl.float32)
        angle_R = position.to(tl.int64) * HALF + pair_R
        cos_1R = tl.load(cosines + angle_R, mask=is_there_R, other=0.0)[None, :]
        sin_1R = tl.load(sines + angle_R, mask=is_there_R, other=0.0)[None, :]
        dtype = qkv.dtype.element_ty
        first_XR = tl.where(is_value_X1, first_XR, a_XR * cos_1R - b_XR * sin_1R).to(dtype)
        second_XR = tl.where(is_value_X1, second_XR, b_XR * cos_1R + a_XR * sin_1R).to(dtype)
        tl.store(from_XR, first_XR, mask=is_there_XR & is_query_X1)
        tl.store(from_XR + HALF, second_XR, mask=is_there_XR & is_query_X1)

        block = tl.load(tables + row * stride_table + position // BLOCK_SIZE).to(tl.int64)
        # Behind the queries, heads are in the pool's order: the keys', then the values'.
        place_X = (head_X - NUM_HEADS) * BLOCK_SIZE + position % BLOCK_SIZE
        to_XR = kv + block * stride_block + place_X[:, None] * (2 * HALF) + pair_R[None, :]
        is_kv_XR = is_there_XR & (head_X >= NUM_HEADS)[:, None]
        tl.store(to_XR, first_XR, mask=is_kv_XR)
        tl.store(to_XR + HALF, second_XR, mask=is_kv_XR)
