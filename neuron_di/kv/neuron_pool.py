"""A Neuron worker's KV pool: the device's slots, and a mirror of them in the host's memory.

    device    a tensor per rank, layer and K or V, as the model compiled it
    mirror    an ordinary KvPool: block i is slot i, canonical, each head once

A request has one slot, and so one block, as long as the longest request. What computes reads and
writes the device. Engines that move the host's bytes, digests and resharding work on the mirror,
unchanged, and `to_host` and `to_device` bring one to the other. Pages of the mirror that no request
used take no memory. Those that were used stay, and a digest is enough to use one, so in time it may
be all of them: a worker's memory plan counts the whole mirror.

So far this has run on a simulator of libnrt only.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Self

from neuron_di.clock import Deadline
from neuron_di.errors import (
    BackendLost,
    ConfigError,
    LocalProtocolError,
    NeuronDiError,
    WorkerFailed,
)
from neuron_di.kv.digest import KvIdentity
from neuron_di.kv.holds import SETTLE_S
from neuron_di.kv.layout import KvLayout
from neuron_di.kv.loss import Loss
from neuron_di.kv.neuron_copies import DeviceKv, NeuronCopies
from neuron_di.kv.pool import KvPool, segment_bytes
from neuron_di.types import BlockId, Incarnation
from neuron_di_bindings import shared_memory
from neuron_di_bindings.nrt import NrtError, NrtMisuse, NrtWorkerError


class NeuronPool(Loss, KvPool):
    """As KvPool: `memory` is the mirror. A block is *on the device* when its slot there has the
    request's KV; the mirror then has what `to_host` brought last, or nothing.

    Thread-safe, for different blocks at once.
    """

    digested_at_once_bytes = 0  # the device is asked for them, and may let wait

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        incarnation: Incarnation,
        fd: int,
        view: mmap.mmap,
        *,
        device: DeviceKv,
    ) -> None:
        super().__init__(layout, num_blocks, incarnation, fd, view)
        self.device = device
        self._copies = NeuronCopies(layout, num_blocks, device)
        self._lock = threading.Lock()
        self._copying_locks = [threading.Lock() for _ in range(num_blocks)]
        self._on_device: set[BlockId] = set()
        self._num_in_mirror: dict[BlockId, int] = {}  # tokens, of blocks that are on the device

    @classmethod
    def create(  # type: ignore[override]  # nobody makes one without a device
        cls, layout: KvLayout, num_blocks: int, incarnation: Incarnation, device: DeviceKv
    ) -> Self:
        """Reserve the mirror, untouched. ConfigError when it cannot be had or does not fit."""
        size_bytes = segment_bytes(layout, num_blocks)
        try:
            fd, view = shared_memory.create_segment("neuron-di-kv", size_bytes, is_touched=False)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"cannot reserve {size_bytes} bytes of shared memory for the KV pool: {error}"
            ) from None
        try:
            return cls(layout, num_blocks, incarnation, fd, view, device=device)
        except BaseException:
            os.close(fd)
            raise

    def to_host(self, block_id: BlockId, num_tokens: int) -> None:
        """Bring the first `num_tokens` tokens of a slot into its block of the mirror.

        Blocks. Nothing on the device writes to the slot meanwhile. BackendLost where the device
        fails; then the pool is lost, too.
        """
        with self._copying(block_id):
            self._to_host(block_id, num_tokens)

    def to_device(self, block_id: BlockId, num_tokens: int) -> None:
        """Bring the first `num_tokens` tokens of a block of the mirror into its slot, into every
        replica. Then it is on the device. Blocks, as to_host."""
        with self._copying(block_id):
            self._copy(self._copies.to_device, block_id, num_tokens)
        self.mark_on_device([block_id])

    def mark_on_device(self, block_ids: Iterable[BlockId]) -> None:
        """The slots have their request's KV. Whoever wrote it there says so."""
        with self._lock:
            for block_id in block_ids:
                self._on_device.add(block_id)
                self._num_in_mirror.pop(block_id, None)

    def is_on_device(self, block_id: BlockId) -> bool:
        """Whether the slot has the KV of the block's request. If not, the mirror has it."""
        return block_id in self._on_device

    def fill_replicas(
        self, block_ids: Sequence[BlockId], num_tokens: int | None
    ) -> NeuronDiError | None:
        """After one replica of each head has come into slots: the others. Blocks, as to_host, and
        returns what that raises."""
        if not self._copies.has_replicas:
            return None
        try:
            for block_id, num_used in self._used(block_ids, num_tokens):
                if self._num_in_mirror.get(block_id, 0) < num_used:
                    self.to_host(block_id, num_used)
                self.to_device(block_id, num_used)
        except NeuronDiError as error:
            return error
        return None

    def digests(
        self,
        block_ids: Sequence[int],
        identity: KvIdentity,
        num_tokens: int,
        *,
        first_place: int = 0,
    ) -> list[int]:
        """As KvPool's, of what is on the device where a block is. Afterwards the mirror has it."""
        if len(block_ids) != self.layout.num_blocks_for(num_tokens):
            raise LocalProtocolError(f"{len(block_ids)} blocks for {num_tokens} tokens")
        found: list[int] = []
        for place, (block_id, num_used) in enumerate(self._used(block_ids, num_tokens)):
            # A request that was cancelled may still be digested when another has its block.
            with self._copying(block_id):
                if self.is_on_device(block_id):
                    self._to_host(block_id, num_used)
                found += super().digests(
                    [block_id], identity, num_used, first_place=first_place + place
                )
        return found

    def begin_fill(self, block_ids: Sequence[BlockId], *, num_kept: int = 0) -> None:
        for block_id, num_used in self._used(block_ids, num_kept) if num_kept else ():
            if self.is_on_device(block_id):
                self.to_host(block_id, num_used)
        with self._lock:  # what came late for a request that was cancelled may have marked them
            self._on_device.difference_update(block_ids)
            for block_id in block_ids:
                self._num_in_mirror.pop(block_id, None)

    def end_fill(self, block_ids: Sequence[BlockId], num_tokens: int | None) -> None:
        for block_id, num_used in self._used(block_ids, num_tokens):
            if not self.is_on_device(block_id):
                self.to_device(block_id, num_used)

    def retire(self, block_ids: Sequence[BlockId]) -> bool:
        self.begin_fill(block_ids)
        return super().retire(block_ids)

    def close(self) -> None:
        """As KvPool's. The slots are the next pool's: who holds this one is waited for, and where
        that takes too long the device is lost, because it would find what is still written."""
        deadline = Deadline.after(SETTLE_S if self.lost is None else 0.0)
        if not self.settle(deadline):
            self.lose(BackendLost("KV of a pool that was closed is still being copied"))
        super().close()

    def _used(
        self, block_ids: Sequence[int], num_tokens: int | None
    ) -> Iterator[tuple[BlockId, int]]:
        """Each block, and how many of its tokens are a request's. None: they are full."""
        size = self.layout.block_size
        left = len(block_ids) * size if num_tokens is None else num_tokens
        for block_id in block_ids:
            yield BlockId(int(block_id)), min(size, left)
            left -= size

    def _copying(self, block_id: BlockId) -> threading.Lock:
        """Held while a block of the mirror, or its slot, is copied or digested: one at a time."""
        if not 0 <= block_id < self.num_blocks:
            raise LocalProtocolError(f"block {block_id} of a KV pool of {self.num_blocks}")
        return self._copying_locks[block_id]

    def _to_host(self, block_id: BlockId, num_tokens: int) -> None:
        self._copy(self._copies.to_host, block_id, num_tokens)
        with self._lock:
            self._num_in_mirror[block_id] = num_tokens

    def _copy(self, copy: Callable[..., None], block_id: BlockId, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self.layout.block_size:
            raise LocalProtocolError(f"{num_tokens} tokens of block {block_id} of a KV pool")
        with self.hold():
            try:
                copy(block_id, num_tokens, self.memory())
            except NrtWorkerError as error:
                lost = BackendLost(f"the Neuron device failed: {error}")
                self.lose(lost)
                raise lost from None
            except BackendLost as lost:
                self.lose(lost)
                raise
            except (NrtError, NrtMisuse) as error:
                raise WorkerFailed(f"KV could not be copied: {error}") from None
