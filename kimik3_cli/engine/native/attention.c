/* What the two attention layers do with one token between their projections, float32.
 *
 * Letters: B sequences, H heads, K KDA head size (keys and values alike), c convolution kernel, N nope and R shared slice
 * of an MLA query, C latent width, V MLA value size.
 */

#include "shared.h"

#define ROWS 16 /* of a context that are attended at a time; they stay in the first cache, for one head after another */

/* S = diag(decay) S; S = S + k (strength (v - S^T k))^T; o = S^T q: `kda_step`; error [size] is working memory. */
INLINE void delta_rule(int64_t size, const float *restrict q, const float *restrict k, const float *restrict v,
                       const float *restrict decay, float strength, float *restrict state, float *restrict error,
                       float *restrict o) {
    memset(error, 0, size * sizeof(float));
    for (int64_t i = 0; i < size; i++) {
        fetch_ahead(state + i * size, size);
        for (int64_t j = 0; j < size; j++) {
            state[i * size + j] *= decay[i];
            error[j] += k[i] * state[i * size + j];
        }
    }
    for (int64_t j = 0; j < size; j++) error[j] = strength * (v[j] - error[j]);
    memset(o, 0, size * sizeof(float));
    for (int64_t i = 0; i < size; i++)
        for (int64_t j = 0; j < size; j++) {
            state[i * size + j] += k[i] * error[j];
            o[j] += q[i] * state[i * size + j];
        }
}

/* out = SiLU of the taps [c,size] over `before` [c-1,size] and x [size], whose rows are `step` apart; x becomes the last
 * row of `before`. */
INLINE void short_convolution(int64_t size, int64_t kernel, int64_t step, const float *restrict x,
                              const float *restrict taps, float *restrict before, float *restrict out) {
    const int64_t last = kernel - 1;
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * taps[last * step + i];
    for (int64_t j = 0; j < last; j++)
        for (int64_t i = 0; i < size; i++) out[i] += taps[j * step + i] * before[j * step + i];
    for (int64_t i = 0; i < size; i++) out[i] *= sigmoid(out[i]);
    for (int64_t j = 0; j < last; j++) memcpy(before + j * step, j + 1 < last ? before + (j + 1) * step : x, size * sizeof(float));
}

struct kda {
    int64_t batch, heads, size, kernel;
    const float *qkv, *beta, *gate, *taps, *rate, *out_weight;
    int64_t qkv_step, beta_step, gate_step;
    int bounded;
    float lower_bound, out_floor;
    float *tail, *memory, *z;
};

FOR_EVERY_CPU static void kda_heads(void *data) {
    const struct kda a = *(struct kda *)data;
    const int64_t size = a.size, channels = a.heads * size, width = 3 * channels;
    float mixed[3][size], *q = mixed[0], *k = mixed[1], *v = mixed[2], decay[size], error[size];
    int64_t first, end;
    share(a.batch * a.heads, &first, &end);
    for (int64_t n = first; n < end; n++) {
        const int64_t b = n / a.heads, h = n % a.heads;
        const float *gate = a.gate + b * a.gate_step + h * size;
        float *z = a.z + n * size;
        for (int part = 0; part < 3; part++) {
            const int64_t at = part * channels + h * size;
            short_convolution(size, a.kernel, width, a.qkv + b * a.qkv_step + at, a.taps + at,
                              a.tail + b * (a.kernel - 1) * width + at, mixed[part]);
        }
        normalise(q, q, 0, size, 1.0f, 1e-3f);
        normalise(k, k, 0, size, 1.0f, 1e-3f);
        if (a.bounded)
            for (int64_t i = 0; i < size; i++) decay[i] = exponential(a.lower_bound * sigmoid(z[i] * a.rate[h]));
        else
            for (int64_t i = 0; i < size; i++) decay[i] = exponential(softplus(z[i]) * a.rate[h]);
        delta_rule(size, q, k, v, decay, sigmoid(a.beta[b * a.beta_step + h]), a.memory + n * size * size, error, z);
        normalise(z, z, a.out_weight, size, 1.0f, a.out_floor);
        for (int64_t i = 0; i < size; i++) z[i] *= sigmoid(gate[i]);
    }
}

