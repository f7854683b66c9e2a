/*
 * The instance that is simulated, its counts and facts (nrt.h, and AWS's pages on its instances).
 *
 * NRT_SIM_INSTANCE chooses a profile. The version, the counts and what the instance is may be asked
 * for at any time: the environment is read anew until nrt_init has fixed it. The addresses of EFA
 * adapters are those which AWS's open device maps list for these instances; trn1.2xlarge and inf2
 * have no EFA.
 *
 * nrt.h says of the two older counts, too, that they count virtual cores. Whether
 * nrt_get_instance_info works before nrt_init, it leaves open: here it does, so nobody can take its
 * answer for a sign that the runtime was started.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static const char *const trn1_efa[16] = {
    "0000:10:1a.0", "0000:10:1a.0", "0000:a0:1a.0", "0000:a0:1a.0", "0000:20:19.0", "0000:20:19.0",
    "0000:90:19.0", "0000:90:19.0", "0000:20:1a.0", "0000:20:1a.0", "0000:90:1a.0", "0000:90:1a.0",
    "0000:10:19.0", "0000:10:19.0", "0000:a0:19.0", "0000:a0:19.0",
};
static const char *const trn2_efa[16] = {
    "0000:c9:00.0", "0000:b4:00.0", "0000:b3:00.0", "0000:ca:00.0", "0000:6c:00.0", "0000:57:00.0",
    "0000:56:00.0", "0000:6d:00.0", "0000:98:00.0", "0000:83:00.0", "0000:82:00.0", "0000:99:00.0",
    "0000:f5:00.0", "0000:e0:00.0", "0000:df:00.0", "0000:f6:00.0",
};

static const struct sim_profile profiles[] = {
    {.name = "trn1.32xlarge",
     .family = NRT_INSTANCE_TRN1,
     .size = NRT_INSTANCE_SIZE_32XL,
     .arch_name = "trn1",
     .num_devices = 16,
     .cores_per_device = 2,
     .num_hbms = 2,
     .lnc_default = 1,
     .lnc_max = 1,
     .efa_bdfs = trn1_efa},
    {.name = "trn1.2xlarge",
     .family = NRT_INSTANCE_TRN1,
     .size = NRT_INSTANCE_SIZE_2XL,
     .arch_name = "trn1",
     .num_devices = 1,
     .cores_per_device = 2,
     .num_hbms = 2,
     .lnc_default = 1,
     .lnc_max = 1},
    {.name = "inf2.48xlarge",
     .family = NRT_INSTANCE_INF2,
     .size = NRT_INSTANCE_SIZE_48XL,
     .arch_name = "inf2",
     .num_devices = 12,
     .cores_per_device = 2,
     .num_hbms = 2,
     .lnc_default = 1,
     .lnc_max = 1},
    {.name = "trn2.48xlarge",
     .family = NRT_INSTANCE_TRN2,
     .size = NRT_INSTANCE_SIZE_48XL,
     .arch_name = "trn2",
     .num_devices = 16,
     .cores_per_device = 8,
     .num_hbms = 4,
     .lnc_default = 2,
     .lnc_max = 2,
     .efa_bdfs = trn2_efa},
};

static struct sim_host current; /* written by nrt_init only, before the state is SIM_OPEN */

NRT_STATUS sim_read_host(struct sim_host *host)
{
    const char *name = getenv("NRT_SIM_INSTANCE");
    *host = (struct sim_host){0};
    if (name == NULL || *name == '\0')
        name = profiles[0].name;
    for (size_t i = 0; i < sizeof(profiles) / sizeof(profiles[0]); i++)
        if (strcmp(profiles[i].name, name) == 0)
            host->profile = &profiles[i];
    if (host->profile != NULL)
        return sim_read_cores(host);
    fprintf(stderr, "nrt_sim: there is no instance NRT_SIM_INSTANCE=%s\n", name);
    return NRT_INVALID;
}

