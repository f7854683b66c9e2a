/*
 * The public functions that schedule something (nrt_async.h), and what runs then.
 *
 * In API 3 the functions on tensors have the core before the queue, as the runtime's release notes
 * and AWS's own callers have it, while the published headers are older: it must be the core the
 * tensor is on. In API 2 there is no such argument.
 *
 * Collectives outside of a model are not simulated: nrta_cc_prepare refuses what the headers do not
 * know as INVALID, and all else, like nrta_cc_schedule, with FAILURE and a line on stderr.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "queues.h"

#if SIM_API == 2
#define LNC_OF(vnc) (vnc)
enum {
    UNIT_OF_READS = NRTA_XU_TENSOR_READ,
    UNIT_OF_WRITES = NRTA_XU_TENSOR_WRITE,
    UNIT_OF_COPIES = NRTA_XU_TENSOR_OP,
};
#else
#define LNC_OF(vnc) (lnc)
enum {
    UNIT_OF_READS = NRTA_XU_TENSOR_OP,
    UNIT_OF_WRITES = NRTA_XU_TENSOR_OP,
    UNIT_OF_COPIES = NRTA_XU_TENSOR_OP,
};
#endif

/* A fault at the call itself, too, can kill the unit. */
#define ENTER_ON_UNIT(name, core, unit)                                                            \
    SIM_CALL_(name, core, true, return sim_unit_ended_with((core), (unit), sim_call.status))

/* ---- Operations on tensors ------------------------------------------------------------------- */

/* One side of a copy: a tensor with an offset, or the caller's buffer. */
struct side {
    const nrt_tensor_t *handle; /* NULL: a buffer */
    uint64_t offset;
    unsigned char *bytes;
};

static NRT_STATUS run_copy(struct sim_queued *queued)
{
    memmove(queued->destination, queued->source, queued->size);
    return NRT_SUCCESS;
}

/* Resolves a side. Only device memory has a core, and so a queue. */
static NRT_STATUS attach(struct sim_queued *queued, int index, struct side *side, uint64_t size,
                         bool is_written, int *vnc)
{
    if (side->handle == NULL)
        return side->bytes == NULL ? NRT_INVALID : NRT_SUCCESS;
    struct sim_tensor *tensor = sim_tensor_hold(side->handle);
    if (tensor == NULL)
        return NRT_INVALID_HANDLE;
    queued->tensors[index] = tensor;
    sim_tensor_in_flight(tensor, +1);
    if (tensor->placement != NRT_TENSOR_PLACEMENT_DEVICE || (*vnc >= 0 && *vnc != tensor->vnc))
        return NRT_INVALID;
    *vnc = tensor->vnc;
    const NRT_STATUS status = sim_tensor_data(tensor, side->offset, size, &side->bytes);
    if (status == NRT_SUCCESS)
        queued->ranges[queued->num_ranges++] =
            (struct sim_range){side->bytes, size, is_written};
    return status;
}

static NRT_STATUS schedule_copy(struct side source, struct side destination, uint64_t size,
                                int unit, int lnc, int queue, sim_result_t *result,
                                nrta_seq_t *sequence)
{
    if (sequence == NULL)
        return NRT_INVALID;
    NRT_STATUS status = sim_queues_status();
    if (status != NRT_SUCCESS)
        return status;
    struct sim_queued *queued = sim_queued_new(2);
    if (queued == NULL)
        return NRT_FAIL_HOST_MEM_ALLOC;
    int vnc = -1;
    status = attach(queued, 0, &source, size, false, &vnc);
    if (status == NRT_SUCCESS)
        status = attach(queued, 1, &destination, size, true, &vnc);
    if (status == NRT_SUCCESS && lnc != vnc)
        status = NRT_INVALID;
    if (status == NRT_SUCCESS)
        status = sim_queue_check(vnc, (nrta_xu_t)unit, queue);
    if (status == NRT_SUCCESS)
        status = sim_result_check(result, vnc);
    if (status == NRT_SUCCESS) {
        queued->run = run_copy;
        queued->result = result;
        queued->source = source.bytes;
        queued->destination = destination.bytes;
        queued->size = size;
        status = sim_queue_put(vnc, (nrta_xu_t)unit, queue, queued, sequence);
    }
    if (status != NRT_SUCCESS) {
        sim_queued_let_go(queued);
        free(queued);
    }
    return status;
}

