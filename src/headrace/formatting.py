"""Sizes, times, rates, names and tokens as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_MOST_NAMES = 3
_MOST_CHARACTERS = 300  # of a name, which may come from a file
_CONTEXT_TOKENS = 8  # more than one character takes

# For figures in tables and messages: bytes of the unit, and digits after the point.
_UNITS = {"GiB": (2**30, 3), "MiB": (2**20, 2), "KiB": (2**10, 1), "B": (1, 0)}


def pluralize(number: int, thing: str, things: str | None = None) -> str:
    """``"1 slot"``, ``"3 slots"``; ``things``: a plural that is not made with an s."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def listed(names: Iterable[str], thing: str | None = None) -> str:
    """``"a, b, c and 2 more"``; with a ``thing``, ``"5 tensors (a, b, c and 2 more)"``."""
    every = list(names)
    more = f" and {len(every) - _MOST_NAMES:,} more" if len(every) > _MOST_NAMES else ""
    shown = ", ".join(name[:_MOST_CHARACTERS] for name in every[:_MOST_NAMES]) + more
    return f"{pluralize(len(every), thing)} ({shown})" if thing else shown


def size_unit(num_bytes: float) -> str:
    """The largest unit, up to GiB, of which ``num_bytes`` are at least one."""
    return next((unit for unit, (size, _) in _UNITS.items() if abs(num_bytes) >= size), "B")


def in_unit(num_bytes: float, unit: str) -> str:
    """``num_bytes`` as a number of ``unit``, without it; with more digits where it would otherwise read 0.00x."""
    size, digits = _UNITS[unit]
    value = num_bytes / size
    return f"{value:.{digits + 2 * (0 < abs(value) < 0.0995)}f}"


def format_size(num_bytes: float, unit: str | None = None) -> str:
    """``"1.500 GiB"``, ``"3.26 MiB"``, ``"64.0 KiB"`` or ``"12 B"``; by default in the unit that fits."""
    unit = unit or size_unit(num_bytes)
    return f"{in_unit(num_bytes, unit)} {unit}"


def format_time(seconds: float) -> str:
    """``"136 s"``, ``"12.5 s"``, ``"62.8 ms"``, ``"1.75 ms"`` or ``"85.00 us"``."""
    if seconds >= 1:
        return f"{seconds:,.{0 if seconds >= 100 else 1 if seconds >= 10 else 2}f} s"
    value, unit = (seconds * 1e3, "ms") if seconds >= 1e-4 or not seconds else (seconds * 1e6, "us")
    return f"{value:.{1 if value >= 10 else 2}f} {unit}"


def format_rate(per_second: float) -> str:
    """Things per second, without a unit: ``"1,342.5"``, ``"2.57"`` or ``"0.0073"``."""
    if per_second >= 10:
        return f"{per_second:,.1f}"
    return f"{per_second:.2f}" if per_second >= 1 else f"{per_second:#.2g}"


class TokenText:
    """Text of tokens that come one by one.

    Args:
        decode: gives the text of token ids. Those of Llama 2 and others take a space off the first.
        prompt: ids before the first token, whose space is then kept; none: a text begins with it.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode, self._ids = decode, list(prompt[-_CONTEXT_TOKENS:])
        self._num_read = len(self._ids)

    def add(self, token: int | None) -> str:
        """Text that is complete with ``token``, or with ``None``, the end, that of an incomplete character."""
        before = self._decode(self._ids[: self._num_read])
        self._ids += [] if token is None else [token]
        text = self._decode(self._ids)
        if token is not None and text.endswith("\ufffd"):
            return ""
        alone = self._decode(self._ids[self._num_read :])
        if alone:  # else the next token would be the first
            self._ids = self._ids[self._num_read :]
        self._num_read = len(self._ids)
        # A byte that is no UTF-8 changes the text of the bytes before it, in some tokenizers.
        return text[len(before) :] if text.startswith(before) else alone
