/*
 * Fault schedules: which calls fail, wait, hang or end the process.
 *
 * The text is in the environment variable NRT_SIM_FAULTS (or in the file named by it: @path), or
 * in a call of nrt_sim_schedule(). Faults are separated by ';' or by ends of lines, '#' starts a
 * comment that ends with its line, and each fault is a list of words:
 *
 *     function=NAME   the public function, or a point inside the simulator ("sendrecv.deliver");
 *                     needed, and a name that begins with nrt must be one of this library
 *     call=N          the N-th matching call from now on is the first one hit (default 1)
 *     times=N         so many calls in a row are hit (default 1)
 *     sticky          every call from then on is hit
 *     core=N          only calls for this core match (a vnc, or an lnc for send and receive)
 *     status=N        the call does nothing and returns this status
 *     delay_us=N      the call starts this much later, then works as usual
 *     hang_ms=N       the call does nothing for so long, then returns its status, else TIMEOUT
 *     die             the process ends at once, as by SIGKILL
 *
 *     function=nrt_async_sendrecv_send_tensor call=3 status=1203; function=nrt_execute die call=9
 *
 * Calls refused for the lifecycle's state are counted by nrt_sim_calls() and match no fault. A
 * text with an error in it ends the process: a schedule that does not fire would prove nothing.
 */
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"

enum { FAULTS_MAX = 128, TEXT_MAX = 16384, NO_STATUS = -1, ANY_CORE = -1 };

struct fault {
    char function[64];
    int core;
    int status;
    uint64_t first;
    uint64_t times;
    uint64_t delay_us;
    uint64_t hang_us;
    bool is_deadly;
    bool is_sticky;
    bool was_hit;
    uint64_t num_matches;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fault faults[FAULTS_MAX];
static size_t num_faults;
static pthread_cond_t cleared = PTHREAD_COND_INITIALIZER;
static uint64_t num_clears;
static char loaded[TEXT_MAX]; /* of the environment: the same text is not loaded twice */

static const struct fault no_fault = {
    .core = ANY_CORE, .status = NO_STATUS, .first = 1, .times = 1};

/* Whether a name that begins with nrt is a function of this library. */
static bool is_known(const char *name)
{
    Dl_info self;
    if (strncmp(name, "nrt", 3) != 0)
        return *name != '\0';
    if (dladdr(&no_fault, &self) == 0)
        return true;
    void *library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL)
        return true; /* linked in some other way: nothing to look the name up in */
    bool is_there = dlsym(library, name) != NULL;
    dlclose(library);
    return is_there;
}

static bool read_number(const char *text, uint64_t *number)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    *number = value;
    return *text >= '0' && *text <= '9' && *end == '\0' && errno == 0;
}

static bool read_word(const char *word, struct fault *fault)
{
    const char *value = strchr(word, '=');
    uint64_t number = 0;
    size_t size = value == NULL ? strlen(word) : (size_t)(value - word);
    if (value == NULL) {
        fault->is_deadly |= strcmp(word, "die") == 0;
        fault->is_sticky |= strcmp(word, "sticky") == 0;
        return strcmp(word, "die") == 0 || strcmp(word, "sticky") == 0;
    }
    value++;
    if (strncmp(word, "function", size) == 0 && size == strlen("function")) {
        snprintf(fault->function, sizeof(fault->function), "%s", value);
        return strlen(value) < sizeof(fault->function) && is_known(value);
    }
    const struct {
        const char *key;
        uint64_t *place;
    } counts[] = {{"call", &fault->first},
                  {"times", &fault->times},
                  {"delay_us", &fault->delay_us},
                  {"hang_ms", &fault->hang_us}};
    if (!read_number(value, &number) || number > UINT64_C(1) << 40)
        return false;
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++)
        if (strncmp(word, counts[i].key, size) == 0 && size == strlen(counts[i].key)) {
            *counts[i].place = counts[i].place == &fault->hang_us ? number * 1000 : number;
            return i > 1 || number > 0;
        }
    if (strncmp(word, "core", size) == 0 && size == strlen("core"))
        fault->core = (int)number;
    else if (strncmp(word, "status", size) == 0 && size == strlen("status"))
        fault->status = (int)number;
    else
        return false;
    return number < 1u << 20;
}

/* Reads one fault; empty text gives one without a function. */
static bool read_fault(char *text, struct fault *fault)
{
    char *rest = NULL;
    *fault = no_fault;
    bool is_empty = true;
    for (char *word = strtok_r(text, " \t", &rest); word != NULL;
         word = strtok_r(NULL, " \t", &rest)) {
        is_empty = false;
        if (!read_word(word, fault))
            return false;
    }
    bool does_something = fault->status != NO_STATUS || fault->delay_us > 0 || fault->hang_us > 0 ||
                          fault->is_deadly;
    return is_empty || (fault->function[0] != '\0' && does_something);
}

