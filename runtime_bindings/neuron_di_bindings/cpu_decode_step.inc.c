/* One decode step for one instruction set (ISA, TARGET, LANES, MAX_ACCUMULATORS) and one DTYPE of
 * weights and KV. cpu_kernels.c includes this file for each instruction set, and the file includes
 * itself for each dtype. Every function here is named with both, through NAME().
 */
#ifndef DTYPE
#define DTYPE FLOAT32
#include "cpu_decode_step.inc.c"
#undef DTYPE
#define DTYPE BFLOAT16
#include "cpu_decode_step.inc.c"
#undef DTYPE
#define DTYPE FLOAT16
#include "cpu_decode_step.inc.c"
#undef DTYPE
#undef ISA
#undef TARGET
#undef LANES
#undef MAX_ACCUMULATORS
#else

#include "cpu_vector.inc.c"

/* Elements from a weight in use to the one to prefetch: enough of them to cover the latency of
 * memory, few enough to stay in the first-level cache. */
#define AHEAD (8192 / (int64_t)sizeof(weight))

/* out = in / rms(in) * gain. `out` may be `in`. */
INLINE void NAME(rms_norm)(const float *in, const weight *gain, float *out, int64_t size,
                           double eps) {
    const int64_t whole = size - size % LANES, rest = size - whole;
    vec squares = {0};
    for (int64_t i = 0; i < whole; i += LANES)
        squares += NAME(load)(in + i) * NAME(load)(in + i);
    if (rest) squares += NAME(load_part)(in + whole, rest) * NAME(load_part)(in + whole, rest);
    const float scale = 1.0f / sqrtf(NAME(sum_lanes)(squares) / (float)size + (float)eps);
    for (int64_t i = 0; i < whole; i += LANES)
        NAME(store)(out + i, NAME(load)(in + i) * scale * NAME(load_weight)(gain + i));
    for (int64_t i = whole; i < size; i++)
        out[i] = in[i] * scale * NAME(first_weight)(gain + i);
}

typedef struct {
    const weight *w, *bias; /* [out, in]; [out] or NULL */
    int64_t in;
    int64_t ahead;  /* elements from a weight in use to the one to prefetch */
    const float *x; /* [B, in], rows x_stride apart */
    int64_t x_stride;
    float *out; /* [B, out], rows out_stride apart */
    int64_t out_stride;
    bool add; /* to `out`, as a residual */
} NAME(Linear);
#define Linear NAME(Linear)

/* out[b][n] for `rows` rows of the weights and `batch` rows of x, both constants here. */
INLINE void NAME(linear_tile)(const Linear *l, int64_t n, int rows, int64_t b, int batch) {
    const weight *w = l->w + n * l->in;
    const float *x = l->x + b * l->x_stride;
    const int64_t in = l->in, x_stride = l->x_stride, whole = in - in % LANES, rest = in - whole;
    vec sums[24]; /* of row i and batch row j: at j * rows + i */
#pragma GCC unroll 24
    for (int t = 0; t < rows * batch; t++) sums[t] = (vec){0};
    for (int64_t k = 0; k < whole; k += LANES) {
        const weight *column = w + k, *soon = column + l->ahead;
        vec xs[8];
#pragma GCC unroll 8
        for (int j = 0; j < batch; j++) xs[j] = NAME(load)(x + j * x_stride + k);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            __builtin_prefetch(soon + i * in);
            const vec ws = NAME(load_weight)(column + i * in);
#pragma GCC unroll 8
            for (int j = 0; j < batch; j++) sums[j * rows + i] += ws * xs[j];
        }
    }
    if (rest) {
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            const vec ws = NAME(load_weight_part)(w + i * in + whole, rest);
#pragma GCC unroll 8
            for (int j = 0; j < batch; j++)
                sums[j * rows + i] += ws * NAME(load_part)(x + j * x_stride + whole, rest);
        }
    }
    float totals[24], biases[8] = {0};
