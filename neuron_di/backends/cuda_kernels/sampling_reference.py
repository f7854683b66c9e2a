"""`choose` in plain torch, with a sort: what the kernel is compared with.

Dimensions: B rows, V vocabulary.
"""

import torch
from torch import Tensor

from neuron_di.backends.cuda_kernels.sampling import DrawRules, choose_greedy


def choose_reference(logits_BV: Tensor, rules: DrawRules) -> tuple[Tensor, Tensor]:
    """Tokens [B] and whether each row can be used [B]."""
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
