/*
 * Requests of async send/receive: posting, testing, flush. See sendrecv.h.
 *
 *     send, receive   INVALID_HANDLE for a communicator that test_comm never called connected;
 *                     INVALID for one of the other direction, an empty range or one that is not
 *                     inside the tensor, and a tensor that is not in the memory of the
 *                     communicator's own core; FAILURE when the peer is lost; RESOURCE when as
 *                     many requests as may be are not tested done yet. A range on which a receive
 *                     in flight writes, or which a receive would write under a send in flight, is
 *                     a violation: which bytes win is undefined
 *     test_request    INVALID_HANDLE and a violation for a request that was tested done before;
 *                     FAILURE and a violation while another thread tests it. The status of a
 *                     request that failed, once
 *     flush           makes the receives of this lnc that were tested done visible, no others
 *
 * A tensor is registered with a communicator by its first request and stays so until close: to free
 * it before is a violation, which tensors.c reports.
 *
 * Point of faults: "sendrecv.test_request", while the request counts as being tested.
 */
#include <stdlib.h>
#include <string.h>

#include "sendrecv.h"

struct request *request_numbered(const struct communicator *communicator, uint64_t number)
{
    struct request *request = communicator->first;
    while (request != NULL && request->number != number)
        request = request->next;
    return request;
}

void request_finish(struct request *request, NRT_STATUS status)
{
    request->state = REQUEST_DONE;
    request->status = status;
    if (status != NRT_SUCCESS) {
        free(request->shadow);
        request->shadow = NULL;
    }
}

static void free_request(struct request *request)
{
    free(request->shadow);
    free(request);
}

/* Takes it out of its communicator, and its handle is dead. */
static void take_out(struct request *request)
{
    struct communicator *communicator = request->communicator;
    struct request *before = NULL;
    for (struct request *one = communicator->first; one != request; one = one->next)
        before = one;
    if (before == NULL)
        communicator->first = request->next;
    else
        before->next = request->next;
    if (communicator->last == request)
        communicator->last = before;
    communicator->num_in_flight--;
    request->next = NULL;
    sim_handle_end(SIM_REQUEST, request->handle);
}

void request_end(struct request *request)
{
    take_out(request);
    free_request(request);
}

/* ---- Posting ------------------------------------------------------------------------ */

void request_meet(struct request *receive, uint64_t num_bytes)
{
    struct communicator *communicator = receive->communicator;
    if (receive->num_bytes != num_bytes) {
        link_put(&communicator->link, FRAME_MISMATCH, receive->number, receive->num_bytes);
        request_finish(receive, NRT_FAILURE);
        sim_violation("receive %llu of lnc %d from lnc %d is of %llu bytes, its send of %llu",
                      (unsigned long long)receive->number, communicator->lnc->lnc,
                      communicator->peer_lnc, (unsigned long long)receive->num_bytes,
                      (unsigned long long)num_bytes);
        return;
    }
    receive->shadow = malloc(num_bytes);
    if (receive->shadow == NULL) {
        link_put(&communicator->link, FRAME_ABORTED, receive->number, 0);
        request_finish(receive, NRT_FAIL_HOST_MEM_ALLOC);
        return;
    }
    receive->state = REQUEST_CLEARED;
    link_put(&communicator->link, FRAME_CLEAR, receive->number, 0);
}

static void meet_announced(struct request *receive)
{
    struct communicator *communicator = receive->communicator;
    for (size_t i = 0; i < communicator->num_announced; i++) {
        struct announcement *one = &communicator->announced[i];
        if (one->number != receive->number)
            continue;
        uint64_t num_bytes = one->num_bytes;
        *one = communicator->announced[--communicator->num_announced];
        request_meet(receive, num_bytes);
        return;
    }
}

static bool register_tensor(struct communicator *communicator, struct sim_tensor *tensor)
{
    for (size_t i = 0; i < communicator->num_registered; i++)
        if (communicator->registered[i] == tensor)
            return true;
    if (communicator->num_registered == communicator->registered_capacity) {
        size_t capacity = 2 * communicator->registered_capacity + 8;
        void *larger = realloc(communicator->registered, capacity * sizeof(struct sim_tensor *));
        if (larger == NULL)
            return false;
        communicator->registered = larger;
        communicator->registered_capacity = capacity;
    }
    communicator->registered[communicator->num_registered++] = tensor;
    atomic_fetch_add(&tensor->num_references, 1);
    sim_tensor_in_flight(tensor, 1);
    return true;
}

