"""All functions of libnrt that this project knows: one table, from which the library is bound.

The declarations are our own, after the published headers. `source` names the header a function is
declared in, or what else shows it. The functions of nrt_async.h have two generations: of 2.x, which
report errors to a tracker, and of 3.0 (SDK 2.29), which write a status where a pointer says, and
whose tensor functions take the core in front of the queue. The headers in AWS's public repository
still show 2.x; those of 3.0 are known from the release notes of SDK 2.29 (the tracker is gone, the
status pointer and `lnc_idx` are new) and from AWS's open-source client nkipy, which is compiled
against the real ones.

nrta_cc_prepare, nrta_cc_schedule and nrta_event_register_xu_completion are declared for the table
only: nothing here calls them. Collectives belong to the compiled models; outside of them these two
are marked as subject to change, and the simulator has none, so a method could not be tried.

So far these declarations have been held against a simulator of libnrt only.
"""

import ctypes
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from neuron_di_bindings.nrt import structs


class Answer(Enum):
    """What a function returns: a status, or something that is none."""

    STATUS = ctypes.c_int
    NOTHING = None
    NUMBER = ctypes.c_size_t
    ADDRESS = ctypes.c_void_p
    TEXT = ctypes.c_char_p


@dataclass(frozen=True, slots=True)
class NrtFunction:
    """One C function. `generation` is of nrt_async.h; None where a function is the same in both."""

    name: str
    answer: Answer
    arguments: tuple[Any, ...]
    source: str
    summary: str
    generation: Literal[2, 3] | None = None
    since: str | None = None  # an SDK, where older ones are known to lack it


_INT, _I32, _I64 = ctypes.c_int, ctypes.c_int32, ctypes.c_int64
_U32, _U64, _SIZE = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t
_BOOL, _TEXT = ctypes.c_bool, ctypes.c_char_p
_HANDLE = _BUFFER = ctypes.c_void_p
_INT_AT, _U32_AT, _U64_AT = (ctypes.POINTER(kind) for kind in (_INT, _U32, _U64))
_SIZE_AT, _BOOL_AT = ctypes.POINTER(_SIZE), ctypes.POINTER(_BOOL)
_HANDLE_AT = _ADDRESS_AT = ctypes.POINTER(ctypes.c_void_p)
_STATUS_AT, _SEQUENCE_AT = _INT_AT, _U64_AT


class _Rows(list[NrtFunction]):
    """The rows of one source."""

    def __init__(self, source: str, generation: Literal[2, 3] | None = None) -> None:
        super().__init__()
        self._source, self._generation = source, generation

    def status(
        self, name: str, arguments: tuple[Any, ...], summary: str, since: str | None = None
    ) -> None:
        self.other(Answer.STATUS, name, arguments, summary, since)

    def other(
        self,
        answer: Answer,
        name: str,
        arguments: tuple[Any, ...],
        summary: str,
        since: str | None = None,
    ) -> None:
        row = (name, answer, arguments, self._source, summary, self._generation, since)
        self.append(NrtFunction(*row))


def _lifecycle() -> _Rows:
    rows = _Rows("nrt.h")
    status = rows.status
    status("nrt_init", (_INT, _TEXT, _TEXT), "Start the runtime, once; takes the visible cores.")
    rows.other(Answer.NOTHING, "nrt_close", (), "Stop the runtime; all handles end.")
    text = "Family, size, architecture and revision of the instance."
    status("nrt_get_instance_info", (ctypes.POINTER(structs.InstanceInfoStruct), _SIZE), text)
    text = "Cores of the instance. May be called before nrt_init."
    status("nrt_get_total_vnc_count", (_U32_AT,), text)
    status("nrt_get_total_nc_count", (_U32_AT,), f"{text} The older name.")
    text = "Cores this process may use. May be called before nrt_init."
    status("nrt_get_visible_vnc_count", (_U32_AT,), text)
    status("nrt_get_visible_nc_count", (_U32_AT,), f"{text} The older name.")
    text = "The host's number of a device, from this process's."
    status("nrt_host_device_id_get", (_INT, _U32_AT), text)
    text = "Routing ids, indexed by the host's numbers of devices."
    status("nrt_host_device_id_rid_map_get", (_U32_AT, _U32_AT), text)
    stats = ctypes.POINTER(structs.MemoryStatsStruct)
    text = "Device memory of a core: used, and at most."
    status("nrt_get_vnc_memory_stats", (_U32, stats, _SIZE, _SIZE_AT), text)
    return rows


