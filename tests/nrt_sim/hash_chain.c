/*
 * The "model" whose next token depends on every byte of a sequence's KV: a chain of hashes.
 *
 * B slots, H heads of this core, S positions, D elements of a head, R rows, T tokens of a row.
 *
 *     inputs   tokens (R, T) int32, positions (R, T) int32, seq_ids (R) int32,
 *              then K and V of each layer: (B, H, S, D); K is (B, H, D, S) with TRANSPOSED_KEYS
 *     outputs  next tokens (R) int32, partials (R) uint64, then all K and V, aliased
 *     parameters  0 vocabulary, 1 max_length (positions that count), 2 number of the first head
 *
 * Per layer, kind (K 0, V 1) and head, with all numbers modulo 2^64:
 *
 *     h = mix(((2 * layer + kind) << 32) + head + 1), then folded over the KV of all positions
 *         before p, as they are in memory: per 8 bytes, h = (h ^ word) * ODD; h ^= h >> 29
 *     KV of position p: words mix(mix(h ^ mix((token << 32) + p)) + 1), ... + 2, ...
 *     partial = sum over layers, kinds and heads of mix(h folded up to the last position)
 *     next token = mix(partial) % vocabulary
 *
 * Each step is one to one, so a partial differs whenever a single byte does. Heads are numbered
 * over all ranks and do not mix before the sum: KV and the sum of the ranks' partials are the same
 * for every number of ranks, and the host adds up partials (each head once) where there are
 * several. A rank's own "next token" counts only its heads.
 *
 * Garbage is written where the real graphs of NxD Inference write some. A row's positions that are
 * -1 stand for padding: the places behind the last position are overwritten. A row with seq_id -1
 * stands for an idle row: the first row's garbage goes into a slot that no row names, at the place
 * `max_length` (the pad) with SEQ_IDS_MASK, and without it at the first row's positions.
 */
#include <string.h>

#include "models.h"

enum { VOCABULARY, MAX_LENGTH, FIRST_HEAD };      /* parameters */
enum { TOKENS, POSITIONS, SEQ_IDS, FIRST_STATE }; /* inputs */
enum { NEXT_TOKENS, PARTIALS, FIRST_NEXT_STATE }; /* outputs */
enum { ROW_BYTES_MAX = 4096, SLOTS_MAX = 1024 };
#define ODD 0x9e3779b97f4a7c15u
#define GARBAGE 0xbadc0ffee0ddf00du

/* The sizes of one container, and the memory of one execution. */
struct chain {
    const struct sim_neff *neff;
    struct sim_tensor *const *tensors;
    uint32_t num_states; /* 2 * layers */
    uint32_t num_slots, num_heads, num_positions, num_elements; /* B, H, S, D */
    uint32_t num_rows, num_tokens;                              /* R, T */
    uint32_t element_bytes, row_bytes;
    uint32_t vocabulary, max_length, first_head;
};

