"""A worker's KV pool as the processes of its other tensor-parallel ranks have it: mapped, writable.

Each writes to its own part of a block only, and to blocks that it is told.
"""

import os
from dataclasses import dataclass
from mmap import MAP_SHARED, PROT_READ, PROT_WRITE, mmap
from typing import TYPE_CHECKING, Any

from neuron_di.errors import LocalProtocolError
from neuron_di.kv.arena_pool import ArenaPool
from neuron_di.kv.layout import KvLayout
from neuron_di.kv.pool import KvPool, head_bytes
from neuron_di_bindings import owner_words

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """Where the blocks lie in a pool's file."""

    num_ids: int
    data_offset: int

    def end(self, layout: KvLayout) -> int:
        return self.data_offset + self.num_ids * layout.block_bytes


def place_of(pool: KvPool) -> PoolPlace:
    """Where a worker's other ranks find its blocks."""
    if isinstance(pool, ArenaPool):
        return PoolPlace(pool.num_ids, pool.arena.data_offset)
    return PoolPlace(pool.num_ids, head_bytes(pool.num_blocks))


def reopen(pool: KvPool) -> int:
    """A descriptor of the pool's file, the caller's own, to be given to another process.

    Of the same open file: while any rank may still write to the worker's blocks in an arena, the
    lock on their slot is held, and nobody takes them over.
    """
    return os.dup(pool.region().fd)


def open_rank_pool(fd: int, layout: KvLayout, place: PoolPlace, rank: int) -> "Tensor":
    """One rank's part of the pool that `fd` is open on, as kv_NLCKSD. `fd` stays the caller's.

    It stays mapped for as long as a tensor shows it. OSError when it cannot be.
    """
    import torch

    size_bytes = place.end(layout)
    memory: Any
    if os.fstat(fd).st_size >= size_bytes:
        memory = mmap(fd, size_bytes, MAP_SHARED, PROT_READ | PROT_WRITE)
    elif owner_words.is_available():  # an arena, which grows
        memory = owner_words.open_map(fd, size_bytes, is_writable=True)
    else:
        raise LocalProtocolError("a rank was given a KV pool that is smaller than its blocks")
    dtype: torch.dtype = getattr(torch, layout.dtype)
    count = place.num_ids * layout.block_bytes // dtype.itemsize
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=place.data_offset)
    return flat.view(place.num_ids, layout.num_ranks, *layout.rank_shape)[:, rank]
