"""Alternatives to a plan: a little more memory on either side, or a larger batch."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.config import Budget
from headrace.plan.candidates import CandidateTable, Family, mean_log
from headrace.plan.plan import Plan
from headrace.plan.rates import Floats, Ints
from headrace.plan.slabs import slab_bytes

GIB = 2**30
# More memory is suggested for steps that are this many times as fast.
_WORTHWHILE = 1.3
# A step is as good as resident within this.
_AT_FULL_SPEED = 1.02
# A larger batch is suggested if its step takes at most this many times as long.
_NEARLY_FREE = 1.1
_LARGEST_BATCH = 1024
# Ranges of device memory; the curve has at most one point in each.
_CURVE_BINS = 256


@dataclass(frozen=True)
class Point:
    """A candidate on the Pareto front: none is as fast with less device memory.

    Attributes:
        device_bytes: for weights.
        step_s: by batch size, in the order of the workload.
    """

    device_bytes: int
    step_s: tuple[float, ...]


def curve(table: CandidateTable, host_bytes: int | None = None) -> list[Point]:
    """Nearly the best step times for every amount of device memory, ascending.

    ``host_bytes``: host memory that the weights may take. Of each family and number of slots, only candidates that move
    the fewest bytes in each of ``_CURVE_BINS`` ranges of memory are timed.
    """
    front: list[tuple[float, float, Floats]] = []
    families = table.families if table.above_files is None else table.families_within(math.inf, host_bytes)
    found_rows = [(family, rows) for family in families if len(rows := _fewest_moved(family, host_bytes))]
    bounds = [(family, rows, family.least_score(rows)) for family, rows in found_rows]
    # The fastest first: of the others few candidates are on the front.
    for family, rows, least in sorted(bounds, key=lambda each: float(each[2].min())):
        device_bytes = family.memory.device_bytes[rows]
        # Of what is on the front, the fastest with no more memory; a point that is no faster buys nothing.
        scores = np.array([np.inf, *[score for _, score, _ in front]])
        at_hand = scores[np.searchsorted([size for size, _, _ in front], device_bytes, side="right")]
        rows = rows[least < at_hand]
        if not len(rows):
            continue
        times = family.step_s(rows, host_bytes)
        found = zip(family.memory.device_bytes[rows], mean_log(times), times.T, strict=True)
        points, front = sorted([*front, *found], key=lambda point: point[:2]), []
        for point in points:
            if not front or point[1] < front[-1][1]:
                front.append(point)
    return [Point(int(size), tuple(map(float, times))) for size, _, times in front]


def _fewest_moved(family: Family, host_bytes: int | None) -> Ints:
    every = family.fitting(np.inf, host_bytes)
    if not len(every):
        return every
    total_bytes = max(1, family.table.inventory.num_bytes)
    bins = np.floor(family.memory.device_bytes[every] / total_bytes * _CURVE_BINS)
    bins += family.num_slots[every] * (bins.max() + 1)  # each number of slots has its own
    order = np.lexsort((family.memory.moved_bytes[every], bins))
    changes = np.flatnonzero(np.diff(bins[order], prepend=-1.0))
    kept = np.unique(np.concatenate([changes, np.minimum(changes + 1, len(order) - 1)]))
    rows: Ints = every[order[kept]]
    return rows


@dataclass(frozen=True)
class Alternative:
    """A change of the request that makes it faster.

    Attributes:
        text: for people, without a full stop.
        device_bytes: device memory in all.
        batch: rows of its step.
        speedup: tokens per second compared with the plan's.
        step_s: its predicted step.
    """

    text: str
    device_bytes: int
    batch: int
    speedup: float
    step_s: float


class Alternatives:
    """The alternatives to ``plan``, which is the one for ``budget``.

    ``ample``: the plan with as much host memory as it likes, where the budget's is short of it.
    """

    def __init__(self, table: CandidateTable, budget: Budget, plan: Plan, ample: Plan | None = None) -> None:
        self._table, self._budget, self._plan, self._ample = table, budget, plan, ample
        self._reserved = table.reserved_bytes(budget)
        self._forecasters = [self._table.forecaster(rows) for rows in self._table.batch_sizes]
        self._now = self._times(plan)

    def find(self) -> Iterator[Alternative]:
        """More memory on either side, or a larger batch: the nearest first; none where nothing is better."""
        yield from self._more_memory(curve(self._table, self._table.host_limit(self._budget)))
        if self._plan.spilled_bytes and self._table.spill is not None:
            yield from self._more_host_memory(self._table.spill.ring_bytes)
        if self._ample is not None:
            yield from self._enough_host_memory(self._ample)
        yield from self._larger_batch()

    def _times(self, plan: Plan) -> list[float]:
        return [forecaster(plan).step_s for forecaster in self._forecasters]

    def _speedup(self, times: Iterable[float]) -> float:
        return _mean_ratio(self._now, times)

    def _more_memory(self, points: Sequence[Point]) -> Iterator[Alternative]:
        """The least device memory that is worthwhile, and the least with which a step is as fast as resident."""
        resident = points[-1].step_s
        seen = 0
        for wanted in (_WORTHWHILE, self._speedup(resident) / _AT_FULL_SPEED):
            least = max(wanted, _AT_FULL_SPEED)
            better = next((point for point in points if self._speedup(point.step_s) >= least), None)
            if better is None:
                continue
            extra = math.ceil((better.device_bytes + self._reserved - self._budget.num_bytes) / GIB)
            if extra <= seen:
                continue
            seen = extra
            # The best within that memory, rounded up to whole GiB.
            total = self._budget.num_bytes + extra * GIB
            within = [point for point in points if point.device_bytes <= total - self._reserved]
            better = max(within, key=lambda point: point.device_bytes)
            at_full_speed = _mean_ratio(better.step_s, resident) < _AT_FULL_SPEED
            # Where a rule has the host fetch experts, a step is slower than resident with any memory.
            is_fetched = self._table.above_files is not None and "cache" in self._table.forced.values()
            full = " (all weights at hand: as fast as resident)" if at_full_speed and not is_fetched else ""
            ratio = self._speedup(better.step_s)
            text = f"{extra} GiB more device memory: {ratio:.1f}x faster{full}"
            yield Alternative(text, total, self._table.batch_sizes[0], ratio, better.step_s[0])

    def _more_host_memory(self, ring_bytes: int) -> Iterator[Alternative]:
        """The least host memory that is worthwhile for units in files, or else all that they would take.

        The plan is otherwise unchanged; the planner may find a better one.
        """
        staged = self._plan.staged_units
        # By bisection: a unit fewer in files never makes a step slower.
        counts = range(1, len(staged) + 1)
        found = bisect_left(counts, _WORTHWHILE, key=lambda count: self._speedup(self._times(self._brought_in(count))))
        better = self._brought_in(min(found + 1, len(staged)))
        times = self._times(better)
        ratio = self._speedup(times)
        if ratio >= _AT_FULL_SPEED:
            taken = sum(unit.num_bytes for unit in staged) - sum(unit.num_bytes for unit in better.staged_units)
            extra = max(1, math.ceil((taken - (0 if better.staged_units else ring_bytes)) / GIB))
            none = "" if better.staged_units else " (nothing is left on disk)"
            text = f"{extra} GiB more host memory: {ratio:.1f}x faster{none}"
            yield Alternative(text, self._budget.num_bytes, self._table.batch_sizes[0], ratio, times[0])

    def _enough_host_memory(self, ample: Plan) -> Iterator[Alternative]:
        """Host memory with which the experts of all layers are cached, and none of them are in files."""
        times = self._times(ample)
        limit, ratio = self._table.host_limit(self._budget) or 0, self._speedup(times)
        host_bytes = sum(layer.most_host_bytes for layer in ample.cached) + sum(unit.num_bytes for unit in ample.units)
        extra = math.ceil((host_bytes + sum(slab_bytes([size]) for size in ample.uva.values()) - limit) / GIB)
        if ratio >= _AT_FULL_SPEED and extra > 0:
            why = "no experts are left in files" if self._table.above_files else "the experts of all layers are cached"
            text = f"{extra} GiB more host memory: {ratio:.1f}x faster ({why})"
            yield Alternative(text, self._budget.num_bytes, self._table.batch_sizes[0], ratio, times[0])

    def _brought_in(self, count: int) -> Plan:
        """The plan with the ``count`` units in files that a higher limit would store in host memory."""
        plan, order = self._plan, {fqn: index for index, fqn in enumerate(self._table.spill_order)}
        staged = sorted(plan.staged_units, key=lambda unit: order[unit.module_fqn])
        # The first of the order stay in files.
        chosen = {unit.index for unit in staged[len(staged) - count :]}
        units = (replace(unit, store=plan.mode) if unit.index in chosen else unit for unit in plan.units)
        return replace(plan, units=tuple(units))

    def _larger_batch(self) -> Iterator[Alternative]:
        """The largest batch that the budget has room for and whose steps take hardly longer."""

        def device_bytes(rows: int) -> int:
            return self._plan.device_bytes + self._table.profile.workload_bytes(rows, self._table.context)

        batch = max(self._table.batch_sizes)
        now, best, larger = self._table.forecaster(batch)(self._plan), None, 2 * batch
        while larger <= _LARGEST_BATCH and device_bytes(larger) <= self._budget.num_bytes:
            then = self._table.forecaster(larger)(self._plan)
            if then.step_s > _NEARLY_FREE * now.step_s:
                break
            best, larger = then, 2 * larger
        if best is not None:
            longer = max(0.0, best.step_s / now.step_s - 1)
            more = best.rows_per_s / now.rows_per_s
            times = f"{more:.3g}" if more < 999.5 else f"{more:,.0f}"
            text = f"batch {best.rows} instead of {batch}: {times}x the tokens for {longer:.0%} more step time"
            yield Alternative(text, device_bytes(best.rows), best.rows, more, best.step_s)


def _mean_ratio(slow: Iterable[float], fast: Iterable[float]) -> float:
    """Geometric mean of how many times as fast the second is."""
    ratios = [math.log(a / b) for a, b in zip(slow, fast, strict=True)]
    return math.exp(sum(ratios) / len(ratios))
