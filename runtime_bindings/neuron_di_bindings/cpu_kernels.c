/* The decode step and prefill's attention on CPU, and the copy of KV blocks; called by
 * cpu_kernels.py through ctypes.
 *
 * Promise: a row of the batch depends on its own request only, bit for bit. Every sum has one
 * vector accumulator and runs over its elements in order, whatever the batch size, the tile or
 * the number of threads. Results may differ between instruction sets.
 *
 * Rows of one request at consecutive positions may share a step: they see each other's KV as if
 * they had been fed one after the other.
 *
 * Dimensions: B rows (one new token each), H query heads, K KV heads, D head dim, S token
 * positions of a block. Linear weights are row-major [out, in], as in Hugging Face checkpoints.
 * Activations and sums are float32; weights and KV share one dtype. The caller has checked all
 * sizes, token ids, positions and block ids.
 */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

/* Addresses of one layer's weights; NULL for a bias or a norm that the model doesn't have. */
typedef struct {
    const void *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias;
    const void *post_norm, *gate_up, *gate_up_bias, *down, *down_bias;
} Layer;

typedef struct {
    int64_t num_vocab, hidden, intermediate, num_layers, num_heads, num_kv_heads, head_dim;
    int64_t block_size, num_blocks, num_positions;
    int64_t window; /* positions that one sees, itself included; 0: all */
    int64_t dtype, isa;
    double rms_eps;
    const Layer *layers;
    const void *embedding, *final_norm, *lm_head;
    const float *cosines, *sines; /* [num_positions, D / 2] */
    void *pool;                   /* kv_NLCKSD */
} Decoder;

typedef struct {
    int64_t batch, max_blocks, num_threads;
    int64_t num_logits;                /* L: the last rows, whose logits are wanted */
    const int32_t *tokens, *positions; /* [B] */
    const int32_t *block_tables;       /* [B, max_blocks] */
    void *workspace;                   /* workspace_bytes() */
    float *logits;                     /* [L, num_vocab] */
} Step;

/* Positions [start, start + count) of one request, in one layer. Float32 models only. */
typedef struct {
    int64_t layer, start, count, query_stride, num_threads;
    const float *queries;       /* [count, H, D], positions query_stride apart */
    const int32_t *block_table; /* of the request's blocks */
    float *out;                 /* [count, H, D] */
    void *workspace;            /* chunk_workspace_bytes() */
} Chunk;

/* Each holds B rows, row_stride() of their size apart. */
typedef struct {
    float *hidden, *normed, *qkv, *attended, *gate_up;
    float *scores; /* one [H / K, score_stride] for each thread */
    int64_t score_stride;
} Buffers;

typedef struct {
    float *packed;                /* [K, num_keys / panel, D, panel] */
    int64_t first_key, num_keys;  /* num_keys is whole groups */
    int64_t tile_positions, tile_rows;
    float *scratch; /* one of scratch_size for each thread */
    int64_t scratch_size;
} ChunkBuffers;

/* One thread's part of the work. */
typedef struct {
    int64_t index, count;
} Share;

typedef struct {
    int64_t begin, end;
} Range;

/* A caller built for other structs would crash: it compares these first. */
const int64_t struct_bytes[] = {sizeof(Layer), sizeof(Decoder), sizeof(Step), sizeof(Chunk)};

enum {
    CACHE_LINE = 64,
    CACHE_LINE_FLOATS = CACHE_LINE / sizeof(float),
    KEY_GROUP = 512, /* keys whose scores of one tile stay in cache: whole panels */
    SCORE_STRIDE = KEY_GROUP + 16, /* one cache line more: see row_stride() */
    TILE_ROWS = 48,  /* about; whole positions, then whole groups of rows */
    ROW_GROUP = 24,  /* a multiple of what any instruction set computes at a time */
};

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* Floats from one row of a buffer to the next: an odd number of cache lines, so that rows which are
 * read side by side never crowd into the same few sets of the cache. */
static int64_t row_stride(int64_t size) {
    return ((size + CACHE_LINE_FLOATS - 1) / CACHE_LINE_FLOATS | 1) * CACHE_LINE_FLOATS;
}

