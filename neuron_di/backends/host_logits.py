"""What those backends have in common that return from a step with its logits on the host."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from neuron_di.backends.backend import LayerHook
from neuron_di.core import DecodeBatch, PrefillChunk
from neuron_di.kv import KvLayout, KvPool
from neuron_di.request import Request
from neuron_di.types import BlockId


class HostLogits:
    """The methods of a Backend that ask nothing of its device, then. Its pool is the host's."""

    pool: KvPool

    def copy_blocks(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        self.pool.copy_blocks(sources, targets)

    def draw(self, logits_BV: Tensor, requests: Sequence[Request]) -> list[int | None]:  # noqa: ARG002
        return [None] * len(requests)

    def quiesce(self, block_ids: Sequence[BlockId]) -> None:
        """Nothing to wait for: a step has made all its writes when it returns."""


def decode_one_by_one(
    decode_one: Callable[[Request, int, int], Tensor], batch: DecodeBatch
) -> Tensor:
    """Each request alone, so that a row cannot depend on the others. Logits [B, V]."""
    return torch.stack(
        [decode_one(each, each.generated[-1], each.num_computed) for each in batch.requests]
    )


def tell_layers(after_layer: LayerHook, chunk: PrefillChunk, layout: KvLayout) -> None:
    """Of a chunk that was not computed layer by layer."""
    written = chunk.request.block_ids[
        chunk.start // layout.block_size : layout.num_blocks_for(chunk.end)
    ]
    for layer in range(layout.num_layers):
        after_layer(layer, written)
