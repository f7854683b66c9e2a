/* What TCP over loopback can do: one process sends blocks, another receives them, with as little
 * else as a program can do. Made for comparison, not for use: it trusts whatever it is told.
 *
 *     transfer_reference source|sink PATH OFFSET BLOCK_BYTES CPU|any
 *
 * maps the file from OFFSET on. The sink prints the port it listens on, and the source reads it
 * from its first line of input. Then each takes lines "COUNT ID ID ...", the same number of blocks
 * at both ends, and answers with a line when it is ready (source) or has them (sink: nanoseconds
 * from its request until the last byte is there, and its CPU time). Blocks that are neighbours are
 * one piece; up to 1,024 pieces go into one sendmsg or recvmsg. For one piece that is plain send
 * and recv.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define PIECES_MAX 1024

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static long long now_ns(clockid_t clock)
{
    struct timespec at;
    clock_gettime(clock, &at);
    return at.tv_sec * 1000000000LL + at.tv_nsec;
}

/* Read a line's ids into pieces of the memory. Returns their number. */
static size_t read_pieces(char *memory, size_t block_bytes, struct iovec **pieces)
{
    long long count, id, before = -2;
    if (scanf("%lld", &count) != 1 || count < 1)
        exit(0); /* the end of the input */
    *pieces = realloc(*pieces, count * sizeof **pieces);
    size_t num_pieces = 0;
    for (long long index = 0; index < count; index++) {
        if (scanf("%lld", &id) != 1)
            exit(1);
        if (id == before + 1)
            (*pieces)[num_pieces - 1].iov_len += block_bytes;
        else
            (*pieces)[num_pieces++] = (struct iovec){memory + id * block_bytes, block_bytes};
        before = id;
    }
    return num_pieces;
}

/* Send or receive all of the pieces. They are used up. */
static void move_pieces(int sock, struct iovec *pieces, size_t num_pieces, int is_source)
{
    while (num_pieces) {
        struct msghdr message = {.msg_iov = pieces};
        message.msg_iovlen = num_pieces < PIECES_MAX ? num_pieces : PIECES_MAX;
        ssize_t moved = is_source ? sendmsg(sock, &message, MSG_NOSIGNAL)
                                  : recvmsg(sock, &message, MSG_WAITALL);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved <= 0)
            fail(is_source ? "send" : "recv");
        while (num_pieces && (size_t)moved >= pieces->iov_len) {
            moved -= pieces->iov_len;
            pieces++, num_pieces--;
        }
        if (num_pieces) {
            pieces->iov_base = (char *)pieces->iov_base + moved;
            pieces->iov_len -= moved;
        }
    }
}

static void run_on(int cpu)
{
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(cpu, &only);
    if (sched_setaffinity(0, sizeof only, &only))
        fail("sched_setaffinity");
}

static int connected(int is_source)
{
    int one = 1, sock = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t length = sizeof address;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (is_source) {
        unsigned short port;
        if (scanf("%hu", &port) != 1)
            exit(1);
        address.sin_port = htons(port);
        if (connect(sock, (struct sockaddr *)&address, length))
            fail("connect");
    } else {
        if (bind(sock, (struct sockaddr *)&address, length) || listen(sock, 1))
            fail("listen");
        getsockname(sock, (struct sockaddr *)&address, &length);
        printf("%d\n", ntohs(address.sin_port));
        int listener = sock;
        if ((sock = accept(listener, NULL, NULL)) < 0)
            fail("accept");
        close(listener);
    }
    setsockopt(sock, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return sock;
}

int main(int count, char **words)
{
    if (count != 6)
        return 2;
    if (strcmp(words[5], "any"))
        run_on(atoi(words[5]));
    setvbuf(stdout, NULL, _IOLBF, 0);
    int is_source = !strcmp(words[1], "source");
    size_t offset = strtoull(words[3], NULL, 10), block_bytes = strtoull(words[4], NULL, 10);
    int file = open(words[2], O_RDWR | O_CLOEXEC);
    struct stat found;
    if (file < 0 || fstat(file, &found))
        fail(words[2]);
    char *memory = mmap(NULL, found.st_size - offset, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_POPULATE, file, offset);
    if (memory == MAP_FAILED)
        fail("mmap");
    int sock = connected(is_source);
    struct iovec *pieces = NULL;
    for (;;) {
        char request = 'r';
        size_t num_pieces = read_pieces(memory, block_bytes, &pieces);
        if (is_source) {
            printf("0\n");
            if (recv(sock, &request, 1, MSG_WAITALL) != 1)
                return 1;
            move_pieces(sock, pieces, num_pieces, 1);
        } else {
            long long cpu = now_ns(CLOCK_PROCESS_CPUTIME_ID), start = now_ns(CLOCK_MONOTONIC);
            if (send(sock, &request, 1, MSG_NOSIGNAL) != 1)
                return 1;
            move_pieces(sock, pieces, num_pieces, 0);
            long long end = now_ns(CLOCK_MONOTONIC);
            printf("[%lld, %lld]\n", end - start, now_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu);
        }
    }
}
