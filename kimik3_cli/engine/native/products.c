/* Matrix-vector products of one token, float32, and the mixture of experts that is made of them.
 *
 * They run at the speed of memory, every weight being read once.
 */

#include "shared.h"

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
    int64_t all = 0;
    for (int64_t n = 0; n < count; n++) all += rows[n];
    in_parallel(all * size, product_rows, &p);
}

struct router {
    int64_t experts, chosen, groups, kept_groups;
    int softmax, renormalise;
    float factor;
    const float *bias;
};

/* The `count` largest values, the first of equal ones first; NaN is larger than any number. They become -inf, which none
 * of the others stays. */
static void take_largest(int64_t size, float *values, int64_t count, int64_t *taken) {
    for (int64_t i = 0; i < size; i++) values[i] = values[i] < -FLT_MAX ? -FLT_MAX : values[i];
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
    in_parallel(2 * chosen * width * size, experts_inner, &e);
    in_parallel(chosen * width * size, experts_outer, &e);
}
