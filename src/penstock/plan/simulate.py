"""How long a step takes when copies run behind compute: the slot schedule, played through on paper.

The rules are those of :mod:`penstock.plan.schedule` and of the pipeline that carries them out, for steps that follow
one another without a pause:

* a stage starts when the one before it has ended and its own unit is in its slot;
* one copy runs at a time, in the order of the units; unit ``u`` can start to arrive when ``u - S`` has been read;
* a step ends when its last copy is joined. The first units of the next step are copied within this one, except into
  the slot of the last unit, which is refilled at the beginning of the next step;
* what a stage reads in place takes the link away from the copies for as long;
* a unit in files is read by the disk, which begins when the copy of the last such unit has ended and gets no more than
  the staging ring ahead of the link. Its copy ends when it has been read, and keeps the link for itself meanwhile.

Every clock is made of sums and maxima, so no time falls when a stage, a copy or a read takes longer.

All arguments are arrays over candidates, so that one pass over the stages times thousands of plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.model.memory_profile import ModelProfile
from penstock.plan.cost_model import Rates, Stage, stages_compute_s, storage_cost
from penstock.plan.schedule import RING_BYTES

__all__ = ["Bools", "Floats", "Ints", "Move", "StageTimes", "StepModel", "moves_of", "step_s"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Move(NamedTuple):
    """Seconds, by candidate, of the copy of a stage's unit, and of reading it from files; ``None``: none does."""

    copy_s: Floats
    disk_s: Floats | None


def moves_of(
    rates: Rates, stages: Sequence[Stage], sizes: Mapping[str, Floats], in_files: Mapping[str, Bools], count: int
) -> list[Move]:
    """The moves of every stage, of ``count`` candidates.

    Args:
        sizes: bytes of units by the anchor of their stage.
        in_files: by anchor, whether they rest in files.
    """
    moves: list[Move] = []
    for anchor in (stage.anchor for stage in stages):
        if anchor not in sizes:
            moves.append(Move(np.zeros(count), None))
        else:
            disk_s = sizes[anchor] * in_files[anchor] * rates.file_s_per_byte if anchor in in_files else None
            moves.append(Move(rates.copies_s(sizes[anchor]), disk_s))
    return moves


class StepModel:
    """A step of ``rows`` rows, by the cost model: of many candidates at once, or of the one that a plan is.

    Attributes:
        costs: of every storage by name.
        resident_s: by stage, compute with all weights on the device.
    """

    def __init__(
        self, stages: Sequence[Stage], rates: Rates, profile: ModelProfile, rows: int, context: int = 0
    ) -> None:
        self._rates = rates
        self._stage_of = {s.name: index for index, stage in enumerate(stages) for s, _ in stage.storages}
        self.costs = {s.name: storage_cost(s, n, rows, rates, profile) for stage in stages for s, n in stage.storages}
        self.resident_s = stages_compute_s(stages, rows, rates, profile, context)
        for name, cost in self.costs.items():
            self.resident_s[self._stage_of[name]] += cost.resident_s

    def read_in_place(self, names: Iterable[str]) -> list[tuple[float, float]]:
        """Per stage: what reading these storages in place adds to compute, and how long it takes the link."""
        added = [(0.0, 0.0)] * len(self.resident_s)
        for name in names:
            cost, stage = self.costs[name], self._stage_of[name]
            extra_s, link_s = added[stage]
            added[stage] = extra_s + cost.in_place_s - cost.resident_s, link_s + cost.in_place_s
        return added

    def step_s(
        self, moves: Sequence[Move], in_place: Iterable[tuple[Floats, Floats]], num_slots: Ints, num_units: Ints
    ) -> Floats:
        """Seconds of a step, by candidate; ``in_place``: as :meth:`read_in_place`, by candidate."""
        stages = (
            StageTimes(resident_s + extra_s, link_s, copy_s, disk_s)
            for resident_s, (extra_s, link_s), (copy_s, disk_s) in zip(self.resident_s, in_place, moves, strict=True)
        )
        reads_files = any(disk_s is not None for _, disk_s in moves)
        ring_s = RING_BYTES * self._rates.file_s_per_byte if reads_files else 0.0
        return step_s(stages, num_slots, num_units, self._rates.copies_take_cores, ring_s)


@dataclass(frozen=True)
class StageTimes:
    """One stage of all candidates, arrays of one value per candidate, in seconds.

    Attributes:
        compute_s: with its unit in the slot; reading in place included.
        in_place_s: the part of it in which the link is taken.
        copy_s: of its unit; 0 where it has none.
        disk_s: reading its unit from the files; 0 where it rests elsewhere. ``None``: for all candidates.
    """

    compute_s: Floats
    in_place_s: Floats
    copy_s: Floats
    disk_s: Floats | None = None


