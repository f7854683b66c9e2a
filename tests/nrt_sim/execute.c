/*
 * An execution: what must be true before it starts, who has the core, what a failure leaves behind.
 *
 * Checked, each with EXEC_BAD_INPUT (1002): every declared name is in its set, with the declared
 * size, in device memory of one of the model's cores; an input that the container declares as
 * aliased is the very same tensor as its output (so KV state is updated where it is); no other two
 * tensors of which one is written share a byte. A freed tensor is INVALID_HANDLE (3).
 *
 * One execution at a time has a core. A second nrt_execute meanwhile is EXEC_NC_BUSY (1005); a
 * queued execution waits for its turn instead.
 *
 * After an error of the execution unit (sim_is_fatal) the core answers EXEC_UNIT_UNRECOVERABLE
 * (101) to every execution until the process closes and inits again.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "models.h"

enum { REPEATS_MAX = 1 << 20 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
/* Under `lock`: */
static bool is_busy[SIM_CORES_MAX];
static bool is_dead[SIM_CORES_MAX];
static bool is_everything_held;

void sim_executions_at_init(void)
{
    pthread_mutex_lock(&lock);
    memset(is_busy, 0, sizeof is_busy);
    memset(is_dead, 0, sizeof is_dead);
    is_everything_held = false;
    pthread_mutex_unlock(&lock);
}

bool sim_is_fatal(NRT_STATUS status)
{
    switch (status) {
    case NRT_HW_ERROR:
    case NRT_EXEC_UNIT_UNRECOVERABLE:
    case NRT_EXEC_HW_ERR_COLLECTIVES:
    case NRT_EXEC_HW_ERR_HBM_UE:
    case NRT_EXEC_HW_ERR_NC_UE:
    case NRT_EXEC_HW_ERR_DMA_ABORT:
    case NRT_EXEC_SW_NQ_OVERFLOW:
        return true;
    default:
        return false;
    }
}

NRT_STATUS sim_core_ended_with(int vnc, NRT_STATUS status)
{
    if (vnc >= 0 && vnc < SIM_CORES_MAX && sim_is_fatal(status)) {
        pthread_mutex_lock(&lock);
        is_dead[vnc] = true;
        pthread_mutex_unlock(&lock);
    }
    return status;
}

bool sim_core_is_dead(int vnc)
{
    if (vnc < 0 || vnc >= SIM_CORES_MAX)
        return false;
    pthread_mutex_lock(&lock);
    const bool is = is_dead[vnc];
    pthread_mutex_unlock(&lock);
    return is;
}

