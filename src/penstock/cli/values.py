"""What the texts behind flags mean: a device, numbers of rows, words; each error says what was expected."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.errors import OptionError

if TYPE_CHECKING:
    import torch

__all__ = ["counts", "numbers", "require_known", "target_device", "words"]


def target_device(name: str | None) -> torch.device:
    """Where compute runs: ``--device``, or by default a GPU where there is one.

    Raises:
        OptionError: the name of no device that is here.
    """
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
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