/* Everything of a KDA layer between its projections; tail and memory are advanced, z becomes the result.
 *
 * qkv [B,3*H*K], beta [B,H] and gate [B,H,K] with steps between sequences; z [B,H,K]; taps [c,3*H*K]; rate [H];
 * out_weight [K]; tail [B,c-1,3*H*K]; memory [B,H,K,K], keys by values.
 */
void kda_token(int64_t batch, int64_t heads, int64_t size, int64_t kernel, const float *qkv, int64_t qkv_step,
               float *z, const float *beta, int64_t beta_step, const float *gate, int64_t gate_step,
               const float *taps, const float *rate, int bounded, float lower_bound, const float *out_weight,
               float out_floor, float *tail, float *memory) {
    struct kda a = {batch, heads, size, kernel, qkv, beta, gate, taps, rate, out_weight, qkv_step, beta_step, gate_step,
                    bounded, lower_bound, out_floor, tail, memory, z};
    in_parallel(batch * heads * size * size, kda_heads, &a);
}

struct mla {
    int64_t batch, heads, nope, shared, latent, value, length, pieces;
    const float *q, *expand, *rows, *gate;
    int64_t q_step, rows_step, gate_step;
    float scale, *queries, *partial, *out;
};

/* Queries on the latents: the part without a shared key through kv_b_proj, the shared part as it is; scaled. */
FOR_EVERY_CPU static void mla_queries(void *data) {
    const struct mla a = *(struct mla *)data;
    int64_t first, end;
    share(a.batch * a.heads, &first, &end);
    for (int64_t n = first; n < end; n++) {
        const int64_t b = n / a.heads, h = n % a.heads, width = a.latent + a.shared;
        const float *q = a.q + b * a.q_step + h * (a.nope + a.shared);
        const float *to_key = a.expand + h * (a.nope + a.value) * a.latent;
        float *restrict query = a.queries + n * width;
        memset(query, 0, a.latent * sizeof(float));
        for (int64_t i = 0; i < a.nope; i++) {
            fetch_ahead(to_key + i * a.latent, a.latent);
            for (int64_t c = 0; c < a.latent; c++) query[c] += q[i] * to_key[i * a.latent + c];
        }
        for (int64_t c = 0; c < a.shared; c++) query[a.latent + c] = q[a.nope + c];
        for (int64_t c = 0; c < width; c++) query[c] *= a.scale;
    }
}

/* The products of four rows, `step` apart, with x [size]; rows that lie in the cache. */
INLINE void four_products(const float *restrict rows, int64_t step, const float *restrict x, int64_t size, float *out) {
    eight partial[4][2] = {{{0}}};
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
        const eight *y = (const eight *)(x + i);
        for (int row = 0; row < 4; row++) {
            const eight *numbers = (const eight *)(rows + row * step + i);
            partial[row][0] += numbers[0] * y[0];
            partial[row][1] += numbers[1] * y[1];
        }
    }
    for (int row = 0; row < 4; row++) {
        eight both = partial[row][0] + partial[row][1];
        float sum = ((both[0] + both[4]) + (both[1] + both[5])) + ((both[2] + both[6]) + (both[3] + both[7]));
        for (int64_t rest = i; rest < size; rest++) sum += rows[row * step + rest] * x[rest];
        out[row] = sum;
    }
}

/* One head's attention to some more rows: the running largest score, sum of weights and weighted sum of latents are
 * partial[0], partial[1] and the rest (online softmax, arXiv 1805.02867). */
INLINE void attend(int64_t count, int64_t width, int64_t latent, const float *query, const float *rows, float *partial) {
    float scores[ROWS], largest = partial[0], *restrict sum = partial + 2;
    int64_t row = 0;
    for (; row + 4 <= count; row += 4) four_products(rows + row * width, width, query, width, scores + row);
    for (; row < count; row++) scores[row] = (float)dot(rows + row * width, query, width);
    for (int64_t row = 0; row < count; row++) largest = scores[row] > largest ? scores[row] : largest;
    const float kept = exponential(partial[0] - largest);
    partial[0] = largest;
    partial[1] *= kept;
    for (int64_t c = 0; c < latent; c++) sum[c] *= kept;
    for (int64_t row = 0; row < count; row++) scores[row] = exponential(scores[row] - largest);
    for (int64_t row = 0; row < count; row++) partial[1] += scores[row];
    add_row(count, latent, 1.0f, scores, rows, width, sum);
}

