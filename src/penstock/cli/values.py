"""What the texts behind flags mean: devices, numbers, words, places; each error says what was expected."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import OptionError

if TYPE_CHECKING:
    import torch

__all__ = [
    "counts",
    "numbers",
    "refuse_idle",
    "require_folder",
    "require_known",
    "require_writable",
    "target_device",
    "words",
]


def target_device(name: str | None) -> torch.device:
    """Where compute runs: ``--device``, or by default a GPU where there is one.

    Raises:
        OptionError: the name of no device that is here.
    """
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise OptionError(f"--device {name!r}: expected cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"--device {name!r}: expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"--device {name!r}: torch sees {torch.cuda.device_count()} CUDA device(s) here; --device cpu needs none"
        )
    return device


def counts(flag: str, text: str, what: str = "numbers of rows") -> list[int]:
    """Whole numbers from 1 on, comma-separated.

    Raises:
        OptionError: anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise OptionError(f"{flag} {text!r}: expected {what}, each at least 1, such as {flag} 1,16,256")
    return [int(part) for part in parts]


def numbers(flag: str, text: str) -> list[float]:
    """Numbers above zero, comma-separated.

    Raises:
        OptionError: anything else.
    """
    try:
        found = [float(part) for part in words(text)]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise OptionError(f"{flag} {text!r}: expected numbers above 0, separated by commas")
    return found


def words(text: str) -> list[str]:
    """What stands between commas."""
    return [part for part in text.split(",") if part]


def require_known(flag: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ``OptionError`` for the first of ``given`` that is not ``known``."""
    for word in given:
        if word not in known:
            raise OptionError(f"{flag}: expected some of {', '.join(known)}, found {word!r}; separate them by commas")


def refuse_idle(flags: Mapping[str, object], why: str) -> None:
    """Refuse flags that would have no effect; ``None`` and ``False`` mean not given."""
    for flag, given in flags.items():
        if given is not None and given is not False:
            raise OptionError(f"{flag} has no effect {why}")


def require_folder(flag: str, path: Path) -> None:
    """Refuse a folder that files cannot be made in, before anything is measured."""
    if not path.is_dir():
        found = "something else" if path.exists() else "no such folder"
        raise OptionError(f"{flag} {str(path)!r}: expected a folder, found {found}; make it, or leave {flag} out")
    _require_access(flag, path, path)


def require_writable(flag: str, path: Path) -> None:
    """Refuse an output file that cannot be written, before hours of work go into it."""
    if not path.parent.is_dir() or path.is_dir():
        raise OptionError(f"{flag} {str(path)!r}: expected a file name in a folder that exists")
    _require_access(flag, path, path if path.exists() else path.parent)


def _require_access(flag: str, path: Path, place: Path) -> None:
    if not os.access(place, os.W_OK):
        raise OptionError(
            f"{flag} {str(path)!r}: expected a place that user {os.geteuid()} may write to, found none; choose another"
        )
