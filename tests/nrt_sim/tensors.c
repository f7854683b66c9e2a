/*
 * Tensors (nrt.h): handles, ranges, slices, and what moves bytes at the caller's order.
 *
 * A slice shares its source's memory and keeps it alive after the source's handle is freed. A
 * host tensor's address can be read; a device tensor's cannot (memory.c).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

enum { HOST_ALIGNMENT = 4096 };

static void hold(void *object)
{
    atomic_fetch_add(&((struct sim_tensor *)object)->num_references, 1);
}

struct sim_tensor *sim_tensor_hold(const nrt_tensor_t *handle)
{
    return sim_handle_hold(SIM_TENSOR, handle, hold);
}

void sim_tensor_release(struct sim_tensor *tensor)
{
    while (tensor != NULL && atomic_fetch_sub(&tensor->num_references, 1) == 1) {
        struct sim_tensor *parent = tensor->parent;
        if (tensor->is_memory_owned && tensor->placement == NRT_TENSOR_PLACEMENT_DEVICE)
            sim_memory_give_back(tensor->vnc, tensor->device_address);
        else if (tensor->is_memory_owned)
            free(tensor->memory);
        free(tensor);
        tensor = parent; /* the slice held it */
    }
}

static void release_object(void *object)
{
    sim_tensor_release(object);
}

NRT_STATUS sim_tensor_data(const struct sim_tensor *tensor, uint64_t offset, uint64_t size,
                           unsigned char **pointer)
{
    if (tensor->memory == NULL || offset > tensor->size || size > tensor->size - offset)
        return NRT_INVALID;
    *pointer = tensor->memory + offset;
    return NRT_SUCCESS;
}

void sim_tensor_in_flight(struct sim_tensor *tensor, int change)
{
    for (struct sim_tensor *part = tensor; part != NULL; part = part->parent)
        atomic_fetch_add(&part->num_in_flight, change);
}

void sim_tensor_completed(struct sim_tensor *tensor)
{
    atomic_fetch_add(&tensor->num_completions, 1);
}

NRT_STATUS sim_tensor_publish(struct sim_tensor *tensor, const char *name, nrt_tensor_t **handle)
{
    snprintf(tensor->name, sizeof(tensor->name), "%s", name == NULL ? "" : name);
    atomic_store(&tensor->num_references, 1);
    *handle = sim_handle_new(SIM_TENSOR, tensor);
    if (*handle != NULL)
        return NRT_SUCCESS;
    sim_tensor_release(tensor);
    return NRT_RESOURCE;
}

NRT_STATUS nrt_tensor_allocate(nrt_tensor_placement_t placement, int vnc, size_t size,
                               const char *name, nrt_tensor_t **tensor)
{
    SIM_ENTER_ON("nrt_tensor_allocate", vnc);
    SIM_NOTE("placement", placement);
    SIM_NOTE("vnc", vnc);
    SIM_NOTE("size", size);
    bool is_on_device = placement == NRT_TENSOR_PLACEMENT_DEVICE;
    if (tensor == NULL || size == 0 || size > UINT64_C(1) << 46 ||
        (!is_on_device && placement != NRT_TENSOR_PLACEMENT_HOST))
        SIM_RETURN(NRT_INVALID);
    if (is_on_device && sim_check_vnc(vnc) != NRT_SUCCESS)
        SIM_RETURN(NRT_INVALID);
    struct sim_tensor *made = calloc(1, sizeof(*made));
    if (made == NULL)
        SIM_RETURN(NRT_FAIL_HOST_MEM_ALLOC);
    made->placement = placement;
    made->size = size;
    made->vnc = is_on_device ? vnc : -1;
    NRT_STATUS status = NRT_SUCCESS;
    if (is_on_device)
        status = sim_memory_take(vnc, size, &made->memory, &made->device_address);
    else if (posix_memalign((void **)&made->memory, HOST_ALIGNMENT, size) != 0)
        status = NRT_FAIL_HOST_MEM_ALLOC;
    if (status != NRT_SUCCESS) {
        free(made);
        SIM_RETURN(status);
    }
    made->is_memory_owned = true;
    status = sim_tensor_publish(made, name, tensor);
    SIM_NOTE("tensor", sim_handle_number(status == NRT_SUCCESS ? *tensor : NULL));
    SIM_RETURN(status);
}

void nrt_tensor_free(nrt_tensor_t **tensor)
{
    if (tensor != NULL && *tensor != NULL && sim_state() != SIM_OPEN)
        sim_violation("nrt_tensor_free while the runtime is not open");
    SIM_ENTER_OR("nrt_tensor_free", );
    if (tensor == NULL || *tensor == NULL)
        return;
    SIM_NOTE("tensor", sim_handle_number(*tensor));
    struct sim_tensor *freed = sim_handle_end(SIM_TENSOR, *tensor);
    if (freed == NULL) {
        sim_violation("nrt_tensor_free of what is no tensor or was freed before");
        sim_call.status = NRT_INVALID_HANDLE;
        return;
    }
    if (atomic_load(&freed->num_in_flight) > 0)
        sim_violation("nrt_tensor_free while the device works on the tensor");
    *tensor = NULL;
    sim_tensor_release(freed);
}

