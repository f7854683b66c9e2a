"""What prefill's and decode's attention share: a tile of keys from the pool, folded into a result.

Dimensions: M queries of one tile, X keys of one, D head dim padded to a power of two.

The softmax is computed as keys come in (Milakov and Gimelshein, arXiv 1805.02867): of each query
the largest score, the sum of weights and the weighted sum of values so far. Scores are in units
of log 2, since the hardware has exp2.
"""

from torch import Tensor

from neuron_di.backends.cuda_kernels.triton_language import jit, next_power_of_2, tl

HEAD_DIM_MAX = 256  # of the attention kernels: there are no tiles for more

_LOG2_E = tl.constexpr(1.4426950408889634)
# Of matrix products: with tf32, Triton's default, float32 numbers would count 10 bits only.
_PRECISION = tl.constexpr("ieee")


def head_tile_of(head_dim: int) -> int:
    """The head dim as the kernels compute it: a power of two, and what the matrix unit takes."""
    return max(16, next_power_of_2(head_dim))


def layer_of(pool_NLCKSD: Tensor, layer: int) -> Tensor:
    """One layer of the pool, kv_NCKSD: a view. Within a block it must be contiguous."""
    kv_NCKSD = pool_NLCKSD[:, layer]
    _, _, heads, size, dim = kv_NCKSD.shape
    expected = (heads * size * dim, size * dim, dim, 1)
    assert kv_NCKSD.stride()[1:] == expected, (kv_NCKSD.stride(), expected)
    return kv_NCKSD


@jit
def fold_keys(
    q_MD: tl.tensor,
    keys: tl.tensor,
    table: tl.tensor,
    stride_block: tl.tensor,
    begin: tl.tensor,
    full_end: tl.tensor,
    end: tl.tensor,
    position_M: tl.tensor,
    IS_ALL_MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_X: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """All keys at [begin, end), in tiles from `begin` on: peak [M], total [M] and sum [M, D].

    `keys` points to the KV head's first key in block 0, `table` to the request's blocks. Each query
    sees the keys up to its own position, and of those the last WINDOW unless that is 0. Before
    `full_end`, where a tile must begin, every query sees every key; IS_ALL_MASKED if that is
    `begin`. At `end` and behind it nothing is read, whatever lies there.
    """
    peak_M = tl.full([q_MD.shape[0]], -float("inf"), tl.float32)
    total_M = tl.zeros([q_MD.shape[0]], tl.float32)
    sum_MD = tl.zeros([q_MD.shape[0], q_MD.shape[1]], tl.float32)
    block_X = _blocks_of_tile(table, begin, end, position_M, WINDOW, BLOCK_SIZE, TILE_X)
    for is_masked in tl.static_range(IS_ALL_MASKED, 2):
        phase_begin = full_end if is_masked else begin
        phase_end = end if is_masked else full_end
        for start in range(phase_begin, phase_end, TILE_X):
            # The next tile's blocks already: then its keys can be fetched while this is computed.
            next_X = _blocks_of_tile(
                table, start + TILE_X, end, position_M, WINDOW, BLOCK_SIZE, TILE_X
            )
            peak_M, total_M, sum_MD = _fold_tile(
                q_MD,
                peak_M,
                total_M,
                sum_MD,
                keys,
                block_X,
                stride_block,
                start,
                position_M,
                IS_MASKED=is_masked,
                WINDOW=WINDOW,
                NUM_KV_HEADS=NUM_KV_HEADS,
                HEAD_DIM=HEAD_DIM,
                BLOCK_SIZE=BLOCK_SIZE,
                TILE_X=TILE_X,
            )
            block_X = next_X
    return peak_M, total_M, sum_MD


@jit
def _blocks_of_tile(
    table: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    position_M: tl.tensor,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_X: tl.constexpr,
) -> tl.tensor:
    """The pool's block of each key at [start, start + X), int32 [X]; -1: none is to be read."""
    key_X = start + tl.arange(0, TILE_X)
    is_there_X = key_X < end
    if WINDOW > 0:  # a tile's first keys may be in blocks from before all windows
        is_there_X &= key_X > tl.min(position_M) - WINDOW
    return tl.load(table + key_X // BLOCK_SIZE, mask=is_there_X, other=-1)


@jit
def _fold_tile(
    q_MD: tl.tensor,
    peak_M: tl.tensor,
    total_M: tl.tensor,
    sum_MD: tl.tensor,
    keys: tl.tensor,
    block_X: tl.tensor,
    stride_block: tl.tensor,
    start: tl.tensor,
    position_M: tl.tensor,
    IS_MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_X: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take in the keys at [start, start + X): returns peak [M], total [M] and sum [M, D].

    `keys` points to the KV head's first key in block 0, `block_X` is what `_blocks_of_tile` gave.
    Without IS_MASKED every query sees all of these keys. With it each sees those up to its own
    position, and of those the last WINDOW unless that is 0; where `block_X` is -1 nothing is read.
    """
    key_X = start + tl.arange(0, TILE_X)
    dim_D = tl.arange(0, q_MD.shape[1])
    is_there_X = block_X >= 0
    row_X = block_X.to(tl.int64) * stride_block + (key_X % BLOCK_SIZE) * HEAD_DIM
    key_XD = keys + row_X[:, None] + dim_D[None, :]
    value_XD = key_XD + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    if IS_MASKED or q_MD.shape[1] != HEAD_DIM:
        is_read_XD = is_there_X[:, None] & (dim_D < HEAD_DIM)[None, :]
        k_XD = tl.load(key_XD, mask=is_read_XD, other=0.0)
        v_XD = tl.load(value_XD, mask=is_read_XD, other=0.0)
    else:
        k_XD = tl.load(key_XD)
        v_XD = tl.load(value_XD)

    score_MX = tl.dot(q_MD, tl.trans(k_XD), input_precision=_PRECISION)
    if IS_MASKED:
        is_seen_MX = is_there_X[None, :] & (key_X[None, :] <= position_M[:, None])
        if WINDOW > 0:
            is_seen_MX &= key_X[None, :] > position_M[:, None] - WINDOW
        score_MX = tl.where(is_seen_MX, score_MX, -float("inf"))
    next_M = tl.maximum(peak_M, tl.max(score_MX, 1) * (_LOG2_E * HEAD_DIM**-0.5))
    base_M = next_M
    if WINDOW > 0:  # a query may have seen no key yet: -inf - -inf would be NaN
        base_M = tl.where(next_M == -float("inf"), 0.0, next_M)
    # One rounding, said so: else the compiler would choose, and not the same with a mask.
    weight_MX = tl.exp2(tl.fma(score_MX, _LOG2_E * HEAD_DIM**-0.5, -base_M[:, None]))
    shrink_M = tl.exp2(peak_M - base_M)
    total_M = total_M * shrink_M + tl.sum(weight_MX, 1)
    sum_MD = sum_MD * shrink_M[:, None]
    sum_MD = tl.dot(weight_MX.to(v_XD.dtype), v_XD, sum_MD, input_precision=_PRECISION)
    return next_M, total_M, sum_MD
