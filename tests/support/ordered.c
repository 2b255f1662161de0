// The order of sums of experts (docs/notes/order-of-sums.md) in C: what kernels are compared with.
// Compile it with -ffp-contract=off: a multiplication and an addition are two roundings.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BF16, TRANSPOSED, MXFP4, INT4, FP8 };
typedef struct {
    int format;
    long outputs, inputs, scale_outputs, scale_inputs;
    const uint8_t *weight, *scales;
    const uint16_t *bias;
} matrix;

static float of_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static float wide(uint16_t x) { return of_bits((uint32_t)x << 16); }
static uint16_t narrow(float x) {
    uint32_t bits = bits_of(x);
    return x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static float rounded(float x) { return wide(narrow(x)); }

static float tree(float *sums, long count) {
    for (; count > 1; count = (count + 1) / 2) {
        if (count % 2) sums[count] = 0;
        for (long i = 0; i < (count + 1) / 2; i++) sums[i] = sums[2 * i] + sums[2 * i + 1];
    }
    return sums[0];
}

// `scratch`: room for lanes + 1, and for each chunk and one more.
static float dot(const float *w, const float *x, long inputs, int lanes, int chunk, float *scratch) {
    float *lane = scratch, *sums = scratch + lanes + 1;
    long count = 0;
    for (long begin = 0; begin < inputs; begin += chunk) {
        long end = begin + chunk < inputs ? begin + chunk : inputs;
        memset(lane, 0, lanes * sizeof *lane);
        for (long k = begin; k < end; k += lanes)
            for (long i = 0; i < lanes && k + i < end; i++) lane[i] += w[k + i] * x[k + i];
        sums[count++] = tree(lane, lanes);
    }
    return tree(sums, count);
}

static const float CODES[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};

static float e4m3(uint8_t code) {
    float value = code & 7, sign = code & 128 ? -1 : 1;
    int exponent = code >> 3 & 15;
    if ((code & 127) == 127) return of_bits(0x7FC00000);
    for (value += exponent ? 8 : 0; exponent > 1; exponent--) value *= 2;
    return sign * value / 512;
}

static void read_row(const matrix *m, long expert, long row, float *into) {
    long first = expert * m->outputs + row;
    const uint16_t *numbers = (const uint16_t *)m->weight;
    for (long k = 0; k < m->inputs; k++) {
        if (m->format == BF16) into[k] = wide(numbers[first * m->inputs + k]);
        else if (m->format == TRANSPOSED) into[k] = wide(numbers[(expert * m->inputs + k) * m->outputs + row]);
        else if (m->format == INT4 || m->format == FP8) {
            long at = first / m->scale_outputs * (m->inputs / m->scale_inputs) + k / m->scale_inputs;
            uint8_t both = m->weight[(first * m->inputs + k) / 2];
            if (m->format == FP8) into[k] = rounded(e4m3(m->weight[first * m->inputs + k]) * ((const float *)m->scales)[at]);
            else into[k] = rounded(((k % 2 ? both >> 4 : both & 15) - 8) * wide(((const uint16_t *)m->scales)[at]));
        } else {
            uint32_t scale = (uint32_t)m->scales[(first * m->inputs + k) / 32] << 23;
            uint8_t both = m->weight[(first * m->inputs + k) / 2];
            into[k] = CODES[k % 2 ? both >> 4 : both & 15] * of_bits(scale ? scale : 1 << 22);
        }
    }
}

// Products of all rows of one expert with x, as float32; `out` is [outputs].
void dots(const matrix *m, long expert, const float *x, int lanes, int chunk, float *out) {
    float *row = malloc(m->inputs * sizeof *row), *scratch = malloc((lanes + m->inputs + 3) * sizeof *scratch);
    for (long n = 0; n < m->outputs; n++) {
        read_row(m, expert, n, row);
        out[n] = dot(row, x, m->inputs, lanes, chunk, scratch);
    }
    free(row), free(scratch);
}

static void product(const matrix *m, long expert, const float *x, int lanes, int chunk, float *out) {
    dots(m, expert, x, lanes, chunk, out);
    for (long n = 0; n < m->outputs; n++) {
        out[n] = rounded(out[n]);
        if (m->bias) out[n] = rounded(out[n] + wide(m->bias[expert * m->outputs + n]));
    }
}

static float exp_of_minus(float x) {
    if (!(x > -88)) return of_bits(0x7F800000);
    float t = x < 87 ? -x : -87;
    float power = (t * 1.44269504f + 12582912.f) - 12582912.f;
    float r = (t - power * 0.693359375f) - power * -2.12194440e-4f;
    float y = 1.9875691500e-4f * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.f;
    return y * of_bits((uint32_t)((int)power + 127) << 23);
}

// `limit` 0: SiLU; else gpt-oss's clamped unit.
static float activated(float gate, float up, float alpha, float limit) {
    if (limit == 0) return rounded(rounded(gate / (1.f + exp_of_minus(gate))) * up);
    gate = rounded(gate > limit ? limit : gate);
    up = rounded(up > limit ? limit : up < -limit ? -limit : up);
    float sigmoid = rounded(1.f / (1.f + exp_of_minus(rounded(gate * alpha))));
    return rounded(rounded(up + 1.f) * rounded(gate * sigmoid));
}

void activate(const uint16_t *gate, const uint16_t *up, long count, float alpha, float limit, uint16_t *out) {
    for (long i = 0; i < count; i++) out[i] = narrow(activated(wide(gate[i]), wide(up[i]), alpha, limit));
}

// Weights are bf16, or else float32; experts that are none make a token's outputs NaN.
void experts(const matrix *gate_up, const matrix *down, long num_experts, long tokens, long top_k, const uint16_t *x,
             const int64_t *ids, const void *weights, int weights_are_bf16, int interleaved, float alpha, float limit,
             int lanes, int chunk, uint16_t *out) {
    long inner = gate_up->outputs / 2, outputs = down->outputs;
    float *row = malloc(gate_up->inputs * sizeof *row), *both = malloc(2 * inner * sizeof *both);
    float *made = malloc(inner * sizeof *made), *y = malloc(outputs * sizeof *y), *total = malloc(outputs * sizeof *y);
    for (long t = 0; t < tokens; t++) {
        for (long n = 0; n < outputs; n++) total[n] = 0;
        for (long k = 0; k < gate_up->inputs; k++) row[k] = wide(x[t * gate_up->inputs + k]);
        for (long j = 0; j < top_k; j++) {
            int64_t expert = ids[t * top_k + j];
            float weight = weights_are_bf16 ? wide(((const uint16_t *)weights)[t * top_k + j])
                                            : ((const float *)weights)[t * top_k + j];
            if (expert < 0 || expert >= num_experts) {
                for (long n = 0; n < outputs; n++) total[n] = of_bits(0x7FC00000);
                continue;
            }
            product(gate_up, expert, row, lanes, chunk, both);
            for (long i = 0; i < inner; i++)
                made[i] = activated(both[interleaved ? 2 * i : i], both[interleaved ? 2 * i + 1 : i + inner], alpha, limit);
            product(down, expert, made, lanes, chunk, y);
            for (long n = 0; n < outputs; n++) total[n] += weights_are_bf16 ? rounded(y[n] * weight) : y[n] * weight;
        }
        for (long n = 0; n < outputs; n++) out[t * outputs + n] = narrow(total[n]);
    }
    free(row), free(both), free(made), free(y), free(total);
}
