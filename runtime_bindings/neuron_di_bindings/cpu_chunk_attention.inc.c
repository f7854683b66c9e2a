/* Causal attention of a prompt's chunk over the paged pool, for one instruction set, in float32.
 * Included by cpu_decode_step.inc.c.
 *
 * Keys are packed once per chunk: KEY_PANEL of them side by side for each dim, so that a product
 * of queries and keys needs no sum over lanes. Then each tile, the queries of some positions that
 * share a KV head, walks over the keys it may see in groups, with a running maximum and sum
 * (FlashAttention, Dao et al. 2022). Keys behind a tile's last position cost nothing.
 */

enum {
    NAME(KEY_PANEL) = 2 * LANES,
    NAME(SCORE_ROWS) = MAX_ACCUMULATORS / 2, /* of a tile's rows at a time, for 2 vectors of keys */
    NAME(VALUE_ROWS) = MAX_ACCUMULATORS / 4, /* the same for 4 vectors of dims */
};

/* A masked score: its exponential is 0 beside any real one, and it is no NaN less itself. */
#define MASKED (-1e30f)

/* The panel's keys of one KV head as [D, KEY_PANEL]; zeros behind the last. */
INLINE void NAME(pack_panel)(const Decoder *d, const Chunk *c, int64_t kv_head, Range keys,
                             float *packed) {
    for (int64_t j = 0; j < NAME(KEY_PANEL); j++) {
        const bool is_key = keys.begin + j < keys.end;
        const float *key = is_key ? key_of(d, c, kv_head, keys.begin + j) : NULL;
        for (int64_t i = 0; i < d->head_dim; i++)
            packed[i * NAME(KEY_PANEL) + j] = is_key ? key[i] : 0.0f;
    }
}

