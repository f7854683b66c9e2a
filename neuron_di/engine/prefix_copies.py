"""A chunk of a prefill, where KV of prompts is kept: copied, or computed and then kept."""

from typing import TYPE_CHECKING, Any

from neuron_di.backends import Backend
from neuron_di.core import PrefillChunk, PrefixCache

if TYPE_CHECKING:
    from torch import Tensor


def prefill(
    backend: Backend, prefixes: PrefixCache | None, chunk: PrefillChunk, **hooks: Any
) -> "Tensor | None":
    """As `Backend.prefill`, whose hooks these are."""
    if not chunk.reused:
        logits_V = backend.prefill(chunk, **hooks)
        if prefixes is not None:
            _keep(backend, prefixes, chunk)
        return logits_V
    size = backend.layout.block_size
    own = chunk.request.block_ids[chunk.start // size : chunk.end // size]
    backend.copy_blocks(chunk.reused, own)
    if (after_layer := hooks.get("after_layer")) is not None:
        for layer in range(backend.layout.num_layers):
            after_layer(layer, own)
    return None


def _keep(backend: Backend, prefixes: PrefixCache, chunk: PrefillChunk) -> None:
    sources, targets = prefixes.keep(chunk)
    if not targets:
        return
    try:
        backend.copy_blocks(sources, targets)
    except BaseException:
        prefixes.forget_piece(chunk)
        raise
