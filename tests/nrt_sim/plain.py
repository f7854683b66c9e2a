"""The simulator through ctypes alone, so that its tests do not rest on the bindings they serve.

Each `PlainNrt` loads a copy of its own, in the state of a fresh process: several in one process
are like several processes, with cores of their own.
"""

import ctypes
import shutil
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

SUCCESS, FAILURE, INVALID, INVALID_HANDLE, RESOURCE, TIMEOUT = range(6)
LOAD_NOT_ENOUGH_NC, UNINITIALIZED, CLOSED, NC_BUSY = 9, 13, 14, 1005
NO_FRAMEWORK = 1
DEVICE, HOST = 0, 1
TENSOR_KIND = 1


class Version(ctypes.Structure):
    _fields_ = (
        *((name, c_uint64) for name in ("rt_major", "rt_minor", "rt_patch", "rt_maintenance")),
        ("rt_detail", ctypes.c_char * 128),
        ("git_hash", ctypes.c_char * 64),
    )


class InstanceInfo(ctypes.Structure):
    _fields_ = (
        ("family", c_uint32),
        ("size", c_uint32),
        ("arch_name", ctypes.c_char * 16),
        ("device_revision", ctypes.c_char * 8),
    )


class MemoryStats(ctypes.Structure):
    _fields_ = (("bytes_used", c_size_t), ("bytes_limit", c_size_t))


class AllocationInfo(ctypes.Structure):
    _fields_ = (("physical_address", c_uint64), ("size", c_size_t), ("hbm_index", c_int))


class BatchOp(ctypes.Structure):
    _fields_ = (("offset", c_uint64), ("size", c_uint64), ("buffer", c_void_p))


class Batch(ctypes.Structure):
    _fields_ = (("tensor", c_void_p), ("ops", POINTER(BatchOp)), ("num_ops", c_uint32))


_T = c_void_p  # an opaque handle
_OUT = POINTER(c_void_p)
_COUNT = POINTER(c_uint32)
_ARGUMENTS = {
    "nrt_init": (c_int, c_char_p, c_char_p),
    "nrt_close": (),
    "nrt_get_status_as_str": (c_int,),
    "nrt_get_version": (POINTER(Version), c_size_t),
    "nrt_get_instance_info": (POINTER(InstanceInfo), c_size_t),
    "nrt_get_total_vnc_count": (_COUNT,),
    "nrt_get_visible_vnc_count": (_COUNT,),
    "nrt_get_total_nc_count": (_COUNT,),
    "nrt_get_visible_nc_count": (_COUNT,),
    "nrt_host_device_id_get": (c_int, _COUNT),
    "nrt_host_device_id_rid_map_get": (_COUNT, _COUNT),
    "nrt_get_vnc_memory_stats": (c_uint32, POINTER(MemoryStats), c_size_t, POINTER(c_size_t)),
    "nrt_get_hbm_mmap_va": (c_int, c_int, _OUT, POINTER(c_size_t)),
    "nrt_get_attached_efa_bdf": (c_void_p, c_char_p, POINTER(c_size_t)),
    "nrt_tensor_allocate": (c_int, c_int, c_size_t, c_char_p, _OUT),
    "nrt_tensor_free": (_OUT,),
    "nrt_tensor_read": (_T, c_void_p, c_size_t, c_size_t),
    "nrt_tensor_write": (_T, c_void_p, c_size_t, c_size_t),
    "nrt_tensor_read_batch": (POINTER(Batch), c_uint64, ctypes.c_bool),
    "nrt_tensor_write_batch": (POINTER(Batch), c_uint64, ctypes.c_bool),
    "nrt_tensor_copy": (_T, c_size_t, _T, c_size_t, c_size_t),
    "nrt_tensor_memset": (_T, c_uint64, c_int, c_size_t),
    "nrt_tensor_get_size": (_T,),
    "nrt_tensor_allocate_empty": (c_char_p, _OUT),
    "nrt_tensor_attach_buffer": (_T, c_void_p, c_size_t),
    "nrt_tensor_allocate_slice": (_T, c_size_t, c_size_t, c_char_p, _OUT),
    "nrt_tensor_get_va": (_T,),
    "nrt_tensor_get_device_allocation_info": (_T, POINTER(AllocationInfo)),
    "nrt_tensor_check_output_completion": (_T, c_int64, c_uint64),
    "nrt_tensor_reset_output_completion": (_T,),
    "nrt_get_dmabuf_fd": (c_uint64, c_uint64, POINTER(c_int)),
    "nrt_memcpy_to_device": (c_void_p, c_void_p, c_size_t),
    "nrt_build_global_comm": (ctypes.c_int32, c_uint32, c_uint32),
    "nrt_cc_global_comm_init": (c_uint32, c_uint32, c_uint32),
    "nrt_barrier": (ctypes.c_int32, c_uint32, c_uint32),
    "nrt_get_libnccl_net": (POINTER(c_int), c_char_p, c_size_t),
    "nrt_sim_schedule": (c_char_p,),
    "nrt_sim_fault": (c_char_p, c_int, c_uint32),
    "nrt_sim_delay": (c_char_p, c_uint64, c_uint32),
    "nrt_sim_clear_faults": (),
    "nrt_sim_calls": (c_char_p,),
    "nrt_sim_violations": (),
    "nrt_sim_faults_left": (),
    "nrt_sim_last_violation": (),
    "nrt_sim_forget_violations": (),
    "nrt_sim_num_live": (c_int,),
    "nrt_sim_die": (),
}
_RESULTS = {
    **dict.fromkeys(("nrt_close", "nrt_tensor_free", "nrt_sim_die"), None),
    **dict.fromkeys(("nrt_sim_clear_faults", "nrt_sim_forget_violations"), None),
    **dict.fromkeys(("nrt_tensor_get_va", "nrt_get_libnccl_net"), c_void_p),
    **dict.fromkeys(("nrt_get_status_as_str", "nrt_sim_last_violation"), c_char_p),
    **dict.fromkeys(("nrt_sim_calls", "nrt_sim_violations", "nrt_sim_num_live"), c_uint64),
    "nrt_sim_faults_left": c_uint64,
    "nrt_tensor_get_size": c_size_t,
}


