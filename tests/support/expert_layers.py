"""Layers of experts that read those that they are told to, so that a test drives them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
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


class Graph:
    """Steps of ``count`` experts of each layer, captured as the decoding steps of ``generate`` are."""

    def __init__(self, model: Layers, count: int, device: torch.device) -> None:
        from headrace.graphs.decoding import StepGraph  # imports transformers

        self._x, ids = X.to(device), torch.arange(count, device=device)
        if device.type == "cuda":  # else there are no kernels to load
            model(self._x, ids)
        self._step = StepGraph(model, {"x": self._x, "ids": ids}, device, in_parts=True)

    def __call__(self, ids: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = self._step.replay({"x": self._x, "ids": ids.to(self._x.device)})
        return found


def steps(count: int, most: int = 8, seed: int = 0) -> list[torch.Tensor]:
    chooser = np.random.default_rng(seed)
    return [torch.from_numpy(chooser.choice(40, chooser.integers(1, most + 1), replace=False)) for _ in range(count)]


def fail_read(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Have the read of this number, from now on, fail as on a broken disk; the first is 1."""
    count, preadv = [0], os.preadv

    def fail(*arguments: Any) -> int:
        count[0] += 1
        if count[0] == at:
            raise OSError(5, "Input/output error")
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", fail)
