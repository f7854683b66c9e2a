/* Copies of KV between memories: byte runs, and vectors of other strides and number formats.
 * Part of _kv_copy.c. The caller has checked every bound. */
#include <stdint.h>
#include <string.h>

/* The next run lies somewhere else: its first lines are on their way while this one is copied. */
#define PREFETCH_BYTES 1024
#define LINE_BYTES 64

static inline void prefetch(const char *p, int64_t length, int is_written) {
    const int64_t end = length < PREFETCH_BYTES ? length : PREFETCH_BYTES;
    for (int64_t i = 0; i < end; i += LINE_BYTES)
        if (is_written)
            __builtin_prefetch(p + i, 1);
        else
            __builtin_prefetch(p + i, 0);
}

#define ALWAYS_INLINE __attribute__((always_inline)) static inline

#ifdef __x86_64__
#include <immintrin.h>
#define WITH_AVX2 __attribute__((target("avx2")))

static int has_avx2(void) { return __builtin_cpu_supports("avx2"); }

/* Measured: from here on stores that bypass the cache are faster, even where all of it is read
 * once more to be verified. Below, what was copied is still in the cache then. */
#define STREAM_BYTES_MIN (8 << 20)
#define PAGE_BYTES 4096

WITH_AVX2 static inline void stream_line(char *dst, const char *src) {
    const __m256i low = _mm256_loadu_si256((const __m256i *)src);
    const __m256i high = _mm256_loadu_si256((const __m256i *)(src + 32));
    _mm256_stream_si256((__m256i *)dst, low);
    _mm256_stream_si256((__m256i *)(dst + 32), high);
}

/* Two pages at once: the second one's address is looked up while the first one's bytes come. */
WITH_AVX2 static void stream(char *dst, const char *src, int64_t length) {
    int64_t i = 0;
    if ((uintptr_t)dst % LINE_BYTES == 0) {
        for (; i + 2 * PAGE_BYTES <= length; i += 2 * PAGE_BYTES)
            for (int64_t k = i; k < i + PAGE_BYTES; k += LINE_BYTES) {
                stream_line(dst + k, src + k);
                stream_line(dst + k + PAGE_BYTES, src + k + PAGE_BYTES);
            }
        for (; i + LINE_BYTES <= length; i += LINE_BYTES) stream_line(dst + i, src + i);
    }
    memcpy(dst + i, src + i, length - i);
}

static void end_streams(void) { _mm_sfence(); }
#else
#define STREAM_BYTES_MIN INT64_MAX
#define WITH_AVX2

static int has_avx2(void) { return 0; }
static void stream(char *dst, const char *src, int64_t length) { memcpy(dst, src, length); }
static void end_streams(void) {}
#endif

static int64_t sum(const int64_t *numbers, int64_t count) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) total += numbers[i];
    return total;
}

/* Copies run i, lengths[i] bytes. What the caller reads afterwards is read after the last byte:
 * it then checks whose the bytes were. */
void copy_runs(char *dst, const char *src, const int64_t *dst_offsets, const int64_t *src_offsets,
               const int64_t *lengths, int64_t count) {
    const int streams = has_avx2() && sum(lengths, count) >= STREAM_BYTES_MIN;
    for (int64_t i = 0; i < count; i++) {
        if (i + 1 < count) {
            prefetch(src + src_offsets[i + 1], lengths[i + 1], 0);
            if (!streams) prefetch(dst + dst_offsets[i + 1], lengths[i + 1], 1);
        }
        if (streams)
            stream(dst + dst_offsets[i], src + src_offsets[i], lengths[i]);
        else
            memcpy(dst + dst_offsets[i], src + src_offsets[i], lengths[i]);
    }
    if (streams) end_streams();
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
}

typedef enum { FLOAT32, BFLOAT16, FLOAT16 } Format;

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static uint32_t widen_bfloat16(uint16_t bits) { return (uint32_t)bits << 16; }

static uint16_t narrow_bfloat16(uint32_t bits) {
    const uint16_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const uint16_t nan = bits >> 16 | 0x40; /* quiet: its upper bits may all be zero */
    return (bits & 0x7fffffff) > 0x7f800000 ? nan : rounded;
}

static uint32_t widen_float16(uint16_t half) {
    const uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t normal = magnitude + (112u << 23);
    const uint32_t special = magnitude + (224u << 23); /* infinite, NaN */
    const uint32_t tiny = to_bits((float)(half & 0x3ff) * 0x1p-24f);
    return sign | ((half & 0x7c00) == 0 ? tiny : (half & 0x7c00) == 0x7c00 ? special : normal);
}

static uint16_t narrow_float16(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint16_t sign = bits >> 16 & 0x8000;
    const uint32_t odd = magnitude >> 13 & 1;
    const uint16_t normal = (magnitude - (112u << 23) + 0xfff + odd) >> 13;
    /* The unit of 0.5's last place is float16's smallest number: the addition rounds to it. */
    const uint16_t tiny = to_bits(from_bits(magnitude) + 0.5f) - (126u << 23);
    const uint16_t nan = 0x7e00 | (magnitude >> 13 & 0x1ff);
    const uint16_t finite = magnitude < 113u << 23 ? tiny : normal;
    const uint16_t rest = magnitude > 0x7f800000 ? nan : 0x7c00;
    return sign | (magnitude >= 0x477ff000 ? rest : finite);
}

