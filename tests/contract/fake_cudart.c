/* A CUDA runtime library without a GPU, for tests: as far as neuron_di_bindings/cuda_runtime.py
 * calls it, and as NVIDIA's documentation describes it.
 *
 * Device memory is a memfd that other processes map; streams are threads that run their work in
 * order, later; shared events are words in shared memory. Where CUDA leaves something undefined,
 * this library makes it show: freed memory is overwritten, and what touches unmapped memory ends in
 * cudaErrorIllegalAddress, which stays. Addresses of device memory can be read by the processor
 * here, which tests use, and which a real GPU does not allow.
 *
 * CUDART_VERSION (12060, 12090, 13000) chooses among the interfaces. fake_* steer it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef CUDART_VERSION
#define CUDART_VERSION 12090
#endif
#define EXPORT __attribute__((visibility("default")))
#define HEAD 4096
#define CHUNK (64 << 10)
#define DEVICES 4
#define NAMES 64

enum { OK = 0, INVALID_VALUE = 1, NO_MEMORY = 2, UNINITIALIZED = 201, MAP_REFUSED = 205,
       BAD_HANDLE = 400, NOT_READY = 600, ILLEGAL_ADDRESS = 700, REGISTERED = 712, MISALIGNED = 716 };
enum { KIND_NONE, KIND_HOST, KIND_DEVICE };
enum { RANGE_LIVE, RANGE_FREED };

typedef struct range {
    char *base;
    size_t size;
    int kind, state, fd, device, users; /* fd: -1 unless it is device memory of this process */
    uint64_t serial;
    struct range *next;
} range;

typedef struct { uint64_t serial, size; } memory_head;
typedef struct { uint64_t serial, size; int pid, fd, device, is_event; char rest[32]; } handle;
typedef struct { char bytes[64]; } handle_bytes;
typedef struct { _Atomic uint64_t recorded, completed; _Atomic int is_destroyed; } words;
typedef struct { words *words; int fd, device, is_shared, is_import; uint64_t serial; } event;

typedef struct op {
    enum { COPY, SET, WAIT, RECORD, HOLD, COPY_RUNS, END } what;
    void **to, **from;
    size_t *sizes, count;
    int value;
    words *words;
    uint64_t target;
    struct op *next;
} op;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    op *first, **last;
    uint64_t posted, ended;
    int device;
} stream;

static pthread_rwlock_t ranges_lock = PTHREAD_RWLOCK_INITIALIZER;
static range *ranges;
static pthread_mutex_t steer_lock = PTHREAD_MUTEX_INITIALIZER;
static struct { char name[48]; int calls, fails, error; } steered[NAMES];
static _Atomic int sticky, num_devices = 1, peer_access = 1, waiting;
static _Atomic int delay_us;
static _Atomic uint64_t holds, released, serials;
static _Thread_local int current_device;

/* A file $FAKE_CUDA_BREAK.PID breaks the device of process PID, whoever made it. */
static void look_for_break(void) {
    const char *prefix = getenv("FAKE_CUDA_BREAK");
    char path[512];
    if (!prefix || sticky) return;
    snprintf(path, sizeof path, "%s.%d", prefix, (int)getpid());
    if (!access(path, F_OK)) sticky = ILLEGAL_ADDRESS;
}

/* Each function begins here: counted, made to fail where a test says so. */
static int enter(const char *name) {
    look_for_break();
    int error = sticky;
    pthread_mutex_lock(&steer_lock);
    for (int i = 0; i < NAMES; i++) {
        if (!steered[i].name[0])
            snprintf(steered[i].name, sizeof steered[i].name, "%s", name);
        if (strcmp(steered[i].name, name))
            continue;
        steered[i].calls++;
        if (steered[i].fails > 0) {
            steered[i].fails--;
            error = steered[i].error;
        }
        break;
    }
    pthread_mutex_unlock(&steer_lock);
    return error;
}
#define ENTER do { int error_ = enter(__func__); if (error_) return error_; } while (0)