static Range share_of(Share share, int64_t total) {
    return (Range){total * share.index / share.count, total * (share.index + 1) / share.count};
}

/* The first position that `position` sees. */
static int64_t first_seen(const Decoder *d, int64_t position) {
    return d->window ? max64(0, position + 1 - d->window) : 0;
}

/* A chunk's key, and its value, at one position in the pool. */
static const float *key_of(const Decoder *d, const Chunk *c, int64_t kv_head, int64_t position) {
    const int64_t S = d->block_size, D = d->head_dim, K = d->num_kv_heads;
    const int64_t block = c->block_table[position / S];
    return (const float *)d->pool +
           (((block * d->num_layers + c->layer) * 2 * K + kv_head) * S + position % S) * D;
}

static const float *value_of(const Decoder *d, const Chunk *c, int64_t kv_head, int64_t position) {
    return key_of(d, c, kv_head + d->num_kv_heads, position);
}

/* Every thread of the step has come here. No effect with one thread. */
static void barrier(void) {
#ifdef _OPENMP
#pragma omp barrier
#endif
}

/* Each instruction set: vector lanes, and as many accumulators as leave registers for operands. */
#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2
#define PASTE_(name, isa, dtype) name##_##isa##_##dtype
#define PASTE(name, isa, dtype) PASTE_(name, isa, dtype)
#define NAME(name) PASTE(name, ISA, DTYPE)

#if defined(__x86_64__)
#define ISA avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define LANES 16
#define MAX_ACCUMULATORS 24
#include "cpu_decode_step.inc.c"

#define ISA avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define LANES 8
#define MAX_ACCUMULATORS 12
#include "cpu_decode_step.inc.c"
#endif

#define ISA plain
#define TARGET
#define LANES 4
#if defined(__x86_64__)
#define MAX_ACCUMULATORS 12
#else
#define MAX_ACCUMULATORS 24
#endif
#include "cpu_decode_step.inc.c"

typedef void StepFunction(const Decoder *, const Step *, const Buffers *, Share);

/* By instruction set, best last, and dtype. */
#define BY_DTYPE(isa)                                                                          \
    {PASTE_(decode_step, isa, 0), PASTE_(decode_step, isa, 1), PASTE_(decode_step, isa, 2)}
static StepFunction *const step_functions[][3] = {
    BY_DTYPE(plain),
#if defined(__x86_64__)
    BY_DTYPE(avx2),
    BY_DTYPE(avx512),
#endif
};

enum { HAS_AVX2 = 1, HAS_FMA = 2, HAS_F16C = 4, HAS_AVX512 = 8 };

/* What this processor has of it. */
static int64_t features(void) {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    /* By itself: not every compiler's __builtin_cpu_supports knows the name. */
    const int has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    __builtin_cpu_init();
    const int has_avx512 =
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return (__builtin_cpu_supports("avx2") ? HAS_AVX2 : 0) |
           (__builtin_cpu_supports("fma") ? HAS_FMA : 0) | (has_f16c ? HAS_F16C : 0) |
           (has_avx512 ? HAS_AVX512 : 0);
#else
    return 0;
#endif
}

/* The number of instruction sets that run with these features, and so 1 + the best one's index. */
int64_t num_isas_with(int64_t features) {
    const int64_t avx2 = HAS_AVX2 | HAS_FMA | HAS_F16C; /* TARGETs, of which avx512's has all */
    if ((features & avx2) != avx2) return 1;
    return features & HAS_AVX512 ? 3 : 2;
}

/* Those that this machine can run. */
int64_t num_isas(void) { return num_isas_with(features()); }

