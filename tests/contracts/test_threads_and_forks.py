"""The promise: ``remove()`` and ``fork()`` beside forwards of another thread end soon, with right outputs or errors."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from interrupts import MODES
from isolated import HERE, environment


def run(what: str, mode: str, rounds: int) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "threads_and_forks.py"), what, mode, str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=environment())
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_remove_beside_forwards(mode: str) -> None:
    found = run("remove", mode, 60)
    assert set(found["removals"]) <= {"removed", "refused"}, found
    assert set(found["forwards"]) <= {"right", "refused"}, found
    assert set(found["after"]) == {"right"}, found
    assert found["ended"], found
    assert found["slowest_s"] < 10, found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["resident", *MODES])
def test_fork_beside_forwards(mode: str) -> None:
    """``resident`` shows that it is not torch that hangs."""
    found = run("fork", mode, 12)
    assert set(found["children"]) <= ({"right"} if mode == "resident" else {"right", "refused"}), found
    assert set(found["forwards"]) == {"right"}, found
    assert found["ended"], found
