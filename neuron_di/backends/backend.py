"""What a device must be able to do. The CPU backend is the one every other is compared with.

One backend serves one model on one device. Every method is called by the engine's thread.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from neuron_di.core import DecodeBatch, PrefillChunk
from neuron_di.errors import BackendLost
from neuron_di.kv import KvLayout, KvPool
from neuron_di.request import Request
from neuron_di.types import BlockId, Incarnation

if TYPE_CHECKING:
    from torch import Tensor

    from neuron_di.models import ReadLogits

# Called once with the reason for which nothing can be computed any more.
OnLost = Callable[[BackendLost], None]

# Called after a layer's KV of the current chunk is in the pool: layer index, blocks written.
LayerHook = Callable[[int, Sequence[BlockId]], None]


class Backend(Protocol):
    """Owns the weights and the KV pool's memory; blocks are owned by requests."""

    layout: KvLayout
    pool: KvPool
    num_vocab: int
    # What its rounding depends on: workers that say the same continue each other's requests bit
    # for bit. None: no two runs need be equal.
    numerics: str | None

    def prefill(
        self,
        chunk: PrefillChunk,
        after_layer: LayerHook | None = None,
        read_logits: "ReadLogits | None" = None,
    ) -> "Tensor | None":
        """Write the chunk's KV into its request's blocks.

        `read_logits` gets the logits of every position of the chunk, a few rows at a time and in
        order; they are the caller's for the time of the call. Never asked for in a replay.

        Returns the last position's logits [V], float32, when the chunk is the request's last. A
        replay gives the KV and the logits that `decode` gave for the same positions, on CPU bit
        for bit.
        """
        ...

    def decode(self, batch: DecodeBatch) -> "Tensor":
        """Feed each request's newest token, write its KV, and return logits [B, V], float32.

        They may be on the device, and hold until the next step.

        A row depends on its own request only, not on who shares the batch.
        """
        ...

    def draw(self, logits_BV: "Tensor", requests: Sequence[Request]) -> list[int | None]:
        """The next token of each row, where the device that has the logits chooses it.

        None where it does not: for rules, penalties or logprobs, for logits that are of no use, or
        because it never does. Such a row is sampled on the host. What is chosen is what the host
        would choose, up to the rounding of sums.
        """
        ...

    def copy_blocks(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        """Copy whole blocks within the pool, as many of either and none of both, in order with the
        steps: what was computed before is copied, and what is computed next reads the copies."""
        ...

    def quiesce(self, block_ids: Sequence[BlockId]) -> None:
        """Return once no device write to these blocks is in flight: they may be read or freed."""
        ...

    def watch(self, on_lost: OnLost) -> None:
        """Call back, on any thread, should what this computes on be lost; at once if it is.

        Then every step raises BackendLost. Whoever asked last is called.
        """
        ...

    def close_pool(self) -> None:
        """Give the pool back and keep the weights: only `open_pool` or `close` may follow."""
        ...

    def open_pool(self, num_blocks: int, incarnation: Incarnation) -> None:
        """Allocate another pool after `close_pool`, of this size and for this incarnation.

        Raises ConfigError where the memory cannot be had; then it may be called again.
        """
        ...

    def close(self) -> None:
        """Free the weights and the pool. Further calls are a bug."""
        ...
