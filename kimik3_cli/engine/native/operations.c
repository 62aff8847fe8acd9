/* The small operations of one decoding step, each in one pass over its numbers: float32.
 *
 * In PyTorch each takes 4 to 40 calls, and a call costs more than its arithmetic. NaN comes out where NaN goes in. Matrix
 * products of whole layers are not made here.
 *
 * Letters: B sequences, D hidden size, H heads, K KDA head size (keys and values alike), c convolution kernel, N nope and
 * R shared slice of an MLA query, C latent width, V MLA value size.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Partial sums side by side, so that a sum needs no reordering to be vectorised: of doubles, of floats. */
#define LANES 16
#define WIDE 32
#define ROWS 32 /* of a context that are attended at a time, an even number; they stay in the first cache */
#define AHEAD 1536 /* floats: what a core asks for this early is there in time, which its own guesses miss */

/* One copy of a function for each vector width; the processor's own is chosen when the library is loaded. */
#if defined(__GNUC__) && defined(__linux__) && defined(__x86_64__)
#define FOR_EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EVERY_CPU
#endif
/* What the calling code was written for: Python refuses another number. */
const int32_t INTERFACE = 1;

#define INLINE static inline __attribute__((always_inline))

/* ---- threads: those of the OpenMP that PyTorch has loaded; threads of our own would fight with them for the cores ---- */

#if defined(__GNUC__) && defined(__linux__)
extern void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));
#else
static void (*GOMP_parallel)(void (*)(void *), void *, unsigned, unsigned) = 0;
static int (*omp_get_thread_num)(void) = 0, (*omp_get_num_threads)(void) = 0;
#endif

int has_threads(void) { return GOMP_parallel && omp_get_thread_num && omp_get_num_threads; }

/* Run work(data) in every thread, or in this one alone. */
static void in_parallel(void (*work)(void *), void *data) {
    if (has_threads()) GOMP_parallel(work, data, 0, 0);
    else work(data);
}

/* This thread's share of `count` pieces of work: [*first, *end). */
static void share(int64_t count, int64_t *first, int64_t *end) {
    int64_t thread = has_threads() ? omp_get_thread_num() : 0, threads = has_threads() ? omp_get_num_threads() : 1;
    *first = count * thread / threads;
    *end = count * (thread + 1) / threads;
}

/* SiTU with these caps; cap 0: SiLU; up_cap 0: `up` as it is. */
struct activation { float cap, up_cap; };

/* ---- elementary functions, each to about 1e-7 relative ---- */

/* e^x = 2^n e^r with |r| <= ln(2)/2 and the Taylor series of e^r; 0 and infinity beyond the normal numbers. */
INLINE float exponential(float x) {
    const float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f, to_integer = 12582912.0f; /* 1.5 * 2^23 */
    float bounded = x > 88.3f ? 88.3f : x < -87.3f ? -87.3f : x; /* NaN stays */
    float n = (bounded * 1.44269504f + to_integer) - to_integer;
    float r = (bounded - n * ln2_high) - n * ln2_low;
    float series = 1.0f / 5040;
    series = series * r + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    union { int32_t bits; float value; } power = {.bits = ((int32_t)n + 127) << 23};
    float y = series * power.value;
    return x > 88.3f ? INFINITY : x < -87.3f ? 0.0f : y;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

/* (1 - e^-2|x|) / (1 + e^-2|x|), which loses digits near 0; there the Taylor series to x^13. */
INLINE float hyperbolic_tangent(float x) {
    float square = x * x, decayed = exponential(-2.0f * fabsf(x));
    float far = copysignf((1.0f - decayed) / (1.0f + decayed), x);
    float series = 21844.0f / 6081075;
    series = series * square - 1382.0f / 155925;
    series = series * square + 62.0f / 2835;
    series = series * square - 17.0f / 315;
    series = series * square + 2.0f / 15;
    series = series * square - 1.0f / 3;
    float near = x + x * square * series;
    return square < 0.25f ? near : far;
}

/* log(1 + e^x) = max(x, 0) + 2 artanh(u / (2 + u)) with u = e^-|x|, so the series' argument is at most 1/3. */
INLINE float softplus(float x) {
    float u = exponential(-fabsf(x)), s = u / (2.0f + u), square = s * s;
    float series = 1.0f / 15;
    series = series * square + 1.0f / 13;
    series = series * square + 1.0f / 11;
    series = series * square + 1.0f / 9;
    series = series * square + 1.0f / 7;
    series = series * square + 1.0f / 5;
    series = series * square + 1.0f / 3;
    return (x > 0.0f ? x : 0.0f) + 2.0f * (s + s * square * series);
}

/* Sum of x[i] * y[i] in double, which no float32 overflows. */
INLINE double dot(const float *x, const float *y, int64_t size) {
    double partial[LANES] = {0}, total = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int lane = 0; lane < LANES; lane++) partial[lane] += (double)x[i + lane] * y[i + lane];
    for (; i < size; i++) total += (double)x[i] * y[i];
    for (int lane = 0; lane < LANES; lane++) total += partial[lane];
    return total;
}

