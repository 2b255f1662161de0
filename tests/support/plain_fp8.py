"""Stands in for the kernel of fp8 in blocks that transformers downloads from its Hub: dequantises, then multiplies.

It reads the same weights and scales at the same places, and repeats its own bits. It quantises no activations, so its
numbers are not those of the kernel.
"""

from __future__ import annotations

from typing import Any

import torch

_ROWS = 16  # of experts that are gathered at once


def install() -> None:
    """Give it to transformers, for models in fp8 of this process."""
    from transformers.integrations import finegrained_fp8

    found: Any = finegrained_fp8
    found._FINEGRAINED_FP8 = found.FineGrainedFP8(matmul, batched_matmul, grouped_matmul)


def dequantised(weight: torch.Tensor, scales: torch.Tensor, block: Any, dtype: torch.dtype) -> torch.Tensor:
    """``weight``: [..., rows, columns]; ``scales``: one per block, or one."""
    if block is None:
        return weight.to(dtype) * scales.to(dtype)
    rows, columns = weight.shape[-2:]
    full = scales.to(dtype).repeat_interleave(block[0], -2)[..., :rows, :]
    return weight.to(dtype) * full.repeat_interleave(block[1], -1)[..., :columns]


def matmul(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, block_size: Any, dtype: torch.dtype, **_: Any
) -> torch.Tensor:
    """``x``: [..., columns] -> [..., rows]."""
    return x.to(dtype) @ dequantised(weight, scales, block_size, dtype).mT


def batched_matmul(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *, block_size: Any, expert_ids: torch.Tensor, **_: Any
) -> torch.Tensor:
    """``x``: [rows, columns], each row by its expert -> [rows, width]."""
    parts = [
        (chosen @ part.unsqueeze(-1)).squeeze(-1)
        for part, ids in zip(x.split(_ROWS), expert_ids.split(_ROWS), strict=True)
        for chosen in [dequantised(weight[ids], scales[ids], block_size, x.dtype)]
    ]
    return torch.cat(parts)


def grouped_matmul(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *, offsets: torch.Tensor, block_size: Any, **_: Any
) -> torch.Tensor:
    """``x``: [rows, columns], sorted by expert; ``offsets``: where the rows of each end."""
    rows = torch.arange(len(x), device=x.device, dtype=offsets.dtype)
    expert_ids = torch.searchsorted(offsets, rows, right=True).clamp(max=len(weight) - 1)
    return batched_matmul(x, weight, scales, block_size=block_size, expert_ids=expert_ids)