/* scores[row][0, KEY_PANEL) = queries[row] . keys, for SCORE_ROWS rows. */
INLINE void NAME(score_rows)(const float *queries, const float *packed, int64_t head_dim,
                             float *scores) {
    vec sums[NAME(SCORE_ROWS)][2];
#pragma GCC unroll 12
    for (int row = 0; row < NAME(SCORE_ROWS); row++) sums[row][0] = sums[row][1] = (vec){0};
    for (int64_t i = 0; i < head_dim; i++) {
        const vec low = NAME(load)(packed + i * NAME(KEY_PANEL));
        const vec high = NAME(load)(packed + i * NAME(KEY_PANEL) + LANES);
#pragma GCC unroll 12
        for (int row = 0; row < NAME(SCORE_ROWS); row++) {
            sums[row][0] += low * queries[row * head_dim + i];
            sums[row][1] += high * queries[row * head_dim + i];
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < NAME(SCORE_ROWS); row++) {
        NAME(store)(scores + row * SCORE_STRIDE, sums[row][0]);
        NAME(store)(scores + row * SCORE_STRIDE + LANES, sums[row][1]);
    }
}

/* out[row] += weights[row] @ values for `vectors` vectors of dims and VALUE_ROWS rows. */
INLINE void NAME(add_value_rows)(const Decoder *d, const Chunk *c, int64_t kv_head, Range keys,
                                 int64_t dim, const float *weights, float *out, int vectors) {
    vec sums[NAME(VALUE_ROWS)][4];
#pragma GCC unroll 8
    for (int row = 0; row < NAME(VALUE_ROWS); row++)
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            sums[row][i] = NAME(load)(out + row * d->head_dim + dim + i * LANES);
    for (int64_t p = keys.begin, end; p < keys.end; p = end) {
        end = min64(p - p % d->block_size + d->block_size, keys.end);
        const float *value = value_of(d, c, kv_head, p) + dim;
        const float *weight_of = weights + p - keys.begin;
        for (int64_t s = 0; s < end - p; s++, value += d->head_dim)
#pragma GCC unroll 8
            for (int row = 0; row < NAME(VALUE_ROWS); row++)
#pragma GCC unroll 4
                for (int i = 0; i < vectors; i++)
                    sums[row][i] += NAME(load)(value + i * LANES) * weight_of[row * SCORE_STRIDE + s];
    }
#pragma GCC unroll 8
    for (int row = 0; row < NAME(VALUE_ROWS); row++)
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            NAME(store)(out + row * d->head_dim + dim + i * LANES, sums[row][i]);
}

FUNCTION void NAME(add_value_group)(const Decoder *d, const Chunk *c, int64_t kv_head, Range keys,
                                    const float *weights, float *out) {
    const int64_t D = d->head_dim;
    int64_t i = 0;
    for (; i + 4 * LANES <= D; i += 4 * LANES)
        NAME(add_value_rows)(d, c, kv_head, keys, i, weights, out, 4);
    for (; i + LANES <= D; i += LANES)
        NAME(add_value_rows)(d, c, kv_head, keys, i, weights, out, 1);
    for (; i < D; i++)
        for (int row = 0; row < NAME(VALUE_ROWS); row++)
            for (int64_t p = keys.begin; p < keys.end; p++)
                out[row * D + i] +=
                    weights[row * SCORE_STRIDE + p - keys.begin] * value_of(d, c, kv_head, p)[i];
}

/* scores[0, count) become weights against the row's running maximum; out and sum follow it. */
INLINE void NAME(weigh_row)(float *scores, int64_t count, float *maximum, float *sum, float *out,
                            int64_t head_dim) {
    vec top = NAME(splat)(*maximum), total = {0};
    float largest = *maximum;
    for (int64_t i = 0; i < count; i += LANES) {
        const vec s = NAME(load)(scores + i);
        top = NAME(select)((bits)(s > top), s, top);
    }
    for (int i = 0; i < LANES; i++) largest = top[i] > largest ? top[i] : largest;
    for (int64_t i = 0; i < count; i += LANES) {
        const vec e = NAME(exp)(NAME(load)(scores + i) - largest);
        NAME(store)(scores + i, e);
        total += e;
    }
    const float shrink = NAME(exp)(NAME(splat)(*maximum - largest))[0];
    *sum = *sum * shrink + NAME(sum_lanes)(total);
    *maximum = largest;
    if (shrink != 1.0f)
        for (int64_t i = 0; i < head_dim; i++) out[i] *= shrink;
}

/* The queries of positions `span` (of the chunk) in the heads that share one KV head. */
FUNCTION void NAME(attend_tile)(const Decoder *d, const Chunk *c, const ChunkBuffers *buf,
                                int64_t kv_head, Range span, float *scratch) {
    const int64_t D = d->head_dim, heads = d->num_heads / d->num_kv_heads;
    const int64_t num_rows = (span.end - span.begin) * heads, rows = buf->tile_rows;
    const float scale = 1.0f / sqrtf((float)D);
    float *queries = scratch, *out = queries + rows * D, *scores = out + rows * D;
    float *maxima = scores + rows * SCORE_STRIDE, *sums = maxima + rows;
    memset(queries, 0, 2 * rows * D * sizeof(float));
    for (int64_t row = 0; row < rows; row++) maxima[row] = MASKED, sums[row] = 0.0f;
    for (int64_t row = 0; row < num_rows; row++) {
        const float *query = c->queries + (span.begin + row / heads) * c->query_stride +
                             (kv_head * heads + row % heads) * D;
        for (int64_t i = 0; i < D; i++) queries[row * D + i] = query[i] * scale;
    }
    const Range seen = {first_seen(d, c->start + span.begin), c->start + span.end};
    const int64_t first = buf->first_key + (seen.begin - buf->first_key) / KEY_GROUP * KEY_GROUP;
    for (int64_t p = first; p < seen.end; p += KEY_GROUP) {
        const Range keys = {p, min64(p + KEY_GROUP, seen.end)};
        const int64_t panels = (keys.end - p + NAME(KEY_PANEL) - 1) / NAME(KEY_PANEL);
        const float *packed = buf->packed + (kv_head * buf->num_keys + p - buf->first_key) * D;
        for (int64_t panel = 0; panel < panels; panel++)
            for (int64_t row = 0; row < num_rows; row += NAME(SCORE_ROWS))
                NAME(score_rows)(queries + row * D, packed + panel * NAME(KEY_PANEL) * D, D,
                                 scores + row * SCORE_STRIDE + panel * NAME(KEY_PANEL));
        for (int64_t row = 0; row < num_rows; row++) {
            const int64_t position = c->start + span.begin + row / heads;
            float *row_scores = scores + row * SCORE_STRIDE;
            for (int64_t i = p; i < min64(first_seen(d, position), keys.end); i++)
                row_scores[i - p] = MASKED;
            for (int64_t i = max64(position + 1, p); i < p + panels * NAME(KEY_PANEL); i++)
                row_scores[i - p] = MASKED;
            NAME(weigh_row)(row_scores, panels * NAME(KEY_PANEL), maxima + row, sums + row,
                            out + row * D, D);
        }
        for (int64_t row = 0; row < num_rows; row += NAME(VALUE_ROWS))
            NAME(add_value_group)(d, c, kv_head, keys, scores + row * SCORE_STRIDE, out + row * D);
    }
    for (int64_t row = 0; row < num_rows; row++) {
        float *to = c->out + ((span.begin + row / heads) * d->num_heads + kv_head * heads +
                              row % heads) * D;
        for (int64_t i = 0; i < D; i++) to[i] = out[row * D + i] / sums[row];
    }
}

FUNCTION void NAME(attend_chunk)(const Decoder *d, const Chunk *c, const ChunkBuffers *buf,
                                 Share share) {
    const int64_t K = d->num_kv_heads, panels = buf->num_keys / NAME(KEY_PANEL);
    const Range packing = share_of(share, K * panels);
    for (int64_t i = packing.begin; i < packing.end; i++) {
        const int64_t begin = buf->first_key + i % panels * NAME(KEY_PANEL);
        NAME(pack_panel)(d, c, i / panels, (Range){begin, c->start + c->count},
                         buf->packed + i * NAME(KEY_PANEL) * d->head_dim);
    }
    barrier();
    const int64_t tiles = (c->count + buf->tile_positions - 1) / buf->tile_positions;
    float *scratch = buf->scratch + share.index * buf->scratch_size;
    /* In turns, because later tiles see more keys. */
    for (int64_t i = share.index; i < K * tiles; i += share.count) {
        const int64_t begin = i / K * buf->tile_positions;
        const Range span = {begin, min64(begin + buf->tile_positions, c->count)};
        NAME(attend_tile)(d, c, buf, i % K, span, scratch);
    }
}

#undef MASKED