/* For faults: the core a tensor is on, or -1. */
static int core_of(const nrt_tensor_t *handle)
{
    struct sim_tensor *tensor = sim_tensor_hold(handle);
    if (tensor == NULL)
        return -1;
    const int vnc = tensor->vnc;
    sim_tensor_release(tensor);
    return vnc;
}

NRT_STATUS nrta_tensor_write(nrt_tensor_t *tensor, const void *buffer, uint64_t offset,
                             uint64_t size, SIM_LNC_ARGUMENT int queue, sim_result_t *result,
                             nrta_seq_t *sequence)
{
    const int core = core_of(tensor);
    ENTER_ON_UNIT("nrta_tensor_write", core, UNIT_OF_WRITES);
    SIM_NOTE("tensor", sim_handle_number(tensor));
    SIM_NOTE("offset", offset);
    SIM_NOTE("size", size);
    SIM_NOTE("queue", queue);
    if (tensor == NULL)
        SIM_RETURN(NRT_INVALID_HANDLE);
    const struct side source = {.bytes = (unsigned char *)buffer}; /* only read */
    const struct side destination = {.handle = tensor, .offset = offset};
    SIM_RETURN(schedule_copy(source, destination, size, UNIT_OF_WRITES, LNC_OF(core), queue,
                             result, sequence));
}

NRT_STATUS nrta_tensor_read(void *buffer, nrt_tensor_t *tensor, uint64_t offset, uint64_t size,
                            SIM_LNC_ARGUMENT int queue, sim_result_t *result, nrta_seq_t *sequence)
{
    const int core = core_of(tensor);
    ENTER_ON_UNIT("nrta_tensor_read", core, UNIT_OF_READS);
    SIM_NOTE("tensor", sim_handle_number(tensor));
    SIM_NOTE("offset", offset);
    SIM_NOTE("size", size);
    SIM_NOTE("queue", queue);
    if (tensor == NULL)
        SIM_RETURN(NRT_INVALID_HANDLE);
    const struct side source = {.handle = tensor, .offset = offset};
    const struct side destination = {.bytes = buffer};
    SIM_RETURN(schedule_copy(source, destination, size, UNIT_OF_READS, LNC_OF(core), queue,
                             result, sequence));
}

NRT_STATUS nrta_tensor_copy(nrt_tensor_t *source, uint64_t source_offset,
                            nrt_tensor_t *destination, uint64_t destination_offset, uint64_t size,
                            SIM_LNC_ARGUMENT int queue, sim_result_t *result, nrta_seq_t *sequence)
{
    const int core = core_of(source);
    ENTER_ON_UNIT("nrta_tensor_copy", core, UNIT_OF_COPIES);
    SIM_NOTE("source", sim_handle_number(source));
    SIM_NOTE("source_offset", source_offset);
    SIM_NOTE("destination", sim_handle_number(destination));
    SIM_NOTE("destination_offset", destination_offset);
    SIM_NOTE("size", size);
    SIM_NOTE("queue", queue);
    if (source == NULL || destination == NULL)
        SIM_RETURN(NRT_INVALID_HANDLE);
    const struct side from = {.handle = source, .offset = source_offset};
    const struct side to = {.handle = destination, .offset = destination_offset};
    SIM_RETURN(schedule_copy(from, to, size, UNIT_OF_COPIES, LNC_OF(core), queue, result,
                             sequence));
}

/* ---- Executions ------------------------------------------------------------------------------ */

static NRT_STATUS run_execution(struct sim_queued *queued)
{
    return sim_execution_run(queued->execution, true);
}

/* What it uses alone; aliased state is left out, see queues.c. */
static void note_ranges(struct sim_queued *queued)
{
    const struct sim_execution *execution = queued->execution;
    const struct sim_neff *neff = execution->model->neff;
    for (uint32_t i = 0; i < execution->num_tensors; i++) {
        bool is_state = neff->tensors[i].alias >= 0;
        for (uint32_t k = 0; k < neff->num_inputs; k++)
            is_state = is_state || neff->tensors[k].alias == (int)i;
        const struct sim_tensor *tensor = execution->tensors[i];
        if (!is_state)
            queued->ranges[queued->num_ranges++] =
                (struct sim_range){tensor->memory, tensor->size, i >= neff->num_inputs};
    }
}

