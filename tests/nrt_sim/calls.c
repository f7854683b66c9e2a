/* What happens at the begin and the end of each public call, and what a breach of contract does. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

enum { NAMES_MAX = 256 };

struct counter {
    const char *name;
    uint64_t num_calls;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t opened = PTHREAD_ONCE_INIT;
static struct counter counters[NAMES_MAX];
static size_t num_counters;
static atomic_int num_running;
static uint64_t num_violations;
static char last_violation[400];

static void open_all(void)
{
    sim_trace_open();
    sim_faults_open();
}

/* The names are literals of the simulator: most are found by address. The lock is held. */
static struct counter *counter_of(const char *name)
{
    for (size_t i = 0; i < num_counters; i++)
        if (counters[i].name == name || strcmp(counters[i].name, name) == 0)
            return &counters[i];
    return NULL;
}

static void count(const char *name)
{
    pthread_mutex_lock(&lock);
    struct counter *counter = counter_of(name);
    if (counter == NULL && num_counters < NAMES_MAX) {
        counter = &counters[num_counters++];
        counter->name = name;
    }
    if (counter != NULL)
        counter->num_calls++;
    pthread_mutex_unlock(&lock);
}

uint64_t nrt_sim_calls(const char *function)
{
    pthread_mutex_lock(&lock);
    const struct counter *counter = counter_of(function);
    uint64_t num_calls = counter == NULL ? 0 : counter->num_calls;
    pthread_mutex_unlock(&lock);
    return num_calls;
}

bool sim_call_begin(struct sim_call *call, const char *name, int core, bool must_be_open)
{
    pthread_once(&opened, open_all);
    call->name = name;
    call->status = NRT_SUCCESS;
    call->num_note_bytes = 0;
    call->notes[0] = '\0';
    call->started_us = sim_now_us();
    call->is_traced = sim_is_traced();
    atomic_fetch_add(&num_running, 1); /* before the state is read: nrt_close does the reverse */
    if (must_be_open)
        call->status = sim_state_status();
    count(name); /* who sees the count knows that nrt_close would see the call */
    if (call->status == NRT_SUCCESS)
        call->status = sim_apply_faults(name, core);
    return call->status == NRT_SUCCESS;
}

void sim_call_end(struct sim_call *call)
{
    atomic_fetch_sub(&num_running, 1);
    if (call->is_traced)
        sim_trace_call(call, sim_now_us());
}

int sim_num_running_calls(void)
{
    return atomic_load(&num_running);
}

NRT_STATUS sim_fault(const char *point, int core)
{
    count(point);
    return sim_apply_faults(point, core);
}

NRT_STATUS sim_violation(const char *text, ...)
{
    char message[sizeof(last_violation)], plain[sizeof(last_violation)];
    va_list arguments;
    va_start(arguments, text);
    vsnprintf(message, sizeof(message), text, arguments);
    va_end(arguments);
    for (size_t i = 0; i < sizeof(plain); i++) {
        unsigned char letter = (unsigned char)message[i];
        plain[i] = (char)(letter < ' ' || letter == '"' || letter == '\\' ? '\'' : letter);
        if (letter == '\0') {
            plain[i] = '\0';
            break;
        }
    }
    pthread_mutex_lock(&lock);
    num_violations++;
    memcpy(last_violation, message, sizeof(last_violation));
    pthread_mutex_unlock(&lock);
    fprintf(stderr, "nrt_sim: violation: %s\n", message);
    sim_trace_event("violation", ", \"text\": \"%s\"", plain);
    const char *strict = getenv("NRT_SIM_STRICT");
    if (strict != NULL && strcmp(strict, "abort") == 0)
        abort();
    return NRT_FAILURE;
}

uint64_t nrt_sim_violations(void)
{
    pthread_mutex_lock(&lock);
    uint64_t count_now = num_violations;
    pthread_mutex_unlock(&lock);
    return count_now;
}

const char *nrt_sim_last_violation(void)
{
    return last_violation;
}

void nrt_sim_forget_violations(void)
{
    pthread_mutex_lock(&lock);
    num_violations = 0;
    last_violation[0] = '\0';
    pthread_mutex_unlock(&lock);
}
