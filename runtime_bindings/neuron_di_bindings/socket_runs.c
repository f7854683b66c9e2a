/* Sends and receives runs of memory through a blocking stream socket without a copy in user space;
 * called by socket_runs.py through ctypes, which frees the interpreter meanwhile.
 *
 * Promise: no byte outside of the runs is read or written. The caller has checked that the runs
 * lie in memory that it owns, and keeps both until the call returns.
 *
 * The socket's SO_RCVTIMEO and SO_SNDTIMEO say how long no byte may move; `end_ns`, on
 * CLOCK_MONOTONIC, when a call ends that moves too few, at most one such silence late. Nothing
 * spins: both ends sleep in the kernel. Returns 0, an errno, or -1 where the peer closed the
 * connection.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

enum {
    IOVECS_MAX = 1024,         /* the kernel's bound: IOV_MAX */
    CALL_BYTES_MAX = 64 << 20, /* so that the deadline is looked at */
    /* A reader is woken when this much is there, not by each packet: a quarter of what is to come,
     * so that it copies while the rest is sent. */
    WAKE_BYTES_MIN = 64 << 10,
    WAKE_BYTES_MAX = 512 << 10,
};

/* Where a transfer stands: `within` bytes of run `run` have moved. */
typedef struct {
    char *base;
    const int64_t *offsets, *lengths;
    int64_t num_runs, run, within;
} Runs;

static int is_past(int64_t end_ns)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec >= end_ns;
}

/* The next bytes to move, neighbours as one. */
static int next_iovecs(const Runs *runs, struct iovec *iovecs, int count_max)
{
    int count = 0;
    int64_t num_bytes = 0, within = runs->within;
    for (int64_t run = runs->run; run < runs->num_runs; run++, within = 0) {
        char *start = runs->base + runs->offsets[run] + within;
        int64_t length = runs->lengths[run] - within;
        if (length > CALL_BYTES_MAX - num_bytes)
            length = CALL_BYTES_MAX - num_bytes;
        if (length == 0 && num_bytes == CALL_BYTES_MAX)
            break;
        struct iovec *last = iovecs + (count ? count - 1 : 0);
        if (count && (char *)last->iov_base + last->iov_len == start) {
            last->iov_len += length;
        } else {
            if (count == count_max)
                break;
            iovecs[count++] = (struct iovec){start, length};
        }
        num_bytes += length;
    }
    return count;
}

static void advance(Runs *runs, int64_t num_bytes)
{
    while (runs->run < runs->num_runs) {
        int64_t left = runs->lengths[runs->run] - runs->within;
        if (num_bytes < left) {
            runs->within += num_bytes;
            return;
        }
        num_bytes -= left;
        runs->run++;
        runs->within = 0;
    }
}

/* How many bytes they are; -1 where a length is negative. */
static int64_t sum(const int64_t *lengths, int64_t num_runs)
{
    int64_t num_bytes = 0;
    for (int64_t run = 0; run < num_runs; run++) {
        if (lengths[run] < 0)
            return -1;
        num_bytes += lengths[run];
    }
    return num_bytes;
}

int64_t send_runs(int fd, const char *header, int64_t header_bytes, char *base,
                  const int64_t *offsets, const int64_t *lengths, int64_t num_runs, int64_t end_ns)
{
    Runs runs = {base, offsets, lengths, num_runs, 0, 0};
    struct iovec iovecs[IOVECS_MAX];
    if (sum(lengths, num_runs) < 0)
        return EINVAL;
    advance(&runs, 0); /* over empty runs */
    while (header_bytes || runs.run < num_runs) {
        int first = header_bytes != 0;
        if (first)
            iovecs[0] = (struct iovec){(char *)header, header_bytes};
        int count = first + next_iovecs(&runs, iovecs + first, IOVECS_MAX - first);
        struct msghdr message = {.msg_iov = iovecs, .msg_iovlen = count};
        ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno != EINTR)
            return errno == EAGAIN ? ETIMEDOUT : errno;
        if (sent > 0) {
            int64_t of_header = sent < header_bytes ? sent : header_bytes;
            header += of_header;
            header_bytes -= of_header;
            advance(&runs, sent - of_header);
        }
        if ((header_bytes || runs.run < num_runs) && is_past(end_ns))
            return ETIMEDOUT;
    }
    return 0;
}

/* A call that has taken less than the wanted sleeps until as much again is there: near the end of
 * the transfer that would be never. */
static void wake_at(int fd, int *current, int64_t left)
{
    int64_t quarter = left / 4 < WAKE_BYTES_MAX ? left / 4 : WAKE_BYTES_MAX;
    int wanted = quarter < WAKE_BYTES_MIN ? 1 : (int)quarter;
    if (wanted != *current)
        setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted);
    *current = wanted;
}

int64_t receive_runs(int fd, char *base, const int64_t *offsets, const int64_t *lengths,
                     int64_t num_runs, int64_t end_ns)
{
    Runs runs = {base, offsets, lengths, num_runs, 0, 0};
    struct iovec iovecs[IOVECS_MAX];
    int64_t left = sum(lengths, num_runs), result = 0;
    int wakes_at = 1;
    if (left < 0)
        return EINVAL;
    advance(&runs, 0); /* over empty runs */
    while (left > 0) {
        wake_at(fd, &wakes_at, left);
        struct msghdr message = {.msg_iov = iovecs,
                                 .msg_iovlen = next_iovecs(&runs, iovecs, IOVECS_MAX)};
        ssize_t got = recvmsg(fd, &message, 0);
        if (got == 0) {
            result = -1;
            break;
        }
        if (got < 0 && errno != EINTR) {
            result = errno == EAGAIN ? ETIMEDOUT : errno;
            break;
        }
        if (got > 0) {
            advance(&runs, got);
            left -= got;
        }
        if (left > 0 && is_past(end_ns)) {
            result = ETIMEDOUT;
            break;
        }
    }
    wake_at(fd, &wakes_at, 1);
    return result;
}
