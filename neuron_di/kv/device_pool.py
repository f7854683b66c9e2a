"""A worker's KV pool in the memory of one NVIDIA GPU.

    host segment     header and generations, as a KvPool's, without blocks: what peers compare
    device memory    offset 0      mark: magic, incarnation, nonce
                     4096          the blocks

Peers on the host open the device memory by a CUDA IPC handle. So it comes from plain cudaMalloc:
an allocator's expandable segments have no such handles, and its blocks would share what else lies
in them. For the same reason it is a multiple of 2 MiB, as CUDA asks of memory that is shared.

So far this has run on a simulator of the CUDA runtime only; tests/device runs on a GPU.
"""

import ctypes
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from mmap import mmap
from typing import TYPE_CHECKING, Self
from weakref import WeakValueDictionary

import numpy as np

from neuron_di.errors import ConfigError, LocalProtocolError
from neuron_di.kv.layout import KvLayout
from neuron_di.kv.pool import KvPool, head_bytes
from neuron_di.kv.runs import Memory
from neuron_di.types import BlockId, Incarnation
from neuron_di.wire import ShmRegion
from neuron_di_bindings import shared_memory
from neuron_di_bindings.cuda_runtime import (
    PATH_VARIABLE,
    CudaError,
    CudaMissing,
    CudaRuntime,
    load_cuda,
)

if TYPE_CHECKING:
    from torch import Tensor

MARK_BYTES = 4096  # of device memory before block 0
NONCE_BYTES = 32
_SHARED_ALIGNMENT = 2 << 20
_STAGING_BYTES = 8 << 20  # of pinned memory, for reading blocks on the host
_MAGIC = b"NDIDEV01"
_MARK = struct.Struct(f"<8s64s{NONCE_BYTES}s")

# A handle cannot be opened in the process that made it: whoever asks for one of these has it.
_pools_here: "WeakValueDictionary[bytes, DevicePool]" = WeakValueDictionary()


def mark_of(incarnation: Incarnation, nonce: bytes) -> bytes:
    """The first bytes of a pool's device memory."""
    return _MARK.pack(_MAGIC, incarnation.encode(), nonce)


def pool_here(memory_handle: bytes) -> "DevicePool | None":
    """The pool of this process that the handle was made for."""
    return _pools_here.get(memory_handle)


def open_runtime(path: str | None = None) -> CudaRuntime:
    """The CUDA runtime library. ConfigError, which says how to get it, where it is not there."""
    try:
        return load_cuda(path)
    except (CudaMissing, CudaError) as error:
        raise ConfigError(
            f"KV in GPU memory needs the CUDA runtime, 12.0 or newer: {error}; "
            f"pip install 'neuron-di[cuda]', or name its file in {PATH_VARIABLE}"
        ) from None


