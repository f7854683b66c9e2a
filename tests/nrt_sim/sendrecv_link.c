/* Sockets of async send/receive: frames, addresses, the rendezvous folder. See sendrecv.h. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "sendrecv.h"

enum { MAGIC = 0x6e727431, CHUNK_BYTES = 256 << 10, DRAIN_MS = 2000, BACKLOG = 128 };

/* ---- Frames ------------------------------------------------------------------------ */

void link_open(struct link *link, int fd)
{
    *link = (struct link){.fd = fd};
}

void link_close(struct link *link)
{
    if (link->fd >= 0)
        close(link->fd);
    free(link->control);
    link_open(link, -1);
}

bool link_is_cut(const struct link *link)
{
    struct pollfd polled = {.fd = link->fd, .events = POLLRDHUP};
    return link->fd < 0 ||
           (poll(&polled, 1, 0) == 1 && (polled.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0);
}

static void put_bytes(struct link *link, const void *bytes, size_t size)
{
    if (link->fd < 0)
        return;
    if (link->num_control + size > link->control_capacity) {
        size_t capacity = 2 * (link->num_control + size);
        unsigned char *larger = realloc(link->control, capacity);
        if (larger == NULL)
            abort(); /* a frame that is left out would hang the peer */
        link->control = larger;
        link->control_capacity = capacity;
    }
    memcpy(link->control + link->num_control, bytes, size);
    link->num_control += size;
}

void link_put(struct link *link, enum frame_kind kind, uint64_t number, uint64_t num_bytes)
{
    struct frame frame = {MAGIC, kind, number, num_bytes};
    put_bytes(link, &frame, sizeof(frame));
}

void link_put_hello(struct link *link, const struct hello *hello)
{
    link_put(link, FRAME_HELLO, 0, sizeof(*hello));
    put_bytes(link, hello, sizeof(*hello));
}

void link_put_body(struct link *link, uint64_t number, const unsigned char *from, uint64_t size)
{
    link_put(link, FRAME_PAYLOAD, number, size);
    link->from = from;
    link->from_left = size;
    link->num_before = link->num_control;
}

bool link_is_sending(const struct link *link)
{
    return link->from_left > 0;
}

bool link_has_control(const struct link *link)
{
    return link_is_sending(link) ? link->num_before > 0 : link->num_control > 0;
}

/* Bytes that the socket took; it says elsewhere when it is gone: a read will find out. */
static size_t write_some(struct link *link, const void *bytes, size_t size)
{
    ssize_t sent = send(link->fd, bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    return sent > 0 ? (size_t)sent : 0;
}

static bool write_control(struct link *link)
{
    while (link_has_control(link)) {
        size_t size = link_is_sending(link) ? link->num_before : link->num_control;
        size_t sent = write_some(link, link->control, size);
        if (sent == 0)
            return false;
        memmove(link->control, link->control + sent, link->num_control - sent);
        link->num_control -= sent;
        if (link_is_sending(link))
            link->num_before -= sent;
    }
    return true;
}

void link_write(struct link *link, uint64_t *allowance)
{
    if (link->fd < 0 || !write_control(link) || !link_is_sending(link))
        return;
    uint64_t size = link->from_left < CHUNK_BYTES ? link->from_left : CHUNK_BYTES;
    if (size > *allowance)
        size = *allowance;
    if (size == 0)
        return;
    size_t sent = write_some(link, link->from, size);
    link->from += sent;
    link->from_left -= sent;
    *allowance -= sent;
    write_control(link);
}

void link_drain(struct link *link)
{
    for (int passed_ms = 0; link->fd >= 0 && passed_ms < DRAIN_MS && !write_control(link);
         passed_ms += 10) {
        struct pollfd polled = {.fd = link->fd, .events = POLLOUT};
        if (poll(&polled, 1, 10) == 1 && (polled.revents & (POLLHUP | POLLERR)) != 0)
            return;
    }
}

/* LINK_MORE: *size bytes came. */
static enum link_event read_some(struct link *link, void *into, size_t *size)
{
    ssize_t got = recv(link->fd, into, *size, MSG_DONTWAIT);
    if (got > 0) {
        *size = (size_t)got;
        return LINK_MORE;
    }
    bool is_quiet = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
    return is_quiet ? LINK_QUIET : LINK_GONE;
}

enum link_event link_read(struct link *link)
{
    if (link->into_left > 0) {
        size_t size = link->into_left < CHUNK_BYTES ? link->into_left : CHUNK_BYTES;
        enum link_event event = read_some(link, link->into, &size);
        if (event != LINK_MORE)
            return event;
        link->into += size;
        link->into_left -= size;
        return link->into_left == 0 ? LINK_BODY : LINK_MORE;
    }
    size_t size = sizeof(link->frame) - link->num_frame_bytes;
    unsigned char *start = (unsigned char *)&link->frame;
    enum link_event event = read_some(link, start + link->num_frame_bytes, &size);
    if (event != LINK_MORE)
        return event;
    link->num_frame_bytes += size;
    if (link->num_frame_bytes < sizeof(link->frame))
        return LINK_MORE;
    link->num_frame_bytes = 0;
    return link->frame.magic == MAGIC ? LINK_FRAME : LINK_GONE;
}

/* ---- Who listens where -------------------------------------------------------------- */

bool canonical_address(const char *address, char canonical[INET6_ADDRSTRLEN])
{
    unsigned char bytes[sizeof(struct in6_addr)];
    for (int i = 0; address != NULL && i < 2; i++) {
        int family = i == 0 ? AF_INET : AF_INET6;
        if (inet_pton(family, address, bytes) == 1)
            return inet_ntop(family, bytes, canonical, INET6_ADDRSTRLEN) != NULL;
    }
    return false;
}

/*
 * A socket and its address. The folder goes by a descriptor: the path of a socket has at most 107
 * letters, and the folders of tests are longer.
 */
static int socket_at(const char *host, int lnc, int port, struct sockaddr_un *name, int *folder_fd)
{
    char folder[SIM_PATH_MAX];
    if (sim_host_folder(host, "sendrecv", folder) != NRT_SUCCESS)
        return -1;
    *folder_fd = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (*folder_fd < 0)
        return -1;
    *name = (struct sockaddr_un){.sun_family = AF_UNIX};
    snprintf(name->sun_path, sizeof(name->sun_path), "/proc/self/fd/%d/%d-%d", *folder_fd, port,
             lnc);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        close(*folder_fd);
    return fd;
}

int listen_for(int lnc, int port)
{
    struct sockaddr_un name;
    int folder_fd;
    int fd = socket_at(sim_host_address(), lnc, port, &name, &folder_fd);
    if (fd < 0)
        return -1;
    /* What lies there is a dead process's: the core, and so its lnc, belongs to this one. */
    unlink(name.sun_path);
    bool is_bound = bind(fd, (struct sockaddr *)&name, sizeof(name)) == 0;
    close(folder_fd);
    if (is_bound && listen(fd, BACKLOG) == 0)
        return fd;
    close(fd);
    return -1;
}

void stop_listening(int fd, int lnc, int port)
{
    struct sockaddr_un name;
    int folder_fd;
    int unused = socket_at(sim_host_address(), lnc, port, &name, &folder_fd);
    if (unused >= 0) {
        unlink(name.sun_path);
        close(folder_fd);
        close(unused);
    }
    close(fd);
}

int dial(const char *address, int lnc, int port)
{
    struct sockaddr_un name;
    int folder_fd;
    int fd = socket_at(address, lnc, port, &name, &folder_fd);
    if (fd < 0)
        return -1;
    bool is_there = connect(fd, (struct sockaddr *)&name, sizeof(name)) == 0;
    close(folder_fd);
    if (is_there)
        return fd;
    close(fd);
    return -1;
}

/* ---- The bootstrap lock ------------------------------------------------------------- */

/* Why the file is another user's, or NULL. Root may open everything, so it is looked at, too. */
static const char *foreignness(int fd)
{
    struct stat found;
    if (fd < 0)
        return strerror(errno);
    if (fstat(fd, &found) != 0)
        return strerror(errno);
    const mode_t needed = S_IRUSR | S_IWUSR;
    bool is_own = found.st_uid == geteuid() && (found.st_mode & needed) == needed;
    return is_own ? NULL : strerror(EACCES);
}

bool take_bootstrap_lock(int *fd)
{
    char path[SIM_PATH_MAX + 64];
    if (sim_host_folder(sim_host_address(), "tmp", path) != NRT_SUCCESS)
        return false;
    size_t size = strlen(path);
    if (SIM_API == 2)
        snprintf(path + size, sizeof(path) - size, "/nrt_kv_store_server.lock");
    else
        snprintf(path + size, sizeof(path) - size, "/nrt_kv_store_server_lock_uid_%u", geteuid());
    *fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    const char *reason = foreignness(*fd);
    uint64_t deadline_us = sim_now_us() + sendrecv_settings.lock_wait_us;
    while (reason == NULL && flock(*fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK && errno != EINTR)
            reason = strerror(errno);
        else if (sim_now_us() >= deadline_us)
            reason = "another process holds it";
        else
            nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    if (reason == NULL)
        return true;
    fprintf(stderr, "nrt_sim: cannot acquire the bootstrap lock file %s: %s\n", path, reason);
    if (*fd >= 0)
        close(*fd);
    return false;
}

void give_bootstrap_lock(int fd)
{
    close(fd); /* the file stays, as the real one does */
}
