// Experts of few rows on a CPU, in the order of sums of docs/notes/order-of-sums.md, divided among a pool of threads.
// No bit depends on the instructions, on the number of threads or on who runs which tile: a tile is some whole outputs.
// Compiled with -ffp-contract=off: a multiplication and an addition are two roundings.
#define _GNU_SOURCE
#include <errno.h>
#include <fenv.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_X86 1
#endif
#ifdef __FAST_MATH__
#error "-ffast-math changes the order of sums"
#endif

enum { LANES = 64, CHUNK = 256, BLOCK = 32, TILE = 32 };
enum { BF16, MXFP4, INT4, FP8 };
typedef struct {
    int64_t format, outputs, inputs, expert_stride, row_stride, k_stride; // strides in bf16, or in bytes of codes
    int64_t scale_outputs, scale_inputs; // numbers that a scale is for
    const void *weight, *scales;
    const uint16_t *bias;
} matrix;
typedef struct {
    matrix gate_up, down;
    int64_t num_experts, tokens, top_k, weights_are_bf16, interleaved, is_apart; // outputs by pair, not weighed
    const uint16_t *x;
    const int64_t *ids;
    const float *weights;
    uint16_t *out;
    float alpha, limit;
} request;

static float of_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static float wide(uint16_t x) { return of_bits((uint32_t)x << 16); }
static uint16_t narrow(float x) {
    uint32_t bits = bits_of(x);
    return x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static float rounded(float x) { return wide(narrow(x)); }

// -- sums of products: one row of weights with x (float32, zeros up to a multiple of LANES, in the places
// that the instructions want: see `place`)

static const float INTEGERS[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
static const float CODES[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
// Weights of the codes of 4 bits with one scale, and their lower and upper bytes as bf16.
typedef struct { _Alignas(64) float values[16]; uint8_t halves[2][16]; } table;
static table mxfp4[256], zeros; // of MXFP4 by scale
static float e4m3[256];

static void fill(table *t, const float *codes, float scale) {
    for (int code = 0; code < 16; code++) {
        uint32_t bits = bits_of(t->values[code] = rounded(codes[code] * scale));
        t->halves[0][code] = bits >> 16, t->halves[1][code] = bits >> 24;
    }
}

__attribute__((constructor)) static void fill_tables(void) {
    fenv_t modes;
    fegetenv(&modes), fesetenv(FE_DFL_ENV); // whoever loads this may have denormals off
    for (uint32_t s = 0; s < 256; s++) fill(mxfp4 + s, CODES, of_bits(s ? s << 23 : 1 << 22));
    for (int code = 0; code < 256; code++) {
        uint32_t least = code & 7, exponent = code >> 3 & 15;
        float value = exponent ? of_bits((exponent + 120) << 23 | least << 20) : least * 0x1p-9f;
        if ((code & 127) == 127) value = of_bits(0x7FC00000);
        e4m3[code] = code & 128 ? -value : value;
    }
    fesetenv(&modes);
}

static float tree(float *sums, long count) {
    for (; count > 1; count = (count + 1) / 2) {
        if (count % 2) sums[count] = 0;
        for (long i = 0; i < (count + 1) / 2; i++) sums[i] = sums[2 * i] + sums[2 * i + 1];
    }
    return sums[0];
}

// `count` weights of a row from element `k` on, at most LANES.
static void widen(const matrix *m, const uint8_t *row, const uint8_t *scales, long k, long count, float *w) {
    const uint16_t *numbers = (const uint16_t *)row;
    if (m->format == BF16) for (long i = 0; i < count; i++) w[i] = wide(numbers[k + i]);
    else if (m->format == FP8) for (long i = 0; i < count; i++)
        w[i] = rounded(e4m3[row[k + i]] * ((const float *)scales)[(k + i) / BLOCK]);
    else for (long i = 0; i < count; i += 2) {
        long block = (k + i) / BLOCK;
        const table *t = m->format == MXFP4 ? mxfp4 + scales[block] : ((const table *const *)scales)[block];
        w[i] = t->values[row[(k + i) / 2] & 15], w[i + 1] = t->values[row[(k + i) / 2] >> 4];
    }
}

static float dot_plain(const matrix *m, const uint8_t *row, const uint8_t *scales, const float *x) {
    long chunks = (m->inputs + CHUNK - 1) / CHUNK;
    float sums[chunks + 1];
    for (long c = 0; c < chunks; c++) {
        float lane[LANES] = {0}, w[LANES];
        for (long k = c * CHUNK; k < (c + 1) * CHUNK && k < m->inputs; k += LANES) {
            long count = m->inputs - k < LANES ? m->inputs - k : LANES;
            if (count < LANES) memset(w, 0, sizeof w);
            widen(m, row, scales, k, count, w);
            for (long i = 0; i < LANES; i++) lane[i] += w[i] * x[k + i];
        }
        sums[c] = tree(lane, LANES);
    }
    return tree(sums, chunks);
}

#ifdef HAS_X86
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f")))

// The sums of neighbours among 4 x 8, and theirs, and so on: of 8 each.
AVX2 static inline __m128 fold(__m256 a, __m256 b, __m256 c, __m256 d) {
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

// The tree over four sums of each chunk; `sums` has room for four zeros.
AVX2 static inline float finish(float *sums, long chunks) {
    for (long count = 4 * chunks; count > 4; count = (count + 7) / 8 * 4) {
        if (count % 8) _mm_storeu_ps(sums + count, _mm_setzero_ps());
        for (long i = 0; i < count; i += 8)
            _mm_storeu_ps(sums + i / 2, _mm_hadd_ps(_mm_loadu_ps(sums + i), _mm_loadu_ps(sums + i + 4)));
    }
    __m128 s = _mm_hadd_ps(_mm_loadu_ps(sums), _mm_loadu_ps(sums));
    return _mm_cvtss_f32(_mm_hadd_ps(s, s));
}

// A function of a row's product: each chunk's sums by `ADD` of each step and then by `FOLD`. Beyond the end are zeros,
// and of scales of more bytes than one there is one more.
#define DOT(name, TARGET, vector, SUMS, ADD, FOLD, bytes, scale_bytes) \
    TARGET static float name(const matrix *m, const uint8_t *row, const uint8_t *scales, const float *x) { \
        size_t inputs = m->inputs, chunks = (inputs + CHUNK - 1) / CHUNK; \
        float sums[4 * chunks + 4]; \
        for (size_t c = 0, k = 0; c < chunks; c++) { \
            vector sum[SUMS] = {0}; \
            size_t end = inputs < k + CHUNK ? inputs : k + CHUNK; \
            for (; k + LANES <= end; k += LANES) \
                ADD(sum, row + k * (bytes) / LANES, scales + k / BLOCK * (scale_bytes), x + k); \
            if (k < end) { \
                uint8_t last[bytes] = {0}, one[2] = {(scale_bytes) == 1 ? scales[k / BLOCK] : 0}; \
                memcpy(last, row + k * (bytes) / LANES, (end - k) * (bytes) / LANES); \
                ADD(sum, last, (scale_bytes) == 1 ? one : scales + k / BLOCK * (scale_bytes), x + k); \
            } \
            _mm_storeu_ps(sums + 4 * c, FOLD(sum)); \
        } \
        return finish(sums, chunks); \
    }

// 16 products, of the even numbers and of the odd ones.
AVX2 static inline void add_16(__m256 *sum, __m256i numbers, const float *x) {
    __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(numbers, 16));
    __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(numbers, _mm256_set1_epi32(0xFFFF0000)));
    sum[0] = _mm256_add_ps(sum[0], _mm256_mul_ps(even, _mm256_loadu_ps(x)));
    sum[1] = _mm256_add_ps(sum[1], _mm256_mul_ps(odd, _mm256_loadu_ps(x + 8)));
}

AVX2 static inline void add_bf16(__m256 *sum, const uint8_t *w, const uint8_t *scale, const float *x) {
    (void)scale;
    for (int i = 0; i < 4; i++) add_16(sum + 2 * i, _mm256_loadu_si256((const __m256i *)w + i), x + 16 * i);
}
AVX2 static inline __m128 fold_bf16(const __m256 *sum) {
    return fold(sum[0] + sum[1], sum[2] + sum[3], sum[4] + sum[5], sum[6] + sum[7]);
}
DOT(dot_bf16_avx2, AVX2, __m256, 8, add_bf16, fold_bf16, 128, 0)

// Codes become bytes of bf16 by tables of their block, 32 at a time; of each half of a register, a block.
AVX2 static inline void add_codes(__m256 *sum, const uint8_t *w, const table *one, const table *two, const float *x) {
    const __m128i *first = (const __m128i *)one->halves, *second = (const __m128i *)two->halves;
    __m256i table[2] = {_mm256_loadu2_m128i(second, first), _mm256_loadu2_m128i(second + 1, first + 1)};
    __m256i both = _mm256_loadu_si256((const __m256i *)w);
    for (int i = 0; i < 2; i++, both = _mm256_srli_epi16(both, 4)) {
        __m256i code = _mm256_and_si256(both, _mm256_set1_epi8(15));
        __m256i low = _mm256_shuffle_epi8(table[0], code), high = _mm256_shuffle_epi8(table[1], code);
        add_16(sum + 4 * i, _mm256_unpacklo_epi8(low, high), x + 32 * i);
        add_16(sum + 4 * i + 2, _mm256_unpackhi_epi8(low, high), x + 32 * i + 16);
    }
}
AVX2 static inline void add_mxfp4(__m256 *sum, const uint8_t *w, const uint8_t *scale, const float *x) {
    add_codes(sum, w, mxfp4 + scale[0], mxfp4 + scale[1], x);
}
AVX2 static inline void add_int4(__m256 *sum, const uint8_t *w, const uint8_t *scale, const float *x) {
    const table *const *tables = (const table *const *)scale;
    add_codes(sum, w, tables[0], tables[1], x);
}
AVX2 static inline __m128 fold_codes(const __m256 *sum) { // elements 2i and 2i + 1 are four sums apart
    __m256 a = (sum[0] + sum[4]) + (sum[1] + sum[5]), b = (sum[2] + sum[6]) + (sum[3] + sum[7]);
    a = _mm256_hadd_ps(a, b);
    return _mm_hadd_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
}
DOT(dot_mxfp4_avx2, AVX2, __m256, 8, add_mxfp4, fold_codes, 32, 1)
DOT(dot_int4_avx2, AVX2, __m256, 8, add_int4, fold_codes, 32, sizeof(table *))

AVX2 static inline __m256 rounded_8(__m256 value) {
    __m256i bits = _mm256_castps_si256(value);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(_mm256_set1_epi32(0x7FFF), odd));
    bits = _mm256_and_si256(bits, _mm256_set1_epi32(0xFFFF0000));
    return _mm256_blendv_ps(_mm256_castsi256_ps(bits), value, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
}
AVX2 static void fill_int4_avx2(table *t, float scale) {
    __m256 low = rounded_8(_mm256_mul_ps(_mm256_loadu_ps(INTEGERS), _mm256_set1_ps(scale)));
    __m256 high = rounded_8(_mm256_mul_ps(_mm256_loadu_ps(INTEGERS + 8), _mm256_set1_ps(scale)));
    __m256i one = _mm256_srli_epi32(_mm256_castps_si256(low), 16);
    __m256i two = _mm256_srli_epi32(_mm256_castps_si256(high), 16);
    __m256i all = _mm256_permute4x64_epi64(_mm256_packus_epi32(one, two), 0xD8);
    all = _mm256_packus_epi16(_mm256_and_si256(all, _mm256_set1_epi16(255)), _mm256_srli_epi16(all, 8));
    _mm256_store_ps(t->values, low), _mm256_store_ps(t->values + 8, high);
    _mm256_store_si256((__m256i *)t->halves, _mm256_permute4x64_epi64(all, 0xD8));
}

// Bits of e4m3 are those of a float32, but for a factor of 2^120 and for NaN.
AVX2 static inline void add_fp8(__m256 *sum, const uint8_t *w, const uint8_t *scale, const float *x) {
    __m256i ends = _mm256_set1_epi32(0x7F00000);
    for (int i = 0; i < 8; i++) {
        __m256i code = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(w + 8 * i))), 24);
        __m256i bits = _mm256_and_si256(_mm256_srai_epi32(code, 4), _mm256_set1_epi32(0x87F00000));
        __m256i is_nan = _mm256_cmpeq_epi32(_mm256_and_si256(bits, ends), ends);
        __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
        value = _mm256_or_ps(value, _mm256_castsi256_ps(is_nan));
        value = _mm256_mul_ps(value, _mm256_broadcast_ss((const float *)scale + i / 4));
        sum[i] = _mm256_add_ps(sum[i], _mm256_mul_ps(rounded_8(value), _mm256_loadu_ps(x + 8 * i)));
    }
}
AVX2 static inline __m128 fold_in_sequence(const __m256 *sum) {
    return _mm_hadd_ps(fold(sum[0], sum[1], sum[2], sum[3]), fold(sum[4], sum[5], sum[6], sum[7]));
}
DOT(dot_fp8_avx2, AVX2, __m256, 8, add_fp8, fold_in_sequence, 64, sizeof(float))

