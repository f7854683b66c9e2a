/*
 * The public types of libnrt, in own declarations: what AWS's public headers say, no more.
 *
 * Opaque types stay opaque: a handle is a number in a range of addresses that nobody can read.
 */
#ifndef NRT_TYPES_H
#define NRT_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef SIM_API
#define SIM_API 3 /* 2: nrta_* with error trackers (SDK <= 2.28). 3: with status slots (>= 2.29). */
#endif

typedef enum {
    NRT_SUCCESS = 0,
    NRT_FAILURE = 1,
    NRT_INVALID = 2,
    NRT_INVALID_HANDLE = 3,
    NRT_RESOURCE = 4,
    NRT_TIMEOUT = 5,
    NRT_HW_ERROR = 6,
    NRT_QUEUE_FULL = 7,
    NRT_LOAD_NOT_ENOUGH_NC = 9,
    NRT_UNSUPPORTED_NEFF_VERSION = 10,
    NRT_FAIL_HOST_MEM_ALLOC = 11,
    NRT_UNINITIALIZED = 13,
    NRT_CLOSED = 14,
    NRT_QUEUE_EMPTY = 15,
    NRT_EXEC_UNIT_UNRECOVERABLE = 101,
    NRT_EXEC_BAD_INPUT = 1002,
    NRT_EXEC_COMPLETED_WITH_NUM_ERR = 1003,
    NRT_EXEC_COMPLETED_WITH_ERR = 1004,
    NRT_EXEC_NC_BUSY = 1005,
    NRT_EXEC_OOB = 1006,
    NRT_COLL_PENDING = 1100,
    NRT_EXEC_HW_ERR_COLLECTIVES = 1200,
    NRT_EXEC_HW_ERR_HBM_UE = 1201,
    NRT_EXEC_HW_ERR_NC_UE = 1202,
    NRT_EXEC_HW_ERR_DMA_ABORT = 1203,
    NRT_EXEC_SW_NQ_OVERFLOW = 1204,
    NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE = 1205,
    NRT_NETWORK_PROXY_FAILURE = 1206,
} NRT_STATUS;

typedef enum {
    NRT_FRAMEWORK_TYPE_INVALID = 0,
    NRT_FRAMEWORK_TYPE_NO_FW = 1,
    NRT_FRAMEWORK_TYPE_TENSORFLOW = 2,
    NRT_FRAMEWORK_TYPE_PYTORCH = 3,
    NRT_FRAMEWORK_TYPE_MXNET = 4,
    NRT_FRAMEWORK_TYPE_PRECHECK = 5,
} nrt_framework_type_t;

typedef enum {
    NRT_INSTANCE_INF1 = 1,
    NRT_INSTANCE_TRN1 = 2,
    NRT_INSTANCE_TRN1N = 3,
    NRT_INSTANCE_INF2 = 4,
    NRT_INSTANCE_TRN2 = 5,
    NRT_INSTANCE_TRN2N = 6,
    NRT_INSTANCE_INF2E = 7,
    NRT_INSTANCE_TRN2P = 8,
    NRT_INSTANCE_TRN2U = 9,
    NRT_INSTANCE_TRN2E = 10,
    NRT_INSTANCE_TRN2EU = 11,
    NRT_INSTANCE_TRN2AC = 12,
    NRT_INSTANCE_TRN2UAC = 13,
    NRT_INSTANCE_TRN3 = 14,
    NRT_INSTANCE_TRN3PDS98 = 15,
} nrt_instance_family_t;

typedef enum { /* in the order of the header, not of size */
    NRT_INSTANCE_SIZE_1XL = 0,
    NRT_INSTANCE_SIZE_2XL = 1,
    NRT_INSTANCE_SIZE_4XL = 2,
    NRT_INSTANCE_SIZE_6XL = 3,
    NRT_INSTANCE_SIZE_8XL = 4,
    NRT_INSTANCE_SIZE_24XL = 5,
    NRT_INSTANCE_SIZE_32XL = 6,
    NRT_INSTANCE_SIZE_48XL = 7,
    NRT_INSTANCE_SIZE_3XL = 8,
    NRT_INSTANCE_SIZE_UNKNOWN = 9,
} nrt_instance_size_t;

typedef enum {
    NRT_TENSOR_PLACEMENT_DEVICE = 0,
    NRT_TENSOR_PLACEMENT_HOST = 1,
    NRT_TENSOR_PLACEMENT_VIRTUAL = 2, /* taken away in SDK 2.30 */
} nrt_tensor_placement_t;

