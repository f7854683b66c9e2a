"""A model with each KV head as often as the ranks hold it.

Where there are more ranks than KV heads, several ranks hold the same head, each for its own
queries. The stand-in computes with all these replicas, so that one which differs from the others
shows in the tokens, as it would on devices.
"""

from dataclasses import replace

import torch
from torch import Tensor

from neuron_di.kv.kv_map import KvMap
from neuron_di.models import LayerWeights, ModelSpec, ModelWeights


def kv_map_of(spec: ModelSpec, num_ranks: int) -> KvMap:
    """Which rank holds which heads. ValueError where real ranks would have padding heads."""
    if spec.num_heads % num_ranks:
        raise ValueError(
            f"{spec.num_heads} heads on {num_ranks} ranks: the stand-in has no padding heads"
        )
    return KvMap.of_tensor_parallel(num_ranks, spec.num_kv_heads, spec.num_heads)


def replicated_spec(spec: ModelSpec, kv_map: KvMap) -> ModelSpec:
    """The same model with all the replicas as KV heads, in the order of the ranks."""
    return replace(spec, num_kv_heads=sum(map(len, kv_map.heads)))


def replicated_weights(weights: ModelWeights, spec: ModelSpec, kv_map: KvMap) -> ModelWeights:
    """`weights` of `spec` for `replicated_spec`. Other weights than K's and V's are shared."""
    heads = [head for row in kv_map.heads for head in row]
    if heads == list(range(spec.num_kv_heads)):
        return weights
    rows = torch.arange(spec.num_qkv).view(-1, spec.head_dim)
    queries, keys, values = rows.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads])
    chosen = torch.cat([queries, keys[heads], values[heads]]).flatten()

    def of_layer(layer: LayerWeights) -> LayerWeights:
        bias: Tensor | None = None if layer.qkv_bias is None else layer.qkv_bias[chosen]
        return replace(layer, qkv=layer.qkv[chosen], qkv_bias=bias)

    return replace(weights, layers=tuple(map(of_layer, weights.layers)))