// A register holds the values of all codes of a block, and an index uses its lower four bits.
AVX512 static inline void add_codes_512(
    __m512 *sum, const uint8_t *w, const table *one, const table *two, const float *x) {
    _mm_prefetch((const void *)((uintptr_t)w + 1024), _MM_HINT_T0); // an eighth faster; nothing in the other kernels
    for (int i = 0; i < 4; i += 2) {
        __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(w + 8 * i)));
        __m512 table = _mm512_load_ps(i ? two->values : one->values);
        __m512 even = _mm512_permutexvar_ps(both, table);
        __m512 odd = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), table);
        sum[i] = _mm512_add_ps(sum[i], _mm512_mul_ps(even, _mm512_loadu_ps(x + 16 * i)));
        sum[i + 1] = _mm512_add_ps(sum[i + 1], _mm512_mul_ps(odd, _mm512_loadu_ps(x + 16 * i + 16)));
    }
}
AVX512 static inline void add_mxfp4_512(__m512 *sum, const uint8_t *w, const uint8_t *scale, const float *x) {
    add_codes_512(sum, w, mxfp4 + scale[0], mxfp4 + scale[1], x);
}
AVX512 static inline void add_int4_512(__m512 *sum, const uint8_t *w, const uint8_t *scale, const float *x) {
    const table *const *tables = (const table *const *)scale;
    add_codes_512(sum, w, tables[0], tables[1], x);
}
AVX512 static inline __m128 fold_512(const __m512 *sum) {
    __m256 pairs[4];
    for (int i = 0; i < 2; i++) _mm512_storeu_ps(pairs + 2 * i, _mm512_add_ps(sum[2 * i], sum[2 * i + 1]));
    return fold(pairs[0], pairs[1], pairs[2], pairs[3]);
}
DOT(dot_mxfp4_avx512, AVX512, __m512, 4, add_mxfp4_512, fold_512, 32, 1)
DOT(dot_int4_avx512, AVX512, __m512, 4, add_int4_512, fold_512, 32, sizeof(table *))
#endif

