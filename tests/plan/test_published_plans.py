"""The promise: predictions are those that were measured, and the solver of today makes plans as fast as those.

Plans are made again from the probe that is kept beside their report. Candidates may change, and with them a plan; its
predicted step may not get slower by more than a hundredth. Predictions of tokens are for the machine of the
measurement, and within a tenth of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from decoder_models import CONFIGS
from headrace.cli.bench_step import QWEN3_8B, Stack, parse_policy
from headrace.config import Budget, Policy, Prefetch, Workload
from headrace.model.inventory import take_inventory
from headrace.model.memory_profile import profile_of
from headrace.plan.build import Planner as Solver
from headrace.plan.build import build_plan
from headrace.plan.cost_model import BETWEEN_TOKENS_S, Forecaster
from headrace.plan.plan import assemble
from headrace.plan_model import plan_model
from headrace.planning.request import PlanRequest
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
    step_s = planner.forecast(plan, 1, 256).step_s - BETWEEN_TOKENS_S  # replays follow one another
    assert step_s * 1e3 == pytest.approx(measured_ms, rel=0.1)


def test_coded_steps_take_as_long_as_predicted() -> None:
    """On an H100, whose nominal rates are 2 % off without a code, too."""
    path = REPORT.with_name("2026-11-26-coded-h200.jsonl")
    rows = [row for row in map(json.loads, path.read_text().splitlines()) if row["table"] == "coded"]
    measured = {(row["case"], row["rows"]): row["ms"] for row in rows if row["case"] == "even:0.25+exp3"}
    inventory = take_inventory(Stack(QWEN3_8B, torch.bfloat16, "meta"))
    _, rates = named_machine("h100")
    for (case, count), ms in measured.items():
        policy = parse_policy(case, inventory.num_bytes, inventory.num_bytes // QWEN3_8B.num_layers)
        planner = Solver(inventory, rates)
        step_s = planner.forecast(planner.plan(policy), count).step_s
        assert step_s * 1e3 == pytest.approx(ms, rel=0.05), count
    assert len(measured) == 4


NAMES = {
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "llama-3.3-70b-nf4": "unsloth/Llama-3.3-70B-Instruct-bnb-4bit",
    "gpt-oss-120b": "openai/gpt-oss-120b",
}
# On the H100 in graphs; on the H200 eagerly, of which only what streams all the time is as fast as in graphs.
CARDS = {
    "2026-11-25-card-24gb-h100": ("h100", "graphs"),
    "2026-11-26-generate-h200": ("h200", "graphs"),
    "2026-11-23-card-24gb-h200": ("h200", None),
}


# Of Qwen3-30B-A3B where transformers runs experts of few rows (`batched_mm`), as it did in these reports.
COPYING = {"kernels_per_step": 3199, "copied_experts_bytes_per_row": 75_497_472}


def predicted_ms(model: str, policy: Policy | None, machine: str, rows: int = 1, **experts: int) -> float:
    """A pass of ``rows`` rows."""
    planned = plan_model(PlanRequest(NAMES[model], policy, Workload([1], 256), machine))
    planner = replace(planned.planner, profile=replace(planned.planner.profile, **experts))
    return planner.forecast(planned.plan, rows, 256).step_s * 1e3


def measured_tokens(report: str) -> list[dict[str, Any]]:
    """Rows of `benchmarks/card_24gb.py`, for models that are known by name."""
    rows = [json.loads(line) for line in REPORT.with_name(f"{report}.jsonl").read_text().splitlines()]
    found = [row for row in rows if row["table"].startswith("card") and row.get("model") in NAMES and "ms" in row]
    return [row for row in found if row.get("way") == CARDS[report][1]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no file of it is here")
@pytest.mark.parametrize("report", CARDS)
def test_tokens_take_as_long_as_predicted(report: str) -> None:
    machine, way = CARDS[report]
    compared = 0
    for row in measured_tokens(report):
        experts = COPYING if row["model"] == "qwen3-30b-a3b" else {}
        every_4th = row["case"] == "every 4th layer"
        policy = Prefetch(4, 1, 1) if every_4th else Budget(22 * 10**9, workload=Workload([1], 256))
        if way or row["model"] == "llama-3.3-70b-nf4":
            assert predicted_ms(row["model"], policy, machine, **experts) == pytest.approx(row["ms"], rel=0.1), row
            compared += 1
        if way:
            assert predicted_ms(row["model"], None, machine, **experts) == pytest.approx(row["resident_ms"], rel=0.1), (
                row
            )
            compared += 1
    assert compared == (len(measured_tokens(report)) * 2 if way else 1)


@pytest.mark.filterwarnings("ignore:.*no file of it is here")
@pytest.mark.parametrize(("way", "experts", "runs"), [("own", COPYING, 4), ("ordered", {}, 5)])
def test_tokens_of_experts_take_as_long_as_predicted(way: str, experts: dict[str, int], runs: int) -> None:
    """With headrace's kernels, and with transformers'."""
    rows = map(json.loads, REPORT.with_name("2026-11-28-served-h200.jsonl").read_text().splitlines())
    measured = [row for row in rows if row["table"] == "ordered-experts" and row["case"] == "resident"]
    measured = [row for row in measured if row["way"] == way]
    for row in measured:
        assert predicted_ms(row["model"], None, "h200", **experts) == pytest.approx(row["ms"], rel=0.1), row
    assert len(measured) == runs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no file of it is here")
def test_a_pass_of_five_rows_in_four_bits_takes_as_long_as_predicted() -> None:
    """bitsandbytes writes each matrix in 16 bits first."""
    lines = REPORT.with_name("2026-11-26-speculation-h100.jsonl").read_text().splitlines()
    of_model = (row for row in map(json.loads, lines) if row["model"] == "llama-3.3-70b-nf4")
    (row,) = (row for row in of_model if row["case"] == "lookup")
    measured_ms = row["tokens_per_pass"] / row["resident_tokens_per_s"] * 1e3
    assert predicted_ms("llama-3.3-70b-nf4", None, "h100", row["rows"]) == pytest.approx(measured_ms, rel=0.1)