def succeed(status: int) -> None:
    """Raises AssertionError unless it is SUCCESS; `assert` would do nothing under python -O."""
    if status != SUCCESS:
        raise AssertionError(f"libnrt returned {status}")


class PlainNrt:
    """Every function on hosts, cores and tensors and the simulator's own, by these names."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        for name, arguments in _ARGUMENTS.items():
            function = getattr(self.library, name, None)
            if function is None:  # API 2 has a few less
                continue
            function.argtypes = arguments
            function.restype = _RESULTS.get(name, c_int)
            setattr(self, name, function)

    @classmethod
    def copied(cls, path: Path, folder: Path) -> "PlainNrt":
        """A library of its own: the loader knows a file by its inode."""
        number = len(list(folder.glob("libnrt_*.so")))
        return cls(Path(shutil.copy(path, folder / f"libnrt_{number}.so")))

    def open(self) -> None:
        status = self.nrt_init(NO_FRAMEWORK, b"", b"")
        succeed(status)

    def allocated(self, num_bytes: int, vnc: int = 0, placement: int = DEVICE) -> c_void_p:
        handle = c_void_p()
        status = self.nrt_tensor_allocate(placement, vnc, num_bytes, b"tensor", byref(handle))
        succeed(status)
        return handle

    def sliced(self, tensor: c_void_p, offset: int, num_bytes: int) -> c_void_p:
        handle = c_void_p()
        status = self.nrt_tensor_allocate_slice(tensor, offset, num_bytes, b"", byref(handle))
        succeed(status)
        return handle

    def read(self, tensor: c_void_p, offset: int, num_bytes: int) -> bytes:
        buffer = ctypes.create_string_buffer(num_bytes)
        status = self.nrt_tensor_read(tensor, buffer, offset, num_bytes)
        succeed(status)
        return buffer.raw

    def write(self, tensor: c_void_p, offset: int, content: bytes) -> None:
        status = self.nrt_tensor_write(tensor, content, offset, len(content))
        succeed(status)

    def count(self, name: str) -> int:
        number = c_uint32()
        status = getattr(self, name)(byref(number))
        succeed(status)
        return number.value
