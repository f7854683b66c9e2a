"""One draw per row of logits: each row by one program, which goes over it a few times.

Dimensions: B rows, V vocabulary, X numbers of a row in one tile.

A scaled logit is (logit - largest) / temperature, never above 0; its key is the bits of its
amount. As integers keys rise as logits fall, so the k-th largest logit, and the smallest weight
that top-p keeps, are found by halving an interval of integers, without a sort. Each halving reads
the row again: so what cannot be kept is left behind first, by one pass that copies the rest, the
candidates, in the order of their ids.
"""

from torch import Tensor

from neuron_di.backends.cuda_kernels.row_passes import (
    compact,
    find,
    kth_key,
    kth_key_of_lanes,
    largest,
    least_kept,
    mass_above,
)
from neuron_di.backends.cuda_kernels.triton_language import jit, tl

# Untuned.
_TILE = 4096
_NUM_WARPS = 16


def draw_rows(
    logits_BV: Tensor,
    rules: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    *,
    candidate_BV: Tensor,
    candidate_id_BV: Tensor,
    token_B: Tensor,
    is_usable_B: Tensor,
) -> None:
    """Fill `token_B`, int64, and `is_usable_B`; see `sampling.choose`.

    `rules` [B] each: temperature, top-k, top-p, log of min-p, random number. The candidates,
    float32 and int32, are workspace.
    """
    num_rows, num_vocab = logits_BV.shape
    _draw_row[(num_rows,)](
        logits_BV,
        *rules,
        candidate_BV,
        candidate_id_BV,
        token_B,
        is_usable_B,
        logits_BV.stride(0),
        num_vocab,
        TILE_X=_TILE,
        num_warps=_NUM_WARPS,
    )


@jit
def _draw_row(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    log_min_ps: tl.tensor,
    uniforms: tl.tensor,
    candidates: tl.tensor,
    candidate_ids: tl.tensor,
    tokens: tl.tensor,
    is_usables: tl.tensor,
    stride_logits: tl.tensor,
    num_vocab: tl.tensor,
    TILE_X: tl.constexpr,
) -> None:
    """One row, from its logits to a token."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride_logits
    peak_X, peak_id_X, is_nan_X = largest(source, num_vocab, TILE_X)
    peak = tl.max(peak_X, 0)
    token = tl.min(tl.where(peak_X == peak, peak_id_X, num_vocab), 0)
    is_usable = (tl.max(is_nan_X, 0) == 0) & (tl.abs(peak) < float("inf"))
    tl.store(is_usables + row, is_usable)

    temperature = tl.load(temperatures + row)
    if is_usable & (temperature > 0.0):
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row)
        has_top_k = (top_k > 0) & (top_k < num_vocab)
        has_top_p = top_p < 1.0
        limit = tl.abs(tl.load(log_min_ps + row)).to(tl.int32, bitcast=True)
        floor = -1.0  # of a weight that top-p can keep
        total = top_p * 0.0
        if has_top_k:
            # Of the lanes' largest logits k are as large as this: so the k-th of all is, too.
            limit = tl.minimum(limit, kth_key_of_lanes(peak_X, peak, temperature, top_k))
        else:
            total = mass_above(source, num_vocab, peak, temperature, limit, floor, TILE_X)
            if has_top_p:
                # Those that weigh less have, all together, half of what top-p leaves out.
                floor = (0.5 * (1.0 - top_p) * total / num_vocab).to(tl.float32)
        num = num_vocab
        if has_top_k | has_top_p:
            kept, kept_ids = candidates + row * num_vocab, candidate_ids + row * num_vocab
            num = compact(
                source, kept, kept_ids, num_vocab, peak, temperature, limit, floor, TILE_X
            )
            tl.debug_barrier()  # what one thread wrote, others read
            source = kept
        if has_top_k:
            if top_k < num:
                limit = tl.minimum(limit, kth_key(source, num, peak, temperature, top_k, TILE_X))
            total = mass_above(source, num, peak, temperature, limit, -1.0, TILE_X)
        least = -1.0  # all that weigh more are kept, and of those that weigh as much the first
        above = total
        if has_top_p:
            # No more than there is as summed here: `total` may be a sum in another order.
            held = mass_above(source, num, peak, temperature, limit, -1.0, TILE_X)
            needed = tl.minimum(top_p * total, held)
            least = least_kept(source, num, peak, temperature, limit, needed, TILE_X)
            above = mass_above(source, num, peak, temperature, limit, least, TILE_X)
            total = above + tl.maximum(tl.ceil((needed - above) / least), 1.0) * least
        target = tl.load(uniforms + row) * total
        is_equal = has_top_p & (target >= above)
        target = tl.where(is_equal, tl.minimum(target, total - 0.5 * least) - above, target)
        index = find(source, num, peak, temperature, limit, least, is_equal, target, TILE_X)
        token = index
        if has_top_k | has_top_p:
            token = tl.load(candidate_ids + row * num_vocab + index)
    tl.store(tokens + row, token.to(tl.int64))