void sim_set_host(const struct sim_host *host)
{
    current = *host;
}

const struct sim_host *sim_host(void)
{
    return &current;
}

bool sim_core_is_mine(int vnc)
{
    return vnc >= 0 && (uint32_t)vnc < current.num_mine;
}

int sim_absolute_lnc(int vnc)
{
    return sim_core_is_mine(vnc) ? current.mine[vnc] : -1;
}

int sim_vnc_of_lnc(int lnc)
{
    for (uint32_t vnc = 0; vnc < current.num_mine; vnc++)
        if (current.mine[vnc] == lnc)
            return (int)vnc;
    return -1;
}

bool sim_lnc_exists(int lnc)
{
    return lnc >= 0 && (uint32_t)lnc < current.num_lncs;
}

NRT_STATUS sim_check_vnc(int vnc)
{
    if (sim_core_is_mine(vnc))
        return NRT_SUCCESS;
    fprintf(stderr, "nrt_sim: core %d is not visible, there are %u\n", vnc, current.num_mine);
    return NRT_INVALID;
}

static uint32_t physical_core(int vnc)
{
    return (uint32_t)current.mine[vnc] * current.lnc_size;
}

uint32_t sim_device_of_vnc(int vnc)
{
    return physical_core(vnc) / current.profile->cores_per_device;
}

uint32_t sim_hbm_of_vnc(int vnc)
{
    uint32_t cores_per_hbm = current.profile->cores_per_device / current.profile->num_hbms;
    return physical_core(vnc) % current.profile->cores_per_device / cores_per_hbm;
}

NRT_STATUS nrt_get_version(nrt_version_t *version, size_t size)
{
    SIM_ENTER_ANY("nrt_get_version");
    SIM_NOTE("size", size);
    if (version == NULL || size != sizeof(*version))
        SIM_RETURN(NRT_INVALID);
    *version = (nrt_version_t){.rt_major = 2,
                               .rt_minor = SIM_API == 2 ? 30 : 32, /* SDK 2.28, 2.30 */
                               .rt_patch = SIM_API == 2 ? 50 : 31,
                               .rt_detail = "a simulator of libnrt"};
    SIM_RETURN(NRT_SUCCESS);
}

/* The host at any time: as nrt_init found it, or as the environment has it now. */
static NRT_STATUS look_at_host(struct sim_host *host)
{
    if (sim_state() != SIM_OPEN)
        return sim_read_host(host);
    *host = current;
    return NRT_SUCCESS;
}

NRT_STATUS nrt_get_instance_info(nrt_instance_info_t *info, size_t size)
{
    SIM_ENTER_ANY("nrt_get_instance_info");
    SIM_NOTE("size", size);
    struct sim_host host;
    if (info == NULL || size != sizeof(*info))
        SIM_RETURN(NRT_INVALID);
    NRT_STATUS status = look_at_host(&host);
    if (status != NRT_SUCCESS)
        SIM_RETURN(status);
    *info = (nrt_instance_info_t){.family = host.profile->family, .size = host.profile->size};
    snprintf(info->arch_name, sizeof(info->arch_name), "%s", host.profile->arch_name);
    SIM_RETURN(NRT_SUCCESS);
}

/* Logical cores: the host's, or those that are this process's. */
static NRT_STATUS count_cores(uint32_t *count, bool is_total)
{
    struct sim_host host;
    NRT_STATUS status = count == NULL ? NRT_INVALID : look_at_host(&host);
    if (status == NRT_SUCCESS)
        *count = is_total ? host.num_lncs : host.num_mine;
    return status;
}

NRT_STATUS nrt_get_total_vnc_count(uint32_t *count)
{
    SIM_ENTER_ANY("nrt_get_total_vnc_count");
    SIM_RETURN(count_cores(count, true));
}

NRT_STATUS nrt_get_visible_vnc_count(uint32_t *count)
{
    SIM_ENTER_ANY("nrt_get_visible_vnc_count");
    SIM_RETURN(count_cores(count, false));
}

