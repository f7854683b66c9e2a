/*
 * nrt_init, nrt_close and what there is without cores (nrt.h, nrt_version.h, nrt_status.h).
 *
 * A process may open the runtime again after it closed it. nrt_init while it is open returns
 * FAILURE. Closing what is not open, closing while another call runs, and any use in a forked
 * child of an open process are violations: the real library leaves them undefined. A group of one
 * meets itself; collectives between processes are not simulated: build.py says what that means.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t forks_are_watched = PTHREAD_ONCE_INIT;
static atomic_int state = SIM_NEVER_OPENED;
static atomic_bool is_forked; /* this process is a child of one that was open */
static atomic_uint_fast64_t generation;

void sim_lock(void)
{
    pthread_mutex_lock(&lock);
}

void sim_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

enum sim_state sim_state(void)
{
    return (enum sim_state)atomic_load(&state);
}

NRT_STATUS sim_state_status(void)
{
    if (atomic_load(&is_forked))
        sim_violation("the runtime is used in a forked child of the process that opened it");
    switch (sim_state()) {
    case SIM_OPEN:
        return NRT_SUCCESS;
    case SIM_CLOSED:
        return NRT_CLOSED;
    default:
        return NRT_UNINITIALIZED;
    }
}

uint64_t sim_generation(void)
{
    return atomic_load(&generation);
}

/* The child's threads are gone and its memory is the parent's: nothing of it can be used. */
static void after_fork(void)
{
    if (atomic_load(&state) != SIM_OPEN)
        return;
    atomic_store(&state, SIM_NEVER_OPENED);
    atomic_store(&is_forked, true);
    sim_forget_cores();
}

static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, after_fork);
}

/*
 * What follows the cores, in order; on a failure what was begun ends again. "lifecycle.open" is a
 * point of faults: there nrt_init fails half-way.
 */
static NRT_STATUS open_parts(void)
{
    NRT_STATUS status = sim_fault("lifecycle.open", -1);
    if (status == NRT_SUCCESS)
        status = sim_models_at_init();
    if (status == NRT_SUCCESS)
        status = sim_queues_at_init();
    if (status == NRT_SUCCESS && (status = sim_sendrecv_at_init()) != NRT_SUCCESS)
        sim_queues_at_close();
    return status;
}

static NRT_STATUS open_runtime(void)
{
    struct sim_host host;
    sim_trace_open();
    sim_faults_open();
    NRT_STATUS status = sim_open_root();
    if (status == NRT_SUCCESS)
        status = sim_read_host(&host);
    if (status == NRT_SUCCESS)
        status = sim_take_cores(&host);
    if (status != NRT_SUCCESS)
        return status;
    sim_set_host(&host);
    status = open_parts();
    if (status != NRT_SUCCESS)
        sim_give_cores_back();
    return status;
}

NRT_STATUS nrt_init(nrt_framework_type_t framework, const char *framework_version,
                    const char *fal_version)
{
    SIM_ENTER_ANY("nrt_init");
    SIM_NOTE("framework", framework);
    pthread_once(&forks_are_watched, watch_forks);
    if (atomic_load(&is_forked))
        SIM_RETURN(sim_violation("nrt_init in a forked child of the process that opened it"));
    if (framework <= NRT_FRAMEWORK_TYPE_INVALID || framework > NRT_FRAMEWORK_TYPE_PRECHECK ||
        framework_version == NULL || fal_version == NULL)
        SIM_RETURN(NRT_INVALID);
    sim_lock();
    NRT_STATUS status = NRT_FAILURE;
    if (sim_state() == SIM_OPEN)
        fprintf(stderr, "nrt_sim: nrt_init of a runtime that is open\n");
    else
        status = open_runtime();
    if (status == NRT_SUCCESS) {
        atomic_fetch_add(&generation, 1);
        atomic_store(&state, SIM_OPEN);
        sim_trace_event("open", ", \"cores\": %u, \"first\": %d", sim_host()->num_mine,
                        sim_absolute_lnc(0));
    }
    sim_unlock();
    SIM_RETURN(status);
}

/* What the caller should have freed. The runtime does it now, so this is only traced. */
static void trace_leaks(void)
{
    static const struct {
        enum sim_kind kind;
        const char *name;
    } kinds[] = {{SIM_TENSOR, "tensors"},
                 {SIM_MODEL, "models"},
                 {SIM_TENSOR_SET, "tensor sets"},
                 {SIM_ERROR_TRACKER, "error trackers"},
                 {SIM_CC_CONTEXT, "collective contexts"}};
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        size_t num_left = sim_handle_count(kinds[i].kind);
        if (num_left > 0)
            sim_trace_event("leak", ", \"kind\": \"%s\", \"count\": %zu", kinds[i].name, num_left);
    }
}

void nrt_close(void)
{
    SIM_ENTER_ANY_OR("nrt_close", );
    sim_lock();
    if (atomic_load(&is_forked) || sim_state() != SIM_OPEN) {
        sim_unlock();
        sim_call.status = sim_violation("nrt_close of a runtime that is not open");
        return;
    }
    atomic_store(&state, SIM_CLOSED); /* before the count is read: a call does the reverse */
    int num_others = sim_num_running_calls() - 1;
    sim_unlock();
    if (num_others > 0) { /* memory it may use cannot go away: it leaks */
        sim_call.status = sim_violation("nrt_close while %d other calls run", num_others);
        sim_give_cores_back();
        return;
    }
    trace_leaks();
    sim_queues_at_close();
    sim_models_at_close();
    sim_sendrecv_at_close();
    sim_tensors_at_close();
    sim_memory_at_close();
    sim_give_cores_back();
}