static NRT_STATUS schedule_execution(int vnc, struct sim_execution *execution, int queue,
                                     sim_result_t *result, nrta_seq_t *sequence)
{
    struct sim_queued *queued = sim_queued_new(execution->num_tensors);
    if (queued == NULL) {
        sim_execution_free(execution);
        return NRT_FAIL_HOST_MEM_ALLOC;
    }
    queued->run = run_execution;
    queued->execution = execution;
    queued->result = result;
    note_ranges(queued);
    const NRT_STATUS status = sim_queue_put(vnc, NRTA_XU_COMPUTE, queue, queued, sequence);
    if (status != NRT_SUCCESS) {
        sim_queued_let_go(queued);
        free(queued);
    }
    return status;
}

/* The sets must stay as they are until it is over: what is in them now is what runs. */
NRT_STATUS nrta_execute_schedule(nrt_model_t *model, const nrt_tensor_set_t *inputs,
                                 nrt_tensor_set_t *outputs, int queue, sim_result_t *result,
                                 nrta_seq_t *sequence)
{
    const int core = sim_model_core(model);
    ENTER_ON_UNIT("nrta_execute_schedule", core, NRTA_XU_COMPUTE);
    SIM_NOTE("model", sim_handle_number(model));
    SIM_NOTE("vnc", core);
    SIM_NOTE("queue", queue);
    if (core < 0)
        SIM_RETURN(NRT_INVALID_HANDLE);
    NRT_STATUS status = sequence == NULL ? NRT_INVALID : sim_queues_status();
    if (status == NRT_SUCCESS)
        status = sim_queue_check(core, NRTA_XU_COMPUTE, queue);
    if (status == NRT_SUCCESS)
        status = sim_result_check(result, core);
    if (status == NRT_SUCCESS && sim_core_is_dead(core))
        status = NRT_EXEC_UNIT_UNRECOVERABLE;
    struct sim_execution *execution = NULL;
    if (status == NRT_SUCCESS)
        status = sim_execution_new(model, inputs, outputs, &execution);
    if (status == NRT_SUCCESS)
        status = schedule_execution(core, execution, queue, result, sequence);
    SIM_RETURN(status);
}

/* ---- Collectives ----------------------------------------------------------------------------- */

static NRT_STATUS refuse_collective(const char *name)
{
    fprintf(stderr, "nrt_sim: %s: collectives outside of a model are not simulated\n", name);
    return NRT_FAILURE;
}

NRT_STATUS nrta_cc_prepare(nrt_cc_comm_t *communicator, nrt_tensor_list_t *inputs,
                           nrt_tensor_list_t *outputs, nrt_dtype_t dtype, nrt_op_type_t operation,
                           nrt_cc_op_type_t collective, nrt_cc_context_t **context)
{
    SIM_ENTER("nrta_cc_prepare");
    SIM_NOTE("dtype", dtype);
    SIM_NOTE("operation", operation);
    SIM_NOTE("collective", collective);
    const bool is_known = dtype > NRT_DTYPE_UNKNOWN && dtype <= NRT_DTYPE_FP8_E5 &&
                          operation <= NRT_OP_MIN && collective <= NRT_CC_REDUCESCATTER;
    if (communicator == NULL || inputs == NULL || outputs == NULL || context == NULL || !is_known)
        SIM_RETURN(NRT_INVALID);
    SIM_RETURN(refuse_collective("nrta_cc_prepare"));
}

NRT_STATUS nrta_cc_schedule(nrt_cc_context_t **context, int queue, sim_result_t *result,
                            nrta_seq_t *sequence)
{
    SIM_ENTER("nrta_cc_schedule");
    SIM_NOTE("queue", queue);
    (void)result;
    if (context == NULL || sequence == NULL)
        SIM_RETURN(NRT_INVALID);
    SIM_RETURN(refuse_collective("nrta_cc_schedule"));
}
