"""Causal attention of one prompt's chunk over the paged pool, in torch: for every dtype.

Dimensions: T positions of the chunk, X keys, H query heads, K KV heads, D head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Layer, queries [T, H, D], their first position, the request's blocks [N] int32 -> [T, H * D].
# The KV of every position up to the chunk's last is in the pool.
AttendChunk = Callable[[int, Tensor, int, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _View:
    """What all layers of one chunk share: the keys to read, and who may look at which."""

    blocks: Tensor
    first_key: int  # of what `blocks` hold, the keys to use
    end_key: int
    mask_TX: Tensor | None  # added to the scores; None: everything, or causal
    is_causal: bool


class TorchAttention:
    """An AttendChunk. `window` is the number of positions that one sees; None: all before it."""

    def __init__(self, pool_NLCKSD: Tensor, window: int | None) -> None:
        self._pool_NLCKSD = pool_NLCKSD
        self._window = window
        self._view: _View | None = None

    def __call__(self, layer: int, query_THD: Tensor, start: int, table_N: Tensor) -> Tensor:
        if layer == 0 or self._view is None:
            self._view = self._look(start, start + len(query_THD), table_N)
        view = self._view
        # One copy: the blocks' positions become contiguous for each head.
        pool_CKNSD = self._pool_NLCKSD[:, layer].permute(1, 2, 0, 3, 4)
        kv_CKTD = pool_CKNSD.index_select(2, view.blocks).flatten(2, 3)
        kv_CKTD = kv_CKTD[:, :, view.first_key : view.end_key]
        attended_HTD = F.scaled_dot_product_attention(
            query_THD.transpose(0, 1)[None],
            kv_CKTD[None, 0],
            kv_CKTD[None, 1],
            attn_mask=view.mask_TX,
            is_causal=view.is_causal,
            enable_gqa=True,
        )[0]
        return attended_HTD.transpose(0, 1).flatten(1)

    def _look(self, start: int, end: int, table_N: Tensor) -> _View:
        size, window = self._pool_NLCKSD.shape[4], self._window
        lowest = 0 if window is None else max(0, start - window + 1)
        first_block = lowest // size
        mask_TX = None
        is_causal = start == 0 and (window is None or end <= window)
        if end - start > 1 and not is_causal:
            positions_T = torch.arange(start, end)
            keys_X = torch.arange(lowest, end)
            is_hidden = keys_X > positions_T[:, None]
            if window is not None:
                is_hidden |= keys_X <= positions_T[:, None] - window
            dtype = self._pool_NLCKSD.dtype
            # Additive: a boolean one would be converted again in every layer.
            mask_TX = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, -torch.inf)
        return _View(
            blocks=table_N[first_block:],
            first_key=lowest - first_block * size,
            end_key=end - first_block * size,
            mask_TX=mask_TX,
            is_causal=is_causal,
        )
