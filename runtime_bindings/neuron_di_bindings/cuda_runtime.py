"""NVIDIA's CUDA runtime library, by ctypes: memory, streams, events, and what processes share.

Nothing is loaded before `load_cuda`. Source of all signatures: cuda_runtime_api.h of CUDA 12.9 and
13; the batched copy takes other arguments in 13. Addresses, streams and events are plain numbers.
Streams and memory belong to the device that is the calling thread's current one when they are made.

Every function raises CudaError, by CUDA's own name of the error. A failed call leaves no error
behind that other users of the library in this process would find.
"""

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

CUDA_VERSION_MIN = 12_000  # an opened handle can be opened again, and its users are counted
PATH_VARIABLE = "NEURON_DI_CUDART"

MemoryKind = Literal["unregistered", "host", "device", "managed"]
Pointers = NDArray[np.uint64]

_KINDS: tuple[MemoryKind, ...] = ("unregistered", "host", "device", "managed")
_HANDLE_BYTES = 64
_NOT_READY = 600
# cudaErrorCallRequiresNewerDriver, SymbolNotFound, NotSupported: a driver older than the library.
_NO_BATCH = (36, 500, 801)
_COPY_DEFAULT = 4  # the direction follows from the addresses
_STREAM_NON_BLOCKING = 1
_EVENT_BLOCKING_SYNC, _EVENT_DISABLE_TIMING, _EVENT_INTERPROCESS = 1, 2, 4
_LAZY_ENABLE_PEER_ACCESS = 1
_HOST_REGISTER_PORTABLE = 1
_ATTRIBUTE_MULTIPROCESSORS, _ATTRIBUTE_IPC_EVENTS = 16, 125
_BATCH_VERSION, _BATCH_OF_8_VERSION = 12_080, 13_000
_STREAM_ORDER, _PREFER_OVERLAP = 1, 1
_NAMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")


class CudaMissing(Exception):
    """Raised when there is no CUDA runtime library, or none that can be used."""


