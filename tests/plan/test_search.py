"""The promise: whatever is cut from the planner's search, plans stay as fast as those of the full search.

``benchmarks/plan_search.py`` compares all 90 recorded predictions; here are some of them.
"""

from __future__ import annotations

import json

import pytest

import plan_search


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b"])
def test_no_step_is_slower_than_recorded(name: str) -> None:
    recorded = json.loads(plan_search.RECORD.read_text())
    found = dict(plan_search.predictions(name, plan_search.SHARES[1::3], plan_search.WORKLOADS[1:4:2]))
    assert len(found) == 4
    assert max(step_s / recorded[key] for key, step_s in found.items()) <= 1.02


def test_ninety_are_recorded() -> None:
    recorded = json.loads(plan_search.RECORD.read_text())
    assert len(recorded) == 90
    assert {key.split(",")[0] for key in recorded} == set(plan_search.MODELS)
