/*
 * What the files of the simulator of libnrt share: handles, tensors, cores, calls, faults, trace.
 *
 * A public function looks like this:
 *
 *     NRT_STATUS nrt_thing(nrt_tensor_t *handle, int vnc, size_t size)
 *     {
 *         SIM_ENTER("nrt_thing");            // lifecycle, faults, counting; may return
 *         SIM_NOTE("vnc", vnc);              // goes into the trace line of this call
 *         SIM_NOTE("size", size);
 *         struct sim_tensor *tensor = sim_tensor_hold(handle);
 *         if (tensor == NULL)
 *             SIM_RETURN(NRT_INVALID_HANDLE);
 *         ...
 *         sim_tensor_release(tensor);
 *         SIM_RETURN(NRT_SUCCESS);
 *     }
 *
 * The trace line is written when the function returns, whichever way. No lock of the simulator is
 * held while a fault sleeps. Lock order: a file's own locks before sim_lock(); handles, faults and
 * the trace have inner locks of their own and may be used under any other.
 */
#ifndef SIM_H
#define SIM_H

#include <pthread.h>
#include <stdatomic.h>

#include "nrt_functions.h"

/* ---- Lifecycle (lifecycle.c) ---------------------------------------------------------------- */

enum sim_state { SIM_NEVER_OPENED, SIM_OPEN, SIM_CLOSED };

/* The lock of the lifecycle and of what has none of its own. Not recursive. */
void sim_lock(void);
void sim_unlock(void);
enum sim_state sim_state(void);
/* SUCCESS between nrt_init and nrt_close, else UNINITIALIZED or CLOSED. */
NRT_STATUS sim_state_status(void);
/* A number that each nrt_init changes; 0 before the first. */
uint64_t sim_generation(void);

/*
 * Called by nrt_init after the cores are this process's, and by nrt_close before memory goes away.
 * At close: stop own threads, report what is still open by sim_violation(), free objects. No lock
 * is held, no other public call is running.
 */
NRT_STATUS sim_sendrecv_at_init(void);
void sim_sendrecv_at_close(void);
NRT_STATUS sim_queues_at_init(void);
void sim_queues_at_close(void); /* runs first, then models, then sendrecv, then tensors */
NRT_STATUS sim_models_at_init(void);
void sim_models_at_close(void);

/* ---- Calls, faults and trace (faults.c, trace.c) -------------------------------------------- */

struct sim_call {
    const char *name;
    NRT_STATUS status;
    bool is_traced;
    uint64_t started_us;
    size_t num_note_bytes;
    char notes[512]; /* JSON members, each with a comma before it */
};

/* Counts the call, applies its faults; returns false when the function must return call->status. */
bool sim_call_begin(struct sim_call *call, const char *name, int core, bool must_be_open);
void sim_call_end(struct sim_call *call);
void sim_note_integer(struct sim_call *call, const char *key, long long value);
void sim_note_text(struct sim_call *call, const char *key, const char *value);

#define SIM_CALL_(name, core, must_be_open, leave)                                                 \
    struct sim_call sim_call __attribute__((cleanup(sim_call_end)));                               \
    if (!sim_call_begin(&sim_call, (name), (core), (must_be_open)))                                \
    leave

/* For functions of an open library: UNINITIALIZED before nrt_init, CLOSED after nrt_close. */
#define SIM_ENTER(name) SIM_CALL_(name, -1, true, return sim_call.status)
/* The same; a fault with core=N applies only to this core: a vnc, or an absolute lnc. */
#define SIM_ENTER_ON(name, core) SIM_CALL_(name, core, true, return sim_call.status)
/* For functions that may be called at any time. */
#define SIM_ENTER_ANY(name) SIM_CALL_(name, -1, false, return sim_call.status)
/* For functions that return no status: `otherwise` is what they return then (may be empty). */
#define SIM_ENTER_OR(name, otherwise) SIM_CALL_(name, -1, true, return otherwise)
#define SIM_ENTER_ANY_OR(name, otherwise) SIM_CALL_(name, -1, false, return otherwise)
#define SIM_NOTE(key, value) sim_note_integer(&sim_call, (key), (long long)(value))
#define SIM_NOTE_TEXT(key, value) sim_note_text(&sim_call, (key), (value))
#define SIM_RETURN(value) return (sim_call.status = (value))

/*
 * A named point inside the simulator ("sendrecv.deliver", "models.execute"): counted and faulted
 * like a function. Returns the status of a due fault, or SUCCESS.
 */
NRT_STATUS sim_fault(const char *point, int core);