EXPORT int fake_calls(const char *name) {
    int calls = 0;
    pthread_mutex_lock(&steer_lock);
    for (int i = 0; i < NAMES; i++)
        if (!strcmp(steered[i].name, name)) calls = steered[i].calls;
    pthread_mutex_unlock(&steer_lock);
    return calls;
}
EXPORT void fake_fail(const char *name, int error, int times) {
    pthread_mutex_lock(&steer_lock);
    for (int i = 0; i < NAMES; i++) {
        if (steered[i].name[0] && strcmp(steered[i].name, name)) continue;
        snprintf(steered[i].name, sizeof steered[i].name, "%s", name);
        steered[i].error = error;
        steered[i].fails = times;
        break;
    }
    pthread_mutex_unlock(&steer_lock);
}
EXPORT void fake_delay(int microseconds) { delay_us = microseconds; }
EXPORT void fake_devices(int count, int can_access) { num_devices = count; peer_access = can_access; }
EXPORT int fake_waiting(void) { return waiting; }
EXPORT void fake_release(void) { released = holds; }
EXPORT void fake_break(int error) { sticky = error; }
EXPORT void fake_recover(void) { sticky = 0; }

static uint64_t new_serial(void) {
    return ((uint64_t)getpid() << 32) | ++serials;
}

static range *add_range(char *base, size_t size, int kind, int fd, uint64_t serial) {
    range *one = calloc(1, sizeof *one);
    *one = (range){base, size, kind, RANGE_LIVE, fd, current_device, 1, serial, NULL};
    pthread_rwlock_wrlock(&ranges_lock);
    one->next = ranges;
    ranges = one;
    pthread_rwlock_unlock(&ranges_lock);
    return one;
}

/* The caller holds the lock. Newer ones first: an address may come again. */
static range *find_range(const void *address, size_t size) {
    for (range *one = ranges; one; one = one->next)
        if ((char *)address >= one->base && (char *)address + size <= one->base + one->size)
            return one;
    return NULL;
}

/* Nothing else is mapped there any more, ever: whoever still goes there is found out. */
static void unmap(char *base, size_t size) {
    mmap(base - HEAD, size + HEAD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE,
         -1, 0);
}

static int is_reachable(const void *address, size_t size) {
    range *one = find_range(address, size);
    return !one || one->state == RANGE_LIVE;
}

static void move_bytes(char *to, const char *from, size_t size, int value) {
    for (size_t done = 0; done < size && !sticky; done += CHUNK) {
        size_t part = size - done < CHUNK ? size - done : CHUNK;
        pthread_rwlock_rdlock(&ranges_lock);
        if (!is_reachable(to + done, part) || (from && !is_reachable(from + done, part)))
            sticky = ILLEGAL_ADDRESS;
        else if (from)
            memmove(to + done, from + done, part);
        else
            memset(to + done, value, part);
        pthread_rwlock_unlock(&ranges_lock);
    }
}

static void run(op *one) {
    if (one->what == COPY || one->what == SET) {
        if (delay_us) usleep(delay_us);
        for (size_t i = 0; i < one->count; i++)
            move_bytes(one->to[i], one->from ? one->from[i] : NULL, one->sizes[i], one->value);
    } else if (one->what == COPY_RUNS) {
        if (delay_us) usleep(delay_us);
        char **table = one->to[0];
        for (size_t i = 0, n = one->count; i < n && !sticky; i++) {
            size_t size = (size_t)table[2 * n + i], reach = (size_t)one->value * 4096;
            if (((size_t)table[i] | (size_t)table[n + i] | size) % 16) sticky = MISALIGNED;
            move_bytes(table[i], table[n + i], size < reach ? size : reach, 0);
        }
    } else if (one->what == WAIT && one->words->completed < one->target) {
        waiting++;
        while (one->words->completed < one->target) usleep(50);
        waiting--;
    } else if (one->what == RECORD) {
        uint64_t seen = one->words->completed;
        while (seen < one->target &&
               !atomic_compare_exchange_weak(&one->words->completed, &seen, one->target)) {}
    } else if (one->what == HOLD) {
        while (released < one->target) usleep(50);
    }
}