#pragma GCC unroll 24
    for (int t = 0; t < rows * batch; t++) totals[t] = NAME(sum_lanes)(sums[t]);
    if (l->bias)
        for (int i = 0; i < rows; i++) biases[i] = NAME(first_weight)(l->bias + n + i);
    for (int j = 0; j < batch; j++) {
        float *out = l->out + (b + j) * l->out_stride + n;
        for (int i = 0; i < rows; i++)
            out[i] = totals[j * rows + i] + biases[i] + (l->add ? out[i] : 0.0f);
    }
}

/* `batch` is a constant here: as many weight rows at a time as there are registers for. */
INLINE void NAME(linear_strip)(const Linear *l, Range n, int64_t b, int batch) {
    const int most = MAX_ACCUMULATORS / batch, rows = most < 1 ? 1 : most > 8 ? 8 : most;
    for (; n.begin + rows <= n.end; n.begin += rows)
        NAME(linear_tile)(l, n.begin, rows, b, batch);
    for (; n.begin < n.end; n.begin++) NAME(linear_tile)(l, n.begin, 1, b, batch);
}

/* out = x @ w.T + bias for the rows `n` of w. Weights come from memory once, for groups of rows
 * that stay in cache while all of the batch passes over them. */
FUNCTION void NAME(linear)(const Linear *l, int64_t batch, Range n) {
    enum { GROUP = 24 };
    for (int64_t begin = n.begin; begin < n.end; begin += GROUP) {
        const Range group = {begin, min64(begin + GROUP, n.end)};
        /* Few tile sizes: each is compiled for every instruction set and dtype. */
        int64_t b = 0;
        for (; batch - b >= 8; b += 8) NAME(linear_strip)(l, group, b, 8);
        for (; batch - b >= 4; b += 4) NAME(linear_strip)(l, group, b, 4);
        for (; batch - b >= 2; b += 2) NAME(linear_strip)(l, group, b, 2);
        for (; batch - b >= 1; b += 1) NAME(linear_strip)(l, group, b, 1);
    }
}

/* One head: optional RMSNorm, then RoPE, which turns elements i and i + D / 2 together. */
INLINE void NAME(rotate)(const Decoder *d, float *head, const weight *norm, int64_t position) {
    const int64_t half_dim = d->head_dim / 2;
    const float *cosine = d->cosines + position * half_dim;
    const float *sine = d->sines + position * half_dim;
    if (norm) NAME(rms_norm)(head, norm, head, d->head_dim, d->rms_eps);
    for (int64_t i = 0; i < half_dim; i++) {
        const float low = head[i], high = head[i + half_dim];
        head[i] = low * cosine[i] - high * sine[i];
        head[i + half_dim] = high * cosine[i] + low * sine[i];
    }
}

INLINE void NAME(store_head)(weight *to, const float *head, int64_t head_dim) {
    const int64_t whole = head_dim - head_dim % LANES;
    weight part[LANES];
    for (int64_t i = 0; i < whole; i += LANES) NAME(store_weight)(to + i, NAME(load)(head + i));
    if (whole == head_dim) return;
    NAME(store_weight)(part, NAME(load_part)(head + whole, head_dim - whole));
    memcpy(to + whole, part, (head_dim - whole) * sizeof(weight));
}

/* scores[0, count) become exp(score - max), padded with zeros to whole vectors; returns the sum. */
INLINE float NAME(softmax)(float *scores, int64_t count) {
    float largest = -INFINITY;
    vec sum = {0}, top = NAME(splat)(-INFINITY);
    for (int64_t i = count; i % LANES; i++) scores[i] = -INFINITY;
    for (int64_t i = 0; i < count; i += LANES) {
        const vec s = NAME(load)(scores + i);
        top = NAME(select)((bits)(s > top), s, top);
    }
    for (int i = 0; i < LANES; i++) largest = top[i] > largest ? top[i] : largest;
    for (int64_t i = 0; i < count; i += LANES) {
        const vec e = NAME(exp)(NAME(load)(scores + i) - largest);
        NAME(store)(scores + i, e);
        sum += e;
    }
    return NAME(sum_lanes)(sum);
}