/* A line of the trace that is no call: {"event": name, ...}. `members` is "" or ", \"key\": 1". */
void sim_trace_event(const char *name, const char *members, ...)
    __attribute__((format(printf, 2, 3)));
void sim_trace_call(const struct sim_call *call, uint64_t ended_us);
/* Reads the environment again: at the first call of a process and at each nrt_init. */
void sim_trace_open(void);
void sim_faults_open(void);
/* Sleeps for, or dies of, or returns the status of the faults that this call hits. */
NRT_STATUS sim_apply_faults(const char *name, int core);
bool sim_is_traced(void);
uint64_t sim_now_us(void);
/* Public calls that run right now, in all threads. */
int sim_num_running_calls(void);

/*
 * The caller broke the contract in a way the real library leaves undefined. Written to stderr and
 * the trace, counted (nrt_sim_violations()); with NRT_SIM_STRICT=abort the process ends here.
 * Returns NRT_FAILURE.
 */
NRT_STATUS sim_violation(const char *text, ...) __attribute__((format(printf, 1, 2)));

/* ---- Handles (handles.c) -------------------------------------------------------------------- */

enum sim_kind {
    SIM_TENSOR = 1,
    SIM_MODEL,
    SIM_TENSOR_SET,
    SIM_COMMUNICATOR,
    SIM_REQUEST,
    SIM_ERROR_TRACKER,
    SIM_CC_CONTEXT,
    SIM_NUM_KINDS,
};

/*
 * A handle is an address inside a range without access rights: who looks inside one faults. A
 * value is never used twice, so a freed handle stays dead. All are thread-safe.
 */
/* `object` is not NULL. Returns NULL when there are no more handles. */
void *sim_handle_new(enum sim_kind kind, void *object);
/* The object, or NULL for a foreign handle, one of another kind or a freed one. */
void *sim_handle_object(enum sim_kind kind, const void *handle);
/* The same, with `hold` called on the object before another thread can end the handle. */
void *sim_handle_hold(enum sim_kind kind, const void *handle, void (*hold)(void *object));
/* Ends the handle and returns its object, or NULL as above. The object stays the caller's. */
void *sim_handle_end(enum sim_kind kind, const void *handle);
size_t sim_handle_count(enum sim_kind kind);
/* Ends every handle of a kind and gives each object to `visit`. For the at_close functions. */
void sim_handle_end_all(enum sim_kind kind, void (*visit)(void *object));
/* A small number that names the handle in notes. */
long long sim_handle_number(const void *handle);

/* ---- Device memory (memory.c) and tensors (tensors.c) --------------------------------------- */

struct sim_tensor {
    atomic_int num_references; /* the handle's one, one per slice, one per holder */
    atomic_int num_in_flight;  /* device operations on it; freeing it meanwhile is a violation */
    atomic_uint_fast64_t num_completions; /* executions that wrote it as an output */
    nrt_tensor_placement_t placement;
    int vnc; /* process-relative; -1 for host memory */
    uint64_t size;
    unsigned char *memory;   /* readable and writable; NULL for an empty tensor */
    uint64_t device_address; /* what nrt_tensor_get_va returns for a device tensor */
    struct sim_tensor *parent; /* of a slice; held by it */
    bool is_memory_owned;
    char name[128];
};

/* The tensor with one more reference, or NULL: then INVALID_HANDLE. */
struct sim_tensor *sim_tensor_hold(const nrt_tensor_t *handle);
void sim_tensor_release(struct sim_tensor *tensor);
/* Sets *pointer to the bytes, or returns INVALID when the range is not all inside the tensor. */
NRT_STATUS sim_tensor_data(const struct sim_tensor *tensor, uint64_t offset, uint64_t size,
                           unsigned char **pointer);
/* An operation on the tensor starts (+1) or ends (-1): hold it for as long. */
void sim_tensor_in_flight(struct sim_tensor *tensor, int change);
/* memmove; INVALID between two cores or out of range. Nothing is counted, noted or locked. */
NRT_STATUS sim_tensor_copy(const struct sim_tensor *from, uint64_t from_offset,
                           const struct sim_tensor *to, uint64_t to_offset, uint64_t size);
/* Gives a fresh tensor (calloc) its name, first reference and handle, or frees it: RESOURCE. */
NRT_STATUS sim_tensor_publish(struct sim_tensor *tensor, const char *name, nrt_tensor_t **handle);
/* An execution wrote this output. */
void sim_tensor_completed(struct sim_tensor *tensor);
/* Bytes behind a device address; INVALID when it is none of this process. *vnc may be NULL. */
NRT_STATUS sim_device_data(uint64_t address, uint64_t size, unsigned char **pointer, int *vnc);
/* Pages of a core's HBM, or RESOURCE when its budget is spent. Not zeroed, as on a device. */
NRT_STATUS sim_memory_take(int vnc, uint64_t size, unsigned char **memory, uint64_t *address);
void sim_memory_give_back(int vnc, uint64_t address);
uint64_t sim_memory_used(int vnc);
/* A descriptor whose file position is the start of the range; see nrt_get_dmabuf_fd. */
NRT_STATUS sim_memory_descriptor(uint64_t address, uint64_t size, int *fd);
void sim_memory_at_close(void);
void sim_tensors_at_close(void);

