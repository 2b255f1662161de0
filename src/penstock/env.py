"""The environment variables.

===========================  =======  ============================================================================
environment variable         default  meaning
===========================  =======  ============================================================================
PENSTOCK_DEBUG               0        1: poison released slots, verify a checksum whenever a unit arrives or leaves; the
                                      command line shows tracebacks
PENSTOCK_READERS             cores    readers of files, 1 to 1024. Without it at most 12 feed a GPU's ring, and loading
                                      has at least 8. Loading has never more than 16
PENSTOCK_DISABLE_PIN_MEMORY  0        1: host memory of a GPU's stores is ordinary memory (slow, cannot be captured)
PENSTOCK_DISABLE_UVA         0        1: what a GPU would read in place is moved into a slot on demand instead
PENSTOCK_PEER_TIMEOUT        600      seconds that a rank waits for another one while they share out an offload
===========================  =======  ============================================================================
"""

from __future__ import annotations

import os

from penstock.errors import OptionError

__all__ = ["debug_enabled", "peer_timeout_s", "pin_memory_disabled", "reader_threads", "uva_disabled"]

_MOST_READERS = 1024


def debug_enabled() -> bool:
    """Whether ``PENSTOCK_DEBUG`` asks for poisoned slots and checksums."""
    return _switch("PENSTOCK_DEBUG")


def pin_memory_disabled() -> bool:
    """Whether ``PENSTOCK_DISABLE_PIN_MEMORY`` forbids page-locked host memory."""
    return _switch("PENSTOCK_DISABLE_PIN_MEMORY")


def uva_disabled() -> bool:
    """Whether ``PENSTOCK_DISABLE_UVA`` forbids reading host memory in place from a GPU."""
    return _switch("PENSTOCK_DISABLE_UVA")


def _switch(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("", "0", "1"):
        raise OptionError(f"{name}={value!r}: expected 0 or 1")
    return value == "1"


def peer_timeout_s() -> float:
    """Seconds that a rank waits for another one during an offload that they share: ``PENSTOCK_PEER_TIMEOUT``."""
    return float(_count("PENSTOCK_PEER_TIMEOUT", os.environ.get("PENSTOCK_PEER_TIMEOUT", "600"), "seconds", 10**7))


def reader_threads(at_least: int = 1, at_most: int | None = None, spare_one_in: int | None = None) -> int:
    """Threads that read files: of the CPU link, of the readers' process of a GPU, and of loading.

    ``PENSTOCK_READERS``, or one per core this process may use, but for ``spare_one_in`` so many, within ``at_least``
    and ``at_most``.
    """
    value = os.environ.get("PENSTOCK_READERS")
    if value is None:
        cores = len(os.sched_getaffinity(0))
        if spare_one_in is not None:
            cores -= cores // spare_one_in
        return max(at_least, cores if at_most is None else min(cores, at_most))
    return _count("PENSTOCK_READERS", value, "threads", _MOST_READERS)


def _count(name: str, value: str, what: str, most: int) -> int:
    # By its length first: int() refuses thousands of digits in words of its own.
    if not value.isdecimal() or len(value) > len(str(most)) or not 1 <= int(value) <= most:
        raise OptionError(f"{name}={value[:40]!r}: expected a whole number of {what}, at least 1 and at most {most}")
    return int(value)
