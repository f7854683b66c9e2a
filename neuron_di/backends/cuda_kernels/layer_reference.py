"""The layers' other kernels in plain torch, in float64: what they are compared with.

Dimensions as in write_kv.py, norm.py, silu.py and linear.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def write_kv_reference_(
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
    """What `write_kv_` does, row by row."""
    num_kv_heads, block_size = pool_NLCKSD.shape[3:5]
    num_heads = qkv_TXD.shape[1] - 2 * num_kv_heads
    for row_XD, table_N, position in zip(qkv_TXD, table_TN, position_T.tolist(), strict=True):
        if position < 0:
            continue
        query_HD, key_KD, value_KD = row_XD.double().split([num_heads, num_kv_heads, num_kv_heads])
        if q_norm is not None and k_norm is not None:
            query_HD = F.rms_norm(query_HD, q_norm.shape, q_norm.double(), rms_eps)
            key_KD = F.rms_norm(key_KD, k_norm.shape, k_norm.double(), rms_eps)
        cos_R, sin_R = cos_PR[position].double(), sin_PR[position].double()
        row_XD[:num_heads] = _rotated(query_HD, cos_R, sin_R).to(row_XD.dtype)
        slot_CKD = pool_NLCKSD[table_N[position // block_size], layer, :, :, position % block_size]
        slot_CKD[0] = _rotated(key_KD, cos_R, sin_R).to(row_XD.dtype)
        slot_CKD[1] = value_KD.to(row_XD.dtype)
    return qkv_TXD[:, :num_heads]


def _rotated(x_XD: Tensor, cos_R: Tensor, sin_R: Tensor) -> Tensor:
    first, second = x_XD.chunk(2, dim=-1)
    return torch.cat([first * cos_R - second * sin_R, second * cos_R + first * sin_R], dim=-1)


def rms_norm_reference(hidden_TE: Tensor, weight_E: Tensor, rms_eps: float) -> Tensor:
    """What `rms_norm` does."""
    normed_TE = F.rms_norm(hidden_TE.double(), weight_E.shape, weight_E.double(), rms_eps)
    return normed_TE.to(hidden_TE.dtype)


def add_and_norm_reference_(
    hidden_TE: Tensor, addend_TE: Tensor, weight_E: Tensor, rms_eps: float
) -> Tensor:
    """What `add_and_norm_` does."""
    hidden_TE.copy_(hidden_TE.float() + addend_TE.float())
    return rms_norm_reference(hidden_TE, weight_E, rms_eps)


def silu_and_multiply_reference(gate_up_TI: Tensor) -> Tensor:
    """What `silu_and_multiply` does."""
    gate_TI, up_TI = gate_up_TI.double().chunk(2, dim=-1)
    return (F.silu(gate_TI) * up_TI).to(gate_up_TI.dtype)


def linear_reference(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """What `invariant_linear` does."""
    out_TO = x_TI.double() @ weight_OI.double().T
    if bias_O is not None:
        out_TO += bias_O.double()
    return out_TO.to(x_TI.dtype)
