"""Blocks whose request is gone while a transfer may still touch them. Nobody gets them."""

from collections.abc import Iterator

from neuron_di.core.block_pool import BlockPool
from neuron_di.core.completion import CompletionToken
from neuron_di.types import BlockId


class Quarantine:
    """Owns blocks until their transfer is done, then gives them back to the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: list[tuple[CompletionToken, list[BlockId]]] = []

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.owned()))

    def is_empty(self) -> bool:
        return not self._held

    def owned(self) -> Iterator[list[BlockId]]:
        return (block_ids for _, block_ids in self._held)

    def give_back(self, block_ids: list[BlockId], held_by: CompletionToken | None) -> None:
        """Free blocks at once, or as soon as `held_by` is done."""
        if held_by is None or not block_ids or held_by.is_done():
            self._pool.free(block_ids)
        else:
            self._held.append((held_by, block_ids))

    def poll(self) -> None:
        """Free the blocks whose transfer is done."""
        still_held = []
        for token, block_ids in self._held:
            if token.is_done():
                self._pool.free(block_ids)
            else:
                still_held.append((token, block_ids))
        self._held = still_held