def _versions() -> _Rows:
    rows = _Rows("nrt_version.h")
    arguments = (ctypes.POINTER(structs.NrtVersionStruct), _SIZE)
    rows.status("nrt_get_version", arguments, "Version of the library.")
    return rows


def _statuses() -> _Rows:
    rows = _Rows("nrt_status.h")
    rows.other(Answer.TEXT, "nrt_get_status_as_str", (_INT,), "The name of a status.")
    return rows


def _tensors() -> _Rows:
    rows = _Rows("nrt.h")
    status = rows.status
    batches = ctypes.POINTER(structs.BatchStruct)
    allocation = ctypes.POINTER(structs.AllocationInfoStruct)
    text = "A tensor in a core's memory, or the host's."
    status("nrt_tensor_allocate", (_INT, _INT, _SIZE, _TEXT, _HANDLE_AT), text)
    rows.other(Answer.NOTHING, "nrt_tensor_free", (_HANDLE_AT,), "End a tensor.")
    text = "Copy bytes of a tensor into host memory."
    status("nrt_tensor_read", (_HANDLE, _BUFFER, _SIZE, _SIZE), text)
    text = "Copy host memory into a tensor."
    status("nrt_tensor_write", (_HANDLE, _BUFFER, _SIZE, _SIZE), text)
    text = "Many reads of many tensors. The last argument switches the library's own order off."
    status("nrt_tensor_read_batch", (batches, _U64, _BOOL), text)
    text = "Many writes of many tensors, as nrt_tensor_read_batch."
    status("nrt_tensor_write_batch", (batches, _U64, _BOOL), text)
    text = "Copy between two tensors of one core."
    status("nrt_tensor_copy", (_HANDLE, _SIZE, _HANDLE, _SIZE, _SIZE), text)
    status("nrt_tensor_memset", (_HANDLE, _U64, _INT, _SIZE), "Fill with one byte's value.")
    rows.other(Answer.NUMBER, "nrt_tensor_get_size", (_HANDLE,), "Bytes of a tensor.")
    text = "A tensor without memory."
    status("nrt_tensor_allocate_empty", (_TEXT, _HANDLE_AT), text)
    text = "Make host memory of the caller's a tensor's memory. It outlives the tensor."
    status("nrt_tensor_attach_buffer", (_HANDLE, _BUFFER, _SIZE), text)
    text = "A tensor over a part of another one's memory."
    status("nrt_tensor_allocate_slice", (_HANDLE, _SIZE, _SIZE, _TEXT, _HANDLE_AT), text)
    text = "Where a tensor is; of a device tensor, an address for network adapters only."
    rows.other(Answer.ADDRESS, "nrt_tensor_get_va", (_HANDLE,), text)
    text = "Where in the device's memory a tensor is."
    status("nrt_tensor_get_device_allocation_info", (_HANDLE, allocation), text)
    text = "Wait, for microseconds, until a model has written an output so many times."
    status("nrt_tensor_check_output_completion", (_HANDLE, _I64, _U64), text)
    text = "Count an output's completions from nothing again."
    status("nrt_tensor_reset_output_completion", (_HANDLE,), text)
    text = "A dma-buf of a range of device addresses. The caller closes it."
    status("nrt_get_dmabuf_fd", (_U64, _U64, _INT_AT), text)
    text = "The host's window to a device's memory."
    status("nrt_get_hbm_mmap_va", (_INT, _INT, _ADDRESS_AT, _SIZE_AT), text)
    text = "PCI address of the EFA adapter that is attached to the device of a device address."
    status("nrt_get_attached_efa_bdf", (_BUFFER, _BUFFER, _SIZE_AT), text, "2.29")
    return rows


def _tensors_elsewhere() -> _Rows:
    rows = _Rows("libfabric, hmem_neuron.c")
    text = "As nrt_get_dmabuf_fd, and where in the dma-buf the range begins."
    rows.status("nrt_get_dmabuf_fd_v2", (_U64, _U64, _INT_AT, _U64_AT), text)
    return rows


