"""Sizes of the code ``exp3`` (:mod:`headrace.codec.exponents`), which plans need, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from headrace.memory.system import round_up

# Bits of an index into the table of exponents.
WIDTH = 3
# Weights that a program of the kernel decodes.
BLOCK = 1024
# Units that are coded at once, on the device beside nothing but residents, and that are read ahead of them: each takes
# its own size of memory meanwhile.
UNITS_AT_ONCE, UNITS_AHEAD = 2, 3
# Of weights that are coded together: encoding takes several times their memory.
_PIECE_BYTES = 32 << 20
# The share of normally distributed weights whose exponent is not in the table.
_ESCAPES = 0.020


class Parts(NamedTuple):
    """Offsets of the parts of a code; the signs and mantissas are at 0."""

    planes: int
    table: int
    firsts: int
    escapes: int
    end: int


def parts_of(num_weights: int, num_escapes: int) -> Parts:
    """Offsets in a code of so many weights; each part begins at a multiple of 16 bytes."""
    num_blocks = -(-num_weights // BLOCK)
    table = num_weights + num_blocks * (BLOCK // 8) * WIDTH
    firsts = table + 16
    escapes = firsts + round_up(4 * num_blocks, 16)
    return Parts(num_weights, table, firsts, escapes, escapes + round_up(num_escapes, 16))


def cut_pieces(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Start and length of each piece of a slab."""
    return ((start, min(_PIECE_BYTES, num_bytes - start)) for start in range(0, num_bytes, _PIECE_BYTES))


def coded_bytes(num_bytes: int) -> int:
    """Expected length of the code of a slab of bf16."""
    counts = [size // 2 for _, size in cut_pieces(num_bytes)]
    return sum(parts_of(count, int(_ESCAPES * count)).end for count in counts)
