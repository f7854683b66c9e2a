/*
 * The queues of the asynchronous functions: one thread per (core, execution unit, queue).
 *
 * Each runs its requests one at a time, in the order they were scheduled. A queue that has
 * NRT_SIM_QUEUE_DEPTH (default 64) requests that are not over refuses more with QUEUE_FULL.
 *
 * After an error of the unit itself (sim_is_fatal) all its queues on that core answer
 * EXEC_UNIT_UNRECOVERABLE, what waits in them included, until the process inits again.
 *
 * Two requests in different queues of a core that use the same bytes, one of them writing, have no
 * order: that is a violation, and the second is refused. (State of executions is left out: only
 * some slots of it are used, and the container does not say which.)
 *
 * nrt_close with requests that are not over is a violation, too: the one that runs ends as it
 * ends, the others with CLOSED. So no thread and no caller waits for what never comes.
 */
#include <stdlib.h>
#include <string.h>

#include "queues.h"

enum { DEPTH_DEFAULT = 64, DEPTH_MAX = 1 << 16 };

#if SIM_API == 2
static const int num_queues_of[SIM_NUM_UNITS] = {1, 1, 2, 1, 3};
#else
static const int num_queues_of[SIM_NUM_UNITS] = {2, 1, 3};
#endif

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Under `lock`: */
static struct sim_queue *queues[SIM_CORES_MAX][SIM_NUM_UNITS][SIM_UNIT_QUEUES_MAX];
static bool is_unit_dead[SIM_CORES_MAX][SIM_NUM_UNITS];
static bool is_held, is_closing;
/* Set by nrt_init only: */
static bool is_implicit;
static uint32_t depth = DEPTH_DEFAULT;

void sim_queues_lock(void)
{
    pthread_mutex_lock(&lock);
}

void sim_queues_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

NRT_STATUS sim_queues_status(void)
{
    return is_implicit ? NRT_FAILURE : NRT_SUCCESS;
}

NRT_STATUS sim_queue_check(int vnc, nrta_xu_t unit, int index)
{
    if ((int)unit < 0 || (int)unit >= SIM_NUM_UNITS || index < 0 || index >= num_queues_of[unit])
        return NRT_INVALID;
    return sim_check_vnc(vnc);
}

struct sim_queue *sim_queue_at(int vnc, nrta_xu_t unit, int index)
{
    struct sim_queue **queue = &queues[vnc][unit][index];
    if (*queue == NULL && (*queue = calloc(1, sizeof **queue)) != NULL) {
        **queue = (struct sim_queue){.vnc = vnc, .unit = unit, .index = index};
        (*queue)->event = SIM_NO_EVENT;
        pthread_cond_init(&(*queue)->changed, NULL);
    }
    return *queue;
}

/* ---- Requests -------------------------------------------------------------------------------- */

struct sim_queued *sim_queued_new(uint32_t num_ranges)
{
    struct sim_queued *queued =
        calloc(1, sizeof *queued + num_ranges * sizeof queued->ranges[0]);
    if (queued != NULL)
        queued->event = SIM_NO_EVENT;
    return queued;
}

void sim_queued_let_go(struct sim_queued *queued)
{
    for (int i = 0; i < 2; i++)
        if (queued->tensors[i] != NULL) {
            sim_tensor_in_flight(queued->tensors[i], -1);
            sim_tensor_release(queued->tensors[i]);
            queued->tensors[i] = NULL;
        }
    if (queued->execution != NULL)
        sim_execution_free(queued->execution);
    queued->execution = NULL;
}

static bool do_conflict(const struct sim_queued *a, const struct sim_queued *b)
{
    for (uint32_t i = 0; i < a->num_ranges; i++)
        for (uint32_t k = 0; k < b->num_ranges; k++) {
            const struct sim_range *one = &a->ranges[i], *other = &b->ranges[k];
            if ((one->is_written || other->is_written) &&
                one->start < other->start + other->size && other->start < one->start + one->size)
                return true;
        }
    return false;
}

/* Whether a request in another queue of the core uses the same bytes. `lock` is held. */
static bool has_rival(const struct sim_queue *queue, const struct sim_queued *queued)
{
    for (int unit = 0; unit < SIM_NUM_UNITS; unit++)
        for (int i = 0; i < num_queues_of[unit]; i++) {
            const struct sim_queue *other = queues[queue->vnc][unit][i];
            if (other == NULL || other == queue)
                continue;
            for (const struct sim_queued *its = other->first; its != NULL; its = its->next)
                if (do_conflict(queued, its))
                    return true;
        }
    return false;
}

/* ---- The thread ------------------------------------------------------------------------------ */

/* Runs without the lock, which is held before and after. */
static NRT_STATUS run(const struct sim_queue *queue, struct sim_queued *queued)
{
    if (is_closing)
        return NRT_CLOSED;
    if (is_unit_dead[queue->vnc][queue->unit])
        return NRT_EXEC_UNIT_UNRECOVERABLE;
    pthread_mutex_unlock(&lock);
    NRT_STATUS status = sim_fault("queues.run", queue->vnc);
    if (status == NRT_SUCCESS)
        status = queued->run(queued);
    pthread_mutex_lock(&lock);
    if (sim_is_fatal(status))
        is_unit_dead[queue->vnc][queue->unit] = true;
    return status;
}

NRT_STATUS sim_unit_ended_with(int vnc, int unit, NRT_STATUS status)
{
    if (vnc >= 0 && vnc < SIM_CORES_MAX && sim_is_fatal(status)) {
        pthread_mutex_lock(&lock);
        is_unit_dead[vnc][unit] = true;
        pthread_mutex_unlock(&lock);
    }
    return status;
}

