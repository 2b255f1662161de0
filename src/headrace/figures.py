"""Sizes, times and rates, as people write and read them.

Sizes are written with a number and a unit: ``20GiB``, ``1.5 GiB``, ``20GB``, ``24G``, in any case. ``GiB`` is binary
(2 ** 30 bytes) and ``GB`` decimal (10 ** 9), and so are their siblings with K, M and T. A bare letter is binary,
as it is to GNU coreutils, Docker, systemd and Slurm: ``24G`` is ``24GiB``. These meanings hold in Python, on
the command line and in an engine's configuration alike. A flag that takes a plain number says its unit itself.
"""

from __future__ import annotations

import re
from fractions import Fraction

from headrace.errors import OptionTypeError, SizeError

__all__ = ["counted", "format_rate", "format_size", "format_time", "in_unit", "parse_size", "size_unit"]

# Digits are bounded, because int() refuses thousands of them in words of its own.
_SIZE = re.compile(r"\s*([0-9]{1,999}(?:\.[0-9]{1,999})?)\s*(?:([KMGT])(i?B?)|B?)\s*", re.IGNORECASE)
_FORM = 'write it like "20GiB", "24G" (the same as GiB), "20GB" (decimal) or "600 MiB"'

# For figures in tables and messages: bytes of the unit, and digits after the point.
_UNITS = {"GiB": (2**30, 3), "MiB": (2**20, 2), "KiB": (2**10, 1), "B": (1, 0)}


def parse_size(size: str | int) -> int:
    """Bytes of a size such as ``"20GiB"``, ``"24G"``, ``"1.5 GB"`` or ``4096``; see the top of this module.

    Raises:
        SizeError: not of that form, or less than one byte.
        OptionTypeError: neither ``str`` nor ``int``.
    """
    if isinstance(size, bool) or not isinstance(size, str | int):  # a bool is an int to isinstance
        raise OptionTypeError(f"size: expected str or int, found {type(size).__name__} {size!r}; {_FORM}")
    if isinstance(size, int):
        num_bytes = size
    else:
        match = _SIZE.fullmatch(size)
        if match is None:
            wrong = "is not more than 0 bytes" if size.lstrip().startswith("-") else "is not a size"
            raise SizeError(f"size {size!r} {wrong}; {_FORM}")
        number, prefix, ending = match.groups(default="")
        if size.strip()[-1].isdigit() and float(number):
            raise SizeError(f'size {size!r} has no unit: write "{number}GiB", say, or "{number}B"')
        base = 1000 if ending.upper() == "B" else 1024
        # A float would round sizes beyond 2 ** 53 and some decimals below.
        num_bytes = int(Fraction(number) * base ** " KMGT".index(prefix.upper() or " "))
    if num_bytes <= 0:
        raise SizeError(f"size {size!r}: expected more than 0 bytes; {_FORM}")
    return num_bytes


def counted(number: int, thing: str, things: str | None = None) -> str:
    """``"1 slot"``, ``"3 slots"``; ``things``: a plural that is not made with an s."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


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
