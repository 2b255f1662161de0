"""Modules that use weights outside their own call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import headrace
from models import DIM

EVERYTHING = headrace.Rules([("ALL_MODEL_PARAMS", "prefetch")])


class Table(nn.Module):
    """A module whose output is made of its own weight."""

    def __init__(self, give: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))
        self.give = give

    def forward(self) -> Any:
        return self.give(self.weight)


class Around(nn.Module):
    """Layers, and a table before them whose rows are added to what they return."""

    def __init__(self, give: Callable[[nn.Parameter], Any], take: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.table = Table(give)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.take = take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.table()
        for layer in self.layers:
            x = layer(x)
        return x + self.take(given)


class Reads(nn.Module):
    """A parent that reads the weight of a child, which it also calls unless told not to."""

    def __init__(self, calls: bool = True) -> None:
        super().__init__()
        self.first, self.lin, self.last = (nn.Linear(DIM, DIM) for _ in range(3))
        self.calls = calls
        self.reads = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.reads:
            x = x + F.linear(x, self.lin.weight)
        return self.last(self.lin(x) if self.calls else x)
