"""The promise: the solver of today makes plans as fast as those that were measured for the report.

Made again from the probe that is kept beside it. Candidates may change, and with them a plan; its predicted step may
not get slower by more than a hundredth.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from decoder_models import CONFIGS
from headrace.config import Prefetch
from headrace.model.inventory import take_inventory
from headrace.model.memory_profile import profile_of
from headrace.plan.build import Planner as Solver
from headrace.plan.build import build_plan
from headrace.plan.cost_model import Forecaster
from headrace.plan.plan import assemble
from headrace.transfer.machine_probe import named_machine, read_probe
from plan_predictions import Contest, Planner, build

REPORT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "2026-11-21-plan-h200.jsonl"
PROBE = REPORT.with_name("2026-11-21-plan-h200-probe.json")


def published(stack: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in REPORT.read_text().splitlines()]
    return [row for row in rows if row["stack"] == stack and row["case"] == "penstock"]  # the name then


def contest_of(planner: Planner, name: str) -> Contest:
    return planner.at_share(float(name[:-1]) / 100) if name.endswith("%") else planner.against(name)


def slowdowns(stack: str) -> Iterator[float]:
    model, profile = build(stack)
    inventory = take_inventory(model)
    rates = read_probe(PROBE).gpu_rates()
    assert rates is not None
    rows = published(stack)
    planner = Planner(inventory, rates, profile, sorted({row["rows"] for row in rows}))
    for name in sorted({row["contest"] for row in rows}):
        made = contest_of(planner, name)
        for row in (row for row in rows if row["contest"] == name):
            mine = next(plan for key, plan in made.plans.items() if "headrace" in key and row["rows"] in made.rows[key])
            yield Forecaster(inventory, rates, profile, row["rows"])(mine).step_s * 1e3 / row["predicted_ms"]


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["qwen3-8b", "deepseek-v2-lite"])
def test_no_plan_is_slower_than_the_one_that_was_measured(stack: str) -> None:
    found = list(slowdowns(stack))
    assert len(found) >= 30
    assert max(found) <= 1.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_offloaded", "measured_ms"),
    [
        ("qwen3-8b", False, 9.26),
        ("qwen3-8b", True, 62.89),  # every fourth layer
        ("qwen3-30b-a3b", False, 12.35),
    ],
)
def test_steps_of_transformers_in_graphs(name: str, is_offloaded: bool, measured_ms: float) -> None:
    """On an H200, `benchmarks/decode_step.py --rows 1 --variants resident+graph`: the eager forward, captured."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.bfloat16)
    _, rates = named_machine("h200")
    inventory, profile = take_inventory(model), profile_of(model, 256)
    plan = build_plan(inventory, Prefetch(4, 1, 1)) if is_offloaded else assemble(inventory, [], 0, "cpu")
    planner = Solver(inventory, rates, profile, zero_copy=True)
    assert planner.forecast(plan, 1, 256).step_s * 1e3 == pytest.approx(measured_ms, rel=0.1)
