"""What a receive may touch: checked by every transfer engine before it starts.

A receive's runs follow from ids that came from another process. So they are never trusted:
nothing outside of what the peer registered is read, nothing outside of what this worker
registered is written, and no byte is written twice.
"""

import threading

import numpy as np
from numpy.typing import NDArray

from neuron_di.errors import NeuronDiError, RemoteProtocolError
from neuron_di.kv import Memory, Runs, ids_below
from neuron_di.kv.runs import FEW, Ints
from neuron_di.transfer.transfer_engine import BlockSource, Receive

_INT64 = np.dtype(np.int64)
_EMPTY = "a transfer's run is empty"
_OUTSIDE = "a transfer's run lies outside of the memory"
_OVERLAPPING = "two of a transfer's runs write to the same bytes"


class OwnMemories:
    """The memories of this worker that receives may write to. Thread-safe."""

    def __init__(self, pool: Memory) -> None:
        self._lock = threading.Lock()
        self._memories: tuple[Memory, ...] = (pool,)

    def add(self, memory: Memory) -> None:
        with self._lock:
            self._memories += (memory,)

    def all(self) -> tuple[Memory, ...]:
        """In the order in which they came, the pool first."""
        return self._memories

    def refusal(
        self, receive: Receive, *, peer_bytes: int, peer_blocks: int
    ) -> NeuronDiError | None:
        """Why this receive must not start; None: it may.

        `peer_bytes` and `peer_blocks` are the size of the peer's pool.
        """
        for memory in self._memories:
            if _is_part(receive.memory, memory):
                break
        else:
            return RemoteProtocolError("a transfer into memory that was not registered")
        source = receive.source
        if len(source.block_ids) != len(source.generations):
            return RemoteProtocolError("the prefill worker offered another number of generations")
        if ids_below(source.block_ids, peer_blocks) is None:
            return RemoteProtocolError("the prefill worker named a block outside of its pool")
        return runs_refusal(receive.runs, peer_bytes, receive.memory.num_bytes)


def _is_part(part: Memory, memory: Memory) -> bool:
    start = part.address - memory.address
    return start >= 0 and 0 < part.num_bytes <= memory.num_bytes - start


def block_indices(source: BlockSource, num_blocks: int) -> NDArray[np.int64] | None:
    """The source's block ids as an array; None where one is not in a pool of this size."""
    return ids_below(source.block_ids, num_blocks)


def runs_refusal(
    runs: Runs, source_bytes: int, destination_bytes: int
) -> RemoteProtocolError | None:
    """Why these runs do not fit memories of these sizes; None: they do."""
    sources, destinations, lengths = runs.source_offsets, runs.destination_offsets, runs.lengths
    if runs.source_tensors is not None or runs.destination_tensors is not None:
        return RemoteProtocolError("a transfer between several tensors")
    count = (len(lengths),)
    for row in (sources, destinations, lengths):
        if row.dtype != _INT64 or row.shape != count:
            return RemoteProtocolError("the lists of a transfer's runs do not fit each other")
    if not len(lengths):
        return RemoteProtocolError("a transfer of nothing")
    find = _fault_of_few if len(lengths) <= FEW else _fault
    fault = find(sources, destinations, lengths, source_bytes, destination_bytes)
    return None if fault is None else RemoteProtocolError(fault)


def _fault(
    sources: Ints, destinations: Ints, lengths: Ints, source_bytes: int, destination_bytes: int
) -> str | None:
    if lengths.min() <= 0:
        return _EMPTY
    for offsets, num_bytes in ((sources, source_bytes), (destinations, destination_bytes)):
        # No sum of two numbers that were not checked: it may be beyond 63 bits.
        if offsets.min() < 0 or (offsets > num_bytes - lengths).any():
            return _OUTSIDE
    return _OVERLAPPING if _overlaps(destinations, lengths) else None


def _fault_of_few(
    sources: Ints, destinations: Ints, lengths: Ints, source_bytes: int, destination_bytes: int
) -> str | None:
    """As _fault, in a fraction of the time where runs are few: a small transfer's is felt."""
    free_from = 0
    runs = zip(destinations.tolist(), sources.tolist(), lengths.tolist(), strict=True)
    for destination, source, length in sorted(runs):
        if length <= 0:
            return _EMPTY
        if not 0 <= source <= source_bytes - length:
            return _OUTSIDE
        if not 0 <= destination <= destination_bytes - length:
            return _OUTSIDE
        if destination < free_from:
            return _OVERLAPPING
        free_from = destination + length
    return None


def _overlaps(offsets: Ints, lengths: Ints) -> bool:
    ends = offsets + lengths
    if (offsets[1:] >= ends[:-1]).all():
        return False
    # Intervals are disjoint exactly when each in order of starts ends before the next starts,
    # and then the ends are in the same order.
    starts = np.sort(offsets)
    is_even = lengths.min() == lengths.max()
    ends = starts + lengths[0] if is_even else np.sort(ends)
    return bool((starts[1:] < ends[:-1]).any())
