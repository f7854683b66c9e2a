"""Compiled models in a core: load, name their tensors, run.

So far this has run on a simulator of libnrt only, which takes models of its own kind.
"""

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, Self

from neuron_di_bindings.nrt.buffers import Readable, address_of, bytes_of
from neuron_di_bindings.nrt.handle import Handle
from neuron_di_bindings.nrt.status import NrtMisuse
from neuron_di_bindings.nrt.structs import TensorInfoArrayStruct, TensorInfoStruct
from neuron_di_bindings.nrt.tensor import NrtTensor

if TYPE_CHECKING:
    from neuron_di_bindings.nrt.runtime import NrtRuntime

_FIRST_FREE = -1


class NrtType(IntEnum):
    """Of a tensor's elements (nrt.h: nrt_dtype_t)."""

    UNKNOWN = 0
    UINT64 = 1
    INT8 = 2
    UINT8 = 3
    INT16 = 4
    UINT16 = 5
    BF16 = 6
    FP16 = 7
    INT32 = 8
    UINT32 = 9
    FP32 = 10
    FP32R = 11
    INT64 = 12
    FP8_E3 = 13
    FP8_E4 = 14
    FP8_E5 = 15


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One input or output that a model declares."""

    name: str
    usage: Literal["input", "output"]
    num_bytes: int
    dtype: NrtType
    shape: tuple[int, ...]


class TensorSet:
    """Tensors by the names that a model knows them by. Owned by whoever made it, who destroys it;
    keeps its tensors. The same tensor may be in the inputs and in the outputs: then the model
    changes it in place."""

    def __init__(self, runtime: "NrtRuntime", label: str = "tensor set") -> None:
        """Empty (nrt.h: nrt_allocate_tensor_set)."""
        found = ctypes.c_void_p()
        runtime.call("nrt_allocate_tensor_set", ctypes.byref(found))
        self.runtime = runtime
        self.handle = runtime.own(label, found.value or 0, "nrt_destroy_tensor_set")
        self._lock = threading.Lock()
        self._tensors: dict[str, NrtTensor] = {}
        self.handle.at_end(self._release)

    @contextlib.contextmanager
    def use(self) -> Iterator[int]:
        """Its pointer, for an execution: within the block it has the same tensors."""
        with self._lock:
            pointer = self.handle.hold()
        try:
            yield pointer
        finally:
            self.handle.release()

    def add(self, name: str, tensor: NrtTensor) -> None:
        """Name a tensor, in the place of what had the name (nrt.h:
        nrt_add_tensor_to_tensor_set). NrtMisuse while an execution with the set runs, or was not
        seen to be over."""
        with self._lock:
            if self.handle.is_used():
                raise NrtMisuse(f"{self.handle.label} is changed while an execution uses it")
            with self.handle.use() as pointer:
                held = tensor.handle.hold()
                try:
                    self.runtime.call("nrt_add_tensor_to_tensor_set", pointer, name, held)
                except BaseException:
                    tensor.handle.release()
                    raise
            before = self._tensors.get(name)
            self._tensors[name] = tensor
        if before is not None:
            before.handle.release()

    def get(self, name: str) -> NrtTensor:
        """The tensor of this name, by the library (nrt.h: nrt_get_tensor_from_tensor_set).
        NrtRequestError where there is none."""
        found = ctypes.c_void_p()
        with self._lock, self.handle.use() as pointer:
            name_of = "nrt_get_tensor_from_tensor_set"
            self.runtime.call(name_of, pointer, name, ctypes.byref(found))
            return self._tensors[name]

    def names(self) -> tuple[str, ...]:
        """In the order in which they came."""
        return tuple(self._tensors)

    def destroy(self) -> None:
        """Give it up; a second time it does nothing (nrt.h: nrt_destroy_tensor_set)."""
        self.handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def _release(self) -> None:
        for tensor in self._tensors.values():
            tensor.handle.release()


class NrtModel:
    """A model in a core. Owned by whoever loaded it, who unloads it. Any thread may run it; two
    runs that write the same tensors have no order but the caller's. `core` is None where the
    library chose."""

    def __init__(self, runtime: "NrtRuntime", handle: Handle, core: int | None) -> None:
        self.runtime = runtime
        self.handle = handle
        self.core = core

    @classmethod
    def load(
        cls, runtime: "NrtRuntime", neff: Readable, core: int | None, num_cores: int = -1
    ) -> "NrtModel":
        """Load a compiled model into a core; None: the first free one. `num_cores` is out of use,
        and stays -1 (nrt.h: nrt_load)."""
        return cls._load(runtime, "nrt_load", neff, core, (num_cores,))

    @classmethod
    def load_collectives(
        cls, runtime: "NrtRuntime", neff: Readable, core: int | None, rank: int, num_ranks: int
    ) -> "NrtModel":
        """As `load`, of a model that communicates with those of other ranks (nrt.h:
        nrt_load_collectives)."""
        return cls._load(runtime, "nrt_load_collectives", neff, core, (-1, rank, num_ranks))

    @classmethod
    def _load(
        cls,
        runtime: "NrtRuntime",
        function: str,
        neff: Readable,
        core: int | None,
        rest: tuple[int, ...],
    ) -> "NrtModel":
        memory = bytes_of(neff)
        if core is not None and core < 0:
            raise ValueError(f"core {core}")
        place = _FIRST_FREE if core is None else core
        found = ctypes.c_void_p()
        arguments = (address_of(memory), memory.nbytes, place, *rest, ctypes.byref(found))
        runtime.call(function, *arguments)
        label = f"a model of core {place}" if core is not None else "a model"
        return cls(runtime, runtime.own(label, found.value or 0, "nrt_unload"), core)

    def num_cores(self) -> int:
        """That it takes (nrt.h: nrt_get_model_vnc_count)."""
        found = ctypes.c_uint32()
        with self.handle.use() as pointer:
            self.runtime.call("nrt_get_model_vnc_count", pointer, ctypes.byref(found))
        return found.value

    def tensor_infos(self) -> tuple[TensorInfo, ...]:
        """What it declares (nrt_experimental.h: nrt_get_model_tensor_info,
        nrt_free_model_tensor_info)."""
        found = ctypes.POINTER(TensorInfoArrayStruct)()
        with self.handle.use() as pointer:
            self.runtime.call("nrt_get_model_tensor_info", pointer, ctypes.byref(found))
            try:
                count = found.contents.tensor_count
                start = ctypes.addressof(found.contents) + TensorInfoArrayStruct.tensor_array.offset
                return tuple(_info(row) for row in (TensorInfoStruct * count).from_address(start))
            finally:
                self.runtime.call("nrt_free_model_tensor_info", found)

    def execute(self, inputs: TensorSet, outputs: TensorSet, num_times: int = 1) -> None:
        """Run it, and wait (nrt.h: nrt_execute, nrt_execute_repeat)."""
        if num_times < 1:
            raise ValueError(f"to run it {num_times} times")
        with contextlib.ExitStack() as stack:
            used = (self.handle, inputs, outputs)
            pointers = [stack.enter_context(each.use()) for each in used]
            if num_times == 1:
                self.runtime.call("nrt_execute", *pointers)
            else:
                self.runtime.call("nrt_execute_repeat", *pointers, num_times)

    def unload(self) -> None:
        """Give it up; a second time it does nothing (nrt.h: nrt_unload)."""
        self.handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.unload()


def _info(row: TensorInfoStruct) -> TensorInfo:
    known = row.dtype in {int(each) for each in NrtType}
    return TensorInfo(
        name=row.name.decode(errors="replace"),
        usage="output" if row.usage else "input",
        num_bytes=row.size,
        dtype=NrtType(row.dtype) if known else NrtType.UNKNOWN,
        shape=tuple(row.shape[: row.ndim]) if row.ndim else (),
    )
