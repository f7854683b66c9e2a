"""Sampling in the graph, after logits: what a model compiled with on-device sampling returns."""

import torch
from torch import Tensor


def sample(logits_BV: Tensor, params_B3: Tensor, global_topk: int, *, is_greedy: bool) -> Tensor:
    """Token ids [B], int32. `params_B3` are rows of top_k, top_p, temperature.

    Greedy where top_k is 1, or everywhere when `is_greedy`.
    """
    return torch.stack(
        [
            logits_V.argmax() if is_greedy or top_k == 1 else _draw(logits_V, top_k, top_p, heat)
            for logits_V, (top_k, top_p, heat) in zip(
                logits_BV, _rows(params_B3, global_topk), strict=True
            )
        ]
    ).to(torch.int32)


def _rows(params_B3: Tensor, global_topk: int) -> list[tuple[int, float, float]]:
    rows: list[list[float]] = params_B3.tolist()
    return [(int(k) if k > 0 else global_topk, p, heat) for k, p, heat in rows]


def _draw(logits_V: Tensor, top_k: int, top_p: float, temperature: float) -> Tensor:
    best, ids = logits_V.topk(min(top_k, len(logits_V)))
    weights = (best / temperature).softmax(0)
    weights[weights.cumsum(0) - weights >= top_p] = 0.0
    return ids[torch.multinomial(weights, 1)[0]]
