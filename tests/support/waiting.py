"""Waiting for what other threads and processes do."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], patience_s: float = 10.0) -> bool:
    """Whether ``condition`` comes true in time. Garbage is collected meanwhile."""
    end = time.monotonic() + patience_s
    while not (met := condition()) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    return met
