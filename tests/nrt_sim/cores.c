/*
 * Which cores are this process's: what the environment asks for, and locks between processes.
 *
 * NEURON_RT_VISIBLE_CORES ("0-3", "4,5", "0,2-3": ascending, each core once) names cores of the
 * host and wins over NEURON_RT_NUM_CORES, which takes the first so many free ones that lie side by
 * side; with neither all are taken. A core is a logical one: on trn2 NEURON_LOGICAL_NC_CONFIG=1
 * doubles their number. Ownership is a lock on a file per core below NRT_SIM_ROOT, which the
 * kernel gives back when the process ends, however it ends.
 *
 * A wrong core number makes nrt_init return INVALID. Cores of another process make it return
 * EXEC_NC_BUSY; which status the real library has there is not documented.
 */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim.h"

static char root[256];
static char address[64];
static int lock_fds[SIM_CORES_MAX];
static uint32_t num_locks;

static NRT_STATUS refuse(const char *why, const char *value)
{
    fprintf(stderr, "nrt_sim: %s: %s\n", why, value);
    return NRT_INVALID;
}

/* A value that may be a part of a path: no slash, not only dots. */
static bool is_plain_name(const char *name)
{
    bool has_letter = false;
    for (const char *c = name; *c != '\0'; c++) {
        if (!isalnum((unsigned char)*c) && strchr("._:-", *c) == NULL)
            return false;
        has_letter |= isalnum((unsigned char)*c) != 0;
    }
    return has_letter && strlen(name) < sizeof(address);
}

static bool make_folder(const char *path)
{
    return mkdir(path, 0700) == 0 || errno == EEXIST;
}

NRT_STATUS sim_open_root(void)
{
    const char *value = getenv("NRT_SIM_ROOT");
    const char *host = getenv("NRT_SIM_HOST");
    if (value == NULL || *value == '\0')
        snprintf(root, sizeof(root), "/tmp/nrt_sim_%d", (int)getuid());
    else if (strlen(value) >= sizeof(root))
        return refuse("NRT_SIM_ROOT is too long", value);
    else
        strcpy(root, value);
    while (strlen(root) > 1 && root[strlen(root) - 1] == '/')
        root[strlen(root) - 1] = '\0';
    if (host == NULL || *host == '\0')
        host = "127.0.0.1";
    if (!is_plain_name(host))
        return refuse("NRT_SIM_HOST is no address", host);
    strcpy(address, host);
    return make_folder(root) ? NRT_SUCCESS : refuse("cannot make NRT_SIM_ROOT", root);
}

const char *sim_root(void)
{
    return root;
}

const char *sim_host_address(void)
{
    return address;
}

NRT_STATUS sim_host_folder(const char *of_address, const char *name, char path[SIM_PATH_MAX])
{
    if (!is_plain_name(of_address) || !is_plain_name(name))
        return NRT_INVALID;
    snprintf(path, SIM_PATH_MAX, "%s/hosts", root);
    bool is_made = make_folder(path);
    snprintf(path, SIM_PATH_MAX, "%s/hosts/%s", root, of_address);
    is_made = is_made && make_folder(path);
    snprintf(path, SIM_PATH_MAX, "%s/hosts/%s/%s", root, of_address, name);
    return is_made && make_folder(path) ? NRT_SUCCESS : NRT_FAILURE;
}

/* Reads a decimal number and moves *text behind it. */
static bool read_core(const char **text, uint32_t *core)
{
    char *end;
    unsigned long value = strtoul(*text, &end, 10);
    bool is_number = isdigit((unsigned char)**text) && value < SIM_CORES_MAX;
    *core = (uint32_t)value;
    *text = end;
    return is_number;
}

static NRT_STATUS read_visible_cores(const char *value, struct sim_host *host)
{
    const char *text = value;
    int64_t last = -1;
    for (;;) {
        uint32_t first, end;
        if (!read_core(&text, &first))
            return refuse("NEURON_RT_VISIBLE_CORES is no list of cores", value);
        end = first;
        if (*text == '-' && (text++, !read_core(&text, &end)))
            return refuse("NEURON_RT_VISIBLE_CORES is no list of cores", value);
        if ((int64_t)first <= last || end < first)
            return refuse("NEURON_RT_VISIBLE_CORES is not ascending", value);
        if (end >= host->num_lncs)
            return refuse("NEURON_RT_VISIBLE_CORES names cores that there are not", value);
        for (uint32_t core = first; core <= end; core++)
            host->mine[host->num_mine++] = (int)core;
        last = end;
        if (*text == '\0')
            return NRT_SUCCESS;
        if (*text++ != ',')
            return refuse("NEURON_RT_VISIBLE_CORES is no list of cores", value);
    }
}

