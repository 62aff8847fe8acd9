/* Operations on rows of numbers, float32: norms, depth mix, gated activation, short convolution, decay gate.
 *
 * In PyTorch each takes 4 to 10 calls and as many passes over memory.
 */

#include "shared.h"

/* What the calling code was written for: Python refuses another number. */
const int32_t INTERFACE = 1;

int can_share_work(void) { return has_threads(); }

struct norm {
    int64_t rows, size, x_step, out_step;
    const float *x, *weight;
    float scale, floor, *out;
};

FOR_EVERY_CPU static void norm_rows(void *data) {
    const struct norm a = *(struct norm *)data;
    int64_t first, end;
    share(a.rows, &first, &end);
    for (int64_t row = first; row < end; row++)
        normalise(a.out + row * a.out_step, a.x + row * a.x_step, a.weight, a.size, a.scale, a.floor);
}

/* out = x / hypot(|x|, floor) * scale * weight: x, out [rows,size] with steps between rows, out may be x; weight [size]
 * or NULL. With scale sqrt(size) and floor sqrt(size * eps) it is RMSNorm. */
void rms_norm(int64_t rows, int64_t size, const float *x, int64_t x_step, const float *weight, float scale, float floor,
              float *out, int64_t out_step) {
    struct norm a = {rows, size, x_step, out_step, x, weight, scale, floor, out};
    in_parallel(rows * size, norm_rows, &a);
}

struct mix {
    int64_t count, rows, size;
    const float *const *sources, *query, *weight;
    float mix_floor, scale, floor, *out;
};

FOR_EVERY_CPU static void mix_rows(void *data) {
    const struct mix a = *(struct mix *)data;
    int64_t first, end;
    share(a.rows, &first, &end);
    for (int64_t row = first; row < end; row++) {
        float *mixed = a.out + row * a.size, scores[a.count], largest = -INFINITY, sum = 0;
        for (int64_t n = 0; n < a.count; n++) {
            const float *value = a.sources[n] + row * a.size;
            const double length = sqrt(dot(value, value, a.size) + (double)a.mix_floor * a.mix_floor);
            scores[n] = (float)(dot(value, a.query, a.size) / length);
            largest = scores[n] > largest ? scores[n] : largest;
        }
        for (int64_t n = 0; n < a.count; n++) sum += scores[n] = exponential(scores[n] - largest);
        memset(mixed, 0, a.size * sizeof(float));
        for (int64_t n = 0; n < a.count; n++) {
            const float *value = a.sources[n] + row * a.size, share_of_it = scores[n] / sum;
            for (int64_t i = 0; i < a.size; i++) mixed[i] += share_of_it * value[i];
        }
        normalise(mixed, mixed, a.weight, a.size, a.scale, a.floor);
    }
}

/* The norm of the depth mix of `count` sources, each [rows,size]: softmax over sources of source / length . query. */
void mixed_norm(int64_t count, int64_t rows, int64_t size, const float *const *sources, const float *query,
                float mix_floor, const float *weight, float scale, float floor, float *out) {
    struct mix a = {count, rows, size, sources, query, weight, mix_floor, scale, floor, out};
    in_parallel(count * rows * size, mix_rows, &a);
}

struct gates {
    int64_t rows, size, gate_step, up_step;
    const float *gate, *up;
    struct activation act;
    float *out;
};

FOR_EVERY_CPU static void gate_rows(void *data) {
    const struct gates a = *(struct gates *)data;
    int64_t first, end;
    share(a.rows, &first, &end);
    for (int64_t row = first; row < end; row++)
        activate(a.act, a.size, a.gate + row * a.gate_step, a.up + row * a.up_step, a.out + row * a.size);
}

/* The gated activation: gate and up [rows,size] with steps between rows -> out [rows,size]. */
void gated(int64_t rows, int64_t size, const float *gate, int64_t gate_step, const float *up, int64_t up_step,
           float cap, float up_cap, float *out) {
    struct gates a = {rows, size, gate_step, up_step, gate, up, {cap, up_cap}, out};
    in_parallel(rows * size, gate_rows, &a);
}

struct convolution {
    int64_t batch, time, width, kernel, tail_step;
    const float *x, *taps, *tail;
    float *out;
};

FOR_EVERY_CPU static void convolve_rows(void *data) {
    const struct convolution a = *(struct convolution *)data;
    int64_t first, end;
    share(a.batch * a.time, &first, &end);
    for (int64_t row = first; row < end; row++) {
        const int64_t b = row / a.time, t = row % a.time;
        float *restrict out = a.out + row * a.width;
        memset(out, 0, a.width * sizeof(float));
        for (int64_t j = 0; j < a.kernel; j++) {
            const int64_t at = t + j - (a.kernel - 1);
            const float *input = at >= 0 ? a.x + (b * a.time + at) * a.width
                                         : a.tail + (b * (a.kernel - 1) + at + a.kernel - 1) * a.tail_step;
            for (int64_t i = 0; i < a.width; i++) out[i] += a.taps[j * a.width + i] * input[i];
        }
        for (int64_t i = 0; i < a.width; i++) out[i] *= sigmoid(out[i]);
    }
}

/* SiLU of the causal depthwise convolution: x, out [batch,time,width]; taps [kernel,width], the newest input's last;
 * tail [batch,kernel-1,width], the inputs before, with a step between its rows. */
void short_conv(int64_t batch, int64_t time, int64_t width, int64_t kernel, const float *x, const float *taps,
                const float *tail, int64_t tail_step, float *out) {
    struct convolution a = {batch, time, width, kernel, tail_step, x, taps, tail, out};
    in_parallel(batch * time * width, convolve_rows, &a);
}

struct decay {
    int64_t rows, heads, size;
    const float *z, *bias, *rate;
    int bounded;
    float lower_bound, *out;
};

FOR_EVERY_CPU static void decay_rows(void *data) {
    const struct decay a = *(struct decay *)data;
    int64_t first, end;
    share(a.rows, &first, &end);
    for (int64_t n = first * a.heads; n < end * a.heads; n++) {
        const int64_t h = n % a.heads;
        const float *z = a.z + n * a.size, *bias = a.bias + h * a.size, rate = a.rate[h];
        float *restrict out = a.out + n * a.size;
        if (a.bounded)
            for (int64_t i = 0; i < a.size; i++) out[i] = a.lower_bound * sigmoid((z[i] + bias[i]) * rate);
        else
            for (int64_t i = 0; i < a.size; i++) out[i] = softplus(z[i] + bias[i]) * rate;
    }
}

/* Log decay: z, out [rows,heads,size]; bias [heads,size]; rate [heads]. */
void log_decay(int64_t rows, int64_t heads, int64_t size, const float *z, const float *bias, const float *rate,
               int bounded, float lower_bound, float *out) {
    struct decay a = {rows, heads, size, z, bias, rate, bounded, lower_bound, out};
    in_parallel(rows * heads * size, decay_rows, &a);
}
