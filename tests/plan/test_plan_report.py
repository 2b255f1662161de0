"""The promise: a plan reads well, whatever its size, mode and shape."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from headrace.plan.plan import Plan, SlabEntry, Unit
from headrace.plan.report import compress_indices, gib, render, role_of


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1, 2, 3, 7], "0-3, 7"),
        (range(64), "0-63"),
        (range(3, 64, 4), "3, 7, 11, ... 63"),
    ],
)
def test_compress_indices(indices: Sequence[int], text: str) -> None:
    assert compress_indices(indices) == text


def test_roles_and_sizes() -> None:
    assert role_of("model.layers.12.mlp.experts.3.up_proj.weight") == "model.layers.*.mlp.experts.*.up_proj.weight"
    assert role_of("h2.conv1d.weight") == "h2.conv1d.weight"
    assert (gib(0), gib(2**30), gib(2**20)) == ("0.000", "1.000", "0.00098")


def test_report_of_a_plan_in_mode_meta() -> None:
    unit = Unit(0, "layer", 0, (SlabEntry("layer.weight", 0, 2**30),), 2**30, "meta")
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(render(Plan((unit,), 1, "meta", {"head.weight": 2**29}, {}), "m"))
    text = console.export_text()
    assert "nowhere" in text
    assert "1 unit" in text
    assert "1 tensor" in text


def test_report_of_memory_that_ranks_share() -> None:
    unit = Unit(0, "layer", 0, (SlabEntry("layer.weight", 0, 2**30),), 2**30, "shm_cpu")
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(render(Plan((unit,), 1, "shm_cpu", {"head.weight": 2**29}, {}), "m"))
    text = console.export_text()
    assert "host, shared" in text
    assert "1.000" in text