int nrt_sim_schedule(const char *text)
{
    char copy[TEXT_MAX];
    struct fault found[FAULTS_MAX];
    size_t num_found = 0;
    if (text == NULL || strlen(text) >= sizeof(copy))
        return -1;
    strcpy(copy, text);
    for (char *mark = strchr(copy, '#'); mark != NULL; mark = strchr(mark, '#'))
        for (; *mark != '\0' && *mark != '\n'; mark++)
            *mark = ' ';
    char *rest = NULL;
    for (char *part = strtok_r(copy, ";\n", &rest); part != NULL;
         part = strtok_r(NULL, ";\n", &rest)) {
        if (num_found == FAULTS_MAX || !read_fault(part, &found[num_found]))
            return -1;
        num_found += found[num_found].function[0] != '\0';
    }
    pthread_mutex_lock(&lock);
    bool has_room = num_faults + num_found <= FAULTS_MAX;
    for (size_t i = 0; has_room && i < num_found; i++)
        faults[num_faults++] = found[i];
    pthread_mutex_unlock(&lock);
    return has_room ? 0 : -1;
}

void sim_faults_open(void)
{
    char text[TEXT_MAX];
    const char *value = getenv("NRT_SIM_FAULTS");
    if (value == NULL || strlen(value) >= sizeof(text))
        value = "";
    strcpy(text, value);
    if (*value == '@') {
        FILE *file = fopen(value + 1, "re");
        size_t size = file == NULL ? 0 : fread(text, 1, sizeof(text) - 1, file);
        text[size] = '\0';
        if (file == NULL) {
            fprintf(stderr, "nrt_sim: there is no fault schedule %s\n", value + 1);
            abort();
        }
        fclose(file);
    }
    if (strcmp(text, loaded) == 0)
        return;
    strcpy(loaded, text);
    if (nrt_sim_schedule(text) != 0) {
        fprintf(stderr, "nrt_sim: the fault schedule is wrong: %s\n", text);
        abort();
    }
}

/* Waits, but not beyond a nrt_sim_clear_faults(): so a test ends a delay when it likes. */
static void wait_us(uint64_t duration_us, uint64_t seen_clears)
{
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    uint64_t end_ns = (uint64_t)end.tv_nsec + duration_us % 1000000 * 1000;
    end.tv_sec += (time_t)(duration_us / 1000000 + end_ns / 1000000000);
    end.tv_nsec = (long)(end_ns % 1000000000);
    pthread_mutex_lock(&lock);
    while (duration_us > 0 && num_clears == seen_clears &&
           pthread_cond_timedwait(&cleared, &lock, &end) != ETIMEDOUT)
        continue;
    pthread_mutex_unlock(&lock);
}

void nrt_sim_die(void)
{
    sim_trace_event("die", "%s", "");
    kill(getpid(), SIGKILL);
    _exit(137); /* not reached */
}

NRT_STATUS sim_apply_faults(const char *name, int core)
{
    struct fault due = no_fault;
    bool is_due = false;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < num_faults; i++) {
        struct fault *fault = &faults[i];
        if (strcmp(fault->function, name) != 0 || (fault->core != ANY_CORE && fault->core != core))
            continue;
        fault->num_matches++;
        bool is_hit = fault->num_matches >= fault->first &&
                      (fault->is_sticky || fault->num_matches - fault->first < fault->times);
        if (!is_hit)
            continue;
        fault->was_hit = is_due = true;
        due.status = due.status == NO_STATUS ? fault->status : due.status;
        due.delay_us += fault->delay_us;
        due.hang_us += fault->hang_us;
        due.is_deadly |= fault->is_deadly;
    }
    uint64_t seen_clears = num_clears;
    pthread_mutex_unlock(&lock);
    if (!is_due)
        return NRT_SUCCESS;
    sim_trace_event("fault", ", \"at\": \"%s\", \"code\": %d", name, due.status);
    wait_us(due.delay_us + due.hang_us, seen_clears);
    if (due.is_deadly)
        nrt_sim_die();
    if (due.status == NO_STATUS)
        return due.hang_us > 0 ? NRT_TIMEOUT : NRT_SUCCESS;
    return (NRT_STATUS)due.status;
}

static int add_fault(const char *function, struct fault fault, uint32_t times)
{
    if (function == NULL || strlen(function) >= sizeof(fault.function) || !is_known(function) ||
        times == 0)
        return -1;
    strcpy(fault.function, function);
    fault.times = times;
    pthread_mutex_lock(&lock);
    bool has_room = num_faults < FAULTS_MAX;
    if (has_room)
        faults[num_faults++] = fault;
    pthread_mutex_unlock(&lock);
    return has_room ? 0 : -1;
}

int nrt_sim_fault(const char *function, int status, uint32_t times)
{
    struct fault fault = no_fault;
    fault.status = status;
    return status < 0 ? -1 : add_fault(function, fault, times);
}

int nrt_sim_delay(const char *function, uint64_t delay_us, uint32_t times)
{
    struct fault fault = no_fault;
    fault.delay_us = delay_us;
    return add_fault(function, fault, times);
}

void nrt_sim_clear_faults(void)
{
    pthread_mutex_lock(&lock);
    num_faults = 0;
    num_clears++;
    pthread_cond_broadcast(&cleared);
    pthread_mutex_unlock(&lock);
}

uint64_t nrt_sim_faults_left(void)
{
    uint64_t num_left = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < num_faults; i++)
        num_left += !faults[i].was_hit;
    pthread_mutex_unlock(&lock);
    return num_left;
}
