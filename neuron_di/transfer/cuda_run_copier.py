"""Copies runs from GPU memory to GPU memory: short ones by a kernel, long ones by the copy engines.

The engines leave the multiprocessors alone, but take some microseconds for every run; the kernel
copies any number of them in one launch. So it depends on how long the runs are.
"""

import contextlib
import ctypes
import threading

import numpy as np

from neuron_di.obs import get_logger
from neuron_di_bindings.cuda_copy_kernel import ALIGNMENT, CopyKernel, evened
from neuron_di_bindings.cuda_runtime import CudaError, CudaRuntime, Pointers

_log = get_logger(__name__)

RUNS_MAX = 16_384  # of one launch, before long ones are cut
# Where the copy engines' time for a run is no longer small beside that for its bytes.
LONG_RUN_BYTES = 32 << 20


class CudaRunCopiers:
    """One for each reader at a time, kept for the next one: to load a kernel may be to wait for all
    that the device was given, and to free memory is. So it is freed at the end. Thread-safe."""

    def __init__(self, runtime: CudaRuntime, device: int) -> None:
        self._runtime = runtime
        self._device = device
        self._lock = threading.Lock()
        self._idle: list[CudaRunCopier] = []
        self._is_stuck = False

    def take(self) -> "CudaRunCopier":
        """The caller's until it is given back. CudaError where CUDA fails."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return CudaRunCopier(self._runtime, self._device)

    def give_back(self, copier: "CudaRunCopier") -> None:
        """After its last copy."""
        with self._lock:
            self._idle.append(copier)

    def leave(self) -> None:
        """A stream stands still, maybe for ever: nothing is freed any more."""
        self._is_stuck = True

    def close(self) -> None:
        """After the last reader's end."""
        with self._lock:
            while self._idle and not self._is_stuck:
                with contextlib.suppress(CudaError):  # fails where the device has failed
                    self._idle.pop().close()


class CudaRunCopier:
    """Owns the kernel and its table. Used on one thread at a time, with its device current.

    CudaError where CUDA fails; where only the kernel is not to be had, the engines do everything.
    """

    def __init__(self, runtime: CudaRuntime, device: int) -> None:
        self._runtime = runtime
        self._kernel: CopyKernel | None = None
        self._ends = contextlib.ExitStack()
        try:
            self._open(device)
        except CudaError as error:
            _log.warning("no_copy_kernel", error=str(error))

    def _open(self, device: int) -> None:
        runtime, num_bytes = self._runtime, 2 * 3 * 8 * RUNS_MAX
        with contextlib.ExitStack() as undo:
            kernel = CopyKernel.load(runtime, device)
            undo.callback(kernel.unload)
            self._table = runtime.allocate(num_bytes)
            undo.callback(runtime.free, self._table)
            self._staging = runtime.allocate_pinned(num_bytes)
            undo.callback(runtime.free_pinned, self._staging)
            words = (ctypes.c_uint64 * (num_bytes // 8)).from_address(self._staging)
            self._words = np.frombuffer(memoryview(words), np.uint64)
            self._ends = undo.pop_all()
        self._kernel = kernel

    def copy(
        self, destinations: Pointers, sources: Pointers, lengths: Pointers, stream: int
    ) -> None:
        """Launch it all; the arrays stay as they are until it has run, and so long nothing else is
        copied. After a CudaError some of the copies may be on their way."""
        count = len(lengths)
        for first in range(0, count, RUNS_MAX):
            if first:
                self._runtime.synchronize(stream)  # the table's last use
            part = slice(first, first + RUNS_MAX)
            rows = destinations[part], sources[part], lengths[part]
            if count == 1 or not self._launch(*rows, stream):
                self._runtime.copy_runs(*rows, stream)

    def close(self) -> None:
        """After the last copy."""
        self._ends.close()

    def _launch(
        self, destinations: Pointers, sources: Pointers, lengths: Pointers, stream: int
    ) -> bool:
        """Whether these are for the kernel. Then it is on its way."""
        kernel, num_bytes = self._kernel, int(lengths.sum())
        if kernel is None or num_bytes >= len(lengths) * LONG_RUN_BYTES:
            return False
        if not kernel.takes(len(lengths), int(lengths.max()), num_bytes):
            destinations, sources, lengths = evened(destinations, sources, lengths)
        count, longest = len(lengths), int(lengths.max())
        if not kernel.takes(count, longest, num_bytes):
            return False
        words = self._words[: 3 * count]
        for place, row in zip(
            words.reshape(3, count), (destinations, sources, lengths), strict=True
        ):
            place[:] = row
        if int(np.bitwise_or.reduce(words)) % ALIGNMENT:
            return False
        self._runtime.copy(self._table, self._staging, words.nbytes, stream)
        kernel.launch(self._table, count, longest, stream)
        return True
