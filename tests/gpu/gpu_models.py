"""Models of the GPU tests: small, but with layers large enough that copies take measurable time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import headrace

WIDTH = 512


class Block(nn.Module):
    """A gated MLP with a norm, and arithmetic on a weight alone, which a wrong ordering edge would hoist."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate_proj = nn.Linear(width, 2 * width, bias=False)
        self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)
        self.packed = nn.Parameter(torch.randint(-8, 8, (width, width), dtype=torch.int8), requires_grad=False)
        self.register_buffer("zero", torch.tensor(0.5))
        self.register_buffer("scale", torch.tensor(0.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))
        return x + F.linear(x, ((self.packed - self.zero) * self.scale).to(x.dtype))


class Stack(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, num_layers: int, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 1000, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(num_layers: int = 7, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Stack:
    torch.manual_seed(seed)
    model = Stack(num_layers).eval().requires_grad_(False).to(dtype)
    return model.to(device)


def twins() -> tuple[Stack, Stack]:
    """One that stays resident, and one to offload."""
    resident = build()
    return resident, copy.deepcopy(resident)


@contextmanager
def offloaded(model: nn.Module, *args: Any, **options: Any) -> Iterator[headrace.Handle]:
    """An offload whose end is the end of all graphs captured over it."""
    handle = headrace.offload(model, *args, **options)
    try:
        yield handle
    finally:
        handle.remove(graphs_released=True)
