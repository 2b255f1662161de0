"""Who reads a slot, and whether that still goes on: what was interrupted cannot say that it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from penstock.errors import SlotConflictError
from penstock.plan.model import Plan

__all__ = ["Forwards", "Reader", "nested_units", "stuck_thread"]


class Reader(NamedTuple):
    """One run of a unit's module.

    Attributes:
        thread: its ident.
        runs: whether it still goes on, asked in that thread; if not, it was interrupted before it let go of the slot.
    """

    thread: int
    runs: Callable[[], bool]


class Forwards:
    """Which threads are inside a forward of the model."""

    def __init__(self) -> None:
        self._inside: set[int] = set()
        self._begun: dict[int, int] = {}  # how many, by thread

    @property
    def inside(self) -> bool:
        """Whether the calling thread is."""
        return threading.get_ident() in self._inside

    def begin(self) -> None:
        """The calling thread begins one; one that was interrupted did not end."""
        me = threading.get_ident()
        self._inside.add(me)
        self._begun[me] = self._begun.get(me, 0) + 1

    def end(self) -> None:
        """That of the calling thread ends."""
        self._inside.discard(threading.get_ident())

    def this_one(self) -> Callable[[], bool]:
        """To ask later, in the same thread, whether its present forward goes on; outside of one it never does."""
        number = self._begun.get(threading.get_ident())
        return lambda: self.inside and self._begun.get(threading.get_ident()) == number


def nested_units(plan: Plan, unit: int, holder: int | None) -> SlotConflictError:
    """``unit`` is needed while ``holder``, which has its slot, runs further out in the same thread."""
    inner = plan.units[unit].anchor
    return SlotConflictError(
        f"{inner} (unit {unit}) runs inside {_named(plan, holder)}, and both need the same slot: use another number of "
        f"slots (--offload-prefetch-step), or keep one of the two resident (--offload-rule {inner}=resident)"
    )


def stuck_thread(plan: Plan, unit: int, holder: int | None, seconds: float) -> SlotConflictError:
    """``unit`` is needed while another thread does not let go of ``holder``."""
    return SlotConflictError(
        f"{plan.units[unit].anchor} (unit {unit}) needs the slot of {_named(plan, holder)}, which another thread has "
        f"been running for {seconds:.0f} s; use one offloaded model per thread"
    )


def _named(plan: Plan, unit: int | None) -> str:
    return "another unit" if unit is None else f"{plan.units[unit].anchor} (unit {unit})"