class DevicePool(KvPool):
    """As KvPool, but `memory` and `base_address` are the device's: no processor reads there.

    Kernels and transfers meet by `record`: a transfer out of the pool or into it starts after what
    was launched before the last `record`. Who launches kernels that write blocks calls it before
    anybody is told that the blocks are there, and before a block's next owner is.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        incarnation: Incarnation,
        fd: int,
        view: mmap,
        *,
        runtime: CudaRuntime,
        device: int,
    ) -> None:
        super().__init__(layout, num_blocks, incarnation, fd, view)
        self.runtime = runtime
        self.device = device
        self.nonce = os.urandom(NONCE_BYTES)
        self._stream_of_kernels: int | None = None
        self._lock = threading.Lock()  # one reader of blocks at a time
        self._staging = 0
        num_bytes = MARK_BYTES + num_blocks * layout.block_bytes
        num_bytes = -(-num_bytes // _SHARED_ALIGNMENT) * _SHARED_ALIGNMENT
        self._address = runtime.allocate(num_bytes)
        try:
            self.memory_handle = runtime.memory_handle(self._address)
            self.kernels_done = runtime.create_event(is_shared=True)
            self.event_handle = runtime.event_handle(self.kernels_done)
            self._stream = runtime.create_stream()
            mark = np.frombuffer(mark_of(incarnation, self.nonce), np.uint8)
            runtime.fill(self._address, 0, num_bytes, self._stream)
            runtime.copy(self._address, mark.ctypes.data, len(mark), self._stream)
            runtime.synchronize(self._stream)
        except BaseException:
            runtime.free(self._address)
            raise
        _pools_here[self.memory_handle] = self

    @classmethod
    def create(
        cls,
        layout: KvLayout,
        num_blocks: int,
        incarnation: Incarnation,
        *,
        runtime: CudaRuntime | None = None,
        device: int = 0,
    ) -> Self:
        """Allocate the whole pool, zeros. ConfigError when it cannot be had, or not be shared."""
        runtime = open_runtime() if runtime is None else runtime
        try:
            num_devices = runtime.num_devices()
            if not 0 <= device < num_devices:
                raise ConfigError(f"there is no CUDA device {device} among {num_devices}")
            if not runtime.shares_events(device):
                raise ConfigError(f"CUDA device {device} shares nothing between processes")
            fd, view = shared_memory.create_segment("neuron-di-kv", head_bytes(num_blocks))
            try:
                with runtime.on_device(device):
                    return cls(
                        layout, num_blocks, incarnation, fd, view, runtime=runtime, device=device
                    )
            except BaseException:
                os.close(fd)
                raise
        except (CudaError, OSError, ValueError, OverflowError) as error:
            size_bytes = num_blocks * layout.block_bytes
            raise ConfigError(
                f"cannot allocate {size_bytes} bytes of GPU memory for the KV pool: {error}"
            ) from None

    def record(self, stream: int) -> None:
        """Transfers from now on come after what was launched on this stream, until the next call.

        `stream` is a cudaStream_t, as torch's `cuda_stream`. It is the same in every call: another
        stream's work would not be waited for any more. LocalProtocolError else.
        """
        if self._stream_of_kernels not in (None, stream):
            raise LocalProtocolError("the kernels of a KV pool are recorded on two streams")
        self._stream_of_kernels = stream
        with self.runtime.on_device(self.device):
            self.runtime.record(self.kernels_done, stream)

    def read_blocks(self, block_ids: Sequence[BlockId]) -> Iterator[memoryview]:
        """The bytes of these blocks, one after the other, each valid until the next is asked for.

        What is on the host is at most 8 MiB, or one block, of pinned memory. It costs a copy over
        the bus (some 25 GB/s of PCIe 4) beside what is done with the bytes, so a digest of 1 GiB
        takes well above 0.1 s: whether KV in GPU memory is verified is its backend's choice. Waits
        for recorded kernels. CudaError where the device fails.
        """
        size = self.layout.block_bytes
        if any(not 0 <= block_id < self.num_blocks for block_id in block_ids):
            raise LocalProtocolError(f"a block outside of a pool of {self.num_blocks}")
        num_staged = max(1, _STAGING_BYTES // size)
        with self._lock:
            assert self._view is not None, "the pool is closed"
            runtime = self.runtime
            if not self._staging:
                with runtime.on_device(self.device):
                    self._staging = runtime.allocate_pinned(num_staged * size)
            whole = (ctypes.c_uint8 * (num_staged * size)).from_address(self._staging)
            staged = memoryview(whole).cast("B")
            for first in range(0, len(block_ids), num_staged):
                part = block_ids[first : first + num_staged]
                runtime.wait_in_stream(self._stream, self.kernels_done)
                for place, block_id in enumerate(part):
                    address = self.base_address + block_id * size
                    runtime.copy(self._staging + place * size, address, size, self._stream)
                runtime.synchronize(self._stream)
                for place in range(len(part)):
                    yield staged[place * size : (place + 1) * size]

    def memory(self) -> Memory:
        return Memory(self.base_address, self.num_blocks * self.layout.block_bytes)

    @property
    def base_address(self) -> int:
        """Address of block 0 on the device, as this process has it."""
        return self._address + MARK_BYTES

    def head_region(self) -> ShmRegion:
        """How a process of this host reaches the header and the generations."""
        return super().region()

    def region(self) -> ShmRegion:
        raise ConfigError("a KV pool in GPU memory is reached by --transfer cuda_ipc only")

    def tensor(self, rank: int = 0) -> "Tensor":  # noqa: ARG002
        raise LocalProtocolError("a KV pool in GPU memory is no tensor of the host")

    def view(self, block_id: BlockId) -> memoryview:  # noqa: ARG002
        raise LocalProtocolError("a KV pool in GPU memory is read by read_blocks")

    def close(self) -> None:
        """Give the memory back. Safe to call twice.

        After the workers that opened it were disconnected: what they read from freed memory is
        undefined. Every block shows as given up first, so that none of it counts.
        """
        view, self._view = self._view, None
        if view is None:
            return
        self._generations += 1
        self._generations = np.zeros(0, np.uint64)  # the old ones would keep the map
        _pools_here.pop(self.memory_handle, None)
        os.close(self._fd)
        with self._lock, self.runtime.on_device(self.device):
            if self._staging:
                self.runtime.free_pinned(self._staging)
            self.runtime.destroy_stream(self._stream)
            self.runtime.destroy_event(self.kernels_done)
            self.runtime.free(self._address)