// Where element k lies in x, by kind of instructions and format.
enum { PLAIN, WITH_AVX2, WITH_AVX512 };
static long place(int kind, int64_t format, long k) {
    long step = k / LANES * LANES, block = k % LANES / BLOCK, pair = k % BLOCK / 2, odd = k % 2;
    if (kind == PLAIN || format == FP8) return k;
    if (format == BF16) return k / 16 * 16 + 8 * odd + k % 16 / 2;
    if (kind == WITH_AVX512) return step + 32 * block + 16 * odd + pair;
    return step + 32 * odd + 16 * (pair / 8) + 8 * (pair % 2) + 4 * block + pair % 8 / 2;
}

typedef float (*dot)(const matrix *, const uint8_t *, const uint8_t *, const float *);
#ifdef HAS_X86
static const dot DOTS[3][4] = {
    {dot_plain, dot_plain, dot_plain, dot_plain},
    {dot_bf16_avx2, dot_mxfp4_avx2, dot_int4_avx2, dot_fp8_avx2},
    {dot_bf16_avx2, dot_mxfp4_avx512, dot_int4_avx512, dot_fp8_avx2}};
#else
static const dot DOTS[1][4] = {{dot_plain, dot_plain, dot_plain, dot_plain}};
#endif

// Scales of one row by BLOCK of inputs: MXFP4's own, tables of int4, or numbers, for which there is room.
static const uint8_t *scales_of(int kind, const matrix *m, long at, table *tables, void *made) {
    long groups = m->inputs / m->scale_inputs, each = m->scale_inputs / BLOCK;
    const uint16_t *halves = (const uint16_t *)m->scales + at * groups;
    const float *floats = (const float *)m->scales + at * groups;
    if (m->format == MXFP4) return (const uint8_t *)m->scales + at * groups;
    const table **of_int4 = made;
    float *of_fp8 = made;
    for (long g = 0; g < groups; g++) {
        if (m->format == FP8) for (long b = 0; b < each; b++) *of_fp8++ = floats[g];
        else for (long b = 0; b < each; b++) *of_int4++ = tables + g;
#ifdef HAS_X86
        if (m->format == INT4 && kind != PLAIN) fill_int4_avx2(tables + g, wide(halves[g]));
#endif
        if (m->format == INT4 && kind == PLAIN) fill(tables + g, INTEGERS, wide(halves[g]));
    }
    if (m->format == FP8) *of_fp8 = 0; else *of_int4 = &zeros;
    return made;
}

