"""One end's blocks by number, wherever they lie: in an arena they change owner."""

import ctypes
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from neuron_di.kv import KvPool, Memory, NeuronPool
from neuron_di.kv.device_pool import DevicePool
from neuron_di.transfer import BlockSource
from neuron_di.types import BlockId


def bytes_of(memory: Memory) -> NDArray[np.uint8]:
    """The memory itself, not a copy. Valid as long as its owner keeps it."""
    return np.frombuffer((ctypes.c_uint8 * memory.num_bytes).from_address(memory.address), np.uint8)


class NumberedBlocks:
    """The books that a worker keeps of its blocks. Valid until the pool is closed. Thread-safe.

    `blocks[n]` are the bytes of the n-th block, read where it lies now: of one number, a list of
    them or a slice; `blocks[:]` is [N, bytes of a block]. What is read is a copy.
    """

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self.ids: NDArray[np.int64] = np.array(pool.block_ids(), np.int64)
        memory = pool.device_memory() if isinstance(pool, DevicePool) else pool.memory()
        self._memory = bytes_of(memory).reshape(-1, pool.layout.block_bytes)
        self._lock = threading.RLock()

    def id_of(self, number: int) -> BlockId:
        return BlockId(int(self.ids[number]))

    def ids_of(self, numbers: Iterable[int]) -> list[BlockId]:
        return [self.id_of(number) for number in numbers]

    def promise(self, numbers: Sequence[int]) -> BlockSource:
        """These blocks as a prefill worker offers them in Ready."""
        with self._lock:
            ids = self.ids_of(numbers)
            if isinstance(self.pool, DevicePool) and self.pool.keeps_mirror:
                self.pool.to_host(ids)
            return BlockSource(ids, self.pool.generations(ids))

    def give_up(self, numbers: Iterable[int]) -> None:
        """As an engine ends a request: what came for a block takes its number."""
        numbers = list(numbers)
        with self._lock:
            while self.pool.retire(self.ids_of(numbers)):
                self.follow()

    def begin(self, block_ids: Sequence[BlockId]) -> None:
        """A receive into them is about to be posted."""
        self.pool.begin_fill(block_ids)

    def end(self, block_ids: Sequence[BlockId]) -> None:
        """It brought what they hold now, wherever the engine wrote that."""
        self.pool.end_fill(block_ids, len(block_ids) * self.pool.layout.block_size)
        self.follow()

    def follow(self) -> None:
        with self._lock:
            for went, came in self.pool.exchanges():
                self.ids[self._number_of(went)] = came

    def give_up_taken(self, source: BlockSource) -> None:
        """On Done: give up what was promised and taken, and compute the same KV in what came.

        Nothing where that was done before.
        """
        with self._lock:
            if set(source.block_ids) <= set(self.ids.tolist()):
                numbers = [self._number_of(block_id) for block_id in source.block_ids]
                before = self[numbers]
                self.give_up(numbers)
                self[numbers] = before

    def check(self) -> None:
        """The pool has the same blocks as these books."""
        with self._lock:
            self.follow()
            if sorted(self.ids.tolist()) != list(self.pool.block_ids()):
                raise AssertionError("the pool's blocks are others than those in the books")

    def _number_of(self, block_id: int) -> int:
        return int(np.flatnonzero(self.ids == block_id)[0])

    def __getitem__(self, key: Any) -> Any:
        with self._lock:
            self._bring("to_host", key)
            return self._memory[self._place(key)].copy()

    def __setitem__(self, key: Any, value: object) -> None:
        with self._lock:
            self._bring("to_host", key)  # for what of it stays as it is
            self._memory[self._place(key)] = value
            self._bring("to_device", key)
            if isinstance(self.pool, DevicePool):  # whose memory a processor can write here
                self.pool.mark_on_device(np.atleast_1d(self.ids[self._first(key)]).tolist())

    def _bring(self, way: Literal["to_host", "to_device"], key: Any) -> None:
        """Where KV is on a device, and this memory its mirror."""
        pool = self.pool
        if not isinstance(pool, NeuronPool):
            return
        for block_id in np.atleast_1d(self.ids[self._first(key)]).tolist():
            if way == "to_device":
                pool.to_device(block_id, pool.layout.block_size)
            elif pool.is_on_device(block_id):
                pool.to_host(block_id, pool.layout.block_size)

    def _first(self, key: Any) -> Any:
        return key[0] if isinstance(key, tuple) else key

    def _place(self, key: Any) -> Any:
        return (self.ids[key[0]], *key[1:]) if isinstance(key, tuple) else self.ids[key]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.uint8]:
        blocks: NDArray[np.uint8] = self[:]
        return blocks

    def __eq__(self, other: object) -> Any:
        """Byte for byte, as numpy does."""
        return self[:] == (other[:] if isinstance(other, NumberedBlocks) else other)

    __hash__ = None  # type: ignore[assignment]
