"""A model's step out of the kernels alone: the order in which a backend calls them."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from kernel_kit import DEVICE, int32
from torch import Tensor

from neuron_di.backends.cuda_kernels import (
    INVARIANT_SPLITS,
    add_and_norm_,
    attend_decode,
    attend_prefill,
    invariant_linear,
    rms_norm,
    silu_and_multiply,
    write_kv_,
)
from neuron_di.models import ModelSpec, ModelWeights

# Layer, queries -> attended, both [T, H, D].
Attend = Callable[[int, Tensor], Tensor]


def on_device(weights: Any) -> Any:
    """A dataclass of weights, or of tuples of such, on the device."""
    moved: dict[str, Any] = {}
    for field in fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, Tensor):
            moved[field.name] = value.to(DEVICE)
        elif isinstance(value, tuple):
            moved[field.name] = tuple(map(on_device, value))
    return replace(weights, **moved)


class ComposedModel:
    """Float32, in the batch-invariant mode. Owns its pool, all of it NaN at first."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, num_blocks: int, block_size: int
    ) -> None:
        self._spec = spec
        self._weights: ModelWeights = on_device(weights)
        shape = spec.kv_layout(block_size=block_size, dtype="float32").rank_shape
        self.pool = torch.full((num_blocks, *shape), torch.nan, device=DEVICE)
        tables = spec.rope.angle_tables(spec.head_dim, num_blocks * block_size)
        self._cos_PR, self._sin_PR = (table.to(DEVICE) for table in tables)

    def prefill(self, token_ids: list[int], start: int, table_N: Tensor) -> Tensor:
        """Logits [T, V] of one request's chunk."""
        num_rows = len(token_ids)

        def attend(layer: int, query_THD: Tensor) -> Tensor:
            return attend_prefill(
                query_THD,
                self.pool,
                layer,
                table_N[None],
                int32([0, num_rows]),
                int32([start + num_rows]),
                rows_max=num_rows,
                window=self._spec.sliding_window,
            )

        positions = int32(list(range(start, start + num_rows)))
        return self._run(token_ids, positions, table_N.expand(num_rows, -1), attend)

    def decode(self, token_ids: list[int], positions: list[int], table_BN: Tensor) -> Tensor:
        """Logits [B, V] of one position of each row. A position of -1 only fills a bucket."""
        position_B = int32(positions)

        def attend(layer: int, query_BHD: Tensor) -> Tensor:
            return attend_decode(
                query_BHD,
                self.pool,
                layer,
                table_BN,
                position_B + 1,
                num_splits=INVARIANT_SPLITS,
                window=self._spec.sliding_window,
            )

        return self._run(token_ids, position_B, table_BN, attend)

    def _run(
        self, token_ids: list[int], position_T: Tensor, table_TN: Tensor, attend: Attend
    ) -> Tensor:
        weights, spec = self._weights, self._spec
        hidden_TE = F.embedding(torch.tensor(token_ids, device=DEVICE), weights.embedding)
        normed_TE = rms_norm(hidden_TE, weights.layers[0].input_norm, spec.rms_eps)
        next_norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.final_norm]
        for number, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            qkv_TX = invariant_linear(normed_TE, layer.qkv, layer.qkv_bias)
            query_THD = write_kv_(
                qkv_TX.view(len(qkv_TX), -1, spec.head_dim),
                self.pool,
                number,
                table_TN,
                position_T,
                self._cos_PR,
                self._sin_PR,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                rms_eps=spec.rms_eps,
            )
            attended_TX = attend(number, query_THD).flatten(1)
            product_TE = invariant_linear(attended_TX, layer.out, layer.out_bias)
            normed_TE = add_and_norm_(hidden_TE, product_TE, layer.post_norm, spec.rms_eps)
            gate_up_TI = invariant_linear(normed_TE, layer.gate_up, layer.gate_up_bias)
            product_TE = invariant_linear(
                silu_and_multiply(gate_up_TI), layer.down, layer.down_bias
            )
            normed_TE = add_and_norm_(hidden_TE, product_TE, next_norm, spec.rms_eps)
        return invariant_linear(normed_TE, weights.lm_head)