static void *run_all(void *argument) {
    stream *self = argument;
    for (;;) {
        pthread_mutex_lock(&self->lock);
        while (!self->first) pthread_cond_wait(&self->changed, &self->lock);
        op *one = self->first;
        self->first = one->next;
        if (!self->first) self->last = &self->first;
        pthread_mutex_unlock(&self->lock);
        int is_end = one->what == END;
        run(one);
        free(one->to), free(one->from), free(one->sizes), free(one);
        if (is_end) break;
        pthread_mutex_lock(&self->lock);
        self->ended++;
        pthread_cond_broadcast(&self->changed);
        pthread_mutex_unlock(&self->lock);
    }
    free(self);
    return NULL;
}

static int post(stream *self, op work) {
    if (!self) return BAD_HANDLE;
    op *one = malloc(sizeof *one);
    *one = work;
    one->next = NULL;
    pthread_mutex_lock(&self->lock);
    *self->last = one;
    self->last = &one->next;
    self->posted++;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->lock);
    return OK;
}

static void *copy_of(const void *data, size_t size) {
    return memcpy(malloc(size), data, size);
}

static int post_copy(stream *self, void *const *to, void *const *from, const size_t *sizes, size_t n) {
    size_t size = n * sizeof(void *);
    return post(self, (op){COPY, copy_of(to, size), copy_of(from, size), copy_of(sizes, size), n});
}

/* Devices. */
EXPORT const char *cudaGetErrorName(int error) {
    switch (error) {
    case INVALID_VALUE: return "cudaErrorInvalidValue";
    case NO_MEMORY: return "cudaErrorMemoryAllocation";
    case UNINITIALIZED: return "cudaErrorDeviceUninitialized";
    case MAP_REFUSED: return "cudaErrorMapBufferObjectFailed";
    case BAD_HANDLE: return "cudaErrorInvalidResourceHandle";
    case NOT_READY: return "cudaErrorNotReady";
    case ILLEGAL_ADDRESS: return "cudaErrorIllegalAddress";
    case REGISTERED: return "cudaErrorHostMemoryAlreadyRegistered";
    case MISALIGNED: return "cudaErrorMisalignedAddress";
    default: return "unrecognized error code";
    }
}
EXPORT int cudaGetLastError(void) { return sticky; }
EXPORT int cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return OK; }
EXPORT int cudaGetDeviceCount(int *count) { ENTER; *count = num_devices; return OK; }
EXPORT int cudaGetDevice(int *device) { ENTER; *device = current_device; return OK; }
EXPORT int cudaSetDevice(int device) {
    ENTER;
    if (device < 0 || device >= num_devices) return INVALID_VALUE;
    current_device = device;
    return OK;
}
static int properties(char *found, int device) {
    if (device < 0 || device >= num_devices) return INVALID_VALUE;
    memset(found, 0, 1032);
    snprintf(found, 256, "a GPU of a test");
    memcpy(found + 256, "fake-gpu-uuid--", 15);
    found[271] = (char)('0' + device);
    return OK;
}
#if CUDART_VERSION < 13000
EXPORT int cudaGetDeviceProperties_v2(char *found, int device) { ENTER; return properties(found, device); }
#endif
EXPORT int cudaGetDeviceProperties(char *found, int device) { ENTER; return properties(found, device); }
EXPORT int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER;
    *value = attribute == 125 ? 1 : attribute == 16 ? 2 : 0; /* IPC events, multiprocessors */
    return device < num_devices ? OK : INVALID_VALUE;
}
EXPORT int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    ENTER;
    *can = device != peer && peer_access;
    return OK;
}

