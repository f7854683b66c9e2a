"""A matrix product whose rows do not depend on how many rows there are.

Dimensions: T rows, I numbers in, O numbers out.

A library picks its tiles, and how it cuts the sum over I, by the number of rows. Here one tile
serves all, and a program sums over I in order. So a row has the same bits alone and in any batch,
which the batch-invariant mode needs of every product; it is slower where a library cuts the sum.
"""

from dataclasses import dataclass

from torch import Tensor

from neuron_di.backends.cuda_kernels.triton_language import jit_for_any, tl


@dataclass(frozen=True, slots=True)
class _Tile:
    num_rows: int
    num_in: int
    num_out: int
    num_warps: int
    num_stages: int


# By bytes of a number. Untuned; one for every T, I and O, or rows would differ by them.
_TILES = {2: _Tile(64, 64, 64, 4, 4), 4: _Tile(32, 32, 32, 4, 3)}


def invariant_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: [T, O] in their dtype, summed in float32. Rows of x may be apart."""
    (num_rows, num_in), num_out = x_TI.shape, len(weight_OI)
    assert x_TI.stride(1) == 1, x_TI.stride()
    assert weight_OI.is_contiguous(), weight_OI.stride()
    out_TO = x_TI.new_empty(num_rows, num_out)
    tile = _TILES[x_TI.element_size()]
    # Programs of the same outputs are neighbours: they share the weights, which are read once.
    grid = (-(-num_rows // tile.num_rows), -(-num_out // tile.num_out))
    _multiply[grid](
        x_TI,
        weight_OI,
        out_TO if bias_O is None else bias_O,
        out_TO,
        num_rows,
        num_out,
        num_in,
        x_TI.stride(0),
        HAS_BIAS=bias_O is not None,
        TILE_T=tile.num_rows,
        TILE_I=tile.num_in,
        TILE_O=tile.num_out,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out_TO


@jit_for_any("num_rows")
def _multiply(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    num_in: tl.tensor,
    stride_x: tl.tensor,
    HAS_BIAS: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_I: tl.constexpr,
    TILE_O: tl.constexpr,
) -> None:
    """One tile of the result."""
    row_T = tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)
    out_O = tl.program_id(1) * TILE_O + tl.arange(0, TILE_O)
    in_I = tl.arange(0, TILE_I)
    is_row_T, is_out_O = row_T < num_rows, out_O < num_out
    from_x_TI = x + row_T.to(tl.int64)[:, None] * stride_x + in_I[None, :]
    from_weight_OI = weight + out_O.to(tl.int64)[:, None] * num_in + in_I[None, :]
    sum_TO = tl.zeros([TILE_T, TILE_O], tl.float32)
    for start in range(0, num_in, TILE_I):
        is_in_1I = (start + in_I < num_in)[None, :]
        x_TI = tl.load(from_x_TI + start, mask=is_row_T[:, None] & is_in_1I, other=0.0)
        weight_OI = tl.load(from_weight_OI + start, mask=is_out_O[:, None] & is_in_1I, other=0.0)
        sum_TO = tl.dot(x_TI, tl.trans(weight_OI), sum_TO, input_precision="ieee")
    if HAS_BIAS:
        sum_TO += tl.load(bias + out_O, mask=is_out_O, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row_T.to(tl.int64)[:, None] * num_out + out_O[None, :],
        sum_TO.to(out.dtype.element_ty),
        mask=is_row_T[:, None] & is_out_O[None, :],
    )
