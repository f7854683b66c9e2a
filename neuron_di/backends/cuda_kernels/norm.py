"""RMSNorm, with what comes before it: the sum of the residual stream and a layer's product.

Dimensions: T rows, E hidden.
"""

from torch import Tensor

from neuron_di.backends.cuda_kernels.triton_language import jit, next_power_of_2, tl

# Untuned: numbers of a row that one warp has, of 32 threads with two loads of 16 bytes each.
_NUMBERS_PER_WARP = 512
_WARPS_MAX = 16


def rms_norm(hidden_TE: Tensor, weight_E: Tensor, rms_eps: float) -> Tensor:
    """The rows normalised and weighted: [T, E] in their dtype. Rows may be apart in memory."""
    return _launch(hidden_TE, None, weight_E, rms_eps)


def add_and_norm_(hidden_TE: Tensor, addend_TE: Tensor, weight_E: Tensor, rms_eps: float) -> Tensor:
    """Add to `hidden_TE` in place; return what `rms_norm` gives of the sum as it is stored."""
    assert addend_TE.shape == hidden_TE.shape, (addend_TE.shape, hidden_TE.shape)
    assert addend_TE.stride(1) == 1, addend_TE.stride()
    return _launch(hidden_TE, addend_TE, weight_E, rms_eps)


def _launch(
    hidden_TE: Tensor, addend_TE: Tensor | None, weight_E: Tensor, rms_eps: float
) -> Tensor:
    num_rows, hidden = hidden_TE.shape
    assert hidden_TE.stride(1) == 1, hidden_TE.stride()
    out_TE = hidden_TE.new_empty(num_rows, hidden)
    tile = next_power_of_2(hidden)
    _normalise[(num_rows,)](
        hidden_TE,
        hidden_TE if addend_TE is None else addend_TE,
        weight_E,
        out_TE,
        hidden_TE.stride(0),
        0 if addend_TE is None else addend_TE.stride(0),
        rms_eps,
        HAS_ADDEND=addend_TE is not None,
        HIDDEN=hidden,
        TILE_E=tile,
        num_warps=max(1, min(tile // _NUMBERS_PER_WARP, _WARPS_MAX)),
    )
    return out_TE


@jit
def _normalise(
    hidden: tl.tensor,
    addend: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    stride_hidden: tl.tensor,
    stride_addend: tl.tensor,
    rms_eps: tl.tensor,
    HAS_ADDEND: tl.constexpr,
    HIDDEN: tl.constexpr,
    TILE_E: tl.constexpr,
) -> None:
    """One row, all of it in registers."""
    row = tl.program_id(0).to(tl.int64)
    column_E = tl.arange(0, TILE_E)
    is_there_E = column_E < HIDDEN
    x_E = tl.load(hidden + row * stride_hidden + column_E, mask=is_there_E, other=0.0)
    if HAS_ADDEND:
        added_E = tl.load(addend + row * stride_addend + column_E, mask=is_there_E, other=0.0)
        # Rounded before it is normalised, as if these were two steps.
        x_E = (x_E.to(tl.float32) + added_E.to(tl.float32)).to(hidden.dtype.element_ty)
        tl.store(hidden + row * stride_hidden + column_E, x_E, mask=is_there_E)
    x_E = x_E.to(tl.float32)
    weight_E = tl.load(weight + column_E, mask=is_there_E, other=0.0).to(tl.float32)
    mean = tl.sum(x_E * x_E, 0) / HIDDEN
    normed_E = x_E * (1.0 / tl.sqrt_rn(mean + rms_eps)) * weight_E
    tl.store(out + row * HIDDEN + column_E, normed_E.to(out.dtype.element_ty), mask=is_there_E)
