/*
 * Loading and unloading, and what a model says about its tensors (nrt.h, nrt_experimental.h).
 */
#include <stdlib.h>
#include <string.h>

#include "models.h"

/* Guards what connects handles and objects: a model is held or gone, never half. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int num_models_on[SIM_CORES_MAX]; /* under `lock` */

struct sim_model *sim_model_hold(const nrt_model_t *handle)
{
    pthread_mutex_lock(&lock);
    struct sim_model *model = sim_handle_object(SIM_MODEL, handle);
    if (model != NULL)
        atomic_fetch_add(&model->num_references, 1);
    pthread_mutex_unlock(&lock);
    return model;
}

static void free_model(struct sim_model *model)
{
    free(model->neff);
    free(model);
}

void sim_model_release(struct sim_model *model)
{
    if (atomic_fetch_sub(&model->num_references, 1) == 1)
        free_model(model);
}

int sim_model_core(const nrt_model_t *handle)
{
    struct sim_model *model = sim_model_hold(handle);
    if (model == NULL)
        return -1;
    const int vnc = model->vnc;
    sim_model_release(model);
    return vnc;
}

static void count_on_cores(const struct sim_model *model, int change)
{
    for (uint32_t i = 0; i < model->neff->num_cores; i++)
        num_models_on[model->vnc + (int)i] += change;
}

/* The first run of `num_cores` cores without a model, or -1. `lock` is held. */
static int free_cores(uint32_t num_cores)
{
    uint32_t num_free = 0;
    for (uint32_t vnc = 0; vnc < sim_host()->num_mine; vnc++) {
        num_free = num_models_on[vnc] == 0 ? num_free + 1 : 0;
        if (num_free == num_cores)
            return (int)(vnc + 1 - num_cores);
    }
    return -1;
}

/* Puts the model onto its cores. `vnc` -1: onto the first free ones, as documented. */
static NRT_STATUS place(struct sim_model *model, int32_t vnc)
{
    const uint32_t num_cores = model->neff->num_cores;
    pthread_mutex_lock(&lock);
    model->vnc = vnc == -1 ? free_cores(num_cores) : vnc;
    bool are_there = model->vnc >= 0 && model->vnc < SIM_CORES_MAX;
    for (uint32_t i = 0; are_there && i < num_cores; i++)
        are_there = sim_core_is_mine(model->vnc + (int)i);
    if (are_there)
        count_on_cores(model, +1);
    pthread_mutex_unlock(&lock);
    return are_there ? NRT_SUCCESS : NRT_LOAD_NOT_ENOUGH_NC;
}

static void take_away(struct sim_model *model)
{
    pthread_mutex_lock(&lock);
    count_on_cores(model, -1);
    pthread_mutex_unlock(&lock);
}

static NRT_STATUS load(const void *neff, size_t size, int32_t vnc, int32_t vnc_count,
                       uint32_t rank, uint32_t num_ranks, nrt_model_t **handle)
{
    if (neff == NULL || size == 0 || handle == NULL)
        return NRT_INVALID;
    NRT_STATUS status;
    struct sim_neff *parsed = sim_neff_parse(neff, size, &status);
    if (parsed == NULL)
        return status;
    /* The argument is deprecated: -1, or what the model needs anyway. */
    if (vnc_count != -1 && vnc_count != (int32_t)parsed->num_cores) {
        free(parsed);
        return NRT_INVALID;
    }
    struct sim_model *model = calloc(1, sizeof *model);
    if (model == NULL) {
        free(parsed);
        return NRT_FAIL_HOST_MEM_ALLOC;
    }
    atomic_init(&model->num_references, 1);
    model->neff = parsed;
    model->rank = rank;
    model->num_ranks = num_ranks;
    status = place(model, vnc);
    if (status == NRT_SUCCESS) {
        nrt_model_t *made = sim_handle_new(SIM_MODEL, model);
        if (made != NULL) {
            *handle = made;
            return NRT_SUCCESS;
        }
        take_away(model);
        status = NRT_RESOURCE;
    }
    free_model(model);
    return status;
}

NRT_STATUS nrt_load(const void *neff, size_t size, int32_t vnc, int32_t vnc_count,
                    nrt_model_t **model)
{
    SIM_ENTER_ON("nrt_load", vnc);
    SIM_NOTE("size", size);
    SIM_NOTE("vnc", vnc);
    SIM_RETURN(load(neff, size, vnc, vnc_count, 0, 1, model));
}

/*
 * A world larger than this process's cores needs somewhere to meet: NEURON_RT_ROOT_COMM_ID
 * (AWS's configuration guide). Each rank's program computes its own share: nothing goes between
 * ranks, none waits for another, and whether the others are there nobody looks.
 */
NRT_STATUS nrt_load_collectives(const void *neff, size_t size, int32_t vnc, int32_t vnc_count,
                                uint32_t ctx_device_id, uint32_t ctx_device_count,
                                nrt_model_t **model)
{
    SIM_ENTER_ON("nrt_load_collectives", vnc);
    SIM_NOTE("size", size);
    SIM_NOTE("vnc", vnc);
    SIM_NOTE("rank", ctx_device_id);
    SIM_NOTE("num_ranks", ctx_device_count);
    if (ctx_device_id >= ctx_device_count)
        SIM_RETURN(NRT_INVALID);
    if (ctx_device_count > sim_host()->num_mine && getenv("NEURON_RT_ROOT_COMM_ID") == NULL)
        SIM_RETURN(NRT_FAILURE);
    SIM_RETURN(load(neff, size, vnc, vnc_count, ctx_device_id, ctx_device_count, model));
}

