"""Tokens that the GPU chooses, of rows whose logits nobody else has to see.

What is left to the host: rules (grammars, allowed ids, bias, bad words), penalties, tokens held
back until `min_tokens`, logprobs, and logits that are of no use.

Run on one GPU so far (docs/cuda.md).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from neuron_di.backends.cuda_kernels import DrawRules, choose, choose_greedy
from neuron_di.request import Request, uniform
from neuron_di.wire.sampling_rules import TEMPERATURE_MIN

_UNUSABLE = -1
_INT32_MAX = 2**31 - 1


def draw(logits_BV: Tensor, requests: Sequence[Request]) -> list[int | None]:
    """The next token of each row, None where the host must look. Waits for the device, once."""
    rows = [row for row, request in enumerate(requests) if _needs_a_draw_only(request)]
    if not rows:
        return [None] * len(requests)
    drawn = [requests[row] for row in rows]
    if len(rows) < len(requests):
        logits_BV = logits_BV[torch.tensor(rows, device=logits_BV.device)]
    if all(request.sampling.temperature < TEMPERATURE_MIN for request in drawn):
        token_B, is_usable_B = choose_greedy(logits_BV)
    else:
        token_B, is_usable_B = choose(logits_BV, _rules_of(drawn, logits_BV.device))
    chosen = torch.where(is_usable_B, token_B, _UNUSABLE).tolist()
    tokens: list[int | None] = [None] * len(requests)
    for row, token_id in zip(rows, chosen, strict=True):
        tokens[row] = None if token_id == _UNUSABLE else token_id
    return tokens


def warm_up(logits_BV: Tensor) -> None:
    """Have the kernels of a draw compiled."""
    rules = DrawRules.allocate(len(logits_BV), "cpu")
    rules.temperature_B.fill_(1.0)
    choose(logits_BV, rules.to(logits_BV.device))
    choose_greedy(logits_BV)


def _needs_a_draw_only(request: Request) -> bool:
    params = request.sampling
    return (
        request.rules is None
        and params.logprobs is None
        and params.repetition_penalty == 1.0
        and not params.presence_penalty
        and not params.frequency_penalty
        and len(request.generated) >= params.min_tokens
    )


def _rules_of(requests: Sequence[Request], device: torch.device) -> DrawRules:
    drawn = [_rule_of(request) for request in requests]
    temperature, top_k, top_p, log_min_p, number = zip(*drawn, strict=True)
    return DrawRules(
        temperature_B=torch.tensor(temperature, dtype=torch.float32),
        top_k_B=torch.tensor(top_k, dtype=torch.int32),
        top_p_B=torch.tensor(top_p, dtype=torch.float64),
        log_min_p_B=torch.tensor(log_min_p, dtype=torch.float32),
        uniform_B=torch.tensor(number, dtype=torch.float64),
    ).to(device)


def _rule_of(request: Request) -> tuple[float, int, float, float, float]:
    params = request.sampling
    if params.temperature < TEMPERATURE_MIN:
        return 0.0, 0, 1.0, -math.inf, 0.0
    return (
        params.temperature,
        min(max(0, params.top_k), _INT32_MAX),  # no vocabulary is larger
        params.top_p,
        math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        uniform(params.seed or 0, len(request.generated)),
    )
