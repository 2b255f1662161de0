"""The promise: what is published of two GPUs against four is what plans predict and what ran, or says "not run"."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import copies_beside_collectives
import two_four_plans

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "benchmarks" / "results" / "2026-11-26-two-against-four.jsonl"
pytestmark = pytest.mark.filterwarnings("ignore:.*planned from config.json alone")


def test_the_published_rows_are_what_plans_predict() -> None:
    """After a change: delete the file, and run both commands of its report."""
    published = [json.loads(line) for line in FILE.read_text().splitlines()]
    found = list(two_four_plans.predictions())
    assert [(row["case"], row["recipe"]) for row in found] == [
        (row["case"], row["recipe"]) for row in published if row["status"] == "predicted"
    ]
    for row, wanted in zip(found, published, strict=False):
        assert row["requests_per_s_gpu"] == pytest.approx(wanted["requests_per_s_gpu"])
        assert row["moved_bytes"] == wanted["moved_bytes"]
        assert (row["moved_bytes"] > 0) == (row["case"] == "two")


def test_two_gpus_do_not_hold_the_model() -> None:
    two, four = two_four_plans.Rank(2, offloads=True), two_four_plans.Rank(4, offloads=False)
    asked = two_four_plans.RECIPES["2047 in, 1 out"]
    assert two.weight_bytes > two_four_plans.LEFT_BYTES > two.predicted(asked)["rank_device_bytes"]
    assert four.weight_bytes < two_four_plans.LEFT_BYTES
    assert 60e9 < 2 * two.weight_bytes < 110e9


def test_a_prefill_step_is_predicted_to_hide_the_copies() -> None:
    rows = list(two_four_plans.predictions())
    first = next(line for line in two_four_plans.ratios(rows) if "2047 in" in line)
    assert float(first.split()[-4]) > 1.07


def test_what_was_not_run_is_named() -> None:
    measured = {"case": "two", "recipe": "2047 in, 1 out", "status": "measured"}
    missing = two_four_plans.with_missing([measured])[1:]
    assert {row["status"] for row in missing} == {"not run"}
    assert ("two", "2047 in, 1 out") not in {(row["case"], row["recipe"]) for row in missing}
    assert ("four", "2047 in, 1 out") in {(row["case"], row["recipe"]) for row in missing}
    assert all(row["requests_per_s_gpu"] is None for row in missing)


def test_steps_are_told_from_the_times_of_first_tokens() -> None:
    found = {"itls": [[], [], []], "start_times": [5.0, 5.0, 5.1], "ttfts": [0.75, 0.25, 0.652]}
    assert two_four_plans.step_ms(found) == pytest.approx([250, 502])


def test_steps_of_one_request_are_those_between_its_tokens() -> None:
    assert two_four_plans.step_ms({"itls": [[0.5, 0.25], [0.25]]}) == [500, 250]


def test_the_published_steps_are_as_long_as_the_recipe() -> None:
    rows = [json.loads(line) for line in FILE.read_text().splitlines()]
    recipes = [row for row in rows if row.get("tokens_out") == 1]
    assert len(recipes) == 5
    for row in recipes:
        assert sum(row["step_ms"]) == pytest.approx(1e3 * row["duration_s"], rel=0.01)


@pytest.mark.slow
def test_copies_beside_collectives_compare_bits() -> None:
    rows = copies_beside_collectives.measure(2, tiny=True)
    assert [(row["rank"], row["rows"]) for row in rows] == [(0, 8192), (1, 8192), (0, 16), (1, 16)]
    assert all(row["bit_equal"] for row in rows)
    assert all(row["copy_beside_gb_per_s"] > 0 and row["all_reduce_beside_ms"] > 0 for row in rows)