/* ---- Cores and the host (instance.c) -------------------------------------------------------- */

enum { SIM_CORES_MAX = 128, SIM_PATH_MAX = 512 };

struct sim_profile {
    const char *name;
    nrt_instance_family_t family;
    nrt_instance_size_t size;
    const char *arch_name;
    uint32_t num_devices;
    uint32_t cores_per_device; /* physical */
    uint32_t num_hbms;         /* of one device */
    uint32_t lnc_default;      /* physical cores in one logical core */
    uint32_t lnc_max;
    const char *const *efa_bdfs; /* one per device, or NULL: no EFA */
};

struct sim_host {
    const struct sim_profile *profile;
    uint32_t lnc_size; /* NEURON_LOGICAL_NC_CONFIG */
    uint32_t num_lncs; /* logical cores of the host */
    uint32_t num_mine; /* of those, this process's: vnc 0 .. num_mine - 1 */
    int mine[SIM_CORES_MAX]; /* vnc -> absolute lnc */
    bool takes_free_cores;   /* NEURON_RT_NUM_CORES: `mine` may still move up */
    uint64_t hbm_bytes;      /* of one logical core */
};

/* What the environment says, read at nrt_init. Only between nrt_init and nrt_close. */
const struct sim_host *sim_host(void);
/* A fresh reading of the environment; INVALID with a line on stderr when it is wrong. */
NRT_STATUS sim_read_host(struct sim_host *host);
NRT_STATUS sim_read_cores(struct sim_host *host); /* its part in cores.c */
void sim_set_host(const struct sim_host *host);   /* used by lifecycle.c */
NRT_STATUS sim_open_root(void);                   /* likewise */
bool sim_core_is_mine(int vnc); /* process-relative */
int sim_absolute_lnc(int vnc);  /* -1: not mine */
int sim_vnc_of_lnc(int lnc);    /* -1: not mine */
bool sim_lnc_exists(int lnc);   /* on this host, whoever owns it */
/* Statuses for a vnc argument: SUCCESS, or INVALID when it is not visible. */
NRT_STATUS sim_check_vnc(int vnc);
uint32_t sim_device_of_vnc(int vnc);
uint32_t sim_hbm_of_vnc(int vnc);

/* NRT_SIM_ROOT as nrt_init found and made it. Ends without a slash. */
const char *sim_root(void);
/* NRT_SIM_HOST: the address of the host this process is on. */
const char *sim_host_address(void);
/* Makes `path` = root/hosts/<address>/<name> and that folder; for any host. */
NRT_STATUS sim_host_folder(const char *address, const char *name, char path[SIM_PATH_MAX]);
/* Exclusive ownership of this process's cores, held until nrt_close or the process's end. */
NRT_STATUS sim_take_cores(struct sim_host *host); /* cores.c */
void sim_give_cores_back(void);
void sim_forget_cores(void); /* in a forked child: they stay the parent's, as long as it lives */

/* ---- Steering by tests in the same process: exported, no part of libnrt --------------------- */

/* Adds the faults of a text in the grammar of faults.c. 0, or -1 when the text is wrong. */
int nrt_sim_schedule(const char *text);
/* `status` for `times` calls of `function`, from its next call on. */
int nrt_sim_fault(const char *function, int status, uint32_t times);
int nrt_sim_delay(const char *function, uint64_t delay_us, uint32_t times);
/* Takes all faults away; who waits because of one goes on. */
void nrt_sim_clear_faults(void);
/* Calls of a function (or passes of a point) so far in this process. */
uint64_t nrt_sim_calls(const char *function);
uint64_t nrt_sim_violations(void);
/* Scheduled faults of which no call was hit so far. */
uint64_t nrt_sim_faults_left(void);
/* The text of the newest violation, "" when there is none. Valid until the next one. */
const char *nrt_sim_last_violation(void);
void nrt_sim_forget_violations(void);
/* Handles of a kind (enum sim_kind) that are alive. */
uint64_t nrt_sim_num_live(int kind);
/* The process ends at once, as by SIGKILL. */
void nrt_sim_die(void);

#endif
