/* The small operations of one decoding step, each in one pass over its few kilobytes: float32, contiguous, one thread.
 *
 * In PyTorch each takes 4 to 40 calls, and a call costs more than its arithmetic. NaN comes out where NaN goes in. Matrix
 * products are not made here.
 *
 * Letters: B sequences, D hidden size, H heads, K head size (keys and values alike), c convolution kernel.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16 /* partial sums side by side, so that a sum needs no reordering to be vectorised */

/* One copy of a function for each vector width; the processor's own is chosen when the library is loaded. */
#if defined(__GNUC__) && defined(__linux__) && defined(__x86_64__)
#define FOR_EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EVERY_CPU
#endif
/* What the calling code was written for: Python refuses another number. */
const int32_t INTERFACE = 1;

#define INLINE static inline __attribute__((always_inline))

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

/* S = diag(decay) S; S = S + k (strength (v - S^T k))^T; o = S^T q: `kda_step`; error [size] is working memory. */
INLINE void delta_rule(int64_t size, const float *restrict q, const float *restrict k, const float *restrict v,
                       const float *restrict decay, float strength, float *restrict state, float *restrict error,
                       float *restrict o) {
    memset(error, 0, size * sizeof(float));
    for (int64_t i = 0; i < size; i++)
        for (int64_t j = 0; j < size; j++) {
            state[i * size + j] *= decay[i];
            error[j] += k[i] * state[i * size + j];
        }
    for (int64_t j = 0; j < size; j++) error[j] = strength * (v[j] - error[j]);
    memset(o, 0, size * sizeof(float));
    for (int64_t i = 0; i < size; i++)
        for (int64_t j = 0; j < size; j++) {
            state[i * size + j] += k[i] * error[j];
            o[j] += q[i] * state[i * size + j];
        }
}

/* out = SiLU of the taps [c,width] over `before` [c-1,width] and x [width]; x becomes the last row of `before`. */
INLINE void short_convolution(int64_t width, int64_t kernel, const float *restrict x, const float *restrict taps,
                              float *restrict before, float *restrict out) {
    const int64_t last = kernel - 1;
    for (int64_t i = 0; i < width; i++) out[i] = x[i] * taps[last * width + i];
    for (int64_t j = 0; j < last; j++)
        for (int64_t i = 0; i < width; i++) out[i] += taps[j * width + i] * before[j * width + i];
    for (int64_t i = 0; i < width; i++) out[i] *= sigmoid(out[i]);
    if (last == 0) return;
    memmove(before, before + width, (last - 1) * width * sizeof(float));
    memcpy(before + (last - 1) * width, x, width * sizeof(float));
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

/* SiLU(gate) * up: rows [rows,2*size] of gate and up side by side -> out [rows,size]. */
FOR_EVERY_CPU void silu_gated(int64_t rows, int64_t size, const float *restrict both, float *restrict out) {
    for (int64_t row = 0; row < rows; row++, both += 2 * size, out += size)
        for (int64_t i = 0; i < size; i++) out[i] = both[i] * sigmoid(both[i]) * both[size + i];
}

/* SiTU, b tanh(gate / b) sigmoid(gate) * l tanh(up / l): as above; up_cap 0 leaves `up` as it is. */
FOR_EVERY_CPU void situ_gated(int64_t rows, int64_t size, const float *restrict both, float cap, float up_cap,
                              float *restrict out) {
    const float per_cap = 1.0f / cap, per_up_cap = 1.0f / up_cap;
    for (int64_t row = 0; row < rows; row++, out += size) {
        const float *gate = both + 2 * row * size, *up = gate + size;
        for (int64_t i = 0; i < size; i++) out[i] = cap * hyperbolic_tangent(gate[i] * per_cap) * sigmoid(gate[i]);
        if (up_cap > 0.0f)
            for (int64_t i = 0; i < size; i++) out[i] *= up_cap * hyperbolic_tangent(up[i] * per_up_cap);
        else
            for (int64_t i = 0; i < size; i++) out[i] *= up[i];
    }
}

/* Everything of a KDA layer between its projections; tail and memory are advanced.
 *
 * qkv [B,3*H*K], beta [B,H] and gate [B,H,K] with steps between sequences; z, out [B,H,K]; taps [c,3*H*K]; rate [H];
 * out_weight [K]; tail [B,c-1,3*H*K]; memory [B,H,K,K], keys by values; mixed [3*H*K] is working memory.
 */
FOR_EVERY_CPU void kda_token(int64_t batch, int64_t heads, int64_t size, int64_t kernel, const float *qkv,
                             int64_t qkv_step, const float *z, const float *beta, int64_t beta_step,
                             const float *gate, int64_t gate_step, const float *taps, const float *rate, int bounded,
                             float lower_bound, const float *out_weight, float out_floor, float *tail, float *memory,
                             float *mixed, float *out) {
    const int64_t channels = heads * size, width = 3 * channels;
    float decay[size], error[size];
    for (int64_t b = 0; b < batch; b++, tail += (kernel - 1) * width) {
        short_convolution(width, kernel, qkv + b * qkv_step, taps, tail, mixed);
        for (int64_t h = 0; h < heads; h++, z += size, memory += size * size, out += size) {
            const float *opening = gate + b * gate_step + h * size;
            float *q = mixed + h * size, *k = q + channels, *v = k + channels;
            normalise(q, q, 0, size, 1e-3f);
            normalise(k, k, 0, size, 1e-3f);
            if (bounded)
                for (int64_t i = 0; i < size; i++) decay[i] = exponential(lower_bound * sigmoid(z[i] * rate[h]));
            else
                for (int64_t i = 0; i < size; i++) decay[i] = exponential(softplus(z[i]) * rate[h]);
            delta_rule(size, q, k, v, decay, sigmoid(beta[b * beta_step + h]), memory, error, out);
            normalise(out, out, out_weight, size, out_floor);
            for (int64_t i = 0; i < size; i++) out[i] *= sigmoid(opening[i]);
        }
    }
}
