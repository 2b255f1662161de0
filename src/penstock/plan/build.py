"""Policy + inventory -> plan. The :class:`Planner` holds everything that a plan is made from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.config import SHARDED_MODES, UVA, Budget, Mode, Policy, Prefetch, Rules, Workload
from penstock.errors import RuleError, SelectionError, warn_user
from penstock.model.inventory import Inventory, StorageInfo
from penstock.model.memory_profile import ModelProfile
from penstock.model.patterns import matching, select
from penstock.model.semantic_groups import semantic_groups
from penstock.plan.candidates import CandidateTable, PlanningProblem, Spill
from penstock.plan.cost_model import NOMINAL_CPU, NOMINAL_GPU, Rates, split_rates
from penstock.plan.layers import (
    called_within,
    draft_units,
    drafts_at,
    find_stacks,
    group_rule,
    split_by_part,
    stranded,
    worth_moving,
)
from penstock.plan.overrides import settle_rules, some_names, warn_of_stranded
from penstock.plan.plan import Plan, UnitDraft, assemble
from penstock.plan.predict import Alternative, Alternatives, Forecast, Forecaster
from penstock.plan.report import PredictionReport, WorkloadBytes
from penstock.plan.solver import Point, curve, host_limit, solve

__all__ = ["Planner", "build_plan", "move_on_demand", "plan_group_rule"]


@dataclass(frozen=True)
class Planner:
    """Answers what a policy comes to, what it will cost, and what else there is; pure, loads nothing.

    Attributes:
        inventory: of the model, which may be on ``meta``.
        rates: of the machine, one rank alone; those of units that are split are derived from them.
        profile: of the model beyond names and sizes.
        zero_copy: whether a budget may have compute read any tensor in place, and not only lookups.
        default_mode: the store of a :class:`~penstock.config.Budget` that names none.
        unstreamable: storages that the checkpoint files do not hold as they are; mode ``disk`` keeps them resident.
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
        if isinstance(policy, Budget):
            made = solve(self.candidates(policy), policy)
        elif isinstance(policy, Rules):
            made = self._plan_rules(policy)
        elif isinstance(policy, Prefetch):
            stacks = find_stacks(self.inventory)
            made = plan_group_rule(self.inventory, policy, list(stacks.values()), candidates=self._movable(policy))
        else:
            uva = _read_in_place(self.inventory, self._movable(policy), policy.limit_bytes)
            made = assemble(self.inventory, [], 0, policy.mode, uva=uva)
        return replace(made, num_ranks=self.num_ranks)

    def _movable(self, policy: Budget | Prefetch | UVA) -> list[StorageInfo]:
        """What ``policy`` selects, without what its store cannot hold."""
        candidates = _candidates(self.inventory, policy.params)
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
        """What mode ``disk`` keeps resident: the files do not hold it as it is, or no state dict has it."""
        if mode != "disk":
            return frozenset()
        return frozenset(self.unstreamable).union(s.name for s in self.inventory.storages if not s.is_saved)

    def _plan_rules(self, policy: Rules) -> Plan:
        """One unit per layer, and per module outside the layers, of what the rules prefetch."""
        forced = settle_rules(self.inventory, policy.rules, self._fixed(policy.mode))
        drafts = draft_units(self.inventory, [s for s in self.inventory.storages if forced.get(s.name) == "prefetch"])
        in_place = [s for s in self.inventory.storages if forced.get(s.name) == "uva"]
        if not drafts and not in_place:
            raise RuleError(
                f"the {len(policy.rules)} rule(s) keep everything resident: without a budget at least one has to say "
                f"prefetch or uva, e.g. --offload-rule experts=uva (or give --device-memory)"
            )
        num_slots = _usable_slots(policy.prefetch_step, len(drafts))
        return assemble(self.inventory, drafts, num_slots, policy.mode, uva=in_place)

    # -- budgets -------------------------------------------------------------------------------------------------------

    def candidates(self, budget: Budget) -> CandidateTable:
        """All the plans that are considered for ``budget``, whatever its size."""
        key = (budget.params, budget.mode, budget.rules, budget.workload)
        if key not in self._tables:
            self._tables[key] = CandidateTable(self._problem(budget))
        return self._tables[key]

    def _problem(self, budget: Budget) -> PlanningProblem:
        workload, mode = budget.workload, budget.mode or self.default_mode
        self.profile.check_context(workload.context)
        movable = self._movable(budget)
        forced = settle_rules(self.inventory, budget.rules, self._fixed(mode))
        has_bytes = mode != "meta" and mode not in SHARDED_MODES
        return PlanningProblem(
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
        """What a little more would bring, ``plan`` being the one for ``budget``; ``points``: the curve, if at hand."""
        return list(Alternatives(self.candidates(budget), budget, plan).find(points))

    def curve(self, budget: Budget) -> list[Point]:
        """Step times against device memory for weights, for the workload and rules of ``budget``."""
        table = self.candidates(budget)
        return curve(table, host_limit(table.problem, budget))

    def outlook(
        self, policy: Policy | Plan | None, plan: Plan, points: Sequence[Point] | None = None
    ) -> PredictionReport:
        """What ``plan`` will cost for the workload of ``policy``; alternatives too where that is a budget."""
        budget = policy if isinstance(policy, Budget) else None
        workload = Workload() if budget is None else budget.workload
        context, profile = workload.context, self.profile
        memory = []
        for rows in workload.batch_sizes:
            cache_bytes = profile.cache_bytes(rows, context) if context else 0
            memory.append(WorkloadBytes(rows, cache_bytes, profile.workload_bytes(rows, context) - cache_bytes))
        return PredictionReport(
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


def plan_group_rule(
    inventory: Inventory,
    policy: Prefetch,
    stacks: Sequence[Sequence[str]],
    in_place: Callable[[StorageInfo], bool] = lambda storage: False,
    *,
    by_part: bool = False,
    candidates: Sequence[StorageInfo] | None = None,
) -> Plan:
    """The plan of the group rule over stacks of layers, each given by its dotted names in order.

    Args:
        inventory: of the model.
        policy: the group rule.
        stacks: what it counts.
        in_place: what of its candidates is read where it rests, because no layer of these stacks brings it.
        by_part: let the parts of a layer (attention, feed-forward) travel one by one, each through a slot of its own,
            in the same device memory: a part can be refilled while the next computes.
        candidates: what may move; default what ``policy`` selects.
    """
    candidates = _candidates(inventory, policy.params) if candidates is None else candidates
    uva = [s for s in candidates if in_place(s)]
    chosen = {s.name for s in candidates} - {s.name for s in uva}
    layers: list[UnitDraft] = []
    for stack in stacks:
        for index in group_rule(len(stack), policy.group_size, policy.num_in_group):
            layers += drafts_at(inventory, called_within(inventory, stack[index]), chosen)
    anchors = [anchor for stack in stacks for layer in stack for anchor in called_within(inventory, layer)]
    within = {s.name for anchor in anchors for s in inventory.under(anchor)}
    warn_of_stranded(inventory, stranded(inventory, (s for s in candidates if s.name in chosen), within))
    if not layers and not uva:
        raise SelectionError(
            f"group rule {policy.group_size}/{policy.num_in_group} selects none of the {sum(map(len, stacks))} layers' "
            f"tensors; lower --offload-group-size or widen --offload-params"
        )
    reached = {s.name for draft in layers for s in draft.storages} | {s.name for s in uva}
    for pattern in policy.params:
        if matching(inventory, pattern).isdisjoint(reached):
            warn_user(
                f"pattern {pattern!r} selects nothing in the layers that the group rule offloads; what it names stays "
                f"resident (a budget, --device-memory, can also offload modules outside the layers)"
            )
    num_slots = _usable_slots(policy.prefetch_step, len(layers))
    units = split_by_part(inventory, layers) if by_part else layers
    return assemble(inventory, units, num_slots * len(units) // max(1, len(layers)), policy.mode, uva=uva)


def move_on_demand(inventory: Inventory, plan: Plan) -> Plan:
    """``plan`` with everything it reads in place moved into slots instead, for devices that cannot address the host.

    A storage joins the unit of the layer that reads it, or becomes one of the module that does.
    """
    if not plan.uva:
        return plan
    wanted = set(plan.offloaded_names)
    moving = [storage for storage in inventory.storages if storage.name in wanted]
    drafts = draft_units(inventory, moving)
    warn_of_stranded(inventory, stranded(inventory, moving, {s.name for draft in drafts for s in draft.storages}))
    staged = {unit.anchor for unit in plan.staged_units}  # what joins them comes from the files as well
    stores = [replace(draft, store="disk") if draft.anchor in staged else draft for draft in drafts]
    return assemble(inventory, stores, max(plan.num_slots, 1), plan.mode)


def _candidates(inventory: Inventory, params: Sequence[str]) -> list[StorageInfo]:
    return select(inventory, params) if params else worth_moving(inventory.storages)


def _usable_slots(prefetch_step: int, num_units: int) -> int:
    if prefetch_step > num_units > 0:
        warn_user(
            f"prefetch_step = {prefetch_step} is larger than the number of units; {num_units} slot(s) are used "
            f"(--offload-prefetch-step {num_units} says the same)"
        )
    return min(prefetch_step, num_units)


def _read_in_place(
    inventory: Inventory, candidates: Sequence[StorageInfo], limit_bytes: int | None
) -> list[StorageInfo]:
    """As many of ``candidates`` as have room in ``limit_bytes``.

    A token needs a few experts but all dense weights, so experts are the cheapest to read in place and come first.
    """
    if not candidates:
        raise SelectionError(
            "nothing can be read in place: no parameter of this model has 64 KiB or more; name smaller ones with "
            "--cpu-offload-params, or leave the model resident"
        )
    experts = semantic_groups(inventory)["experts"]
    chosen: list[StorageInfo] = []
    left = sum(s.num_bytes for s in candidates) if limit_bytes is None else limit_bytes
    for storage in sorted(candidates, key=lambda storage: storage.name not in experts):
        if storage.num_bytes <= left:
            chosen.append(storage)
            left -= storage.num_bytes
    if not chosen:
        smallest = min(s.num_bytes for s in candidates)
        raise SelectionError(
            f"a limit of {limit_bytes} bytes offloads nothing: the smallest candidate has {smallest} bytes; raise "
            f"--cpu-offload-gb or select other names"
        )
    return chosen