static bool read_positive(const char *text, uint64_t most, uint64_t *number)
{
    char *end;
    errno = 0;
    *number = strtoull(text, &end, 10);
    return isdigit((unsigned char)*text) && *end == '\0' && errno == 0 && *number > 0 &&
           *number <= most;
}

NRT_STATUS sim_read_cores(struct sim_host *host)
{
    const char *lnc = getenv("NEURON_LOGICAL_NC_CONFIG");
    const char *visible = getenv("NEURON_RT_VISIBLE_CORES");
    const char *wanted = getenv("NEURON_RT_NUM_CORES");
    const char *hbm = getenv("NRT_SIM_HBM_BYTES");
    const struct sim_profile *profile = host->profile;
    uint64_t number = profile->lnc_default;
    if (lnc != NULL && *lnc != '\0' && !read_positive(lnc, profile->lnc_max, &number))
        return refuse("NEURON_LOGICAL_NC_CONFIG is none of this instance", lnc);
    host->lnc_size = (uint32_t)number;
    host->num_lncs = profile->num_devices * profile->cores_per_device / host->lnc_size;
    host->hbm_bytes = UINT64_C(256) << 20;
    if (hbm != NULL && *hbm != '\0' && !read_positive(hbm, UINT64_C(1) << 40, &host->hbm_bytes))
        return refuse("NRT_SIM_HBM_BYTES is no number of bytes", hbm);
    host->num_mine = 0;
    if (visible != NULL && *visible != '\0')
        return read_visible_cores(visible, host);
    number = host->num_lncs;
    if (wanted != NULL && *wanted != '\0') {
        if (!read_positive(wanted, host->num_lncs, &number))
            return refuse("NEURON_RT_NUM_CORES is more than there are, or no number", wanted);
        host->takes_free_cores = true;
    }
    for (uint32_t core = 0; core < number; core++)
        host->mine[host->num_mine++] = (int)core;
    return NRT_SUCCESS;
}

/* The descriptor that holds the core's lock, or -1 when another process does. */
static int lock_core(const char *folder, int lnc, pid_t *owner)
{
    char path[SIM_PATH_MAX + 32], text[16] = "";
    snprintf(path, sizeof(path), "%s/lnc_%03d.lock", folder, lnc);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return -1;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
        int size = snprintf(text, sizeof(text), "%d\n", (int)getpid());
        if (ftruncate(fd, 0) == 0 && pwrite(fd, text, (size_t)size, 0) == size)
            return fd;
    } else if (pread(fd, text, sizeof(text) - 1, 0) > 0) {
        *owner = atoi(text);
    }
    close(fd);
    return -1;
}

void sim_forget_cores(void)
{
    for (uint32_t i = 0; i < num_locks; i++)
        close(lock_fds[i]);
    num_locks = 0;
}

void sim_give_cores_back(void)
{
    for (uint32_t i = 0; i < num_locks; i++)
        flock(lock_fds[i], LOCK_UN); /* also when a forked child has the descriptor, too */
    sim_forget_cores();
}

/* All of `mine`, or none: then the core that is another's. */
static int lock_all(const char *folder, const int *mine, uint32_t num_mine, pid_t *owner)
{
    for (uint32_t i = 0; i < num_mine; i++) {
        int fd = lock_core(folder, mine[i], owner);
        if (fd < 0) {
            sim_give_cores_back();
            return mine[i];
        }
        lock_fds[num_locks++] = fd;
    }
    return -1;
}

NRT_STATUS sim_take_cores(struct sim_host *host)
{
    char folder[SIM_PATH_MAX];
    pid_t owner = 0;
    if (sim_host_folder(address, "cores", folder) != NRT_SUCCESS)
        return refuse("cannot make the folder of the locks", root);
    for (;;) {
        int taken = lock_all(folder, host->mine, host->num_mine, &owner);
        if (taken < 0)
            return NRT_SUCCESS;
        uint32_t next = (uint32_t)taken + 1;
        if (!host->takes_free_cores || next + host->num_mine > host->num_lncs) {
            fprintf(stderr, "nrt_sim: core %d of %s belongs to process %d\n", taken, address,
                    (int)owner);
            return NRT_EXEC_NC_BUSY;
        }
        for (uint32_t i = 0; i < host->num_mine; i++)
            host->mine[i] = (int)(next + i);
    }
}
