/* Threads, vector widths and the arithmetic that the compiled operations share.
 *
 * NaN comes out where NaN goes in. Only `static` functions stand here: every C file has its own copies.
 */

#ifndef KIMIK3_SHARED_H
#define KIMIK3_SHARED_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Partial sums side by side, so that a sum needs no reordering to be vectorised: of doubles, of floats. */
#define LANES 16
#define WIDE 32
#define AHEAD 1536 /* floats: what a core asks for this early is there in time, which its own guesses miss */
#define WORTH_THREADS 32768 /* numbers below which waking other threads costs more than they save */

/* One copy of a function for each vector width; glibc chooses the processor's own when the library is loaded. */
#if !defined(__x86_64__) || !defined(__GLIBC__)
#define FOR_EVERY_CPU
#elif defined(__clang__) || __GNUC__ >= 12
#define FOR_EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else /* which cannot choose by level; its copies for AVX2 lack fused multiply-add */
#define FOR_EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
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

static int has_threads(void) { return GOMP_parallel && omp_get_thread_num && omp_get_num_threads; }

/* Run work(data) in every thread, or in this one alone when it is about few numbers. */
static void in_parallel(int64_t numbers, void (*work)(void *), void *data) {
    if (numbers >= WORTH_THREADS && has_threads()) GOMP_parallel(work, data, 0, 0);
    else work(data);
}

/* This thread's share of `count` pieces of work: [*first, *end). */
static void share(int64_t count, int64_t *first, int64_t *end) {
    int64_t thread = has_threads() ? omp_get_thread_num() : 0, threads = has_threads() ? omp_get_num_threads() : 1;
    *first = count * thread / threads;
    *end = count * (thread + 1) / threads;
}

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

/* out = x / hypot(|x|, floor) * scale * weight; weight NULL counts as 1; out may be x. */
INLINE void normalise(float *out, const float *x, const float *weight, int64_t size, float scale, float floor) {
    const double factor = scale / sqrt(dot(x, x, size) + (double)floor * floor);
    if (weight)
        for (int64_t i = 0; i < size; i++) out[i] = (float)(x[i] * factor) * weight[i];
    else
        for (int64_t i = 0; i < size; i++) out[i] = (float)(x[i] * factor);
}

/* Ask for the `count` numbers that lie AHEAD of here. */
INLINE void fetch_ahead(const float *here, int64_t count) {
#ifdef __GNUC__
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(here + AHEAD + i);
#endif
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

#define EIGHT 8
typedef float eight __attribute__((vector_size(32), aligned(4), may_alias)); /* 8 floats, wherever they lie */

/* out[0..8*count) += sign * sum over n < inner of a[n] * b[n][column]; the sums stay in registers: count is at most 8. */
INLINE void add_eights(int count, int64_t inner, float sign, const float *restrict a, const float *restrict b,
                       int64_t b_step, float *restrict out) {
    eight sum[EIGHT] = {{0}}, *to = (eight *)out;
    for (int64_t n = 0; n < inner; n++) {
        const eight *row = (const eight *)(b + n * b_step);
        for (int i = 0; i < count; i++) sum[i] += a[n] * row[i];
    }
    for (int i = 0; i < count; i++) to[i] += sign * sum[i];
}

/* The same for any number of columns; rows of b are b_step apart. */
INLINE void add_row(int64_t inner, int64_t columns, float sign, const float *restrict a, const float *restrict b,
                    int64_t b_step, float *restrict out) {
    int64_t column = 0;
    for (; column + 64 <= columns; column += 64) add_eights(8, inner, sign, a, b + column, b_step, out + column);
    for (; column + 16 <= columns; column += 16) add_eights(2, inner, sign, a, b + column, b_step, out + column);
    for (; column + 8 <= columns; column += 8) add_eights(1, inner, sign, a, b + column, b_step, out + column);
    for (; column < columns; column++) {
        float sum[4] = {0}; /* one alone would wait for itself */
        int64_t n = 0;
        for (; n + 4 <= inner; n += 4)
            for (int i = 0; i < 4; i++) sum[i] += a[n + i] * b[(n + i) * b_step + column];
        for (; n < inner; n++) sum[0] += a[n] * b[n * b_step + column];
        out[column] += sign * ((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
}

/* The gated activation: SiTU, b tanh(gate / b) sigmoid(gate) * l tanh(up / l), with caps b and l; cap 0: SiLU(gate) * up;
 * up_cap 0: `up` as it is. */
struct activation { float cap, up_cap; };

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

#endif