static uint64_t mix(uint64_t x)
{
    x += ODD;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static struct chain chain_of(const struct sim_neff *neff, struct sim_tensor *const *tensors)
{
    const struct sim_neff_tensor *values = &neff->tensors[FIRST_STATE + 1]; /* (B, H, S, D) */
    struct chain chain = {
        .neff = neff,
        .tensors = tensors,
        .num_states = neff->num_inputs - FIRST_STATE,
        .num_slots = values->shape[0],
        .num_heads = values->shape[1],
        .num_positions = values->shape[2],
        .num_elements = values->shape[3],
        .num_rows = neff->tensors[TOKENS].shape[0],
        .num_tokens = neff->tensors[TOKENS].shape[1],
        .element_bytes = (uint32_t)sim_dtype_bytes(values->dtype),
        .vocabulary = neff->parameters[VOCABULARY],
        .max_length = neff->parameters[MAX_LENGTH],
        .first_head = neff->parameters[FIRST_HEAD],
    };
    chain.row_bytes = chain.num_elements * chain.element_bytes;
    return chain;
}

/* ---- The container --------------------------------------------------------------------------- */

static bool is_shaped(const struct sim_neff_tensor *tensor, nrt_dtype_t dtype, uint32_t rank,
                      const uint32_t *shape)
{
    return tensor->dtype == dtype && tensor->num_dimensions == rank &&
           memcmp(tensor->shape, shape, rank * sizeof shape[0]) == 0;
}

static bool are_states_right(const struct chain *chain)
{
    const struct sim_neff *neff = chain->neff;
    const bool are_keys_transposed = neff->flags & SIM_NEFF_TRANSPOSED_KEYS;
    const uint32_t values[] = {chain->num_slots, chain->num_heads, chain->num_positions,
                               chain->num_elements};
    const uint32_t keys[] = {values[0], values[1], values[3], values[2]};
    const nrt_dtype_t dtype = neff->tensors[FIRST_STATE].dtype;
    for (uint32_t i = 0; i < chain->num_states; i++) {
        const struct sim_neff_tensor *state = &neff->tensors[FIRST_STATE + i];
        const bool is_transposed = i % 2 == 0 && are_keys_transposed;
        if (!is_shaped(state, dtype, 4, is_transposed ? keys : values) ||
            state->alias != (int)(neff->num_inputs + FIRST_NEXT_STATE + i))
            return false;
    }
    return true;
}

bool sim_hash_chain_accepts(const struct sim_neff *neff)
{
    const struct sim_neff_tensor *tensors = neff->tensors;
    if (neff->num_inputs < FIRST_STATE + 2 || (neff->num_inputs - FIRST_STATE) % 2 != 0 ||
        neff->num_outputs != neff->num_inputs - FIRST_STATE + FIRST_NEXT_STATE)
        return false;
    if (tensors[TOKENS].num_dimensions != 2 || tensors[FIRST_STATE + 1].num_dimensions != 4)
        return false;
    const struct chain chain = chain_of(neff, NULL);
    const uint32_t rows[] = {chain.num_rows, chain.num_tokens};
    const struct sim_neff_tensor *outputs = tensors + neff->num_inputs;
    if (!is_shaped(&tensors[TOKENS], NRT_DTYPE_INT32, 2, rows) ||
        !is_shaped(&tensors[POSITIONS], NRT_DTYPE_INT32, 2, rows) ||
        !is_shaped(&tensors[SEQ_IDS], NRT_DTYPE_INT32, 1, rows) ||
        !is_shaped(&outputs[NEXT_TOKENS], NRT_DTYPE_INT32, 1, rows) ||
        !is_shaped(&outputs[PARTIALS], NRT_DTYPE_UINT64, 1, rows) || !are_states_right(&chain))
        return false;
    const bool has_pad = chain.max_length < chain.num_positions;
    return chain.row_bytes <= ROW_BYTES_MAX && chain.num_slots <= SLOTS_MAX &&
           chain.vocabulary >= 1 && chain.vocabulary <= INT32_MAX && chain.max_length >= 1 &&
           chain.max_length <= chain.num_positions && chain.num_tokens <= chain.max_length &&
           (has_pad || !(neff->flags & SIM_NEFF_SEQ_IDS_MASK));
}

/* ---- KV in memory: one position of one head is a row of D elements --------------------------- */

struct place {
    unsigned char *first; /* the row's first element */
    size_t step;          /* bytes from one element to the next */
};

static struct place place_of(const struct chain *chain, uint32_t state, uint32_t slot,
                             uint32_t head, uint32_t position)
{
    const size_t bytes = chain->element_bytes;
    const bool is_transposed =
        state % 2 == 0 && chain->neff->flags & SIM_NEFF_TRANSPOSED_KEYS;
    const size_t head_bytes = (size_t)chain->num_positions * chain->row_bytes;
    unsigned char *start = chain->tensors[FIRST_STATE + state]->memory +
                           ((size_t)slot * chain->num_heads + head) * head_bytes;
    if (is_transposed)
        return (struct place){start + position * bytes, chain->num_positions * bytes};
    return (struct place){start + (size_t)position * chain->row_bytes, bytes};
}

static void read_row(const struct chain *chain, struct place place, unsigned char *row)
{
    for (uint32_t i = 0; i < chain->num_elements; i++)
        memcpy(row + i * chain->element_bytes, place.first + i * place.step, chain->element_bytes);
}

static void write_row(const struct chain *chain, struct place place, uint64_t seed)
{
    unsigned char row[ROW_BYTES_MAX + 8];
    for (uint32_t i = 0; i < chain->row_bytes; i += 8) {
        const uint64_t word = mix(seed + i / 8 + 1);
        memcpy(row + i, &word, sizeof word);
    }
    for (uint32_t i = 0; i < chain->num_elements; i++)
        memcpy(place.first + i * place.step, row + i * chain->element_bytes, chain->element_bytes);
}

static uint64_t fold(const struct chain *chain, uint64_t hash, struct place place)
{
    unsigned char row[ROW_BYTES_MAX + 8];
    read_row(chain, place, row);
    memset(row + chain->row_bytes, 0, 8);
    for (uint32_t i = 0; i < chain->row_bytes; i += 8) {
        uint64_t word;
        memcpy(&word, row + i, sizeof word);
        hash = (hash ^ word) * ODD;
        hash ^= hash >> 29;
    }
    return hash;
}

/* ---- One row --------------------------------------------------------------------------------- */

struct row {
    int32_t slot;  /* -1: idle */
    int32_t first; /* position */
    uint32_t num_tokens;
    const unsigned char *tokens; /* int32 */
};

static int32_t number_in(const unsigned char *numbers, uint32_t index)
{
    int32_t number;
    memcpy(&number, numbers + 4 * (size_t)index, sizeof number);
    return number;
}

/* Reads and checks row `index`: nothing is written before all rows are right. */
static NRT_STATUS read_inputs(const struct chain *chain, uint32_t index, struct row *row)
{
    const size_t offset = 4 * (size_t)index * chain->num_tokens;
    const unsigned char *positions = chain->tensors[POSITIONS]->memory + offset;
    row->tokens = chain->tensors[TOKENS]->memory + offset;
    row->slot = number_in(chain->tensors[SEQ_IDS]->memory, index);
    row->first = number_in(positions, 0);
    row->num_tokens = 0;
    if (row->slot == -1)
        return NRT_SUCCESS;
    if (row->slot < 0 || row->slot >= (int32_t)chain->num_slots)
        return NRT_EXEC_OOB;
    while (row->num_tokens < chain->num_tokens && number_in(positions, row->num_tokens) != -1) {
        const int32_t position = number_in(positions, row->num_tokens);
        const int32_t token = number_in(row->tokens, row->num_tokens);
        if (position < 0 || position >= (int32_t)chain->max_length || token < 0 ||
            token >= (int32_t)chain->vocabulary)
            return NRT_EXEC_OOB;
        if (position != row->first + (int32_t)row->num_tokens)
            return NRT_EXEC_BAD_INPUT;
        row->num_tokens++;
    }
    for (uint32_t i = row->num_tokens; i < chain->num_tokens; i++)
        if (number_in(positions, i) != -1)
            return NRT_EXEC_BAD_INPUT; /* padding is on the right */
    return row->num_tokens > 0 ? NRT_SUCCESS : NRT_EXEC_BAD_INPUT;
}

/* Writes one head's KV of the row's tokens; returns its share of the partial. */
static uint64_t run_head(const struct chain *chain, const struct row *row, uint32_t state,
                         uint32_t head)
{
    const uint32_t slot = (uint32_t)row->slot;
    const uint32_t first = (uint32_t)row->first;
    uint64_t hash = mix(((uint64_t)state << 32) + chain->first_head + head + 1);
    for (uint32_t position = 0; position < first; position++)
        hash = fold(chain, hash, place_of(chain, state, slot, head, position));
    for (uint32_t i = 0; i < row->num_tokens; i++) {
        const uint64_t token = (uint64_t)number_in(row->tokens, i);
        const struct place place = place_of(chain, state, slot, head, first + i);
        write_row(chain, place, mix(hash ^ mix((token << 32) + first + i)));
        hash = fold(chain, hash, place);
    }
    return mix(hash);
}

static void write_garbage(const struct chain *chain, uint32_t slot, uint32_t position)
{
    for (uint32_t state = 0; state < chain->num_states; state++)
        for (uint32_t head = 0; head < chain->num_heads; head++)
            write_row(chain, place_of(chain, state, slot, head, position),
                      mix(GARBAGE + ((uint64_t)slot << 32) + position));
}

static void run_row(const struct chain *chain, uint32_t index, const struct row *row)
{
    uint64_t partial = 0;
    for (uint32_t state = 0; state < chain->num_states; state++)
        for (uint32_t head = 0; head < chain->num_heads; head++)
            partial += run_head(chain, row, state, head);
    /* A graph writes its whole bucket: behind the last token that is garbage. */
    for (uint32_t i = row->num_tokens; i < chain->num_tokens; i++)
        if ((uint32_t)row->first + i < chain->num_positions)
            write_garbage(chain, (uint32_t)row->slot, (uint32_t)row->first + i);
    const int32_t next = (int32_t)(mix(partial) % chain->vocabulary);
    const uint32_t num_inputs = chain->neff->num_inputs;
    memcpy(chain->tensors[num_inputs + NEXT_TOKENS]->memory + 4 * (size_t)index, &next, 4);
    memcpy(chain->tensors[num_inputs + PARTIALS]->memory + 8 * (size_t)index, &partial, 8);
}

/* `slot`: one that no row of this execution names. */
static void run_idle_row(const struct chain *chain, uint32_t index, uint32_t slot,
                         const struct row *first_active)
{
    const int32_t no_token = -1;
    const uint64_t no_partial = 0;
    const uint32_t num_inputs = chain->neff->num_inputs;
    memcpy(chain->tensors[num_inputs + NEXT_TOKENS]->memory + 4 * (size_t)index, &no_token, 4);
    memcpy(chain->tensors[num_inputs + PARTIALS]->memory + 8 * (size_t)index, &no_partial, 8);
    if (slot >= chain->num_slots)
        return;
    if (chain->neff->flags & SIM_NEFF_SEQ_IDS_MASK)
        write_garbage(chain, slot, chain->max_length);
    else if (first_active != NULL)
        for (uint32_t i = 0; i < chain->num_tokens; i++)
            if ((uint32_t)first_active->first + i < chain->num_positions)
                write_garbage(chain, slot, (uint32_t)first_active->first + i);
}

NRT_STATUS sim_hash_chain_run(const struct sim_neff *neff, struct sim_tensor *const *tensors)
{
    const struct chain chain = chain_of(neff, tensors);
    bool is_named[SLOTS_MAX] = {false};
    struct row first_active;
    bool is_any_active = false;
    for (uint32_t i = 0; i < chain.num_rows; i++) {
        struct row row;
        const NRT_STATUS status = read_inputs(&chain, i, &row);
        if (status != NRT_SUCCESS)
            return status;
        if (row.slot < 0)
            continue;
        if (is_named[row.slot])
            return NRT_EXEC_BAD_INPUT; /* two rows would write one slot */
        is_named[row.slot] = true;
        if (!is_any_active)
            first_active = row;
        is_any_active = true;
    }
    uint32_t idle_slot = 0;
    for (uint32_t i = 0; i < chain.num_rows; i++) {
        struct row row;
        read_inputs(&chain, i, &row);
        if (row.slot >= 0) {
            run_row(&chain, i, &row);
            continue;
        }
        while (idle_slot < chain.num_slots && is_named[idle_slot])
            idle_slot++;
        run_idle_row(&chain, i, idle_slot, is_any_active ? &first_active : NULL);
        idle_slot++;
    }
    return NRT_SUCCESS;
}
