"""A model's weights in the form the engine multiplies with, and where each stored tensor goes.

Projections that read the same input are fused: one matrix product instead of two or three.
All matrices are row-major [out, in], contiguous.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from neuron_di.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One transformer layer. A bias or norm that the family lacks is None."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [num_qkv, hidden]: queries, keys, values
    qkv_bias: Tensor | None  # [num_qkv]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    out: Tensor  # [hidden, num_heads * head_dim]
    out_bias: Tensor | None  # [hidden]
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]: gate, up
    gate_up_bias: Tensor | None  # [2 * intermediate]
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None  # [hidden]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """All weights, in one dtype. Owns the memory. `lm_head` is `embedding` when they are tied."""

    embedding: Tensor  # [num_vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Tensor  # [num_vocab, hidden]

    @classmethod
    def allocate(
        cls, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> "ModelWeights":
        """Weights with arbitrary content, to be filled through `stored_tensors`."""

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def layer() -> LayerWeights:
            has_norm, has_mlp_bias = spec.has_qk_norm, spec.has_mlp_bias
            return LayerWeights(
                input_norm=empty(spec.hidden),
                qkv=empty(spec.num_qkv, spec.hidden),
                qkv_bias=empty(spec.num_qkv) if spec.has_qkv_bias else None,
                q_norm=empty(spec.head_dim) if has_norm else None,
                k_norm=empty(spec.head_dim) if has_norm else None,
                out=empty(spec.hidden, spec.num_heads * spec.head_dim),
                out_bias=empty(spec.hidden) if spec.has_out_bias else None,
                post_norm=empty(spec.hidden),
                gate_up=empty(2 * spec.intermediate, spec.hidden),
                gate_up_bias=empty(2 * spec.intermediate) if has_mlp_bias else None,
                down=empty(spec.hidden, spec.intermediate),
                down_bias=empty(spec.hidden) if has_mlp_bias else None,
            )

        embedding = empty(spec.num_vocab, spec.hidden)
        return cls(
            embedding=embedding,
            layers=tuple(layer() for _ in range(spec.num_layers)),
            final_norm=empty(spec.hidden),
            lm_head=embedding if spec.has_tied_embeddings else empty(spec.num_vocab, spec.hidden),
        )

    def stored_tensors(self, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of a Hugging Face checkpoint, by name, with the memory it belongs in."""
        yield "model.embed_tokens.weight", self.embedding
        yield "model.norm.weight", self.final_norm
        if not spec.has_tied_embeddings:
            yield "lm_head.weight", self.lm_head
        for number, layer in enumerate(self.layers):
            for name, tensor in _stored_layer_tensors(layer, spec):
                yield f"model.layers.{number}.{name}", tensor


def _stored_layer_tensors(layer: LayerWeights, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    fused = [
        (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (query, key, key)),
        (("mlp.gate_proj", "mlp.up_proj"), (spec.intermediate, spec.intermediate)),
        (("self_attn.o_proj",), (spec.hidden,)),
        (("mlp.down_proj",), (spec.hidden,)),
    ]
    matrices = (layer.qkv, layer.gate_up, layer.out, layer.down)
    biases = (layer.qkv_bias, layer.gate_up_bias, layer.out_bias, layer.down_bias)
    for (names, rows), matrix, bias in zip(fused, matrices, biases, strict=True):
        for name, part in zip(names, torch.split(matrix, list(rows)), strict=True):
            yield f"{name}.weight", part
        if bias is not None:
            for name, part in zip(names, torch.split(bias, list(rows)), strict=True):
                yield f"{name}.bias", part
    yield "input_layernorm.weight", layer.input_norm
    yield "post_attention_layernorm.weight", layer.post_norm
    if layer.q_norm is not None and layer.k_norm is not None:
        yield "self_attn.q_norm.weight", layer.q_norm
        yield "self_attn.k_norm.weight", layer.k_norm
