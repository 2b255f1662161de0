"""Triton kernels in the order of :mod:`headrace.experts.order`: both products of the experts of a few rows.

Launch them with ``enable_fp_fusion=False``: a multiplication and an addition are two roundings. Numbers in bf16 are
read as integers, two in 32 bits where they lie side by side, so no conversion of a compiler's is in use. ``CHUNKS``
chunks are added up at once; this, rows and warps change no bit. ``one`` is 1: a compiler that knew it would give codes,
scales and x to threads in three ways, and move them by shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.experts.kernels import ELSEWHERE


@triton.jit
def _low(bits):
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(bits):
    return (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x):
    """``x`` to the nearest bf16, ties to even, as float32."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, bits, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def _load_bf16(pointers, mask):
    return _low(tl.load(pointers, mask=mask, other=0).to(tl.int32))


@triton.jit
def _load_apart(pointers, mask):
    """From memory that the host writes."""
    return _low(tl.load(pointers, mask=mask, other=0, cache_modifier=".cv").to(tl.int32))


@triton.jit
def _exp_of_minus(x):
    t = tl.where(x > -88.0, -x, 88.0)
    t = tl.where(t > -87.0, t, -87.0)
    power = (t * 1.44269504 + 12582912.0) - 12582912.0
    r = (t - power * 0.693359375) - power * -2.12194440e-4
    value = r * 1.9875691500e-4 + 1.3981999507e-3
    value = value * r + 8.3334519073e-3
    value = value * r + 4.1665795894e-2
    value = value * r + 1.6666665459e-1
    value = value * r + 5.0000001201e-1
    value = value * (r * r) + r + 1.0
    value = value * ((power.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x > -88.0, value, float("inf"))


@triton.jit
def _tree(sums):
    """[A, a power of two] to [A]; a sum of two has one order."""
    for _ in tl.static_range(10):
        if sums.shape[1] > 1:
            sums = tl.sum(tl.reshape(sums, (sums.shape[0], sums.shape[1] // 2, 2)), axis=2)
    return tl.reshape(sums, (sums.shape[0],))


@triton.jit
def _scale(scale, FORMAT: tl.constexpr):
    """A scale of codes, of MXFP4 by its exponent."""
    if FORMAT == "int4":
        return _low(scale.to(tl.int32))
    bits = scale.to(tl.int32) << 23
    return tl.where(bits == 0, 1 << 22, bits).to(tl.float32, bitcast=True)


@triton.jit
def _code(codes, scale, AT, FORMAT: tl.constexpr):
    """The MXFP4 number whose 4 bits begin at bit ``AT``: its bits are a float32's, but for a factor of 2 ** 126.

    Of int4 they are the last ones of a float32 whose unit is 1.
    """
    if FORMAT == "int4":
        return _rounded((((codes >> AT) & 15 | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0) * scale)
    bits = ((codes << (28 - AT)) >> 6) & -0x7E400000  # sign, and three bits from bit 22 on
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * scale


@triton.jit
def _e4m3(codes, scale, AT: tl.constexpr):
    """The number whose 8 bits begin at bit ``AT``: they are a float32's, but for a factor of 2 ** 120 and for NaN."""
    bits = ((codes << (24 - AT)) >> 4) & -0x78100000
    bits = tl.where((bits & 0x7F00000) == 0x7F00000, 0x7FC00000, bits)
    return _rounded(bits.to(tl.float32, bitcast=True) * 1.329227995784916e36 * scale)


@triton.jit
def _lanes_of_fp8(
    x, w, scales, row, keep_row, first, one, K: tl.constexpr, ROW_STRIDE: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_K: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Words of 4 codes; the first two levels of the tree."""
    a0 = tl.zeros((row.shape[0], first.shape[1], LANES // 4), tl.float32)
    a1, a2, a3 = a0, a0, a0
    for step in tl.static_range(CHUNK // LANES):
        word = first // 4 + step * (LANES // 4) + tl.arange(0, LANES // 4)[None, None, :]
        keep = word < K // 4
        codes = tl.load(w + (row * ROW_STRIDE + word * one), mask=keep & keep_row, other=0)
        at = row // SCALE_ROWS * (K // SCALE_K) + word // (SCALE_K // 4)
        scale = tl.load(scales + at, mask=keep & keep_row, other=0)
        x01 = tl.load(x + word * 2, mask=keep, other=0)
        x23 = tl.load(x + word * 2 + 1, mask=keep, other=0)
        a0 += _e4m3(codes, scale, 0) * _low(x01)
        a1 += _e4m3(codes, scale, 8) * _high(x01)
        a2 += _e4m3(codes, scale, 16) * _low(x23)
        a3 += _e4m3(codes, scale, 24) * _high(x23)
    return (a0 + a1) + (a2 + a3)


@triton.jit
def _lanes_of_codes(
    x, w, scales, row, keep_row, first, one, FORMAT: tl.constexpr, K: tl.constexpr, ROW_STRIDE: tl.constexpr,
    SCALE_K: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Words of 8 codes; the first three levels of the tree."""
    a0 = tl.zeros((row.shape[0], first.shape[1], LANES // 8), tl.float32)
    a1, a2, a3, a4, a5, a6, a7 = a0, a0, a0, a0, a0, a0, a0
    for step in tl.static_range(CHUNK // LANES):
        word = first // 8 + step * (LANES // 8) + tl.arange(0, LANES // 8)[None, None, :]
        keep = word < K // 8
        codes = tl.load(w + (row * ROW_STRIDE + word * one), mask=keep & keep_row, other=0)
        s = tl.load(scales + (row * (K // SCALE_K) + word // (SCALE_K // 8)), mask=keep & keep_row, other=0)
        scale = _scale(s, FORMAT)
        x01 = tl.load(x + word * 4, mask=keep, other=0)
        x23 = tl.load(x + word * 4 + 1, mask=keep, other=0)
        x45 = tl.load(x + word * 4 + 2, mask=keep, other=0)
        x67 = tl.load(x + word * 4 + 3, mask=keep, other=0)
        a0 += _code(codes, scale, 0, FORMAT) * _low(x01)
        a1 += _code(codes, scale, 4, FORMAT) * _high(x01)
        a2 += _code(codes, scale, 8, FORMAT) * _low(x23)
        a3 += _code(codes, scale, 12, FORMAT) * _high(x23)
        a4 += _code(codes, scale, 16, FORMAT) * _low(x45)
        a5 += _code(codes, scale, 20, FORMAT) * _high(x45)
        a6 += _code(codes, scale, 24, FORMAT) * _low(x67)
        a7 += _code(codes, scale, 28, FORMAT) * _high(x67)
    return ((a0 + a1) + (a2 + a3)) + ((a4 + a5) + (a6 + a7))


@triton.jit
def _lanes_of_bf16(
    x, w, row, keep_row, first, FORMAT: tl.constexpr, K: tl.constexpr, ROW_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Even and odd lanes apart; the first level of the tree."""
    even = tl.zeros((row.shape[0], first.shape[1], LANES // 2), tl.float32)
    odd = even
    for step in tl.static_range(CHUNK // LANES):
        pair = first // 2 + step * (LANES // 2) + tl.arange(0, LANES // 2)[None, None, :]
        if FORMAT == "pairs":
            xs = tl.load(x + pair, mask=pair < K // 2, other=0)
            ws = tl.load(w + (row * ROW_STRIDE + pair), mask=(pair < K // 2) & keep_row, other=0)
            even += _low(ws) * _low(xs)
            odd += _high(ws) * _high(xs)
        else:
            k = pair * 2
            at = row * ROW_STRIDE + k * K_STRIDE
            even += _load_bf16(w + at, (k < K) & keep_row) * _load_bf16(x + k, k < K)
            odd += _load_bf16(w + at + K_STRIDE, (k + 1 < K) & keep_row) * _load_bf16(x + k + 1, k + 1 < K)
    return even + odd


@triton.jit
def _dot(
    x, w, scales, row, keep_row, one, FORMAT: tl.constexpr, K: tl.constexpr, ROW_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_K: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_2: tl.constexpr,
):  # fmt: skip
    """Products of the rows ``row`` [ROWS] with ``x``, not rounded; ``w`` and ``scales`` begin with their expert."""
    total = tl.zeros((ROWS, GROUPS_2), tl.float32)
    rows, keep_rows = row[:, None, None], keep_row[:, None, None]
    for group in range(GROUPS):
        first = ((group * CHUNKS + tl.arange(0, CHUNKS)) * CHUNK)[None, :, None]
        if FORMAT == "fp8":
            lanes = _lanes_of_fp8(
                x, w, scales, rows, keep_rows, first, one, K, ROW_STRIDE, SCALE_ROWS, SCALE_K, LANES, CHUNK
            )
        elif FORMAT == "mxfp4" or FORMAT == "int4":
            lanes = _lanes_of_codes(
                x, w, scales, rows, keep_rows, first, one, FORMAT, K, ROW_STRIDE, SCALE_K, LANES, CHUNK
            )
        else:
            lanes = _lanes_of_bf16(x, w, rows, keep_rows, first, FORMAT, K, ROW_STRIDE, K_STRIDE, LANES, CHUNK)
        sums = _tree(tl.reshape(lanes, (ROWS * CHUNKS, lanes.shape[2])))
        sums = _tree(tl.reshape(sums, (ROWS, CHUNKS)))
        total = tl.where(tl.arange(0, GROUPS_2)[None, :] == group, sums[:, None], total)
    return _tree(total)


@triton.jit(do_not_specialize=["one"])
def gate_up_kernel(
    x, ids, w, scales, bias, out, num_experts, N, x_stride, expert_stride, one, out_stride, alpha, limit,
    TOP_K: tl.constexpr, INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, CLAMPED: tl.constexpr, FORMAT: tl.constexpr,
    K: tl.constexpr, ROW_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_K: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_2: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """The first product of each expert of each token, and what comes between; ROWS numbers of ``out`` a program.

    x: bf16 [tokens, K], as int32 where FORMAT reads pairs or codes. ids: [tokens, TOP_K]. w: [experts, 2 N, K] in
    FORMAT. scales: [experts, 2 N / SCALE_ROWS, K / SCALE_K]. bias: bf16 [experts, 2 N]. out: bf16
    [tokens * TOP_K, out_stride].
    """
    pair = tl.program_id(0)
    number = tl.load(ids + pair)
    if (number == ELSEWHERE) if SHARED else False:  # the interpreter has no constants that end an `and`
        return
    is_expert = (number >= 0) & (number < num_experts)
    expert = tl.where(is_expert, number, 0).to(tl.int64)
    both = tl.arange(0, 2 * ROWS)
    at = tl.program_id(1) * ROWS + both // 2
    row = 2 * at + both % 2 if INTERLEAVED else at + both % 2 * N
    y = _dot(
        x + pair // TOP_K * x_stride, w + expert * expert_stride,
        scales + expert * (2 * N // SCALE_ROWS * (K // SCALE_K)), row, at < N, one, FORMAT, K, ROW_STRIDE, K_STRIDE,
        SCALE_ROWS, SCALE_K, 2 * ROWS, LANES, CHUNK, CHUNKS, GROUPS, GROUPS_2,
    )  # fmt: skip
    y = _rounded(y)
    if BIAS:
        y = _rounded(y + _load_bf16(bias + expert * 2 * N + row, at < N))
    gate, up = tl.split(tl.reshape(y, (ROWS, 2)))
    if CLAMPED:
        gate = _rounded(tl.where(gate > limit, limit, gate))
        up = tl.where(up > limit, limit, up)
        up = _rounded(tl.where(up < -limit, -limit, up))
        sigmoid = _rounded(tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), 1.0 + _exp_of_minus(_rounded(gate * alpha))))
        y = _rounded(up + 1.0) * _rounded(gate * sigmoid)
    else:
        y = _rounded(tl.div_rn(gate, 1.0 + _exp_of_minus(gate))) * up
    y = tl.where(is_expert, _rounded(y), float("nan"))
    at = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tl.store(out + pair.to(tl.int64) * out_stride + at, (y.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=at < N)


@triton.jit(do_not_specialize=["one"])
def down_kernel(
    x, ids, weights, w, scales, bias, out, num_experts, N, x_stride, expert_stride, one, apart, TOP_K: tl.constexpr,
    BIAS: tl.constexpr, ROUNDED: tl.constexpr, FORMAT: tl.constexpr, K: tl.constexpr, ROW_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_K: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_2: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """The second product, and the sum over the experts of a token in their order; ROWS outputs a program.

    apart: bf16 [tokens * TOP_K, N], outputs of experts that are ELSEWHERE, with their bias; None unless SHARED.
    x: ``out`` of :func:`gate_up_kernel`. weights: [tokens, TOP_K], bf16 if ROUNDED, else float32. out: bf16
    [tokens, N].
    """
    token = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), tl.float32)
    for which in range(TOP_K):
        pair = token * TOP_K + which
        number = tl.load(ids + pair)
        expert = tl.where((number >= 0) & (number < num_experts), number, 0).to(tl.int64)
        if (number == ELSEWHERE) if SHARED else False:  # a name for it would be a tensor
            y = _load_apart(apart + pair.to(tl.int64) * N + row, row < N)
        else:
            y = _dot(
                x + pair * x_stride, w + expert * expert_stride, scales + expert * (N // SCALE_ROWS * (K // SCALE_K)),
                row, row < N, one, FORMAT, K, ROW_STRIDE, K_STRIDE, SCALE_ROWS, SCALE_K, ROWS, LANES, CHUNK, CHUNKS,
                GROUPS, GROUPS_2,
            )  # fmt: skip
            y = _rounded(y)
            if BIAS:
                y = _rounded(y + _load_bf16(bias + expert * N + row, row < N))
        if ROUNDED:
            total += _rounded(y * _load_bf16(weights + pair, True))
        else:
            total += y * tl.load(weights + pair)
    bits = _rounded(total).to(tl.int32, bitcast=True) >> 16
    tl.store(out + token.to(tl.int64) * N + row, bits.to(tl.int16), mask=row < N)


@triton.jit
def values_kernel(w, scales, out, num_words, FORMAT: tl.constexpr, SCALE_K: tl.constexpr, BLOCK: tl.constexpr):
    """Weights of one expert as bf16; BLOCK words of 8 codes a program, each read once.

    w: int32 [N, K / 8], codes of MXFP4 or int4. scales: [N, K / SCALE_K]. out: bf16 [N, K].
    """
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    codes = tl.load(w + word, mask=word < num_words, other=0)
    scale = _scale(tl.load(scales + word // (SCALE_K // 8), mask=word < num_words, other=0), FORMAT)
    at = tl.arange(0, 8)[None, :]
    bits = _rounded(_code(codes, scale, at * 4, FORMAT)).to(tl.int32, bitcast=True) >> 16
    tl.store(out + word * 8 + at, bits.to(tl.int16), mask=word < num_words)
