"""The runtime of one process: started once, by us or by somebody else, and what lives in it.

So far this has run on a simulator of libnrt only.
"""

import contextlib
import ctypes
import os
import threading
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from neuron_di_bindings.nrt import instance
from neuron_di_bindings.nrt.buffers import (
    Readable,
    Writable,
    address_of,
    bytes_of,
    writable_bytes_of,
)
from neuron_di_bindings.nrt.cores import Cores
from neuron_di_bindings.nrt.handle import Handle
from neuron_di_bindings.nrt.instance import InstanceInfo, MemoryStats
from neuron_di_bindings.nrt.library import NrtLibrary
from neuron_di_bindings.nrt.status import NrtError, NrtMisuse, NrtStatus
from neuron_di_bindings.nrt.tensor import NrtTensor

if TYPE_CHECKING:
    from neuron_di_bindings.nrt.queues import AsyncQueue

Placement = Literal["device", "host"]

_PLACEMENTS: dict[Placement, int] = {"device": 0, "host": 1}
_NO_CORE = -1
_END_TIMEOUT_S = 10.0


class Framework(IntEnum):
    """Who uses the runtime (nrt.h: nrt_framework_type_t)."""

    NO_FW = 1
    TENSORFLOW = 2
    PYTORCH = 3
    MXNET = 4
    PRECHECK = 5


