/* The sends of a large frame, shared with a second thread; part of _token_lane.c.
 *
 * A worker's step brings a token to each of its streams, and a client's wait for it is, but for the
 * first, that for the system calls before its own. So those of a large frame are gathered, and then
 * made by this thread and by a helper, each taking the next that nobody has begun. Measured on two
 * cores: the median token of 256 streams is through in half the time, for the same CPU time.
 *
 * Promise: the helper does nothing but send(), and only while the event loop's thread is in
 * `sends_make` with the GIL. So no Python runs meanwhile, and no socket is closed. What Python is
 * needed for, as for bytes that a socket does not take, is done afterwards, by the loop's thread.
 *
 * Demand: all lanes of a process are used from one thread, its event loop's. What is gathered is the
 * process's, and frames nest, as those of two threads would not.
 *
 * Promise: bytes keep their order. Of an outlet with bytes here (`is_queued`) whoever is about to
 * use it calls `sends_flush` first.
 */
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

/* A helper wakes up in the time of some sends: of 11 tokens the median was not sooner through, for a
 * tenth more CPU time; of 16 it was by a twelfth, for a twentieth. */
enum { SHARED_MIN = 14 };

/* Those of a larger frame are made in parts, so that clients read the first while the next are
 * gathered. Measured on two cores: the median token of 256 and of 1,000 streams is through in three
 * quarters of the time that it takes in one part; with parts of 32 in as much. */
enum { TOGETHER_MAX = 64 };

/* Where the cores have other work, the helper may lose its own in mid-send, and the loop's thread
 * waits for it. After a wait of so long, so many frames, or parts of one, are sent without it. */
enum { LATE_NS = 500 * 1000, ALONE_FRAMES = 200 };

enum { KEPT_BYTES = 1 << 20 }; /* of memory, for the next frame */

typedef struct {
    Outlet *outlet; /* these are owned */
    Lane *lane;
    uint64_t number; /* of its leg */
    size_t at, size; /* of its bytes */
    Py_ssize_t num_sent;
} Sending;

/* Of the event loop's thread. */
static struct {
    PyObject *failures; /* of the frame that is relayed, borrowed; NULL: its sends are not gathered */
    Sending gathered[TOGETHER_MAX];
    char *bytes;
    size_t num_gathered, num_finished, num_bytes, bytes_room;
    bool are_made; /* and some may not be finished */
} sends;

/* Between the two threads. */
static struct {
    pthread_mutex_t working; /* the helper's, while it may look at `sends` */
    sem_t wake;
    atomic_bool are_open; /* for a helper that comes */
    atomic_size_t next;
    bool was_tried, is_there; /* the helper */
    int num_alone;            /* frames to send without it */
} share = {.working = PTHREAD_MUTEX_INITIALIZER};

static int append_failure(PyObject *failures, uint64_t number, Lane *lane);

static void make_some_sends(void)
{
    size_t i;
    while ((i = atomic_fetch_add(&share.next, 1)) < sends.num_gathered) {
        Sending *each = &sends.gathered[i];
        each->num_sent = outlet_send(each->outlet, sends.bytes + each->at, (Py_ssize_t)each->size);
    }
}

static void *help(void *nothing)
{
    for (;;) {
        while (sem_wait(&share.wake) < 0) /* EINTR */
            continue;
        pthread_mutex_lock(&share.working);
        if (atomic_load(&share.are_open))
            make_some_sends();
        pthread_mutex_unlock(&share.working);
    }
    return nothing;
}

/* In a copy of the process: threads do not go along. */
static void begin_anew(void)
{
    pthread_mutex_init(&share.working, NULL);
    share.was_tried = share.is_there = false;
    /* What was gathered is the original's to send. */
    sends.num_gathered = sends.num_finished = sends.num_bytes = 0;
    sends.are_made = false;
}

