"""The gate of an MLP: SiLU of one half of its product, times the other half.

Dimensions: T rows, I intermediate.
"""

from torch import Tensor

from neuron_di.backends.cuda_kernels.triton_language import jit, tl

# Untuned: 4 warps, each thread with two loads of 16 bytes of either half.
_TILE = 2048
_NUM_WARPS = 4


def silu_and_multiply(gate_up_TI: Tensor) -> Tensor:
    """silu(gate) * up of rows [gate, up]: from [T, 2 * I] to [T, I], in their dtype."""
    num_rows, both = gate_up_TI.shape
    assert gate_up_TI.is_contiguous(), gate_up_TI.stride()
    out_TI = gate_up_TI.new_empty(num_rows, both // 2)
    grid = (num_rows, -(-both // 2 // _TILE))
    _gate[grid](gate_up_TI, out_TI, both // 2, TILE_I=_TILE, num_warps=_NUM_WARPS)
    return out_TI


@jit
def _gate(
    gate_up: tl.tensor, out: tl.tensor, intermediate: tl.tensor, TILE_I: tl.constexpr
) -> None:
    """A piece of one row."""
    row = tl.program_id(0).to(tl.int64)
    column_I = tl.program_id(1) * TILE_I + tl.arange(0, TILE_I)
    is_there_I = column_I < intermediate
    from_I = gate_up + row * 2 * intermediate + column_I
    gate_I = tl.load(from_I, mask=is_there_I, other=0.0).to(tl.float32)
    up_I = tl.load(from_I + intermediate, mask=is_there_I, other=0.0).to(tl.float32)
    gated_I = gate_I / (1.0 + tl.exp(-gate_I)) * up_I
    tl.store(out + row * intermediate + column_I, gated_I.to(out.dtype.element_ty), mask=is_there_I)