/* Memory. */
static char *map_memory(int fd, size_t size) {
    char *map = mmap(NULL, size + HEAD, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return map == MAP_FAILED ? NULL : map + HEAD;
}
EXPORT int cudaMalloc(void **found, size_t size) {
    ENTER;
    int fd = memfd_create("fake-cuda-memory", MFD_CLOEXEC);
    char *base = fd < 0 || ftruncate(fd, size + HEAD) ? NULL : map_memory(fd, size);
    if (!base) return NO_MEMORY;
    uint64_t serial = new_serial();
    *(memory_head *)(base - HEAD) = (memory_head){serial, size};
    memset(base, 0xA5, size); /* nobody gets zeros for free */
    add_range(base, size, KIND_DEVICE, fd, serial);
    *found = base;
    return OK;
}
static int take_out(void *address, int kind, int is_import) {
    pthread_rwlock_wrlock(&ranges_lock);
    range *one = find_range(address, 1);
    int error = one && one->base == address && one->state == RANGE_LIVE && one->kind == kind &&
                (kind != KIND_DEVICE || is_import == (one->fd < 0)) ? OK : INVALID_VALUE;
    if (!error && --one->users == 0) {
        one->state = RANGE_FREED;
        if (kind == KIND_DEVICE) {
            if (!is_import) { /* whoever has it mapped reads nonsense from now on */
                memset(one->base - HEAD, 0xDD, one->size + HEAD);
                close(one->fd);
            }
            unmap(one->base, one->size);
        } else {
            one->base = NULL, one->size = 0;
        }
    }
    pthread_rwlock_unlock(&ranges_lock);
    return error;
}
EXPORT int cudaFree(void *address) { ENTER; return take_out(address, KIND_DEVICE, 0); }
EXPORT int cudaMallocHost(void **found, size_t size) {
    ENTER;
    *found = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    add_range(*found, size, KIND_HOST, -1, 0);
    return OK;
}
EXPORT int cudaFreeHost(void *address) {
    ENTER;
    int error = take_out(address, KIND_HOST, 0);
    if (!error) free(address);
    return error;
}
EXPORT int cudaHostRegister(void *address, size_t size, unsigned flags) {
    ENTER;
    (void)flags;
    pthread_rwlock_rdlock(&ranges_lock);
    range *one = find_range(address, 1);
    int is_known = one && one->state == RANGE_LIVE;
    pthread_rwlock_unlock(&ranges_lock);
    if (is_known) return REGISTERED;
    add_range(address, size, KIND_HOST, -1, 0);
    return OK;
}
EXPORT int cudaHostUnregister(void *address) { ENTER; return take_out(address, KIND_HOST, 0); }

static int kind_of(const void *address, int *device) {
    pthread_rwlock_rdlock(&ranges_lock);
    range *one = find_range(address, 1);
    int kind = one && one->state == RANGE_LIVE ? one->kind : KIND_NONE;
    *device = one ? one->device : -1;
    pthread_rwlock_unlock(&ranges_lock);
    return kind;
}
EXPORT int cudaPointerGetAttributes(int *attributes, const void *address) {
    ENTER;
    attributes[0] = kind_of(address, attributes + 1);
    return OK;
}
static int address_range(unsigned long long *base, size_t *size, unsigned long long address) {
    pthread_rwlock_rdlock(&ranges_lock);
    range *one = find_range((void *)address, 1);
    int is_known = one && one->state == RANGE_LIVE && one->kind == KIND_DEVICE;
    if (is_known) *base = (unsigned long long)one->base, *size = one->size;
    pthread_rwlock_unlock(&ranges_lock);
    return is_known ? OK : INVALID_VALUE;
}

/* The driver's functions. Of kernels it knows one, by its name: copy_runs, of copy_runs.ptx. */
static char module, function;
static int cuModuleLoadData(void **found, const char *image) {
    ENTER;
    *found = &module;
    return strstr(image, ".entry copy_runs(") ? OK : INVALID_VALUE;
}
static int cuModuleGetFunction(void **found, void *from, const char *name) {
    ENTER;
    *found = &function;
    return from == &module && !strcmp(name, "copy_runs") ? OK : INVALID_VALUE;
}
static int cuModuleUnload(void *one) { ENTER; return one == &module ? OK : BAD_HANDLE; }
static int cuLaunchKernel(void *what, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared, stream *self, void **arguments, void **extra) {
    ENTER;
    uint64_t *table = *(uint64_t **)arguments[0];
    uint32_t num_runs = *(uint32_t *)arguments[1], num_parts = *(uint32_t *)arguments[2];
    uint32_t num_items = *(uint32_t *)arguments[3];
    if (what != &function || !gx || gy * gz * by * bz != 1 || bx % 32 || shared || extra)
        return INVALID_VALUE;
    if (!num_runs || num_items != num_runs * num_parts) return INVALID_VALUE;
    return post(self, (op){.what = COPY_RUNS, .to = copy_of(&table, 8), .count = num_runs,
                           .value = (int)num_parts});
}
#if CUDART_VERSION >= 12050
EXPORT int cudaGetDriverEntryPointByVersion(const char *symbol, void **found, unsigned version,
                                            unsigned long long flags, int *status) {
    ENTER;
    (void)version, (void)flags;
    static const struct { const char *name; void *function; } known[] = {
        {"cuMemGetAddressRange", (void *)address_range},
        {"cuModuleLoadData", (void *)cuModuleLoadData},
        {"cuModuleGetFunction", (void *)cuModuleGetFunction},
        {"cuModuleUnload", (void *)cuModuleUnload},
        {"cuLaunchKernel", (void *)cuLaunchKernel},
    };
    *status = 1, *found = NULL;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(symbol, known[i].name)) *status = 0, *found = known[i].function;
    return OK;
}
#endif

