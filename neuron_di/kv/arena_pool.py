"""A worker's KV pool as a share of an arena: blocks that other workers of this host map, too.

Next: neuron_di/kv/arena.py
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from neuron_di.clock import Deadline
from neuron_di.errors import LocalProtocolError, PeerGone, StaleIncarnation
from neuron_di.kv.arena import Arena, NoArena, is_settled
from neuron_di.kv.holds import SETTLE_S, Holds
from neuron_di.kv.layout import KvLayout
from neuron_di.kv.ownership import Exchange, Ownership
from neuron_di.kv.pool import KvPool, PeerPool
from neuron_di.kv.runs import BlockIds, Memory, as_ids
from neuron_di.obs import get_logger
from neuron_di.types import BlockId, Incarnation, WorkerId
from neuron_di.wire import ShmRegion
from neuron_di_bindings.block_runs import Words
from neuron_di_bindings.owner_words import GENERATION_MAX, generations_of, word

if TYPE_CHECKING:
    from torch import Tensor

_log = get_logger(__name__)


class PoolMaker:
    """Makes a worker's pools: in the arena that `arena_fd` is open on, while it has room.

    Borrows the descriptor, which must stay open.
    """

    def __init__(self, arena_fd: int, worker_id: WorkerId) -> None:
        self._arena_fd = arena_fd
        self._worker_id = worker_id

    def __call__(self, layout: KvLayout, num_blocks: int, incarnation: Incarnation) -> KvPool:
        """As KvPool.create."""
        try:
            return ArenaPool.join(self._arena_fd, self._worker_id, layout, num_blocks, incarnation)
        except NoArena as error:
            _log.warning("kv_arena_not_used", reason=str(error))
        return KvPool.create(layout, num_blocks, incarnation)

    def held_bytes(self, layout: KvLayout) -> int:
        """Memory in the arena that waits for this worker: of one of its name that was killed."""
        if not is_settled(self._arena_fd):
            return 0  # nobody has joined; asking must not settle whose blocks fit
        try:
            arena = Arena.open(self._arena_fd, layout, _machine_bytes())
        except NoArena:
            return 0
        try:
            return arena.bytes_left_to(self._worker_id)
        finally:
            arena.close()


class ArenaPool(KvPool):
    """Block ids, `tensor` and addresses are the arena's. `num_blocks` of its blocks are ours."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, incarnation: Incarnation, ownership: Ownership
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.incarnation = incarnation
        self.ownership = ownership
        self._arena: Arena | None = ownership.arena
        self._holds = Holds()

    @classmethod
    def join(
        cls,
        arena_fd: int,
        worker_id: WorkerId,
        layout: KvLayout,
        num_blocks: int,
        incarnation: Incarnation,
    ) -> "ArenaPool":
        """NoArena when the arena cannot hold this worker's pool. `arena_fd` stays the caller's."""
        arena = Arena.open(arena_fd, layout, _machine_bytes())
        try:
            ownership = Ownership.join(arena, worker_id, incarnation, num_blocks)
        except BaseException:
            arena.close()
            raise
        return cls(layout, len(ownership.ids()), incarnation, ownership)

    @property
    def arena(self) -> Arena:
        assert self._arena is not None, "the pool is closed"
        return self._arena

    @property
    def num_ids(self) -> int:
        return self.arena.blocks_max

    def block_ids(self) -> list[BlockId]:
        return self.ownership.ids()

    def exchanges(self) -> list[Exchange]:
        return self.ownership.take_exchanges()

    def generations(self, block_ids: BlockIds) -> list[int]:
        known = self.ownership.known(as_ids(block_ids))
        generations: list[int] = generations_of(known).tolist()
        return generations

    def retire(self, block_ids: Sequence[BlockId]) -> bool:
        return self.ownership.retire(as_ids(block_ids))

    def tensor(self, rank: int = 0) -> "Tensor":
        """As KvPool's, of the whole arena: only blocks that were granted may be touched."""
        import torch

        arena, dtype = self.arena, getattr(torch, self.layout.dtype)
        flat = torch.frombuffer(arena.view, dtype=dtype, offset=arena.data_offset)
        ranks = flat.view(arena.blocks_max, self.layout.num_ranks, *self.layout.rank_shape)
        return ranks[:, rank]

    def memory(self) -> Memory:
        return Memory(self.base_address, self.arena.blocks_max * self.layout.block_bytes)

    @property
    def base_address(self) -> int:
        return self.arena.address

    def view(self, block_id: BlockId) -> memoryview:
        start = self.arena.data_offset + block_id * self.layout.block_bytes
        return self.arena.view[start : start + self.layout.block_bytes]

    @contextmanager
    def hold(self) -> Iterator[None]:
        with self._holds.hold():
            if self._arena is None:
                raise LocalProtocolError("the KV pool is closed")
            yield

    def region(self) -> ShmRegion:
        """For those who have no share of the arena: they map it, and read."""
        return ShmRegion(
            pid=os.getpid(),
            fd=self.arena.fd,
            incarnation=self.incarnation,
            num_blocks=self.arena.blocks_max,
            is_arena=True,
        )

    def close(self) -> None:
        """Give up every block, and its memory. Safe to call twice.

        Who holds the pool is waited for. Where that takes too long, the blocks stay this process's
        until its end: others would find in them what is still written.
        """
        is_free = self.settle(Deadline.after(SETTLE_S))
        arena, self._arena = self._arena, None
        if arena is not None and is_free:
            self.ownership.leave()
            arena.close()
        elif arena is not None:
            _log.error("kv_pool_still_used", blocks=self.num_blocks)


class ArenaPeer(PeerPool):
    """Another worker's share of an arena, mapped read-only by one who has none."""

    def __init__(self, arena: Arena, slot: int, layout: KvLayout) -> None:
        self.layout = layout
        self._arena = arena
        self.words = Words(arena.raw_words, word(slot, 0), GENERATION_MAX)

    @classmethod
    def find(cls, region: ShmRegion, layout: KvLayout) -> "ArenaPeer":
        """PeerGone when it cannot be mapped, StaleIncarnation when it is another process's."""
        arena = Arena.open_peer(region.pid, region.fd)
        if not (slot := arena.slot_of(region.incarnation)):
            raise StaleIncarnation(f"process {region.pid} is not the worker that was announced")
        if (arena.layout_digest, arena.block_bytes) != (layout.digest(), layout.block_bytes):
            raise PeerGone(f"the KV pool of process {region.pid} has another layout")
        arena.map_blocks_of(slot, region.incarnation)
        return cls(arena, slot, layout)

    @property
    def num_blocks(self) -> int:  # type: ignore[override]
        return self._arena.num_granted

    @property
    def base_address(self) -> int:
        return self._arena.address


def open_peer_pool(region: ShmRegion, layout: KvLayout) -> PeerPool:
    """A peer's pool of this layout, wherever it lies. Raises what PeerPool.open does."""
    return ArenaPeer.find(region, layout) if region.is_arena else PeerPool.open(region, layout)


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
