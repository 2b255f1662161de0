"""Products of an expert by the functions that the kernels of ordered experts call, before anything is rounded."""

# ruff: noqa: N803
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.experts import order_kernels, ordered
from headrace.experts.order import Projection

_dot = order_kernels._dot


@triton.jit(do_not_specialize=["one"])
def _dots_kernel(
    x, w, scales, x_stride, expert_stride, one, out, expert, N, K: tl.constexpr, FORMAT: tl.constexpr,
    ROW_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_K: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_2: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    y = _dot(
        x + token * x_stride, w + expert.to(tl.int64) * expert_stride,
        scales + expert.to(tl.int64) * (N // SCALE_ROWS * (K // SCALE_K)),
        row, row < N, one, FORMAT, K, ROW_STRIDE, K_STRIDE, SCALE_ROWS, SCALE_K, ROWS, LANES, CHUNK, CHUNKS, GROUPS,
        GROUPS_2,
    )  # fmt: skip
    tl.store(out + token * N + row, y, mask=row < N)


def launch(projection: Projection, expert: int, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Float32 [tokens, outputs] of bf16 [tokens, inputs], and the compiled kernel."""
    outputs = projection.outputs_and_inputs()[0]
    (read, weight, scales, _, *strides), options, rows = ordered._arguments(x, projection, 0)
    del options["BIAS"]
    out = torch.empty(len(x), outputs, device=x.device)
    kernel: Any = _dots_kernel[(triton.cdiv(outputs, rows), len(x))]
    return out, kernel(read, weight, scales, *strides, out, expert, outputs, **options)


def dots_by_kernel(projection: Projection, expert: int, x: torch.Tensor) -> torch.Tensor:
    return launch(projection, expert, x)[0]
