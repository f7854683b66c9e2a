"""The structs that libnrt's functions take, as ctypes lays them out.

Sources: nrt_version.h (NrtVersionStruct), nrt_experimental.h (TensorInfoStruct), nrt_async.h
(AsyncErrorStruct), nrt.h (all others). The library fills; the caller owns what it passes.
"""

import ctypes


class NrtVersionStruct(ctypes.Structure):
    """nrt_version_t, 224 bytes."""

    _fields_ = (
        ("rt_major", ctypes.c_uint64),
        ("rt_minor", ctypes.c_uint64),
        ("rt_patch", ctypes.c_uint64),
        ("rt_maintenance", ctypes.c_uint64),
        ("rt_detail", ctypes.c_char * 128),
        ("git_hash", ctypes.c_char * 64),
    )


class InstanceInfoStruct(ctypes.Structure):
    """nrt_instance_info_t, 32 bytes."""

    _fields_ = (
        ("family", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("arch_name", ctypes.c_char * 16),
        ("device_revision", ctypes.c_char * 8),
    )


class MemoryStatsStruct(ctypes.Structure):
    """nrt_vnc_memory_stats_t, 16 bytes. Later libraries may append to it."""

    _fields_ = (("bytes_used", ctypes.c_size_t), ("bytes_limit", ctypes.c_size_t))


class BatchOperationStruct(ctypes.Structure):
    """nrt_tensor_batch_op_t, 24 bytes: a run of a tensor's bytes, and where it is on the host."""

    _fields_ = (
        ("offset", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("buffer", ctypes.c_void_p),
    )


class BatchStruct(ctypes.Structure):
    """nrt_tensor_batch_t, 24 bytes: the runs of one tensor."""

    _fields_ = (
        ("tensor", ctypes.c_void_p),
        ("ops", ctypes.POINTER(BatchOperationStruct)),
        ("num_ops", ctypes.c_uint32),
    )


class AllocationInfoStruct(ctypes.Structure):
    """nrt_tensor_device_allocation_info_t, 24 bytes."""

    _fields_ = (
        ("physical_address", ctypes.c_uint64),
        ("size", ctypes.c_size_t),
        ("hbm_index", ctypes.c_int),
    )


class TensorInfoStruct(ctypes.Structure):
    """nrt_tensor_info_t, 296 bytes. The name ends with a NUL; `shape` has `ndim` numbers."""

    _fields_ = (
        ("name", ctypes.c_char * 256),
        ("usage", ctypes.c_int),
        ("size", ctypes.c_size_t),
        ("dtype", ctypes.c_int),
        ("shape", ctypes.POINTER(ctypes.c_uint32)),
        ("ndim", ctypes.c_uint32),
    )


class TensorInfoArrayStruct(ctypes.Structure):
    """nrt_tensor_info_array_t: a count, and that many of TensorInfoStruct behind it."""

    _fields_ = (("tensor_count", ctypes.c_uint64), ("tensor_array", TensorInfoStruct * 0))


class AsyncErrorStruct(ctypes.Structure):
    """nrta_error_t of the asynchronous functions 2.x, 16 bytes."""

    _fields_ = (("seq_id", ctypes.c_uint64), ("error_code", ctypes.c_uint64))


class CollectiveGroupStruct(ctypes.Structure):
    """nrt_cc_comm_t, 32 bytes: who takes part in a collective operation outside of a model."""

    _fields_ = (
        ("replica_group", ctypes.POINTER(ctypes.c_uint32)),
        ("rank", ctypes.c_uint32),
        ("rank_n", ctypes.c_uint32),
        ("ctx_device_id", ctypes.c_uint32),
        ("ctx_device_count", ctypes.c_uint32),
        ("vnc", ctypes.c_uint32),
    )


class TensorListStruct(ctypes.Structure):
    """nrt_tensor_list_t, 16 bytes."""

    _fields_ = (("tensors", ctypes.POINTER(ctypes.c_void_p)), ("num_tensors", ctypes.c_size_t))
