/*
 * The container that stands for a NEFF: "SIM-NEFF". tests/nrt_sim/neff.py writes it.
 *
 * Little-endian numbers of 32 bits where nothing else is said:
 *
 *     0   magic "SIM-NEFF"
 *     8   version (1)        12  program            16  number of tensors   20  number of cores
 *     24  flags              28  delay_us           32  16 parameters of the program
 *     96  per tensor, inputs first: name (256 bytes, ended by zeros), usage, dtype, alias
 *         (index of an output, or 0xffffffff), number of dimensions, 8 dimensions
 *     end 64 bits: FNV-1a of all bytes before
 *
 * A real NEFF, a container that was cut or damaged, and one whose tensors do not suit its program
 * are all refused with UNSUPPORTED_NEFF_VERSION: the device never sees them.
 */
#include <stdlib.h>
#include <string.h>

#include "models.h"

static const char MAGIC[8] = {'S', 'I', 'M', '-', 'N', 'E', 'F', 'F'};

enum {
    VERSION = 1,
    HEADER_BYTES = 96,
    TENSOR_BYTES = SIM_NEFF_NAME_BYTES + 4 * (4 + SIM_NEFF_RANK_MAX),
    DIGEST_BYTES = 8,
};
#define NO_ALIAS 0xffffffffu
#define TENSOR_BYTES_MAX (1ull << 40)

uint64_t sim_dtype_bytes(nrt_dtype_t dtype)
{
    switch (dtype) {
    case NRT_DTYPE_INT8:
    case NRT_DTYPE_UINT8:
    case NRT_DTYPE_FP8_E3:
    case NRT_DTYPE_FP8_E4:
    case NRT_DTYPE_FP8_E5:
        return 1;
    case NRT_DTYPE_INT16:
    case NRT_DTYPE_UINT16:
    case NRT_DTYPE_BFLOAT16:
    case NRT_DTYPE_FLOAT16:
        return 2;
    case NRT_DTYPE_INT32:
    case NRT_DTYPE_UINT32:
    case NRT_DTYPE_FLOAT32:
    case NRT_DTYPE_FLOAT32R:
        return 4;
    case NRT_DTYPE_INT64:
    case NRT_DTYPE_UINT64:
        return 8;
    case NRT_DTYPE_UNKNOWN:
        break;
    }
    return 0;
}

