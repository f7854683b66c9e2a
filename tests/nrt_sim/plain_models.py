"""Models, tensor sets and queues of the simulator through ctypes alone, on top of a `PlainNrt`.

As in plain.py: tests of the simulator do not rest on the bindings that it serves.
"""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import POINTER, byref, c_bool, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_uint64
from ctypes import c_void_p as _Handle
from typing import Any

from nrt_sim.plain import SUCCESS, PlainNrt

QUEUE_FULL, UNSUPPORTED_NEFF_VERSION, UNRECOVERABLE = 7, 10, 101
BAD_INPUT, NUMERICAL_ERROR, OUT_OF_BOUNDS, DMA_ABORT = 1002, 1003, 1006, 1203
MODEL_KIND, TENSOR_SET_KIND, ERROR_TRACKER_KIND = 2, 3, 6


class TensorInfo(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 256),
        ("usage", c_int),
        ("size", c_size_t),
        ("dtype", c_int),
        ("shape", POINTER(c_uint32)),
        ("ndim", c_uint32),
    )


class TensorInfoArray(ctypes.Structure):
    _fields_ = (("tensor_count", c_uint64), ("tensor_array", TensorInfo * 0))


class AsyncError(ctypes.Structure):
    _fields_ = (("seq_id", c_uint64), ("error_code", c_uint64))


_OUT = POINTER(_Handle)
_SEQUENCE = POINTER(c_uint64)
_INFOS = POINTER(TensorInfoArray)
_BOTH_ENDS = (_Handle, _SEQUENCE)  # the status slot or the tracker, and the sequence number
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "nrt_load": (c_char_p, c_size_t, c_int32, c_int32, _OUT),
    "nrt_load_collectives": (c_char_p, c_size_t, c_int32, c_int32, c_uint32, c_uint32, _OUT),
    "nrt_unload": (_Handle,),
    "nrt_get_model_vnc_count": (_Handle, POINTER(c_uint32)),
    "nrt_allocate_tensor_set": (_OUT,),
    "nrt_destroy_tensor_set": (_OUT,),
    "nrt_add_tensor_to_tensor_set": (_Handle, c_char_p, _Handle),
    "nrt_get_tensor_from_tensor_set": (_Handle, c_char_p, _OUT),
    "nrt_execute": (_Handle, _Handle, _Handle),
    "nrt_execute_repeat": (_Handle, _Handle, _Handle, c_int),
    "nrt_get_model_tensor_info": (_Handle, POINTER(_INFOS)),
    "nrt_free_model_tensor_info": (_INFOS,),
    "nrta_execute_schedule": (_Handle, _Handle, _Handle, c_int, *_BOTH_ENDS),
    "nrta_cc_prepare": (_Handle, _Handle, _Handle, c_int, c_int, c_int, _OUT),
    "nrta_cc_schedule": (_OUT, c_int, *_BOTH_ENDS),
    "nrta_is_completed": (c_uint64, POINTER(c_bool)),
    "nrta_get_sequence": (c_uint32, c_int, c_int, _SEQUENCE),
    "nrta_get_completion_handle": (c_uint64, POINTER(c_int)),
    "nrta_error_tracker_create": (c_uint32, _OUT),
    "nrta_error_tracker_destroy": (_Handle,),
    "nrta_error_tracker_get_list": (_Handle, POINTER(POINTER(AsyncError)), POINTER(c_size_t)),
    "nrta_event_register_seq_id_completion": (c_uint64, c_int),
    "nrta_event_register_xu_completion": (c_int, c_int, c_int, c_int),
    "nrt_sim_hold_executions": (c_bool,),
    "nrt_sim_hold_queues": (c_bool,),
}
_NO_RESULT = (
    "nrt_destroy_tensor_set",
    "nrta_error_tracker_destroy",
    "nrt_sim_hold_executions",
    "nrt_sim_hold_queues",
)


class PlainModels:
    """Every function on models and queues, by these names, and short ways to use them.

    `nrt` is the library under it. In API 3 the functions on tensors have the core before the
    queue.
    """

    def __init__(self, nrt: PlainNrt, api: int = 3) -> None:
        self.nrt = nrt
        self.api = api
        place = (c_int,) if api == 2 else (c_int, c_int)
        ends = (c_uint64, *place, *_BOTH_ENDS)
        arguments = {
            **_ARGUMENTS,
            "nrta_tensor_write": (_Handle, _Handle, c_uint64, *ends),
            "nrta_tensor_read": (_Handle, _Handle, c_uint64, *ends),
            "nrta_tensor_copy": (_Handle, c_uint64, _Handle, c_uint64, *ends),
        }
        for name, types in arguments.items():
            function = getattr(nrt.library, name, None)
            if function is None:  # of the other API
                continue
            function.argtypes = types
            function.restype = None if name in _NO_RESULT else c_int
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.nrt, name)

    def loaded(self, content: bytes, vnc: int = 0) -> _Handle:
        handle = _Handle()
        status = self.nrt_load(content, len(content), vnc, -1, byref(handle))
        assert status == SUCCESS, status
        return handle

    def load_status(self, content: bytes, vnc: int = 0, vnc_count: int = -1) -> int:
        return self.nrt_load(content, len(content), vnc, vnc_count, byref(_Handle()))

    def tensor_set(self, tensors: Mapping[str, _Handle]) -> _Handle:
        handle = _Handle()
        status = self.nrt_allocate_tensor_set(byref(handle))
        assert status == SUCCESS, status
        for name, tensor in tensors.items():
            status = self.nrt_add_tensor_to_tensor_set(handle, name.encode(), tensor)
            assert status == SUCCESS, status
        return handle

    def found(self, tensors: _Handle, name: str) -> _Handle:
        handle = _Handle()
        status = self.nrt_get_tensor_from_tensor_set(tensors, name.encode(), byref(handle))
        assert status == SUCCESS, status
        return handle

    def is_completed(self, sequence: int) -> bool:
        done = c_bool()
        status = self.nrta_is_completed(sequence, byref(done))
        assert status == SUCCESS, status
        return done.value

    @contextmanager
    def queues_held(self) -> Iterator[None]:
        """Nothing scheduled starts inside the block."""
        self.nrt_sim_hold_queues(True)
        try:
            yield
        finally:
            self.nrt_sim_hold_queues(False)
