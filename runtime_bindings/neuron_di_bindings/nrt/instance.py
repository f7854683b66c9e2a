"""What a library says of the instance and its memory, as plain values.

`call` is that of a runtime. So far this has run on a simulator of libnrt only.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from neuron_di_bindings.nrt.library import NrtLibrary
from neuron_di_bindings.nrt.status import NrtRequestError, NrtStatus
from neuron_di_bindings.nrt.structs import InstanceInfoStruct, MemoryStatsStruct

Call = Callable[..., Any]

_FAMILIES = (
    *("unknown", "INF1", "TRN1", "TRN1N", "INF2", "TRN2", "TRN2N", "INF2E", "TRN2P", "TRN2U"),
    *("TRN2E", "TRN2EU", "TRN2AC", "TRN2UAC", "TRN3", "TRN3PDS98"),
)
_SIZES = ("1xl", "2xl", "4xl", "6xl", "8xl", "24xl", "32xl", "48xl", "3xl", "unknown")
_BDF_BYTES = 64  # "0000:00:1e.0", and room for what may come
_DEVICES_MAX = 64


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """What the process runs on: family "TRN1", size "32xl". A number that is in no table of ours
    is named so: "unknown (77)"."""

    family: str
    size: str
    arch_name: str
    device_revision: str


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Of one core's device memory."""

    bytes_used: int
    bytes_limit: int


def instance_info(call: Call) -> InstanceInfo:
    """nrt.h: nrt_get_instance_info."""
    found = InstanceInfoStruct()
    call("nrt_get_instance_info", ctypes.byref(found), ctypes.sizeof(found))
    texts = [text.decode(errors="replace") for text in (found.arch_name, found.device_revision)]
    return InstanceInfo(_named(_FAMILIES, found.family), _named(_SIZES, found.size), *texts)


def memory_stats(call: Call, core: int) -> MemoryStats:
    """nrt.h: nrt_get_vnc_memory_stats."""
    found, written = MemoryStatsStruct(), ctypes.c_size_t()
    arguments = (ctypes.byref(found), ctypes.sizeof(found), ctypes.byref(written))
    call("nrt_get_vnc_memory_stats", core, *arguments)
    return MemoryStats(found.bytes_used, found.bytes_limit)


def routing_ids(call: Call) -> tuple[int, ...]:
    """nrt.h: nrt_host_device_id_rid_map_get."""
    found, count = (ctypes.c_uint32 * _DEVICES_MAX)(), ctypes.c_uint32(_DEVICES_MAX)
    call("nrt_host_device_id_rid_map_get", ctypes.byref(count), found)
    return tuple(found[: min(count.value, _DEVICES_MAX)])


def attached_efa(library: NrtLibrary, call: Call, address: int) -> str | None:
    """nrt.h: nrt_get_attached_efa_bdf. FAILURE, its answer for all but a short buffer, is None."""
    if not library.has("nrt_get_attached_efa_bdf"):
        return None
    found, length = ctypes.create_string_buffer(_BDF_BYTES), ctypes.c_size_t(_BDF_BYTES)
    try:
        call("nrt_get_attached_efa_bdf", address, found, ctypes.byref(length))
    except NrtRequestError as error:
        if error.status == NrtStatus.FAILURE:
            return None
        raise
    return found.value.decode(errors="replace")


def hbm_window(call: Call, device: int, hbm: int) -> tuple[int, int] | None:
    """nrt.h: nrt_get_hbm_mmap_va."""
    address, size = ctypes.c_void_p(), ctypes.c_size_t()
    try:
        call("nrt_get_hbm_mmap_va", device, hbm, ctypes.byref(address), ctypes.byref(size))
    except NrtRequestError as error:
        if error.status == NrtStatus.INVALID_HANDLE:
            return None
        raise
    return address.value or 0, size.value


def _named(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else f"unknown ({number})"