/* out = x / hypot(|x|, floor) * weight; weight NULL counts as 1. */
INLINE void normalise(float *out, const float *x, const float *weight, int64_t size, float floor) {
    double per_length = 1.0 / sqrt(dot(x, x, size) + (double)floor * floor);
    if (weight)
        for (int64_t i = 0; i < size; i++) out[i] = (float)(x[i] * per_length) * weight[i];
    else
        for (int64_t i = 0; i < size; i++) out[i] = (float)(x[i] * per_length);
}

/* Ask for the `count` numbers that lie AHEAD of here. */
INLINE void fetch_ahead(const float *here, int64_t count) {
#ifdef __GNUC__
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(here + AHEAD + i);
#endif
}

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

/* The products of two rows with x [size] at once, out[0] and out[1]: two streams of memory are read faster than one. */
INLINE void two_products(const float *restrict first, const float *restrict second, const float *restrict x,
                         int64_t size, float *out) {
    float partial[2][WIDE] = {{0}};
    int64_t i = 0;
    for (; i + WIDE <= size; i += WIDE) {
        fetch_ahead(first + i, WIDE);
        fetch_ahead(second + i, WIDE);
        for (int lane = 0; lane < WIDE; lane++) partial[0][lane] += first[i + lane] * x[i + lane];
        for (int lane = 0; lane < WIDE; lane++) partial[1][lane] += second[i + lane] * x[i + lane];
    }
    for (int lane = 0; lane < size - i; lane++) partial[0][lane] += first[i + lane] * x[i + lane];
    for (int lane = 0; lane < size - i; lane++) partial[1][lane] += second[i + lane] * x[i + lane];
    for (int half = WIDE / 2; half; half /= 2) /* folded by halves */
        for (int lane = 0; lane < half; lane++) {
            partial[0][lane] += partial[0][lane + half];
            partial[1][lane] += partial[1][lane + half];
        }
    out[0] = partial[0][0], out[1] = partial[1][0];
}

INLINE void activate(struct activation act, int64_t size, const float *restrict gate, const float *restrict up,
                     float *restrict out) {
    if (act.cap == 0.0f) {
        for (int64_t i = 0; i < size; i++) out[i] = gate[i] * sigmoid(gate[i]) * up[i];
        return;
    }
    const float per_cap = 1.0f / act.cap, per_up_cap = 1.0f / act.up_cap;
    for (int64_t i = 0; i < size; i++) out[i] = act.cap * hyperbolic_tangent(gate[i] * per_cap) * sigmoid(gate[i]);
    if (act.up_cap > 0.0f)
        for (int64_t i = 0; i < size; i++) out[i] *= act.up_cap * hyperbolic_tangent(up[i] * per_up_cap);
    else
        for (int64_t i = 0; i < size; i++) out[i] *= up[i];
}

/* ---- what the step calls ---- */

/* RMSNorm of rows: x, out [rows,size] with steps between rows, out may be x; weight [size] is sqrt(size) times the
 * norm's, floor sqrt(size * eps). */
FOR_EVERY_CPU void rms_norm(int64_t rows, int64_t size, const float *x, int64_t x_step, const float *weight,
                            float floor, float *out, int64_t out_step) {
    for (int64_t row = 0; row < rows; row++) normalise(out + row * out_step, x + row * x_step, weight, size, floor);
}

/* RMSNorm of the depth mix of `count` sources, each [B,D]: softmax over sources of unit(source) . query. */
FOR_EVERY_CPU void mixed_norm(int64_t count, int64_t batch, int64_t size, const float *const *sources,
                              const float *query, float mix_floor, const float *weight, float floor, float *out) {
    for (int64_t b = 0; b < batch; b++) {
        float *mixed = out + b * size, scores[count], largest = -INFINITY, sum = 0;
        for (int64_t n = 0; n < count; n++) {
            const float *value = sources[n] + b * size;
            double length = sqrt(dot(value, value, size) + (double)mix_floor * mix_floor);
            scores[n] = (float)(dot(value, query, size) / length);
            largest = scores[n] > largest ? scores[n] : largest;
        }
        for (int64_t n = 0; n < count; n++) sum += scores[n] = exponential(scores[n] - largest);
        memset(mixed, 0, size * sizeof(float));
        for (int64_t n = 0; n < count; n++) {
            const float *value = sources[n] + b * size, share = scores[n] / sum;
            for (int64_t i = 0; i < size; i++) mixed[i] += share * value[i];
        }
        normalise(mixed, mixed, weight, size, floor);
    }
}