/*
 * First what it held goes back, then the status is out, then it counts as completed, then events
 * go. It stays the queue's first until it counts, so that a watcher finds it or finds it over.
 * `lock` is held before and after.
 */
static void finish(struct sim_queue *queue, struct sim_queued *queued, NRT_STATUS status)
{
    pthread_mutex_unlock(&lock);
    sim_queued_let_go(queued);
    sim_result_set(queued->result, queued->sequence, status);
    sim_fault("queues.finish", queue->vnc);
    sim_trace_event("completed", ", \"sequence\": %llu, \"status\": %d",
                    (unsigned long long)queued->sequence, (int)status);
    pthread_mutex_lock(&lock);
    queue->first = queued->next;
    if (queue->first == NULL)
        queue->last = NULL;
    queue->num_queued--;
    queue->num_completed++;
    sim_event_signal(&queued->event);
    sim_event_signal(&queue->event);
    sim_event_drop(&queued->event);
    free(queued);
}

static void *work(void *argument)
{
    struct sim_queue *queue = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!is_closing && (queue->first == NULL || is_held))
            pthread_cond_wait(&queue->changed, &lock);
        struct sim_queued *queued = queue->first;
        if (queued == NULL)
            break; /* closing, and nothing is left */
        finish(queue, queued, run(queue, queued));
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static NRT_STATUS start_thread(struct sim_queue *queue)
{
    if (!queue->has_thread && pthread_create(&queue->thread, NULL, work, queue) != 0)
        return NRT_FAIL_HOST_MEM_ALLOC;
    queue->has_thread = true;
    return NRT_SUCCESS;
}

/* ---- Scheduling ------------------------------------------------------------------------------ */

/* SUCCESS when the queue takes one more. `lock` is held. */
static NRT_STATUS is_open_to_more(struct sim_queue *queue)
{
    if (is_unit_dead[queue->vnc][queue->unit])
        return NRT_EXEC_UNIT_UNRECOVERABLE;
    if (queue->num_queued >= depth)
        return NRT_QUEUE_FULL;
    if (queue->num_scheduled >= SIM_NUMBER_MAX)
        return NRT_RESOURCE;
    return start_thread(queue);
}

/* `lock` is held. */
static void append(struct sim_queue *queue, struct sim_queued *queued, nrta_seq_t *sequence)
{
    queued->sequence = sim_queue_sequence(queue, ++queue->num_scheduled);
    *sequence = queued->sequence;
    if (queue->last == NULL)
        queue->first = queued;
    else
        queue->last->next = queued;
    queue->last = queued;
    queue->num_queued++;
    pthread_cond_signal(&queue->changed);
}

NRT_STATUS sim_queue_put(int vnc, nrta_xu_t unit, int index, struct sim_queued *queued,
                         nrta_seq_t *sequence)
{
    bool is_rival = false;
    pthread_mutex_lock(&lock);
    struct sim_queue *queue = sim_queue_at(vnc, unit, index);
    NRT_STATUS status = queue == NULL ? NRT_FAIL_HOST_MEM_ALLOC : is_open_to_more(queue);
    if (status == NRT_SUCCESS) {
        is_rival = has_rival(queue, queued);
        if (!is_rival)
            append(queue, queued, sequence);
    }
    pthread_mutex_unlock(&lock);
    if (is_rival)
        return sim_violation("two queues of core %d use the same bytes in no order", vnc);
    return status;
}

/* ---- nrt_init and nrt_close ------------------------------------------------------------------ */

static void for_each_queue(void (*visit)(struct sim_queue *queue))
{
    for (int vnc = 0; vnc < SIM_CORES_MAX; vnc++)
        for (int unit = 0; unit < SIM_NUM_UNITS; unit++)
            for (int i = 0; i < num_queues_of[unit]; i++)
                if (queues[vnc][unit][i] != NULL)
                    visit(queues[vnc][unit][i]);
}

static void wake(struct sim_queue *queue)
{
    pthread_cond_signal(&queue->changed);
}

void nrt_sim_hold_queues(bool held)
{
    pthread_mutex_lock(&lock);
    is_held = held;
    for_each_queue(wake);
    pthread_mutex_unlock(&lock);
}

NRT_STATUS sim_queues_at_init(void)
{
    const char *text = getenv("NRT_SIM_QUEUE_DEPTH");
    const long wanted = text == NULL ? DEPTH_DEFAULT : strtol(text, NULL, 10);
    const char *implicit = getenv("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS");
    if (wanted < 1 || wanted > DEPTH_MAX)
        return NRT_INVALID;
    pthread_mutex_lock(&lock);
    depth = (uint32_t)wanted;
    is_implicit = implicit != NULL && strtol(implicit, NULL, 10) > 0;
    is_held = is_closing = false;
    memset(is_unit_dead, 0, sizeof is_unit_dead);
    pthread_mutex_unlock(&lock);
    return NRT_SUCCESS;
}

/* The queue stays, for its numbers. `lock` is held. */
static void end(struct sim_queue *queue)
{
    if (queue->num_queued > 0)
        sim_violation("nrt_close while %u requests in a queue of core %d are not over",
                      queue->num_queued, queue->vnc);
    pthread_cond_signal(&queue->changed);
    if (queue->has_thread) {
        pthread_mutex_unlock(&lock);
        pthread_join(queue->thread, NULL);
        pthread_mutex_lock(&lock);
    }
    queue->has_thread = false;
    queue->num_before = queue->num_scheduled;
    sim_event_drop(&queue->event);
}

void sim_queues_at_close(void)
{
    nrt_sim_hold_executions(false);
    pthread_mutex_lock(&lock);
    is_closing = true;
    for_each_queue(end);
    pthread_mutex_unlock(&lock);
    sim_results_at_close();
}