static inline uint32_t load(const char *p, Format format) {
    uint32_t wide;
    uint16_t half;
    if (format == FLOAT32) {
        memcpy(&wide, p, sizeof wide);
        return wide;
    }
    memcpy(&half, p, sizeof half);
    return format == BFLOAT16 ? widen_bfloat16(half) : widen_float16(half);
}

static inline void store(char *p, uint32_t bits, Format format) {
    if (format == FLOAT32) {
        memcpy(p, &bits, sizeof bits);
        return;
    }
    const uint16_t half = format == BFLOAT16 ? narrow_bfloat16(bits) : narrow_float16(bits);
    memcpy(p, &half, sizeof half);
}

static inline int64_t bytes_of(Format format) { return format == FLOAT32 ? 4 : 2; }

/* One line of numbers; strides in bytes. Constant formats and strides make it a vector loop. */
ALWAYS_INLINE void convert(char *dst, const char *src, int64_t count, int64_t dst_stride,
                           int64_t src_stride, Format to, Format from) {
    for (int64_t i = 0; i < count; i++)
        if (to == from && to == FLOAT32)
            memcpy(dst + i * dst_stride, src + i * src_stride, 4);
        else if (to == from)
            memcpy(dst + i * dst_stride, src + i * src_stride, 2);
        else
            store(dst + i * dst_stride, load(src + i * src_stride, from), to);
}

#define EACH_PAIR(CASE)                                                               \
    CASE(FLOAT32, FLOAT32) CASE(FLOAT32, BFLOAT16) CASE(FLOAT32, FLOAT16)             \
    CASE(BFLOAT16, FLOAT32) CASE(BFLOAT16, BFLOAT16) CASE(BFLOAT16, FLOAT16)          \
    CASE(FLOAT16, FLOAT32) CASE(FLOAT16, BFLOAT16) CASE(FLOAT16, FLOAT16)

ALWAYS_INLINE void line(char *dst, const char *src, int64_t count, int64_t dst_stride,
                        int64_t src_stride, Format to, Format from, int streams) {
    if (dst_stride == bytes_of(to) && src_stride == bytes_of(from)) {
        if (to == from) {
            if (streams)
                stream(dst, src, count * bytes_of(to));
            else
                memcpy(dst, src, count * bytes_of(to));
            return;
        }
#define CASE(TO, FROM)            \
    if (to == TO && from == FROM) \
        convert(dst, src, count, bytes_of(TO), bytes_of(FROM), TO, FROM);
        EACH_PAIR(CASE)
#undef CASE
        return;
    }
#define CASE(TO, FROM)            \
    if (to == TO && from == FROM) convert(dst, src, count, dst_stride, src_stride, TO, FROM);
    EACH_PAIR(CASE)
#undef CASE
}

/* How the numbers of one memory lie: strides in bytes, from one token or dim to the next. */
typedef struct {
    int64_t token, dim, format;
} Grain;

/* Spans are tokens that lie in one block at either end, rows heads of K or V of a layer. Addresses
 * are numbers: where rows lie in several memories, the base is 0. */
typedef struct {
    intptr_t dst, src;
    const int64_t *dst_spans, *src_spans, *span_tokens;
    int64_t num_spans;
    const int64_t *dst_rows, *src_rows;
    int64_t num_rows, num_dims;
    Grain to, from;
} Placing;

ALWAYS_INLINE void place_all(const Placing *p, int streams) {
    const Grain to = p->to, from = p->from;
    const int tokens_follow = to.dim == bytes_of(to.format) && from.dim == bytes_of(from.format) &&
                              to.token == p->num_dims * to.dim &&
                              from.token == p->num_dims * from.dim;
    for (int64_t s = 0; s < p->num_spans; s++)
        for (int64_t r = 0; r < p->num_rows; r++) {
            char *d = (char *)(p->dst + p->dst_spans[s] + p->dst_rows[r]);
            const char *q = (const char *)(p->src + p->src_spans[s] + p->src_rows[r]);
            /* Tokens that follow one another at both ends are one line. */
            const int64_t num_lines = tokens_follow ? 1 : p->span_tokens[s];
            const int64_t count = tokens_follow ? p->span_tokens[s] * p->num_dims : p->num_dims;
            for (int64_t t = 0; t < num_lines; t++)
                line(d + t * to.token, q + t * from.token, count, to.dim, from.dim, to.format,
                     from.format, streams);
        }
}

static void place_plain(const Placing *p) { place_all(p, 0); }

WITH_AVX2 static void place_avx2(const Placing *p, int streams) { place_all(p, streams); }

/* For every span s and row r: copies the vectors of its tokens, `num_dims` numbers each. Token t's
 * lies at base + spans[s] + rows[r] + t * stride. */
void place(const Placing *p) {
    const int64_t num_numbers = sum(p->span_tokens, p->num_spans) * p->num_rows * p->num_dims;
    const int streams = num_numbers * bytes_of(p->to.format) >= STREAM_BYTES_MIN;
    if (!has_avx2()) {
        place_plain(p);
        return;
    }
    place_avx2(p, streams);
    if (streams) end_streams();
}
