"""The kernel that takes the fingerprints of :mod:`headrace.lifetime.host_copies` on a GPU, in one read of the bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

_BLOCK = 2048


def sums_on_gpu(buffers: Sequence[torch.Tensor], key: torch.Tensor) -> torch.Tensor:
    """Sum, modulo 2^64, of each part of each of ``buffers`` (int32, 1-D), as long as ``key`` (int64, 1-D), times it."""
    words = np.array([len(each) for each in buffers])
    parts = -(-words // len(key))
    number = np.arange(parts.sum()) - np.repeat(parts.cumsum() - parts, parts)  # of a part in its buffer
    begin = np.repeat([each.data_ptr() for each in buffers], parts) + 4 * len(key) * number
    count = np.minimum(len(key), np.repeat(words, parts) - len(key) * number)
    table = torch.from_numpy(np.stack([begin, count])).to(key.device)
    sums = key.new_empty(len(number))
    _sum_parts[(len(sums),)](*table, key, sums, len(key), min(_BLOCK, len(key)), num_warps=8)
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _sum_parts(begin_ptr, count_ptr, key_ptr, sums_ptr, PART: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    part = tl.program_id(0)
    words_ptr, count = tl.load(begin_ptr + part).to(tl.pointer_type(tl.int32)), tl.load(count_ptr + part)
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, PART, BLOCK):
        k = start + tl.arange(0, BLOCK)
        total += tl.load(words_ptr + k, k < count, other=0).to(tl.int64) * tl.load(key_ptr + k)
    tl.store(sums_ptr + part, tl.sum(total, 0))
