"""What processes of one collective group do together.

Collective operations outside of models (nrta_cc_*) have no method: see `functions.py`.

So far this has run on a simulator of libnrt only, where a group has one rank.
"""

import ctypes
from typing import TYPE_CHECKING, cast

from neuron_di_bindings.nrt.status import NrtRequestError, NrtStatus

if TYPE_CHECKING:
    from neuron_di_bindings.nrt.runtime import NrtRuntime

_MESSAGE_BYTES = 512


def build_global_communicator(runtime: "NrtRuntime", core: int, rank: int, num_ranks: int) -> None:
    """Connect all ranks, before models that communicate are loaded (nrt.h:
    nrt_build_global_comm)."""
    runtime.call("nrt_build_global_comm", core, rank, num_ranks)


def init_global_communicator(runtime: "NrtRuntime", core: int, rank: int, num_ranks: int) -> None:
    """Connect all ranks, for collective operations outside of models (nrt.h:
    nrt_cc_global_comm_init)."""
    runtime.call("nrt_cc_global_comm_init", core, rank, num_ranks)


def barrier(runtime: "NrtRuntime", core: int, rank: int, num_ranks: int) -> None:
    """Wait until every rank has come here (nrt_experimental.h: nrt_barrier)."""
    runtime.call("nrt_barrier", core, rank, num_ranks)


def network_plugin(runtime: "NrtRuntime") -> int:
    """Address of the network plug-in's table of functions (nrt_experimental.h:
    nrt_get_libnccl_net). NrtRequestError, with the library's words as a note, if there is none."""
    code, message = ctypes.c_int(), ctypes.create_string_buffer(_MESSAGE_BYTES)
    name = "nrt_get_libnccl_net"
    found = runtime.call(name, ctypes.byref(code), message, _MESSAGE_BYTES)
    if not found:
        status = code.value or NrtStatus.FAILURE
        error = NrtRequestError(name, status, runtime.library.status_name(status))
        error.add_note(message.value.decode(errors="replace"))
        raise error
    return cast("int", found)