/* The gated activation: rows [rows,2*size] of gate and up side by side -> out [rows,size]. */
FOR_EVERY_CPU void gated(int64_t rows, int64_t size, const float *both, float cap, float up_cap, float *out) {
    const struct activation act = {cap, up_cap};
    for (int64_t row = 0; row < rows; row++)
        activate(act, size, both + 2 * row * size, both + (2 * row + 1) * size, out + row * size);
}

struct products {
    int64_t count, size;
    const float *x, *const *weights;
    const int64_t *rows;
    const float *total;
    float *out;
};

FOR_EVERY_CPU static void product_rows(void *data) {
    const struct products p = *(struct products *)data;
    int64_t all = 0, first, end, before = 0;
    for (int64_t n = 0; n < p.count; n++) all += p.rows[n];
    share(all, &first, &end);
    for (int64_t n = 0; n < p.count; before += p.rows[n++]) {
        const int64_t last = end < before + p.rows[n] ? end : before + p.rows[n];
        for (int64_t row = first > before ? first : before; row < last; row += 2) {
            const float *weight = p.weights[n] + (row - before) * p.size;
            float y[2];
            two_products(weight, row + 1 < last ? weight + p.size : weight, p.x, p.size, y);
            for (int64_t i = row; i < row + 2 && i < last; i++) p.out[i] = y[i - row] + (p.total ? p.total[i] : 0.0f);
        }
    }
}

/* out = total + the products of x [size] with some weights, each [rows,size], side by side; total NULL counts as 0. */
void products(int64_t count, int64_t size, const float *x, const float *const *weights, const int64_t *rows,
              const float *total, float *out) {
    struct products p = {count, size, x, weights, rows, total, out};
    in_parallel(product_rows, &p);
}

struct router {
    int64_t experts, chosen, groups, kept_groups;
    int softmax, renormalise;
    float factor;
    const float *bias;
};

/* The `count` largest values, the first of equal ones first; NaN is larger than any number. Those taken become -inf. */
static void take_largest(int64_t size, float *values, int64_t count, int64_t *taken) {
    for (int64_t n = 0; n < count; n++) {
        int64_t best = 0;
        for (int64_t i = 1; i < size; i++)
            if (values[i] > values[best] || (isnan(values[i]) && !isnan(values[best]))) best = i;
        taken[n] = best;
        values[best] = -INFINITY;
    }
}

/* Rule out experts outside the groups whose two best values sum highest. */
static void keep_groups(const struct router *r, float *biased) {
    const int64_t size = r->experts / r->groups;
    float rank[r->groups], values[size];
    int64_t best[2], kept[r->kept_groups];
    for (int64_t group = 0; group < r->groups; group++) {
        const float *of_group = biased + group * size;
        memcpy(values, of_group, size * sizeof(float));
        take_largest(size, values, 2, best);
        rank[group] = of_group[best[0]] + of_group[best[1]];
    }
    take_largest(r->groups, rank, r->kept_groups, kept);
    for (int64_t group = 0; group < r->groups; group++) {
        int is_kept = 0;
        for (int64_t n = 0; n < r->kept_groups; n++) is_kept |= kept[n] == group;
        for (int64_t i = 0; !is_kept && i < size; i++) biased[group * size + i] = -INFINITY;
    }
}

/* The chosen experts and their weights, both [chosen]: best biased scores, weighted by the scores without bias. */
static void choose(const struct router *r, const float *logits, int64_t *chosen, float *weights) {
    float scores[r->experts], biased[r->experts], largest = -INFINITY, all = 0, sum = 0;
    for (int64_t i = 0; i < r->experts; i++) largest = logits[i] > largest ? logits[i] : largest;
    for (int64_t i = 0; i < r->experts; i++)
        scores[i] = r->softmax ? exponential(logits[i] - largest) : sigmoid(logits[i]);
    for (int64_t i = 0; i < r->experts; i++) all += scores[i];
    for (int64_t i = 0; r->softmax && i < r->experts; i++) scores[i] /= all;
    for (int64_t i = 0; i < r->experts; i++) biased[i] = scores[i] + r->bias[i];
    if (r->groups > 1) keep_groups(r, biased);
    take_largest(r->experts, biased, r->chosen, chosen);
    for (int64_t n = 0; n < r->chosen; n++) sum += weights[n] = scores[chosen[n]];
    for (int64_t n = 0; n < r->chosen; n++) weights[n] *= r->factor / (r->renormalise ? sum + 1e-20f : 1.0f);
}

