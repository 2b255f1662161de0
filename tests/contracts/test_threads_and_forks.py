"""The promise: ``remove()`` and ``fork()`` beside forwards of another thread end soon, with right outputs or errors."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

import headrace
from headrace import Prefetch
from headrace.errors import StateError
from headrace.runtime import hooks
from interrupts import MODES
from isolated import HERE, environment
from models import Stack, expecting


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


@torch.no_grad()
def test_a_thread_that_ended_within_a_forward_holds_up_no_other() -> None:
    """As compiled code that raises leaves it: nothing has released the unit that its module was reading."""
    model, x, expected = expecting(Stack(4))
    with headrace.offload(model, Prefetch(1, 1, 1, params=["layers"])) as handle:
        prefetcher = handle._session.prefetcher
        assert prefetcher is not None

        def begin() -> None:
            prefetcher.begin_forward()
            prefetcher.wait(0)

        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
        start = time.monotonic()
        assert torch.equal(model(x), expected)
        assert time.monotonic() - start < 10
        assert handle.stats().bytes_moved > 0


@torch.no_grad()
def test_remove_between_two_steps_of_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread may call it there: IndexError and AttributeError came out, of slots that were gone."""
    model, x, expected = expecting(Stack(4))
    handle = headrace.offload(model, Prefetch(1, 1, 1, params=["layers"]))
    assert torch.equal(model(x), expected)
    assert handle.stats().bytes_moved > 0
    monkeypatch.setattr(hooks, "refuse_tracers", lambda *_: handle.remove())
    with pytest.raises(StateError, match="removed while a forward was running"):
        model.layers[0](x)  # alone: as where the hooks of the model are off already
    assert torch.equal(model(x), expected)
