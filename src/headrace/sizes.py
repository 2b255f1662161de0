"""Sizes that are given as text, such as ``"20GiB"``."""

from __future__ import annotations

import re
from fractions import Fraction

from headrace.errors import OptionTypeError, SizeError

# Digits are bounded, because int() has a limit and an error message of its own.
_SIZE = re.compile(r"\s*([0-9]{1,999}(?:\.[0-9]{1,999})?)\s*(?:([KMGT])(i?B?)|B?)\s*", re.IGNORECASE)
_SIZE_FORM = 'write it like "20GiB", "24G" (the same as GiB), "20GB" (decimal) or "600 MiB"'


def parse_size(size: str | int, option: str = "") -> int:
    """Bytes of a size such as ``"20GiB"``, ``"24G"``, ``"1.5 GB"`` or ``4096``.

    ``GiB`` is binary (2 ** 30 bytes) and ``GB`` decimal (10 ** 9), and so are their siblings with K, M and T, in any
    case. A bare letter is binary, as it is to GNU coreutils, Docker, systemd and Slurm: ``24G`` is ``24GiB``.

    Args:
        size: a number and a unit, or an int of bytes.
        option: for errors, what the size is of.

    Raises:
        SizeError: not of that form, or less than one byte.
        OptionTypeError: neither ``str`` nor ``int``.
    """
    if isinstance(size, bool) or not isinstance(size, str | int):  # a bool is an int to isinstance
        raise OptionTypeError(
            f"{option or 'size'}: expected str or int, found {type(size).__name__} {size!r}; {_SIZE_FORM}"
        )
    subject = f"{option}: size {size!r}" if option else f"size {size!r}"
    if isinstance(size, int):
        num_bytes = size
    else:
        match = _SIZE.fullmatch(size)
        if match is None:
            wrong = "is not more than 0 bytes" if size.lstrip().startswith("-") else "is not a size"
            raise SizeError(f"{subject} {wrong}; {_SIZE_FORM}")
        number, prefix, ending = match.groups(default="")
        if size.strip()[-1].isdigit() and float(number):
            raise SizeError(f'{subject} has no unit: write for example "{number}GiB" or "{number}B"')
        base = 1000 if ending.upper() == "B" else 1024
        # A float would round sizes beyond 2 ** 53 and some decimals below.
        num_bytes = int(Fraction(number) * base ** " KMGT".index(prefix.upper() or " "))
    if num_bytes <= 0:
        raise SizeError(f"{subject}: expected more than 0 bytes; {_SIZE_FORM}")
    return num_bytes