struct experts {
    int64_t chosen, size, width;
    const int64_t *experts;
    const float *x, *const *w1, *const *w3, *const *w2, *weights;
    struct activation act;
    const float *total;
    float *gate, *up, *inner, *out;
};

/* Rows of w1 and w3, each one a channel of an expert's inner width. */
FOR_EVERY_CPU static void experts_inner(void *data) {
    const struct experts e = *(struct experts *)data;
    int64_t first, end;
    share(e.chosen * e.width, &first, &end);
    for (int64_t row = first; row < end; row++) {
        const int64_t expert = e.experts[row / e.width], at = row % e.width * e.size;
        float y[2];
        two_products(e.w1[expert] + at, e.w3[expert] + at, e.x, e.size, y);
        e.gate[row] = y[0], e.up[row] = y[1];
    }
    activate(e.act, end - first, e.gate + first, e.up + first, e.inner + first);
    for (int64_t row = first; row < end; row++) e.inner[row] *= e.weights[row / e.width];
}

/* Rows of w2, each one a channel of the output, summed over the experts. */
FOR_EVERY_CPU static void experts_outer(void *data) {
    const struct experts e = *(struct experts *)data;
    int64_t first, end;
    share(e.size, &first, &end);
    for (int64_t row = first; row < end; row++) e.out[row] = e.total[row];
    for (int64_t n = 0; n < e.chosen; n++)
        for (int64_t row = first; row < end; row += 2) {
            const float *weight = e.w2[e.experts[n]] + row * e.width;
            float y[2];
            two_products(weight, row + 1 < end ? weight + e.width : weight, e.inner + n * e.width, e.width, y);
            for (int64_t i = row; i < row + 2 && i < end; i++) e.out[i] += y[i - row];
        }
}

/* out = total + sum over chosen experts of weight * w2 act(w1 x, w3 x), one token: logits [experts]; x, total, out
 * [size]; w1, w3 [width,size] and w2 [size,width] of every expert; gate, up, inner [chosen,width] are working memory. */
void routed_experts(int64_t experts, int64_t chosen, int64_t groups, int64_t kept_groups, int softmax, int renormalise,
                    float factor, const float *bias, int64_t size, int64_t width, const float *const *w1,
                    const float *const *w3, const float *const *w2, float cap, float up_cap, float *gate, float *up,
                    float *inner, float *out, const float *logits, const float *x, const float *total) {
    struct router r = {experts, chosen, groups, kept_groups, softmax, renormalise, factor, bias};
    int64_t indices[chosen];
    float weights[chosen];
    choose(&r, logits, indices, weights);
    struct experts e = {chosen, size, width, indices, x, w1, w3, w2, weights, {cap, up_cap}, total, gate, up, inner, out};
    in_parallel(experts_inner, &e);
    in_parallel(experts_outer, &e);
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
        normalise(q, q, 0, size, 1e-3f);
        normalise(k, k, 0, size, 1e-3f);
        if (a.bounded)
            for (int64_t i = 0; i < size; i++) decay[i] = exponential(a.lower_bound * sigmoid(z[i] * a.rate[h]));
        else
            for (int64_t i = 0; i < size; i++) decay[i] = exponential(softplus(z[i]) * a.rate[h]);
        delta_rule(size, q, k, v, decay, sigmoid(a.beta[b * a.beta_step + h]), a.memory + n * size * size, error, z);
        normalise(z, z, a.out_weight, size, a.out_floor);
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
    in_parallel(kda_heads, &a);
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

/* One head's attention to some more rows: the running largest score, sum of weights and weighted sum of latents are
 * partial[0], partial[1] and the rest (online softmax, arXiv 1805.02867). */
INLINE void attend(int64_t count, int64_t width, int64_t latent, const float *query, const float *rows, float *partial) {
    float scores[ROWS + 1], largest = partial[0], *restrict sum = partial + 2;
    for (int64_t row = 0; row < count; row += 2) {
        const float *first = rows + row * width;
        two_products(first, row + 1 < count ? first + width : first, query, width, scores + row);
    }
    for (int64_t row = 0; row < count; row++) largest = scores[row] > largest ? scores[row] : largest;
    const float kept = exponential(partial[0] - largest);
    partial[0] = largest;
    partial[1] *= kept;
    for (int64_t c = 0; c < latent; c++) sum[c] *= kept;
    for (int64_t row = 0; row < count; row++) scores[row] = exponential(scores[row] - largest);
    for (int64_t row = 0; row < count; row++) {
        partial[1] += scores[row];
        for (int64_t c = 0; c < latent; c++) sum[c] += scores[row] * rows[row * width + c];
    }
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
    in_parallel(mla_queries, &a);
    in_parallel(mla_pieces, &a);
    in_parallel(mla_values, &a);
}