/* Whether a request in flight of this lnc and a new one would race for bytes. */
static bool is_raced(const struct communicator *communicator, const unsigned char *memory,
                     uint64_t num_bytes)
{
    for (const struct communicator *one = communicator->lnc->first; one != NULL; one = one->next) {
        if (one->is_sender && communicator->is_sender)
            continue;
        for (const struct request *old = one->first; old != NULL; old = old->next)
            if (old->memory < memory + num_bytes && memory < old->memory + old->num_bytes)
                return true;
    }
    return false;
}

static NRT_STATUS check_post(const struct communicator *communicator, bool is_sender,
                             const struct sim_tensor *tensor, size_t offset, size_t length,
                             unsigned char **memory)
{
    if (communicator->is_sender != is_sender)
        return NRT_INVALID;
    if (!communicator->is_tested)
        return NRT_INVALID_HANDLE;
    bool is_of_core = sim_absolute_lnc(tensor->vnc) == communicator->lnc->lnc; /* host: -1 */
    if (length == 0 || !is_of_core ||
        sim_tensor_data(tensor, offset, length, memory) != NRT_SUCCESS)
        return NRT_INVALID;
    if (communicator->lnc->phase != LNC_OPEN || communicator->state != PAIRED ||
        link_is_cut(&communicator->link))
        return NRT_FAILURE;
    bool is_full = communicator->num_in_flight >= sendrecv_settings.pending_max;
    return is_full ? NRT_RESOURCE : NRT_SUCCESS;
}

static NRT_STATUS add_request(struct communicator *communicator, struct sim_tensor *tensor,
                              unsigned char *memory, uint64_t num_bytes,
                              nrt_async_sendrecv_request_t **handle)
{
    struct request *request = calloc(1, sizeof(*request));
    if (request == NULL || !register_tensor(communicator, tensor)) {
        free(request);
        return NRT_FAIL_HOST_MEM_ALLOC;
    }
    request->handle = sim_handle_new(SIM_REQUEST, request);
    if (request->handle == NULL) {
        free(request);
        return NRT_RESOURCE;
    }
    if (is_raced(communicator, memory, num_bytes))
        sim_violation("a request of lnc %d uses bytes that a receive in flight writes",
                      communicator->lnc->lnc);
    request->communicator = communicator;
    request->memory = memory;
    request->num_bytes = num_bytes;
    request->number = communicator->num_posted++;
    if (communicator->last == NULL)
        communicator->first = request;
    else
        communicator->last->next = request;
    communicator->last = request;
    communicator->num_in_flight++;
    *handle = request->handle;
    if (communicator->is_sender)
        link_put(&communicator->link, FRAME_ANNOUNCE, request->number, num_bytes);
    else
        meet_announced(request);
    return NRT_SUCCESS;
}

static NRT_STATUS post(nrt_tensor_t *tensor_handle, size_t offset, size_t length,
                       nrt_async_sendrecv_comm_t *handle, bool is_sender,
                       nrt_async_sendrecv_request_t **request)
{
    if (request == NULL)
        return NRT_INVALID;
    struct sim_tensor *tensor = sim_tensor_hold(tensor_handle);
    if (tensor == NULL)
        return NRT_INVALID_HANDLE;
    NRT_STATUS status = NRT_INVALID_HANDLE;
    unsigned char *memory;
    sendrecv_lock();
    struct communicator *communicator = sim_handle_object(SIM_COMMUNICATOR, handle);
    if (communicator != NULL)
        status = check_post(communicator, is_sender, tensor, offset, length, &memory);
    if (status == NRT_SUCCESS)
        status = add_request(communicator, tensor, memory, length, request);
    sendrecv_unlock();
    sim_tensor_release(tensor);
    if (status == NRT_SUCCESS)
        service_wake();
    return status;
}

NRT_STATUS nrt_async_sendrecv_send_tensor(nrt_tensor_t *tensor, size_t offset, size_t length,
                                          nrt_async_sendrecv_comm_t *communicator,
                                          nrt_async_sendrecv_request_t **request)
{
    SIM_ENTER("nrt_async_sendrecv_send_tensor");
    SIM_NOTE("tensor", sim_handle_number(tensor));
    SIM_NOTE("offset", offset);
    SIM_NOTE("size", length);
    SIM_NOTE("communicator", sim_handle_number(communicator));
    NRT_STATUS status = post(tensor, offset, length, communicator, true, request);
    if (status == NRT_SUCCESS)
        SIM_NOTE("request", sim_handle_number(*request));
    SIM_RETURN(status);
}