typedef struct {
    const weight *v; /* [count, head_dim], in one block */
    int64_t count, head_dim;
    int64_t ahead; /* elements from one in use to the one to prefetch */
    int64_t score_stride;
} NAME(Values);
#define Values NAME(Values)

/* out[h] += scores[h] @ v from element i of the head, for `vectors` vectors and `heads` query
 * heads, both constants here. */
INLINE void NAME(values_tile)(const Values *a, const float *scores, float *out, int64_t i,
                              int vectors, int heads) {
    const int64_t head_dim = a->head_dim, score_stride = a->score_stride;
    vec sums[8]; /* of head h and vector j: at h * vectors + j */
#pragma GCC unroll 8
    for (int t = 0; t < heads * vectors; t++)
        sums[t] = NAME(load)(out + t / vectors * head_dim + i + t % vectors * LANES);
    for (int64_t s = 0; s < a->count; s++) {
        const weight *values = a->v + s * head_dim + i;
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            __builtin_prefetch(values + a->ahead + j * LANES);
            const vec value = NAME(load_weight)(values + j * LANES);
#pragma GCC unroll 2
            for (int h = 0; h < heads; h++)
                sums[h * vectors + j] += value * scores[h * score_stride + s];
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < heads * vectors; t++)
        NAME(store)(out + t / vectors * head_dim + i + t % vectors * LANES, sums[t]);
}

/* As values_tile, for the whole head. */
INLINE void NAME(values_strip)(const Values *a, const float *scores, float *out, int heads) {
    int64_t i = 0;
    for (; i + 4 * LANES <= a->head_dim; i += 4 * LANES)
        NAME(values_tile)(a, scores, out, i, 4, heads);
    for (; i + LANES <= a->head_dim; i += LANES)
        NAME(values_tile)(a, scores, out, i, 1, heads);
    for (; i < a->head_dim; i++)
        for (int h = 0; h < heads; h++)
            for (int64_t s = 0; s < a->count; s++)
                out[h * a->head_dim + i] += scores[h * a->score_stride + s] *
                                            NAME(first_weight)(a->v + s * a->head_dim + i);
}

/* out[h] += scores[h] @ v for `heads` query heads. */
FUNCTION void NAME(add_values)(const Values *a, const float *scores, float *out, int64_t heads) {
    for (; heads >= 2; heads -= 2, scores += 2 * a->score_stride, out += 2 * a->head_dim)
        NAME(values_strip)(a, scores, out, 2);
    if (heads) NAME(values_strip)(a, scores, out, 1);
}

/* Turns one row's H / K query heads of a KV head, and writes its new token's K and V. */
FUNCTION void NAME(place)(const Decoder *d, const Layer *l, const Step *step, const Buffers *buf,
                          int64_t layer, int64_t row, int64_t kv_head) {
    const int64_t K = d->num_kv_heads, D = d->head_dim, S = d->block_size;
    const int64_t heads = d->num_heads / K, position = step->positions[row];
    const int32_t *table = step->block_tables + row * step->max_blocks;
    float *qkv = buf->qkv + row * row_stride((d->num_heads + 2 * K) * D);
    float *q = qkv + kv_head * heads * D, *k = qkv + (d->num_heads + kv_head) * D, *v = k + K * D;
    weight *pool = (weight *)d->pool + layer * 2 * K * S * D + kv_head * S * D;
    const int64_t block_size = d->num_layers * 2 * K * S * D;
    const float scale = 1.0f / sqrtf((float)D);

    for (int64_t h = 0; h < heads; h++) NAME(rotate)(d, q + h * D, l->q_norm, position);
    for (int64_t i = 0; i < heads * D; i++) q[i] *= scale;
    NAME(rotate)(d, k, l->k_norm, position);
    weight *slot = pool + table[position / S] * block_size + position % S * D;
    NAME(store_head)(slot, k, D);
    NAME(store_head)(slot + K * S * D, v, D);
}

