"""Attention over the paged pool in plain torch, in float64: what the kernels are compared with.

Dimensions: T query rows, R requests, X keys, H query heads, K KV heads, D head dim.
"""

import torch
from torch import Tensor


def attend_reference(
    query_THD: Tensor,
    pool_NLCKSD: Tensor,
    layer: int,
    table_N: Tensor,
    length: int,
    window: int | None = None,
) -> Tensor:
    """One request's last T positions over its `length` of KV: [T, H, D] in the queries' dtype.

    Reads the pool's rows [0, length) only. A decode step is the case of T = 1; 0 rows give none.
    """
    num_rows, num_heads, head_dim = query_THD.shape
    num_kv_heads, block_size = pool_NLCKSD.shape[3:5]
    table_N = table_N[: -(-length // block_size)].long()
    pool_CKNSD = pool_NLCKSD[:, layer].permute(1, 2, 0, 3, 4)
    kv_CKXD = pool_CKNSD[:, :, table_N].flatten(2, 3)[:, :, :length].double()
    kv_CHXD = kv_CKXD.repeat_interleave(num_heads // num_kv_heads, 1)
    score_HTX = query_THD.transpose(0, 1).double() @ kv_CHXD[0].transpose(1, 2) / head_dim**0.5
    key_X = torch.arange(length, device=query_THD.device)
    position_T1 = key_X[length - num_rows :, None]
    is_hidden_TX = key_X > position_T1
    if window is not None:
        is_hidden_TX |= key_X <= position_T1 - window
    weight_HTX = score_HTX.masked_fill(is_hidden_TX, -torch.inf).softmax(-1)
    # Of a key that is hidden not even NaN counts.
    value_HXD = kv_CHXD[1].masked_fill(is_hidden_TX.all(0)[:, None], 0.0)
    attended_HTD: Tensor = weight_HTX @ value_HXD
    return attended_HTD.transpose(0, 1).to(query_THD.dtype)
