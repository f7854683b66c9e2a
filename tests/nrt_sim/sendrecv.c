/*
 * nrt_async_sendrecv_*: opening an lnc, communicators, and closing. See sendrecv.h.
 *
 * What each call refuses, beside what nrt_async_sendrecv.h states:
 *
 *     init        FAILURE without the two variables of the environment, on an instance without EFA,
 *                 when the bootstrap lock cannot be had, for an lnc that is open or whose close
 *                 failed; INVALID for an lnc that is not one of this process's cores
 *     connect,    INVALID for an address that is none, for a peer lnc that no host has, and while
 *     accept      another communicator of the same (peer address, peer lnc, lnc, direction) lives:
 *                 the rendezvous has one entry for these four. RESOURCE over the limit, for which
 *                 communicators count until the process ends
 *     test_comm   FAILURE when the peer is lost
 *     close       FAILURE, and the lnc is broken, as the header says; of a lost communicator as
 *                 well when it never was connected
 *
 * Environment of the simulator: NRT_SIM_COMMUNICATORS_MAX (128), NRT_SIM_PENDING_MAX (128),
 * NRT_SIM_CONNECT_DELAY_MS (5: how long a pair takes until it counts as connected),
 * NRT_SIM_BYTES_PER_S (0: no limit; of all that leaves one lnc), NRT_SIM_LOCK_WAIT_MS (2000).
 *
 * The bootstrap lock file is nrt_kv_store_server_lock_uid_<uid>, or nrt_kv_store_server.lock with
 * API 2, as in AWS's guides of that time. It lies in root/hosts/<address>/tmp, that host's /tmp. A
 * test makes a stale one by creating the file with mode 0 or another owner, or by holding
 * flock(LOCK_EX) on it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sendrecv.h"

struct sendrecv_settings sendrecv_settings;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct lnc_state lncs[SIM_CORES_MAX];

void sendrecv_lock(void)
{
    pthread_mutex_lock(&lock);
}

void sendrecv_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

struct lnc_state *sendrecv_lnc(int lnc)
{
    return &lncs[lnc];
}

static uint64_t setting(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    char *end;
    if (text == NULL)
        return otherwise;
    unsigned long long value = strtoull(text, &end, 10);
    if (*text >= '0' && *text <= '9' && *end == '\0')
        return value;
    fprintf(stderr, "nrt_sim: %s is no number: %s\n", name, text);
    abort(); /* a setting that does not count would prove nothing */
}

NRT_STATUS sim_sendrecv_at_init(void)
{
    sendrecv_lock();
    sendrecv_settings = (struct sendrecv_settings){
        .communicators_max = (uint32_t)setting("NRT_SIM_COMMUNICATORS_MAX", 128),
        .pending_max = (uint32_t)setting("NRT_SIM_PENDING_MAX", 128),
        .connect_delay_us = 1000 * setting("NRT_SIM_CONNECT_DELAY_MS", 5),
        .bytes_per_s = setting("NRT_SIM_BYTES_PER_S", 0),
        .lock_wait_us = 1000 * setting("NRT_SIM_LOCK_WAIT_MS", 2000),
    };
    sendrecv_unlock();
    return NRT_SUCCESS;
}

struct lnc_state *open_lnc(int lnc, NRT_STATUS *status)
{
    *status = NRT_INVALID;
    if (sim_vnc_of_lnc(lnc) < 0)
        return NULL;
    enum lnc_phase phase = lncs[lnc].phase;
    *status = phase == LNC_OPEN ? NRT_SUCCESS
              : phase == LNC_BROKEN ? NRT_FAILURE
                                    : NRT_UNINITIALIZED;
    return phase == LNC_OPEN ? &lncs[lnc] : NULL;
}

NRT_STATUS nrt_async_sendrecv_get_max_num_communicators_per_lnc(int *number)
{
    SIM_ENTER("nrt_async_sendrecv_get_max_num_communicators_per_lnc");
    if (number == NULL)
        SIM_RETURN(NRT_INVALID);
    *number = (int)sendrecv_settings.communicators_max;
    SIM_RETURN(NRT_SUCCESS);
}

NRT_STATUS nrt_async_sendrecv_get_max_num_pending_request(int *number)
{
    SIM_ENTER("nrt_async_sendrecv_get_max_num_pending_request");
    if (number == NULL)
        SIM_RETURN(NRT_INVALID);
    *number = (int)sendrecv_settings.pending_max;
    SIM_RETURN(NRT_SUCCESS);
}

/* The rendezvous port, or -1 when the environment does not open the gate. */
static int gate_port(void)
{
    const char *enabled = getenv("NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED");
    const char *text = getenv("NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT");
    char *end;
    if (enabled == NULL || strcmp(enabled, "1") != 0) {
        fprintf(stderr, "nrt_sim: NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED is not 1\n");
        return -1;
    }
    long port = text == NULL || *text < '0' || *text > '9' ? 0 : strtol(text, &end, 10);
    if (port >= 1 && port <= 65535 && *end == '\0')
        return (int)port;
    fprintf(stderr, "nrt_sim: NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT is no port\n");
    return -1;
}

