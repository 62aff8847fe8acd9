/* The delta rule over many tokens, chunk by chunk, float32: `kda_chunkwise`, one head's chunk at a time in the cache.
 *
 * The formulas and the walk over block sizes are explained there. In a block of s tokens, q_in and beta_k_in hold the
 * decay from the block's start, k_out the decay to its end, so every factor is in (0,1].
 *
 * Letters: B sequences, T tokens, H heads, K key channels, V value channels, C chunk.
 */

#include "shared.h"

struct chunks {
    int64_t batch, time, heads, keys, values, chunk;
    const float *q, *k, *v, *g, *beta;
    float *state, *work, *out;
};

/* One head's working memory; [rows][columns], row after row. */
struct head {
    float *q_in, *beta_k_in; /* [C][K] */
    float *k_out;            /* [K][C] */
    float *decay;            /* [C][K]: of a block, at its first token */
    float *whole;            /* [K], log decay over the chunk */
    float *scores, *inverse; /* [C][C], below and on the diagonal */
    float *below, *product;  /* [C/2][C/2] at most */
    float *rest, *u;         /* [C][V] */
};

static int64_t floats_of_head(int64_t chunk, int64_t keys, int64_t values) {
    return 4 * chunk * keys + keys + 2 * chunk * chunk + chunk * chunk / 2 + 2 + 2 * chunk * values;
}

static struct head head_at(float *work, int64_t chunk, int64_t keys, int64_t values) {
    struct head w;
    w.q_in = work;
    w.beta_k_in = w.q_in + chunk * keys;
    w.k_out = w.beta_k_in + chunk * keys;
    w.decay = w.k_out + chunk * keys;
    w.whole = w.decay + chunk * keys;
    w.scores = w.whole + keys;
    w.inverse = w.scores + chunk * chunk;
    w.below = w.inverse + chunk * chunk;
    w.product = w.below + chunk * chunk / 4 + 1;
    w.rest = w.product + chunk * chunk / 4 + 1;
    w.u = w.rest + chunk * values;
    return w;
}

/* Blocks of one token. Past the last token k, q and beta are 0, which write nothing, and g is 0, which forgets nothing. */
INLINE void single_tokens(const struct chunks *a, const struct head *w, int64_t b, int64_t h, int64_t start) {
    const int64_t C = a->chunk, K = a->keys;
    memset(w->scores, 0, C * C * sizeof(float));
    memset(w->inverse, 0, C * C * sizeof(float));
    memset(w->whole, 0, K * sizeof(float));
    for (int64_t i = 0; i < C; i++) {
        const int64_t t = (b * a->time + start + i) * a->heads + h;
        const int exists = start + i < a->time;
        const float beta = exists ? a->beta[t] : 0.0f;
        float *restrict q_in = w->q_in + i * K, *restrict beta_k = w->beta_k_in + i * K, *restrict decay = w->decay + i * K;
        w->inverse[i * C + i] = 1.0f;
        if (exists) {
            const float *restrict q = a->q + t * K, *restrict k = a->k + t * K, *restrict g = a->g + t * K;
            w->scores[i * C + i] = (float)dot(q, k, K);
            for (int64_t d = 0; d < K; d++) decay[d] = exponential(g[d]);
            for (int64_t d = 0; d < K; d++) q_in[d] = q[d] * decay[d];
            for (int64_t d = 0; d < K; d++) beta_k[d] = beta * k[d] * decay[d];
            for (int64_t d = 0; d < K; d++) w->whole[d] += g[d];
        } else {
            memset(q_in, 0, K * sizeof(float));
            memset(beta_k, 0, K * sizeof(float));
            for (int64_t d = 0; d < K; d++) decay[d] = 1.0f;
        }
        for (int64_t d = 0; d < K; d++) w->k_out[d * C + i] = exists ? a->k[t * K + d] : 0.0f;
    }
}