typedef enum {
    NRT_DTYPE_UNKNOWN = 0,
    NRT_DTYPE_UINT64 = 1,
    NRT_DTYPE_INT8 = 2,
    NRT_DTYPE_UINT8 = 3,
    NRT_DTYPE_INT16 = 4,
    NRT_DTYPE_UINT16 = 5,
    NRT_DTYPE_BFLOAT16 = 6,
    NRT_DTYPE_FLOAT16 = 7,
    NRT_DTYPE_INT32 = 8,
    NRT_DTYPE_UINT32 = 9,
    NRT_DTYPE_FLOAT32 = 0xA,
    NRT_DTYPE_FLOAT32R = 0xB,
    NRT_DTYPE_INT64 = 0xC,
    NRT_DTYPE_FP8_E3 = 0xD,
    NRT_DTYPE_FP8_E4 = 0xE,
    NRT_DTYPE_FP8_E5 = 0xF,
} nrt_dtype_t;

typedef enum { NRT_TENSOR_USAGE_INPUT = 0, NRT_TENSOR_USAGE_OUTPUT = 1 } nrt_tensor_usage_t;

typedef struct nrt_tensor nrt_tensor_t;
typedef struct nrt_tensor_set nrt_tensor_set_t;
typedef struct nrt_model nrt_model_t;
typedef struct nrt_cc_context nrt_cc_context_t;
typedef struct nrt_async_sendrecv_comm nrt_async_sendrecv_comm_t;
typedef struct nrt_async_sendrecv_request nrt_async_sendrecv_request_t;

typedef struct {
    uint64_t rt_major;
    uint64_t rt_minor;
    uint64_t rt_patch;
    uint64_t rt_maintenance;
    char rt_detail[128];
    char git_hash[64];
} nrt_version_t;

typedef struct {
    uint32_t family; /* nrt_instance_family_t */
    uint32_t size;   /* nrt_instance_size_t */
    char arch_name[16];
    char device_revision[8];
} nrt_instance_info_t;

typedef struct {
    size_t bytes_used;
    size_t bytes_limit;
} nrt_vnc_memory_stats_t;

typedef struct {
    uint64_t offset;
    uint64_t size;
    void *buffer;
} nrt_tensor_batch_op_t;

typedef struct {
    const nrt_tensor_t *tensor;
    const nrt_tensor_batch_op_t *ops;
    uint32_t num_ops;
} nrt_tensor_batch_t;

typedef struct {
    uint64_t physical_address;
    size_t size;
    int hbm_index;
} nrt_tensor_device_allocation_info_t;

typedef struct {
    char name[256];
    nrt_tensor_usage_t usage;
    size_t size;
    nrt_dtype_t dtype;
    uint32_t *shape;
    uint32_t ndim;
} nrt_tensor_info_t;

typedef struct {
    uint64_t tensor_count;
    nrt_tensor_info_t tensor_array[];
} nrt_tensor_info_array_t;

typedef struct {
    uint32_t *replica_group;
    uint32_t rank;
    uint32_t rank_n;
    uint32_t ctx_device_id;
    uint32_t ctx_device_count;
    uint32_t vnc;
} nrt_cc_comm_t;

typedef struct {
    nrt_tensor_t **tensors;
    size_t num_tensors;
} nrt_tensor_list_t;

typedef enum {
    NRT_OP_ADD = 0,
    NRT_OP_FMA = 1,
    NRT_OP_MAX = 2,
    NRT_OP_MIN = 3,
    NRT_OP_INVALID = 0xF,
} nrt_op_type_t;

typedef enum {
    NRT_CC_ALLGATHER = 0,
    NRT_CC_ALLREDUCE = 1,
    NRT_CC_REDUCESCATTER = 2,
} nrt_cc_op_type_t;

/* Top 16 bits: the execution unit. Low 48 bits: a number that only grows. */
typedef uint64_t nrta_seq_t;

#if SIM_API == 2
typedef enum {
    NRTA_XU_TENSOR_READ = 0,
    NRTA_XU_TENSOR_WRITE = 1,
    NRTA_XU_TENSOR_OP = 2,
    NRTA_XU_COMPUTE = 3,
    NRTA_XU_COLLECTIVES = 4,
} nrta_xu_t;
typedef struct nrta_error_tracker nrta_error_tracker_t;
typedef struct {
    nrta_seq_t seq_id;
    uint64_t error_code; /* NRT_STATUS */
} nrta_error_t;
typedef nrta_error_tracker_t sim_result_t; /* what the `ret` argument points to */
#else
typedef enum {
    NRTA_XU_TENSOR_OP = 0,
    NRTA_XU_COMPUTE = 1,
    NRTA_XU_COLLECTIVES = 2,
} nrta_xu_t;
typedef NRT_STATUS sim_result_t;
#endif

#endif
