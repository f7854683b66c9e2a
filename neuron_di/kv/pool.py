"""A worker's KV pool: one shared-memory segment that peers on the host may read.

    offset 0      header: magic, incarnation, number of blocks
    4096          generations[num_blocks], uint64: +1 each time a block is given up
    data_offset   kv_NLCKSD, one block after the other

A reader notes the generations of the blocks it was promised, copies, and compares: a block
that was given up meanwhile shows, whatever the reason. Owner and readers need no lock.

Workers that `neuron-di serve` started on one host may have their blocks in one arena instead:
neuron_di/kv/arena_pool.py
"""

import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from mmap import MADV_REMOVE, mmap
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from neuron_di.clock import Deadline
from neuron_di.errors import ConfigError, LocalProtocolError, PeerGone, StaleIncarnation
from neuron_di.kv.digest import KvIdentity, block_digests
from neuron_di.kv.holds import Holds
from neuron_di.kv.layout import KvLayout
from neuron_di.kv.runs import BlockIds, Memory, as_ids
from neuron_di.types import BlockId, Incarnation
from neuron_di.wire import ShmRegion
from neuron_di_bindings import run_copy, shared_memory
from neuron_di_bindings.block_runs import Words, join_blocks

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from torch import Tensor

_PAGE = 4096
_MAGIC = b"NDIKV001"
_HEADER = struct.Struct("<8s64sQ")  # magic, incarnation, num_blocks


GENERATIONS_OFFSET = _PAGE


