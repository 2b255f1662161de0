"""What a module returns is computed before its unit is released, also when computing it later would be cheap.

The inductor inlines a row lookup into the kernels that use the row. With only the weights declared as written by
``headrace::release``, it did so behind the release, and read the rows from a slot that held another unit.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import headrace
from headrace import Prefetch
from headrace.testing import boundaries


class Lookup(nn.Module):
    """Embedding, two layers, head; all of them units of one slot chain."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Embedding(500, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 500, bias=False)]
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](ids)
        y = torch.tanh(self.layers[1](x)) + x
        return self.layers[3](self.layers[2](y) + x)


@torch.no_grad()
def test_a_lookup_is_not_repeated_behind_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DEBUG", "1")  # released slots are NaN, so a late read cannot look right
    torch.manual_seed(0)
    resident = Lookup().eval()
    model = copy.deepcopy(resident)
    ids = torch.randint(0, 500, (16,))
    policy = Prefetch(1, 1, 2, ["weight"])
    with headrace.offload(model, policy) as handle:
        compiled = torch.compile(model, fullgraph=True)
        outs = [compiled(ids) for _ in range(3)]
        assert [unit.module_fqn for unit in handle.plan.units] == [f"layers.{i}" for i in range(4)]
        assert handle.stats().bytes_moved >= 3 * handle.plan.moved_bytes > 0
        with boundaries(resident, handle.plan):
            torch._dynamo.reset()
            expected = torch.compile(resident, fullgraph=True)(ids)
    for out in outs:
        assert torch.equal(out, expected)