/* Starts the helper, once, where it may run beside this thread. It ends with the process. */
static void start_helper(void)
{
    cpu_set_t cores;
    pthread_t thread;
    sigset_t all, before;
    share.was_tried = true;
    if (sched_getaffinity(0, sizeof cores, &cores) == 0 && CPU_COUNT(&cores) < 2)
        return;
    if (sem_init(&share.wake, 0, 0) != 0)
        return;
    sigfillset(&all); /* signals are for Python's threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    share.is_there = pthread_create(&thread, NULL, help, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (share.is_there) {
        pthread_setname_np(thread, "token-sends");
        pthread_detach(thread);
    }
}

/* Until it has made the send that it has begun, if any. */
static void wait_for_helper(void)
{
    struct timespec before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    pthread_mutex_lock(&share.working);
    pthread_mutex_unlock(&share.working);
    clock_gettime(CLOCK_MONOTONIC, &after);
    int64_t waited_ns = (after.tv_sec - before.tv_sec) * 1000000000LL + after.tv_nsec - before.tv_nsec;
    if (waited_ns > LATE_NS)
        share.num_alone = ALONE_FRAMES;
}

/* Makes the system calls of all that was gathered. Runs no Python. A helper that comes late finds
 * that they are not open any more, or helps with the next ones. */
static void sends_make(void)
{
    bool is_shared = sends.num_gathered >= SHARED_MIN;
    if (is_shared && !share.was_tried)
        start_helper();
    is_shared = is_shared && share.is_there;
    if (is_shared && share.num_alone > 0) {
        share.num_alone--;
        is_shared = false;
    }
    atomic_store(&share.next, 0);
    if (is_shared) {
        atomic_store(&share.are_open, true);
        sem_post(&share.wake);
    }
    make_some_sends();
    if (is_shared) {
        atomic_store(&share.are_open, false);
        wait_for_helper();
    }
}

/* Gives what a socket did not take to its transport. May run Python. */
static int sending_finish(const Sending *sending)
{
    int rc = 0;
    Py_ssize_t left = (Py_ssize_t)sending->size - sending->num_sent;
    if (left > 0) {
        const char *data = sends.bytes + sending->at + sending->num_sent;
        rc = outlet_hand_over_rest(sending->outlet, data, left);
    }
    if (rc < 0 && PyErr_ExceptionMatches(PyExc_Exception))
        rc = append_failure(sends.failures, sending->number, sending->lane);
    Py_DECREF(sending->outlet);
    Py_DECREF(sending->lane);
    return rc;
}

/* Sends all that was gathered. -1: an exit or an interrupt, after all was sent. May run Python,
 * and what that runs may call this: then it finishes the others. */
static int sends_flush(void)
{
    PyObject *type = NULL, *error = NULL, *traceback = NULL;
    int rc = 0;
    if (sends.num_gathered == 0)
        return 0;
    if (!sends.are_made) {
        sends_make();
        sends.are_made = true;
    }
    while (sends.are_made && sends.num_finished < sends.num_gathered) {
        Sending sending = sends.gathered[sends.num_finished++];
        sending.outlet->is_queued = 0;
        if (sending_finish(&sending) < 0) {
            Py_XDECREF(type);
            Py_XDECREF(error);
            Py_XDECREF(traceback);
            PyErr_Fetch(&type, &error, &traceback);
            rc = -1;
        }
    }
    if (sends.are_made) {
        sends.num_gathered = sends.num_finished = sends.num_bytes = 0;
        sends.are_made = false;
    }
    if (rc < 0)
        PyErr_Restore(type, error, traceback);
    return rc;
}

/* Gathers a chunk for an outlet that was just found free. False: it is to be written at once. */
static bool sends_gather(Lane *lane, uint64_t number, const char *data, size_t size)
{
    if (sends.failures == NULL || sends.are_made || sends.num_gathered == TOGETHER_MAX)
        return false;
    if (size > sends.bytes_room - sends.num_bytes) {
        size_t room = 2 * (sends.num_bytes + size);
        char *bytes = PyMem_Realloc(sends.bytes, room);
        if (bytes == NULL)
            return false;
        sends.bytes = bytes;
        sends.bytes_room = room;
    }
    memcpy(sends.bytes + sends.num_bytes, data, size);
    sends.gathered[sends.num_gathered++] =
        (Sending){(Outlet *)Py_NewRef(lane->outlet), (Lane *)Py_NewRef(lane), number,
                  sends.num_bytes, size, 0};
    sends.num_bytes += size;
    lane->outlet->has_written = 1;
    lane->outlet->is_queued = 1;
    return true;
}

/* Begins a frame of so many tokens, whose lanes' failures go there. Returns what `sends_end` is to
 * be given: those of a frame in whose relaying this one comes. May run Python. */
static int sends_begin(size_t num_tokens, PyObject *failures, PyObject **outer)
{
    static bool is_told_of_copies;
    *outer = sends.failures;
    if (sends_flush() < 0)
        return -1;
    if (!is_told_of_copies)
        is_told_of_copies = pthread_atfork(NULL, NULL, begin_anew) == 0;
    bool is_gathered = num_tokens >= SHARED_MIN && is_told_of_copies;
    sends.failures = is_gathered ? failures : NULL;
    return 0;
}

/* Before each token of a frame: sends those before it, once there are enough. May run Python. */
static int sends_part(void) { return sends.num_gathered < TOGETHER_MAX ? 0 : sends_flush(); }

/* Sends what is left of the frame. An exception that there is stays. May run Python. */
static int sends_end(PyObject *outer)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    int rc = sends_flush();
    sends.failures = outer;
    if (sends.num_gathered == 0 && sends.bytes_room > KEPT_BYTES) {
        PyMem_Free(sends.bytes);
        sends.bytes = NULL;
        sends.bytes_room = 0;
    }
    if (type != NULL) {
        PyErr_Clear();
        PyErr_Restore(type, error, traceback);
    }
    return rc;
}
