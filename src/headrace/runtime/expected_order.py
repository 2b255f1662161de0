"""The order in which units run, learned from the forwards so far: it says what a slot has to hold next.

It is the plan's, until a forward has run every unit once in another order; then it is that order. Captured graphs fix
the order of their copies, so it does not change once there are any. A pipeline of several models (``repeats``) runs
some units several times and leaves others out: it is predicted to repeat the order of the previous call, and a run of
units that has begun again is taken for a loop that continues.
"""

from __future__ import annotations

from headrace.plan.schedule import Schedule

__all__ = ["ExpectedOrder"]

# Runs of units in one call of a pipeline that are remembered: hours of them.
_MOST_RUNS = 1 << 20
# Runs that are expected of a call before it has shown its order, with all its loops.
_MOST_EXPECTED = 1 << 16


class ExpectedOrder:
    """Follows the runs of units.

    Attributes:
        schedule: that of the order that is expected now.
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
        position = self._locate(unit, in_forward)
        if in_forward and len(self._seen) <= self._most_seen:
            self._seen.append(unit)
        return position

    def following(self, slot: int, position: int, unit: int) -> int:
        """What ``slot`` has to hold after the run of ``unit`` at ``position``; ``unit`` itself if it is alone there."""
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

    def _locate(self, unit: int, in_forward: bool) -> int:
        found = self.schedule.find(unit, self._position + 1)
        if found is None:
            return self._position  # expected nowhere, so the rest still is
        is_loop = self._repeats and in_forward and found <= self._position and unit in self._seen
        if is_loop and len(self.schedule.order) < _MOST_EXPECTED:  # what makes no sense as loops must not grow
            self.schedule = self.schedule.again(found, self._position)
            found = self._position + 1
        self._position = found
        return found
