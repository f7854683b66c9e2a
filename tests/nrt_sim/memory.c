/*
 * Device memory: for each core a file in memory, mapped twice.
 *
 * The caller gets addresses of a range without access rights: reading or writing there faults, as
 * nobody may do on a host. The simulator itself uses the other mapping. Ranges are whole pages,
 * the first free one that is long enough. Content is never zeroed for the caller: each range
 * starts with a page of a pattern, so what relies on zeroes is found.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim.h"

enum { PAGE = 4096, FRESH_BYTE = 0xCB };

struct range { /* free or taken; neighbours in the list are neighbours in memory */
    uint64_t offset;
    uint64_t size;
    bool is_taken;
    struct range *next;
};

struct hbm {
    int fd;
    uint64_t size;
    uint64_t used;
    unsigned char *memory;
    unsigned char *addresses; /* no access rights */
    struct range *ranges;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct hbm hbms[SIM_CORES_MAX]; /* by vnc; made at the first allocation */

static bool open_hbm(struct hbm *hbm, uint64_t size)
{
    size = size / PAGE * PAGE;
    struct range *all = calloc(1, sizeof(*all));
    int fd = memfd_create("nrt_sim_hbm", MFD_CLOEXEC);
    void *memory = MAP_FAILED, *addresses = MAP_FAILED;
    if (all != NULL && fd >= 0 && size > 0 && ftruncate(fd, (off_t)size) == 0) {
        memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        addresses = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    if (memory != MAP_FAILED && addresses != MAP_FAILED) {
        *all = (struct range){.offset = 0, .size = size};
        *hbm = (struct hbm){fd, size, 0, memory, addresses, all};
        return true;
    }
    if (memory != MAP_FAILED)
        munmap(memory, size);
    if (addresses != MAP_FAILED)
        munmap(addresses, size);
    if (fd >= 0)
        close(fd);
    free(all);
    return false;
}

NRT_STATUS sim_memory_take(int vnc, uint64_t size, unsigned char **memory, uint64_t *address)
{
    struct hbm *hbm = &hbms[vnc];
    if (size > UINT64_MAX - PAGE)
        return NRT_RESOURCE;
    size = (size + PAGE - 1) / PAGE * PAGE;
    pthread_mutex_lock(&lock);
    NRT_STATUS status = NRT_RESOURCE;
    if (hbm->memory == NULL && !open_hbm(hbm, sim_host()->hbm_bytes)) {
        pthread_mutex_unlock(&lock);
        return NRT_FAIL_HOST_MEM_ALLOC;
    }
    struct range *range = hbm->ranges;
    while (range != NULL && (range->is_taken || range->size < size))
        range = range->next;
    struct range *rest = range == NULL ? NULL : malloc(sizeof(*rest));
    if (rest != NULL) {
        *rest = (struct range){range->offset + size, range->size - size, false, range->next};
        if (rest->size > 0) {
            range->size = size;
            range->next = rest;
        } else {
            free(rest);
        }
        range->is_taken = true;
        hbm->used += size;
        *memory = hbm->memory + range->offset;
        *address = (uint64_t)(uintptr_t)(hbm->addresses + range->offset);
        memset(*memory, FRESH_BYTE, PAGE);
        status = NRT_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

static void join_free_ranges(struct hbm *hbm)
{
    for (struct range *range = hbm->ranges; range != NULL;) {
        struct range *next = range->next;
        if (next == NULL || range->is_taken || next->is_taken) {
            range = next;
            continue;
        }
        range->size += next->size;
        range->next = next->next;
        free(next);
    }
}

void sim_memory_give_back(int vnc, uint64_t address)
{
    struct hbm *hbm = &hbms[vnc];
    pthread_mutex_lock(&lock);
    for (struct range *range = hbm->ranges; range != NULL; range = range->next) {
        if ((uint64_t)(uintptr_t)(hbm->addresses + range->offset) != address || !range->is_taken)
            continue;
        range->is_taken = false;
        hbm->used -= range->size;
        fallocate(hbm->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)range->offset,
                  (off_t)range->size);
        break;
    }
    join_free_ranges(hbm);
    pthread_mutex_unlock(&lock);
}

uint64_t sim_memory_used(int vnc)
{
    pthread_mutex_lock(&lock);
    uint64_t used = hbms[vnc].used;
    pthread_mutex_unlock(&lock);
    return used;
}

/* The taken range around an address, and its core; NULL when there is none. The lock is held. */
static struct range *find(uint64_t address, uint64_t size, int *vnc)
{
    for (int core = 0; core < SIM_CORES_MAX; core++) {
        uint64_t start = (uint64_t)(uintptr_t)hbms[core].addresses;
        if (start == 0 || address < start || address - start >= hbms[core].size)
            continue;
        uint64_t offset = address - start;
        for (struct range *range = hbms[core].ranges; range != NULL; range = range->next)
            if (range->is_taken && offset >= range->offset &&
                offset - range->offset < range->size &&
                size <= range->size - (offset - range->offset)) {
                *vnc = core;
                return range;
            }
    }
    return NULL;
}

NRT_STATUS sim_device_data(uint64_t address, uint64_t size, unsigned char **pointer, int *vnc)
{
    int core = -1;
    pthread_mutex_lock(&lock);
    bool is_found = find(address, size, &core) != NULL;
    if (is_found)
        *pointer = hbms[core].memory + (address - (uint64_t)(uintptr_t)hbms[core].addresses);
    pthread_mutex_unlock(&lock);
    if (vnc != NULL)
        *vnc = core;
    return is_found ? NRT_SUCCESS : NRT_INVALID;
}

NRT_STATUS sim_memory_descriptor(uint64_t address, uint64_t size, int *fd)
{
    int core = -1;
    char path[64];
    if (address % PAGE != 0 || size % PAGE != 0 || size == 0)
        return NRT_INVALID;
    pthread_mutex_lock(&lock);
    bool is_found = find(address, size, &core) != NULL;
    if (is_found) {
        /* Opened anew, not duplicated: so it has a position of its own. */
        snprintf(path, sizeof(path), "/proc/self/fd/%d", hbms[core].fd);
        *fd = open(path, O_RDWR | O_CLOEXEC);
        if (*fd >= 0)
            lseek(*fd, (off_t)(address - (uint64_t)(uintptr_t)hbms[core].addresses), SEEK_SET);
    }
    pthread_mutex_unlock(&lock);
    if (!is_found)
        return NRT_INVALID;
    return *fd >= 0 ? NRT_SUCCESS : NRT_RESOURCE;
}

void sim_memory_at_close(void)
{
    pthread_mutex_lock(&lock);
    for (int core = 0; core < SIM_CORES_MAX; core++) {
        struct hbm *hbm = &hbms[core];
        if (hbm->memory == NULL)
            continue;
        while (hbm->ranges != NULL) {
            struct range *next = hbm->ranges->next;
            free(hbm->ranges);
            hbm->ranges = next;
        }
        munmap(hbm->memory, hbm->size);
        munmap(hbm->addresses, hbm->size);
        close(hbm->fd);
        *hbm = (struct hbm){0};
    }
    pthread_mutex_unlock(&lock);
}
