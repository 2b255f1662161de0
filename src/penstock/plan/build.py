"""Policy + inventory -> plan, the predicted cost of the plan, and alternatives to it.

The :class:`Planner` holds everything that a plan is made from. A :class:`Forecast` is the time of a step, its floor and
what bounds it; an :class:`Alternative` is what a little more memory or a larger batch would bring.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from penstock.config import SHARDED_MODES, UVA, Budget, Mode, Policy, Prefetch, Rules, Workload
from penstock.errors import RuleError, SelectionError, warn_user
from penstock.model.inventory import Inventory, StorageInfo
from penstock.model.memory_profile import ModelProfile
from penstock.plan.candidates import CandidateTable, Spill
from penstock.plan.cost_model import NOMINAL_CPU, NOMINAL_GPU, Rates, StepModel, find_stages, split_rates
from penstock.plan.plan import Plan, assemble
from penstock.plan.solver import Point, curve, host_limit, reserved_bytes, solve
from penstock.plan.units import (
    draft_units,
    find_stacks,
    plan_group_rule,
    read_in_place,
    selected,
    settle_rules,
    some_names,
    usable_slots,
)

__all__ = ["Alternative", "Bound", "Forecast", "Forecaster", "Outlook", "Planner", "WorkloadBytes", "build_plan"]

GIB = 2**30
# A step that much faster is worth asking for more memory.
_WORTHWHILE = 1.3
# A step is as good as resident within this.
_AT_FULL_SPEED = 1.02
# A larger batch is as good as free if a step takes no more than this much longer.
_NEARLY_FREE = 1.1
_LARGEST_BATCH = 1024

Bound = Literal["compute", "link", "in place", "disk"]


@dataclass(frozen=True)
class Planner:
    """Makes plans from policies, predicts their cost, and suggests alternatives; pure, loads nothing.

    Attributes:
        inventory: of the model, which may be on ``meta``.
        rates: of the machine, one rank alone; those of units that are split are derived from them.
        profile: of the model beyond names and sizes.
        zero_copy: whether a budget may have compute read any tensor in place, and not only lookups.
        default_mode: the store of a :class:`~penstock.config.Budget` that names none.
        unstreamable: storages whose bytes are in no checkpoint file unchanged; mode ``disk`` keeps them resident.
        num_ranks: over how many ranks a budget's units are split in a sharded mode, where no rank has whole tensors
            to read in place.
        spill: the files in which a budget that names no store leaves what host memory has no room for; ``None``: there
            are none.
    """

    inventory: Inventory
    rates: Rates
    profile: ModelProfile = field(default_factory=ModelProfile)
    zero_copy: bool = False
    default_mode: Mode = "cpu"
    unstreamable: Collection[str] = ()
    num_ranks: int = 1
    spill: Spill | None = None
    # Candidates do not depend on the size of the budget, and are asked for again with other sizes.
    _tables: dict[object, CandidateTable] = field(default_factory=dict, compare=False, repr=False)

    def plan(self, policy: Policy) -> Plan:
        """The plan for ``policy``.

        Raises:
            SelectionError: a pattern, or the policy as a whole, selects nothing that can be offloaded.
            RuleError: offload rules that contradict one another or cannot be obeyed.
            BudgetError: the budget is below the minimum.
            OptionError: the workload's context is longer than the model allows.
        """
        storages = self.inventory.storages
        if isinstance(policy, Budget):
            made = solve(self.candidates(policy), policy)
        elif isinstance(policy, Rules):
            # One unit per layer, and per module outside the layers, of what the rules prefetch.
            forced = settle_rules(self.inventory, policy.rules, self._fixed(policy.mode))
            moving, uva = ([s for s in storages if forced.get(s.name) == how] for how in ("prefetch", "uva"))
            drafts = draft_units(self.inventory, moving)
            if not drafts and not uva:
                raise RuleError(
                    f"the {len(policy.rules)} rule(s) keep everything resident: without a budget at least one has to "
                    f"say prefetch or uva, e.g. --offload-rule experts=uva (or give --device-memory)"
                )
            num_slots = usable_slots(policy.prefetch_step, len(drafts))
            made = assemble(self.inventory, drafts, num_slots, policy.mode, uva=uva)
        elif isinstance(policy, Prefetch):
            stacks = find_stacks(self.inventory)
            made = plan_group_rule(self.inventory, policy, list(stacks.values()), candidates=self._movable(policy))
        else:
            uva = read_in_place(self.inventory, self._movable(policy), policy.limit_bytes)
            made = assemble(self.inventory, [], 0, policy.mode, uva=uva)
        return replace(made, num_ranks=self.num_ranks)

    def _movable(self, policy: Budget | Prefetch | UVA) -> list[StorageInfo]:
        """What ``policy`` selects, without what its store cannot hold."""
        candidates = selected(self.inventory, policy.params)
        fixed = self._fixed(policy.mode or self.default_mode)
        if unsaved := [s.name for s in candidates if s.name in fixed and s.name not in self.unstreamable]:
            warn_user(
                f"{some_names(unsaved)}: buffers that are not persistent are in no state dict, so no checkpoint file "
                f"holds them, and mode 'disk' cannot stream them: they stay resident"
            )
        movable = [s for s in candidates if s.name not in fixed]
        if candidates and not movable and not isinstance(policy, Budget):
            raise SelectionError(
                f"all {len(candidates)} selected tensors ({candidates[0].name}, ...) are made or rearranged while "
                f"loading, or in no state dict, and cannot be streamed from the files; use mode 'cpu' "
                f"(--offload-mode cpu) or select other names"
            )
        return movable

    def _fixed(self, mode: Mode) -> frozenset[str]:
        """Names of what mode ``disk`` keeps resident: its bytes are in no file unchanged, or it is in no state dict."""
        if mode != "disk":
            return frozenset()
        return frozenset(self.unstreamable).union(s.name for s in self.inventory.storages if not s.is_saved)

    # -- budgets -------------------------------------------------------------------------------------------------------

    def candidates(self, budget: Budget) -> CandidateTable:
        """All plans that are considered for ``budget``, whatever its size."""
        key = (budget.params, budget.mode, budget.rules, budget.workload)
        if key not in self._tables:
            self._tables[key] = self._make_table(budget)
        return self._tables[key]

    def _make_table(self, budget: Budget) -> CandidateTable:
        workload, mode = budget.workload, budget.mode or self.default_mode
        self.profile.check_context(workload.context)
        movable = self._movable(budget)
        forced = settle_rules(self.inventory, budget.rules, self._fixed(mode))
        has_bytes = mode != "meta" and mode not in SHARDED_MODES
        return CandidateTable(
            self.inventory,
            [s for s in movable if s.name not in forced],
            forced,
            split_rates(self.rates, mode, self.num_ranks),
            self.profile,
            # Read in place on a GPU, bytes of files have to be in pinned memory: lookups at most, or nothing is saved.
            zero_copy=self.zero_copy and has_bytes and mode != "disk",
            lookups_in_place=has_bytes,
            batch_sizes=workload.batch_sizes,
            context=workload.context,
            ranks_on_device=self.num_ranks if mode == "sharded_gpu" else None,
            mode=mode,
            # A budget that names a store gets that one alone.
            spill=self.spill if budget.mode is None and mode == "cpu" else None,
        )

    # -- predictions ---------------------------------------------------------------------------------------------------

    def forecast(self, plan: Plan, rows: int, context: int = 0) -> Forecast:
        """What a step of ``rows`` rows will take under ``plan``, with ``context`` tokens per sequence in the cache."""
        rates = split_rates(self.rates, plan.mode, plan.num_ranks)
        return Forecaster(self.inventory, rates, self.profile, rows, context)(plan)

    def alternatives(self, budget: Budget, plan: Plan, points: Sequence[Point] | None = None) -> list[Alternative]:
        """What more memory or rows would bring; ``plan`` is the one for ``budget``, ``points`` its curve if known."""
        return list(Alternatives(self.candidates(budget), budget, plan).find(points))

    def curve(self, budget: Budget) -> list[Point]:
        """Step times against device memory for weights, for the workload and rules of ``budget``."""
        table = self.candidates(budget)
        return curve(table, host_limit(table, budget))

    def outlook(self, policy: Policy | Plan | None, plan: Plan, points: Sequence[Point] | None = None) -> Outlook:
        """What ``plan`` will cost for the workload of ``policy``; alternatives too where that is a budget."""
        budget = policy if isinstance(policy, Budget) else None
        workload = Workload() if budget is None else budget.workload
        context, profile = workload.context, self.profile
        memory = []
        for rows in workload.batch_sizes:
            cache_bytes = profile.cache_bytes(rows, context) if context else 0
            memory.append(WorkloadBytes(rows, cache_bytes, profile.workload_bytes(rows, context) - cache_bytes))
        return Outlook(
            self.rates.machine,
            self.rates.is_measured,
            context,
            tuple(self.forecast(plan, rows, context) for rows in workload.batch_sizes),
            tuple(memory),
            plan.device_bytes,
            tuple(self.alternatives(budget, plan, points)) if budget is not None and plan.offloaded_bytes else (),
        )


def build_plan(
    inventory: Inventory, policy: Policy, default_mode: Mode = "cpu", rates: Rates | None = None, **facts: Any
) -> Plan:
    """The plan for ``policy`` by a :class:`Planner` of these facts; without ``rates`` by nominal ones."""
    if rates is None:
        rates = NOMINAL_CPU if (policy.mode or default_mode) == "disk" else NOMINAL_GPU
    return Planner(inventory, rates, default_mode=default_mode, **facts).plan(policy)


# -- what a plan will cost ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forecast:
    """A step of ``rows`` rows under a plan, in seconds.

    Attributes:
        rows: sequences that decode together, or tokens of a prefill.
        step_s: predicted time.
        resident_s: the same with all weights on the device.
        link_s: all copies, one after another.
        disk_s: all reading of files that comes before the copies.
        in_place_s: all reading in place.
        floor_s: what no schedule can beat: the longest of compute, the link's work and the disk's.
        bound: what the floor is made of.
    """

    rows: int
    step_s: float
    resident_s: float
    link_s: float
    disk_s: float
    in_place_s: float
    floor_s: float
    bound: Bound

    @property
    def rows_per_s(self) -> float:
        """Tokens per second of a decode step."""
        return self.rows / self.step_s

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {**asdict(self), "rows_per_s": self.rows_per_s}


class Forecaster:
    """Predicts a step under any plan for one model; what does not depend on the plan is computed once.

    The result follows from sizes and rates alone (:mod:`penstock.plan.cost_model`). ``rates`` are those of the links
    that the units come over; see :func:`penstock.plan.cost_model.split_rates`.
    """

    def __init__(self, inventory: Inventory, rates: Rates, profile: ModelProfile, rows: int, context: int = 0) -> None:
        self._rates, self._rows = rates, rows
        stages = find_stages(inventory)
        # A unit of tied tensors may be anchored around the module that is the stage of the first of them.
        self._anchors = {s.name: stage.anchor for stage in stages for s, _ in stage.storages}
        self._step = StepModel(stages, rates, profile, rows, context)

    def __call__(self, plan: Plan) -> Forecast:
        """The forecast for ``plan``, which is timed as a table of candidates with one row."""
        rates = self._rates
        sizes = {self._anchors[unit.entries[0].storage]: np.array([float(unit.payload_bytes)]) for unit in plan.units}
        in_files = {self._anchors[unit.entries[0].storage]: np.array([True]) for unit in plan.staged_units}
        in_place = self._step.read_in_place(plan.uva)
        step_s = self._step.step_s(
            sizes,
            in_files,
            ((np.array([extra_s]), np.array([link_s])) for extra_s, link_s in in_place),
            np.array([plan.num_slots]),
            np.array([len(plan.units)]),
        )
        in_place_s = sum(seconds for _, seconds in in_place)
        link_s = sum(rates.copy_s(unit.payload_bytes) for unit in plan.moved_units)
        disk_s = rates.file_s_per_byte * plan.read_bytes
        resident_s = sum(self._step.resident_s)
        floor_s = max(resident_s, link_s + in_place_s, disk_s)
        link: Bound = "link" if link_s >= in_place_s else "in place"
        bound: Bound = "compute" if floor_s == resident_s else "disk" if floor_s == disk_s else link
        return Forecast(self._rows, float(step_s[0]), resident_s, link_s, disk_s, in_place_s, floor_s, bound)


@dataclass(frozen=True)
class WorkloadBytes:
    """Device memory beside the weights for one batch size; zeros when no context was stated."""

    batch: int
    cache_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both together."""
        return self.cache_bytes + self.activation_bytes


