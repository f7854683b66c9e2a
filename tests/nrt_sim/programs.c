/*
 * Which program a container asks for, and the small one: a copy, or a sum.
 *
 * Program 2 has one output. With one input of as many bytes it copies. With two inputs of the
 * output's dtype and shape (int32 or float32) it adds; a sum that is no number ends in
 * EXEC_COMPLETED_WITH_NUM_ERR (1003), with the outputs written all the same.
 */
#include <math.h>
#include <string.h>

#include "models.h"

static bool copy_or_add_accepts(const struct sim_neff *neff)
{
    const struct sim_neff_tensor *tensors = neff->tensors;
    if (neff->num_outputs != 1 || neff->num_inputs < 1 || neff->num_inputs > 2)
        return false;
    const struct sim_neff_tensor *output = &tensors[neff->num_inputs];
    if (neff->num_inputs == 1)
        return tensors[0].num_bytes == output->num_bytes;
    if (output->dtype != NRT_DTYPE_INT32 && output->dtype != NRT_DTYPE_FLOAT32)
        return false;
    return tensors[0].dtype == output->dtype && tensors[1].dtype == output->dtype &&
           tensors[0].num_bytes == output->num_bytes && tensors[1].num_bytes == output->num_bytes;
}

static NRT_STATUS add(const struct sim_tensor *a, const struct sim_tensor *b,
                      struct sim_tensor *sum, nrt_dtype_t dtype)
{
    bool are_numbers = true;
    for (uint64_t i = 0; i < sum->size; i += 4) {
        if (dtype == NRT_DTYPE_FLOAT32) {
            float left, right;
            memcpy(&left, a->memory + i, sizeof left);
            memcpy(&right, b->memory + i, sizeof right);
            left += right;
            are_numbers = are_numbers && !isnan(left);
            memcpy(sum->memory + i, &left, sizeof left);
        } else {
            uint32_t left, right; /* wraps as the device does */
            memcpy(&left, a->memory + i, sizeof left);
            memcpy(&right, b->memory + i, sizeof right);
            left += right;
            memcpy(sum->memory + i, &left, sizeof left);
        }
    }
    return are_numbers ? NRT_SUCCESS : NRT_EXEC_COMPLETED_WITH_NUM_ERR;
}

bool sim_program_accepts(const struct sim_neff *neff)
{
    switch (neff->program) {
    case SIM_PROGRAM_HASH_CHAIN:
        return sim_hash_chain_accepts(neff);
    case SIM_PROGRAM_COPY_OR_ADD:
        return copy_or_add_accepts(neff);
    }
    return false;
}

NRT_STATUS sim_program_run(const struct sim_neff *neff, struct sim_tensor *const *tensors)
{
    if (neff->program == SIM_PROGRAM_HASH_CHAIN)
        return sim_hash_chain_run(neff, tensors);
    if (neff->num_inputs == 2)
        return add(tensors[0], tensors[1], tensors[2], neff->tensors[2].dtype);
    /* Source and destination may be the same, where the container says so. */
    memmove(tensors[1]->memory, tensors[0]->memory, tensors[1]->size);
    return NRT_SUCCESS;
}
