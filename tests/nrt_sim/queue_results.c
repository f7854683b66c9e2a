/*
 * Where the status of a request goes: a slot of the caller's, or an error tracker.
 *
 * API 3 writes it where the caller's `ret` points. API 2 adds failures, and failures only, to the
 * error tracker the caller named; a tracker is for one core, keeps what it was told, and may be
 * NULL.
 */
#include <stdlib.h>

#include "queues.h"

#if SIM_API >= 3

NRT_STATUS sim_result_check(const sim_result_t *result, int vnc)
{
    (void)vnc;
    return result == NULL ? NRT_INVALID : NRT_SUCCESS;
}

void sim_result_set(sim_result_t *result, nrta_seq_t sequence, NRT_STATUS status)
{
    (void)sequence;
    __atomic_store_n(result, status, __ATOMIC_RELEASE);
}

void sim_results_at_close(void) {}

#else

enum { ERRORS_MAX = 1024 };

struct tracker {
    uint32_t lnc;
    size_t num_errors; /* under `lock`; what stands before it does not change any more */
    nrta_error_t errors[ERRORS_MAX];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

NRT_STATUS sim_result_check(const sim_result_t *result, int vnc)
{
    if (result == NULL)
        return NRT_SUCCESS;
    pthread_mutex_lock(&lock);
    const struct tracker *tracker = sim_handle_object(SIM_ERROR_TRACKER, result);
    NRT_STATUS status = NRT_INVALID_HANDLE;
    if (tracker != NULL)
        status = (int)tracker->lnc == vnc ? NRT_SUCCESS : NRT_INVALID;
    pthread_mutex_unlock(&lock);
    return status;
}

void sim_result_set(sim_result_t *result, nrta_seq_t sequence, NRT_STATUS status)
{
    if (result == NULL)
        return;
    pthread_mutex_lock(&lock);
    struct tracker *tracker = sim_handle_object(SIM_ERROR_TRACKER, result);
    const bool is_there = tracker != NULL;
    if (is_there && status != NRT_SUCCESS && tracker->num_errors < ERRORS_MAX)
        tracker->errors[tracker->num_errors++] = (nrta_error_t){sequence, (uint64_t)status};
    pthread_mutex_unlock(&lock);
    if (!is_there)
        sim_violation("an error tracker is destroyed before what was scheduled with it is over");
}

NRT_STATUS nrta_error_tracker_create(uint32_t lnc, nrta_error_tracker_t **tracker)
{
    SIM_ENTER_ON("nrta_error_tracker_create", (int)lnc);
    SIM_NOTE("lnc", lnc);
    if (tracker == NULL || sim_check_vnc((int)lnc) != NRT_SUCCESS)
        SIM_RETURN(NRT_INVALID);
    struct tracker *made = calloc(1, sizeof *made);
    if (made == NULL)
        SIM_RETURN(NRT_FAIL_HOST_MEM_ALLOC);
    made->lnc = lnc;
    nrta_error_tracker_t *handle = sim_handle_new(SIM_ERROR_TRACKER, made);
    if (handle == NULL) {
        free(made);
        SIM_RETURN(NRT_RESOURCE);
    }
    *tracker = handle;
    SIM_RETURN(NRT_SUCCESS);
}

void nrta_error_tracker_destroy(nrta_error_tracker_t *tracker)
{
    SIM_ENTER_OR("nrta_error_tracker_destroy", );
    pthread_mutex_lock(&lock);
    struct tracker *ended = sim_handle_end(SIM_ERROR_TRACKER, tracker);
    pthread_mutex_unlock(&lock);
    if (ended == NULL)
        sim_violation("nrta_error_tracker_destroy: this is no error tracker, or is gone already");
    free(ended);
}

/* The list is the tracker's, until that is destroyed. */
NRT_STATUS nrta_error_tracker_get_list(nrta_error_tracker_t *tracker, const nrta_error_t **errors,
                                       size_t *num_errors)
{
    SIM_ENTER("nrta_error_tracker_get_list");
    if (errors == NULL || num_errors == NULL)
        SIM_RETURN(NRT_INVALID);
    pthread_mutex_lock(&lock);
    const struct tracker *found = sim_handle_object(SIM_ERROR_TRACKER, tracker);
    if (found != NULL) {
        *errors = found->errors;
        *num_errors = found->num_errors;
    }
    pthread_mutex_unlock(&lock);
    SIM_RETURN(found == NULL ? NRT_INVALID_HANDLE : NRT_SUCCESS);
}

void sim_results_at_close(void)
{
    sim_handle_end_all(SIM_ERROR_TRACKER, free);
}

#endif
