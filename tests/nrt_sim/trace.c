/*
 * The trace: one JSON line for each call and each event, appended to the file NRT_SIM_TRACE.
 *
 *     {"t": 12, "pid": 7, "thread": 7, "call": "nrt_tensor_read", "tensor": 3, "offset": 0,
 *      "size": 64, "status": 0, "us": 4}
 *     {"t": 15, "pid": 7, "thread": 7, "event": "violation", "text": "..."}
 *
 * `t` is microseconds of the monotonic clock at the line's writing, the same for all processes of
 * a machine. Each line is one write in append mode, so processes may share a file. Numbers and
 * names only: never bytes of a tensor. check_trace.py reads it.
 */
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int trace_fd = -1;
static char trace_path[SIM_PATH_MAX];

uint64_t sim_now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

void sim_trace_open(void)
{
    const char *path = getenv("NRT_SIM_TRACE");
    if (path == NULL || strlen(path) >= sizeof(trace_path))
        path = "";
    pthread_mutex_lock(&lock);
    if (strcmp(path, trace_path) != 0) {
        if (trace_fd >= 0)
            close(trace_fd);
        trace_fd = *path == '\0' ? -1 : open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        strcpy(trace_path, path);
        if (trace_fd < 0 && *path != '\0')
            fprintf(stderr, "nrt_sim: cannot write the trace %s\n", path);
    }
    pthread_mutex_unlock(&lock);
}

bool sim_is_traced(void)
{
    pthread_mutex_lock(&lock);
    bool is_open = trace_fd >= 0;
    pthread_mutex_unlock(&lock);
    return is_open;
}

/* One line: {"t": ..., <members>} where `members` begins with a comma. */
static void write_line(uint64_t now_us, const char *members)
{
    char line[1400];
    int size = snprintf(line, sizeof(line), "{\"t\": %llu, \"pid\": %d, \"thread\": %ld%s}\n",
                        (unsigned long long)now_us, (int)getpid(), syscall(SYS_gettid), members);
    if (size <= 0 || (size_t)size >= sizeof(line))
        return;
    pthread_mutex_lock(&lock);
    if (trace_fd >= 0 && write(trace_fd, line, (size_t)size) != size)
        fprintf(stderr, "nrt_sim: the trace is not whole: %s\n", trace_path);
    pthread_mutex_unlock(&lock);
}

void sim_trace_event(const char *name, const char *members, ...)
{
    char text[1100], line[1200];
    if (!sim_is_traced())
        return;
    va_list arguments;
    va_start(arguments, members);
    vsnprintf(text, sizeof(text), members, arguments);
    va_end(arguments);
    snprintf(line, sizeof(line), ", \"event\": \"%.64s\"%s", name, text);
    write_line(sim_now_us(), line);
}

void sim_trace_call(const struct sim_call *call, uint64_t ended_us)
{
    char line[800];
    unsigned long long took_us = ended_us - call->started_us;
    snprintf(line, sizeof(line), ", \"call\": \"%.80s\"%s, \"status\": %d, \"us\": %llu",
             call->name, call->notes, (int)call->status, took_us);
    write_line(ended_us, line);
}

void sim_note_integer(struct sim_call *call, const char *key, long long value)
{
    size_t room = sizeof(call->notes) - call->num_note_bytes;
    int size = snprintf(call->notes + call->num_note_bytes, room, ", \"%s\": %lld", key, value);
    if (size > 0 && (size_t)size < room)
        call->num_note_bytes += (size_t)size;
    else
        call->notes[call->num_note_bytes] = '\0'; /* no half members */
}

void sim_note_text(struct sim_call *call, const char *key, const char *value)
{
    char plain[96];
    size_t size = 0;
    for (; value != NULL && value[size] != '\0' && size + 1 < sizeof(plain); size++) {
        unsigned char letter = (unsigned char)value[size];
        bool is_plain = letter >= ' ' && letter < 127 && letter != '"' && letter != '\\';
        plain[size] = is_plain ? (char)letter : '?';
    }
    plain[size] = '\0';
    size_t room = sizeof(call->notes) - call->num_note_bytes;
    int added = snprintf(call->notes + call->num_note_bytes, room, ", \"%s\": \"%s\"", key, plain);
    if (added > 0 && (size_t)added < room)
        call->num_note_bytes += (size_t)added;
    else
        call->notes[call->num_note_bytes] = '\0';
}
