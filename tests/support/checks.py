"""What many tests check, and how they wait for what other threads and processes do."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

import headrace
from headrace.testing import assert_moved, assert_same_bits


def eventually(condition: Callable[[], bool], patience_s: float = 30.0) -> bool:
    """Whether ``condition`` comes true in time. Garbage is collected meanwhile."""
    end = time.monotonic() + patience_s
    while not (met := condition()) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    return met


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """A function that raises ``error``, whatever it is given."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def entering(current: list[Any]) -> Callable[[Any], AbstractContextManager[None]]:
    """Stands for ``torch.cuda.device`` and its like: within, what it is given is the last of ``current``."""

    @contextmanager
    def enter(chosen: Any) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    return enter


def run_threads(works: Sequence[Callable[[], object]], timeout_s: float = 60.0) -> None:
    """All at the same time; each has to end."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    assert not any(thread.is_alive() for thread in threads), "deadlock"


def require_forwards(handle: headrace.Handle, x: torch.Tensor, expected: Any, count: int) -> None:
    """The first ``count`` forwards have the bits of ``expected``, and each has moved what the plan says."""
    for forwards in range(1, count + 1):
        assert_same_bits(handle.model(x), expected)
        assert_moved(handle, forwards)


def mappings() -> list[str]:
    """What smaps (proc(5)) says of each mapping of this process."""
    return re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
