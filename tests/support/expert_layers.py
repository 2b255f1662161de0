"""Layers of experts that read those that they are told to, so that a test drives them."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import headrace

X = torch.linspace(-1, 1, 128)


class Experts(nn.Module):
    """A module of one's own that reads the experts it is told to, of 96 KiB and a bias each."""

    def __init__(self, num_experts: int = 40) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, 192, 128))
        self.bias = nn.Parameter(torch.randn(num_experts, 192))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        experts, rows = headrace.expert_rows(self, ids)
        return torch.einsum("eoi,i->eo", experts.up[rows], x) + experts.bias[rows]


class Layers(nn.Module):
    def __init__(self, count: int = 2, num_experts: int = 40) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Experts(num_experts) for _ in range(count))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x, ids) for layer in self.layers]


def steps(count: int, most: int = 8, seed: int = 0) -> list[torch.Tensor]:
    chooser = np.random.default_rng(seed)
    return [torch.from_numpy(chooser.choice(40, chooser.integers(1, most + 1), replace=False)) for _ in range(count)]