// `count` products of an expert with `x`, from output `row` on, rounded, and with their bias.
static void products(int kind, const matrix *m, int64_t expert, long row, long count, const float *x, float *out) {
    uint16_t copy[m->k_stride == 1 ? 1 : m->inputs];
    table tables[m->format == INT4 ? m->inputs / m->scale_inputs : 1];
    const table *made[m->format == BF16 ? 1 : m->inputs / BLOCK + 1];
    for (long n = 0; n < count; n++, row++) {
        long at = expert * m->expert_stride + row * m->row_stride;
        const uint8_t *from = (const uint8_t *)m->weight + (m->format == BF16 ? 2 * at : at);
        const uint8_t *scales = from; // bf16 has none
        int64_t scale = (expert * m->outputs + row) / m->scale_outputs;
        if (m->format != BF16) scales = scales_of(kind, m, scale, tables, made);
        if (m->k_stride != 1) {
            for (long k = 0; k < m->inputs; k++) copy[k] = ((const uint16_t *)from)[k * m->k_stride];
            from = (const uint8_t *)copy;
        }
        out[n] = rounded(DOTS[kind][m->format](m, from, scales, x));
        if (m->bias) out[n] = rounded(out[n] + wide(m->bias[expert * m->outputs + row]));
    }
}

static float exp_of_minus(float x) {
    float t = x > -88 ? -x : 88;
    t = t > -87 ? t : -87;
    float power = (t * 1.44269504f + 12582912.f) - 12582912.f;
    float r = (t - power * 0.693359375f) - power * -2.12194440e-4f;
    float y = 1.9875691500e-4f * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.f;
    y = y * of_bits((uint32_t)((int)power + 127) << 23);
    return x > -88 ? y : of_bits(0x7F800000);
}

