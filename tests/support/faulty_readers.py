"""The readers of a staging ring on a disk with faults: the real program, with ``os.preadv`` as a file says.

A test sets ``FAULTY_READERS`` to the path of that file before the offload begins, and writes to it at any time:
``slow 0.003`` (seconds before each read), ``error 5`` (an errno), ``never`` (no read ends any more), or nothing.
No torch here: the program has none.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.transfer import ring, ring_process


def main() -> None:
    if "FAULTY_READERS_NO_PIDFD" in os.environ:
        os.pidfd_open = unknown_to_the_system
    ring.IDLE_EXIT_S = float(os.environ.get("FAULTY_READERS_LINGER_S", ring.IDLE_EXIT_S))
    os.preadv = behind_faults(os.preadv, Path(os.environ["FAULTY_READERS"]))  # type: ignore[assignment]
    ring_process.main()


def unknown_to_the_system(pid: int, flags: int = 0) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def behind_faults(read: Callable[..., int], control: Path) -> Callable[..., int]:
    def preadv(*args: Any) -> int:
        fault, _, value = control.read_text().partition(" ")
        if fault == "slow":
            time.sleep(float(value))
        elif fault == "error":
            raise OSError(int(value), os.strerror(int(value)))
        elif fault == "never":
            time.sleep(1e6)
        elif fault:
            raise OSError(errno.EINVAL, f"no such fault: {fault}")
        return read(*args)

    return preadv


class Faults:
    """The test's end of it: fixtures make one before the offload, tests say what goes wrong from now on."""

    def __init__(self, control: Path, setenv: Callable[[str, str], None]) -> None:
        self._control, self._setenv = control, setenv
        self.none()
        setenv("FAULTY_READERS", str(control))

    def linger(self, seconds: float) -> None:
        """How long readers that begin from now on stay when they are retired and have nothing to do."""
        self._setenv("FAULTY_READERS_LINGER_S", str(seconds))

    def none(self) -> None:
        self._say("")

    def slow(self, seconds: float) -> None:
        self._say(f"slow {seconds}")

    def error(self, number: int) -> None:
        self._say(f"error {number}")

    def never(self) -> None:
        self._say("never")

    def _say(self, text: str) -> None:
        new = self._control.with_suffix(".new")
        new.write_text(text)
        new.rename(self._control)  # at once: a reader never sees half of it
