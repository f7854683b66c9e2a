/*
 * The service thread of async send/receive: moves bytes, and has all sockets. See sendrecv.h.
 *
 * Points of faults, each with the lnc as its core. A status (or a hang) at
 *
 *     sendrecv.guest     when a sender says hello: it is turned away, and dials again
 *     sendrecv.send      before a send's bytes leave: the send ends with this status and its
 *                        receive with NRT_NETWORK_PROXY_FAILURE; after NRT_TIMEOUT neither ends
 *     sendrecv.chunk     after each 256 KiB of a message: the link is cut, as by a dead peer
 *     sendrecv.receive   when a receive's bytes are all here: as sendrecv.send, the other way round
 *     sendrecv.corrupt   before that: one bit of them is turned, and all goes on
 *
 * One that waits delays everything this process sends and receives.
 *
 * A peer is lost when its socket is closed, which a process's end does, too. What came whole before
 * is received. The requests in flight never end.
 */
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>

#include "sendrecv.h"

enum {
    CHUNK_BYTES = 256 << 10,
    READS_PER_TURN = 16,
    BURST_BYTES = 64 << 10, /* what may leave at once under NRT_SIM_BYTES_PER_S */
};

struct watched { /* beside each pollfd */
    struct lnc_state *lnc;
    struct communicator *communicator;
    struct guest *guest;
};

static pthread_t thread;
static bool is_running, is_stopping;
static atomic_int wake_fd = -1; /* made once, never closed */
static struct pollfd *polled;
static struct watched *watched;
static size_t num_watched, watched_capacity;

void service_wake(void)
{
    int fd = atomic_load(&wake_fd);
    if (fd >= 0)
        eventfd_write(fd, 1);
}

NRT_STATUS service_pass(const char *point, const struct lnc_state *lnc)
{
    sendrecv_unlock();
    NRT_STATUS status = sim_fault(point, lnc->lnc);
    sendrecv_lock();
    return status;
}

/* ---- Sending ------------------------------------------------------------------------ */

/* The next send whose bytes may go, if its link is free. */
static struct request *next_send(const struct communicator *communicator)
{
    if (!communicator->is_sender || communicator->link.fd < 0 ||
        link_is_sending(&communicator->link))
        return NULL;
    struct request *request = communicator->first;
    while (request != NULL && (request->state != REQUEST_CLEARED || request->is_started))
        request = request->next;
    return request;
}

static void start_send(struct communicator *sender)
{
    struct request *request;
    while ((request = next_send(sender)) != NULL) {
        request->is_started = true;
        NRT_STATUS status = service_pass("sendrecv.send", sender->lnc);
        if (status == NRT_SUCCESS) {
            link_put_body(&sender->link, request->number, request->memory, request->num_bytes);
        } else if (status != NRT_TIMEOUT) {
            link_put(&sender->link, FRAME_ABORTED, request->number, 0);
            request_finish(request, status);
        }
    }
}

static void refill(struct lnc_state *lnc)
{
    uint64_t now_us = sim_now_us();
    double rate = (double)sendrecv_settings.bytes_per_s;
    double burst = rate / 100 > BURST_BYTES ? rate / 100 : BURST_BYTES;
    bool is_first = lnc->allowance_us == 0;
    lnc->allowance += is_first ? burst : rate * (double)(now_us - lnc->allowance_us) / 1e6;
    lnc->allowance = lnc->allowance > burst ? burst : lnc->allowance;
    lnc->allowance_us = now_us;
}

static bool may_send_bytes(const struct lnc_state *lnc)
{
    return sendrecv_settings.bytes_per_s == 0 || lnc->allowance >= 1;
}

static void write_out(struct communicator *communicator)
{
    struct lnc_state *lnc = communicator->lnc;
    bool is_limited = sendrecv_settings.bytes_per_s > 0;
    uint64_t allowance = is_limited ? (uint64_t)lnc->allowance : UINT64_MAX;
    uint64_t left = communicator->link.from_left;
    link_write(&communicator->link, &allowance);
    uint64_t num_sent = left - communicator->link.from_left;
    lnc->num_bytes_sent += num_sent;
    if (is_limited)
        lnc->allowance -= (double)num_sent;
    if (left / CHUNK_BYTES != communicator->link.from_left / CHUNK_BYTES &&
        service_pass("sendrecv.chunk", lnc) != NRT_SUCCESS)
        communicator_lose(communicator);
}

