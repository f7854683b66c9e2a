/*
 * What tensors have besides bytes moved (nrt.h): slices, foreign buffers, addresses,
 * copies on the device, descriptors for other importers, and counts of finished executions.
 *
 * Two things that the public headers leave open are chosen here: `timeout` of
 * check_output_completion is in microseconds and unbounded when negative, and a copy may have one
 * end on the host.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim.h"

enum { POLL_US = 200 };
static const uint64_t longest_wait_us = 60 * 1000000; /* a test that waits longer is broken */
static const uint64_t physical_base = UINT64_C(1) << 44;

static void sleep_us(long duration_us)
{
    nanosleep(&(struct timespec){0, duration_us * 1000}, NULL);
}

NRT_STATUS nrt_tensor_allocate_slice(const nrt_tensor_t *source, size_t offset, size_t size,
                                     const char *name, nrt_tensor_t **slice)
{
    SIM_ENTER("nrt_tensor_allocate_slice");
    SIM_NOTE("source", sim_handle_number(source));
    SIM_NOTE("offset", offset);
    SIM_NOTE("size", size);
    unsigned char *memory;
    struct sim_tensor *parent = sim_tensor_hold(source); /* the slice keeps this reference */
    if (parent == NULL)
        SIM_RETURN(NRT_INVALID_HANDLE);
    struct sim_tensor *made = NULL;
    NRT_STATUS status = NRT_INVALID;
    if (slice != NULL && size > 0)
        status = sim_tensor_data(parent, offset, size, &memory);
    if (status == NRT_SUCCESS && (made = calloc(1, sizeof(*made))) == NULL)
        status = NRT_FAIL_HOST_MEM_ALLOC;
    if (status != NRT_SUCCESS) {
        sim_tensor_release(parent);
        SIM_RETURN(status);
    }
    made->placement = parent->placement;
    made->vnc = parent->vnc;
    made->size = size;
    made->memory = memory;
    made->device_address = parent->device_address == 0 ? 0 : parent->device_address + offset;
    made->parent = parent;
    status = sim_tensor_publish(made, name, slice);
    SIM_NOTE("tensor", sim_handle_number(status == NRT_SUCCESS ? *slice : NULL));
    SIM_RETURN(status);
}

NRT_STATUS nrt_tensor_allocate_empty(const char *name, nrt_tensor_t **tensor)
{
    SIM_ENTER("nrt_tensor_allocate_empty");
    if (tensor == NULL)
        SIM_RETURN(NRT_INVALID);
    struct sim_tensor *made = calloc(1, sizeof(*made));
    if (made == NULL)
        SIM_RETURN(NRT_FAIL_HOST_MEM_ALLOC);
    made->placement = NRT_TENSOR_PLACEMENT_HOST;
    made->vnc = -1;
    NRT_STATUS status = sim_tensor_publish(made, name, tensor);
    SIM_NOTE("tensor", sim_handle_number(status == NRT_SUCCESS ? *tensor : NULL));
    SIM_RETURN(status);
}

/* The buffer stays the caller's and must outlive the tensor or the next attach. */
NRT_STATUS nrt_tensor_attach_buffer(nrt_tensor_t *handle, void *buffer, size_t size)
{
    SIM_ENTER("nrt_tensor_attach_buffer");
    SIM_NOTE("tensor", sim_handle_number(handle));
    SIM_NOTE("size", size);
    struct sim_tensor *tensor = sim_tensor_hold(handle);
    if (tensor == NULL)
        SIM_RETURN(NRT_INVALID_HANDLE);
    NRT_STATUS status = NRT_INVALID;
    bool is_plain = tensor->placement == NRT_TENSOR_PLACEMENT_HOST && tensor->parent == NULL;
    if (buffer != NULL && size > 0 && is_plain && !tensor->is_memory_owned) {
        tensor->memory = buffer;
        tensor->size = size;
        status = NRT_SUCCESS;
    }
    sim_tensor_release(tensor);
    SIM_RETURN(status);
}

size_t nrt_tensor_get_size(const nrt_tensor_t *handle)
{
    SIM_ENTER_OR("nrt_tensor_get_size", 0);
    struct sim_tensor *tensor = sim_tensor_hold(handle);
    size_t size = tensor == NULL ? 0 : tensor->size;
    if (tensor == NULL)
        sim_call.status = NRT_INVALID_HANDLE;
    sim_tensor_release(tensor);
    return size;
}

void *nrt_tensor_get_va(const nrt_tensor_t *handle)
{
    SIM_ENTER_OR("nrt_tensor_get_va", NULL);
    SIM_NOTE("tensor", sim_handle_number(handle));
    struct sim_tensor *tensor = sim_tensor_hold(handle);
    void *address = NULL;
    if (tensor == NULL)
        sim_call.status = NRT_INVALID_HANDLE;
    else if (tensor->placement == NRT_TENSOR_PLACEMENT_DEVICE)
        address = (void *)(uintptr_t)tensor->device_address;
    else
        address = tensor->memory;
    sim_tensor_release(tensor);
    return address;
}

