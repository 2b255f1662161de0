"""A byte budget -> the fastest plan within it.

Offloading a quarter of *every* layer beats offloading every fourth layer: slots are a quarter of the size and no
stretch of compute goes without a copy behind it. So :mod:`penstock.plan.candidates` offers sets of roles, the same in
every layer, with evenly spaced layers that keep more; here each is timed by the cost model and the fastest is taken.
Memory that is left over goes into residency, because every byte that stays is a byte that need not come.

Of equally fast candidates: slots that divide the units, then fewer bytes moved, then less device memory.

Where units may rest in files (:class:`penstock.plan.candidates.Spill`), host memory comes first: a candidate leaves as
many units in files as do not fit into it, and is timed with them there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.config import HOST_MODES, Budget, format_gib
from penstock.errors import BudgetError, warn_user
from penstock.plan.candidates import CandidateTable, Family
from penstock.plan.cost_model import Floats, Ints
from penstock.plan.plan import Plan, assemble
from penstock.plan.units import warn_of_stranded

__all__ = ["Point", "curve", "host_limit", "reserved_bytes", "solve"]

_CURVE_BINS = 256


@dataclass(frozen=True)
class Point:
    """A candidate that no other beats: none is as fast with less device memory.

    Attributes:
        device_bytes: for weights.
        step_s: by batch size, in the order of the workload.
    """

    device_bytes: int
    step_s: tuple[float, ...]


def solve(table: CandidateTable, budget: Budget) -> Plan:
    """The plan with the least geometric mean of step times over the batch sizes.

    Raises:
        BudgetError: even with everything offloaded the budget is too small; carries the minimum.
    """
    if budget.host_limit_bytes is not None and table.mode not in HOST_MODES:
        warn_user(
            f"--host-memory has no effect: in mode {table.mode!r} no weights rest in host memory; leave it out, or "
            f"say --offload-mode cpu"
        )
    weights_budget = budget.num_bytes - reserved_bytes(table, budget)
    num_bytes = table.inventory.num_bytes
    if num_bytes <= weights_budget and not table.forced:
        warn_user(
            f"the weights ({format_gib(num_bytes)}) fit the budget ({format_gib(budget.num_bytes)}): nothing is "
            f"offloaded; give a smaller --device-memory to offload some of them"
        )
        return assemble(table.inventory, [], 0, table.mode)
    warn_of_stranded(table.inventory, table.stranded)
    best = _best(table, weights_budget, host_limit(table, budget))
    if best is None:
        raise _too_small(table, budget)
    return best


def host_limit(table: CandidateTable, budget: Budget) -> int | None:
    """Host memory that the weights may take: the budget's, or what is free where the rest has files to rest in."""
    if table.mode not in HOST_MODES:
        return None
    if budget.host_limit_bytes is None and table.spill is not None:
        return table.spill.free_bytes
    return budget.host_limit_bytes


def reserved_bytes(table: CandidateTable, budget: Budget) -> int:
    """Device memory that the workload takes beside the weights."""
    return table.profile.workload_bytes(max(budget.workload.batch_sizes), budget.workload.context)


# -- the search --------------------------------------------------------------------------------------------------------


def _best(table: CandidateTable, device_bytes: int, host_bytes: int | None) -> Plan | None:
    best: tuple[tuple[float, ...], Family, int] | None = None
    copy_bytes_per_s = max(rate for _, rate in table.rates.copy_bytes_per_s.points)
    for family in table.families:
        rows, memory = family.fitting(device_bytes, host_bytes), family.memory
        if best is not None:  # no step is shorter than its copies, or than its compute
            moved_s, in_place = memory.moved_bytes[rows] / copy_bytes_per_s, [s.name for s in family.uva]
            compute_s = [sum(step.resident_s) + sum(s for s, _ in step.read_in_place(in_place)) for step in table.steps]
            rows = rows[_score(np.array([np.maximum(moved_s, least_s) for least_s in compute_s])) <= best[0][0] + 1e-8]
        if len(rows):
            slots = np.maximum(memory.num_slots[rows], 1)
            # What decides among equally fast candidates; less is better.
            uneven = memory.num_units[rows] % slots > 0
            score = _score(family.step_s(rows, host_bytes))
            keys = (score, uneven, memory.moved_bytes[rows], memory.device_bytes[rows], slots)
            first = np.lexsort(keys[::-1])[0]  # the last key counts first
            found = (tuple(float(key[first]) for key in keys), family, int(rows[first]))
            best = found if best is None or found[0] < best[0] else best
    return None if best is None else best[1].plan(best[2], host_bytes)


def _score(step_s: Floats) -> Floats:
    """Mean logarithm over the batch sizes, rounded so that equal times are equal."""
    score: Floats = np.round(np.log(step_s).mean(axis=0), 9)
    return score


