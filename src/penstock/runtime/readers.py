"""Which thread is using a slot, and detection of uses that were interrupted before they released it."""

from __future__ import annotations

import threading
from typing import Protocol

from penstock.errors import SlotConflictError
from penstock.plan.plan import Plan

__all__ = ["Forwards", "Reader", "nested_units", "stuck_thread"]


class Reader(Protocol):
    """One run of a unit's module."""

    @property
    def thread(self) -> int:
        """Its ident."""

    def runs(self) -> bool:
        """Whether it goes on, asked in its thread; if not, it may have been interrupted before it released the slot."""

    def drop(self) -> None:
        """The slot is taken away from it."""


class Forwards:
    """Which threads are inside a forward of the model."""

    def __init__(self) -> None:
        self._inside: set[int] = set()
        self._begun: dict[int, int] = {}  # how many, by thread

    @property
    def inside(self) -> bool:
        """Whether the calling thread is."""
        return threading.get_ident() in self._inside

    @property
    def threads(self) -> frozenset[int]:
        """The idents of all that are."""
        return frozenset(self._inside)

    def begin(self) -> None:
        """The calling thread begins one; one that was interrupted did not end."""
        me = threading.get_ident()
        self._inside.add(me)
        self._begun[me] = self._begun.get(me, 0) + 1

    def end(self) -> None:
        """That of the calling thread ends."""
        self._inside.discard(threading.get_ident())

    def this_one(self) -> Reader:
        """A use of a slot that goes on as long as the present forward of the calling thread; without one, never."""
        return _InForward(self, self._begun.get(threading.get_ident()))

    def goes_on(self, number: int | None) -> bool:
        """Whether the calling thread is still in its forward of that number."""
        return self.inside and self._begun.get(threading.get_ident()) == number


class _InForward:
    def __init__(self, forwards: Forwards, number: int | None) -> None:
        self.thread = threading.get_ident()
        self._forwards = forwards
        self._number = number

    def runs(self) -> bool:
        return self._forwards.goes_on(self._number)

    def drop(self) -> None:
        """Compiled code looks into the slot all the time."""


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
