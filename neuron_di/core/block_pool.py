"""Which blocks of a worker's KV pool are free. The memory itself belongs to the backend."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Self

from neuron_di.core.require import require
from neuron_di.errors import CapacityError, LocalProtocolError
from neuron_di.types import BlockId

# One byte per block id. Where blocks change owner, ids are of all workers' blocks together.
TAKEN = 0
FREE = 1
FOREIGN = 2  # another worker's
KEPT = 3  # free, and holds something that may be of use until somebody needs the block
# A run of FREE bytes. Found in C, and by a literal first byte: `\x01+` takes 50 times as long.
FREE_RUN = re.compile(rb"\x01\x01*")

# A block that is another worker's now, and the one that came for it.
Exchange = tuple[BlockId, BlockId]


class BlockPool:
    """Hands out blocks by number, in as few contiguous runs as it can.

    Neighbouring blocks are moved by one copy and read by prefill without a gather.
    """

    def __init__(self, num_blocks: int) -> None:
        """A pool of the blocks 0 to `num_blocks`."""
        self.num_blocks = num_blocks
        self.num_free = num_blocks  # those that are kept included
        self.num_kept = 0
        # Asked for so many more blocks: lets go of at least as many kept ones, by `let_go`.
        self.forget: Callable[[int], None] = lambda _: None
        self._states = bytearray([FREE]) * num_blocks
        self._exchanges: Callable[[], list[Exchange]] = list

    @classmethod
    def of(
        cls, block_ids: Sequence[BlockId], exchanges: Callable[[], list[Exchange]] = list
    ) -> Self:
        """A pool of these blocks. `exchanges` says which have changed hands since it was asked."""
        pool = cls(max(block_ids, default=-1) + 1)
        pool._states = bytearray([FOREIGN]) * pool.num_blocks
        for block_id in block_ids:
            pool._states[block_id] = FREE
        pool.num_blocks = pool.num_free = pool._states.count(FREE)
        pool._exchanges = exchanges
        return pool

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Take blocks; the caller owns them until it frees them. CapacityError: takes none.

        A run that just holds the rest is preferred, so that long runs stay whole. Where none
        holds it, the longest run goes first: no choice needs fewer runs.
        """
        if num_blocks > self.num_free:
            raise CapacityError(f"{num_blocks} KV blocks are needed, {self.num_free} are free")
        if num_blocks > self.num_unused:
            self.forget(num_blocks - self.num_unused)
            require(num_blocks <= self.num_unused, "too few kept blocks were let go")
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
        self._require_all(block_ids, TAKEN, "is free already, or not of this pool")
        self._mark(block_ids, FREE)
        self.num_free += len(block_ids)

    @property
    def num_unused(self) -> int:
        """Free blocks that hold nothing."""
        return self.num_free - self.num_kept

    def keep(self, block_ids: Sequence[BlockId]) -> None:
        """Give blocks back that hold something: they stay as they are until they are needed."""
        self.free(block_ids)
        self._mark(block_ids, KEPT)
        self.num_kept += len(block_ids)

    def let_go(self, block_ids: Sequence[BlockId]) -> None:
        """What these blocks hold is of no use any more. LocalProtocolError unless all of them are
        kept, each named once."""
        self._require_all(block_ids, KEPT, "is not kept")
        self._mark(block_ids, FREE)
        self.num_kept -= len(block_ids)

    def _require_all(self, block_ids: Sequence[BlockId], state: int, fault: str) -> None:
        require(len(set(block_ids)) == len(block_ids), "a block is given back twice at once")
        states, end = self._states, len(self._states)  # of thousands, while all streams wait
        for block_id in block_ids:
            if not (0 <= block_id < end and states[block_id] == state):
                raise LocalProtocolError(f"block {block_id} {fault}")

    def _mark(self, block_ids: Sequence[BlockId], state: int) -> None:
        states = self._states
        for block_id in block_ids:
            states[block_id] = state

    def follow_exchanges(self, owned: Iterable[list[BlockId]]) -> None:
        """Put what came for a block in its place, here and in the lists of whoever owns blocks.

        Blocks that changed hands are taken, and stay so. LocalProtocolError where they are not.
        """
        exchanges = self._exchanges()
        if not exchanges:
            return
        going = {went for went, _ in exchanges}
        places = {
            block_id: (block_ids, index)
            for block_ids in owned
            if not going.isdisjoint(block_ids)  # most lists: they may be long, and a step waits
            for index, block_id in enumerate(block_ids)
            if block_id in going
        }
        states = self._states
        states += bytes([FOREIGN]) * (max(came for _, came in exchanges) + 1 - len(states))
        for went, came in exchanges:
            if went not in places:
                raise LocalProtocolError(f"block {went} went, and nobody here had it")
            if states[came] != FOREIGN:
                raise LocalProtocolError(f"block {came} came, and was here already")
            block_ids, index = places[came] = places.pop(went)
            block_ids[index] = came
            states[went], states[came] = FOREIGN, TAKEN

    def check_integrity(
        self, owned: Iterable[Sequence[BlockId]], kept: Iterable[Sequence[BlockId]] = ()
    ) -> None:
        """Raise LocalProtocolError unless unused, kept and owned blocks are every block once."""
        accounted = bytearray(self._states)
        require(self.num_unused == accounted.count(FREE), "num_free is not the free blocks")
        require(self.num_kept == accounted.count(KEPT), "num_kept is not the kept blocks")
        for state, listed in ((TAKEN, owned), (KEPT, kept)):
            for block_id in (each for block_ids in listed for each in block_ids):
                if not (0 <= block_id < len(accounted) and accounted[block_id] == state):
                    raise LocalProtocolError(f"block {block_id} is free, owned twice or foreign")
                accounted[block_id] = FREE
        num_lost = accounted.count(TAKEN) + accounted.count(KEPT)
        require(not num_lost, f"{num_lost} blocks are neither free nor owned")
        num_here = len(accounted) - accounted.count(FOREIGN)
        require(num_here == self.num_blocks, f"{num_here} blocks of {self.num_blocks} are here")