def _models() -> _Rows:
    rows = _Rows("nrt.h")
    status = rows.status
    text = "Load a compiled model. The fourth argument is out of use: -1."
    status("nrt_load", (_BUFFER, _SIZE, _I32, _I32, _HANDLE_AT), text)
    text = "As nrt_load, of one that communicates: its rank, and how many there are."
    status("nrt_load_collectives", (_BUFFER, _SIZE, _I32, _I32, _U32, _U32, _HANDLE_AT), text)
    status("nrt_unload", (_HANDLE,), "End a model.")
    status("nrt_get_model_vnc_count", (_HANDLE, _U32_AT), "Cores that a model takes.")
    status("nrt_allocate_tensor_set", (_HANDLE_AT,), "An empty set of named tensors.")
    text = "End a tensor set; its tensors stay."
    rows.other(Answer.NOTHING, "nrt_destroy_tensor_set", (_HANDLE_AT,), text)
    text = "Name a tensor in a set, or replace it. It outlives the set."
    status("nrt_add_tensor_to_tensor_set", (_HANDLE, _TEXT, _HANDLE), text)
    text = "The tensor of this name."
    status("nrt_get_tensor_from_tensor_set", (_HANDLE, _TEXT, _HANDLE_AT), text)
    status("nrt_execute", (_HANDLE, _HANDLE, _HANDLE), "Run a model: inputs, outputs.")
    text = "Run a model so many times over."
    status("nrt_execute_repeat", (_HANDLE, _HANDLE, _HANDLE, _INT), text)
    text = "Connect all ranks before models that communicate are loaded."
    status("nrt_build_global_comm", (_I32, _U32, _U32), text)
    text = "Connect all ranks for collective operations outside of models."
    status("nrt_cc_global_comm_init", (_U32, _U32, _U32), text)
    return rows


def _experimental() -> _Rows:
    rows = _Rows("nrt_experimental.h")
    status = rows.status
    array = ctypes.POINTER(structs.TensorInfoArrayStruct)
    text = "Inputs and outputs of a model. To be given back."
    status("nrt_get_model_tensor_info", (_HANDLE, ctypes.POINTER(array)), text)
    text = "Give back what nrt_get_model_tensor_info found."
    status("nrt_free_model_tensor_info", (array,), text)
    text = "Copy host memory through the host's window to device memory."
    status("nrt_memcpy_to_device", (_BUFFER, _BUFFER, _SIZE), text)
    status("nrt_barrier", (_I32, _U32, _U32), "Wait until every rank has come here.")
    text = "The table of functions of the network plug-in, or NULL and a message."
    rows.other(Answer.ADDRESS, "nrt_get_libnccl_net", (_INT_AT, _BUFFER, _SIZE), text)
    return rows


def _async_of_both() -> _Rows:
    rows = _Rows("nrt_async.h")
    group = ctypes.POINTER(structs.CollectiveGroupStruct)
    tensors = ctypes.POINTER(structs.TensorListStruct)
    text = "Prepare a collective operation outside of a model. May still change."
    arguments = (group, tensors, tensors, _INT, _INT, _INT, _HANDLE_AT)
    rows.status("nrta_cc_prepare", arguments, text)
    text = "Whether what has this sequence number is over."
    rows.status("nrta_is_completed", (_U64, _BOOL_AT), text)
    text = "The last sequence number that is over, of a core's unit and queue."
    rows.status("nrta_get_sequence", (_U32, _INT, _INT, _SEQUENCE_AT), text)
    return rows