// `limit` 0: SiLU; else gpt-oss's clamped unit.
static float activated(float gate, float up, float alpha, float limit) {
    if (limit == 0) return rounded(rounded(gate / (1.f + exp_of_minus(gate))) * up);
    gate = rounded(gate > limit ? limit : gate);
    up = rounded(up > limit ? limit : up < -limit ? -limit : up);
    float sigmoid = rounded(1.f / (1.f + exp_of_minus(rounded(gate * alpha))));
    return rounded(rounded(up + 1.f) * rounded(gate * sigmoid));
}

// -- a pool: its caller and its threads take tiles of the first product, then of the second

enum { FINE, NO_MEMORY, STUCK };
typedef struct { int64_t expert, first, count; } group; // pairs of token and expert, by expert: order[first], ...
typedef struct pool pool;
struct pool {
    int threads, kind, is_broken; // the caller is one of the threads
    void (*take)(pool *, int64_t tile); // of this round
    double spin_s, patience_s;
    request asked;
    int64_t num_groups, num_here, tiles_of_a_group, tiles, *order, x_stride, inner_stride, unpacked;
    group *groups;
    float *x, *inner; // [tokens, x_stride], [pairs, inner_stride]: zeros up to a multiple of LANES
    _Atomic uint64_t claims; // number of the round << 32, and how many of its tiles nobody has taken
    _Atomic uint32_t bell, done, sleepers, caller_sleeps, started, is_closing;
    struct { pthread_t thread; int core; } seats[];
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void pin(int core) { // where it cannot, threads are slower and as right
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    sched_setaffinity(0, sizeof set, &set);
}

static void wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, 0, 0, 0); }