def head_bytes(num_blocks: int) -> int:
    """Bytes of a segment before its block 0: header and generations."""
    return GENERATIONS_OFFSET + -(-num_blocks * 8 // _PAGE) * _PAGE


def check_header(head: "ReadableBuffer", incarnation: Incarnation, num_blocks: int) -> None:
    """A segment's first bytes: StaleIncarnation when another process's, PeerGone when no pool."""
    magic, owner, count = _HEADER.unpack_from(head, 0)
    if magic != _MAGIC or owner.rstrip(b"\0") != incarnation.encode():
        raise StaleIncarnation("the pool is not of the worker that was announced")
    if count != num_blocks:
        raise PeerGone(f"the pool has {count} blocks, not {num_blocks}")


def segment_bytes(layout: KvLayout, num_blocks: int) -> int:
    """Bytes of the whole segment: header, generations and blocks."""
    return head_bytes(num_blocks) + num_blocks * layout.block_bytes


class KvPool:
    """The memory of all blocks of one worker. Which block is whose, `core.BlockPool` says."""

    # Whether a layer's KV can be read in `memory` as soon as the backend says that it is computed.
    streams_layers = True
    # Digests of so many bytes take no longer than to wake another thread for them and to wait.
    digested_at_once_bytes = 1 << 20

    def __init__(
        self, layout: KvLayout, num_blocks: int, incarnation: Incarnation, fd: int, view: mmap
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.incarnation = incarnation
        self._fd = fd
        self._view: mmap | None = view
        _HEADER.pack_into(view, 0, _MAGIC, incarnation.encode(), num_blocks)
        self._generations: NDArray[np.uint64] = np.frombuffer(
            view, np.uint64, count=num_blocks, offset=GENERATIONS_OFFSET
        )
        # Stays after close(): whoever holds the pool goes on to use it.
        head = int(self._generations.ctypes.data) - GENERATIONS_OFFSET
        self._address = head + head_bytes(num_blocks)
        self._holds = Holds()

    @classmethod
    def create(cls, layout: KvLayout, num_blocks: int, incarnation: Incarnation) -> Self:
        """Allocate and touch the whole pool. ConfigError when the memory cannot be had."""
        size_bytes = segment_bytes(layout, num_blocks)
        try:
            fd, view = shared_memory.create_segment("neuron-di-kv", size_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"cannot allocate {size_bytes} bytes of shared memory for the KV pool: {error}"
            ) from None
        return cls(layout, num_blocks, incarnation, fd, view)

    def tensor(self, rank: int = 0) -> "Tensor":
        """One rank's part of the pool as kv_NLCKSD. Shares memory; valid until close()."""
        import torch

        assert self._view is not None, "the pool is closed"
        dtype: torch.dtype = getattr(torch, self.layout.dtype)
        flat = torch.frombuffer(self._view, dtype=dtype, offset=head_bytes(self.num_blocks))
        ranks = flat.view(self.num_blocks, self.layout.num_ranks, *self.layout.rank_shape)
        return ranks[:, rank]

    def memory(self) -> Memory:
        """All blocks. What transfers count their offsets from."""
        return Memory(self.base_address, self.num_blocks * self.layout.block_bytes)

    @property
    def base_address(self) -> int:
        """Address of block 0 in this process. LocalProtocolError where it is closed, and nobody
        holds it any more."""
        if self._view is None and not self._holds.count:
            raise LocalProtocolError("the KV pool is closed")
        return self._address

    def view(self, block_id: BlockId) -> memoryview:
        """The bytes of one block. Valid until close()."""
        assert self._view is not None, "the pool is closed"
        start = head_bytes(self.num_blocks) + block_id * self.layout.block_bytes
        return memoryview(self._view)[start : start + self.layout.block_bytes]

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Within this the blocks' addresses stay mapped, also after close(), and `settle` waits.

        LocalProtocolError where it is closed already: nothing may be read or written any more.
        """
        with self._holds.hold():
            view = self._view
            if view is None:
                raise LocalProtocolError("the KV pool is closed")
            with memoryview(view):
                yield

    def settle(self, deadline: Deadline) -> bool:
        """Before close(), where blocking is allowed: nobody holds the pool from now on. Whether all
        who did have let go by the deadline."""
        return self._holds.end(deadline)

    @property
    def num_ids(self) -> int:
        """Every block's id is below this. In an arena many of them are others' blocks."""
        return self.num_blocks

    def block_ids(self) -> list[BlockId]:
        """The blocks that are this worker's, in order."""
        return [BlockId(block_id) for block_id in range(self.num_blocks)]

    def exchanges(self) -> list[tuple[BlockId, BlockId]]:
        """Blocks that are another worker's now, each with the one that came for it.

        Those since the last call, in order. Whoever keeps books of the blocks follows them.
        """
        return []

    def generations(self, block_ids: BlockIds) -> list[int]:
        """The current generation of each block, to be promised to a reader."""
        generations: list[int] = self._generations[as_ids(block_ids)].tolist()
        return generations

    def digests(
        self,
        block_ids: Sequence[int],
        identity: KvIdentity,
        num_tokens: int,
        *,
        first_place: int = 0,
    ) -> list[int]:
        """One number per block, of the KV in it: see `block_digests`.

        Whoever may be closing the pool meanwhile holds it.
        """
        return block_digests(
            self.memory(), block_ids, identity, self.layout, num_tokens, first_place=first_place
        )

    def copy_blocks(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        """Copy whole blocks, as many of either and none of both, within `memory`."""
        block_bytes = self.layout.block_bytes
        source_offsets, destination_offsets, lengths = join_blocks(
            as_ids(sources), as_ids(targets), block_bytes
        )
        run_copy.copy_runs(
            destination_address=self.base_address,
            source_address=self.base_address,
            destination_offsets=destination_offsets,
            source_offsets=source_offsets,
            lengths=lengths,
        )

    def begin_fill(self, block_ids: Sequence[BlockId], *, num_kept: int = 0) -> None:
        """A transfer into these blocks begins. What they hold now is nobody's, but for the KV of
        their first `num_kept` tokens, which is in `memory` from now on. With such tokens it may
        block. WorkerFailed where it cannot be done."""

    def end_fill(self, block_ids: Sequence[BlockId], num_tokens: int) -> None:
        """They hold what was promised, so many tokens. On the transfer's thread, so that no step
        waits for what is left to do. May block. WorkerFailed where it cannot be done."""

    def retire(self, block_ids: Sequence[BlockId]) -> bool:
        """Mark a request's blocks as given up, named in the order in which they were promised.

        Call it before anything may write to them again. True: not yet, for some of them are another
        worker's; follow `exchanges` and call it for what came in their place.
        """
        if self._view is not None:  # else all of them are
            self._generations[as_ids(block_ids)] += 1
        return False

    def region(self) -> ShmRegion:
        """How a process of this host reaches the pool."""
        return ShmRegion(
            pid=os.getpid(),
            fd=self._fd,
            incarnation=self.incarnation,
            num_blocks=self.num_blocks,
        )

    def close(self) -> None:
        """Give the memory and the descriptor back. Safe to call twice.

        Whoever still has the pool mapped, here or in another process, keeps none of its memory:
        it finds that every block was given up, and zeros.
        """
        view, self._view = self._view, None
        if view is None:
            return
        self._generations += 1
        self._generations = np.zeros(0, np.uint64)  # the old ones would keep the map
        start = head_bytes(self.num_blocks)
        with contextlib.suppress(OSError):  # then the memory goes with the last map
            view.madvise(MADV_REMOVE, start, len(view) - start)
        os.close(self._fd)


class PeerPool:
    """Another worker's pool, mapped read-only.

    `words` has each block's word: that it is the peer's, and of which generation.
    """

    def __init__(self, view: mmap, num_blocks: int, layout: KvLayout) -> None:
        self._view = view  # keeps the mapping alive
        self.num_blocks = num_blocks
        self.layout = layout
        self._generations: NDArray[np.uint64] = np.frombuffer(
            view, np.uint64, count=num_blocks, offset=GENERATIONS_OFFSET
        )
        self.words = Words(self._generations)

    @classmethod
    def open(cls, region: ShmRegion, layout: KvLayout) -> Self:
        """Map a peer's pool, which has this layout.

        PeerGone when it cannot be mapped, StaleIncarnation when it is another process's.
        """
        size_bytes = segment_bytes(layout, region.num_blocks)
        try:
            view = shared_memory.open_peer_segment(region.pid, region.fd, size_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise PeerGone(f"cannot map the KV pool of process {region.pid}: {error}") from None
        check_header(view, region.incarnation, region.num_blocks)
        return cls(view, region.num_blocks, layout)

    @property
    def base_address(self) -> int:
        """Address of the peer's block 0 in this process."""
        return int(self._generations.ctypes.data) - GENERATIONS_OFFSET + head_bytes(self.num_blocks)