/* Join the blocks of s tokens at `left` and `right`. */
INLINE void join_blocks(const struct chunks *a, const struct head *w, int64_t left, int64_t s) {
    const int64_t C = a->chunk, K = a->keys, right = left + s;
    memset(w->below, 0, s * s * sizeof(float));
    memset(w->product, 0, s * s * sizeof(float));
    for (int64_t i = 0; i < s; i++) {
        add_row(K, s, 1.0f, w->q_in + (right + i) * K, w->k_out + left, C, w->scores + (right + i) * C + left);
        add_row(K, s, 1.0f, w->beta_k_in + (right + i) * K, w->k_out + left, C, w->below + i * s);
        add_row(s, s, 1.0f, w->below + i * s, w->inverse + left * C + left, C, w->product + i * s);
    }
    for (int64_t i = 0; i < s; i++)
        add_row(i + 1, s, -1.0f, w->inverse + (right + i) * C + right, w->product, s, w->inverse + (right + i) * C + left);
    float *restrict of_left = w->decay + left * K, *restrict of_right = w->decay + right * K;
    for (int64_t i = 0; i < s; i++)
        for (int64_t d = 0; d < K; d++) w->q_in[(right + i) * K + d] *= of_left[d];
    for (int64_t i = 0; i < s; i++)
        for (int64_t d = 0; d < K; d++) w->beta_k_in[(right + i) * K + d] *= of_left[d];
    for (int64_t d = 0; d < K; d++)
        for (int64_t i = 0; i < s; i++) w->k_out[d * C + left + i] *= of_right[d];
    for (int64_t d = 0; d < K; d++) of_left[d] *= of_right[d];
}

/* u = inverse (beta v - beta_k_in S); o = q_in S + scores u; S = e^whole S + k_out u. */
INLINE void through_state(const struct chunks *a, const struct head *w, int64_t b, int64_t h, int64_t start) {
    const int64_t C = a->chunk, K = a->keys, V = a->values, count = a->time - start < C ? a->time - start : C;
    float *state = a->state + (b * a->heads + h) * K * V;
    for (int64_t i = 0; i < count; i++) {
        const int64_t t = (b * a->time + start + i) * a->heads + h;
        float *restrict rest = w->rest + i * V, *restrict out = a->out + t * V;
        const float *restrict v = a->v + t * V;
        for (int64_t j = 0; j < V; j++) rest[j] = a->beta[t] * v[j];
        add_row(K, V, -1.0f, w->beta_k_in + i * K, state, V, rest);
        memset(out, 0, V * sizeof(float));
        add_row(K, V, 1.0f, w->q_in + i * K, state, V, out);
    }
    for (int64_t i = 0; i < count; i++) {
        memset(w->u + i * V, 0, V * sizeof(float));
        add_row(i + 1, V, 1.0f, w->inverse + i * C, w->rest, V, w->u + i * V);
    }
    for (int64_t i = 0; i < count; i++) {
        const int64_t t = (b * a->time + start + i) * a->heads + h;
        add_row(i + 1, V, 1.0f, w->scores + i * C, w->u, V, a->out + t * V);
    }
    for (int64_t d = 0; d < K; d++) {
        const float decay = exponential(w->whole[d]);
        for (int64_t j = 0; j < V; j++) state[d * V + j] *= decay;
        add_row(count, V, 1.0f, w->k_out + d * C, w->u, V, state + d * V);
    }
}

FOR_EVERY_CPU static void chunk_heads(void *data) {
    const struct chunks a = *(struct chunks *)data;
    int64_t first, end;
    share(a.batch * a.heads, &first, &end);
    for (int64_t n = first; n < end; n++) {
        const struct head w = head_at(a.work + n * floats_of_head(a.chunk, a.keys, a.values), a.chunk, a.keys, a.values);
        for (int64_t start = 0; start < a.time; start += a.chunk) {
            single_tokens(&a, &w, n / a.heads, n % a.heads, start);
            for (int64_t s = 1; s < a.chunk; s *= 2)
                for (int64_t left = 0; left < a.chunk; left += 2 * s) join_blocks(&a, &w, left, s);
            through_state(&a, &w, n / a.heads, n % a.heads, start);
        }
    }
}

/* Floats of working memory that `kda_chunks` needs. */
int64_t kda_chunks_work(int64_t batch, int64_t heads, int64_t keys, int64_t values, int64_t chunk) {
    return batch * heads * floats_of_head(chunk, keys, values);
}

/* q, k, g [B,T,H,K], v, out [B,T,H,V], beta [B,T,H]; state [B,H,K,V] is advanced. */
void kda_chunks(int64_t batch, int64_t time, int64_t heads, int64_t keys, int64_t values, int64_t chunk, const float *q,
                const float *k, const float *v, const float *g, const float *beta, float *state, float *work,
                float *out) {
    struct chunks a = {batch, time, heads, keys, values, chunk, q, k, v, g, beta, state, work, out};
    in_parallel(batch * heads * time * keys, chunk_heads, &a);
}