/* Work. */
EXPORT int cudaMemcpyAsync(void *to, void *from, size_t size, int kind, stream *self) {
    ENTER;
    if (kind != 4) return INVALID_VALUE;
    return post_copy(self, &to, &from, &size, 1);
}
EXPORT int cudaMemsetAsync(void *to, int value, size_t size, stream *self) {
    ENTER;
    return post(self, (op){SET, copy_of(&to, 8), NULL, copy_of(&size, 8), 1, value});
}
#if CUDART_VERSION >= 12080
typedef struct { int order, hints[4]; unsigned flags; } copy_attributes;
EXPORT int cudaMemcpyBatchAsync(void **to, void **from, size_t *sizes, size_t count,
                                copy_attributes *attributes, size_t *firsts, size_t num_attributes,
#if CUDART_VERSION < 13000
                                size_t *failed,
#endif
                                stream *self) {
    ENTER;
    if (!count || num_attributes != 1 || firsts[0] || attributes->order != 1) return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        int device;
        if (kind_of(to[i], &device) && kind_of(from[i], &device) && sizes[i]) continue;
#if CUDART_VERSION < 13000
        *failed = i;
#endif
        return INVALID_VALUE;
    }
    return post_copy(self, to, from, sizes, count);
}
#endif

/* Streams and events. */
EXPORT int cudaStreamCreateWithFlags(stream **found, unsigned flags) {
    ENTER;
    if (flags != 1) return INVALID_VALUE;
    stream *self = calloc(1, sizeof *self);
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->changed, NULL);
    self->last = &self->first;
    self->device = current_device;
    pthread_t thread;
    if (pthread_create(&thread, NULL, run_all, self)) return NO_MEMORY;
    pthread_detach(thread);
    *found = self;
    return OK;
}
EXPORT int cudaStreamDestroy(stream *self) { ENTER; return post(self, (op){END}); }
EXPORT int cudaStreamSynchronize(stream *self) {
    ENTER;
    pthread_mutex_lock(&self->lock);
    uint64_t until = self->posted;
    while (self->ended < until) pthread_cond_wait(&self->changed, &self->lock);
    pthread_mutex_unlock(&self->lock);
    return sticky;
}
/* A kernel that runs until fake_release. */
EXPORT int fake_hold(stream *self) { return post(self, (op){.what = HOLD, .target = ++holds}); }

