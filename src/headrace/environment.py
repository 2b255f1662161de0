"""Environment variables (:data:`VARIABLES`), and the folder of the on-disk cache."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.errors import OptionError, warn_user

__all__ = [
    "VARIABLES",
    "cache_disabled",
    "cache_folder",
    "debug_enabled",
    "number_in",
    "peer_timeout_s",
    "pin_memory_disabled",
    "uva_disabled",
    "warn_about_variables",
]

# All that there are, with default and meaning; docs/reference.md has the same table (a test compares them).
VARIABLES = {
    "HEADRACE_DEBUG": (
        "0",
        "1: poison released slots, verify a checksum at every copy of a unit; the command line shows tracebacks",
    ),
    "HEADRACE_READERS": (
        "cores",
        "threads that read files, 1 to 1024; default: one per core, 7/8 of them (at most 14) when streaming to a GPU, "
        "8 to 16 when loading",
    ),
    "HEADRACE_DISABLE_PIN_MEMORY": ("0", "1: stores of a GPU use ordinary host memory (slow, cannot be captured)"),
    "HEADRACE_DISABLE_UVA": ("0", "1: what a GPU would read in place is copied into a slot on demand instead"),
    "HEADRACE_DISABLE_CACHE": ("0", "1: no on-disk cache of the metadata of models' folders"),
    "HEADRACE_PEER_TIMEOUT": ("600", "seconds that a rank waits for another one during an offload with `group=`"),
    "HEADRACE_API_KEY": ("none", "`headrace serve`: the bearer token that requests have to carry, as `--api-key`"),
    "HEADRACE_SGLANG": ("0", "1, or a JSON object of options: headrace is the weight offloader of SGLang"),
}
_reported: set[str] = set()


def warn_about_variables() -> None:
    """Warn, once each, of variables ``HEADRACE_*`` in the environment that nothing reads."""
    unknown = [name for name in os.environ if name.upper().startswith("HEADRACE_") and name not in VARIABLES]
    for name in sorted({*unknown} - _reported):
        from difflib import get_close_matches

        _reported.add(name)
        (near,) = get_close_matches(name.upper(), VARIABLES, n=1, cutoff=0)
        warn_user(
            f"the environment variable {name} has no effect: headrace reads none of that name; the nearest is {near} "
            f"(all: {', '.join(VARIABLES)})"
        )


def debug_enabled() -> bool:
    """Whether ``HEADRACE_DEBUG`` asks for poisoned slots and checksums."""
    return _switch("HEADRACE_DEBUG")


def pin_memory_disabled() -> bool:
    """Whether ``HEADRACE_DISABLE_PIN_MEMORY`` forbids page-locked host memory."""
    return _switch("HEADRACE_DISABLE_PIN_MEMORY")


def uva_disabled() -> bool:
    """Whether ``HEADRACE_DISABLE_UVA`` forbids reading host memory in place from a GPU."""
    return _switch("HEADRACE_DISABLE_UVA")


def cache_disabled() -> bool:
    """Whether ``HEADRACE_DISABLE_CACHE`` forbids the on-disk cache of model metadata."""
    return _switch("HEADRACE_DISABLE_CACHE")


def peer_timeout_s() -> float:
    """Seconds that a rank waits for another one during an offload that they share: ``HEADRACE_PEER_TIMEOUT``."""
    return float(number_in("HEADRACE_PEER_TIMEOUT", "seconds", 10**7) or 600)


def number_in(name: str, what: str, most: int) -> int | None:
    """The whole number, from 1 to ``most``, that a variable holds; ``None`` where it is not set.

    Raises:
        OptionError: anything else; ``what`` is counted.
    """
    value = os.environ.get(name)
    if value is None:
        return None
    # By its length first: int() refuses thousands of digits in words of its own.
    if not value.isdecimal() or len(value) > len(str(most)) or not 1 <= int(value) <= most:
        raise OptionError(f"{name}={value[:40]!r}: expected a whole number of {what}, at least 1 and at most {most}")
    return int(value)


def _switch(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("", "0", "1"):
        raise OptionError(f"{name}={value!r}: expected 0 or 1")
    return value == "1"


# -- the on-disk cache -------------------------------------------------------------------------------------------------


def cache_folder() -> Path | None:
    """The folder of this package's cache: in ``XDG_CACHE_HOME``, else ``~/.cache``; ``None`` without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "headrace"
    except RuntimeError:  # neither HOME nor an entry in passwd, as a container with a bare user id has it
        return None
