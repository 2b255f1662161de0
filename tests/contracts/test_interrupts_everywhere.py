"""The promise: after an interrupt at any line of ours the model is right, or it raises, and a second call restores it.

``scripts/test-interrupts`` interrupts every line; here it is a sample of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import interrupts

POINTS = 30  # per phase and mode


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for job, result in interrupts.run_all(interrupts.PHASES, interrupts.MODES, "line", POINTS, jobs=2):
        found.setdefault((job["phase"], job["mode"]), []).append({**result, "at": job["at"]})
    return found


@pytest.mark.parametrize("mode", interrupts.MODES)
@pytest.mark.parametrize("phase", interrupts.PHASES)
def test_interrupted(phase: str, mode: str, runs: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    results = runs[phase, mode]
    bad = [
        f"--phases {phase} --modes {mode} --at {result['at']}: {result['outcome']} at {result['place']}: "
        f"{'; '.join(result['notes'][:1])[:200]}"
        for result in results
        if result["outcome"] not in interrupts.GOOD
    ]
    counts = Counter(result["outcome"] for result in results)
    assert not bad, f"{dict(counts)}; python tests/support/interrupts.py with\n" + "\n".join(bad)
    assert counts["right"] + counts["repeated"] >= POINTS * 0.8


@pytest.mark.parametrize(("phase", "mode"), [(phase, mode) for phase in interrupts.PHASES for mode in interrupts.MODES])
def test_nothing_is_left_behind(phase: str, mode: str, runs: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    """Threads that an interrupted call has started end, at the latest with ``remove()``."""
    assert not [(result["place"], result["leaked"]) for result in runs[phase, mode] if result["leaked"]]