NRT_STATUS nrt_async_sendrecv_recv_tensor(nrt_tensor_t *tensor, size_t offset, size_t length,
                                          nrt_async_sendrecv_comm_t *communicator,
                                          nrt_async_sendrecv_request_t **request)
{
    SIM_ENTER("nrt_async_sendrecv_recv_tensor");
    SIM_NOTE("tensor", sim_handle_number(tensor));
    SIM_NOTE("offset", offset);
    SIM_NOTE("size", length);
    SIM_NOTE("communicator", sim_handle_number(communicator));
    NRT_STATUS status = post(tensor, offset, length, communicator, false, request);
    if (status == NRT_SUCCESS)
        SIM_NOTE("request", sim_handle_number(*request));
    SIM_RETURN(status);
}

/* ---- Testing and flush -------------------------------------------------------------- */

/* The request, now being tested, or NULL and why not. */
static struct request *begin_test(nrt_async_sendrecv_request_t *handle, NRT_STATUS *status)
{
    struct request *request = sim_handle_object(SIM_REQUEST, handle);
    *status = request == NULL ? NRT_INVALID_HANDLE : NRT_SUCCESS;
    if (request == NULL && handle != NULL)
        sim_violation("test_request of request %lld, which is done or never was",
                      sim_handle_number(handle));
    else if (request != NULL && request->is_being_tested) {
        *status = sim_violation("two threads test request %lld", sim_handle_number(handle));
        request = NULL;
    } else if (request != NULL)
        request->is_being_tested = true;
    return request;
}

/* Tested done: the bytes of a receive wait for flush, everything else is over. */
static void hand_over(struct request *request)
{
    struct lnc_state *lnc = request->communicator->lnc;
    if (request->shadow == NULL) {
        request_end(request);
        return;
    }
    take_out(request);
    if (lnc->last_landed == NULL)
        lnc->landed = request;
    else
        lnc->last_landed->next = request;
    lnc->last_landed = request;
}

NRT_STATUS nrt_async_sendrecv_test_request(nrt_async_sendrecv_request_t *handle, bool *done,
                                           size_t *size)
{
    SIM_ENTER("nrt_async_sendrecv_test_request");
    SIM_NOTE("request", sim_handle_number(handle));
    if (done == NULL || size == NULL)
        SIM_RETURN(NRT_INVALID);
    NRT_STATUS status;
    sendrecv_lock();
    struct request *request = begin_test(handle, &status);
    int lnc = request == NULL ? -1 : request->communicator->lnc->lnc;
    sendrecv_unlock();
    if (request == NULL)
        SIM_RETURN(status);
    status = sim_fault("sendrecv.test_request", lnc); /* may take its time */
    sendrecv_lock();
    request->is_being_tested = false;
    if (status == NRT_SUCCESS) {
        *done = request->state == REQUEST_DONE;
        *size = *done ? request->num_bytes : 0;
        SIM_NOTE("done", *done);
    }
    if (status == NRT_SUCCESS && *done) {
        status = request->status;
        hand_over(request);
    }
    sendrecv_unlock();
    SIM_RETURN(status);
}

void lnc_forget_landed(struct lnc_state *lnc)
{
    while (lnc->landed != NULL) {
        struct request *next = lnc->landed->next;
        free_request(lnc->landed);
        lnc->landed = next;
    }
    lnc->last_landed = NULL;
}

NRT_STATUS nrt_async_sendrecv_flush(int lnc)
{
    SIM_ENTER_ON("nrt_async_sendrecv_flush", lnc);
    SIM_NOTE("lnc", lnc);
    NRT_STATUS status;
    sendrecv_lock();
    struct lnc_state *state = open_lnc(lnc, &status);
    if (state != NULL) {
        for (const struct request *one = state->landed; one != NULL; one = one->next)
            memcpy(one->memory, one->shadow, one->num_bytes);
        lnc_forget_landed(state);
    }
    sendrecv_unlock();
    SIM_RETURN(status);
}
