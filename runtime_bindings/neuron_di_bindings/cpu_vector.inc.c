/* Vectors of LANES floats for one instruction set and one DTYPE of weights: the loads and stores
 * that convert, the sum of the lanes, and e^x. Included by cpu_decode_step.inc.c.
 */

/* A generic vector is lowered for the target of the function it stands in, before inlining, so
 * that every function that touches one has TARGET. */
#define INLINE static inline TARGET __attribute__((always_inline))
#define FUNCTION static TARGET __attribute__((noinline))

typedef float NAME(vec) __attribute__((vector_size(4 * LANES)));
typedef float NAME(vec_unaligned) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t NAME(bits) __attribute__((vector_size(4 * LANES)));
typedef uint16_t NAME(half) __attribute__((vector_size(2 * LANES)));
typedef uint16_t NAME(half_unaligned)
    __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
#if DTYPE == FLOAT32
typedef float NAME(weight);
#else
typedef uint16_t NAME(weight);
#endif
#define vec NAME(vec)
#define bits NAME(bits)
#define half NAME(half)
#define weight NAME(weight)

INLINE vec NAME(splat)(float value) { return (vec){0} + value; }

INLINE vec NAME(select)(bits mask, vec yes, vec no) {
    return (vec)((mask & (bits)yes) | (~mask & (bits)no));
}

INLINE vec NAME(load)(const float *p) { return *(const NAME(vec_unaligned) *)p; }

INLINE void NAME(store)(float *p, vec v) { *(NAME(vec_unaligned) *)p = v; }

#if DTYPE == FLOAT32
INLINE vec NAME(load_weight)(const weight *p) { return NAME(load)(p); }

INLINE void NAME(store_weight)(weight *p, vec v) { NAME(store)(p, v); }
#else
/* By intrinsics where there are any: compilers of today convert generic vectors in pieces. */
INLINE bits NAME(widen)(const weight *p) {
#if LANES == 16
    return (bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
#elif LANES == 8
    return (bits)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p));
#else
    return __builtin_convertvector(*(const NAME(half_unaligned) *)p, bits);
#endif
}

INLINE vec NAME(load_weight)(const weight *p) {
#if DTYPE == BFLOAT16
    return (vec)(NAME(widen)(p) << 16);
#elif LANES == 16
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
#elif LANES == 8
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
#else
    const bits half_bits = NAME(widen)(p), magnitude = (half_bits & 0x7fff) << 13;
    const bits subnormal = (bits)(magnitude < 0x00800000);
    const bits not_finite = (bits)(magnitude >= 0x0f800000);
    const vec tiny = (vec)(magnitude + 0x38800000) - 0x1p-14f;
    const bits rest = magnitude + 0x38000000 + (not_finite & 0x38000000);
    return (vec)((bits)NAME(select)(subnormal, tiny, (vec)rest) | (half_bits & 0x8000) << 16);
#endif
}

/* Rounds to nearest even; too large becomes infinity; NaN stays NaN. */
INLINE void NAME(store_weight)(weight *p, vec v) {
    const bits in = (bits)v;
#if DTYPE == BFLOAT16
    const bits rounded = (in + 0x7fff + (in >> 16 & 1)) >> 16;
    const bits nan = (bits)(v != v);
    const bits out = (nan & 0x7fc0) | (~nan & rounded);
#else
    const bits magnitude = in & 0x7fffffff;
    const bits too_large = (bits)(magnitude >= 0x47800000);
    const bits nan = (bits)(magnitude > 0x7f800000);
    const bits subnormal = (bits)(magnitude < 0x38800000);
    const bits tiny = (bits)((vec)magnitude + 0.5f) - 0x3f000000;
    const bits normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const bits finite = (subnormal & tiny) | (~subnormal & normal);
    const bits special = 0x7c00 | (nan & 0x0200);
    const bits out = (too_large & special) | (~too_large & finite) | (in >> 16 & 0x8000);
#endif
    *(NAME(half_unaligned) *)p = __builtin_convertvector(out, half);
}
#endif

/* The first `count` < LANES elements, then zeros. */
INLINE vec NAME(load_part)(const float *p, int64_t count) {
    float part[LANES] = {0};
    memcpy(part, p, count * sizeof(float));
    return NAME(load)(part);
}

INLINE vec NAME(load_weight_part)(const weight *p, int64_t count) {
    weight part[LANES] = {0};
    memcpy(part, p, count * sizeof(weight));
    return NAME(load_weight)(part);
}

INLINE float NAME(first_weight)(const weight *p) { return NAME(load_weight_part)(p, 1)[0]; }

INLINE float NAME(sum_lanes)(vec v) {
    typedef float quad __attribute__((vector_size(16)));
    union {
        vec all;
        quad part[LANES / 4];
    } u = {v};
#if LANES == 16
    const quad sum = (u.part[0] + u.part[2]) + (u.part[1] + u.part[3]);
#elif LANES == 8
    const quad sum = u.part[0] + u.part[1];
#else
    const quad sum = u.part[0];
#endif
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* e^x to 2 units in the last place; 0 below -87.3, the largest powers are clamped; NaN stays. */
INLINE vec NAME(exp)(vec x) {
    const vec magic = NAME(splat)(0x1.8p23f); /* adding it leaves the nearest integer low */
    const bits underflow = (bits)(x < -87.3f);
    x = NAME(select)((bits)(x > 88.3f), NAME(splat)(88.3f), x);
    const vec shifted = x * 1.44269504f + magic, n = shifted - magic;
    const vec r = x - n * 0.693359375f - n * -2.12194440e-4f;
    vec p = NAME(splat)(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const vec power = (vec)(((bits)shifted + 127) << 23);
    return NAME(select)(underflow, (vec){0}, p * power);
}
