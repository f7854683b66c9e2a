"""Which blocks of a worker's KV pool are free. The memory itself belongs to the backend."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from neuron_di.core.require import require
from neuron_di.errors import CapacityError, LocalProtocolError
from neuron_di.types import BlockId

FREE = 1
TAKEN = 0
FREE_RUN = re.compile(rb"\x01+")  # a run of FREE bytes; finds all runs of 100,000 blocks in C


class BlockPool:
    """Hands out blocks by number, in as few contiguous runs as it can.

    Neighbouring blocks are moved by one copy and read by prefill without a gather.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._states = bytearray([FREE]) * num_blocks  # one byte per block

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Take blocks; the caller owns them until it frees them. CapacityError: takes none.

        A run that just holds the rest is preferred, so that long runs stay whole. Where none
        holds it, the longest run goes first: no choice needs fewer runs.
        """
        if num_blocks > self.num_free:
            raise CapacityError(f"{num_blocks} KV blocks are needed, {self.num_free} are free")
        runs = [range(*match.span()) for match in FREE_RUN.finditer(self._states)]
        runs.sort(key=len)
        taken: list[BlockId] = []
        while num_missing := num_blocks - len(taken):
            index = bisect_left(runs, num_missing, key=len)
            run = runs.pop(min(index, len(runs) - 1))[:num_missing]
            self._states[run.start : run.stop] = bytes([TAKEN]) * len(run)
            taken.extend(map(BlockId, run))
        self.num_free -= num_blocks
        return taken

    def free(self, block_ids: Sequence[BlockId]) -> None:
        """Give blocks back. LocalProtocolError unless all of them are taken, each named once."""
        require(len(set(block_ids)) == len(block_ids), "a block is freed twice at once")
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks or self._states[block_id] == FREE:
                raise LocalProtocolError(f"block {block_id} is free already, or not of this pool")
        for block_id in block_ids:
            self._states[block_id] = FREE
        self.num_free += len(block_ids)

    def check_integrity(self, owned: Iterable[Sequence[BlockId]]) -> None:
        """Raise LocalProtocolError unless free and owned blocks are every block exactly once."""
        require(self.num_free == self._states.count(FREE), "num_free is not the free blocks")
        accounted = bytearray(self._states)
        for block_ids in owned:
            for block_id in block_ids:
                if not 0 <= block_id < self.num_blocks or accounted[block_id]:
                    raise LocalProtocolError(f"block {block_id} is free, owned twice or foreign")
                accounted[block_id] = 1
        require(all(accounted), f"{accounted.count(0)} blocks are neither free nor owned")