NRT_STATUS nrt_unload(nrt_model_t *model)
{
    SIM_ENTER_ON("nrt_unload", sim_model_core(model));
    SIM_NOTE("model", sim_handle_number(model));
    pthread_mutex_lock(&lock);
    struct sim_model *ended = sim_handle_object(SIM_MODEL, model);
    const bool is_in_use = ended != NULL && atomic_load(&ended->num_references) > 1;
    if (ended != NULL && !is_in_use)
        sim_handle_end(SIM_MODEL, model);
    pthread_mutex_unlock(&lock);
    if (ended == NULL)
        SIM_RETURN(NRT_INVALID_HANDLE);
    if (is_in_use)
        SIM_RETURN(sim_violation("a model is unloaded while an execution of it is not over"));
    take_away(ended);
    sim_model_release(ended);
    SIM_RETURN(NRT_SUCCESS);
}

NRT_STATUS nrt_get_model_vnc_count(const nrt_model_t *model, uint32_t *vnc_count)
{
    SIM_ENTER("nrt_get_model_vnc_count");
    if (vnc_count == NULL)
        SIM_RETURN(NRT_INVALID);
    struct sim_model *held = sim_model_hold(model);
    if (held == NULL)
        SIM_RETURN(NRT_INVALID_HANDLE);
    *vnc_count = held->neff->num_cores;
    sim_model_release(held);
    SIM_RETURN(NRT_SUCCESS);
}

/* ---- Tensor infos: given out as one allocation each, remembered until they come back --------- */

struct given {
    struct given *next;
    nrt_tensor_info_array_t *infos;
};

static struct given *all_given; /* under `lock` */

/* The array, and behind it every shape. NULL when there is no memory. */
static nrt_tensor_info_array_t *infos_of(const struct sim_neff *neff)
{
    const uint32_t num_tensors = neff->num_inputs + neff->num_outputs;
    nrt_tensor_info_array_t *infos;
    const size_t array_bytes = sizeof *infos + num_tensors * sizeof infos->tensor_array[0];
    const size_t shape_bytes = SIM_NEFF_RANK_MAX * sizeof(uint32_t);
    infos = calloc(1, array_bytes + num_tensors * shape_bytes);
    if (infos == NULL)
        return NULL;
    uint32_t *shapes = (uint32_t *)((char *)infos + array_bytes);
    infos->tensor_count = num_tensors;
    for (uint32_t i = 0; i < num_tensors; i++) {
        const struct sim_neff_tensor *tensor = &neff->tensors[i];
        nrt_tensor_info_t *info = &infos->tensor_array[i];
        memcpy(info->name, tensor->name, sizeof info->name);
        info->usage = tensor->usage;
        info->size = tensor->num_bytes;
        info->dtype = tensor->dtype;
        info->ndim = tensor->num_dimensions;
        info->shape = shapes + i * SIM_NEFF_RANK_MAX;
        memcpy(info->shape, tensor->shape, shape_bytes);
    }
    return infos;
}

NRT_STATUS nrt_get_model_tensor_info(nrt_model_t *model, nrt_tensor_info_array_t **infos)
{
    SIM_ENTER("nrt_get_model_tensor_info");
    if (infos == NULL)
        SIM_RETURN(NRT_INVALID);
    struct sim_model *held = sim_model_hold(model);
    if (held == NULL)
        SIM_RETURN(NRT_INVALID_HANDLE);
    struct given *given = malloc(sizeof *given);
    nrt_tensor_info_array_t *made = infos_of(held->neff);
    sim_model_release(held);
    if (given == NULL || made == NULL) {
        free(given);
        free(made);
        SIM_RETURN(NRT_FAIL_HOST_MEM_ALLOC);
    }
    pthread_mutex_lock(&lock);
    *given = (struct given){all_given, made};
    all_given = given;
    pthread_mutex_unlock(&lock);
    *infos = made;
    SIM_RETURN(NRT_SUCCESS);
}

/* Plain host memory: may be given back after nrt_close, too. */
NRT_STATUS nrt_free_model_tensor_info(nrt_tensor_info_array_t *infos)
{
    SIM_ENTER_ANY("nrt_free_model_tensor_info");
    pthread_mutex_lock(&lock);
    struct given **link = &all_given;
    while (*link != NULL && (*link)->infos != infos)
        link = &(*link)->next;
    struct given *found = *link;
    if (found != NULL)
        *link = found->next;
    pthread_mutex_unlock(&lock);
    if (found == NULL)
        SIM_RETURN(NRT_INVALID_HANDLE);
    free(found->infos);
    free(found);
    SIM_RETURN(NRT_SUCCESS);
}

/* ---- nrt_init and nrt_close ------------------------------------------------------------------ */

NRT_STATUS sim_models_at_init(void)
{
    memset(num_models_on, 0, sizeof num_models_on);
    sim_executions_at_init();
    return NRT_SUCCESS;
}

static void forget(void *object)
{
    sim_model_release(object);
}

void sim_models_at_close(void)
{
    sim_handle_end_all(SIM_MODEL, forget);
    sim_tensor_sets_at_close();
}
