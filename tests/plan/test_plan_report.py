"""The promise: a plan reads well, whatever its size, mode and shape."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import pytest
import torch

import headrace
from headrace.config import Mode
from headrace.formatting import format_rate, format_size, format_time
from headrace.plan.kinds import Unit
from headrace.plan.plan import Plan
from headrace.plan.slabs import SlabEntry
from headrace.plan.tables import compress_indices, role_of
from plans import plan_text


@pytest.mark.parametrize(
    ("indices", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 3, 7], "0-3, 7"), (range(64), "0-63"), (range(3, 64, 4), "3, 7, 11, ... 63")],
)
def test_compress_indices(indices: Sequence[int], text: str) -> None:
    assert compress_indices(indices) == text


def test_roles() -> None:
    assert role_of("model.layers.12.mlp.experts.3.up_proj.weight") == "model.layers.*.mlp.experts.*.up_proj.weight"
    assert role_of("h2.conv1d.weight") == "h2.conv1d.weight"


@pytest.mark.parametrize(
    ("mode", "shown"), [("meta", ("nowhere", "1 unit", "1 tensor")), ("shm_cpu", ("host, shared", "1.000"))]
)
def test_report_of_a_store(mode: Mode, shown: Sequence[str]) -> None:
    unit = Unit(0, "layer", 0, (SlabEntry("layer.weight", 0, 2**30),), 2**30, mode)
    text = plan_text(Plan((unit,), 1, mode, {"head.weight": 2**29}, {}))
    for words in shown:
        assert words in text


DEEP = "model.layers.{}.self_attn.kv_a_proj_with_mqa.lora_A.default.weight"


@pytest.mark.parametrize("width", [80, 100, 120])
def test_names_are_broken_after_dots_and_tables_fit(width: int) -> None:
    units = tuple(
        Unit(
            index,
            f"model.layers.{3 * index}",
            index % 2,
            (SlabEntry(DEEP.format(index), 0, 2**28 + index),),
            2**29,
            "cpu",
        )
        for index in range(40)
    )
    lines = plan_text(Plan(units, 2, "cpu", {"lm_head.weight": 2**35}, {}), width).splitlines()
    assert max(map(len, lines)) <= width
    at = lines.index(next(line for line in lines if line.startswith("Tensors by role"))) + 4
    name = lines[at].split()[0]
    while name != role_of(DEEP.format(0)):
        at += 1
        assert name.endswith(".")
        name += lines[at].split()[0]
    assert (lines[at].startswith("  ")) == (width < 120)


def test_a_small_model_is_shown_in_mib() -> None:
    unit = Unit(0, "layer", 0, (SlabEntry("layer.weight", 0, 3 * 2**19),), 3 * 2**19, "cpu")
    text = plan_text(Plan((unit,), 1, "cpu", {"head.weight": 2**20, "norm.weight": 1024}, {}))
    assert text.startswith("m: 2.50 MiB of weights in 2.50 MiB of device memory (100 %); 0 B moved per forward")
    assert "Memory, MiB" in text
    assert re.search(r"norm.weight +1 +0.0010 +0.0010", text)
    assert "GiB" not in text


def test_sizes_times_and_rates() -> None:
    sizes = (0, 12, 64 * 2**10, 3_420_000, 2**30, 1250 * 2**30)
    assert [format_size(size) for size in sizes] == ["0 B", "12 B", "64.0 KiB", "3.26 MiB", "1.000 GiB", "1250.000 GiB"]
    times = (0, 8.5e-5, 0.00175, 0.0628, 1.25, 12.5, 136.4, 1360)
    shown = ["0.00 ms", "85.0 us", "1.75 ms", "62.8 ms", "1.25 s", "12.5 s", "136 s", "1,360 s"]
    assert [format_time(seconds) for seconds in times] == shown
    rates = (1342.51, 12.3, 2.567, 0.9, 0.0073)
    assert [format_rate(rate) for rate in rates] == ["1,342.5", "12.3", "2.57", "0.90", "0.0073"]


def test_without_rich_a_plan_says_what_prints_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = headrace.make_plan(torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4))), "300KiB")
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "headrace.plan.tables", raising=False)
    first, tables = str(plan).splitlines()
    assert first.startswith("<headrace.Plan ")
    assert tables == "Its tables need rich, which is not installed: pip install 'headrace[cli]'"
    assert plan._repr_html_() is None
