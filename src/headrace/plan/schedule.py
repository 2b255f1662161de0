"""The schedule: which slot a unit uses, in which order units are expected to run, and so what refills a slot.

Pure functions of sizes and counts.

CUDA graphs need fixed addresses, so unit ``u`` always uses slot ``u mod S``. The units of one slot form a *chain*:
``s, s + S, s + 2S, ...``. When a unit has run, its slot is refilled with the next unit of the same chain, and after
the last one with the first, ready for the next forward.

A model may run its units in another order than it declares them: a UNet declares the attentions of a block, then its
convolutions, and runs one after the other in turn. A pipeline runs the units of its transformer once per step.
Addresses stay, so a unit keeps its slot, but each chain then runs in the order that was seen (:class:`Schedule`).

That order is learned from the forwards so far (:class:`ExpectedOrder`). It is the plan's, until a forward has run every
unit once in another order; then it is that order. Captured graphs fix the order of their copies, so it does not change
once there are any. A pipeline of several models (``repeats``) runs some units several times and leaves others out: it
is predicted to repeat the order of the previous call, and a run of units that has begun again is taken for a loop that
continues.

The refill must come from the slot's own chain. The rule ``(u + S) mod N`` used elsewhere looks alike but, whenever
``S`` does not divide ``N``, names a unit of *another* slot, or one whose slot is still being read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from headrace.errors import warn_user

# Slots that a budget may choose, so that copies run as many units ahead.
MAX_SLOTS = 3
# How many runs a loop is expected to go on for when it is seen first; the next forward knows its true length.
_EXPECTED_RUNS = 4096
# Runs of units in one call of a pipeline that are remembered: hours of them.
_MOST_RUNS = 1 << 20
# Runs that are expected of a call before it has shown its order, with all its loops.
_MOST_EXPECTED = 1 << 16


# -- slots -------------------------------------------------------------------------------------------------------------


def usable_slots(prefetch_step: int, num_units: int) -> int:
    """``prefetch_step`` slots, but no more than there are units."""
    if prefetch_step > num_units > 0:
        warn_user(
            f"prefetch_step = {prefetch_step} is larger than the number of units; {num_units} slot(s) are used "
            f"(--offload-prefetch-step {num_units} says the same)"
        )
    return min(prefetch_step, num_units)


def slot_of(unit: int, num_slots: int) -> int:
    """The slot that ``unit`` always uses."""
    return unit % num_slots


def next_in_chain(unit: int, num_units: int, num_slots: int) -> int:
    """The unit that refills the slot of ``unit`` once ``unit`` has run; ``unit`` itself if it has the slot alone."""
    following = unit + num_slots
    return following if following < num_units else slot_of(unit, num_slots)


def chain(slot: int, num_units: int, num_slots: int) -> range:
    """All units of one slot, in the order they use it."""
    return range(slot, num_units, num_slots)


def steady_order(num_units: int, num_slots: int) -> list[int]:
    """The units that one forward copies, in order, each forward the same; the cycle that all forwards together walk.

    A unit that has its slot alone stays there and is not among them. Where a forward begins in this cycle (the
    prefetcher may hold the refill of the last slot back for the next one) makes no difference to it.
    """
    refills = ((unit, next_in_chain(unit, num_units, num_slots)) for unit in range(num_units))
    return [refill for unit, refill in refills if refill != unit]


@dataclass(frozen=True)
class Schedule:
    """The order in which units are expected to run, from which the next unit of each slot follows.

    Attributes:
        order: units in order of execution; one may be in it several times, as in a loop of a pipeline, or not at all.
        num_slots: unit ``u`` uses slot ``u mod num_slots`` whatever the order.
    """

    order: tuple[int, ...]
    num_slots: int

    @cached_property
    def chains(self) -> list[list[int]]:
        """Units of each slot, in the order they use it."""
        return [[self.order[position] for position in positions] for positions in self._uses]

    @cached_property
    def first(self) -> dict[int, int]:
        """Unit in each slot that is used when a forward begins; those that run earlier come first."""
        begins = sorted(positions[0] for positions in self._uses if positions)
        return {slot_of(self.order[position], self.num_slots): self.order[position] for position in begins}

    def find(self, unit: int, start: int) -> int | None:
        """The first position from ``start`` on, and around the end, at which ``unit`` runs; ``None``: at none."""
        return _from(self._runs.get(unit, ()), start)

    def following(self, slot: int, position: int) -> int | None:
        """The next unit of ``slot`` after the run at ``position``; ``None``: no unit uses it."""
        found = _from(self._uses[slot], position + 1)
        return None if found is None else self.order[found]

    def again(self, start: int, end: int) -> Schedule:
        """The schedule in which the runs from ``start`` to ``end`` (included) repeat many times before what follows."""
        loop = self.order[start : end + 1]
        times = max(1, _EXPECTED_RUNS // len(loop))
        return Schedule((*self.order[: end + 1], *(loop * times), *self.order[end + 1 :]), self.num_slots)

    @cached_property
    def _uses(self) -> list[list[int]]:
        """Positions at which each slot is used."""
        uses: list[list[int]] = [[] for _ in range(self.num_slots)]
        for position, unit in enumerate(self.order):
            uses[slot_of(unit, self.num_slots)].append(position)
        return uses

    @cached_property
    def _runs(self) -> dict[int, list[int]]:
        """Positions at which each unit runs."""
        runs: dict[int, list[int]] = {}
        for position, unit in enumerate(self.order):
            runs.setdefault(unit, []).append(position)
        return runs


def _from(positions: Sequence[int], start: int) -> int | None:
    """First of ``positions``, which ascend, from ``start`` on, else the first of all."""
    return positions[bisect_left(positions, start) % len(positions)] if positions else None


class ExpectedOrder:
    """Follows the runs of units.

    Attributes:
        schedule: schedule of the order that is expected now.
    """

    def __init__(self, num_units: int, num_slots: int, repeats: bool) -> None:
        self.schedule = Schedule(tuple(range(num_units)), num_slots)
        self._num_units, self._num_slots, self._repeats = num_units, num_slots, repeats
        self._position = -1  # of the latest run
        self._seen: list[int] = []  # units in the order in which the latest forward has run them, one more at most
        self._most_seen = _MOST_RUNS if repeats else num_units

    def begin(self) -> None:
        """A forward begins."""
        self._seen, self._position = [], -1

    def run(self, unit: int, in_forward: bool) -> int:
        """A run of ``unit`` begins; its position in the expected order."""
        found = self.schedule.find(unit, self._position + 1)
        if found is not None:  # else it is expected nowhere, and the rest still is
            is_loop = self._repeats and in_forward and found <= self._position and unit in self._seen
            if is_loop and len(self.schedule.order) < _MOST_EXPECTED:  # what makes no sense as loops must not grow
                self.schedule = self.schedule.again(found, self._position)
                found = self._position + 1
            self._position = found
        if in_forward and len(self._seen) <= self._most_seen:
            self._seen.append(unit)
        return self._position

    def following(self, slot: int, position: int, unit: int) -> int:
        """Unit that ``slot`` has to hold after ``unit`` ran at ``position``; ``unit`` itself if it is alone there."""
        following = self.schedule.following(slot, position)
        return unit if following is None else following

    def adopt(self) -> bool:
        """Expect the order of the forward that has just ended, if it has run every unit once or may do otherwise.

        Returns:
            whether that is another one.
        """
        order = tuple(self._seen)
        is_order = 0 < len(order) <= _MOST_RUNS if self._repeats else sorted(order) == list(range(self._num_units))
        if not is_order or order == self.schedule.order:
            return False
        self.schedule = Schedule(order, self._num_slots)
        return True