class CudaError(Exception):
    """Raised when a CUDA call fails. `name` is CUDA's: "cudaErrorInvalidValue"."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function}: {name}")
        self.code = code
        self.name = name


def check_driver(function: str, code: int) -> None:
    """Of a function of the driver's: CudaError where it failed."""
    if code:
        raise CudaError(function, code, f"driver error {code}")


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * _HANDLE_BYTES),)


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("destination_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


def load_cuda(path: str | None = None) -> "CudaRuntime":
    """The library at this path, or at $NEURON_DI_CUDART, or the first that works of those that
    NVIDIA's Python packages and the system have. CudaMissing, which says why each did not."""
    path = path or os.environ.get(PATH_VARIABLE)
    tried = []
    for candidate in [path] if path else [*_packaged(), *_NAMES]:
        try:
            runtime = CudaRuntime(ctypes.CDLL(candidate))
            runtime.num_devices()  # else the driver is older than the library, or not there
        except (OSError, AttributeError, CudaMissing, CudaError) as error:
            tried.append(f"{candidate}: {error}")
        else:
            return runtime
    raise CudaMissing(f"no CUDA runtime library can be loaded ({'; '.join(tried)})")


def _packaged() -> list[str]:
    """Those of the packages nvidia-cuda-runtime and nvidia-cuda-runtime-cu12."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else spec.submodule_search_locations or []
    found = [path for folder in folders for path in Path(folder).glob("cu*/lib/libcudart.so.1[23]")]
    return [str(path) for path in sorted(found, key=lambda path: path.name, reverse=True)]


class CudaRuntime:
    """One loaded library. Thread-safe, as CUDA is."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.cudaGetErrorName.restype = ctypes.c_char_p
        for name in ("cudaGetErrorName", "cudaGetLastError"):
            getattr(library, name).argtypes = (ctypes.c_int,) if name.endswith("Name") else ()
        self.version = self._number("cudaRuntimeGetVersion")
        if self.version < CUDA_VERSION_MIN:
            raise CudaMissing(f"the CUDA runtime is {self.version}, {CUDA_VERSION_MIN} is needed")
        self._has_batch = self.version >= _BATCH_VERSION and hasattr(
            library, "cudaMemcpyBatchAsync"
        )

    # Devices.

    def num_devices(self) -> int:
        return self._number("cudaGetDeviceCount")

    def set_device(self, device: int) -> None:
        """Make it the calling thread's current one."""
        self._call("cudaSetDevice", ctypes.c_int(device))

    @contextlib.contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        """The calling thread's current device is this one, within the block and after it.

        The former one is not restored: on a fresh thread that is device 0, and making it current
        would set up a context there, of hundreds of megabytes.
        """
        if self._number("cudaGetDevice") != device:
            self.set_device(device)
        yield

    def device_uuid(self, device: int) -> bytes:
        """16 bytes, the same for every process. Of a MIG instance as CUDA has them."""
        properties = ctypes.create_string_buffer(8192)  # name[256], uuid[16], … of any version
        name = "cudaGetDeviceProperties"
        if hasattr(self._library, f"{name}_v2"):
            name = f"{name}_v2"
        self._call(name, properties, ctypes.c_int(device))
        return properties.raw[256:272]

    def shares_events(self, device: int) -> bool:
        """Whether the device's memory and events can be opened by other processes."""
        arguments = (ctypes.c_int(_ATTRIBUTE_IPC_EVENTS), ctypes.c_int(device))
        return bool(self._number("cudaDeviceGetAttribute", *arguments))

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether one device reads the other's memory."""
        return bool(self._number("cudaDeviceCanAccessPeer", ctypes.c_int(device), _int(peer)))

    def num_multiprocessors(self, device: int) -> int:
        arguments = (ctypes.c_int(_ATTRIBUTE_MULTIPROCESSORS), ctypes.c_int(device))
        return self._number("cudaDeviceGetAttribute", *arguments)

    def driver_function(self, name: str) -> int:
        """Address of one of the driver's own functions, for what the runtime has none for."""
        function, status = ctypes.c_void_p(), ctypes.c_int()
        symbol = ctypes.c_char_p(name.encode())
        rest = (ctypes.c_ulonglong(0), ctypes.byref(status))
        if hasattr(self._library, "cudaGetDriverEntryPointByVersion"):
            rest = (ctypes.c_uint(CUDA_VERSION_MIN), *rest)  # type: ignore[assignment]
            self._call("cudaGetDriverEntryPointByVersion", symbol, ctypes.byref(function), *rest)
        else:
            self._call("cudaGetDriverEntryPoint", symbol, ctypes.byref(function), *rest)
        if not function.value:
            raise CudaError(name, 801, "cudaErrorNotSupported")
        return function.value

    # Memory.

    def allocate(self, num_bytes: int) -> int:
        """By cudaMalloc: memory that can be exported. OverflowError for what no device has."""
        if not 0 < num_bytes < 1 << 63:  # ctypes would take it modulo 2**64
            raise OverflowError(f"{num_bytes} bytes")
        return self._address("cudaMalloc", ctypes.c_size_t(num_bytes))

    def free(self, address: int) -> None:
        """Waits until the device is done with it."""
        self._call("cudaFree", ctypes.c_void_p(address))

    def allocate_pinned(self, num_bytes: int) -> int:
        """Host memory that the device reaches by itself."""
        return self._address("cudaMallocHost", ctypes.c_size_t(num_bytes))

    def free_pinned(self, address: int) -> None:
        self._call("cudaFreeHost", ctypes.c_void_p(address))

    def pin(self, address: int, num_bytes: int) -> None:
        """Make existing host memory such memory."""
        flags = ctypes.c_uint(_HOST_REGISTER_PORTABLE)
        self._call("cudaHostRegister", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), flags)

    def unpin(self, address: int) -> None:
        self._call("cudaHostUnregister", ctypes.c_void_p(address))

    def memory_kind(self, address: int) -> MemoryKind:
        attributes = (ctypes.c_int * 64)()  # type, device, …
        self._call("cudaPointerGetAttributes", attributes, ctypes.c_void_p(address))
        return _KINDS[attributes[0]]

    def extent(self, address: int) -> tuple[int, int]:
        """Where the allocation that holds this device address begins, and its bytes."""
        takes = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 2, ctypes.c_ulonglong)
        function = takes(self.driver_function("cuMemGetAddressRange"))
        base, size = ctypes.c_ulonglong(), ctypes.c_size_t()
        check_driver(
            "cuMemGetAddressRange",
            function(ctypes.addressof(base), ctypes.addressof(size), address),
        )
        return base.value, size.value

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        """Write this byte everywhere, in the stream's order."""
        arguments = (ctypes.c_void_p(address), _int(value), ctypes.c_size_t(num_bytes))
        self._call("cudaMemsetAsync", *arguments, ctypes.c_void_p(stream))

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        """In the stream's order. Between any memories; with unpinned host memory it may block."""
        arguments = (ctypes.c_void_p(destination), ctypes.c_void_p(source))
        rest = (ctypes.c_size_t(num_bytes), _int(_COPY_DEFAULT), ctypes.c_void_p(stream))
        self._call("cudaMemcpyAsync", *arguments, *rest)

    def copy_runs(
        self,
        destinations: Pointers,
        sources: Pointers,
        lengths: Pointers,
        stream: int,
        *,
        is_batched: bool = True,
    ) -> None:
        """Copy lengths[i] bytes, for each i, in no order among themselves.

        Batched, it is one call (CUDA 12.8), and no memory may be host memory that is not pinned.
        The arrays stay as they are until the stream has come past it. After a CudaError some of
        the copies may be on their way.
        """
        if not len(lengths):
            return
        if is_batched and self._has_batch and len(lengths) > 1:
            try:
                self._copy_batch(destinations, sources, lengths, stream)
            except CudaError as error:
                # If it is more than the driver's age, it shows again; what is copied twice is
                # copied in the stream's order.
                self._copy_each(destinations, sources, lengths, stream)
                self._has_batch = error.code not in _NO_BATCH
            return
        self._copy_each(destinations, sources, lengths, stream)

    def _copy_batch(self, to: Pointers, sources: Pointers, lengths: Pointers, stream: int) -> None:
        # Copy engines rather than multiprocessors, where there is a choice: those compute.
        attributes = _CopyAttributes(source_access_order=_STREAM_ORDER, flags=_PREFER_OVERLAP)
        first = ctypes.c_size_t(0)
        rows = [ctypes.c_void_p(row.ctypes.data) for row in (to, sources, lengths)]
        arguments = [*rows, ctypes.c_size_t(len(lengths)), ctypes.byref(attributes)]
        arguments += [ctypes.byref(first), ctypes.c_size_t(1)]
        if self.version < _BATCH_OF_8_VERSION:
            failed = ctypes.c_size_t()
            arguments.append(ctypes.byref(failed))
        self._call("cudaMemcpyBatchAsync", *arguments, ctypes.c_void_p(stream))

    def _copy_each(self, to: Pointers, sources: Pointers, lengths: Pointers, stream: int) -> None:
        rows = (to.tolist(), sources.tolist(), lengths.tolist())
        for destination, source, length in zip(*rows, strict=True):
            self.copy(destination, source, length, stream)

    # Streams and events.

    def create_stream(self) -> int:
        """One that waits for no other."""
        return self._address("cudaStreamCreateWithFlags", ctypes.c_uint(_STREAM_NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        """Returns at once: what was launched still runs."""
        self._call("cudaStreamDestroy", ctypes.c_void_p(stream))

    def synchronize(self, stream: int) -> None:
        """Wait for all that was launched."""
        self._call("cudaStreamSynchronize", ctypes.c_void_p(stream))

    def wait_in_stream(self, stream: int, event: int) -> None:
        """What is launched from now on starts after what the event last captured. No waiting."""
        arguments = (ctypes.c_void_p(stream), ctypes.c_void_p(event), ctypes.c_uint(0))
        self._call("cudaStreamWaitEvent", *arguments)

    def create_event(self, *, is_shared: bool = False, is_short: bool = False) -> int:
        """Who synchronizes with it sleeps, or, if `is_short`, takes a core instead: waking up takes
        as long as some copies. `is_shared`: other processes can open it."""
        flags = _EVENT_DISABLE_TIMING | (0 if is_short else _EVENT_BLOCKING_SYNC)
        flags |= _EVENT_INTERPROCESS if is_shared else 0
        return self._address("cudaEventCreateWithFlags", ctypes.c_uint(flags))

    def destroy_event(self, event: int) -> None:
        self._call("cudaEventDestroy", ctypes.c_void_p(event))

    def record(self, event: int, stream: int) -> None:
        """Capture what was launched on the stream so far, in the place of what it captured."""
        self._call("cudaEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def is_done(self, event: int) -> bool:
        """Whether what the event last captured has run; True where it captured nothing."""
        code = self._library.cudaEventQuery(ctypes.c_void_p(event))
        if code == _NOT_READY:
            self._library.cudaGetLastError()
            return False
        self._check("cudaEventQuery", code)
        return True

    def synchronize_event(self, event: int) -> None:
        """Until what the event last captured has run."""
        self._call("cudaEventSynchronize", ctypes.c_void_p(event))

    # Between processes of one host.

    def memory_handle(self, address: int) -> bytes:
        """Of an allocation, by its first address; 64 bytes. Another process can open it."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle.bytes)

    def open_memory(self, handle: bytes) -> int:
        """Another process's memory: its address here. Each opening needs a closing."""
        flags = ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
        return self._address("cudaIpcOpenMemHandle", _Handle.from_buffer_copy(handle), flags)

    def close_memory(self, address: int) -> None:
        """Not before the last copy out of it has ended."""
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def event_handle(self, event: int) -> bytes:
        """As `memory_handle`, of an event that is shared."""
        handle = _Handle()
        self._call("cudaIpcGetEventHandle", ctypes.byref(handle), ctypes.c_void_p(event))
        return bytes(handle.bytes)

    def open_event(self, handle: bytes) -> int:
        """Another process's event. To be destroyed as an own one."""
        return self._address("cudaIpcOpenEventHandle", _Handle.from_buffer_copy(handle))

    def _address(self, function: str, *arguments: object) -> int:
        """What the call puts where its first argument points to."""
        found = ctypes.c_void_p()
        self._call(function, ctypes.byref(found), *arguments)
        return found.value or 0

    def _number(self, function: str, *arguments: object) -> int:
        found = ctypes.c_int()
        self._call(function, ctypes.byref(found), *arguments)
        return found.value

    def _call(self, function: str, *arguments: object) -> None:
        self._check(function, getattr(self._library, function)(*arguments))

    def _check(self, function: str, code: int) -> None:
        if code:
            self._library.cudaGetLastError()
            name = self._library.cudaGetErrorName(code) or b"an unknown error"
            raise CudaError(function, code, name.decode(errors="replace"))


def _int(number: int) -> ctypes.c_int:
    return ctypes.c_int(number)
