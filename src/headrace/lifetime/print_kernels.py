"""The kernel that takes the fingerprints of :mod:`headrace.lifetime.host_copies` on a GPU, in one read of the bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


def sums_on_gpu(words: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Sum, modulo 2^64, of each part of ``words`` (int32, 1-D), as long as ``key`` (int64, 1-D), times ``key``."""
    sums = key.new_empty(triton.cdiv(len(words), len(key)))
    _sum_parts[(len(sums),)](words, key, sums, len(words), len(key), min(_BLOCK, len(key)), num_warps=8)
    return sums


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _sum_parts(words_ptr, key_ptr, sums_ptr, count, PART: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    part = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, PART, BLOCK):
        k = start + tl.arange(0, BLOCK)
        word = tl.load(words_ptr + part * PART + k, part * PART + k < count, other=0)
        total += word.to(tl.int64) * tl.load(key_ptr + k)
    tl.store(sums_ptr + part, tl.sum(total, 0))
