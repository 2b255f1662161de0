"""Policy + inventory -> plan."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from penstock.config import Budget, Mode, Policy, Prefetch
from penstock.errors import PenstockWarning, SelectionError
from penstock.inventory import Inventory, StorageInfo
from penstock.plan.budget import solve
from penstock.plan.model import Plan, UnitDraft, assemble
from penstock.plan.units import find_stacks, group_rule, worth_moving
from penstock.select import select

__all__ = ["build_plan", "plan_group_rule"]


def build_plan(inventory: Inventory, policy: Policy, default_mode: Mode = "cpu") -> Plan:
    """The plan for ``policy``; pure, loads nothing.

    Args:
        inventory: of the model, which may be on ``meta``.
        policy: what the user asked for.
        default_mode: the store of a :class:`~penstock.config.Budget` that names none.

    Raises:
        SelectionError: a pattern, or the policy as a whole, selects nothing.
        BudgetError: the budget is below the minimum.
    """
    if isinstance(policy, Budget):
        candidates = _candidates(inventory, policy.params)
        return solve(inventory, candidates, policy.num_bytes, policy.mode or default_mode)
    if isinstance(policy, Prefetch):
        return plan_group_rule(inventory, policy, [stack.layers for stack in find_stacks(inventory)])
    chosen = _up_to(_candidates(inventory, policy.params), policy.limit_bytes)
    return assemble(inventory, [], 0, policy.mode, uva=chosen)


def plan_group_rule(inventory: Inventory, policy: Prefetch, stacks: Sequence[Sequence[str]]) -> Plan:
    """The plan of the group rule over stacks of layers, each given by its dotted names in order."""
    drafts = _draft_group_rule(inventory, policy, stacks)
    return assemble(inventory, drafts, _usable_slots(policy.prefetch_step, len(drafts)), policy.mode)


def _draft_group_rule(inventory: Inventory, policy: Prefetch, stacks: Sequence[Sequence[str]]) -> list[UnitDraft]:
    """One unit per layer that the group rule picks, holding what ``policy.params`` selects in it."""
    chosen = {storage.name for storage in _candidates(inventory, policy.params)}
    drafts: list[UnitDraft] = []
    for layers in stacks:
        for index in group_rule(len(layers), policy.group_size, policy.num_in_group):
            storages = tuple(s for s in inventory.under(layers[index]) if s.name in chosen)
            if storages:
                drafts.append(UnitDraft(layers[index], storages))
    if not drafts:
        raise SelectionError(
            f"group rule {policy.group_size}/{policy.num_in_group} selects none of the {sum(map(len, stacks))} layers' "
            f"tensors; lower --offload-group-size or widen --offload-params"
        )
    return drafts


def _candidates(inventory: Inventory, params: Sequence[str]) -> list[StorageInfo]:
    return select(inventory.storages, params) if params else worth_moving(inventory.storages)


def _usable_slots(prefetch_step: int, num_units: int) -> int:
    if prefetch_step > num_units:
        warnings.warn(
            f"prefetch_step = {prefetch_step} is larger than the number of units; {num_units} slot(s) are used "
            f"(--offload-prefetch-step {num_units} says the same)",
            PenstockWarning,
            stacklevel=4,
        )
    return min(prefetch_step, num_units)


def _up_to(candidates: Sequence[StorageInfo], limit_bytes: int | None) -> list[StorageInfo]:
    chosen: list[StorageInfo] = []
    left = sum(s.num_bytes for s in candidates) if limit_bytes is None else limit_bytes
    for storage in candidates:
        if storage.num_bytes <= left:
            chosen.append(storage)
            left -= storage.num_bytes
    if not chosen:
        smallest = min((s.num_bytes for s in candidates), default=0)
        raise SelectionError(
            f"a limit of {limit_bytes} bytes offloads nothing: the smallest candidate has {smallest} bytes; raise "
            f"--cpu-offload-gb or select other names"
        )
    return chosen
