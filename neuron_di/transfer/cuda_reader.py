"""What reads one prefill worker's GPU memory: its mapping, a stream and a thread of its own.

Of its own, because a stream whose turn never comes (the peer's kernels hang) can only be given up:
no other peer's transfers wait behind it. All CUDA calls are made on that thread, so that what was
opened for this peer is closed after the last copy out of it, and on the same device.

    gate      the stream waits for the kernels that were recorded at both ends, if they still run
    copies    only once the gate has opened, so that none is on its way when the wait is given up;
              of a pool's blocks to the device, where the receive names its mirror
    done      the thread waits until the device has made them

Run on one GPU so far (docs/cuda.md); tests/device does it again.
"""

import contextlib
import threading
from collections.abc import Callable
from functools import partial

import numpy as np

from neuron_di.clock import Deadline
from neuron_di.errors import (
    BackendLost,
    NeuronDiError,
    PeerGone,
    PeerRefused,
    PeerTimeout,
    StaleIncarnation,
)
from neuron_di.kv import KvLayout, PeerPool
from neuron_di.kv.device_memory import MARK_BYTES, mark_of
from neuron_di.kv.device_pool import DevicePool, pool_here
from neuron_di.transfer.copy_thread import CopyThread
from neuron_di.transfer.cuda_run_copier import CudaRunCopier, CudaRunCopiers
from neuron_di.transfer.domain import this_machine
from neuron_di.transfer.transfer_engine import BlockSource, Receive, TransferToken
from neuron_di.types import Incarnation
from neuron_di.wire import CudaIpcRegion
from neuron_di_bindings.block_runs import are_words
from neuron_di_bindings.cuda_runtime import CudaError

# How long to wait before looking whether the gate has opened: twice as long each time.
_POLL_S_MIN, _POLL_S_MAX = 20e-6, 1e-3
# From GPU to GPU over the slowest bus that takes 40 ms of a core; within a GPU half of one.
_SOON_BYTES_MAX = 1 << 30