static void sleep_while(_Atomic uint32_t *word, uint32_t value, const struct timespec *at_most) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, at_most, 0, 0);
}

// Whether `word` differs from `value` within `seconds`.
static int spin_while(_Atomic uint32_t *word, uint32_t value, double seconds) {
    for (double end = now() + seconds; now() < end;)
        for (int i = 0; i < 32; i++) {
            if (atomic_load(word) != value) return 1;
#ifdef HAS_X86
            _mm_pause();
#endif
        }
    return 0;
}

static void first_tile(pool *p, int64_t tile) {
    const request *r = &p->asked;
    const group *g = p->groups + tile / p->tiles_of_a_group;
    long inner = r->gate_up.outputs / 2, row = tile % p->tiles_of_a_group * TILE;
    long count = inner - row < TILE ? inner - row : TILE, step = r->interleaved ? 2 : 1;
    float both[2 * TILE], *up = both + (r->interleaved ? 1 : count);
    for (const int64_t *pair = p->order + g->first; pair < p->order + g->first + g->count; pair++) {
        const float *x = p->x + *pair / r->top_k * p->x_stride;
        products(p->kind, &r->gate_up, g->expert, row * step, count * step, x, both);
        if (!r->interleaved) products(p->kind, &r->gate_up, g->expert, row + inner, count, x, up);
        float *into = p->inner + *pair * p->inner_stride;
        for (long n = 0; n < count; n++) both[n] = activated(both[n * step], up[n * step], r->alpha, r->limit);
        for (long n = 0; n < count; n++) into[place(p->kind, r->down.format, row + n)] = both[n];
    }
}

static void second_tile(pool *p, int64_t tile) {
    const request *r = &p->asked;
    long row = tile * TILE, count = r->down.outputs - row < TILE ? r->down.outputs - row : TILE;
    float z[r->tokens * r->top_k][TILE];
    for (const group *g = p->groups; g < p->groups + p->num_groups; g++)
        for (const int64_t *pair = p->order + g->first; pair < p->order + g->first + g->count; pair++)
            products(p->kind, &r->down, g->expert, row, count, p->inner + *pair * p->inner_stride, z[*pair]);
    if (r->is_apart) {
        for (const int64_t *pair = p->order; pair < p->order + p->num_here; pair++)
            for (long n = 0; n < count; n++) r->out[*pair * r->down.outputs + row + n] = narrow(z[*pair][n]);
        return;
    }
    for (int64_t t = 0; t < r->tokens; t++) {
        float total[TILE] = {0};
        for (int64_t pair = t * r->top_k; pair < (t + 1) * r->top_k; pair++)
            for (long n = 0; n < count; n++) {
                int is_expert = r->ids[pair] >= 0 && r->ids[pair] < r->num_experts;
                float share = is_expert ? z[pair][n] * r->weights[pair] : of_bits(0x7FC00000);
                total[n] += r->weights_are_bf16 ? rounded(share) : share;
            }
        for (long n = 0; n < count; n++) r->out[t * r->down.outputs + row + n] = narrow(total[n]);
    }
}