class NrtRuntime:
    """libnrt in this process. Several may exist, but one of them at most starts the runtime.

    Without `init` it works once somebody else in the process (torch) has started the runtime;
    before that, calls fail with UNINITIALIZED. Whoever started it closes it. Owns its tensors,
    models and sets: those that are left end with it. Any thread may call. Stays, with all that the
    library may still write to, until `close`.
    """

    _all: ClassVar["set[NrtRuntime]"] = set()  # that are not closed
    _starting: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, library: NrtLibrary) -> None:
        self.library = library
        self.cores = Cores()  # of its send and receive
        self.queues: list[AsyncQueue] = []  # that are not closed
        self._lock = threading.Condition()
        self._is_owner = False
        self._is_closed = False
        self._num_calls = 0
        self._handles: dict[int, Handle] = {}  # what the library has of ours, oldest first
        NrtRuntime._all.add(self)

    def init(
        self, framework: Framework = Framework.NO_FW, *, version: str = "", layer_version: str = ""
    ) -> Self:
        """Start the runtime: takes the cores that the environment makes visible (nrt.h: nrt_init).

        NrtMisuse if it was started through this library already.
        """
        with NrtRuntime._starting:
            if self.library.started_by is not None:
                raise NrtMisuse("the runtime of this process was started before")
            try:
                self.call("nrt_init", int(framework), version, layer_version)
            except NrtError as error:
                if error.status == NrtStatus.FAILURE:
                    error.add_note(
                        "somebody else in this process may have started it: "
                        "then use NrtRuntime without init"
                    )
                raise
            self.library.started_by = os.getpid()
            self._is_owner = True
        return self

    def close(self) -> None:
        """End what is left, and the runtime if it was started here (nrt.h: nrt_close). A second
        time it does nothing.

        NrtMisuse, and nothing has happened, while a call runs, the send and receive of a core is
        open or lost, something scheduled is not over, or another NrtRuntime has anything on what
        this one started. NrtMisuse, and it can be closed again, if after 10 s other threads are
        still about to use what it owns.
        """
        others = self._other_users() if self._is_owner else []
        for queue in [queue for each in (self, *others) for queue in each.queues]:
            with contextlib.suppress(NrtError, NrtMisuse):
                queue.num_pending()  # finds what is over and nobody asked for
        with self._lock:
            reasons = [reason for each in (self, *others) for reason in each.objections()]
            if count := sum(each.num_handles for each in others):
                reasons.append(f"another NrtRuntime has {count} tensors, models or sets")
            if reasons:
                raise NrtMisuse(f"the runtime can't be closed: {'; '.join(reasons)}")
            self._is_closed = True
            left = list(self._handles.values())
        with contextlib.ExitStack() as stack:
            stack.callback(self._finish)
            for handle in left:  # the last one first
                stack.callback(handle.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Instance and cores.

    def total_cores(self) -> int:
        """Of the instance; before `init`, too (nrt.h: nrt_get_total_vnc_count)."""
        return self._count("nrt_get_total_vnc_count", "nrt_get_total_nc_count")

    def visible_cores(self) -> int:
        """That this process may use; before `init`, too (nrt.h: nrt_get_visible_vnc_count)."""
        return self._count("nrt_get_visible_vnc_count", "nrt_get_visible_nc_count")

    def instance(self) -> InstanceInfo:
        """What this runs on (nrt.h: nrt_get_instance_info)."""
        return instance.instance_info(self.call)

    def memory_stats(self, core: int) -> MemoryStats:
        """Of a core, as this process numbers it (nrt.h: nrt_get_vnc_memory_stats)."""
        return instance.memory_stats(self.call, core)

    def host_device_id(self, device: int) -> int:
        """The host's number of a device (nrt.h: nrt_host_device_id_get)."""
        found = ctypes.c_uint32()
        self.call("nrt_host_device_id_get", device, ctypes.byref(found))
        return found.value

    def routing_ids(self) -> tuple[int, ...]:
        """By the host's numbers of devices (nrt.h: nrt_host_device_id_rid_map_get)."""
        return instance.routing_ids(self.call)

    # Memory.

    def allocate(
        self, num_bytes: int, core: int, name: str, placement: Placement = "device"
    ) -> NrtTensor:
        """Device memory of a core, as this process numbers it, or host memory for it; to be freed
        (nrt.h: nrt_tensor_allocate). NrtRequestError RESOURCE where there isn't so much."""
        found = ctypes.c_void_p()
        place = core if placement == "device" else _NO_CORE
        arguments = (_PLACEMENTS[placement], place, num_bytes, name, ctypes.byref(found))
        self.call("nrt_tensor_allocate", *arguments)
        return NrtTensor(self, found.value or 0, num_bytes, core, name)

    def wrap(self, buffer: Writable, core: int, name: str) -> NrtTensor:
        """A tensor over host memory, which it keeps, for use with a core; to be freed (nrt.h:
        nrt_tensor_allocate_empty, nrt_tensor_attach_buffer)."""
        memory = writable_bytes_of(buffer)
        found = ctypes.c_void_p()
        self.call("nrt_tensor_allocate_empty", name, ctypes.byref(found))
        tensor = NrtTensor(self, found.value or 0, memory.nbytes, core, name)
        tensor.handle.keep(memory)
        try:
            pointer = found.value
            self.call("nrt_tensor_attach_buffer", pointer, address_of(memory), memory.nbytes)
        except BaseException:
            tensor.free()
            raise
        return tensor

    def attached_efa(self, address: int) -> str | None:
        """PCI address ("0000:00:1e.0") of the EFA adapter next to this device address. None where
        there is none, and where the library, older than SDK 2.29, can't tell (nrt.h:
        nrt_get_attached_efa_bdf)."""
        return instance.attached_efa(self.library, self.call, address)

    def dmabuf_fd(self, address: int, num_bytes: int) -> int:
        """A dma-buf over this range of device addresses. The caller closes it (nrt.h:
        nrt_get_dmabuf_fd)."""
        found = ctypes.c_int(-1)
        self.call("nrt_get_dmabuf_fd", address, num_bytes, ctypes.byref(found))
        return found.value

    def dmabuf_place(self, address: int, num_bytes: int) -> tuple[int, int]:
        """As `dmabuf_fd`, and where in it the range begins (libfabric, hmem_neuron.c:
        nrt_get_dmabuf_fd_v2). NrtUnsupported where the library lacks it."""
        found, offset = ctypes.c_int(-1), ctypes.c_uint64()
        arguments = (ctypes.byref(found), ctypes.byref(offset))
        self.call("nrt_get_dmabuf_fd_v2", address, num_bytes, *arguments)
        return found.value, offset.value

    def hbm_window(self, device: int, hbm: int) -> tuple[int, int] | None:
        """Address and bytes of the host's window to a device's memory; None where a device has no
        such memory (nrt.h: nrt_get_hbm_mmap_va)."""
        return instance.hbm_window(self.call, device, hbm)

    def copy_to_device(self, address: int, data: Readable) -> None:
        """Put host memory at an address within the host's window (nrt_experimental.h:
        nrt_memcpy_to_device)."""
        memory = bytes_of(data)
        self.call("nrt_memcpy_to_device", address, address_of(memory), memory.nbytes)

    # For the classes of this package.

    def call(self, name: str, *arguments: Any) -> Any:
        """As NrtLibrary.call. NrtMisuse after `close`."""
        with self._lock:
            if self._is_closed:
                raise NrtMisuse(f"{name}: the runtime is closed")
            self._num_calls += 1
        try:
            return self.library.call(name, *arguments)
        finally:
            with self._lock:
                self._num_calls -= 1

    @property
    def num_handles(self) -> int:
        """Tensors, models, sets and the like that the library has for it."""
        return len(self._handles)

    def own(self, label: str, pointer: int, destroy: str) -> Handle:
        """A handle that ends with the runtime at the latest, by this function of the library."""

        def end(pointer: int) -> None:
            by_value = destroy in ("nrt_unload", "nrta_error_tracker_destroy")
            place = ctypes.c_void_p(pointer)
            try:
                if self._is_owner or self.library.is_started():  # it may have been closed before us
                    self.library.call(destroy, place if by_value else ctypes.byref(place))
            finally:
                with self._lock:
                    del self._handles[id(handle)]
                    self._lock.notify_all()

        handle = Handle(label, pointer, end)
        with self._lock:
            if self._is_closed:  # since the call: it has ended with the runtime
                raise NrtMisuse(f"{label}: the runtime is closed")
            self._handles[id(handle)] = handle
        self.library.started_by = os.getpid()  # by somebody
        return handle

    def objections(self) -> list[str]:
        """Why it can't be closed now. Takes no lock and calls nothing."""
        asked: tuple[Cores | AsyncQueue, ...] = (self.cores, *self.queues)
        found = [reason for each in asked if (reason := each.objection()) is not None]
        return found + ([f"{self._num_calls} calls are running"] if self._num_calls else [])

    def _finish(self) -> None:
        """Once no thread uses the handles any more: all of them were given up."""
        with self._lock:
            if not self._lock.wait_for(lambda: not self._handles, _END_TIMEOUT_S):
                labels = ", ".join(handle.label for handle in self._handles.values())
                raise NrtMisuse(f"the runtime isn't closed: in use are still {labels}")
        with NrtRuntime._starting:
            if self._is_owner:
                self.library.call("nrt_close")
                self.library.started_by = None
                self._is_owner = False
            NrtRuntime._all.discard(self)

    def _other_users(self) -> "list[NrtRuntime]":
        everyone = list(NrtRuntime._all)
        return [each for each in everyone if each.library is self.library and each is not self]

    def _count(self, name: str, older: str) -> int:
        found = ctypes.c_uint32()
        name = name if self.library.has(name) else older
        self.call(name, ctypes.byref(found))
        return found.value
