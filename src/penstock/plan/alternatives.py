"""The nearest other things a user could ask for, and what they would bring: more memory on either side, or a larger
batch."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.config import Budget
from penstock.plan.candidates import CandidateTable
from penstock.plan.plan import Plan
from penstock.plan.predict import Forecaster
from penstock.plan.problem import PlanningProblem
from penstock.plan.solver import Point, curve, host_limit, reserved_bytes

__all__ = ["Alternative", "alternatives"]

GIB = 2**30
# A step that much faster is worth asking for more memory.
_WORTHWHILE = 1.3
# A step is as good as resident within this.
_AT_FULL_SPEED = 1.02
# A larger batch is as good as free if a step takes no more than this much longer.
_NEARLY_FREE = 1.1
_LARGEST_BATCH = 1024


@dataclass(frozen=True)
class Alternative:
    """One other choice.

    Attributes:
        text: for people, without a full stop.
        device_bytes: device memory it takes in all.
        batch: rows of its step.
        speedup: tokens per second compared with the plan's.
        step_s: its predicted step.
    """

    text: str
    device_bytes: int
    batch: int
    speedup: float
    step_s: float

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return asdict(self)


def alternatives(
    space: CandidateTable, budget: Budget, plan: Plan, points: Sequence[Point] | None = None
) -> list[Alternative]:
    """Two or three of them, the nearest first; empty where nothing would be better.

    ``points``: the memory curve of ``space``, if it is at hand.
    """
    question = space.question
    if points is None:
        points = curve(space, host_limit(question, budget))
    known = {rows: _forecaster(question, rows) for rows in question.batch_sizes}
    now = _times(known, plan)
    found = list(_more_memory(question, budget, now, points))
    found += _more_host_memory(space, budget, plan, now, known)
    return found + list(_larger_batch(question, budget, plan, known))


# By rows of the step.
Forecasters = Mapping[int, Forecaster]


def _forecaster(question: PlanningProblem, rows: int) -> Forecaster:
    return Forecaster(question.inventory, question.rates, question.traits, rows, question.context)


def _more_host_memory(
    space: CandidateTable, budget: Budget, plan: Plan, now: Sequence[float], known: Forecasters
) -> Iterator[Alternative]:
    """The least of it that is worthwhile when units in files take it, or else all that they would take.

    The plan stays as it is otherwise: with the memory at hand the planner may do better.
    """
    question, staged = space.question, plan.staged_units
    if not plan.spilled_bytes or question.spill is None:
        return
    counts = range(1, len(staged) + 1)
    found = bisect_left(
        counts, _WORTHWHILE, key=lambda count: _mean_ratio(now, _times(known, _brought_in(space, plan, count)))
    )
    better = _brought_in(space, plan, min(found + 1, len(staged)))
    times = _times(known, better)
    ratio = _mean_ratio(now, times)
    if ratio < _AT_FULL_SPEED:
        return
    taken = sum(unit.num_bytes for unit in staged) - sum(unit.num_bytes for unit in better.staged_units)
    extra = max(1, math.ceil((taken - (0 if better.staged_units else question.spill.ring_bytes)) / GIB))
    rest = "" if better.staged_units else " (nothing is left on disk)"
    text = f"{extra} GiB more host memory: {ratio:.1f}x faster{rest}"
    yield Alternative(text, budget.num_bytes, question.batch_sizes[0], ratio, times[0])


def _brought_in(space: CandidateTable, plan: Plan, count: int) -> Plan:
    """``plan`` with ``count`` of its units in files in its other store: those that a higher limit would bring there."""
    order = {anchor: position for position, anchor in enumerate(space.spill_order)}
    last = sorted(plan.staged_units, key=lambda unit: order[unit.anchor])[len(plan.staged_units) - count :]
    chosen = {unit.index for unit in last}
    units = [replace(unit, store=plan.mode) if unit.index in chosen else unit for unit in plan.units]
    return replace(plan, units=tuple(units))


def _more_memory(
    question: PlanningProblem, budget: Budget, now: Sequence[float], points: Sequence[Point]
) -> Iterator[Alternative]:
    beside = reserved_bytes(question, budget)
    resident = points[-1].step_s
    seen = 0
    for wanted in (_WORTHWHILE, _mean_ratio(now, resident) / _AT_FULL_SPEED):
        better = next(
            (point for point in points if _mean_ratio(now, point.step_s) >= max(wanted, _AT_FULL_SPEED)), None
        )
        if better is None:
            continue
        extra = math.ceil((better.device_bytes + beside - budget.num_bytes) / GIB)
        if extra <= seen:
            continue
        seen = extra
        # With the memory rounded up to whole GiB, what is best within it.
        limit = budget.num_bytes + extra * GIB - beside
        better = max((point for point in points if point.device_bytes <= limit), key=lambda point: point.device_bytes)
        ratio = _mean_ratio(now, better.step_s)
        full = (
            " (all weights at hand: as fast as resident)"
            if _mean_ratio(better.step_s, resident) < _AT_FULL_SPEED
            else ""
        )
        yield Alternative(
            f"{extra} GiB more device memory: {ratio:.1f}x faster{full}",
            budget.num_bytes + extra * GIB,
            question.batch_sizes[0],
            ratio,
            better.step_s[0],
        )


def _larger_batch(question: PlanningProblem, budget: Budget, plan: Plan, known: Forecasters) -> Iterator[Alternative]:
    batch = max(question.batch_sizes)
    now = known[batch](plan)
    best = None
    larger = 2 * batch
    while larger <= _LARGEST_BATCH and _bytes_with(question, budget, plan, larger) <= budget.num_bytes:
        then = _forecaster(question, larger)(plan)
        if then.step_s > _NEARLY_FREE * now.step_s:
            break
        best, larger = then, 2 * larger
    if best is not None:
        longer = best.step_s / now.step_s - 1
        more = best.rows_per_s / now.rows_per_s
        times = f"{more:.3g}" if more < 999.5 else f"{more:,.0f}"
        yield Alternative(
            f"batch {best.rows} instead of {batch}: {times}x the tokens for {max(0.0, longer):.0%} more step time",
            _bytes_with(question, budget, plan, best.rows),
            best.rows,
            more,
            best.step_s,
        )


def _bytes_with(question: PlanningProblem, budget: Budget, plan: Plan, batch: int) -> int:
    return plan.device_bytes + question.traits.workload_bytes(batch, budget.workload.context)


def _times(forecasters: Forecasters, plan: Plan) -> tuple[float, ...]:
    return tuple(of_batch(plan).step_s for of_batch in forecasters.values())


def _mean_ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Geometric mean of how many times as fast the second is."""
    return math.exp(sum(math.log(a / b) for a, b in zip(slow, fast, strict=True)) / len(slow))