/* Pieces of the context, each for all heads, so that every row is read from memory once. */
FOR_EVERY_CPU static void mla_pieces(void *data) {
    const struct mla a = *(struct mla *)data;
    const int64_t width = a.latent + a.shared, step = a.latent + 2;
    int64_t first, end;
    share(a.batch * a.pieces, &first, &end);
    for (int64_t n = first; n < end; n++) {
        const int64_t b = n / a.pieces, piece = n % a.pieces;
        const int64_t from = a.length * piece / a.pieces, to = a.length * (piece + 1) / a.pieces;
        float *partial = a.partial + n * a.heads * step;
        memset(partial, 0, a.heads * step * sizeof(float));
        for (int64_t h = 0; h < a.heads; h++) partial[h * step] = -INFINITY;
        for (int64_t row = from; row < to; row += ROWS)
            for (int64_t h = 0; h < a.heads; h++)
                attend(to - row < ROWS ? to - row : ROWS, width, a.latent, a.queries + (b * a.heads + h) * width,
                       a.rows + b * a.rows_step + row * width, partial + h * step);
    }
}

/* The pieces put together, through kv_b_proj to values, times the gate. */
FOR_EVERY_CPU static void mla_values(void *data) {
    const struct mla a = *(struct mla *)data;
    const int64_t step = a.latent + 2;
    int64_t first, end;
    share(a.batch * a.heads, &first, &end);
    for (int64_t n = first; n < end; n++) {
        const int64_t b = n / a.heads, h = n % a.heads;
        const float *partial = a.partial + (b * a.pieces * a.heads + h) * step;
        const float *to_value = a.expand + (h * (a.nope + a.value) + a.nope) * a.latent;
        float attended[a.latent], largest = -INFINITY, weights = 0, y[2];
        memset(attended, 0, sizeof attended);
        for (int64_t piece = 0; piece < a.pieces; piece++) {
            const float candidate = partial[piece * a.heads * step];
            largest = candidate > largest ? candidate : largest;
        }
        for (int64_t piece = 0; piece < a.pieces; piece++) {
            const float *of_piece = partial + piece * a.heads * step, kept = exponential(of_piece[0] - largest);
            weights += kept * of_piece[1];
            for (int64_t c = 0; c < a.latent; c++) attended[c] += kept * of_piece[2 + c];
        }
        for (int64_t c = 0; c < a.latent; c++) attended[c] /= weights;
        for (int64_t i = 0; i < a.value; i += 2) {
            const float *row = to_value + i * a.latent;
            two_products(row, i + 1 < a.value ? row + a.latent : row, attended, a.latent, y);
            for (int64_t j = i; j < i + 2 && j < a.value; j++) a.out[n * a.value + j] = y[j - i];
        }
        for (int64_t i = 0; a.gate && i < a.value; i++)
            a.out[n * a.value + i] *= sigmoid(a.gate[b * a.gate_step + h * a.value + i]);
    }
}

/* Attention of one token to the latents of `length` tokens, kv_b_proj absorbed into query and output.
 *
 * q [B,H,N+R] and gate [B,H*V] or NULL with steps between sequences; expand [H,N+V,C] is kv_b_proj; rows [B,length,C+R]
 * with a step between sequences; out [B,H*V]; queries [B,H,C+R] and partial [B,pieces,H,C+2] are working memory.
 */
void mla_token(int64_t batch, int64_t heads, int64_t nope, int64_t shared, int64_t latent, int64_t value, float scale,
               const float *q, int64_t q_step, const float *expand, const float *gate, int64_t gate_step,
               int64_t pieces, float *queries, float *partial, float *out, const float *rows, int64_t rows_step,
               int64_t length) {
    struct mla a = {batch, heads, nope, shared, latent, value, length, pieces, q, expand, rows, gate,
                    q_step, rows_step, gate_step, scale, queries, partial, out};
    in_parallel(batch * heads * nope * latent, mla_queries, &a);
    in_parallel(2 * batch * heads * length * latent, mla_pieces, &a);
    in_parallel(batch * heads * value * latent, mla_values, &a);
}