// Rows of one expert's weights, for products of many rows.
static void unpacked_tile(pool *p, int64_t tile) {
    const matrix *m = &p->asked.gate_up;
    table tables[m->format == INT4 ? m->inputs / m->scale_inputs : 1];
    const table *made[m->inputs / BLOCK + 1];
    float w[LANES];
    for (long row = tile * TILE; row < (tile + 1) * TILE && row < m->outputs; row++) {
        const uint8_t *codes = (const uint8_t *)m->weight + p->unpacked * m->expert_stride + row * m->row_stride;
        int64_t scale = (p->unpacked * m->outputs + row) / m->scale_outputs;
        const uint8_t *scales = scales_of(p->kind, m, scale, tables, made);
        for (long k = 0; k < m->inputs; k += LANES) {
            long count = m->inputs - k < LANES ? m->inputs - k : LANES;
            widen(m, codes, scales, k, count, w);
            for (long i = 0; i < count; i++) p->asked.out[row * m->inputs + k + i] = narrow(w[i]);
        }
    }
}

static void take_tiles(pool *p) {
    for (uint64_t was = atomic_load(&p->claims); (uint32_t)was;) {
        if (!atomic_compare_exchange_weak(&p->claims, &was, was - 1)) continue;
        // What is read from here on stays: the round does not end before this tile is done.
        p->take(p, p->tiles - (uint32_t)was);
        atomic_fetch_add(&p->done, 1);
        if (atomic_load(&p->caller_sleeps)) wake(&p->done);
        was = atomic_load(&p->claims);
    }
}

static void *work(void *given) {
    pool *p = given;
    pin(p->seats[atomic_fetch_add(&p->started, 1) + 1].core);
    fesetenv(FE_DFL_ENV); // a thread starts with the modes of the one that starts it: denormals may be off there
    for (uint32_t seen = 0; !atomic_load(&p->is_closing); seen = atomic_load(&p->bell), take_tiles(p)) {
        if (spin_while(&p->bell, seen, p->spin_s)) continue;
        atomic_fetch_add(&p->sleepers, 1);
        while (atomic_load(&p->bell) == seen) sleep_while(&p->bell, seen, 0);
        atomic_fetch_sub(&p->sleepers, 1);
    }
    return 0;
}

static void ring(pool *p) {
    atomic_fetch_add(&p->bell, 1);
    if (atomic_load(&p->sleepers)) wake(&p->bell);
}

// All tiles of one round. A tile takes microseconds: where none ends in `patience_s`, a thread that has one is lost.
static int run_round(pool *p, void (*take)(pool *, int64_t), int64_t tiles) {
    const struct timespec slice = {0, 100000000}; // all that a process which was stopped has lost when it continues
    p->take = take, p->tiles = tiles;
    atomic_store(&p->done, 0);
    atomic_store(&p->claims, ((atomic_load(&p->claims) >> 32) + 1) << 32 | tiles);
    ring(p);
    take_tiles(p);
    uint32_t done = atomic_load(&p->done), before = done;
    for (double waited = 0; done < tiles && waited < p->patience_s; before = done) {
        double begin = now();
        if (!spin_while(&p->done, done, p->spin_s)) {
            atomic_store(&p->caller_sleeps, 1);
            sleep_while(&p->done, done, &slice);
            atomic_store(&p->caller_sleeps, 0);
        }
        double passed = now() - begin;
        waited = (done = atomic_load(&p->done)) != before ? 0 : waited + (passed < .1 ? passed : .1);
    }
    return done < tiles ? STUCK : FINE;
}

// x as the instructions want it, and pairs by expert.
static void prepare(pool *p, const request *r, int64_t pairs) {
    for (int64_t t = 0; t < r->tokens; t++)
        for (int64_t k = 0; k < r->gate_up.inputs; k++)
            p->x[t * p->x_stride + place(p->kind, r->gate_up.format, k)] = wide(r->x[t * r->gate_up.inputs + k]);
    p->num_groups = p->num_here = 0;
    for (int64_t i = 0, count = 0; i < pairs; i++) {
        int64_t expert = r->ids[i], before = 0;
        while (before < i && r->ids[before] != expert) before++;
        if (before < i || expert < 0 || expert >= r->num_experts) continue;
        group *g = p->groups + p->num_groups++;
        *g = (group){expert, count, 0};
        for (int64_t j = i; j < pairs; j++)
            if (r->ids[j] == expert) p->order[count++] = j, g->count++;
        p->num_here = count;
    }
}

