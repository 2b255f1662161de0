"""Policy + inventory -> plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from penstock.config import Budget, Mode, Policy, Prefetch, Rules
from penstock.errors import RuleError, SelectionError, warn_user
from penstock.model.inventory import Inventory, StorageInfo
from penstock.model.memory_profile import ModelProfile
from penstock.model.patterns import matching, select
from penstock.model.semantic_groups import semantic_groups
from penstock.plan.cost_model import NOMINAL_CPU, NOMINAL_GPU, Rates
from penstock.plan.disk_fallback import Spill
from penstock.plan.layers import (
    called_within,
    draft_units,
    find_stacks,
    group_rule,
    split_by_part,
    stranded,
    worth_moving,
)
from penstock.plan.overrides import settle_rules, some_names, warn_of_stranded
from penstock.plan.plan import Plan, UnitDraft, assemble
from penstock.plan.problem import PlanningProblem
from penstock.plan.solver import solve
from penstock.plan.split import split_rates

__all__ = ["build_plan", "move_on_demand", "plan_group_rule", "question_of"]


def build_plan(
    inventory: Inventory,
    policy: Policy,
    default_mode: Mode = "cpu",
    unstreamable: Collection[str] = (),
    *,
    rates: Rates | None = None,
    traits: ModelProfile | None = None,
    zero_copy: bool = False,
    num_ranks: int = 1,
    spill: Spill | None = None,
) -> Plan:
    """The plan for ``policy``; pure, loads nothing.

    Args:
        inventory: of the model, which may be on ``meta``.
        policy: what the user asked for.
        default_mode: the store of a :class:`~penstock.config.Budget` that names none.
        unstreamable: storages that the checkpoint files do not hold as they are; mode ``disk`` keeps them resident.
        rates: of the machine it is for, one rank alone, which a budget is planned with; default nominal ones.
        traits: of the model, beyond names and sizes.
        zero_copy: whether a budget may have compute read any tensor in place, and not only lookups.
        num_ranks: over how many ranks a budget's units are split; if several, no rank has whole tensors to read in
            place.
        spill: the files in which a budget that names no store leaves what host memory has no room for.

    Raises:
        SelectionError: a pattern, or the policy as a whole, selects nothing that can be offloaded.
        RuleError: offload rules that contradict one another or cannot be obeyed.
        BudgetError: the budget is below the minimum.
        OptionError: the workload's context is longer than the model allows.
    """
    mode = policy.mode or default_mode
    fixed = _fixed(inventory, mode, unstreamable)
    if isinstance(policy, Rules):
        return _plan_rules(inventory, policy, fixed)
    if isinstance(policy, Budget):
        question = question_of(
            inventory,
            policy,
            default_mode,
            unstreamable,
            rates=rates,
            traits=traits,
            zero_copy=zero_copy,
            num_ranks=num_ranks,
            spill=spill,
        )
        return replace(solve(question, policy, mode), num_ranks=num_ranks)
    candidates = _candidates(inventory, policy.params)
    movable = [s for s in candidates if s.name not in fixed]
    _warn_of_unsaved(s for s in candidates if s.name in fixed and s.name not in unstreamable)
    if candidates and not movable:
        raise SelectionError(
            f"all {len(candidates)} selected tensors ({candidates[0].name}, ...) are made or rearranged while loading, "
            f"or in no state dict, and cannot be streamed from the files; use mode 'cpu' (--offload-mode cpu) or "
            f"select other names"
        )
    if isinstance(policy, Prefetch):
        return _plan_group_rule(inventory, policy, [stack.layers for stack in find_stacks(inventory)], movable)
    return assemble(inventory, [], 0, mode, uva=_up_to(_experts_first(inventory, movable), policy.limit_bytes))


def question_of(
    inventory: Inventory,
    budget: Budget,
    default_mode: Mode = "cpu",
    unstreamable: Collection[str] = (),
    *,
    rates: Rates | None = None,
    traits: ModelProfile | None = None,
    zero_copy: bool = False,
    num_ranks: int = 1,
    spill: Spill | None = None,
) -> PlanningProblem:
    """The question that a budget puts to the solver; arguments as for :func:`build_plan`."""
    (traits or ModelProfile()).check_context(budget.workload.context)
    mode = budget.mode or default_mode
    fixed = _fixed(inventory, mode, unstreamable)
    candidates = _candidates(inventory, budget.params)
    movable = [s for s in candidates if s.name not in fixed]
    _warn_of_unsaved(s for s in candidates if s.name in fixed and s.name not in unstreamable)
    forced = settle_rules(inventory, budget.rules, fixed)
    has_bytes = mode != "meta" and mode != "sharded_gpu" and num_ranks == 1
    return PlanningProblem(
        inventory,
        [s for s in movable if s.name not in forced],
        forced,
        split_rates(rates or (NOMINAL_CPU if mode == "disk" else NOMINAL_GPU), mode, num_ranks),
        traits or ModelProfile(),
        # Read in place on a GPU, bytes of files have to be in pinned memory: lookups at most, or nothing is saved.
        zero_copy=zero_copy and has_bytes and mode != "disk",
        lookups_in_place=has_bytes,
        batch_sizes=budget.workload.batch_sizes,
        context=budget.workload.context,
        ranks_on_device=num_ranks if mode == "sharded_gpu" else None,
        mode=mode,
        # Who names a store gets that one and no other.
        spill=spill if budget.mode is None and mode == "cpu" and num_ranks == 1 else None,
    )


def _plan_rules(inventory: Inventory, policy: Rules, unstreamable: Collection[str]) -> Plan:
    """One unit per layer, and per module outside the layers, of what the rules prefetch."""
    forced = settle_rules(inventory, policy.rules, unstreamable)
    drafts = draft_units(inventory, [s for s in inventory.storages if forced.get(s.name) == "prefetch"])
    in_place = [s for s in inventory.storages if forced.get(s.name) == "uva"]
    if not drafts and not in_place:
        raise RuleError(
            f"the {len(policy.rules)} rule(s) keep everything resident: without a budget at least one has to say "
            f"prefetch or uva, e.g. --offload-rule experts=uva (or give --device-memory)"
        )
    num_slots = _usable_slots(policy.prefetch_step, len(drafts)) if drafts else 0
    return assemble(inventory, drafts, num_slots, policy.mode, uva=in_place)


def plan_group_rule(
    inventory: Inventory,
    policy: Prefetch,
    stacks: Sequence[Sequence[str]],
    in_place: Callable[[StorageInfo], bool] = lambda storage: False,
    *,
    by_part: bool = False,
) -> Plan:
    """The plan of the group rule over stacks of layers, each given by its dotted names in order.

    Args:
        inventory: of the model.
        policy: the group rule.
        stacks: what it counts.
        in_place: what of its candidates is read where it rests, because no layer of these stacks brings it.
        by_part: let the parts of a layer (attention, feed-forward) travel one by one, each through a slot of its own,
            in the same device memory: a part can be refilled while the next computes.
    """
    candidates = _candidates(inventory, policy.params)
    return _plan_group_rule(inventory, policy, stacks, candidates, [s for s in candidates if in_place(s)], by_part)


def _plan_group_rule(
    inventory: Inventory,
    policy: Prefetch,
    stacks: Sequence[Sequence[str]],
    candidates: Sequence[StorageInfo],
    uva: Sequence[StorageInfo] = (),
    by_part: bool = False,
) -> Plan:
    layers = _draft_group_rule(inventory, policy, stacks, candidates, uva)
    num_slots = _usable_slots(policy.prefetch_step, len(layers)) if layers else 0
    drafts = split_by_part(inventory, layers) if by_part else layers
    return assemble(inventory, drafts, num_slots * len(drafts) // max(1, len(layers)), policy.mode, uva=uva)


def _draft_group_rule(
    inventory: Inventory,
    policy: Prefetch,
    stacks: Sequence[Sequence[str]],
    candidates: Sequence[StorageInfo],
    uva: Sequence[StorageInfo],
) -> list[UnitDraft]:
    """One unit per layer that the group rule picks, holding the candidates in it but for those of ``uva``."""
    chosen = {storage.name for storage in candidates} - {storage.name for storage in uva}
    drafts: list[UnitDraft] = []
    for layers in stacks:
        for index in group_rule(len(layers), policy.group_size, policy.num_in_group):
            for anchor in called_within(inventory, layers[index]):
                storages = tuple(s for s in inventory.under(anchor) if s.name in chosen)
                if storages:
                    drafts.append(UnitDraft(anchor, storages))
    within = {s.name for layers in stacks for layer in layers for s in _brought_with(inventory, layer)}
    warn_of_stranded(inventory, stranded(inventory, (s for s in candidates if s.name in chosen), within))
    if not drafts and not uva:
        raise SelectionError(
            f"group rule {policy.group_size}/{policy.num_in_group} selects none of the {sum(map(len, stacks))} layers' "
            f"tensors; lower --offload-group-size or widen --offload-params"
        )
    reached = {storage.name for draft in drafts for storage in draft.storages} | {storage.name for storage in uva}
    _warn_of_unreached(inventory, policy.params, reached)
    return drafts


def _brought_with(inventory: Inventory, layer: str) -> list[StorageInfo]:
    return [storage for anchor in called_within(inventory, layer) for storage in inventory.under(anchor)]


def _warn_of_unreached(inventory: Inventory, params: Sequence[str], names: Collection[str]) -> None:
    for pattern in params:
        if matching(inventory, pattern).isdisjoint(names):
            warn_user(
                f"pattern {pattern!r} selects nothing in the layers that the group rule offloads; what it names stays "
                f"resident (a budget, --device-memory, can also offload modules outside the layers)"
            )


def move_on_demand(inventory: Inventory, plan: Plan) -> Plan:
    """``plan`` with everything it reads in place moved into slots instead, for devices that cannot address the host.

    A storage joins the unit of the layer that reads it, or becomes one of the module that does.
    """
    if not plan.uva:
        return plan
    wanted = {entry.storage for unit in plan.units for entry in unit.entries} | plan.uva.keys()
    moving = [storage for storage in inventory.storages if storage.name in wanted]
    drafts = draft_units(inventory, moving)
    warn_of_stranded(inventory, stranded(inventory, moving, {s.name for draft in drafts for s in draft.storages}))
    staged = {unit.anchor for unit in plan.staged_units}  # what joins them comes from the files as well
    stores = [replace(draft, store="disk") if draft.anchor in staged else draft for draft in drafts]
    return assemble(inventory, stores, max(plan.num_slots, 1), plan.mode)


def _fixed(inventory: Inventory, mode: Mode, unstreamable: Collection[str]) -> frozenset[str]:
    """What mode ``disk`` keeps resident: the files do not hold it as it is, or no state dict has it."""
    if mode != "disk":
        return frozenset()
    return frozenset(unstreamable).union(s.name for s in inventory.storages if not s.is_saved)


def _warn_of_unsaved(storages: Iterable[StorageInfo]) -> None:
    if names := [storage.name for storage in storages]:
        warn_user(
            f"{some_names(names)}: buffers that are not persistent are in no state dict, so no checkpoint file holds "
            f"them, and mode 'disk' cannot stream them: they stay resident"
        )


def _candidates(inventory: Inventory, params: Sequence[str]) -> list[StorageInfo]:
    return select(inventory, params) if params else worth_moving(inventory.storages)


def _usable_slots(prefetch_step: int, num_units: int) -> int:
    if prefetch_step > num_units:
        warn_user(
            f"prefetch_step = {prefetch_step} is larger than the number of units; {num_units} slot(s) are used "
            f"(--offload-prefetch-step {num_units} says the same)"
        )
    return min(prefetch_step, num_units)


def _experts_first(inventory: Inventory, candidates: Sequence[StorageInfo]) -> list[StorageInfo]:
    """A token needs a few experts but all dense weights, so experts are the cheapest to read in place."""
    experts = semantic_groups(inventory)["experts"]
    return sorted(candidates, key=lambda storage: storage.name not in experts)


def _up_to(candidates: Sequence[StorageInfo], limit_bytes: int | None) -> list[StorageInfo]:
    chosen: list[StorageInfo] = []
    left = sum(s.num_bytes for s in candidates) if limit_bytes is None else limit_bytes
    for storage in candidates:
        if storage.num_bytes <= left:
            chosen.append(storage)
            left -= storage.num_bytes
    if not candidates:
        raise SelectionError(
            "nothing can be read in place: no parameter of this model has 64 KiB or more; name smaller ones with "
            "--cpu-offload-params, or leave the model resident"
        )
    if not chosen:
        smallest = min(s.num_bytes for s in candidates)
        raise SelectionError(
            f"a limit of {limit_bytes} bytes offloads nothing: the smallest candidate has {smallest} bytes; raise "
            f"--cpu-offload-gb or select other names"
        )
    return chosen
