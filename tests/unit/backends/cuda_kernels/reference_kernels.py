"""Each kernel in plain torch, nearly all in float64: what the kernels are compared with.

Dimensions as in the kernels' files. Of attention: T query rows, X keys, H query heads, K KV heads,
D head dim. Of sampling: B rows, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from neuron_di.backends.cuda_kernels import DrawRules, choose_greedy


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


def choose_reference(logits_BV: Tensor, rules: DrawRules) -> tuple[Tensor, Tensor]:
    """What `choose` does, with a sort: tokens [B] and whether each row can be used [B]."""
    token_B, is_usable_B = choose_greedy(logits_BV)
    for row in range(len(logits_BV)):
        if is_usable_B[row] and rules.temperature_B[row] > 0:
            token_B[row] = _draw(logits_BV[row], rules, row)
    return token_B, is_usable_B


def _draw(logits_V: Tensor, rules: DrawRules, row: int) -> Tensor:
    num_vocab, top_k = len(logits_V), int(rules.top_k_B[row])
    scaled_V = (logits_V - logits_V.max()) / rules.temperature_B[row]
    is_kept_V = scaled_V >= rules.log_min_p_B[row]
    if 0 < top_k < num_vocab:
        is_kept_V &= scaled_V >= scaled_V.topk(top_k).values[-1]
    mass_V = scaled_V.exp().double().masked_fill(~is_kept_V, 0.0)
    is_last_V = torch.zeros_like(is_kept_V)  # those of which top-p keeps some, the lower ids
    if rules.top_p_B[row] < 1:
        falling_V, ids = mass_V.sort(descending=True, stable=True)
        needed = rules.top_p_B[row] * mass_V.sum()
        num_kept = min(int((falling_V.cumsum(0) < needed).sum()) + 1, num_vocab)
        ids = ids[:num_kept]
        is_last_V[ids] = falling_V[:num_kept] == falling_V[num_kept - 1]
        mass_V = torch.zeros_like(mass_V).scatter_(0, ids, falling_V[:num_kept])
    # First those that weigh more than the least that is kept, then those that weigh as much.
    line = torch.cat([mass_V.masked_fill(is_last_V, 0.0), mass_V.masked_fill(~is_last_V, 0.0)])
    cdf = line.cumsum(0)
    last = int(torch.nonzero(line)[-1])
    index = int((cdf <= rules.uniform_B[row] * cdf[-1]).sum())
    return torch.tensor(min(index, last) % num_vocab)