/* What a checker of traces cannot know otherwise: the process ended in good order. */
__attribute__((destructor)) static void at_exit(void)
{
    if (!atomic_load(&is_forked))
        sim_trace_event("exit", ", \"is_open\": %s", sim_state() == SIM_OPEN ? "true" : "false");
}

const char *nrt_get_status_as_str(NRT_STATUS status)
{
    static const struct {
        NRT_STATUS status;
        const char *name;
    } names[] = {
        {NRT_SUCCESS, "NRT_SUCCESS"},
        {NRT_FAILURE, "NRT_FAILURE"},
        {NRT_INVALID, "NRT_INVALID"},
        {NRT_INVALID_HANDLE, "NRT_INVALID_HANDLE"},
        {NRT_RESOURCE, "NRT_RESOURCE"},
        {NRT_TIMEOUT, "NRT_TIMEOUT"},
        {NRT_HW_ERROR, "NRT_HW_ERROR"},
        {NRT_QUEUE_FULL, "NRT_QUEUE_FULL"},
        {NRT_LOAD_NOT_ENOUGH_NC, "NRT_LOAD_NOT_ENOUGH_NC"},
        {NRT_UNSUPPORTED_NEFF_VERSION, "NRT_UNSUPPORTED_NEFF_VERSION"},
        {NRT_FAIL_HOST_MEM_ALLOC, "NRT_FAIL_HOST_MEM_ALLOC"},
        {NRT_UNINITIALIZED, "NRT_UNINITIALIZED"},
        {NRT_CLOSED, "NRT_CLOSED"},
        {NRT_QUEUE_EMPTY, "NRT_QUEUE_EMPTY"},
        {NRT_EXEC_UNIT_UNRECOVERABLE, "NRT_EXEC_UNIT_UNRECOVERABLE"},
        {NRT_EXEC_BAD_INPUT, "NRT_EXEC_BAD_INPUT"},
        {NRT_EXEC_COMPLETED_WITH_NUM_ERR, "NRT_EXEC_COMPLETED_WITH_NUM_ERR"},
        {NRT_EXEC_COMPLETED_WITH_ERR, "NRT_EXEC_COMPLETED_WITH_ERR"},
        {NRT_EXEC_NC_BUSY, "NRT_EXEC_NC_BUSY"},
        {NRT_EXEC_OOB, "NRT_EXEC_OOB"},
        {NRT_COLL_PENDING, "NRT_COLL_PENDING"},
        {NRT_EXEC_HW_ERR_COLLECTIVES, "NRT_EXEC_HW_ERR_COLLECTIVES"},
        {NRT_EXEC_HW_ERR_HBM_UE, "NRT_EXEC_HW_ERR_HBM_UE"},
        {NRT_EXEC_HW_ERR_NC_UE, "NRT_EXEC_HW_ERR_NC_UE"},
        {NRT_EXEC_HW_ERR_DMA_ABORT, "NRT_EXEC_HW_ERR_DMA_ABORT"},
        {NRT_EXEC_SW_NQ_OVERFLOW, "NRT_EXEC_SW_NQ_OVERFLOW"},
        {NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE, "NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE"},
        {NRT_NETWORK_PROXY_FAILURE, "NRT_NETWORK_PROXY_FAILURE"},
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (names[i].status == status)
            return names[i].name;
    return "UNKNOWN";
}

/* A world of one process has nobody to meet. */
static NRT_STATUS meet_others(const char *name, int64_t vnc, uint32_t id, uint32_t count)
{
    if (vnc < 0 || vnc > INT32_MAX || sim_check_vnc((int)vnc) != NRT_SUCCESS || count == 0 ||
        id >= count)
        return NRT_INVALID;
    if (count == 1)
        return NRT_SUCCESS;
    fprintf(stderr, "nrt_sim: %s: collectives between processes are not simulated\n", name);
    return NRT_FAILURE;
}

NRT_STATUS nrt_build_global_comm(int32_t vnc, uint32_t g_device_id, uint32_t g_device_count)
{
    SIM_ENTER_ON("nrt_build_global_comm", vnc);
    SIM_RETURN(meet_others("nrt_build_global_comm", vnc, g_device_id, g_device_count));
}

NRT_STATUS nrt_cc_global_comm_init(uint32_t vnc, uint32_t g_device_id, uint32_t g_device_count)
{
    SIM_ENTER_ON("nrt_cc_global_comm_init", (int)vnc);
    SIM_RETURN(meet_others("nrt_cc_global_comm_init", vnc, g_device_id, g_device_count));
}

NRT_STATUS nrt_barrier(int32_t vnc, uint32_t g_device_id, uint32_t g_device_count)
{
    SIM_ENTER_ON("nrt_barrier", vnc);
    SIM_RETURN(meet_others("nrt_barrier", vnc, g_device_id, g_device_count));
}

void *nrt_get_libnccl_net(int *error, char *message, size_t message_size)
{
    SIM_ENTER_OR("nrt_get_libnccl_net", NULL);
    sim_call.status = NRT_FAILURE;
    if (error != NULL)
        *error = 1;
    if (message != NULL && message_size > 0)
        snprintf(message, message_size, "the simulator has no network plugin");
    return NULL;
}
