"""The sampling parameters of a batch: a row of top_k, top_p, temperature for each sequence."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("Neuron")

Values = Tensor | Sequence[float] | float


def prepare_sampling_params(
    batch_size: int,
    top_k: Values = (1,),
    top_p: Values = (1.0,),
    temperature: Values = (1.0,),
) -> Tensor:
    """[batch_size, 3] float32. Each argument has one value for all, or one for each sequence."""
    columns = [_column(values) for values in (top_k, top_p, temperature)]
    lengths = {len(column) for column in columns}
    if len(lengths) != 1:
        raise AssertionError(f"sampling parameters of different lengths: {sorted(lengths)}")
    if lengths == {1}:
        columns = [column.broadcast_to(batch_size) for column in columns]
    return torch.stack(columns, dim=1)


def _column(values: Values) -> Tensor:
    if isinstance(values, Tensor):
        return values.to(torch.float32)
    listed = [values] if isinstance(values, int | float) else list(values)
    return torch.tensor(listed, dtype=torch.float32)


def validate_sampling_params(params: Tensor, on_device_sampling_config: Any) -> None:
    """ValueError for rows that the graph can't sample with."""
    if params.shape[1] != 3:
        raise ValueError(f"sampling parameters are (batch_size, 3), not {tuple(params.shape)}")
    most = on_device_sampling_config.global_topk
    top_k, top_p, temperature = params.to(torch.float32).unbind(1)
    is_uniform = (top_k == -1) | (top_k == 0)
    if not ((is_uniform | ((top_k > 0) & (top_k <= most))) & (top_k == top_k.floor())).all():
        raise ValueError(f"top_k is -1 or a whole number up to global_topk, {most}: {top_k}")
    if not ((top_p > 0) & (top_p <= 1)).all():
        raise ValueError(f"top_p is above 0 and at most 1: {top_p}")
    if not (temperature >= 0).all():
        raise ValueError(f"temperature is not below 0: {temperature}")
    if ((temperature == 0) & is_uniform).any():
        raise ValueError("temperature 0 is greedy and needs top_k 1")
    if is_uniform.any():
        logger.warning("top_k -1 and 0 pick any token of the vocabulary, all alike")


def infer_sampling_params(params: Tensor) -> Tensor:
    """`params` itself, with top_k and top_p set to 1 where the temperature is 0."""
    is_greedy = params[:, 2] == 0
    if is_greedy.any():
        params[is_greedy, :2] = 1
    return params
