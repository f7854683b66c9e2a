"""Memory of a device, or of the host for it: bytes in and out, parts, places.

Calls are synchronous and take host memory of any kind. The header promises nothing of two calls
that touch the same bytes at once; whoever needs an order makes one.

So far this has run on a simulator of libnrt only.
"""

import ctypes
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from neuron_di_bindings.nrt.buffers import (
    Readable,
    Writable,
    address_of,
    bytes_of,
    check_range,
    writable_bytes_of,
)
from neuron_di_bindings.nrt.handle import Handle
from neuron_di_bindings.nrt.status import NrtRequestError, NrtStatus
from neuron_di_bindings.nrt.structs import (
    AllocationInfoStruct,
    BatchOperationStruct,
    BatchStruct,
)

if TYPE_CHECKING:
    from neuron_di_bindings.nrt.runtime import NrtRuntime

ReadRuns = Sequence[tuple[int, Writable]]
WriteRuns = Sequence[tuple[int, Readable]]


@dataclass(frozen=True, slots=True)
class AllocationInfo:
    """Where in the device's memory a tensor is. The allocation may be larger than the tensor."""

    physical_address: int
    num_bytes: int
    hbm_index: int


class NrtTensor:
    """One tensor of a runtime. Made by `NrtRuntime.allocate`, `wrap` and `slice`; owned by whoever
    made it, who frees it.

    Offsets and sizes are bytes. What is not within the tensor is a ValueError, before the library
    is called; use after `free` is NrtMisuse. Any thread may call.
    """

    def __init__(
        self,
        runtime: "NrtRuntime",
        pointer: int,
        num_bytes: int,
        core: int,
        name: str,
    ) -> None:
        self.num_bytes = num_bytes
        self.core = core
        self.name = name
        self.runtime = runtime
        self.handle = runtime.own(f"tensor {name!r}", pointer, "nrt_tensor_free")

    @property
    def address(self) -> int:
        """Of a device tensor: for network adapters. The host must not touch it (nrt.h:
        nrt_tensor_get_va)."""
        with self.handle.use() as pointer:
            found = self.runtime.call("nrt_tensor_get_va", pointer)
        if not found:
            raise NrtRequestError("nrt_tensor_get_va", NrtStatus.FAILURE, "NRT_FAILURE")
        return cast("int", found)

    def read(self, offset: int, into: Writable) -> None:
        """Fill host memory with the bytes from here on (nrt.h: nrt_tensor_read)."""
        self.move("nrt_tensor_read", offset, writable_bytes_of(into))

    def write(self, offset: int, data: Readable) -> None:
        """Put host memory here (nrt.h: nrt_tensor_write)."""
        self.move("nrt_tensor_write", offset, bytes_of(data))

    def read_many(self, runs: ReadRuns) -> None:
        """`read`, for each (offset, into); one call where the library has it (nrt.h:
        nrt_tensor_read_batch). After an error some may have been read."""
        read_tensors([(self, runs)])

    def write_many(self, runs: WriteRuns) -> None:
        """`write`, for each (offset, data), as `read_many` (nrt.h: nrt_tensor_write_batch)."""
        write_tensors([(self, runs)])

    def copy_to(
        self,
        destination: "NrtTensor",
        *,
        offset: int = 0,
        destination_offset: int = 0,
        num_bytes: int | None = None,
    ) -> None:
        """Copy on the device, up to the end if not told otherwise. Both are of one core, or it is
        INVALID (nrt.h: nrt_tensor_copy)."""
        count = self.num_bytes - offset if num_bytes is None else num_bytes
        self.check(offset, count)
        destination.check(destination_offset, count)
        with self.handle.use() as source, destination.handle.use() as target:
            arguments = (source, offset, target, destination_offset, count)
            self.runtime.call("nrt_tensor_copy", *arguments)

    def fill(self, value: int, offset: int = 0, num_bytes: int | None = None) -> None:
        """Put this byte everywhere, up to the end if not told otherwise (nrt.h:
        nrt_tensor_memset)."""
        if not 0 <= value <= 255:
            raise ValueError(f"{value} is no byte")
        count = self.num_bytes - offset if num_bytes is None else num_bytes
        self.check(offset, count)
        with self.handle.use() as pointer:
            self.runtime.call("nrt_tensor_memset", pointer, offset, value, count)

    def slice(self, offset: int, num_bytes: int, name: str) -> "NrtTensor":
        """A tensor over a part of this one's memory; keeps the memory, whoever is freed first
        (nrt.h: nrt_tensor_allocate_slice)."""
        self.check(offset, num_bytes)
        found = ctypes.c_void_p()
        with self.handle.use() as pointer:
            arguments = (pointer, offset, num_bytes, name, ctypes.byref(found))
            self.runtime.call("nrt_tensor_allocate_slice", *arguments)
            part = NrtTensor(self.runtime, found.value or 0, num_bytes, self.core, name)
            part.handle.needs(self.handle)
            return part

    def size_in_library(self) -> int:
        """As the library has it, which is `num_bytes` (nrt.h: nrt_tensor_get_size)."""
        with self.handle.use() as pointer:
            return cast("int", self.runtime.call("nrt_tensor_get_size", pointer))

    def allocation_info(self) -> AllocationInfo:
        """Of a device tensor (nrt.h: nrt_tensor_get_device_allocation_info)."""
        found = AllocationInfoStruct()
        with self.handle.use() as pointer:
            name = "nrt_tensor_get_device_allocation_info"
            self.runtime.call(name, pointer, ctypes.byref(found))
        return AllocationInfo(found.physical_address, found.size, found.hbm_index)

    def wait_for_output(self, expected_count: int, timeout_s: float) -> None:
        """Until models have written it so many times; NrtRetry TIMEOUT by then (nrt.h:
        nrt_tensor_check_output_completion)."""
        if timeout_s < 0:  # which the library takes for ever
            raise ValueError(f"a time-out of {timeout_s} s")
        with self.handle.use() as pointer:
            arguments = (pointer, round(timeout_s * 1e6), expected_count)
            self.runtime.call("nrt_tensor_check_output_completion", *arguments)

    def reset_output(self) -> None:
        """Count from nothing again (nrt.h: nrt_tensor_reset_output_completion)."""
        with self.handle.use() as pointer:
            self.runtime.call("nrt_tensor_reset_output_completion", pointer)

    def free(self) -> None:
        """Give it up; a second time it does nothing. Its memory stays until slices, sets, calls and
        requests that need it are through (nrt.h: nrt_tensor_free)."""
        self.handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def __repr__(self) -> str:
        return f"NrtTensor({self.name!r}, {self.num_bytes} bytes, core {self.core})"

    def check(self, offset: int, num_bytes: int) -> None:
        """ValueError unless these bytes are in it."""
        check_range(f"tensor {self.name!r}", offset, num_bytes, self.num_bytes)

    def move(self, function: str, offset: int, memory: NDArray[np.uint8]) -> None:
        """Call this with host memory and a place in the tensor."""
        self.check(offset, memory.nbytes)
        with self.handle.use() as pointer:
            self.runtime.call(function, pointer, address_of(memory), offset, memory.nbytes)


