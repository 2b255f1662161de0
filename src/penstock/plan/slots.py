"""The slot schedule: which slot a unit uses, and what refills a slot. Pure functions of two small numbers.

CUDA graphs need fixed addresses, so unit ``u`` uses slot ``u mod S`` for ever. The units of one slot form a *chain*:
``s, s + S, s + 2S, ...``. When a unit has run, its slot is refilled with the next unit of the same chain, and after
the last one with the first, ready for the next forward.

The refill must come from the slot's own chain. The rule ``(u + S) mod N`` used elsewhere looks alike but, whenever
``S`` does not divide ``N``, names a unit of *another* slot, or one whose slot is still being read.
"""

from __future__ import annotations

__all__ = ["chain", "first_units", "next_in_chain", "slot_of", "steady_order"]


def slot_of(unit: int, num_slots: int) -> int:
    """The slot that ``unit`` always uses."""
    return unit % num_slots


def next_in_chain(unit: int, num_units: int, num_slots: int) -> int:
    """The unit that refills the slot of ``unit`` once ``unit`` has run; ``unit`` itself if it has the slot alone."""
    following = unit + num_slots
    return following if following < num_units else slot_of(unit, num_slots)


def first_units(num_units: int, num_slots: int) -> range:
    """The units that are in the slots when a forward begins."""
    return range(min(num_units, num_slots))


def chain(slot: int, num_units: int, num_slots: int) -> range:
    """All units of one slot, in the order they use it."""
    return range(slot, num_units, num_slots)


def steady_order(num_units: int, num_slots: int) -> list[int]:
    """The units that one forward copies, in order, each forward the same; the cycle that all forwards together walk.

    A unit that has its slot alone stays there and is not among them. Where a pipeline begins this cycle (it may hold
    the refill of the last slot back for the next forward) makes no difference to it.
    """
    refills = ((unit, next_in_chain(unit, num_units, num_slots)) for unit in range(num_units))
    return [refill for unit, refill in refills if refill != unit]