/* Waits for the bootstrap lock, so no lock is held. */
static int listen_under_bootstrap_lock(int lnc, int port)
{
    int lock_fd;
    if (!take_bootstrap_lock(&lock_fd))
        return -1;
    int fd = listen_for(lnc, port);
    if (fd < 0)
        fprintf(stderr, "nrt_sim: cannot listen for lnc %d\n", lnc);
    give_bootstrap_lock(lock_fd);
    return fd;
}

NRT_STATUS nrt_async_sendrecv_init(int lnc)
{
    SIM_ENTER_ON("nrt_async_sendrecv_init", lnc);
    SIM_NOTE("lnc", lnc);
    if (sim_vnc_of_lnc(lnc) < 0)
        SIM_RETURN(NRT_INVALID);
    int port = gate_port();
    if (port < 0)
        SIM_RETURN(NRT_FAILURE);
    if (sim_host()->profile->efa_bdfs == NULL) {
        fprintf(stderr, "nrt_sim: this instance has no EFA\n");
        SIM_RETURN(NRT_FAILURE);
    }
    struct lnc_state *state = &lncs[lnc];
    sendrecv_lock();
    bool is_free = state->phase == LNC_UNOPENED;
    if (is_free)
        state->phase = LNC_OPENING;
    sendrecv_unlock();
    if (!is_free)
        SIM_RETURN(NRT_FAILURE);
    int fd = listen_under_bootstrap_lock(lnc, port);
    sendrecv_lock();
    bool is_open = fd >= 0 && service_start();
    state->phase = is_open ? LNC_OPEN : LNC_UNOPENED;
    state->lnc = lnc;
    state->num_openings++;
    state->port = port;
    state->listen_fd = fd;
    sendrecv_unlock();
    if (is_open)
        service_wake();
    SIM_RETURN(is_open ? NRT_SUCCESS : NRT_FAILURE);
}

/* ---- Communicators ---------------------------------------------------------------- */

bool communicator_is_connected(const struct communicator *communicator)
{
    return communicator->state == PAIRED && sim_now_us() >= communicator->ready_us;
}

/* Whether one of the same four still lives. A peer that is gone is seen here at once. */
static bool has_twin(const struct lnc_state *lnc, const struct communicator *new)
{
    for (const struct communicator *old = lnc->first; old != NULL; old = old->next) {
        bool is_alive = old->state == WAITING || (old->state == PAIRED && !link_is_cut(&old->link));
        if (is_alive && old->is_sender == new->is_sender && old->peer_lnc == new->peer_lnc &&
            strcmp(old->peer_address, new->peer_address) == 0)
            return true;
    }
    return false;
}

static NRT_STATUS add_communicator(struct lnc_state *lnc, const struct communicator *wanted,
                                   nrt_async_sendrecv_comm_t **handle)
{
    if (lnc->num_communicators >= (int)sendrecv_settings.communicators_max)
        return NRT_RESOURCE;
    if (has_twin(lnc, wanted))
        return NRT_INVALID;
    struct communicator *communicator = malloc(sizeof(*communicator));
    if (communicator == NULL)
        return NRT_FAIL_HOST_MEM_ALLOC;
    *communicator = *wanted;
    communicator->lnc = lnc;
    link_open(&communicator->link, -1);
    communicator->handle = sim_handle_new(SIM_COMMUNICATOR, communicator);
    if (communicator->handle == NULL) {
        free(communicator);
        return NRT_RESOURCE;
    }
    if (lnc->last == NULL)
        lnc->first = communicator;
    else
        lnc->last->next = communicator;
    lnc->last = communicator;
    lnc->num_communicators++;
    *handle = communicator->handle;
    return NRT_SUCCESS;
}

static NRT_STATUS open_communicator(const char *peer_ip, int peer_lnc, int lnc, bool is_sender,
                                    nrt_async_sendrecv_comm_t **handle)
{
    struct communicator wanted = {.is_sender = is_sender, .peer_lnc = peer_lnc, .state = WAITING};
    if (handle == NULL || !canonical_address(peer_ip, wanted.peer_address) || peer_lnc < 0 ||
        peer_lnc >= SIM_CORES_MAX)
        return NRT_INVALID;
    NRT_STATUS status;
    sendrecv_lock();
    struct lnc_state *state = open_lnc(lnc, &status);
    if (state != NULL)
        status = add_communicator(state, &wanted, handle);
    sendrecv_unlock();
    if (status == NRT_SUCCESS)
        service_wake();
    return status;
}

NRT_STATUS nrt_async_sendrecv_connect(const char *peer_ip, int peer_lnc, int lnc,
                                      nrt_async_sendrecv_comm_t **communicator)
{
    SIM_ENTER_ON("nrt_async_sendrecv_connect", lnc);
    SIM_NOTE_TEXT("peer_ip", peer_ip);
    SIM_NOTE("peer_lnc", peer_lnc);
    SIM_NOTE("lnc", lnc);
    NRT_STATUS status = open_communicator(peer_ip, peer_lnc, lnc, true, communicator);
    if (status == NRT_SUCCESS)
        SIM_NOTE("communicator", sim_handle_number(*communicator));
    SIM_RETURN(status);
}

