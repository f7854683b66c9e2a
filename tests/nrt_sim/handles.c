/* Opaque handles: addresses in a range without access rights, each used once. See sim.h. */
#include <stdlib.h>
#include <sys/mman.h>

#include "sim.h"

enum { STRIDE = 16, CHUNK_SLOTS = 1 << 14, NUM_CHUNKS = 1 << 12 };

struct slot {
    void *object; /* NULL when the handle has ended */
    enum sim_kind kind;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *range; /* reserved at the first handle, kept until the process ends */
static struct slot *chunks[NUM_CHUNKS];
static size_t num_used;
static size_t num_alive[SIM_NUM_KINDS];

static struct slot *slot_at(size_t index)
{
    return &chunks[index / CHUNK_SLOTS][index % CHUNK_SLOTS];
}

/* The living slot of this kind, or NULL. The lock is held. */
static struct slot *find(enum sim_kind kind, const void *handle)
{
    uintptr_t distance = (uintptr_t)handle - (uintptr_t)range;
    if (range == NULL || handle == NULL || distance % STRIDE != 0 || distance / STRIDE >= num_used)
        return NULL;
    struct slot *slot = slot_at(distance / STRIDE);
    return slot->object != NULL && slot->kind == kind ? slot : NULL;
}

static bool make_room(void)
{
    size_t chunk = num_used / CHUNK_SLOTS;
    if (range == NULL) {
        void *mapped = mmap(NULL, (size_t)STRIDE * CHUNK_SLOTS * NUM_CHUNKS, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED)
            return false;
        range = mapped;
    }
    if (chunk >= NUM_CHUNKS)
        return false;
    if (chunks[chunk] == NULL)
        chunks[chunk] = calloc(CHUNK_SLOTS, sizeof(struct slot));
    return chunks[chunk] != NULL;
}

void *sim_handle_new(enum sim_kind kind, void *object)
{
    char *handle = NULL;
    pthread_mutex_lock(&lock);
    if (make_room()) {
        *slot_at(num_used) = (struct slot){object, kind};
        handle = range + num_used * STRIDE;
        num_used++;
        num_alive[kind]++;
    }
    pthread_mutex_unlock(&lock);
    return handle;
}

void *sim_handle_hold(enum sim_kind kind, const void *handle, void (*hold)(void *object))
{
    pthread_mutex_lock(&lock);
    struct slot *slot = find(kind, handle);
    void *object = slot == NULL ? NULL : slot->object;
    if (object != NULL && hold != NULL)
        hold(object);
    pthread_mutex_unlock(&lock);
    return object;
}

void *sim_handle_object(enum sim_kind kind, const void *handle)
{
    return sim_handle_hold(kind, handle, NULL);
}

void *sim_handle_end(enum sim_kind kind, const void *handle)
{
    pthread_mutex_lock(&lock);
    struct slot *slot = find(kind, handle);
    void *object = slot == NULL ? NULL : slot->object;
    if (slot != NULL) {
        slot->object = NULL;
        num_alive[kind]--;
    }
    pthread_mutex_unlock(&lock);
    return object;
}

size_t sim_handle_count(enum sim_kind kind)
{
    pthread_mutex_lock(&lock);
    size_t count = num_alive[kind];
    pthread_mutex_unlock(&lock);
    return count;
}

void sim_handle_end_all(enum sim_kind kind, void (*visit)(void *object))
{
    pthread_mutex_lock(&lock);
    size_t end = num_used;
    pthread_mutex_unlock(&lock);
    for (size_t i = 0; i < end && sim_handle_count(kind) > 0; i++) {
        void *object = sim_handle_end(kind, range + i * STRIDE);
        if (object != NULL)
            visit(object);
    }
}

long long sim_handle_number(const void *handle)
{
    if (range == NULL || handle == NULL)
        return -1;
    return (long long)(((intptr_t)handle - (intptr_t)range) / STRIDE);
}

uint64_t nrt_sim_num_live(int kind)
{
    return kind > 0 && kind < SIM_NUM_KINDS ? sim_handle_count((enum sim_kind)kind) : 0;
}