/* One read or write of a held or foreign handle. */
static NRT_STATUS move(const nrt_tensor_t *handle, void *buffer, uint64_t offset, uint64_t size,
                       bool is_write)
{
    unsigned char *memory;
    struct sim_tensor *tensor = sim_tensor_hold(handle);
    if (tensor == NULL)
        return NRT_INVALID_HANDLE;
    NRT_STATUS status = sim_tensor_data(tensor, offset, size, &memory);
    if (status == NRT_SUCCESS && buffer == NULL && size > 0)
        status = NRT_INVALID;
    if (status == NRT_SUCCESS && size > 0)
        memcpy(is_write ? memory : buffer, is_write ? buffer : memory, size);
    sim_tensor_release(tensor);
    return status;
}

NRT_STATUS nrt_tensor_read(const nrt_tensor_t *tensor, void *buffer, size_t offset, size_t size)
{
    SIM_ENTER("nrt_tensor_read");
    SIM_NOTE("tensor", sim_handle_number(tensor));
    SIM_NOTE("offset", offset);
    SIM_NOTE("size", size);
    SIM_RETURN(move(tensor, buffer, offset, size, false));
}

NRT_STATUS nrt_tensor_write(nrt_tensor_t *tensor, const void *buffer, size_t offset, size_t size)
{
    SIM_ENTER("nrt_tensor_write");
    SIM_NOTE("tensor", sim_handle_number(tensor));
    SIM_NOTE("offset", offset);
    SIM_NOTE("size", size);
    SIM_RETURN(move(tensor, (void *)(uintptr_t)buffer, offset, size, true));
}

static NRT_STATUS check_range(const nrt_tensor_t *handle, uint64_t offset, uint64_t size)
{
    unsigned char *unused;
    struct sim_tensor *tensor = sim_tensor_hold(handle);
    NRT_STATUS status =
        tensor == NULL ? NRT_INVALID_HANDLE : sim_tensor_data(tensor, offset, size, &unused);
    sim_tensor_release(tensor);
    return status;
}

/* Checks the ranges of all operations first: a bad one moves nothing. */
static NRT_STATUS move_batches(const nrt_tensor_batch_t *batches, uint64_t num_batches,
                               bool is_write)
{
    if (batches == NULL && num_batches > 0)
        return NRT_INVALID;
    for (int pass = 0; pass < 2; pass++)
        for (uint64_t i = 0; i < num_batches; i++) {
            const nrt_tensor_batch_t *batch = &batches[i];
            if (batch->ops == NULL && batch->num_ops > 0)
                return NRT_INVALID;
            for (uint32_t j = 0; j < batch->num_ops; j++) {
                const nrt_tensor_batch_op_t *op = &batch->ops[j];
                NRT_STATUS status = NRT_SUCCESS;
                if (pass == 1)
                    status = move(batch->tensor, op->buffer, op->offset, op->size, is_write);
                else if (op->buffer == NULL && op->size > 0)
                    status = NRT_INVALID;
                else /* nothing is moved: this only looks at the range */
                    status = check_range(batch->tensor, op->offset, op->size);
                if (status != NRT_SUCCESS)
                    return status;
            }
        }
    return NRT_SUCCESS;
}

/* A line for each operation: a checker wants to know the ranges. */
static void trace_batches(const char *event, const nrt_tensor_batch_t *batches,
                          uint64_t num_batches)
{
    for (uint64_t i = 0; i < num_batches && sim_is_traced(); i++)
        for (uint32_t j = 0; j < batches[i].num_ops; j++)
            sim_trace_event(event, ", \"tensor\": %lld, \"offset\": %llu, \"size\": %llu",
                            sim_handle_number(batches[i].tensor),
                            (unsigned long long)batches[i].ops[j].offset,
                            (unsigned long long)batches[i].ops[j].size);
}

NRT_STATUS nrt_tensor_read_batch(const nrt_tensor_batch_t *batches, uint64_t num_batches,
                                 bool unsafe)
{
    SIM_ENTER("nrt_tensor_read_batch");
    SIM_NOTE("num_batches", num_batches);
    SIM_NOTE("unsafe", unsafe);
    NRT_STATUS status = move_batches(batches, num_batches, false);
    if (status == NRT_SUCCESS)
        trace_batches("batch_read", batches, num_batches);
    SIM_RETURN(status);
}

NRT_STATUS nrt_tensor_write_batch(const nrt_tensor_batch_t *batches, uint64_t num_batches,
                                  bool unsafe)
{
    SIM_ENTER("nrt_tensor_write_batch");
    SIM_NOTE("num_batches", num_batches);
    SIM_NOTE("unsafe", unsafe);
    NRT_STATUS status = move_batches(batches, num_batches, true);
    if (status == NRT_SUCCESS)
        trace_batches("batch_write", batches, num_batches);
    SIM_RETURN(status);
}

void sim_tensors_at_close(void)
{
    sim_handle_end_all(SIM_TENSOR, release_object);
}