def read_tensors(parts: Sequence[tuple[NrtTensor, ReadRuns]]) -> None:
    """`NrtTensor.read_many` for many tensors of one runtime, in one call if the library has it."""
    _move_many("nrt_tensor_read", parts, writable_bytes_of)


def write_tensors(parts: Sequence[tuple[NrtTensor, WriteRuns]]) -> None:
    """`NrtTensor.write_many` for many tensors of one runtime."""
    _move_many("nrt_tensor_write", parts, bytes_of)


def _move_many(
    function: str,
    parts: Sequence[tuple[NrtTensor, Sequence[tuple[int, Any]]]],
    memory_of: Callable[[Any], Any],
) -> None:
    checked = []
    for tensor, runs in parts:
        memories = [(offset, memory_of(buffer)) for offset, buffer in runs]
        for offset, memory in memories:
            tensor.check(offset, memory.nbytes)
        if memories:
            checked.append((tensor, memories))
    if not checked:
        return
    runtime = checked[0][0].runtime
    if not runtime.library.has(f"{function}_batch"):
        for tensor, memories in checked:
            for offset, memory in memories:
                tensor.move(function, offset, memory)
        return
    held: list[Handle] = []
    try:
        batches = (BatchStruct * len(checked))()
        for batch, (tensor, memories) in zip(batches, checked, strict=True):
            batch.tensor = tensor.handle.hold()
            held.append(tensor.handle)
            batch.num_ops = len(memories)
            operations = (BatchOperationStruct * len(memories))()
            for operation, (offset, memory) in zip(operations, memories, strict=True):
                operation.offset, operation.size = operator.index(offset), memory.nbytes
                operation.buffer = address_of(memory)
            batch.ops = operations
        runtime.call(f"{function}_batch", batches, len(checked), False)
    finally:
        for handle in held:
            handle.release()
