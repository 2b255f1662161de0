"""The promise: a plan can be made for the cards that people have, by rates that are published and marked as such."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import headrace
from card_plans import CLASSES, MEASURED, MODELS, PIPELINES, README_MODELS, call_row, cpu_rows, rows
from commands import error_of
from headrace.config import Budget
from headrace.errors import OptionError
from headrace.plan_model import plan_model
from headrace.planning.request import PlanRequest
from headrace.transfer.cards import CARDS, MACHINES, OTHER_MAKERS
from headrace.transfer.machine_probe import named_machine

ROOT = Path(__file__).resolve().parents[2]
FLUX = "black-forest-labs/FLUX.1-dev"


@pytest.mark.parametrize("name", CARDS)
def test_every_card_has_rates_and_their_source(name: str) -> None:
    made_for, rates = named_machine(name)
    published = CARDS[name]
    assert made_for.device_bytes == published["gib"] * 2**30
    assert rates.machine == f"{made_for.device}, nominal"
    assert not rates.is_measured
    assert len(published["source"]) > 10
    # A rate above what is published, or a unit mistaken, would be the commonest error here.
    copy = max(rate for _, rate in rates.copy_bytes_per_s.points)
    links = {"pcie3": 16e9, "pcie4x8": 16e9, "pcie4": 32e9, "pcie5x8": 32e9, "pcie5": 64e9, "nvlink-c2c": 450e9}
    assert 10e9 < copy < links[published["link"]]
    assert 200e9 < published["memory_bytes_per_s"] <= 8e12
    assert 20 < published["flops_per_s"] / published["memory_bytes_per_s"] < 500


def test_the_classes_of_memory_that_people_have() -> None:
    sizes = {round(published["gib"]) for published in CARDS.values()}
    assert {12, 16, 24, 31, 79, 178} <= sizes | {round(gib + 0.5) for gib in sizes}


@pytest.mark.parametrize("spelling", ["4060ti", "RTX 4060 Ti", "rtx-4060-ti", "NVIDIA GeForce RTX 4060 Ti"])
def test_as_people_write_them(spelling: str) -> None:
    assert named_machine(spelling)[0].device == "NVIDIA GeForce RTX 4060 Ti"


@pytest.mark.parametrize("name", ["b300", "a800", "a30", "m40", "v100", "rtx2080", "amd.json", "m4.json"])
def test_cards_that_are_not_known_may_be_of_nvidia(name: str) -> None:
    assert OTHER_MAKERS.fullmatch(name) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no file of it is here")
def test_a_card_that_computes_in_host_memory() -> None:
    with pytest.warns(headrace.HeadraceWarning, match="NVIDIA GB10 computes in the host's memory, so .* frees nothing"):
        headrace.make_plan("meta-llama/Llama-3.3-70B-Instruct", "auto", machine="gb10")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "NVIDIA GB10")
        in_files = headrace.make_plan("meta-llama/Llama-3.3-70B-Instruct", Budget("auto", mode="disk"), machine="gb10")
    assert in_files.read_bytes > 0


def copy_bytes_per_s(machine: str) -> float:
    return max(rate for _, rate in named_machine(machine)[1].copy_bytes_per_s.points)


@pytest.mark.slow
def test_another_link() -> None:
    assert copy_bytes_per_s("4090@pcie3") == pytest.approx(copy_bytes_per_s("4090") / 2)
    assert copy_bytes_per_s("4090@pcie4x8") == pytest.approx(copy_bytes_per_s("4090") / 2)
    assert copy_bytes_per_s("4090@pcie5x8") == copy_bytes_per_s("4090@pcie4") == copy_bytes_per_s("4090")
    assert named_machine("4090@pcie3")[1].machine == "NVIDIA GeForce RTX 4090 on pcie3, nominal"
    with pytest.warns(headrace.HeadraceWarning, match="no file"):
        slow, fast = (headrace.make_plan("Qwen/Qwen3-4B", "4GiB", machine=m).prediction for m in ("3090@pcie3", "3090"))
    assert slow.forecasts[0].step_s > 1.5 * fast.forecasts[0].step_s


@pytest.mark.parametrize(("machine", "message"), [
    ("4090@pcie4x3", "--link 'pcie4x3': expected pcie3, pcie4 or pcie5, with its lanes if not 16"),
    ("h200@pcie4", "--link 'pcie4': expected a card with nominal rates, found 'h200', which was measured"),
    ("4009", r"machine '4009': expected h200, .*\(nearest name: 4090"),
    ("abacus", r"\(nearest name: none\)"),
    ("gh200@pcie4", "--link 'pcie4': NVIDIA GH200 480GB is not on PCIe but on nvlink-c2c; leave --link out"),
    *((name, "^machine '.*': headrace runs on NVIDIA GPUs only") for name in (
        "MI300X", "AMD Instinct MI300X", "m4", "M4 Max", "RX 7900 XTX", "rx7900xtx", "Arc B580", "b580", "TPU v5e")),
])  # fmt: skip
def test_what_is_none(machine: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        named_machine(machine)


def test_a_link_needs_a_card() -> None:
    assert "--link has no effect without --machine" in error_of("plan", "Qwen/Qwen3-4B", "--link", "pcie3")


def test_the_guide_lists_them() -> None:
    text = (ROOT / "docs" / "guides" / "another-machine.md").read_text()
    assert all(f"`{name}`" in text for name in MACHINES)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no file of it is here")
def test_the_table_is_what_plans_predict() -> None:
    """After a change: delete the file, and run both commands of its report."""
    file = ROOT / "benchmarks" / "results" / "2026-11-29-card-plans.jsonl"
    published = [json.loads(line) for line in file.read_text().splitlines()]
    calls = [row for row in published if "calls" in row]
    shares = {row["case"]: row for row in published if row["table"] == "card-cpu"}
    whole = [row for row in published if "calls" not in row and row["table"] != "card-cpu"]
    assert [row["case"] for row in whole] == [*MODELS, *PIPELINES]
    assert [row["case"] for row in calls] == [name for _ in CLASSES for name in PIPELINES for _ in ("bf16", "fp8")]
    assert call_row(FLUX, "fp8", 8, CLASSES[8]) == approx_rows(calls[1])
    for name in ("Qwen/Qwen3-8B", FLUX):
        (expected,) = [each for each in whole if each["case"] == name]
        assert next(rows((name,))) == approx_rows(expected)
    assert list(cpu_rows(("Qwen/Qwen3-8B", "openai/gpt-oss-20b"))) == [approx_rows(shares["openai/gpt-oss-20b"])]


def approx_rows(row: Any) -> Any:
    """``row``, whose numbers compare as equal to a millionth."""
    if isinstance(row, dict):
        return {key: approx_rows(value) for key, value in row.items()}
    if isinstance(row, list):
        return [approx_rows(each) for each in row]
    return pytest.approx(row) if isinstance(row, float) else row


def test_the_readme_has_the_models_that_people_run() -> None:
    table = (ROOT / "README.md").read_text().partition("card-plans.jsonl cards -->")[2].partition("<!-- end")[0]
    assert all(f"| {name} |" in table for name in README_MODELS)
    assert len(README_MODELS) <= 16


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no file of it is here")
@pytest.mark.parametrize(("name", "budget"), [(FLUX, "6GiB"), ("Wan-AI/Wan2.2-T2V-A14B-Diffusers", "8GiB")])
def test_a_pass_of_a_pipeline_takes_as_long_as_measured(name: str, budget: str) -> None:
    """On an H200: of FLUX the link's time, of Wan2.2 that of compute."""
    found = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    (row,) = [r for r in found if r["table"] == PIPELINES[name].table and r["case"] == "headrace"]
    pass_s, once_s = PIPELINES[name].pass_s(plan_model(PlanRequest(name, budget, machine="h200")), slower=1.0)
    assert pass_s * 1e3 == pytest.approx(row["ms"], rel=0.1)
    assert 0 < once_s < 0.3