/* Attends one row's H / K query heads of a KV head over the pool, its new token included. */
FUNCTION void NAME(attend)(const Decoder *d, const Step *step, const Buffers *buf, int64_t layer,
                           int64_t row, int64_t kv_head, float *scores) {
    const int64_t K = d->num_kv_heads, D = d->head_dim, S = d->block_size;
    const int64_t heads = d->num_heads / K, position = step->positions[row];
    const int64_t start = first_seen(d, position);
    const int64_t count = position + 1 - start, values_offset = K * S * D;
    const int32_t *table = step->block_tables + row * step->max_blocks;
    const float *q = buf->qkv + row * row_stride((d->num_heads + 2 * K) * D) + kv_head * heads * D;
    float *out = buf->attended + row * row_stride(d->num_heads * D) + kv_head * heads * D;
    const weight *pool = (const weight *)d->pool + layer * 2 * K * S * D + kv_head * S * D;
    const int64_t block_size = d->num_layers * 2 * K * S * D;

    for (int64_t p = start, end; p <= position; p = end) {
        end = min64(p - p % S + S, position + 1);
        const weight *keys = pool + table[p / S] * block_size + p % S * D;
        const int64_t ahead = (table[min64(end, position) / S] - table[p / S]) * block_size;
        const Linear dots = {.w = keys, .in = D, .ahead = ahead, .x = q, .x_stride = D,
                             .out = scores + p - start, .out_stride = buf->score_stride};
        NAME(linear)(&dots, heads, (Range){0, end - p});
    }
    float sums[heads];
    for (int64_t h = 0; h < heads; h++)
        sums[h] = NAME(softmax)(scores + h * buf->score_stride, count);
    memset(out, 0, heads * D * sizeof(float));
    for (int64_t p = start, end; p <= position; p = end) {
        end = min64(p - p % S + S, position + 1);
        const weight *v_block = pool + table[p / S] * block_size + values_offset + p % S * D;
        const int64_t ahead = (table[min64(end, position) / S] - table[p / S]) * block_size;
        const Values values = {.v = v_block, .count = end - p, .head_dim = D, .ahead = ahead,
                               .score_stride = buf->score_stride};
        NAME(add_values)(&values, scores + p - start, out, heads);
    }
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = 0; i < D; i++) out[h * D + i] /= sums[h];
}

/* gate = silu(gate) * up for the columns `n` of one row. */
INLINE void NAME(gate)(float *gate, const float *up, Range n) {
    int64_t i = n.begin;
    for (; i + LANES <= n.end; i += LANES) {
        const vec g = NAME(load)(gate + i);
        NAME(store)(gate + i, g / (NAME(exp)(-g) + 1.0f) * NAME(load)(up + i));
    }
    for (; i < n.end; i++)
        gate[i] = gate[i] / (NAME(exp)(NAME(splat)(-gate[i]))[0] + 1.0f) * up[i];
}

INLINE void NAME(norm_rows)(const Decoder *d, const void *gain, const Buffers *buf, Range rows) {
    const int64_t stride = row_stride(d->hidden);
    for (int64_t row = rows.begin; row < rows.end; row++)
        NAME(rms_norm)(buf->hidden + row * stride, gain, buf->normed + row * stride, d->hidden,
                       d->rms_eps);
}