def _async(generation: Literal[2, 3]) -> _Rows:
    """What is scheduled runs later, in its queue's order. Buffers, tensors and where the result
    goes stay until it is over."""
    rows = _Rows("nrt_async.h", generation)
    status = rows.status
    of_tensor = (_INT,) if generation == 2 else (_INT, _INT)  # queue; or core, queue
    since = None if generation == 2 else "2.29"
    ends = (_HANDLE if generation == 2 else _STATUS_AT, _SEQUENCE_AT)
    arguments = (_HANDLE, _BUFFER, _U64, _U64, *of_tensor, *ends)
    status("nrta_tensor_write", arguments, "Schedule nrt_tensor_write.", since)
    arguments = (_BUFFER, _HANDLE, _U64, _U64, *of_tensor, *ends)
    status("nrta_tensor_read", arguments, "Schedule nrt_tensor_read.", since)
    arguments = (_HANDLE, _U64, _HANDLE, _U64, _U64, *of_tensor, *ends)
    status("nrta_tensor_copy", arguments, "Schedule nrt_tensor_copy.", since)
    arguments = (_HANDLE, _HANDLE, _HANDLE, _INT, *ends)
    status("nrta_execute_schedule", arguments, "Schedule nrt_execute.", since)
    arguments = (_HANDLE_AT, _INT, *ends)
    text = "Schedule what nrta_cc_prepare prepared. May still change."
    status("nrta_cc_schedule", arguments, text, since)
    if generation == 2:
        status("nrta_error_tracker_create", (_U32, _HANDLE_AT), "A list for errors of a core.")
        text = "End such a list."
        rows.other(Answer.NOTHING, "nrta_error_tracker_destroy", (_HANDLE,), text)
        errors = ctypes.POINTER(structs.AsyncErrorStruct)
        text = "What went wrong: sequence numbers and statuses. The library's memory."
        arguments = (_HANDLE, ctypes.POINTER(errors), _SIZE_AT)
        status("nrta_error_tracker_get_list", arguments, text)
        text = "A descriptor that is readable when this is over. The caller closes it."
        status("nrta_get_completion_handle", (_U64, _INT_AT), text)
    else:
        text = "Raise an eventfd when this is over. A negative one: never mind."
        status("nrta_event_register_seq_id_completion", (_U64, _INT), text, "2.30")
        text = "Raise an eventfd whenever something of a core's unit and queue is over."
        status("nrta_event_register_xu_completion", (_INT, _INT, _INT, _INT), text, "2.30")
    return rows


def _send_receive() -> _Rows:
    """Experimental. Cores are numbered as the host numbers them, whatever the process sees."""
    rows = _Rows("nrt_async_sendrecv.h")
    status = rows.status
    text = "Communicators that a core can have."
    status("nrt_async_sendrecv_get_max_num_communicators_per_lnc", (_INT_AT,), text)
    text = "Requests that can be pending on one communicator."
    status("nrt_async_sendrecv_get_max_num_pending_request", (_INT_AT,), text)
    text = "Open a core's send and receive. After nrt_init; not after a failed close."
    status("nrt_async_sendrecv_init", (_INT,), text)
    text = "End it, before nrt_close. Everything is connected, and nothing in flight."
    status("nrt_async_sendrecv_close", (_INT,), text)
    ends = (_TEXT, _INT, _INT, _HANDLE_AT)
    text = "Begin to connect, for sending, to a peer's core: its address, its core, ours."
    status("nrt_async_sendrecv_connect", ends, f"{text} Thread-safe.")
    text = "Begin to be connected to, for receiving, by a peer's core."
    status("nrt_async_sendrecv_accept", ends, f"{text} Thread-safe.")
    text = "Whether the connection is there."
    status("nrt_async_sendrecv_test_comm", (_HANDLE, _BOOL_AT), text)
    post = (_HANDLE, _SIZE, _SIZE, _HANDLE, _HANDLE_AT)
    text = "Post a send of a tensor's bytes. Once connected. Thread-safe."
    status("nrt_async_sendrecv_send_tensor", post, text)
    text = "Post a receive into a tensor. Once connected. Thread-safe."
    status("nrt_async_sendrecv_recv_tensor", post, text)
    text = "Whether a request is over, and its bytes. By one thread at a time, and never after."
    status("nrt_async_sendrecv_test_request", (_HANDLE, _BOOL_AT, _SIZE_AT), text)
    text = "What was received, and tested to be, is in memory now."
    status("nrt_async_sendrecv_flush", (_INT,), text)
    return rows


FUNCTIONS: tuple[NrtFunction, ...] = (
    *_versions(),
    *_statuses(),
    *_lifecycle(),
    *_tensors(),
    *_tensors_elsewhere(),
    *_models(),
    *_experimental(),
    *_async_of_both(),
    *_async(2),
    *_async(3),
    *_send_receive(),
)


def of_generation(generation: Literal[2, 3] | None) -> dict[str, NrtFunction]:
    """By name: what a library with these asynchronous functions has. None: with none of them."""
    return {
        row.name: row
        for row in FUNCTIONS
        if row.generation in (None, generation)
        and (generation is not None or not row.name.startswith("nrta_"))
    }