/* What can be done now. When to come again at the latest, if no socket does anything. */
static uint64_t advance(struct communicator *communicator)
{
    if (communicator->state == WAITING && !communicator->is_sender)
        communicator_find_guest(communicator);
    else if (communicator->state == WAITING && communicator->link.fd < 0)
        communicator_dial(communicator);
    if (communicator->link.fd < 0)
        return communicator->is_sender && communicator->state == WAITING ? communicator->redial_us
                                                                         : UINT64_MAX;
    do { /* until the socket is full: nothing else may wake this thread for the next one */
        start_send(communicator);
        write_out(communicator);
    } while (next_send(communicator) != NULL);
    bool is_waiting = link_is_sending(&communicator->link) && !may_send_bytes(communicator->lnc);
    return is_waiting ? sim_now_us() + 1000 : UINT64_MAX;
}

static uint64_t advance_all(void)
{
    uint64_t next_us = UINT64_MAX;
    for (int i = 0; i < SIM_CORES_MAX; i++) {
        struct lnc_state *lnc = sendrecv_lnc(i);
        guests_look_after(lnc, is_stopping);
        if (lnc->first != NULL && sendrecv_settings.bytes_per_s > 0)
            refill(lnc);
        for (struct communicator *one = lnc->first; one != NULL; one = one->next) {
            uint64_t wanted_us = advance(one);
            next_us = wanted_us < next_us ? wanted_us : next_us;
        }
    }
    return next_us;
}

/* ---- Receiving ---------------------------------------------------------------------- */

static bool announce(struct communicator *receiver, uint64_t number, uint64_t num_bytes)
{
    struct request *request = request_numbered(receiver, number);
    if (request != NULL) {
        request_meet(request, num_bytes);
        return true;
    }
    if (receiver->num_announced == receiver->announced_capacity) {
        size_t capacity = 2 * receiver->announced_capacity + 8;
        void *larger = realloc(receiver->announced, capacity * sizeof(struct announcement));
        if (larger == NULL)
            return false;
        receiver->announced = larger;
        receiver->announced_capacity = capacity;
    }
    receiver->announced[receiver->num_announced++] = (struct announcement){number, num_bytes};
    return true;
}

static void end_receive(struct communicator *receiver, struct request *request)
{
    if (service_pass("sendrecv.corrupt", receiver->lnc) != NRT_SUCCESS)
        request->shadow[request->num_bytes / 2] ^= 1;
    NRT_STATUS status = service_pass("sendrecv.receive", receiver->lnc);
    if (status == NRT_TIMEOUT)
        return;
    request_finish(request, status);
    link_put(&receiver->link, status == NRT_SUCCESS ? FRAME_RECEIVED : FRAME_ABORTED,
             request->number, 0);
}

static bool start_receive(struct communicator *receiver, const struct frame *frame)
{
    struct request *request = request_numbered(receiver, frame->number);
    if (request == NULL || request->state != REQUEST_CLEARED || request->is_started ||
        request->num_bytes != frame->num_bytes)
        return false;
    request->is_started = true;
    receiver->link.into = request->shadow;
    receiver->link.into_left = request->num_bytes;
    return true;
}

static bool answer(struct communicator *sender, const struct frame *frame)
{
    struct request *request = request_numbered(sender, frame->number);
    if (request == NULL || request->state == REQUEST_DONE)
        return false;
    if (frame->kind == FRAME_CLEAR)
        request->state = REQUEST_CLEARED;
    else if (frame->kind == FRAME_RECEIVED)
        request_finish(request, NRT_SUCCESS);
    else if (frame->kind == FRAME_MISMATCH) {
        request_finish(request, NRT_FAILURE);
        sim_violation("send %llu of lnc %d to lnc %d is of %llu bytes, its receive of %llu",
                      (unsigned long long)request->number, sender->lnc->lnc, sender->peer_lnc,
                      (unsigned long long)request->num_bytes,
                      (unsigned long long)frame->num_bytes);
    } else
        return false;
    return true;
}

