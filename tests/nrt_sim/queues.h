/*
 * What the files of the asynchronous functions (nrta_*, nrt_async.h) share.
 *
 *   queues.c          queues, their threads, the order of requests
 *   queue_calls.c     the public functions that schedule, and what runs then
 *   queue_numbers.c   sequence numbers: what is over, and events when it is
 *   queue_results.c   where the status of a request goes
 */
#ifndef SIM_QUEUES_H
#define SIM_QUEUES_H

#include "models.h"

/* In API 2 each kind of tensor operation is a unit; in API 3 there is one unit with two queues. */
#if SIM_API == 2
enum { SIM_NUM_UNITS = 5 };
#else
enum { SIM_NUM_UNITS = 3 };
#endif
enum { SIM_UNIT_QUEUES_MAX = 3 };
#define SIM_NUMBER_MAX ((1ull << 48) - 1)

/* A part of memory that a request uses, to find requests that nobody has put into an order. */
struct sim_range {
    const unsigned char *start;
    uint64_t size;
    bool is_written;
};

/* An eventfd that is signalled when something is over. */
struct sim_event {
    int fd;         /* our own duplicate, or -1: nobody is told */
    int callers_fd; /* the caller's number for it, to find out whether it was closed; or -1 */
};
#define SIM_NO_EVENT ((struct sim_event){-1, -1})

/* What waits in a queue. Owns one hold on each tensor, or the execution. */
struct sim_queued {
    struct sim_queued *next;
    nrta_seq_t sequence;
    NRT_STATUS (*run)(struct sim_queued *queued);
    sim_result_t *result; /* the caller's; in API 2 a handle, or NULL */
    struct sim_execution *execution;
    struct sim_tensor *tensors[2];
    unsigned char *source, *destination;
    uint64_t size;
    struct sim_event event;
    uint32_t num_ranges;
    struct sim_range ranges[];
};

struct sim_queue {
    int vnc;
    nrta_xu_t unit;
    int index;
    pthread_t thread;
    bool has_thread;
    pthread_cond_t changed;
    struct sim_queued *first, *last; /* `first` runs, or runs next */
    uint32_t num_queued;
    uint64_t num_before; /* numbers up to this one are of a time before nrt_init: not valid */
    uint64_t num_scheduled;
    uint64_t num_completed;
    struct sim_event event; /* for every request */
};

/* ---- queues.c -------------------------------------------------------------------------------- */

/* Guards all queues. Not recursive. */
void sim_queues_lock(void);
void sim_queues_unlock(void);
/* The queue, made when it is used for the first time; NULL without memory. Under the lock. */
struct sim_queue *sim_queue_at(int vnc, nrta_xu_t unit, int index);
/* The queue of a number that was given out since nrt_init, else NULL. Under the lock. */
struct sim_queue *sim_queue_of(nrta_seq_t sequence);
nrta_seq_t sim_queue_sequence(const struct sim_queue *queue, uint64_t number);
/* INVALID when there is no such queue on this core. */
NRT_STATUS sim_queue_check(int vnc, nrta_xu_t unit, int index);
/* FAILURE in the implicit asynchronous mode, which excludes the explicit one. */
NRT_STATUS sim_queues_status(void);
/* A call that schedules on the unit ended like this, by a fault. Returns `status`. */
NRT_STATUS sim_unit_ended_with(int vnc, int unit, NRT_STATUS status);
/* A request with room for ranges. NULL without memory. */
struct sim_queued *sim_queued_new(uint32_t num_ranges);
/* Gives back the tensors or the execution. */
void sim_queued_let_go(struct sim_queued *queued);
/*
 * Puts it into the queue, with *sequence set before it can run. The queue owns it from SUCCESS on;
 * else nothing has changed.
 */
NRT_STATUS sim_queue_put(int vnc, nrta_xu_t unit, int index, struct sim_queued *queued,
                         nrta_seq_t *sequence);

/* ---- queue_numbers.c ------------------------------------------------------------------------- */

/* Counts the eventfd up, if there is one. That the caller closed it meanwhile is a violation. */
void sim_event_signal(const struct sim_event *event);
void sim_event_drop(struct sim_event *event);

/* ---- queue_results.c ------------------------------------------------------------------------- */

/* Whether results can go there: a pointer, or in API 2 a tracker for this core, or NULL. */
NRT_STATUS sim_result_check(const sim_result_t *result, int vnc);
/* Puts the status where the caller looks for it, before the request counts as completed. */
void sim_result_set(sim_result_t *result, nrta_seq_t sequence, NRT_STATUS status);
void sim_results_at_close(void);

/* ---- Steering by tests ----------------------------------------------------------------------- */

/* While it is on, no queue starts its next request. */
void nrt_sim_hold_queues(bool is_held);

#endif