def curve(table: CandidateTable, host_bytes: int | None = None) -> list[Point]:
    """Nearly the best step times for every amount of device memory, ascending: what a little more would buy.

    ``host_bytes``: host memory that the weights may take. Of the candidates of a family only those that move the fewest
    bytes in each of ``_CURVE_BINS`` ranges of memory are timed.
    """
    points: list[tuple[float, float, Floats]] = []
    for family in table.families:
        rows = _fewest_moved(family, host_bytes)
        times = family.step_s(rows, host_bytes)
        points += zip(family.memory.device_bytes[rows], _score(times), times.T, strict=True)
    best: list[Point] = []
    fastest = np.inf
    for device_bytes, score, times in sorted(points, key=lambda point: point[:2]):
        if score < fastest:
            fastest = score
            best.append(Point(int(device_bytes), tuple(map(float, times))))
    return best


def _fewest_moved(family: Family, host_bytes: int | None) -> Ints:
    every = family.fitting(np.inf, host_bytes)
    if not len(every):
        return every
    total_bytes = max(1, family.table.inventory.num_bytes)
    bins = np.floor(family.memory.device_bytes[every] / total_bytes * _CURVE_BINS)
    order = np.lexsort((family.memory.moved_bytes[every], bins))
    changes = np.flatnonzero(np.diff(bins[order], prepend=-1.0))
    kept = np.unique(np.concatenate([changes, np.minimum(changes + 1, len(order) - 1)]))
    rows: Ints = every[order[kept]]
    return rows


# -- refusals ----------------------------------------------------------------------------------------------------------


def _too_small(table: CandidateTable, budget: Budget) -> BudgetError:
    """The refusal of a budget within which there is no candidate, with a budget that has one."""
    work = budget.workload
    beside, limit = reserved_bytes(table, budget), host_limit(table, budget)
    least = beside + min(int(family.memory.device_bytes.min()) for family in table.families)
    # Under the limit of host memory; everything resident needs none, unless rules take some.
    fitting = [
        int(family.memory.device_bytes[rows].min())
        for family in table.families
        if len(rows := family.fitting(np.inf, limit))
    ]
    if not fitting and not table.forced:
        fitting = [table.inventory.num_bytes]
    minimum = beside + min(fitting) if fitting else None
    if budget.num_bytes >= least:
        return _too_little_host(table, budget, limit or 0, minimum)
    besides = f" for the cache and activations of batch {max(work.batch_sizes)} at {work.context} tokens"
    besides = f", {format_gib(beside)} of it{besides}" if beside else ""
    use, too = least, ""
    if minimum is None:
        too = f", with --host-memory {_mib_up(_least_host_bytes(table, least - beside))}MiB or more"
    elif minimum > least:
        use, too = minimum, ", which leaves little enough to host memory"
    return BudgetError(
        f"a budget of {format_gib(budget.num_bytes)} ({budget.num_bytes} bytes) is too small: this model's weights are "
        f"{format_gib(table.inventory.num_bytes)} and with everything offloaded penstock still needs "
        f"{format_gib(least)} ({least} bytes){besides}; use --device-memory {_mib_up(use)}MiB or more{too}",
        use,
    )


def _too_little_host(table: CandidateTable, budget: Budget, limit: int, minimum: int | None) -> BudgetError:
    least = _least_host_bytes(table, budget.num_bytes - reserved_bytes(table, budget))
    whose = "--host-memory" if budget.host_limit_bytes is not None else "the free host memory of"
    more = "" if minimum is None else f"use --device-memory {_mib_up(minimum)}MiB or more, "
    ring, files = " with the staging ring, beside what can rest in the checkpoint's files", ""
    if table.spill is None:
        ring = ""
        files = (
            ", or let the rest stay in files: pass checkpoint=FOLDER and no mode, where compute runs on a GPU, or mode "
            "'disk' (--offload-mode disk)"
        )
    return BudgetError(
        f"a budget of {format_gib(budget.num_bytes)} leaves more than {whose} {format_gib(limit)} to be offloaded: at "
        f"least {format_gib(least)}{ring}, {format_gib(least - limit)} too much; {more}allow --host-memory "
        f"{_mib_up(least)}MiB{files}",
        budget.num_bytes if minimum is None else minimum,
    )


def _least_host_bytes(table: CandidateTable, device_bytes: int) -> int:
    """The smallest limit of host memory with which something fits ``device_bytes``."""
    fitting = ((family, family.fitting(device_bytes)) for family in table.families)
    return int(min(float(family.least_host_bytes(rows).min()) for family, rows in fitting if len(rows)))


def _mib_up(num_bytes: int) -> int:
    return -(-num_bytes // 2**20)