NRT_STATUS nrt_get_total_nc_count(uint32_t *count)
{
    SIM_ENTER_ANY("nrt_get_total_nc_count");
    SIM_RETURN(count_cores(count, true));
}

NRT_STATUS nrt_get_visible_nc_count(uint32_t *count)
{
    SIM_ENTER_ANY("nrt_get_visible_nc_count");
    SIM_RETURN(count_cores(count, false));
}

NRT_STATUS nrt_host_device_id_get(int neuron_device, uint32_t *host_device_id)
{
    SIM_ENTER("nrt_host_device_id_get");
    SIM_NOTE("device", neuron_device);
    if (host_device_id == NULL || neuron_device < 0 ||
        (uint32_t)neuron_device >= current.profile->num_devices)
        SIM_RETURN(NRT_INVALID);
    *host_device_id = (uint32_t)neuron_device;
    SIM_RETURN(NRT_SUCCESS);
}

/* With no place for the map only the count is given. Routing ids are the devices' own numbers. */
NRT_STATUS nrt_host_device_id_rid_map_get(uint32_t *count, uint32_t *host_did_to_rid_map)
{
    SIM_ENTER("nrt_host_device_id_rid_map_get");
    if (count == NULL)
        SIM_RETURN(NRT_INVALID);
    *count = current.profile->num_devices;
    for (uint32_t i = 0; host_did_to_rid_map != NULL && i < *count; i++)
        host_did_to_rid_map[i] = i;
    SIM_RETURN(NRT_SUCCESS);
}

NRT_STATUS nrt_get_vnc_memory_stats(uint32_t vnc, nrt_vnc_memory_stats_t *stats, size_t size_in,
                                    size_t *size_out)
{
    SIM_ENTER("nrt_get_vnc_memory_stats");
    SIM_NOTE("vnc", vnc);
    if (stats == NULL || size_out == NULL || size_in < sizeof(*stats) ||
        vnc > INT32_MAX || sim_check_vnc((int)vnc) != NRT_SUCCESS)
        SIM_RETURN(NRT_INVALID);
    *stats = (nrt_vnc_memory_stats_t){sim_memory_used((int)vnc), current.hbm_bytes};
    *size_out = sizeof(*stats);
    SIM_RETURN(NRT_SUCCESS);
}

/* A host view of all HBM: on a simulator it would take away what makes stray reads fault. */
NRT_STATUS nrt_get_hbm_mmap_va(int device_id, int hbm_index, void **address, size_t *size)
{
    SIM_ENTER("nrt_get_hbm_mmap_va");
    SIM_NOTE("device", device_id);
    SIM_NOTE("hbm", hbm_index);
    if (address != NULL)
        *address = NULL;
    if (size != NULL)
        *size = 0;
    SIM_RETURN(NRT_INVALID);
}

#if SIM_API >= 3
/* `length`: in, bytes of the buffer with its end mark; out, bytes of the text without it. */
NRT_STATUS nrt_get_attached_efa_bdf(const void *va, char *efa_bdf, size_t *length)
{
    SIM_ENTER("nrt_get_attached_efa_bdf");
    unsigned char *unused;
    int vnc;
    if (efa_bdf == NULL || length == NULL ||
        sim_device_data((uint64_t)(uintptr_t)va, 1, &unused, &vnc) != NRT_SUCCESS ||
        current.profile->efa_bdfs == NULL)
        SIM_RETURN(NRT_FAILURE);
    const char *bdf = current.profile->efa_bdfs[sim_device_of_vnc(vnc)];
    if (*length < strlen(bdf) + 1)
        SIM_RETURN(NRT_RESOURCE);
    *length = strlen(bdf);
    memcpy(efa_bdf, bdf, *length + 1);
    SIM_RETURN(NRT_SUCCESS);
}
#endif
