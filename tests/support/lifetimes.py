"""Ways to offload a small model, each with a resident twin, for what an offload does between forwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import headrace
from headrace import UVA, Budget, Handle, Prefetch
from headrace.testing import assert_same_bits
from models import rows, save
from moe_models import cached, outputs, qwen

DIM = 256
UNIT_BYTES = 4 * DIM * DIM


class Layer(nn.Module):
    """A matrix that is offloaded, and a norm with a buffer that each forward writes, as residents."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.linear = nn.Linear(DIM, DIM, bias=False)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + torch.tanh(self.linear(self.norm(x))) + self.count.mean()


class Model(nn.Module):
    """Layers, and a tied pair at the ends."""

    def __init__(self, num_layers: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.last = nn.Linear(DIM, DIM)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@dataclass
class Pair:
    """An offloaded model and its twin; both see the same forwards."""

    handle: Handle
    model: nn.Module
    twin: nn.Module
    run: Callable[[nn.Module], Any]

    def check(self) -> None:
        """Run both, and compare outputs."""
        with torch.no_grad():
            assert_same_bits(self.run(self.model), self.run(self.twin))

    def check_state(self) -> None:
        """Compare all weights and buffers, and end the offload."""
        found, expected = self.model.state_dict(), self.twin.state_dict()
        assert_same_bits({n: t.clone() for n, t in found.items()}, {n: t.clone() for n, t in expected.items()})
        self.handle.remove()
        assert_same_bits(dict(self.model.state_dict()), dict(self.twin.state_dict()))
        self.check()


def _dense(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(5)
    return Model().to(dtype).eval()


POLICIES: dict[str, Any] = {
    "budget": f"{8 * UNIT_BYTES // 2}B",
    "prefetch": Prefetch(1, 1, 2, params=("linear.weight",)),
    "one slot": Prefetch(1, 1, 1, params=("linear.weight",)),
    "all resident": "1GiB",
    "in place": UVA(f"{3 * UNIT_BYTES}B"),
}
WAYS = (*POLICIES, "coded", "coded budget", "checkpoint", "disk", "disk in place", "experts")


def pair(way: str, tmp_path: Path, policy: Any = None) -> Pair:
    """The model offloaded in this way."""
    if way == "experts":
        model = qwen()
        twin = copy.deepcopy(model)
        return Pair(headrace.offload(model, policy or cached(3)), model, twin, outputs)
    coded = way.startswith("coded")
    model = _dense(torch.bfloat16 if coded else torch.float32)
    twin, x = copy.deepcopy(model), rows(DIM).to(torch.bfloat16 if coded else torch.float32)
    options: dict[str, Any] = {}
    if way in ("checkpoint", "disk", "disk in place"):
        options["checkpoint"] = save(model, tmp_path)
    if way == "checkpoint":
        with torch.device("meta"):
            model = Model().eval()
        options["device"] = "cpu"
    policies = POLICIES | {
        "coded": Prefetch(1, 1, 2, params=("linear.weight",), codec="exp3"),
        "coded budget": Budget("600KiB", mode="cpu", codec="exp3"),
        "checkpoint": Budget(f"{4 * UNIT_BYTES}B", mode="cpu"),
        "disk": Prefetch(1, 1, 2, params=("linear.weight",), mode="disk"),
        "disk in place": Budget(f"{4 * UNIT_BYTES}B", mode="disk"),
    }
    handle = headrace.offload(model, policy or policies[way], **options)
    return Pair(handle, model, twin, lambda each: each(x))
