"""A byte budget -> the fastest plan within it.

Offloading a quarter of *every* layer beats offloading every fourth layer: slots are a quarter of the size and no
stretch of compute goes without a copy behind it. So :mod:`penstock.plan.candidates` offers sets of roles, the same in
every layer, with evenly spaced layers that keep more; here each is timed by the cost model and the fastest is taken.
Memory that is left over goes into residency, because every byte that stays is a byte that need not come.

Of equally fast candidates: slots that divide the units, then fewer bytes moved, then less device memory.

Where units may rest in files (:class:`penstock.plan.disk_fallback.Spill`), host memory comes first: a candidate leaves
as many units in files as do not fit into it, and is timed with them there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.config import Budget, Mode, format_gib
from penstock.errors import BudgetError, warn_user
from penstock.model.inventory import Inventory
from penstock.plan.candidates import CandidateTable, Choice, Costed, Floats, Ints
from penstock.plan.overrides import warn_of_stranded
from penstock.plan.plan import Plan, assemble
from penstock.plan.problem import PlanningProblem

__all__ = ["Point", "curve", "solve"]

# Timed first, by the order of their lower bounds; the best of them rules out nearly all the others.
_FIRST = 64
_FIRST_FAMILIES = 4
_CURVE_BINS = 256
_HOST_MODES = ("cpu", "shm_cpu")


@dataclass(frozen=True)
class Point:
    """A candidate that no other beats: none is as fast with less device memory.

    Attributes:
        device_bytes: for weights.
        step_s: by batch size, in the order of the workload.
    """

    device_bytes: int
    step_s: tuple[float, ...]


def solve(question: PlanningProblem, budget: Budget, mode: Mode, space: CandidateTable | None = None) -> Plan:
    """The plan with the least geometric mean of step times over the batch sizes.

    ``space``: of this question, if it is at hand.

    Raises:
        BudgetError: even with everything offloaded the budget is too small; carries the minimum.
    """
    inventory = question.inventory
    if budget.host_limit_bytes is not None and question.mode not in _HOST_MODES:
        _warn_no_host_memory(mode)
    weights_budget = budget.num_bytes - reserved_bytes(question, budget)
    if inventory.num_bytes <= weights_budget and not question.forced:
        _warn_nothing_to_do(inventory, budget)
        return assemble(inventory, [], 0, mode)
    space = space or CandidateTable(question)
    warn_of_stranded(inventory, space.parts.stranded)
    best = _best(space, weights_budget, host_limit(question, budget))
    if best is None:
        raise _too_small(space, budget, question)
    return assemble(inventory, best.drafts, best.num_slots, mode, uva=best.uva)


def host_limit(question: PlanningProblem, budget: Budget) -> int | None:
    """Host memory that the weights may take: the budget's, or what is free where the rest has files to rest in."""
    if question.mode not in _HOST_MODES:
        return None
    if budget.host_limit_bytes is None and question.spill is not None:
        return question.spill.free_bytes
    return budget.host_limit_bytes


def reserved_bytes(question: PlanningProblem, budget: Budget) -> int:
    """Device memory that the workload takes beside the weights."""
    return question.traits.workload_bytes(max(budget.workload.batch_sizes), budget.workload.context)


def _best(space: CandidateTable, device_bytes: int, host_bytes: int | None) -> Choice | None:
    groups = [group.within(host_bytes) for group in space.groups]
    fitting = [(group, group.fitting(device_bytes, host_bytes)) for group in groups]
    promising = sorted((pair for pair in fitting if len(pair[1])), key=lambda pair: float(pair[0].bound(pair[1]).min()))
    limit = min((score.min() for _, _, score in _timed(promising[:_FIRST_FAMILIES], np.inf, _FIRST)), default=np.inf)
    if limit == np.inf:
        return None
    ranked = [
        (score[best], _rank(group, int(rows[best])), group, int(rows[best]))
        for group, rows, score in _timed(fitting, limit, None)
        for best in [_first(group, rows, score)]
    ]
    _, _, group, row = min(ranked, key=lambda entry: entry[:2])
    return group.choice(row)


def _timed(
    fitting: list[tuple[Costed, Ints]], limit: float, count: int | None
) -> Iterator[tuple[Costed, Ints, Floats]]:
    """(group, candidates, their scores) for candidates whose lower bound is within ``limit``; ``count`` per group."""
    for group, rows in fitting:
        bound = group.bound(rows)
        kept = rows[bound <= limit]
        if count is not None:
            kept = rows[np.argsort(bound, kind="stable")[:count]]
        if len(kept):
            yield group, kept, score_of(group.step_s(kept))


def score_of(step_s: Floats) -> Floats:
    """Mean logarithm over the batch sizes, rounded so that equal times are equal."""
    score: Floats = np.round(np.log(step_s).mean(axis=0), 9)
    return score


def _first(group: Costed, rows: Ints, score: Floats) -> int:
    equal = np.flatnonzero(score == score.min())
    if len(equal) == 1:
        return int(equal[0])
    chosen = rows[equal]
    slots = np.maximum(group.num_slots[chosen], 1)
    uneven = group.num_units[chosen] % slots > 0
    # The last key counts first; as in _rank.
    order = np.lexsort((slots, group.device_bytes[chosen], group.moved_bytes[chosen], uneven))
    return int(equal[order[0]])


def _rank(group: Costed, row: int) -> tuple[bool, float, float, int]:
    slots = max(1, int(group.num_slots[row]))
    uneven = bool(group.num_units[row] % slots)
    return uneven, float(group.moved_bytes[row]), float(group.device_bytes[row]), slots