@dataclass(frozen=True)
class Outlook:
    """Predictions for a plan.

    Attributes:
        machine: whose rates they are made with.
        is_measured: false for nominal rates.
        context: tokens per sequence; 0 if none was stated.
        forecasts: one per batch size.
        memory: beside the weights, one per batch size.
        device_bytes: of weights: residents and slots.
        alternatives: other choices; empty unless the plan was made for a budget.
    """

    machine: str
    is_measured: bool
    context: int
    forecasts: tuple[Forecast, ...]
    memory: tuple[WorkloadBytes, ...]
    device_bytes: int
    alternatives: tuple[Alternative, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings; bytes and seconds."""
        return {
            "machine": self.machine,
            "is_measured": self.is_measured,
            "context": self.context,
            "steps": [forecast.to_json() for forecast in self.forecasts],
            "memory": [{**asdict(use), "device_bytes": self.device_bytes + use.total_bytes} for use in self.memory],
            "alternatives": [asdict(alternative) for alternative in self.alternatives],
        }


# -- alternatives ------------------------------------------------------------------------------------------------------


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


class Alternatives:
    """What else ``plan``, which is that for ``budget``, could be."""

    def __init__(self, table: CandidateTable, budget: Budget, plan: Plan) -> None:
        self._table, self._budget, self._plan = table, budget, plan
        self._reserved = reserved_bytes(table, budget)
        self._forecasters = [self._forecaster(rows) for rows in self._table.batch_sizes]
        self._now = self._times(plan)

    def find(self, points: Sequence[Point] | None) -> Iterator[Alternative]:
        """More memory on either side, or a larger batch: the nearest first; none where nothing is better.

        ``points``: the memory curve of the table, if it is known.
        """
        yield from self._more_memory(points or curve(self._table, host_limit(self._table, self._budget)))
        if self._plan.spilled_bytes and self._table.spill is not None:
            yield from self._more_host_memory(self._table.spill.ring_bytes)
        yield from self._larger_batch()

    def _forecaster(self, rows: int) -> Forecaster:
        table = self._table
        return Forecaster(table.inventory, table.rates, table.profile, rows, table.context)

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
            # With the memory rounded up to whole GiB, what is best within it.
            total = self._budget.num_bytes + extra * GIB
            within = [point for point in points if point.device_bytes <= total - self._reserved]
            better = max(within, key=lambda point: point.device_bytes)
            at_full_speed = _mean_ratio(better.step_s, resident) < _AT_FULL_SPEED
            full = " (all weights at hand: as fast as resident)" if at_full_speed else ""
            ratio = self._speedup(better.step_s)
            text = f"{extra} GiB more device memory: {ratio:.1f}x faster{full}"
            yield Alternative(text, total, self._table.batch_sizes[0], ratio, better.step_s[0])

    def _more_host_memory(self, ring_bytes: int) -> Iterator[Alternative]:
        """The least host memory that is worthwhile when units in files take it, or else all that they would take.

        The plan is otherwise unchanged: with that much memory the planner may find a better one.
        """
        staged = self._plan.staged_units
        counts = range(1, len(staged) + 1)
        found = bisect_left(counts, _WORTHWHILE, key=lambda count: self._speedup(self._times(self._brought_in(count))))
        better = self._brought_in(min(found + 1, len(staged)))
        times = self._times(better)
        ratio = self._speedup(times)
        if ratio >= _AT_FULL_SPEED:
            taken = sum(unit.num_bytes for unit in staged) - sum(unit.num_bytes for unit in better.staged_units)
            extra = max(1, math.ceil((taken - (0 if better.staged_units else ring_bytes)) / GIB))
            rest = "" if better.staged_units else " (nothing is left on disk)"
            text = f"{extra} GiB more host memory: {ratio:.1f}x faster{rest}"
            yield Alternative(text, self._budget.num_bytes, self._table.batch_sizes[0], ratio, times[0])

    def _brought_in(self, count: int) -> Plan:
        """The plan with ``count`` of its units in files in host memory: those that a higher limit would bring there."""
        plan, order = self._plan, {anchor: index for index, anchor in enumerate(self._table.spill_order)}
        staged = sorted(plan.staged_units, key=lambda unit: order[unit.anchor])
        chosen = {unit.index for unit in staged[len(staged) - count :]}
        units = (replace(unit, store=plan.mode) if unit.index in chosen else unit for unit in plan.units)
        return replace(plan, units=tuple(units))

    def _larger_batch(self) -> Iterator[Alternative]:
        """The largest batch whose steps take hardly longer, as far as the budget has room for its cache."""

        def device_bytes(rows: int) -> int:
            return self._plan.device_bytes + self._table.profile.workload_bytes(rows, self._table.context)

        batch = max(self._table.batch_sizes)
        now, best, larger = self._forecaster(batch)(self._plan), None, 2 * batch
        while larger <= _LARGEST_BATCH and device_bytes(larger) <= self._budget.num_bytes:
            then = self._forecaster(larger)(self._plan)
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
