"""Which blocks the next transfer moves: random ones, of those that each end owns."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Choice:
    """Blocks of the serving end's, and as many of the measuring end's, for one transfer."""

    source_ids: list[int]
    block_ids: list[int]
    source_indices: _Indices
    block_indices: _Indices

    @classmethod
    def of(cls, source_ids: list[int], block_ids: list[int]) -> "Choice":
        """These very blocks, which will not be exchanged."""
        nowhere = np.zeros(0, np.int64)
        return cls(source_ids, block_ids, nowhere, nowhere)


class Places:
    """The blocks of both ends, in two lists of one length."""

    def __init__(self, source_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        count = min(len(source_ids), len(block_ids))
        self._sources: NDArray[np.int64] = np.asarray(source_ids[:count], np.int64)
        self._blocks: NDArray[np.int64] = np.asarray(block_ids[:count], np.int64)
        self._order: _Indices = np.arange(count)
        self._random = np.random.default_rng()
        self._exchanged: Choice | None = None  # away from home

    def choose(self, count: int, *, is_contiguous: bool = False) -> Choice:
        """Blocks in random order, or side by side at either end from a random place on."""
        assert count <= len(self._order), "more blocks than there are"
        if not is_contiguous:
            self._random.shuffle(self._order)
            chosen = self._order[:count].copy()
            return self._choice(chosen, chosen)
        assert self._exchanged is None, "blocks that changed their owner do not lie side by side"
        first, second = self._random.integers(0, len(self._order) - count + 1, 2)
        return self._choice(np.arange(first, first + count), np.arange(second, second + count))

    def choose_to_exchange(self, count: int) -> Choice:
        """Of two exchanges of as many blocks, the second takes back what the first one gave."""
        before = self._exchanged
        if before is None or len(before.source_ids) != count:
            return self.choose(count)
        return self._choice(before.source_indices, before.block_indices)

    def exchange(self, choice: Choice) -> None:
        """These blocks changed their owners."""
        self._sources[choice.source_indices] = choice.block_ids
        self._blocks[choice.block_indices] = choice.source_ids
        self._exchanged = choice if self._exchanged is None else None

    def _choice(self, source_indices: _Indices, block_indices: _Indices) -> Choice:
        return Choice(
            self._sources[source_indices].tolist(),
            self._blocks[block_indices].tolist(),
            source_indices,
            block_indices,
        )