/* hidden += attention of the normed hidden. */
FUNCTION void NAME(attention)(const Decoder *d, const Layer *l, const Step *step,
                              const Buffers *buf, int64_t layer, Share share) {
    const int64_t hidden = d->hidden, hidden_stride = row_stride(hidden), B = step->batch;
    const int64_t num_q = d->num_heads * d->head_dim, heads_per_kv = d->num_heads / d->num_kv_heads;
    const int64_t num_qkv = num_q + 2 * d->num_kv_heads * d->head_dim;
    const Range pairs = share_of(share, B * d->num_kv_heads);
    float *scores = buf->scores + share.index * heads_per_kv * buf->score_stride;
    const Linear qkv = {.w = l->qkv, .bias = l->qkv_bias, .in = hidden, .ahead = AHEAD,
                        .x = buf->normed, .x_stride = hidden_stride,
                        .out = buf->qkv, .out_stride = row_stride(num_qkv)};
    const Linear out = {.w = l->out, .bias = l->out_bias, .in = num_q, .ahead = AHEAD,
                        .x = buf->attended, .x_stride = row_stride(num_q),
                        .out = buf->hidden, .out_stride = hidden_stride, .add = true};

    NAME(norm_rows)(d, l->input_norm, buf, share_of(share, B));
    barrier();
    NAME(linear)(&qkv, B, share_of(share, num_qkv));
    barrier();
    for (int64_t i = pairs.begin; i < pairs.end; i++)
        NAME(place)(d, l, step, buf, layer, i / d->num_kv_heads, i % d->num_kv_heads);
    barrier(); /* a row may see the rows before it: one request's consecutive positions */
    for (int64_t i = pairs.begin; i < pairs.end; i++)
        NAME(attend)(d, step, buf, layer, i / d->num_kv_heads, i % d->num_kv_heads, scores);
    barrier();
    NAME(linear)(&out, B, share_of(share, hidden));
    barrier();
}

/* hidden += MLP of the normed hidden. */
FUNCTION void NAME(mlp)(const Decoder *d, const Layer *l, const Step *step, const Buffers *buf,
                        Share share) {
    const int64_t hidden = d->hidden, hidden_stride = row_stride(hidden), B = step->batch;
    const int64_t inner = d->intermediate, inner_stride = row_stride(2 * inner);
    const Range gates = share_of(share, inner);
    const Linear gate_up = {.w = l->gate_up, .bias = l->gate_up_bias, .in = hidden, .ahead = AHEAD,
                            .x = buf->normed, .x_stride = hidden_stride,
                            .out = buf->gate_up, .out_stride = inner_stride};
    const Linear down = {.w = l->down, .bias = l->down_bias, .in = inner, .ahead = AHEAD,
                         .x = buf->gate_up, .x_stride = inner_stride,
                         .out = buf->hidden, .out_stride = hidden_stride, .add = true};

    NAME(norm_rows)(d, l->post_norm, buf, share_of(share, B));
    barrier();
    NAME(linear)(&gate_up, B, gates);
    NAME(linear)(&gate_up, B, (Range){inner + gates.begin, inner + gates.end});
    for (int64_t row = 0; row < B; row++) {
        float *gate = buf->gate_up + row * inner_stride;
        NAME(gate)(gate, gate + inner, gates);
    }
    barrier();
    NAME(linear)(&down, B, share_of(share, hidden));
    barrier();
}

FUNCTION void NAME(decode_step)(const Decoder *d, const Step *step, const Buffers *buf,
                                Share share) {
    const int64_t hidden_stride = row_stride(d->hidden);
    const Range rows = share_of(share, step->batch);
    const int64_t first_wanted = step->batch - step->num_logits;
    const Linear lm_head = {.w = d->lm_head, .in = d->hidden, .ahead = AHEAD,
                            .x = buf->normed + first_wanted * hidden_stride,
                            .x_stride = hidden_stride,
                            .out = step->logits, .out_stride = d->num_vocab};

    for (int64_t row = rows.begin; row < rows.end; row++) {
        const weight *embedding = (const weight *)d->embedding + step->tokens[row] * d->hidden;
        for (int64_t i = 0; i < d->hidden; i++)
            buf->hidden[row * hidden_stride + i] = NAME(first_weight)(embedding + i);
    }
    for (int64_t i = 0; i < d->num_layers; i++) {
        NAME(attention)(d, &d->layers[i], step, buf, i, share);
        NAME(mlp)(d, &d->layers[i], step, buf, share);
    }
    NAME(norm_rows)(d, d->final_norm, buf, rows);
    barrier();
    NAME(linear)(&lm_head, step->num_logits, share_of(share, d->num_vocab));
}

#if DTYPE == FLOAT32
#include "cpu_chunk_attention.inc.c"
#endif

#undef vec
#undef bits
#undef half
#undef weight
#undef AHEAD
#undef Linear
#undef Values
#undef INLINE
#undef FUNCTION
#endif