static bool take_frame(struct communicator *communicator, const struct frame *frame)
{
    if (frame->kind == FRAME_WELCOME && communicator->state == WAITING) {
        communicator_pair(communicator);
        return true;
    }
    if (communicator->state != PAIRED)
        return false;
    if (frame->kind == FRAME_ABORTED) {
        struct request *request = request_numbered(communicator, frame->number);
        if (request != NULL && request->state != REQUEST_DONE)
            request_finish(request, NRT_NETWORK_PROXY_FAILURE);
        return request != NULL;
    }
    if (communicator->is_sender)
        return answer(communicator, frame);
    if (frame->kind == FRAME_ANNOUNCE)
        return announce(communicator, frame->number, frame->num_bytes);
    return frame->kind == FRAME_PAYLOAD && start_receive(communicator, frame);
}

static void read_communicator(struct communicator *communicator)
{
    struct link *link = &communicator->link;
    for (int i = 0; i < READS_PER_TURN && link->fd >= 0; i++) {
        enum link_event event = link_read(link);
        if (event == LINK_QUIET)
            return;
        if (event == LINK_GONE || (event == LINK_FRAME && !take_frame(communicator, &link->frame)))
            communicator_lose(communicator);
        else if (event == LINK_BODY)
            end_receive(communicator, request_numbered(communicator, link->frame.number));
    }
}

/* ---- The thread --------------------------------------------------------------------- */

static void watch(int fd, short events, struct watched who)
{
    if (fd < 0)
        return;
    if (num_watched == watched_capacity) {
        watched_capacity = 2 * watched_capacity + 64;
        polled = realloc(polled, watched_capacity * sizeof(*polled));
        watched = realloc(watched, watched_capacity * sizeof(*watched));
        if (polled == NULL || watched == NULL)
            abort(); /* a socket that nobody reads would hang the peer */
    }
    polled[num_watched] = (struct pollfd){.fd = fd, .events = events};
    watched[num_watched++] = who;
}

static void watch_all(void)
{
    num_watched = 0;
    watch(atomic_load(&wake_fd), POLLIN, (struct watched){0});
    for (int i = 0; i < SIM_CORES_MAX; i++) {
        struct lnc_state *lnc = sendrecv_lnc(i);
        if (lnc->phase == LNC_UNOPENED || lnc->phase == LNC_OPENING)
            continue;
        watch(lnc->listen_fd, POLLIN, (struct watched){.lnc = lnc});
        for (struct guest *one = lnc->guests; one != NULL; one = one->next)
            watch(one->link.fd, POLLIN, (struct watched){.lnc = lnc, .guest = one});
        for (struct communicator *one = lnc->first; one != NULL; one = one->next) {
            bool has_output = link_has_control(&one->link) ||
                              (link_is_sending(&one->link) && may_send_bytes(lnc));
            watch(one->link.fd, has_output ? POLLIN | POLLOUT : POLLIN,
                  (struct watched){.lnc = lnc, .communicator = one});
        }
    }
}

static void read_all(void)
{
    eventfd_t unused;
    if (polled[0].revents != 0)
        eventfd_read(polled[0].fd, &unused);
    for (size_t i = 1; i < num_watched; i++) {
        struct watched *who = &watched[i];
        if ((polled[i].revents & ~POLLOUT) == 0)
            continue;
        if (who->communicator != NULL)
            read_communicator(who->communicator);
        else if (who->guest != NULL)
            guest_read(who->lnc, who->guest);
        else if (who->lnc->listen_fd == polled[i].fd)
            guests_welcome(who->lnc);
    }
}

static void *serve(void *unused)
{
    sendrecv_lock();
    while (!is_stopping) {
        uint64_t next_us = advance_all();
        watch_all();
        sendrecv_unlock();
        uint64_t now_us = sim_now_us();
        uint64_t wait_ms = next_us <= now_us ? 0 : (next_us - now_us) / 1000 + 1;
        poll(polled, num_watched, next_us == UINT64_MAX ? -1 : (int)wait_ms);
        sendrecv_lock();
        read_all();
    }
    advance_all(); /* drops the guests */
    sendrecv_unlock();
    return unused;
}

bool service_start(void)
{
    if (is_running)
        return true;
    if (atomic_load(&wake_fd) < 0)
        atomic_store(&wake_fd, eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    sigset_t all, before;
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    is_stopping = false;
    is_running = atomic_load(&wake_fd) >= 0 && pthread_create(&thread, NULL, serve, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return is_running;
}

void service_stop(void)
{
    sendrecv_lock();
    bool was_running = is_running;
    is_stopping = true;
    sendrecv_unlock();
    if (!was_running)
        return;
    service_wake();
    pthread_join(thread, NULL);
    sendrecv_lock();
    is_running = false;
    sendrecv_unlock();
}