NRT_STATUS nrt_async_sendrecv_accept(const char *peer_ip, int peer_lnc, int lnc,
                                     nrt_async_sendrecv_comm_t **communicator)
{
    SIM_ENTER_ON("nrt_async_sendrecv_accept", lnc);
    SIM_NOTE_TEXT("peer_ip", peer_ip);
    SIM_NOTE("peer_lnc", peer_lnc);
    SIM_NOTE("lnc", lnc);
    NRT_STATUS status = open_communicator(peer_ip, peer_lnc, lnc, false, communicator);
    if (status == NRT_SUCCESS)
        SIM_NOTE("communicator", sim_handle_number(*communicator));
    SIM_RETURN(status);
}

NRT_STATUS nrt_async_sendrecv_test_comm(nrt_async_sendrecv_comm_t *handle, bool *done)
{
    SIM_ENTER("nrt_async_sendrecv_test_comm");
    SIM_NOTE("communicator", sim_handle_number(handle));
    NRT_STATUS status = NRT_SUCCESS;
    sendrecv_lock();
    struct communicator *communicator = sim_handle_object(SIM_COMMUNICATOR, handle);
    if (communicator == NULL)
        status = NRT_INVALID_HANDLE;
    else if (done == NULL)
        status = NRT_INVALID;
    else if (communicator->state == LOST ||
             (communicator->state == PAIRED && link_is_cut(&communicator->link)))
        status = NRT_FAILURE;
    else {
        *done = communicator_is_connected(communicator);
        communicator->is_tested |= *done;
        SIM_NOTE("done", *done);
    }
    sendrecv_unlock();
    SIM_RETURN(status);
}

/* ---- Closing ------------------------------------------------------------------------ */

void communicator_end(struct communicator *communicator)
{
    if (communicator->state == ENDED)
        return;
    communicator->state = ENDED;
    link_drain(&communicator->link); /* the peer may still wait for a last answer */
    link_close(&communicator->link);
    sim_handle_end(SIM_COMMUNICATOR, communicator->handle);
    for (size_t i = 0; i < communicator->num_registered; i++) {
        sim_tensor_in_flight(communicator->registered[i], -1);
        sim_tensor_release(communicator->registered[i]);
    }
    free(communicator->registered);
    free(communicator->announced);
    communicator->registered = NULL;
    communicator->announced = NULL;
    communicator->num_registered = communicator->num_announced = 0;
}

/* Whether everything of it is at rest. The lock is held. */
static bool may_close(const struct lnc_state *lnc)
{
    for (const struct communicator *one = lnc->first; one != NULL; one = one->next) {
        bool was_connected = one->is_tested || communicator_is_connected(one);
        if (one->state != ENDED && (!was_connected || one->num_in_flight > 0))
            return false;
    }
    return true;
}

static void close_lnc(struct lnc_state *lnc, enum lnc_phase phase)
{
    for (struct communicator *one = lnc->first; one != NULL; one = one->next)
        communicator_end(one);
    lnc_forget_landed(lnc);
    stop_listening(lnc->listen_fd, lnc->lnc, lnc->port);
    lnc->listen_fd = -1;
    lnc->phase = phase;
}

NRT_STATUS nrt_async_sendrecv_close(int lnc)
{
    SIM_ENTER_ON("nrt_async_sendrecv_close", lnc);
    SIM_NOTE("lnc", lnc);
    NRT_STATUS status;
    sendrecv_lock();
    struct lnc_state *state = open_lnc(lnc, &status);
    if (state != NULL && may_close(state))
        close_lnc(state, LNC_UNOPENED);
    else if (state != NULL) {
        state->phase = LNC_BROKEN;
        status = NRT_FAILURE;
    }
    sendrecv_unlock();
    service_wake();
    SIM_RETURN(status);
}

/* What nrt_close finds. The process may use the library again, but not a broken lnc. */
static void abandon(struct lnc_state *lnc)
{
    if (lnc->phase == LNC_OPEN)
        sim_violation("nrt_close while send/receive of lnc %d is open", lnc->lnc);
    for (struct communicator *one = lnc->first; one != NULL; one = one->next)
        while (one->first != NULL)
            request_end(one->first);
    if (lnc->phase != LNC_UNOPENED && lnc->listen_fd >= 0)
        close_lnc(lnc, LNC_BROKEN);
    while (lnc->first != NULL) {
        struct communicator *next = lnc->first->next;
        free(lnc->first);
        lnc->first = next;
    }
    lnc->last = NULL;
}

void sim_sendrecv_at_close(void)
{
    service_stop();
    sendrecv_lock();
    for (int lnc = 0; lnc < SIM_CORES_MAX; lnc++)
        abandon(&lncs[lnc]);
    sendrecv_unlock();
}

uint64_t nrt_sim_bytes_sent(int lnc)
{
    sendrecv_lock();
    uint64_t num_bytes = lnc < 0 || lnc >= SIM_CORES_MAX ? 0 : lncs[lnc].num_bytes_sent;
    sendrecv_unlock();
    return num_bytes;
}
