/*
 * What the files about models share: the container, loaded models, tensor sets, executions.
 *
 *   neff.c         bytes -> struct sim_neff
 *   models.c       loading and unloading
 *   tensor_sets.c  name -> tensor
 *   execute.c      the checks before an execution, who has the core, what it leaves behind
 *   programs.c, hash_chain.c   what a "device" computes
 */
#ifndef SIM_MODELS_H
#define SIM_MODELS_H

#include "sim.h"

/* ---- The container (neff.c) ------------------------------------------------------------------ */

enum {
    SIM_NEFF_RANK_MAX = 8,
    SIM_NEFF_TENSORS_MAX = 4096,
    SIM_NEFF_NAME_BYTES = 256,
    SIM_NEFF_NUM_PARAMETERS = 16,
};

enum sim_program { SIM_PROGRAM_HASH_CHAIN = 1, SIM_PROGRAM_COPY_OR_ADD = 2 };

/* Flags of the container. */
enum { SIM_NEFF_SEQ_IDS_MASK = 1, SIM_NEFF_TRANSPOSED_KEYS = 2 };

struct sim_neff_tensor {
    char name[SIM_NEFF_NAME_BYTES];
    nrt_tensor_usage_t usage;
    nrt_dtype_t dtype;
    uint64_t num_bytes;
    uint32_t num_dimensions;
    uint32_t shape[SIM_NEFF_RANK_MAX];
    int alias; /* of an input: the index of the output that is the same memory, or -1 */
};

/* All inputs first, then all outputs: a program counts on this order, callers on the names. */
struct sim_neff {
    enum sim_program program;
    uint32_t num_cores;
    uint32_t flags;
    uint32_t delay_us; /* of each execution, in addition to what it takes */
    uint32_t parameters[SIM_NEFF_NUM_PARAMETERS];
    uint32_t num_inputs;
    uint32_t num_outputs;
    struct sim_neff_tensor tensors[]; /* num_inputs + num_outputs */
};

/* The parsed container, to be freed with free(), or NULL with *status set. */
struct sim_neff *sim_neff_parse(const void *bytes, size_t num_bytes, NRT_STATUS *status);
uint64_t sim_dtype_bytes(nrt_dtype_t dtype); /* 0 for an unknown one */

/* ---- Models (models.c) ----------------------------------------------------------------------- */

struct sim_model {
    atomic_int num_references; /* the handle's one, and one per execution that is not over */
    struct sim_neff *neff;
    int vnc; /* the first of its cores, process-relative */
    uint32_t rank;
    uint32_t num_ranks;
};

struct sim_model *sim_model_hold(const nrt_model_t *handle);
void sim_model_release(struct sim_model *model);
/* The core of a model, for faults and the trace; -1 for what is no model. */
int sim_model_core(const nrt_model_t *handle);

/* ---- Tensor sets (tensor_sets.c) ------------------------------------------------------------- */

struct sim_tensor_set;

struct sim_tensor_set *sim_tensor_set_hold(const nrt_tensor_set_t *handle);
void sim_tensor_set_release(struct sim_tensor_set *set);
/* What is in the set under this name, or NULL. */
nrt_tensor_t *sim_tensor_set_find(struct sim_tensor_set *set, const char *name);
/* A queued execution reads the set (+1), or is over (-1): changing it meanwhile is a violation. */
void sim_tensor_set_in_flight(struct sim_tensor_set *set, int change);
void sim_tensor_sets_at_close(void);

/* ---- Executions (execute.c) ------------------------------------------------------------------ */

/* One execution: everything it touches is held from its making to its end. */
struct sim_execution {
    struct sim_model *model;
    struct sim_tensor_set *inputs;
    struct sim_tensor_set *outputs;
    uint32_t num_tensors;
    struct sim_tensor *tensors[]; /* as in the container */
};

/* Checks every rule about names, sizes, places and aliases. *execution is NULL unless SUCCESS. */
NRT_STATUS sim_execution_new(const nrt_model_t *model, const nrt_tensor_set_t *inputs,
                             const nrt_tensor_set_t *outputs, struct sim_execution **execution);
/* Runs it. When another one has the core: waits, or returns EXEC_NC_BUSY at once. */
NRT_STATUS sim_execution_run(struct sim_execution *execution, bool may_wait);
void sim_execution_free(struct sim_execution *execution);

/* What a status says about the execution unit it came from: dead until the process inits again. */
bool sim_is_fatal(NRT_STATUS status);
/* A call on the core ended like this. Returns `status`. */
NRT_STATUS sim_core_ended_with(int vnc, NRT_STATUS status);
bool sim_core_is_dead(int vnc);
void sim_executions_at_init(void);

/* Steering by tests: executions stop before they compute, with the core in hand, while it is on. */
void nrt_sim_hold_executions(bool is_held);

/* ---- Programs (programs.c, hash_chain.c) ----------------------------------------------------- */

/* Whether the tensors of a container are what its program needs. */
bool sim_program_accepts(const struct sim_neff *neff);
NRT_STATUS sim_program_run(const struct sim_neff *neff, struct sim_tensor *const *tensors);
bool sim_hash_chain_accepts(const struct sim_neff *neff);
NRT_STATUS sim_hash_chain_run(const struct sim_neff *neff, struct sim_tensor *const *tensors);

#endif
