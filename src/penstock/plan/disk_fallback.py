"""What host memory has no room for stays in the checkpoint's files: how much, and in which order units go there.

Reading files is many times slower than the link, so as little as possible is left in them, and what is left is spread
over the forward: while units of host memory are copied, the readers get a staging ring ahead.

The order is the same for every amount, one unit after the other, so that the units left in files under a smaller limit
include those of a larger one. Every unit fewer in files makes no copy later (:mod:`penstock.plan.simulate` knows only
sums and maxima), and so more host memory is never predicted slower.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from penstock.plan.ring_layout import RING_BYTES

__all__ = ["Spill", "spill_order"]


@dataclass(frozen=True)
class Spill:
    """Files that units may rest in, for a plan whose store is host memory.

    Attributes:
        unstreamable: storages that the files do not hold as they are; units with one of them rest in host memory.
        free_bytes: host memory that can be had, for budgets that set no limit; ``None``: not known, or not limited.
        ring_bytes: host memory of the staging ring, which the first unit in files asks for; 0 on a CPU, which has none.
    """

    unstreamable: Collection[str] = ()
    free_bytes: int | None = None
    ring_bytes: int = RING_BYTES


def spill_order(count: int) -> list[int]:
    """0 to ``count`` - 1 in an order of which every beginning is spread nearly evenly (van der Corput, base 2)."""
    bits = max(1, (count - 1).bit_length())
    reversed_bits = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [number for number in reversed_bits if number < count]
