"""What a transfer may touch: checked by every transfer engine before it starts.

Its runs follow from ids that came from another process. So they are never trusted: nothing
outside of what the peer registered is read, nothing outside of what this worker registered is
written, and no byte is written twice.
"""

import threading

import numpy as np

from neuron_di.errors import LocalProtocolError, NeuronDiError, RemoteProtocolError
from neuron_di.kv import BlockIds, KvPool, Memory, Runs, ids_below
from neuron_di.kv.runs import Ints
from neuron_di.transfer.transfer_engine import Receive
from neuron_di_bindings.block_runs import are_sound

_INT64 = np.dtype(np.int64)
_INT64_MAX = (1 << 63) - 1


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
        part = receive.memory
        for memory in self._memories:
            start = part.address - memory.address
            if start >= 0 and 0 < part.num_bytes <= memory.num_bytes - start:
                break
        else:
            return RemoteProtocolError("a transfer into memory that was not registered")
        ids = receive.source.block_ids
        if len(ids) != len(receive.source.generations):
            return RemoteProtocolError("the prefill worker offered another number of generations")
        return _refusal(receive.runs, peer_bytes, part.num_bytes, ids, peer_blocks)


def send_refusal(runs: Runs, pool_bytes: int) -> NeuronDiError | None:
    """Why these runs are not sent from a pool of this size; None: they are."""
    return _refusal(runs, pool_bytes, _INT64_MAX, (), 0)


def _refusal(
    runs: Runs, source_bytes: int, destination_bytes: int, ids: BlockIds, ids_end: int
) -> NeuronDiError | None:
    rows = runs.source_offsets, runs.destination_offsets, runs.lengths
    has_tensors = runs.source_tensors is not None or runs.destination_tensors is not None
    if not has_tensors and are_sound(*rows, ids, source_bytes, destination_bytes, ids_end):
        return None
    if ids_below(ids, ids_end) is None:
        return RemoteProtocolError("the prefill worker named a block outside of its pool")
    return runs_refusal(runs, source_bytes, destination_bytes)


def runs_refusal(
    runs: Runs, source_bytes: int, destination_bytes: int
) -> RemoteProtocolError | None:
    """Why these runs do not fit memories of these sizes; None: they do. At leisure, with numpy."""
    sources, destinations, lengths = runs.source_offsets, runs.destination_offsets, runs.lengths
    if runs.source_tensors is not None or runs.destination_tensors is not None:
        return RemoteProtocolError("a transfer between several tensors")
    count = len(lengths)
    if not (
        sources.dtype == destinations.dtype == lengths.dtype == _INT64
        and sources.shape == destinations.shape == lengths.shape == (count,)
    ):
        return RemoteProtocolError("the lists of a transfer's runs do not fit each other")
    if not count:
        return RemoteProtocolError("a transfer of nothing")
    if lengths.min() <= 0:
        return RemoteProtocolError("a transfer's run is empty")
    for offsets, num_bytes in ((sources, source_bytes), (destinations, destination_bytes)):
        # No sum of two numbers that were not checked: it may be beyond 63 bits.
        if offsets.min() < 0 or (offsets > min(num_bytes, _INT64_MAX) - lengths).any():
            return RemoteProtocolError("a transfer's run lies outside of the memory")
    if _overlaps(destinations, lengths):
        return RemoteProtocolError("two of a transfer's runs write to the same bytes")
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


def slot_refusal(receive: Receive, pool: KvPool, peer_blocks: int) -> NeuronDiError | None:
    """Why a receive into a device's slots must not start; None: it may. It goes by blocks."""
    source, ids = receive.source, receive.block_ids
    if receive.memory != pool.memory():
        return RemoteProtocolError("a transfer into other memory than the device's slots")
    if not len(source.block_ids) == len(source.generations) == len(ids):
        return RemoteProtocolError("the lists of a transfer's blocks do not fit each other")
    if not len(ids):
        return RemoteProtocolError("a transfer of nothing")
    if ids_below(source.block_ids, peer_blocks) is None:
        return RemoteProtocolError("the prefill worker named a block outside of its pool")
    if ids_below(ids, pool.num_blocks) is None:
        return LocalProtocolError("a transfer into what is no block of the pool")
    return None
