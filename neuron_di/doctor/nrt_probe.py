"""A short-lived process that asks the Neuron runtime. Started by `neuron_asked`, never imported.

    python -m neuron_di.doctor.nrt_probe library   what library there is; takes no core
    python -m neuron_di.doctor.nrt_probe core LNC  what one core's memory can do; takes that core

A process may start the runtime once, and the library may end it. LNC is the host's number of the
core that NEURON_RT_VISIBLE_CORES names. So far this has run on a simulator of libnrt only.
"""

import os
import sys
from pathlib import Path

from neuron_di.doctor.steps import Facts, take
from neuron_di_bindings.nrt import (
    FUNCTIONS,
    NrtLibrary,
    NrtRuntime,
    NrtTensor,
    SendReceive,
    load_nrt,
)

MEMORY_BYTES = 1 << 20  # whole pages: a dma-buf covers nothing else
_MAPS = Path("/proc/self/maps")


def ask_library() -> None:
    """Steps "library", "version", "total" and "visible"."""
    loaded: list[NrtLibrary] = []
    if not take("library", lambda: _load(loaded)):
        return
    library = loaded[0]
    take("version", lambda: _version(library))
    with NrtRuntime(library) as runtime:
        take("total", lambda: {"num_cores": runtime.total_cores()})
        take("visible", lambda: {"num_cores": runtime.visible_cores()})


def ask_core(lnc: int) -> None:
    """Steps "runtime", "memory", "efa", "dmabuf", "limits", "send_receive" and "close"."""
    loaded: list[NrtLibrary] = []
    if not take("library", lambda: _load(loaded)):
        return
    runtime = NrtRuntime(loaded[0])
    if not take("runtime", lambda: _start(runtime)):
        return
    tensors: list[NrtTensor] = []
    if take("memory", lambda: _write_and_read(runtime, tensors)):
        address = tensors[0].address
        take("efa", lambda: _efa(runtime, address))
        take("dmabuf", lambda: _dmabuf(runtime, address))
    both = SendReceive(runtime)
    if take("limits", lambda: _limits(both)) and take("send_receive", lambda: both.open(lnc)):
        take("send_receive_close", lambda: both.close(lnc))
    take("close", runtime.close)


def _load(loaded: list[NrtLibrary]) -> Facts:
    library = load_nrt()
    loaded.append(library)
    known = {row.name for row in FUNCTIONS if row.generation in (None, library.async_api)}
    lacks = sorted(name for name in known if not library.has(name))
    return {"path": path_of(library), "async_api": library.async_api, "lacks": lacks}


def path_of(library: NrtLibrary) -> str:
    """Of the file that was loaded: the library may be known by its name only."""
    name = Path(library.path).name.partition(".so")[0]
    for line in _MAPS.read_text().splitlines():
        path = line.partition("/")[2]
        if path and Path(path).name.startswith(f"{name}.so"):
            return f"/{path}"
    return library.path


def _version(library: NrtLibrary) -> Facts:
    version = library.version()
    return {"version": str(version), "detail": version.detail}


def _start(runtime: NrtRuntime) -> Facts:
    runtime.init()
    instance = runtime.instance()
    stats = runtime.memory_stats(0)
    return {
        "num_cores": runtime.visible_cores(),
        "family": instance.family,
        "size": instance.size,
        "arch": instance.arch_name,
        "revision": instance.device_revision,
        "memory_bytes_used": stats.bytes_used,
        "memory_bytes": stats.bytes_limit,
    }


def _write_and_read(runtime: NrtRuntime, tensors: list[NrtTensor]) -> Facts:
    """A pattern, whole and in a piece that begins anywhere."""
    tensor = runtime.allocate(MEMORY_BYTES, 0, "neuron-di doctor")
    tensors.append(tensor)
    pattern = os.urandom(MEMORY_BYTES)
    tensor.write(0, pattern)
    whole, piece = bytearray(MEMORY_BYTES), bytearray(4099)
    tensor.read(0, whole)
    tensor.read(77, piece)
    is_same = whole == pattern and piece == pattern[77 : 77 + len(piece)]
    facts: Facts = {"num_bytes": MEMORY_BYTES}
    return facts if is_same else facts | {"failed": "other bytes came back than were written"}


def _efa(runtime: NrtRuntime, address: int) -> Facts:
    if not runtime.library.has("nrt_get_attached_efa_bdf"):
        return {"failed": "this runtime, older than SDK 2.29, cannot tell"}
    return {"address": runtime.attached_efa(address)}


def _dmabuf(runtime: NrtRuntime, address: int) -> Facts:
    os.close(runtime.dmabuf_fd(address, MEMORY_BYTES))
    return {"num_bytes": MEMORY_BYTES}


def _limits(both: SendReceive) -> Facts:
    limits = both.limits()
    return {"communicators_max": limits.communicators_max, "pending_max": limits.pending_max}


if __name__ == "__main__":
    if sys.argv[1] == "library":
        ask_library()
    else:
        ask_core(int(sys.argv[2]))