void nrt_sim_hold_executions(bool is_held)
{
    pthread_mutex_lock(&lock);
    is_everything_held = is_held;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* ---- The checks ------------------------------------------------------------------------------ */

/* Host memory has the vnc -1, and is on no model. */
static bool is_on_model(const struct sim_model *model, const struct sim_tensor *tensor)
{
    return tensor->vnc >= model->vnc && tensor->vnc < model->vnc + (int)model->neff->num_cores;
}

static bool do_overlap(const struct sim_tensor *a, const struct sim_tensor *b)
{
    return a->memory < b->memory + b->size && b->memory < a->memory + a->size;
}

/* Takes each declared tensor out of its set, and holds it. */
static NRT_STATUS collect(struct sim_execution *execution)
{
    const struct sim_neff *neff = execution->model->neff;
    for (uint32_t i = 0; i < neff->num_inputs + neff->num_outputs; i++) {
        const struct sim_neff_tensor *declared = &neff->tensors[i];
        struct sim_tensor_set *set =
            i < neff->num_inputs ? execution->inputs : execution->outputs;
        const nrt_tensor_t *handle = sim_tensor_set_find(set, declared->name);
        if (handle == NULL)
            return NRT_EXEC_BAD_INPUT;
        struct sim_tensor *tensor = sim_tensor_hold(handle);
        if (tensor == NULL)
            return NRT_INVALID_HANDLE;
        execution->tensors[execution->num_tensors++] = tensor;
        sim_tensor_in_flight(tensor, +1);
        if (tensor->size != declared->num_bytes || !is_on_model(execution->model, tensor))
            return NRT_EXEC_BAD_INPUT;
    }
    return NRT_SUCCESS;
}

static NRT_STATUS check_sharing(const struct sim_execution *execution)
{
    const struct sim_neff *neff = execution->model->neff;
    for (uint32_t i = 0; i < execution->num_tensors; i++) {
        const struct sim_tensor *tensor = execution->tensors[i];
        const int alias = neff->tensors[i].alias;
        if (alias >= 0 && execution->tensors[alias] != tensor)
            return NRT_EXEC_BAD_INPUT;
        /* Each output against all that come before it: inputs may share among themselves. */
        for (uint32_t k = 0; i >= neff->num_inputs && k < i; k++)
            if (neff->tensors[k].alias != (int)i && do_overlap(tensor, execution->tensors[k]))
                return NRT_EXEC_BAD_INPUT;
    }
    return NRT_SUCCESS;
}

NRT_STATUS sim_execution_new(const nrt_model_t *model, const nrt_tensor_set_t *inputs,
                             const nrt_tensor_set_t *outputs, struct sim_execution **execution)
{
    *execution = NULL;
    struct sim_model *held = sim_model_hold(model);
    if (held == NULL)
        return NRT_INVALID_HANDLE;
    const uint32_t num_tensors = held->neff->num_inputs + held->neff->num_outputs;
    struct sim_execution *made = calloc(1, sizeof *made + num_tensors * sizeof made->tensors[0]);
    if (made == NULL) {
        sim_model_release(held);
        return NRT_FAIL_HOST_MEM_ALLOC;
    }
    made->model = held;
    made->inputs = sim_tensor_set_hold(inputs);
    made->outputs = sim_tensor_set_hold(outputs);
    NRT_STATUS status = NRT_INVALID_HANDLE;
    if (made->inputs != NULL && made->outputs != NULL) {
        sim_tensor_set_in_flight(made->inputs, +1);
        sim_tensor_set_in_flight(made->outputs, +1);
        status = collect(made);
        if (status == NRT_SUCCESS)
            status = check_sharing(made);
        if (status == NRT_SUCCESS) {
            *execution = made;
            return NRT_SUCCESS;
        }
        sim_tensor_set_in_flight(made->inputs, -1);
        sim_tensor_set_in_flight(made->outputs, -1);
    }
    if (made->inputs != NULL)
        sim_tensor_set_release(made->inputs);
    if (made->outputs != NULL)
        sim_tensor_set_release(made->outputs);
    made->inputs = made->outputs = NULL;
    sim_execution_free(made);
    return status;
}

void sim_execution_free(struct sim_execution *execution)
{
    struct sim_tensor_set *sets[] = {execution->inputs, execution->outputs};
    for (int i = 0; i < 2; i++)
        if (sets[i] != NULL) {
            sim_tensor_set_in_flight(sets[i], -1);
            sim_tensor_set_release(sets[i]);
        }
    for (uint32_t i = 0; i < execution->num_tensors; i++) {
        sim_tensor_in_flight(execution->tensors[i], -1);
        sim_tensor_release(execution->tensors[i]);
    }
    sim_model_release(execution->model);
    free(execution);
}

/* ---- The core -------------------------------------------------------------------------------- */

static bool is_any(const struct sim_model *model, const bool flags[SIM_CORES_MAX])
{
    for (uint32_t i = 0; i < model->neff->num_cores; i++)
        if (flags[model->vnc + (int)i])
            return true;
    return false;
}

static void set_all(const struct sim_model *model, bool flags[SIM_CORES_MAX], bool value)
{
    for (uint32_t i = 0; i < model->neff->num_cores; i++)
        flags[model->vnc + (int)i] = value;
}

static NRT_STATUS take_cores(const struct sim_model *model, bool may_wait)
{
    NRT_STATUS status = NRT_SUCCESS;
    pthread_mutex_lock(&lock);
    while (may_wait && is_any(model, is_busy))
        pthread_cond_wait(&changed, &lock);
    if (is_any(model, is_dead))
        status = NRT_EXEC_UNIT_UNRECOVERABLE;
    else if (is_any(model, is_busy))
        status = NRT_EXEC_NC_BUSY;
    else
        set_all(model, is_busy, true);
    pthread_mutex_unlock(&lock);
    return status;
}

static void give_cores_back(const struct sim_model *model, NRT_STATUS status)
{
    pthread_mutex_lock(&lock);
    set_all(model, is_busy, false);
    if (sim_is_fatal(status))
        set_all(model, is_dead, true);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void wait_while_held(void)
{
    pthread_mutex_lock(&lock);
    while (is_everything_held)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

NRT_STATUS sim_execution_run(struct sim_execution *execution, bool may_wait)
{
    const struct sim_model *model = execution->model;
    NRT_STATUS status = take_cores(model, may_wait);
    if (status != NRT_SUCCESS)
        return status;
    status = sim_fault("models.execute", model->vnc);
    wait_while_held();
    if (model->neff->delay_us > 0)
        usleep(model->neff->delay_us);
    if (status == NRT_SUCCESS)
        status = sim_program_run(model->neff, execution->tensors);
    if (status == NRT_SUCCESS || status == NRT_EXEC_COMPLETED_WITH_NUM_ERR)
        for (uint32_t i = model->neff->num_inputs; i < execution->num_tensors; i++)
            sim_tensor_completed(execution->tensors[i]);
    give_cores_back(model, status);
    return status;
}

/* ---- The public calls ------------------------------------------------------------------------ */

static NRT_STATUS execute(nrt_model_t *model, const nrt_tensor_set_t *inputs,
                          nrt_tensor_set_t *outputs, int repeat)
{
    if (repeat < 1 || repeat > REPEATS_MAX)
        return NRT_INVALID;
    struct sim_execution *execution;
    NRT_STATUS status = sim_execution_new(model, inputs, outputs, &execution);
    if (status != NRT_SUCCESS)
        return status;
    for (int i = 0; status == NRT_SUCCESS && i < repeat; i++)
        status = sim_execution_run(execution, false);
    sim_execution_free(execution);
    return status;
}

/* A fault at the call itself, too, can kill the core. */
#define ENTER_EXECUTION(name, core)                                                                \
    SIM_CALL_(name, core, true, return sim_core_ended_with((core), sim_call.status))

NRT_STATUS nrt_execute(nrt_model_t *model, const nrt_tensor_set_t *inputs,
                       nrt_tensor_set_t *outputs)
{
    const int core = sim_model_core(model);
    ENTER_EXECUTION("nrt_execute", core);
    SIM_NOTE("model", sim_handle_number(model));
    SIM_NOTE("vnc", core);
    SIM_RETURN(execute(model, inputs, outputs, 1));
}

NRT_STATUS nrt_execute_repeat(nrt_model_t *model, const nrt_tensor_set_t *inputs,
                              nrt_tensor_set_t *outputs, int repeat)
{
    const int core = sim_model_core(model);
    ENTER_EXECUTION("nrt_execute_repeat", core);
    SIM_NOTE("model", sim_handle_number(model));
    SIM_NOTE("vnc", core);
    SIM_NOTE("repeat", repeat);
    SIM_RETURN(execute(model, inputs, outputs, repeat));
}
