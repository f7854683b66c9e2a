/*
 * Sequence numbers: which request is over, and eventfds that say so.
 *
 * A number has the queue's name in its top 16 bits (core, queue, unit) and counts from 1 in the
 * low 48, on over nrt_close and nrt_init; numbers from before the last nrt_init are not valid.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "queues.h"

nrta_seq_t sim_queue_sequence(const struct sim_queue *queue, uint64_t number)
{
    const uint64_t name = (uint64_t)queue->vnc << 8 | (uint64_t)queue->index << 4 | queue->unit;
    return name << 48 | number;
}

struct sim_queue *sim_queue_of(nrta_seq_t sequence)
{
    const int vnc = (int)(sequence >> 56);
    const int index = (int)(sequence >> 52 & 15);
    const nrta_xu_t unit = (nrta_xu_t)(sequence >> 48 & 15);
    if (sim_queue_check(vnc, unit, index) != NRT_SUCCESS)
        return NULL;
    struct sim_queue *queue = sim_queue_at(vnc, unit, index);
    const uint64_t number = sequence & SIM_NUMBER_MAX;
    if (queue == NULL || number <= queue->num_before || number > queue->num_scheduled)
        return NULL;
    return queue;
}

NRT_STATUS nrta_is_completed(nrta_seq_t sequence, bool *is_completed)
{
    SIM_ENTER("nrta_is_completed");
    SIM_NOTE("sequence", sequence);
    if (is_completed == NULL)
        SIM_RETURN(NRT_INVALID);
    if (sim_queues_status() != NRT_SUCCESS)
        SIM_RETURN(sim_queues_status());
    sim_queues_lock();
    const struct sim_queue *queue = sim_queue_of(sequence);
    if (queue != NULL)
        *is_completed = (sequence & SIM_NUMBER_MAX) <= queue->num_completed;
    sim_queues_unlock();
    SIM_RETURN(queue == NULL ? NRT_INVALID : NRT_SUCCESS);
}

/* The last one that is over; number 0 when there is none yet. */
NRT_STATUS nrta_get_sequence(uint32_t lnc, nrta_xu_t unit, int queue, nrta_seq_t *sequence)
{
    SIM_ENTER_ON("nrta_get_sequence", (int)lnc);
    SIM_NOTE("lnc", lnc);
    SIM_NOTE("unit", unit);
    SIM_NOTE("queue", queue);
    NRT_STATUS status = sim_queues_status();
    if (status == NRT_SUCCESS)
        status = sequence == NULL ? NRT_INVALID : sim_queue_check((int)lnc, unit, queue);
    if (status != NRT_SUCCESS)
        SIM_RETURN(status);
    sim_queues_lock();
    const struct sim_queue *found = sim_queue_at((int)lnc, unit, queue);
    if (found != NULL)
        *sequence = sim_queue_sequence(found, found->num_completed);
    sim_queues_unlock();
    SIM_RETURN(found == NULL ? NRT_FAIL_HOST_MEM_ALLOC : NRT_SUCCESS);
}

/* ---- Events ---------------------------------------------------------------------------------- */

/*
 * The real library writes to the caller's number, whatever that is by then: who closes it first
 * has eight bytes written into some other file. Here the duplicate is written, and it shows.
 */
void sim_event_signal(const struct sim_event *event)
{
    if (event->fd < 0)
        return;
    if (event->callers_fd >= 0 && fcntl(event->callers_fd, F_GETFD) < 0)
        sim_violation("an eventfd is closed before its registration is taken back or fires");
    const uint64_t one = 1;
    ssize_t num_bytes;
    do
        num_bytes = write(event->fd, &one, sizeof one);
    while (num_bytes < 0 && errno == EINTR);
}

void sim_event_drop(struct sim_event *event)
{
    if (event->fd >= 0)
        close(event->fd);
    *event = SIM_NO_EVENT;
}

/* The request while it is not over, else NULL. The queues are locked. */
static struct sim_queued *find(const struct sim_queue *queue, nrta_seq_t sequence)
{
    struct sim_queued *queued = queue->first;
    while (queued != NULL && queued->sequence != sequence)
        queued = queued->next;
    return queued;
}

