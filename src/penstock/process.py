"""What the kernel says about this process: memory and CPU time."""

from __future__ import annotations

import ctypes
import os
import re
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["PeakMeter", "cpu_seconds", "num_cores", "peak_rss_bytes", "rss_bytes", "trim_heap"]


def rss_bytes() -> int:
    """Resident memory now, in bytes (``VmRSS``)."""
    return _status_bytes("VmRSS")


def peak_rss_bytes() -> int:
    """The most resident memory so far, in bytes (``VmHWM``)."""
    return _status_bytes("VmHWM")


def cpu_seconds() -> float:
    """CPU time of all threads so far."""
    return time.process_time()


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def trim_heap() -> None:
    """Give free memory inside the C heap back to the system (``malloc_trim(3)``); no effect without glibc."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class PeakMeter:
    """By how much resident memory grows at most from here on.

    Resets the kernel's high-water mark (``proc(5)``, ``/proc/pid/clear_refs``, value 5). Where that is not allowed an
    earlier peak stays in the figure, which then is too high and never too low.
    """

    def __init__(self) -> None:
        self._start_bytes = rss_bytes()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def growth_bytes(self) -> int:
        """The high-water mark less what was resident at the start."""
        return max(0, peak_rss_bytes() - self._start_bytes)


def _status_bytes(key: str) -> int:
    match = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0
