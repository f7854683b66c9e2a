"""Between a GPU's blocks and the host: by a stream of its own, through a little pinned memory.

Through pinned memory, because a copy of any other host memory holds up whoever asks for it until
the device's turn has come. There are two halves of it: one is on the bus while the processor has
the other.

Run on one GPU so far (docs/cuda.md).
"""

import contextlib
import ctypes
import threading
from collections.abc import Generator, Iterator, Sequence

import numpy as np

from neuron_di.clock import Deadline
from neuron_di.errors import LocalProtocolError
from neuron_di.kv.layout import KvLayout
from neuron_di.kv.resharding import whole_block_runs
from neuron_di.kv.runs import Ints
from neuron_di_bindings.cuda_runtime import CudaError, CudaRuntime, Pointers

STAGING_BYTES = 8 << 20  # of pinned memory, unless two blocks are more
TIMEOUT_S = 60.0  # for the kernels before a copy, and for a half: a GPU that takes longer hangs
# How long to wait before looking whether a copy is done: twice as long each time.
_POLL_S_MIN, _POLL_S_MAX = 20e-6, 1e-3

_Launched = tuple[Pointers, Pointers, Pointers]  # CUDA may read them until the copies are done


class DeviceCopies:
    """Owns a stream, events and pinned memory. Thread-safe: one caller copies at a time.

    Block 0 of the device is at `address`; copies wait for what the event `after` last captured.
    CudaError where CUDA fails. TimeoutError where it does not answer: a copy may then be on its way
    for ever, and close() must not be called. LocalProtocolError after close().
    """

    def __init__(
        self, runtime: CudaRuntime, device: int, layout: KvLayout, *, address: int, after: int
    ) -> None:
        self._runtime = runtime
        self._device = device
        self._layout = layout
        self._address = address
        self._after = after
        self._lock = threading.Lock()
        self._is_closed = False
        self._never = threading.Event()
        self._num_staged = max(1, STAGING_BYTES // 2 // layout.block_bytes)  # blocks of a half
        self._half_bytes = self._num_staged * layout.block_bytes
        with contextlib.ExitStack() as undo, runtime.on_device(device):
            self._stream = runtime.create_stream()
            undo.callback(runtime.destroy_stream, self._stream)
            self._done: list[int] = []  # an event for each half
            for _ in range(2):
                self._done.append(runtime.create_event())
                undo.callback(runtime.destroy_event, self._done[-1])
            self._staging = runtime.allocate_pinned(2 * self._half_bytes)
            undo.callback(runtime.free_pinned, self._staging)
            self._ends = undo.pop_all()

    def read(self, block_ids: Sequence[int]) -> Generator[memoryview, None, None]:
        """The bytes of these blocks, one after the other, each valid until the next is asked for.

        Nobody else copies until the iterator has ended, or was closed.
        """
        size, parts = self._layout.block_bytes, self._parts(block_ids)
        with self._taken():
            launched = [self._read_half(part, half) for half, part in enumerate(parts[:1])]
            for number, part in enumerate(parts):
                if number + 1 < len(parts):  # into the half that was read before this one
                    launched.append(self._read_half(parts[number + 1], (number + 1) % 2))
                half = number % 2
                self._wait_for(half)
                launched.pop(0)
                start = self._staging + half * self._half_bytes
                staged = (ctypes.c_uint8 * (len(part) * size)).from_address(start)
                view = memoryview(staged).cast("B")
                for place in range(len(part)):
                    yield view[place * size : (place + 1) * size]

    def write(self, block_ids: Sequence[int], address: int) -> None:
        """Fill these blocks from host memory, where block i is the one of this number.

        `address` is the one of block 0 there. Returns once the device has them all.
        """
        launched: list[_Launched] = []
        with self._taken():
            for number, part in enumerate(self._parts(block_ids)):
                half = number % 2
                self._wait_for(half)
                runs = whole_block_runs(self._layout, part, range(len(part)))
                start = self._staging + half * self._half_bytes
                rows = (runs.destination_offsets, runs.source_offsets, runs.lengths)
                for to, from_, length in zip(*(row.tolist() for row in rows), strict=True):
                    ctypes.memmove(start + to, address + from_, length)  # without the interpreter
                launched = launched[-1:]
                launched.append(
                    self._launch(
                        runs.source_offsets + self._address,
                        runs.destination_offsets + start,
                        runs.lengths,
                        half,
                    )
                )

    def is_alive(self) -> bool:
        """Whether the device still answers. An error that stays is every call's answer."""
        try:
            with self._runtime.on_device(self._device):
                self._runtime.is_done(self._done[0])
        except CudaError:
            return False
        return True

    def close(self) -> None:
        """After the last copy. CudaError where the device has failed, and keeps what is left."""
        with self._lock, self._runtime.on_device(self._device):
            self._is_closed = True
            self._ends.close()

    def _parts(self, block_ids: Sequence[int]) -> list[Sequence[int]]:
        """As many blocks as fit into a half, each."""
        count = self._num_staged
        return [block_ids[first : first + count] for first in range(0, len(block_ids), count)]

    def _read_half(self, block_ids: Sequence[int], half: int) -> _Launched:
        runs = whole_block_runs(self._layout, block_ids, range(len(block_ids)))
        start = self._staging + half * self._half_bytes
        return self._launch(
            runs.destination_offsets + start,
            runs.source_offsets + self._address,
            runs.lengths,
            half,
        )

    def _launch(self, destinations: Ints, sources: Ints, lengths: Ints, half: int) -> _Launched:
        runtime, stream = self._runtime, self._stream
        rows = (destinations.astype(np.uint64), sources.astype(np.uint64))
        launched = (*rows, lengths.astype(np.uint64))
        with runtime.on_device(self._device):
            runtime.wait_in_stream(stream, self._after)
            runtime.copy_runs(*launched, stream)
            runtime.record(self._done[half], stream)
        return launched

    def _wait_for(self, half: int) -> None:
        deadline, delay_s = Deadline.after(TIMEOUT_S), _POLL_S_MIN
        while not self._is_done(half):
            if deadline.has_passed():
                raise TimeoutError("the GPU does not answer")
            self._never.wait(delay_s)
            delay_s = min(2 * delay_s, _POLL_S_MAX)

    def _is_done(self, half: int) -> bool:
        with self._runtime.on_device(self._device):
            return self._runtime.is_done(self._done[half])

    @contextlib.contextmanager
    def _taken(self) -> Iterator[None]:
        """Nobody else copies. LocalProtocolError where it is closed by now."""
        with self._lock:
            if self._is_closed:
                raise LocalProtocolError("the KV pool is closed")
            with self._settled():
                yield

    @contextlib.contextmanager
    def _settled(self) -> Iterator[None]:
        """Nothing is on its way behind the block, however it ends."""
        try:
            yield
        except CudaError:  # some may have been launched that no event knows of
            with contextlib.suppress(CudaError), self._runtime.on_device(self._device):
                self._runtime.synchronize(self._stream)
            raise
        except TimeoutError:
            raise
        except BaseException:  # whoever reads has stopped
            self._wait_for(0)
            self._wait_for(1)
            raise
        self._wait_for(0)
        self._wait_for(1)