static words *map_words(int fd) {
    void *map = mmap(NULL, HEAD, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return map == MAP_FAILED ? NULL : map;
}
EXPORT int cudaEventCreateWithFlags(event **found, unsigned flags) {
    ENTER;
    int is_shared = (flags & 4) != 0;
    if (is_shared && !(flags & 2)) return INVALID_VALUE;
    event *one = calloc(1, sizeof *one);
    *one = (event){NULL, -1, current_device, is_shared, 0, new_serial()};
    if (is_shared) {
        one->fd = memfd_create("fake-cuda-event", MFD_CLOEXEC);
        if (one->fd < 0 || ftruncate(one->fd, HEAD)) return NO_MEMORY;
        one->words = map_words(one->fd);
        ((uint64_t *)one->words)[100] = one->serial;
    } else {
        one->words = calloc(1, sizeof *one->words); /* kept: work may still refer to it */
    }
    *found = one;
    return OK;
}
EXPORT int cudaEventDestroy(event *one) {
    ENTER;
    if (!one) return BAD_HANDLE;
    if (!one->is_import) one->words->is_destroyed = 1;
    if (one->fd >= 0) close(one->fd);
    free(one);
    return OK;
}
EXPORT int cudaEventRecord(event *one, stream *self) {
    ENTER;
    if (!self || one->device != self->device || one->words->is_destroyed) return BAD_HANDLE;
    return post(self, (op){.what = RECORD, .words = one->words, .target = ++one->words->recorded});
}
EXPORT int cudaEventQuery(event *one) {
    ENTER;
    if (one->words->is_destroyed) return BAD_HANDLE;
    return one->words->completed >= one->words->recorded ? sticky : NOT_READY;
}
EXPORT int cudaEventSynchronize(event *one) {
    ENTER;
    while (one->words->completed < one->words->recorded) usleep(50);
    return sticky;
}
EXPORT int cudaStreamWaitEvent(stream *self, event *one, unsigned flags) {
    ENTER;
    if (flags || one->words->is_destroyed) return BAD_HANDLE;
    return post(self, (op){.what = WAIT, .words = one->words, .target = one->words->recorded});
}

/* Between processes. */
EXPORT int cudaIpcGetMemHandle(handle *made, void *address) {
    ENTER;
    pthread_rwlock_rdlock(&ranges_lock);
    range *one = find_range(address, 1);
    int is_base = one && one->base == address && one->state == RANGE_LIVE && one->fd >= 0;
    memset(made, 0, sizeof *made);
    if (is_base)
        *made = (handle){one->serial, one->size, getpid(), one->fd, one->device, 0, {0}};
    pthread_rwlock_unlock(&ranges_lock);
    return is_base ? OK : INVALID_VALUE;
}
static int open_file(const handle *wanted) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", wanted->pid, wanted->fd);
    return open(path, O_RDWR | O_CLOEXEC);
}
EXPORT int cudaIpcOpenMemHandle(void **found, handle_bytes bytes, unsigned flags) {
    ENTER;
    handle wanted;
    memcpy(&wanted, &bytes, sizeof wanted);
    if (flags != 1) return INVALID_VALUE;
    if (wanted.is_event || !wanted.serial) return BAD_HANDLE;
    if (wanted.pid == getpid()) return UNINITIALIZED; /* not where it was made */
    pthread_rwlock_wrlock(&ranges_lock);
    for (range *one = ranges; one; one = one->next)
        if (one->serial == wanted.serial && one->state == RANGE_LIVE) {
            one->users++;
            *found = one->base;
            pthread_rwlock_unlock(&ranges_lock);
            return OK;
        }
    pthread_rwlock_unlock(&ranges_lock);
    int fd = open_file(&wanted);
    if (fd < 0) return MAP_REFUSED;
    char *base = map_memory(fd, wanted.size);
    close(fd);
    if (!base) return MAP_REFUSED;
    memory_head *head = (memory_head *)(base - HEAD);
    if (head->serial != wanted.serial || head->size != wanted.size) return BAD_HANDLE;
    add_range(base, wanted.size, KIND_DEVICE, -1, wanted.serial);
    *found = base;
    return OK;
}
EXPORT int cudaIpcCloseMemHandle(void *address) { ENTER; return take_out(address, KIND_DEVICE, 1); }
EXPORT int cudaIpcGetEventHandle(handle *made, event *one) {
    ENTER;
    if (!one->is_shared || one->is_import) return BAD_HANDLE;
    memset(made, 0, sizeof *made);
    *made = (handle){one->serial, HEAD, getpid(), one->fd, one->device, 1, {0}};
    return OK;
}
EXPORT int cudaIpcOpenEventHandle(event **found, handle_bytes bytes) {
    ENTER;
    handle wanted;
    memcpy(&wanted, &bytes, sizeof wanted);
    if (!wanted.is_event || !wanted.serial) return BAD_HANDLE;
    if (wanted.pid == getpid()) return UNINITIALIZED;
    int fd = open_file(&wanted);
    if (fd < 0) return MAP_REFUSED;
    words *shared = map_words(fd);
    close(fd);
    if (!shared) return MAP_REFUSED;
    if (((uint64_t *)shared)[100] != wanted.serial) return BAD_HANDLE;
    event *one = calloc(1, sizeof *one);
    *one = (event){shared, -1, current_device, 1, 1, wanted.serial};
    *found = one;
    return OK;
}