NRT_STATUS nrt_tensor_copy(const nrt_tensor_t *source, size_t source_offset,
                           nrt_tensor_t *destination, size_t destination_offset, size_t size)
{
    SIM_ENTER("nrt_tensor_copy");
    SIM_NOTE("source", sim_handle_number(source));
    SIM_NOTE("source_offset", source_offset);
    SIM_NOTE("destination", sim_handle_number(destination));
    SIM_NOTE("destination_offset", destination_offset);
    SIM_NOTE("size", size);
    struct sim_tensor *from = sim_tensor_hold(source), *to = sim_tensor_hold(destination);
    NRT_STATUS status = from == NULL || to == NULL ? NRT_INVALID_HANDLE : NRT_SUCCESS;
    if (status == NRT_SUCCESS)
        status = sim_tensor_copy(from, source_offset, to, destination_offset, size);
    sim_tensor_release(from);
    sim_tensor_release(to);
    SIM_RETURN(status);
}

NRT_STATUS sim_tensor_copy(const struct sim_tensor *from, uint64_t from_offset,
                           const struct sim_tensor *to, uint64_t to_offset, uint64_t size)
{
    unsigned char *source, *destination;
    if (from->vnc >= 0 && to->vnc >= 0 && from->vnc != to->vnc)
        return NRT_INVALID;
    NRT_STATUS status = sim_tensor_data(from, from_offset, size, &source);
    if (status == NRT_SUCCESS)
        status = sim_tensor_data(to, to_offset, size, &destination);
    if (status == NRT_SUCCESS)
        memmove(destination, source, size);
    return status;
}

NRT_STATUS nrt_tensor_memset(nrt_tensor_t *handle, uint64_t offset, int value, size_t size)
{
    SIM_ENTER("nrt_tensor_memset");
    SIM_NOTE("tensor", sim_handle_number(handle));
    SIM_NOTE("offset", offset);
    SIM_NOTE("size", size);
    unsigned char *memory;
    struct sim_tensor *tensor = sim_tensor_hold(handle);
    if (tensor == NULL)
        SIM_RETURN(NRT_INVALID_HANDLE);
    NRT_STATUS status = sim_tensor_data(tensor, offset, size, &memory);
    if (status == NRT_SUCCESS)
        memset(memory, value, size);
    sim_tensor_release(tensor);
    SIM_RETURN(status);
}

NRT_STATUS nrt_tensor_get_device_allocation_info(const nrt_tensor_t *handle,
                                                 nrt_tensor_device_allocation_info_t *info)
{
    SIM_ENTER("nrt_tensor_get_device_allocation_info");
    SIM_NOTE("tensor", sim_handle_number(handle));
    struct sim_tensor *tensor = sim_tensor_hold(handle);
    if (tensor == NULL)
        SIM_RETURN(NRT_INVALID_HANDLE);
    NRT_STATUS status = NRT_INVALID;
    if (info != NULL && tensor->placement == NRT_TENSOR_PLACEMENT_DEVICE) {
        info->physical_address = physical_base | tensor->device_address;
        info->size = tensor->size;
        info->hbm_index = (int)sim_hbm_of_vnc(tensor->vnc);
        status = NRT_SUCCESS;
    }
    sim_tensor_release(tensor);
    SIM_RETURN(status);
}

NRT_STATUS nrt_tensor_check_output_completion(const nrt_tensor_t *handle, int64_t timeout,
                                              uint64_t expected_completion_count)
{
    SIM_ENTER("nrt_tensor_check_output_completion");
    SIM_NOTE("tensor", sim_handle_number(handle));
    SIM_NOTE("expected", expected_completion_count);
    struct sim_tensor *tensor = sim_tensor_hold(handle);
    if (tensor == NULL)
        SIM_RETURN(NRT_INVALID_HANDLE);
    uint64_t wait_us = timeout < 0 ? longest_wait_us : (uint64_t)timeout;
    uint64_t end_us = sim_now_us() + (wait_us < longest_wait_us ? wait_us : longest_wait_us);
    bool is_reached = false;
    while (!(is_reached = atomic_load(&tensor->num_completions) >= expected_completion_count) &&
           sim_now_us() < end_us)
        sleep_us(POLL_US);
    sim_tensor_release(tensor);
    SIM_RETURN(is_reached ? NRT_SUCCESS : NRT_TIMEOUT);
}

NRT_STATUS nrt_tensor_reset_output_completion(nrt_tensor_t *handle)
{
    SIM_ENTER("nrt_tensor_reset_output_completion");
    struct sim_tensor *tensor = sim_tensor_hold(handle);
    if (tensor == NULL)
        SIM_RETURN(NRT_INVALID_HANDLE);
    atomic_store(&tensor->num_completions, 0);
    sim_tensor_release(tensor);
    SIM_RETURN(NRT_SUCCESS);
}

/*
 * A real descriptor shows one range from its position 0. This one shows the core's whole memory
 * and stands at the range's start: map it at lseek(fd, 0, SEEK_CUR), for `size` bytes.
 */
NRT_STATUS nrt_get_dmabuf_fd(uint64_t va, uint64_t size, int *fd)
{
    SIM_ENTER("nrt_get_dmabuf_fd");
    SIM_NOTE("size", size);
    if (fd == NULL)
        SIM_RETURN(NRT_INVALID);
    *fd = -1;
    SIM_RETURN(sim_memory_descriptor(va, size, fd));
}

NRT_STATUS nrt_memcpy_to_device(void *destination, const void *source, size_t size)
{
    SIM_ENTER("nrt_memcpy_to_device");
    SIM_NOTE("size", size);
    unsigned char *memory;
    if (source == NULL || size == 0)
        SIM_RETURN(NRT_INVALID);
    NRT_STATUS status = sim_device_data((uint64_t)(uintptr_t)destination, size, &memory, NULL);
    if (status == NRT_SUCCESS)
        memcpy(memory, source, size);
    SIM_RETURN(status);
}