/* Lays the buffers out from `start`, which is on a cache line; returns their end. */
static float *lay_out(const Decoder *d, const Step *s, float *start, Buffers *buffers) {
    const int64_t B = s->batch, num_positions = s->max_blocks * d->block_size;
    const int64_t num_qkv = (d->num_heads + 2 * d->num_kv_heads) * d->head_dim;
    float *next = start;
    buffers->hidden = next;
    buffers->normed = next += B * row_stride(d->hidden);
    buffers->qkv = next += B * row_stride(d->hidden);
    buffers->attended = next += B * row_stride(num_qkv);
    buffers->gate_up = next += B * row_stride(d->num_heads * d->head_dim);
    buffers->scores = next += B * row_stride(2 * d->intermediate);
    buffers->score_stride = row_stride(num_positions);
    next += s->num_threads * d->num_heads / d->num_kv_heads * buffers->score_stride;
    return next;
}

/* Bytes of workspace for a step of this batch, max_blocks and num_threads. */
int64_t workspace_bytes(const Decoder *decoder, const Step *step) {
    Buffers buffers;
    float *const start = (float *)(uintptr_t)CACHE_LINE;
    return (char *)lay_out(decoder, step, start, &buffers) - (char *)start + CACHE_LINE;
}

/* Feeds each row's token, writes its KV into the pool, and writes the last rows' logits. */
void decode_step(const Decoder *decoder, const Step *step) {
    StepFunction *const run = step_functions[decoder->isa][decoder->dtype];
    const uintptr_t start = ((uintptr_t)step->workspace + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    Buffers buffers;
    lay_out(decoder, step, (float *)start, &buffers);
#ifdef _OPENMP
    if (step->num_threads > 1) {
#pragma omp parallel num_threads(step->num_threads)
        run(decoder, step, &buffers, (Share){omp_get_thread_num(), omp_get_num_threads()});
        return;
    }
#endif
    run(decoder, step, &buffers, (Share){0, 1});
}

typedef void ChunkFunction(const Decoder *, const Chunk *, const ChunkBuffers *, Share);

static ChunkFunction *const chunk_functions[] = {
    PASTE_(attend_chunk, plain, 0),
#if defined(__x86_64__)
    PASTE_(attend_chunk, avx2, 0),
    PASTE_(attend_chunk, avx512, 0),
#endif
};

static float *lay_out_chunk(const Decoder *d, const Chunk *c, float *start, ChunkBuffers *buffers) {
    const int64_t heads = d->num_heads / d->num_kv_heads, D = d->head_dim;
    const int64_t first = first_seen(d, c->start), groups_end = c->start + c->count - first;
    buffers->first_key = first;
    buffers->num_keys = (groups_end + KEY_GROUP - 1) / KEY_GROUP * KEY_GROUP;
    buffers->tile_positions = max64(1, TILE_ROWS / heads);
    const int64_t rows = buffers->tile_positions * heads;
    buffers->tile_rows = (rows + ROW_GROUP - 1) / ROW_GROUP * ROW_GROUP;
    buffers->packed = start;
    buffers->scratch = start + d->num_kv_heads * buffers->num_keys * D;
    buffers->scratch_size = row_stride(buffers->tile_rows * (2 * D + SCORE_STRIDE + 2));
    return buffers->scratch + c->num_threads * buffers->scratch_size;
}

/* Bytes of workspace for a chunk that ends where this one ends. */
int64_t chunk_workspace_bytes(const Decoder *decoder, const Chunk *chunk) {
    ChunkBuffers buffers;
    float *const start = (float *)(uintptr_t)CACHE_LINE;
    return (char *)lay_out_chunk(decoder, chunk, start, &buffers) - (char *)start + CACHE_LINE;
}

/* Attends the chunk's queries over the request's keys and values, its own included. */
void attend_chunk(const Decoder *decoder, const Chunk *chunk) {
    ChunkFunction *const run = chunk_functions[decoder->isa];
    const uintptr_t start = ((uintptr_t)chunk->workspace + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    ChunkBuffers buffers;
    lay_out_chunk(decoder, chunk, (float *)start, &buffers);
#ifdef _OPENMP
    if (chunk->num_threads > 1) {
#pragma omp parallel num_threads(chunk->num_threads)
        run(decoder, chunk, &buffers, (Share){omp_get_thread_num(), omp_get_num_threads()});
        return;
    }
#endif
    run(decoder, chunk, &buffers, (Share){0, 1});
}