#if SIM_API >= 3

/* A negative fd makes SIM_NO_EVENT; what is no open descriptor is INVALID. */
static NRT_STATUS take(int fd, struct sim_event *event)
{
    *event = SIM_NO_EVENT;
    if (fd < 0)
        return NRT_SUCCESS;
    const int own_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own_fd < 0)
        return NRT_INVALID;
    *event = (struct sim_event){own_fd, fd};
    return NRT_SUCCESS;
}

static void swap(struct sim_event *one, struct sim_event *other)
{
    const struct sim_event first = *one;
    *one = *other;
    *other = first;
}

/* A request has one eventfd: the last that was registered. At once when the request is over. */
NRT_STATUS nrta_event_register_seq_id_completion(nrta_seq_t sequence, int fd)
{
    SIM_ENTER("nrta_event_register_seq_id_completion");
    SIM_NOTE("sequence", sequence);
    SIM_NOTE("fd", fd);
    struct sim_event event;
    NRT_STATUS status = sim_queues_status();
    if (status == NRT_SUCCESS)
        status = take(fd, &event);
    if (status != NRT_SUCCESS)
        SIM_RETURN(status);
    sim_queues_lock();
    const struct sim_queue *queue = sim_queue_of(sequence);
    struct sim_queued *queued = queue == NULL ? NULL : find(queue, sequence);
    if (queued != NULL)
        swap(&queued->event, &event);
    else if (queue != NULL)
        sim_event_signal(&event);
    sim_queues_unlock();
    sim_event_drop(&event);
    SIM_RETURN(queue == NULL ? NRT_INVALID : NRT_SUCCESS);
}

NRT_STATUS nrta_event_register_xu_completion(int lnc, nrta_xu_t unit, int queue, int fd)
{
    SIM_ENTER_ON("nrta_event_register_xu_completion", lnc);
    SIM_NOTE("lnc", lnc);
    SIM_NOTE("unit", unit);
    SIM_NOTE("queue", queue);
    SIM_NOTE("fd", fd);
    struct sim_event event;
    NRT_STATUS status = sim_queues_status();
    if (status == NRT_SUCCESS)
        status = sim_queue_check(lnc, unit, queue);
    if (status == NRT_SUCCESS)
        status = take(fd, &event);
    if (status != NRT_SUCCESS)
        SIM_RETURN(status);
    sim_queues_lock();
    struct sim_queue *found = sim_queue_at(lnc, unit, queue);
    if (found != NULL)
        swap(&found->event, &event);
    sim_queues_unlock();
    sim_event_drop(&event);
    SIM_RETURN(found == NULL ? NRT_FAIL_HOST_MEM_ALLOC : NRT_SUCCESS);
}

#else

/* Several handles of one request are duplicates of one eventfd. The queues are locked. */
static int handle_of(struct sim_queued *queued)
{
    if (queued == NULL)
        return eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK); /* over */
    if (queued->event.fd < 0)
        queued->event.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return queued->event.fd < 0 ? -1 : fcntl(queued->event.fd, F_DUPFD_CLOEXEC, 0);
}

/* A descriptor that is readable when the request is over. The caller closes it, at any time. */
NRT_STATUS nrta_get_completion_handle(nrta_seq_t sequence, int *fd)
{
    SIM_ENTER("nrta_get_completion_handle");
    SIM_NOTE("sequence", sequence);
    if (fd == NULL)
        SIM_RETURN(NRT_INVALID);
    if (sim_queues_status() != NRT_SUCCESS)
        SIM_RETURN(sim_queues_status());
    NRT_STATUS status = NRT_INVALID;
    sim_queues_lock();
    const struct sim_queue *queue = sim_queue_of(sequence);
    if (queue != NULL) {
        const int made = handle_of(find(queue, sequence));
        status = made < 0 ? NRT_RESOURCE : NRT_SUCCESS;
        if (made >= 0)
            *fd = made;
    }
    sim_queues_unlock();
    SIM_RETURN(status);
}

#endif