def step_s(
    stages: Iterable[StageTimes],
    num_slots: Ints,
    num_units: Ints,
    copies_take_cores: bool = False,
    ring_s: float = 0.0,
) -> Floats:
    """Seconds of a step in the steady state, per candidate.

    Args:
        stages: in order of execution.
        num_slots, num_units: per candidate; no candidate has more slots than units.
        copies_take_cores: copies and compute want the same cores, so a step takes no less than both together.
        ring_s: how long the disk reads until the staging ring is full.
    """
    state = _State(num_slots, num_units, ring_s)
    if ring_s:
        stages = list(stages)
        state.read_ahead(stages)
    for stage in stages:
        state.run(stage)
    step = state.finish()
    return np.maximum(step, state.busy_s) if copies_take_cores else step


class _State:
    """Clocks of all candidates."""

    def __init__(self, num_slots: Ints, num_units: Ints, ring_s: float) -> None:
        count = len(num_slots)
        self._ring_s = ring_s
        self._disk_free = np.zeros(count)  # when the disk could begin to read ahead
        self._every = np.arange(count)
        self._slots = np.maximum(num_slots, 1)
        self._units = num_units
        self._moves = num_units > num_slots
        self._held_back = (num_units - 1) % self._slots
        self._next = np.zeros(count, np.int64)  # index of the next unit
        self._now = np.zeros(count)
        self._link_free = np.zeros(count)
        most = int(self._slots.max(initial=1))
        self._released = np.zeros((count, most))  # by slot: when what it held was read
        self._first_copy = np.zeros((count, most))  # by slot: the copy of its first unit
        self._first_disk = np.zeros((count, most))  # and its reading
        self.busy_s = np.zeros(count)  # compute and copies, end to end

    def read_ahead(self, stages: Iterable[StageTimes]) -> None:
        """What the disk has had for this step when it begins: at least the copies behind the last read of the one
        before, as long as the ring has room. Where a first unit is read behind the end, nothing is sure."""
        count = len(self._every)
        since, wrapping = np.zeros(count), np.zeros(count)  # copies since the last read; those behind the last stage
        following = np.zeros(count, np.int64)
        reads_behind = np.zeros(count, dtype=bool)
        for stage in stages:
            has_unit = (stage.copy_s > 0) & self._moves
            reads = has_unit & (stage.disk_s > 0) if stage.disk_s is not None else np.zeros(count, dtype=bool)
            behind = has_unit & (following < self._slots) & (following % self._slots != self._held_back)
            within = has_unit & ~behind
            since = np.where(reads & within, 0.0, since + np.where(within, stage.copy_s, 0.0))
            behind &= following + self._slots < self._units  # what has its slot alone stays in it
            wrapping += np.where(behind, stage.copy_s, 0.0)
            reads_behind |= behind & reads
            following += stage.copy_s > 0
        self._disk_free = np.where(reads_behind, 0.0, -np.minimum(since + wrapping, self._ring_s))

    def _arrival(self, start: Floats, copy_s: Floats, disk_s: Floats | None, copied: Bools) -> Floats:
        """When a copy that can start at ``start`` ends; the disk moves on to the next unit then."""
        arrival = start + copy_s
        if disk_s is None:
            return arrival
        read = np.maximum(self._disk_free + disk_s, start + np.maximum(disk_s - self._ring_s, 0.0))
        reads = disk_s > 0
        arrival = np.where(reads, np.maximum(arrival, read), arrival)
        self._disk_free = np.where(reads & copied, arrival, self._disk_free)
        return arrival

    def run(self, stage: StageTimes) -> None:
        has_unit = stage.copy_s > 0
        slot = self._next % self._slots
        is_first = self._next < self._slots
        copied = has_unit & self._moves & (~is_first | (slot == self._held_back))
        start = np.maximum(self._link_free, np.where(is_first, 0.0, self._released[self._every, slot]))
        arrival = np.where(copied, self._arrival(start, stage.copy_s, stage.disk_s, copied), 0.0)
        self._link_free = np.where(copied, arrival, self._link_free)
        self.busy_s += stage.compute_s + copied * stage.copy_s
        begin = np.maximum(self._now, arrival)
        self._now = begin + stage.compute_s
        self._link_free = np.where(
            stage.in_place_s > 0, np.maximum(self._link_free, begin) + stage.in_place_s, self._link_free
        )
        rows = self._every[has_unit]
        self._released[rows, slot[has_unit]] = self._now[has_unit]
        first = has_unit & is_first
        self._first_copy[self._every[first], slot[first]] = stage.copy_s[first]
        if stage.disk_s is not None:
            self._first_disk[self._every[first], slot[first]] = stage.disk_s[first]
        self._next += has_unit

    def finish(self) -> Floats:
        """The first units of the next step come in behind the last units of this one, in the order of these.

        Not into the slot of the last unit, which is held back, nor where a unit has its slot alone: it stays there.
        """
        for behind in range(int(self._slots.max(initial=1)), 1, -1):
            unit = self._units - behind
            valid = (behind <= self._slots) & (unit >= self._slots)
            slot = np.where(valid, unit % self._slots, 0)
            copy_s = valid * self._first_copy[self._every, slot]
            start = np.maximum(self._link_free, self._released[self._every, slot])
            arrival = self._arrival(start, copy_s, valid * self._first_disk[self._every, slot], valid)
            self._link_free = np.where(valid, arrival, self._link_free)
            self.busy_s += copy_s
        return np.maximum(self._now, self._link_free)
