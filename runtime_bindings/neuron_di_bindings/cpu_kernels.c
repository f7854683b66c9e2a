/* The decode step on CPU, and the copy of KV blocks; called by cpu_kernels.py through ctypes.
 *
 * Promise: a row of the batch depends on its own request only, bit for bit. Every sum has one
 * vector accumulator and runs over its elements in order, whatever the batch size, the tile or
 * the number of threads. Results may differ between instruction sets.
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
    const int32_t *tokens, *positions; /* [B] */
    const int32_t *block_tables;       /* [B, max_blocks] */
    void *workspace;                   /* workspace_bytes() */
    float *logits;                     /* [B, num_vocab] */
} Step;

/* Each holds B rows, row_stride() of their size apart. */
typedef struct {
    float *hidden, *normed, *qkv, *attended, *gate_up;
    float *scores; /* one [H / K, score_stride] for each thread */
    int64_t score_stride;
} Buffers;

/* One thread's part of the work. */
typedef struct {
    int64_t index, count;
} Share;

typedef struct {
    int64_t begin, end;
} Range;

/* A caller built for other structs would crash: it compares these first. */
const int64_t struct_bytes[] = {sizeof(Layer), sizeof(Decoder), sizeof(Step)};

enum { CACHE_LINE = 64, CACHE_LINE_FLOATS = CACHE_LINE / sizeof(float) };

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

/* The number of instruction sets that this machine can run, and so 1 + the best one's index. */
int64_t num_isas(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 1;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? 3
               : 2;
#else
    return 1;
#endif
}

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

/* Feeds each row's token, writes its KV into the pool, and writes its logits. */
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

/* Copies block src_ids[i] of `src` to block dst_ids[i] of `dst`; a run of neighbours at once.
 * What the caller reads afterwards is read after the last byte: it then checks the blocks' owner. */
void copy_blocks(char *dst, const char *src, const int32_t *dst_ids, const int32_t *src_ids,
                 int64_t count, int64_t block_bytes) {
    for (int64_t i = 0, end; i < count; i = end) {
        for (end = i + 1; end < count; end++)
            if (dst_ids[end] != dst_ids[end - 1] + 1 || src_ids[end] != src_ids[end - 1] + 1) break;
        memcpy(dst + dst_ids[i] * block_bytes, src + src_ids[i] * block_bytes,
               (end - i) * block_bytes);
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
}