static uint32_t number_at(const unsigned char *bytes, size_t offset)
{
    const unsigned char *at = bytes + offset;
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static uint64_t digest(const unsigned char *bytes, size_t num_bytes)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < num_bytes; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

static bool is_whole(const unsigned char *bytes, size_t num_bytes)
{
    if (num_bytes < HEADER_BYTES + DIGEST_BYTES || memcmp(bytes, MAGIC, sizeof MAGIC) != 0)
        return false;
    const uint32_t num_tensors = number_at(bytes, 16);
    if (number_at(bytes, 8) != VERSION || num_tensors > SIM_NEFF_TENSORS_MAX)
        return false;
    const size_t end = HEADER_BYTES + (size_t)num_tensors * TENSOR_BYTES;
    if (num_bytes != end + DIGEST_BYTES)
        return false;
    const uint64_t stated = number_at(bytes, end) | (uint64_t)number_at(bytes, end + 4) << 32;
    return stated == digest(bytes, end);
}

static bool read_tensor(const unsigned char *bytes, struct sim_neff_tensor *tensor)
{
    memcpy(tensor->name, bytes, SIM_NEFF_NAME_BYTES);
    if (tensor->name[0] == '\0' || tensor->name[SIM_NEFF_NAME_BYTES - 1] != '\0')
        return false;
    const unsigned char *numbers = bytes + SIM_NEFF_NAME_BYTES;
    tensor->usage = (nrt_tensor_usage_t)number_at(numbers, 0);
    tensor->dtype = (nrt_dtype_t)number_at(numbers, 4);
    const uint32_t alias = number_at(numbers, 8);
    tensor->alias = alias == NO_ALIAS ? -1 : (int)(alias & INT32_MAX);
    tensor->num_dimensions = number_at(numbers, 12);
    if (tensor->num_dimensions > SIM_NEFF_RANK_MAX)
        return false;
    tensor->num_bytes = sim_dtype_bytes(tensor->dtype);
    for (uint32_t i = 0; i < tensor->num_dimensions; i++) {
        tensor->shape[i] = number_at(numbers, 16 + 4 * i);
        if (tensor->shape[i] == 0 || tensor->num_bytes > TENSOR_BYTES_MAX / tensor->shape[i])
            return false;
        tensor->num_bytes *= tensor->shape[i];
    }
    return tensor->num_bytes > 0;
}

static bool are_same_shape(const struct sim_neff_tensor *a, const struct sim_neff_tensor *b)
{
    return a->dtype == b->dtype && a->num_dimensions == b->num_dimensions &&
           memcmp(a->shape, b->shape, a->num_dimensions * sizeof a->shape[0]) == 0;
}

/* Names are unique among inputs and among outputs; an output is the alias of one input at most. */
static bool are_consistent(const struct sim_neff *neff)
{
    const uint32_t num_tensors = neff->num_inputs + neff->num_outputs;
    for (uint32_t i = 0; i < num_tensors; i++) {
        const struct sim_neff_tensor *tensor = &neff->tensors[i];
        const bool is_input = i < neff->num_inputs;
        if (tensor->usage != (is_input ? NRT_TENSOR_USAGE_INPUT : NRT_TENSOR_USAGE_OUTPUT))
            return false;
        if (tensor->alias >= 0) {
            const uint32_t alias = (uint32_t)tensor->alias;
            if (!is_input || alias < neff->num_inputs || alias >= num_tensors ||
                !are_same_shape(tensor, &neff->tensors[alias]))
                return false;
        }
        for (uint32_t k = is_input ? 0 : neff->num_inputs; k < i; k++) {
            const struct sim_neff_tensor *other = &neff->tensors[k];
            if (strcmp(tensor->name, other->name) == 0)
                return false;
            if (tensor->alias >= 0 && tensor->alias == other->alias)
                return false;
        }
    }
    return true;
}

struct sim_neff *sim_neff_parse(const void *bytes, size_t num_bytes, NRT_STATUS *status)
{
    *status = NRT_UNSUPPORTED_NEFF_VERSION;
    if (!is_whole(bytes, num_bytes))
        return NULL;
    const uint32_t num_tensors = number_at(bytes, 16);
    struct sim_neff *neff = calloc(1, sizeof *neff + num_tensors * sizeof neff->tensors[0]);
    if (neff == NULL) {
        *status = NRT_FAIL_HOST_MEM_ALLOC;
        return NULL;
    }
    neff->program = (enum sim_program)number_at(bytes, 12);
    neff->num_cores = number_at(bytes, 20);
    neff->flags = number_at(bytes, 24);
    neff->delay_us = number_at(bytes, 28);
    for (uint32_t i = 0; i < SIM_NEFF_NUM_PARAMETERS; i++)
        neff->parameters[i] = number_at(bytes, 32 + 4 * i);
    bool is_right = neff->num_cores >= 1 && neff->num_cores <= SIM_CORES_MAX;
    for (uint32_t i = 0; is_right && i < num_tensors; i++) {
        const unsigned char *at = (const unsigned char *)bytes + HEADER_BYTES;
        is_right = read_tensor(at + (size_t)i * TENSOR_BYTES, &neff->tensors[i]);
        if (neff->tensors[i].usage == NRT_TENSOR_USAGE_INPUT)
            neff->num_inputs++;
        else
            neff->num_outputs++;
    }
    if (is_right && are_consistent(neff) && sim_program_accepts(neff)) {
        *status = NRT_SUCCESS;
        return neff;
    }
    free(neff);
    return NULL;
}
