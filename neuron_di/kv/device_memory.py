"""The GPU memory of a pool: plain cudaMalloc, zeros, marked as its owner's, exported once.

    offset 0      mark: magic, incarnation, nonce
    4096          the blocks

Peers on the host open it by a CUDA IPC handle. An allocator's expandable segments have no such
handles, and its blocks would share what else lies in them. So it is a multiple of 2 MiB, too, as
CUDA asks of memory that is shared.

Run on one GPU so far (docs/cuda.md); tests/device does it again.
"""

import contextlib
import os
import struct

import numpy as np

from neuron_di.types import Incarnation
from neuron_di_bindings.cuda_runtime import CudaError, CudaRuntime

MARK_BYTES = 4096  # before block 0
NONCE_BYTES = 32
_SHARED_ALIGNMENT = 2 << 20
_MAGIC = b"NDIDEV01"
_MARK = struct.Struct(f"<8s64s{NONCE_BYTES}s")


def mark_of(incarnation: Incarnation, nonce: bytes) -> bytes:
    """The first bytes of a pool's device memory."""
    return _MARK.pack(_MAGIC, incarnation.encode(), nonce)


class DeviceMemory:
    """Owns the memory, and the event of the kernels that use it. CudaError, or OverflowError, where
    it cannot be had.

    Without `not_shared` other processes can open both, by their handles.
    """

    def __init__(
        self, runtime: CudaRuntime, device: int, num_bytes: int, incarnation: Incarnation
    ) -> None:
        self._runtime = runtime
        self._device = device
        self.nonce = os.urandom(NONCE_BYTES)
        self.memory_handle, self.event_handle, self.not_shared = b"", b"", ""
        num_bytes = -(-(MARK_BYTES + num_bytes) // _SHARED_ALIGNMENT) * _SHARED_ALIGNMENT
        with contextlib.ExitStack() as undo, runtime.on_device(device):
            address = runtime.allocate(num_bytes)
            undo.callback(runtime.free, address)
            self.address = address + MARK_BYTES  # of block 0
            self.kernels_done = self._share(address)
            undo.callback(runtime.destroy_event, self.kernels_done)
            self._clear(address, num_bytes, mark_of(incarnation, self.nonce))
            self._ends = undo.pop_all()

    def free(self) -> None:
        """Once nobody here uses it any more."""
        with self._runtime.on_device(self._device):
            self._ends.close()

    def _share(self, address: int) -> int:
        """The event. It and the memory can be opened by others, if by anybody."""
        runtime, device = self._runtime, self._device
        try:
            if not runtime.shares_events(device):
                raise CudaError("cudaDeviceGetAttribute", 0, f"device {device} shares no events")
            memory_handle = runtime.memory_handle(address)
            event = runtime.create_event(is_shared=True)
            try:
                self.event_handle = runtime.event_handle(event)
            except BaseException:
                runtime.destroy_event(event)
                raise
        except CudaError as error:
            self.not_shared = f"the GPU's memory cannot be opened by other processes: {error}"
            return runtime.create_event()
        self.memory_handle = memory_handle
        return event

    def _clear(self, address: int, num_bytes: int, mark: bytes) -> None:
        runtime, source = self._runtime, np.frombuffer(mark, np.uint8)
        stream = runtime.create_stream()
        try:
            runtime.fill(address, 0, num_bytes, stream)
            runtime.copy(address, source.ctypes.data, len(mark), stream)
            runtime.synchronize(stream)
        finally:
            runtime.destroy_stream(stream)