def curve(space: CandidateTable, host_bytes: int | None = None) -> list[Point]:
    """Nearly the best step times for every amount of device memory, ascending: what a little more would buy.

    ``host_bytes``: host memory that the weights may take. Of the candidates of a family only the most promising of each
    of ``_CURVE_BINS`` stretches of memory are timed.
    """
    points: list[tuple[float, float, Floats]] = []
    for group in (group.within(host_bytes) for group in space.groups):
        rows = _most_promising(group, space.question.inventory.num_bytes, host_bytes)
        times = group.step_s(rows)
        points += zip(group.device_bytes[rows], score_of(times), times.T, strict=True)
    best: list[Point] = []
    fastest = np.inf
    for device_bytes, score, times in sorted(points, key=lambda point: point[:2]):
        if score < fastest:
            fastest = score
            best.append(Point(int(device_bytes), tuple(map(float, times))))
    return best


def _most_promising(group: Costed, total_bytes: int, host_bytes: int | None) -> Ints:
    every = group.fitting(np.inf, host_bytes)
    if not len(every):
        return every
    stretch = np.floor(group.device_bytes[every] / max(1, total_bytes) * _CURVE_BINS)
    order = np.lexsort((group.bound(every), stretch))
    changes = np.flatnonzero(np.diff(stretch[order], prepend=-1.0))
    kept = np.unique(np.concatenate([changes, np.minimum(changes + 1, len(order) - 1)]))
    rows: Ints = every[order[kept]]
    return rows


def _warn_no_host_memory(mode: Mode) -> None:
    warn_user(
        f"--host-memory has no effect: in mode {mode!r} no weights rest in host memory; leave it out, or say "
        f"--offload-mode cpu"
    )


def _warn_nothing_to_do(inventory: Inventory, budget: Budget) -> None:
    warn_user(
        f"the weights ({format_gib(inventory.num_bytes)}) fit the budget ({format_gib(budget.num_bytes)}): nothing is "
        f"offloaded; give a smaller --device-memory to offload some of them"
    )


def _too_small(space: CandidateTable, budget: Budget, question: PlanningProblem) -> BudgetError:
    beside = reserved_bytes(question, budget)
    least = beside + min(int(group.device_bytes.min()) for group in space.groups)
    within = _least_device_bytes(space, host_limit(question, budget))
    minimum = None if within is None else beside + within
    if budget.num_bytes >= least:
        return _too_little_host(space, budget, beside, minimum)
    inventory = question.inventory
    work = budget.workload
    besides = (
        f", {format_gib(beside)} of it for the cache and activations of batch {max(work.batch_sizes)} at "
        f"{work.context} tokens"
        if beside
        else ""
    )
    host_bytes = None if minimum is not None else _least_host_bytes(space, least - beside)
    too = "" if host_bytes is None else f", with --host-memory {-(-host_bytes // 2**20)}MiB or more"
    if minimum is not None and minimum > least:
        too = ", which leaves little enough to host memory"
    use = least if minimum is None else minimum
    return BudgetError(
        f"a budget of {format_gib(budget.num_bytes)} ({budget.num_bytes} bytes) is too small: this model's weights are "
        f"{format_gib(inventory.num_bytes)} and with everything offloaded penstock still needs {format_gib(least)} "
        f"({least} bytes){besides}; use --device-memory {-(-use // 2**20)}MiB or more{too}",
        use,
    )


def _least_device_bytes(space: CandidateTable, host_bytes: int | None) -> int | None:
    """The least for weights with which something stays within ``host_bytes``; ``None``: rules take more than that."""
    groups = [group.within(host_bytes) for group in space.groups]
    fitting = [(group, group.fitting(np.inf, host_bytes)) for group in groups]
    question = space.question
    everything = None if question.forced else question.inventory.num_bytes
    return min((int(group.device_bytes[rows].min()) for group, rows in fitting if len(rows)), default=everything)


def _too_little_host(space: CandidateTable, budget: Budget, beside: int, minimum: int | None) -> BudgetError:
    limit = host_limit(space.question, budget) or 0
    least = _least_host_bytes(space, budget.num_bytes - beside)
    whose = "--host-memory" if budget.host_limit_bytes is not None else "the free host memory of"
    more = "" if minimum is None else f"use --device-memory {-(-minimum // 2**20)}MiB or more, "
    return BudgetError(
        f"a budget of {format_gib(budget.num_bytes)} leaves more than {whose} {format_gib(limit)} to be offloaded: at "
        f"least {format_gib(least)}{_IN_FILES if space.question.spill else ''}, {format_gib(least - limit)} too much; "
        f"{more}allow --host-memory {-(-least // 2**20)}MiB{'' if space.question.spill else _WITHOUT_FILES}",
        budget.num_bytes if minimum is None else minimum,
    )


_IN_FILES = " with the staging ring, beside what can rest in the checkpoint's files"
_WITHOUT_FILES = (
    ", or let the rest stay in files: pass checkpoint=FOLDER and no mode, where compute runs on a GPU, or mode 'disk' "
    "(--offload-mode disk)"
)


def _least_host_bytes(space: CandidateTable, device_bytes: int) -> int:
    """The smallest limit of host memory with which something fits ``device_bytes``."""
    least = [
        float(group.least_host_bytes(rows).min())
        for group in space.groups
        if len(rows := group.fitting(device_bytes, None))
    ]
    return int(min(least))