// The modes of C and the pool's core, while the caller takes tiles; `leave` gives back its own.
typedef struct { fenv_t modes; cpu_set_t cores; int was_read; } own;
static own enter(const pool *p) {
    own o;
    o.was_read = !sched_getaffinity(0, sizeof o.cores, &o.cores);
    if (o.was_read && p->threads > 1 && CPU_ISSET(p->seats[0].core, &o.cores)) pin(p->seats[0].core);
    fegetenv(&o.modes), fesetenv(FE_DFL_ENV);
    return o;
}
static void leave(const own *o) {
    fesetenv(&o->modes);
    if (o->was_read) sched_setaffinity(0, sizeof o->cores, &o->cores);
}

// 0, or why there is no result: after `STUCK` a thread may still read and write what the request names.
int experts_run(pool *p, const request *r) {
    if (p->is_broken) return STUCK;
    int64_t pairs = r->tokens * r->top_k;
    p->asked = *r;
    p->x_stride = (r->gate_up.inputs + LANES - 1) / LANES * LANES;
    p->inner_stride = (r->down.inputs + LANES - 1) / LANES * LANES;
    p->tiles_of_a_group = (r->down.inputs + TILE - 1) / TILE;
    size_t bytes = (r->tokens * p->x_stride + pairs * p->inner_stride) * sizeof *p->x;
    p->x = aligned_alloc(LANES, bytes); // a load of a whole register is within a line of the cache
    p->groups = malloc(pairs * (sizeof *p->groups + sizeof *p->order));
    int code = p->x && p->groups ? FINE : NO_MEMORY;
    if (!code) {
        own o = enter(p);
        p->inner = p->x + r->tokens * p->x_stride, p->order = (int64_t *)(p->groups + pairs);
        memset(p->x, 0, bytes);
        prepare(p, r, pairs);
        code = run_round(p, first_tile, p->num_groups * p->tiles_of_a_group);
        if (!code) code = run_round(p, second_tile, (r->down.outputs + TILE - 1) / TILE);
        leave(&o);
    }
    if (code == STUCK) p->is_broken = 1;
    else free(p->x), free(p->groups);
    return code;
}

// Weights of one expert, bf16 [outputs, inputs]; the result as above.
int experts_unpack(pool *p, const matrix *m, int64_t expert, uint16_t *out) {
    if (p->is_broken) return STUCK;
    p->asked.gate_up = *m, p->asked.out = out, p->unpacked = expert;
    own o = enter(p);
    int code = run_round(p, unpacked_tile, (m->outputs + TILE - 1) / TILE);
    leave(&o);
    p->is_broken = code == STUCK;
    return code;
}

// Ends the threads. Where one does not end in time, the memory of the pool stays.
void experts_stop(pool *p) {
    struct timespec end;
    atomic_store(&p->is_closing, 1);
    ring(p);
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 1 + (time_t)p->patience_s;
    for (int i = 1; i < p->threads; i++)
        if (pthread_timedjoin_np(p->seats[i].thread, 0, &end)) p->is_broken = 1;
    if (!p->is_broken) free(p);
}

// `cores` [threads]: the caller's, then the others'. NULL: the system has no memory or no thread for it.
pool *experts_start(int threads, const int *cores, int kind, double spin_s, double patience_s) {
    pool *p = calloc(1, sizeof *p + threads * sizeof *p->seats);
    if (!p) return 0;
    p->kind = kind, p->spin_s = spin_s, p->patience_s = patience_s;
    for (int i = 0; i < threads; i++) p->seats[i].core = cores[i];
    for (p->threads = 1; p->threads < threads; p->threads++)
        if (pthread_create(&p->seats[p->threads].thread, 0, work, p)) {
            experts_stop(p);
            return 0;
        }
    return p;
}

// The best instructions of this processor.
int experts_best(void) {
#ifdef HAS_X86
    if (__builtin_cpu_supports("avx512f")) return WITH_AVX512;
    if (__builtin_cpu_supports("avx2")) return WITH_AVX2;
#endif
    return PLAIN;
}