class CudaReader:
    """Borrows this worker's pool, and one of its engine's copiers."""

    def __init__(
        self,
        pool: DevicePool,
        peer: Incarnation,
        region: CudaIpcRegion,
        layout: KvLayout,
        *,
        copiers: CudaRunCopiers,
        timeout_s: float,
    ) -> None:
        self._heads = _open_heads(peer, region, layout)
        self.num_blocks = region.head.num_blocks
        self.num_bytes = region.num_bytes
        self._pool = pool
        self._runtime = pool.runtime
        self._peer = peer
        self._region = region
        self._copiers = copiers
        self._timeout_s = timeout_s
        self._never = threading.Event()
        self._broken: NeuronDiError | None = None
        # What undoes what was opened, in order. It knows no reader, so that an ended reader goes.
        self._ends: list[Callable[[], None]] = []
        self._stream = self._gate = self._done = self._done_soon = 0
        self._copier: CudaRunCopier | None = None
        self._peers_address = 0  # of block 0
        self._kernels_done = 0  # the peer's event
        self._found_mark = np.zeros(len(mark_of(peer, region.nonce)), np.uint8)
        self._thread = CopyThread("kv-transfer-cuda")

    def connect(self) -> None:
        """Open the peer's memory and prove it. Once, and before anything else. Blocks.

        PeerGone, PeerRefused, PeerTimeout or StaleIncarnation: then it is to be ended.
        """
        token, is_over = TransferToken(), threading.Event()
        token.on_done(lambda _: is_over.set())
        self._thread.post(self._open, 0, token)
        # Longer than what the thread gives itself: the rest of CUDA's calls wait for nobody.
        is_over.wait(2 * self._timeout_s)
        error = token.error() if token.is_done() else PeerTimeout("CUDA does not answer")
        if error is not None:
            raise error

    def post(self, receive: Receive, token: TransferToken, *, is_batched: bool) -> None:
        """The caller checked the bounds. `is_batched`: the memory is no unpinned host memory."""
        copy = partial(self._receive, receive, is_batched)
        self._thread.post(copy, receive.runs.num_bytes, token)

    def has_kept(self, source: BlockSource) -> bool:
        """Whether the peer's blocks are still what they were promised as."""
        return are_words(self._heads.words, source.block_ids, source.generations)

    def end(self) -> CopyThread:
        """Read what was posted, then close the peer's memory: what remains is the thread."""
        self._thread.end(partial(_undo, self._ends))
        return self._thread

    def _open(self) -> NeuronDiError | None:
        try:
            self._check_device()
            self._open_peer()
            self._prove()
        except CudaError as error:
            return PeerGone(f"CUDA does not reach the prefill worker's pool: {error}")
        except NeuronDiError as error:
            return error
        return None

    def _check_device(self) -> None:
        runtime, own = self._runtime, self._pool.device
        runtime.set_device(own)
        if runtime.device_uuid(own) == self._region.device_uuid:
            return
        for device in range(runtime.num_devices()):
            if runtime.device_uuid(device) == self._region.device_uuid:
                if not runtime.can_access_peer(own, device):
                    raise PeerRefused(f"GPU {own} does not reach the memory of GPU {device}")
                return
        # A device that this process does not see, or another MIG instance: opening it shows.

    def _open_peer(self) -> None:
        runtime, region = self._runtime, self._region
        self._stream = runtime.create_stream()
        self._ends.append(partial(runtime.destroy_stream, self._stream))
        self._gate, self._done = runtime.create_event(), runtime.create_event()
        self._done_soon = runtime.create_event(is_short=True)
        for event in (self._gate, self._done, self._done_soon):
            self._ends.append(partial(runtime.destroy_event, event))
        here = pool_here(region.memory_handle)
        if here is None:
            base = runtime.open_memory(region.memory_handle)
            self._ends.append(partial(runtime.close_memory, base))
            self._kernels_done = runtime.open_event(region.event_handle)
            self._ends.append(partial(runtime.destroy_event, self._kernels_done))
        else:
            base, self._kernels_done = here.device_address - MARK_BYTES, here.kernels_done
        start, num_bytes = runtime.extent(base)
        if region.offset + region.num_bytes > start + num_bytes - base:
            raise PeerRefused("the prefill worker's pool is smaller than it says")
        self._peers_address = base + region.offset
        self._copier = self._copiers.take()
        has_opened = partial(runtime.is_done, self._gate)
        give_back = partial(self._copiers.give_back, self._copier)
        self._ends.append(partial(_leave, has_opened, give_back, self._copiers, self._pool))

    def _prove(self) -> None:
        """What stands before the peer's block 0 is what the peer, and nobody else, put there."""
        mark = self._found_mark
        address = self._peers_address - MARK_BYTES
        self._runtime.copy(mark.ctypes.data, address, len(mark), self._stream)
        self._runtime.record(self._done, self._stream)
        self._wait_for(self._done)
        if mark.tobytes() != mark_of(self._peer, self._region.nonce):
            raise StaleIncarnation("the GPU memory is not of the worker that was announced")

    def _receive(self, receive: Receive, is_batched: bool) -> NeuronDiError | None:
        if self._broken is not None:
            return self._broken
        runtime, stream, pool = self._runtime, self._stream, self._pool
        mirror, address = pool.memory(), receive.memory.address
        if is_own := 0 <= address - mirror.address < mirror.num_bytes:
            address += pool.device_address - mirror.address
        try:
            self._open_gate([self._kernels_done, *([pool.kernels_done] if is_own else [])])
        except (CudaError, PeerTimeout) as error:
            return self._break(error)
        runs = receive.runs
        # No address has the highest bit.
        destinations = (runs.destination_offsets + address).view(np.uint64)
        sources = (runs.source_offsets + self._peers_address).view(np.uint64)
        lengths = runs.lengths.view(np.uint64)
        try:
            if is_own:
                assert self._copier is not None, "it was opened"
                self._copier.copy(destinations, sources, lengths, stream)
            else:
                runtime.copy_runs(destinations, sources, lengths, stream, is_batched=is_batched)
            is_soon = is_own and runs.num_bytes <= _SOON_BYTES_MAX
            done = self._done_soon if is_soon else self._done
            runtime.record(done, stream)
            runtime.synchronize_event(done)
        except CudaError as error:
            with contextlib.suppress(CudaError):  # nothing is on its way when the token is done
                runtime.synchronize(stream)
            return self._break(error)
        if is_own:
            pool.mark_on_device(receive.block_ids)
        return None

    def _open_gate(self, events: list[int]) -> None:
        """Wait for the kernels that these events captured: mostly they have run long since."""
        runtime = self._runtime
        if all(runtime.is_done(event) for event in events):
            return
        for event in events:
            runtime.wait_in_stream(self._stream, event)
        runtime.record(self._gate, self._stream)
        self._wait_for(self._gate)

    def _wait_for(self, event: int) -> None:
        deadline, delay_s = Deadline.after(self._timeout_s), _POLL_S_MIN
        while not self._runtime.is_done(event):
            if deadline.has_passed():
                raise PeerTimeout("the prefill worker's GPU work came to a halt")
            self._never.wait(delay_s)
            delay_s = min(2 * delay_s, _POLL_S_MAX)

    def _break(self, error: CudaError | PeerTimeout) -> NeuronDiError:
        self._broken = PeerGone("the connection to the prefill worker's pool has failed")
        if isinstance(error, PeerTimeout):
            return error
        try:
            self._pool.check_device(error)
        except BackendLost as lost:
            return lost
        return PeerGone(f"a copy from the prefill worker's GPU memory failed: {error}")


def _undo(ends: list[Callable[[], None]]) -> None:
    """On the thread, last: no copy is in flight."""
    for end in reversed(ends):
        with contextlib.suppress(CudaError):  # the device has failed: nothing is left
            end()


def _leave(
    has_opened: Callable[[], bool],
    give_back: Callable[[], None],
    copiers: CudaRunCopiers,
    pool: DevicePool,
) -> None:
    """To free memory is to wait for all that the device was given. A stream that stands still for
    the peer's kernels may do so for ever: then what there is goes with the process."""
    if has_opened():
        give_back()
    else:
        copiers.leave()
        pool.leave_memory()


def _open_heads(peer: Incarnation, region: CudaIpcRegion, layout: KvLayout) -> PeerPool:
    """The peer's header and generations, once all that it says of its pool fits together."""
    head = region.head
    if region.host != this_machine():
        raise PeerRefused("the prefill worker's GPU is in another machine or container")
    if head.incarnation != peer:
        raise StaleIncarnation(f"the pool of process {head.pid} is not the peer's")
    if region.num_bytes != head.num_blocks * layout.block_bytes or region.offset < MARK_BYTES:
        raise PeerRefused("the prefill worker's pool is none that this engine can read")
    return PeerPool.open(head, layout)
