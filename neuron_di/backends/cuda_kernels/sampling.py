"""Choosing the next token of each row on the device, as the engine's sampler does on the host.

Dimensions: B rows, V vocabulary.

The order of the steps: temperature, top-k and min-p, top-p, one draw; or, at temperature 0, the
largest logit, the lowest id of equals. Masks, bias, penalties and logprobs stay on the host. So
does the random number: a row's is a function of its request's seed and the token's index, and
comes with the rules.

For the same logits the token is the host's unless rounding decides. The host takes exp in
float32 by NumPy and the device by its own instruction, both to about 1e-7 of the value; so they
can part where the random number is within about 1e-7 of a border between two tokens, where a
token's weight is that near to what top-p still needs, or where two weights are equal on one of
them only. Greedy tokens, top-k and min-p are comparisons, and equal.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from neuron_di.backends.cuda_kernels.draw_kernel import draw_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRules:
    """One number per row [B], all on the device."""

    temperature_B: Tensor  # float32; 0 is greedy, and the rest then does not matter
    top_k_B: Tensor  # int32; 0 is off
    top_p_B: Tensor  # float64; 1 is off
    log_min_p_B: Tensor  # float32: log(min_p), rounded once; -inf is off
    uniform_B: Tensor  # float64, of [0, 1)

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device | str) -> "DrawRules":
        """Memory for a bucket's rows, all greedy until it is filled."""

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device=device)

        return cls(
            temperature_B=full(0.0, torch.float32),
            top_k_B=full(0, torch.int32),
            top_p_B=full(1.0, torch.float64),
            log_min_p_B=full(-torch.inf, torch.float32),
            uniform_B=full(0.0, torch.float64),
        )

    def to(self, device: torch.device) -> "DrawRules":
        return DrawRules(
            **{each.name: getattr(self, each.name).to(device) for each in fields(self)}
        )


def choose_greedy(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B], int64, and whether each row's largest logit is finite [B]: else it is a fault.

    Of equal logits the lowest id. NaN counts as the largest.
    """
    peak_B, token_B = logits_BV.max(-1)
    return token_B, peak_B.isfinite()


def choose(logits_BV: Tensor, rules: DrawRules) -> tuple[Tensor, Tensor]:
    """As `choose_greedy`, with each row's own rules. Takes 8 bytes of memory per logit meanwhile.

    A row depends on itself only, bit for bit. One program per row: the grid is B, so a CUDA graph
    can hold it, and rules may change between its replays.
    """
    num_rows, num_vocab = logits_BV.shape
    assert logits_BV.stride(1) == 1, logits_BV.stride()
    token_B = torch.empty(num_rows, dtype=torch.int64, device=logits_BV.device)
    is_usable_B = torch.empty(num_rows, dtype=torch.bool, device=logits_BV.device)
    draw_rows(
        logits_BV,
        (rules.temperature_B, rules.top_k_B, rules.top_p_B, rules.log_min_p_B, rules.uniform_B),
        candidate_BV=torch.empty(num_rows, num_vocab, device=logits_BV.device),
        candidate_id_BV=torch.empty(
            num_rows, num_vocab, dtype=torch.int32, device=logits_BV.device
        ),
        token_B=token_B,
        is_usable_B=is_usable_B,
    )
    return token_B, is_usable_B
