/*
 * Tensor sets: names and the tensors an execution finds under them (nrt.h, nrt_experimental.h).
 *
 * A set keeps handles, not tensors: a tensor that was freed while it stands in a set makes the
 * next execution fail with INVALID_HANDLE. A set that a queued execution was scheduled with may be
 * neither changed nor destroyed before that is over.
 */
#include <stdlib.h>
#include <string.h>

#include "models.h"

enum { NAMES_MAX = SIM_NEFF_TENSORS_MAX };

struct entry {
    char name[SIM_NEFF_NAME_BYTES];
    nrt_tensor_t *tensor;
};

struct sim_tensor_set {
    int num_references; /* the handle's one, and one per holder; under `lock` */
    int num_in_flight;
    uint32_t num_entries;
    struct entry *entries;
};

/* Of all sets: they are small, and used once per execution. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct sim_tensor_set *sim_tensor_set_hold(const nrt_tensor_set_t *handle)
{
    pthread_mutex_lock(&lock);
    struct sim_tensor_set *set = sim_handle_object(SIM_TENSOR_SET, handle);
    if (set != NULL)
        set->num_references++;
    pthread_mutex_unlock(&lock);
    return set;
}

void sim_tensor_set_release(struct sim_tensor_set *set)
{
    pthread_mutex_lock(&lock);
    const bool is_last = --set->num_references == 0;
    pthread_mutex_unlock(&lock);
    if (is_last) {
        free(set->entries);
        free(set);
    }
}

void sim_tensor_set_in_flight(struct sim_tensor_set *set, int change)
{
    pthread_mutex_lock(&lock);
    set->num_in_flight += change;
    pthread_mutex_unlock(&lock);
}

static struct entry *find(struct sim_tensor_set *set, const char *name)
{
    for (uint32_t i = 0; i < set->num_entries; i++)
        if (strcmp(set->entries[i].name, name) == 0)
            return &set->entries[i];
    return NULL;
}

nrt_tensor_t *sim_tensor_set_find(struct sim_tensor_set *set, const char *name)
{
    pthread_mutex_lock(&lock);
    const struct entry *entry = find(set, name);
    nrt_tensor_t *tensor = entry == NULL ? NULL : entry->tensor;
    pthread_mutex_unlock(&lock);
    return tensor;
}

/* Replaces what stands under the name, as documented for nrt_add_tensor_to_tensor_set. */
static NRT_STATUS put(struct sim_tensor_set *set, const char *name, nrt_tensor_t *tensor)
{
    pthread_mutex_lock(&lock);
    NRT_STATUS status = NRT_SUCCESS;
    const bool is_in_flight = set->num_in_flight > 0;
    struct entry *entry = find(set, name);
    if (!is_in_flight && entry == NULL && set->num_entries < NAMES_MAX) {
        struct entry *grown =
            realloc(set->entries, (set->num_entries + 1) * sizeof set->entries[0]);
        if (grown != NULL) {
            set->entries = grown;
            entry = &grown[set->num_entries++];
            strcpy(entry->name, name);
        }
    }
    if (entry == NULL)
        status = NRT_RESOURCE;
    else if (!is_in_flight)
        entry->tensor = tensor;
    pthread_mutex_unlock(&lock);
    if (is_in_flight)
        return sim_violation("a tensor set is changed while a queued execution needs it");
    return status;
}

NRT_STATUS nrt_allocate_tensor_set(nrt_tensor_set_t **set)
{
    SIM_ENTER("nrt_allocate_tensor_set");
    if (set == NULL)
        SIM_RETURN(NRT_INVALID);
    struct sim_tensor_set *made = calloc(1, sizeof *made);
    if (made == NULL)
        SIM_RETURN(NRT_FAIL_HOST_MEM_ALLOC);
    made->num_references = 1;
    nrt_tensor_set_t *handle = sim_handle_new(SIM_TENSOR_SET, made);
    if (handle == NULL) {
        free(made);
        SIM_RETURN(NRT_RESOURCE);
    }
    *set = handle;
    SIM_NOTE("set", sim_handle_number(handle));
    SIM_RETURN(NRT_SUCCESS);
}

void nrt_destroy_tensor_set(nrt_tensor_set_t **set)
{
    SIM_ENTER_OR("nrt_destroy_tensor_set", );
    if (set == NULL || *set == NULL)
        return;
    SIM_NOTE("set", sim_handle_number(*set));
    pthread_mutex_lock(&lock);
    struct sim_tensor_set *ended = sim_handle_end(SIM_TENSOR_SET, *set);
    const bool is_in_flight = ended != NULL && ended->num_in_flight > 0;
    pthread_mutex_unlock(&lock);
    if (ended == NULL) {
        sim_call.status = NRT_INVALID_HANDLE;
        sim_violation("nrt_destroy_tensor_set: this is no tensor set, or was destroyed already");
        return;
    }
    if (is_in_flight)
        sim_violation("a tensor set is destroyed while a queued execution needs it");
    sim_tensor_set_release(ended);
    *set = NULL;
}

NRT_STATUS nrt_add_tensor_to_tensor_set(nrt_tensor_set_t *set, const char *name,
                                        nrt_tensor_t *tensor)
{
    SIM_ENTER("nrt_add_tensor_to_tensor_set");
    SIM_NOTE("set", sim_handle_number(set));
    SIM_NOTE("tensor", sim_handle_number(tensor));
    if (name == NULL || name[0] == '\0' || strlen(name) >= SIM_NEFF_NAME_BYTES)
        SIM_RETURN(NRT_INVALID);
    SIM_NOTE_TEXT("name", name);
    if (sim_handle_object(SIM_TENSOR, tensor) == NULL)
        SIM_RETURN(NRT_INVALID_HANDLE);
    struct sim_tensor_set *held = sim_tensor_set_hold(set);
    if (held == NULL)
        SIM_RETURN(NRT_INVALID_HANDLE);
    const NRT_STATUS status = put(held, name, tensor);
    sim_tensor_set_release(held);
    SIM_RETURN(status);
}

NRT_STATUS nrt_get_tensor_from_tensor_set(nrt_tensor_set_t *set, const char *name,
                                          nrt_tensor_t **tensor)
{
    SIM_ENTER("nrt_get_tensor_from_tensor_set");
    SIM_NOTE("set", sim_handle_number(set));
    if (name == NULL || tensor == NULL)
        SIM_RETURN(NRT_INVALID);
    struct sim_tensor_set *held = sim_tensor_set_hold(set);
    if (held == NULL)
        SIM_RETURN(NRT_INVALID_HANDLE);
    nrt_tensor_t *found = sim_tensor_set_find(held, name);
    sim_tensor_set_release(held);
    if (found == NULL)
        SIM_RETURN(NRT_INVALID);
    *tensor = found;
    SIM_RETURN(NRT_SUCCESS);
}

static void forget(void *object)
{
    sim_tensor_set_release(object);
}

void sim_tensor_sets_at_close(void)
{
    sim_handle_end_all(SIM_TENSOR_SET, forget);
}
