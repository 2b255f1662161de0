"""The last look before anything is allocated: is the plan for this machine, and has the machine room for it?"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from penstock.config import Budget, Mode, Policy
from penstock.errors import PenstockWarning
from penstock.inventory import Inventory
from penstock.limits import Needs, check_limits, needs_of, read_limits
from penstock.offloaders.binding import bind
from penstock.plan import Plan, build_plan
from penstock.weights import WeightMap

__all__ = ["budget_planner", "require_room"]


def require_room(
    model: nn.Module,
    plan: Plan,
    inventory: Inventory,
    device: torch.device,
    replan: Callable[[int], Plan] | None = None,
) -> None:
    """Refuse ``plan`` if ``device`` or the host has no room for what it adds; ``model`` is not touched.

    Args:
        inventory: of ``model`` as it is now.
        replan: the plan for a budget in bytes, for the budget that the refusal names.

    Raises:
        LimitError: the limit, by how much it is exceeded, and a budget that is not.
    """
    bound = bind(model, inventory.storages)
    elsewhere = {name for name, storage in bound.items() if storage.home != device}
    on_meta = {name for name, storage in bound.items() if storage.on_meta}

    def needs(candidate: Plan) -> Needs:
        return needs_of(candidate, on_gpu=device.type == "cuda", elsewhere=elsewhere, on_meta=on_meta)

    limits = read_limits(device, pinned_bytes=needs(plan).pinned_bytes)
    check_limits(plan, limits, needs, replan)


def budget_planner(
    inventory: Inventory, policy: Policy | Plan | str | int, mode: Mode, weights: WeightMap | None
) -> Callable[[int], Plan]:
    """What ``--device-memory`` in place of ``policy`` would give: a function from bytes to the plan for them."""
    fixed = (
        () if weights is None else [s.name for s in inventory.storages if weights.sources.keys().isdisjoint(s.names)]
    )

    def replan(num_bytes: int) -> Plan:
        budget = replace(policy if isinstance(policy, Budget) else Budget(1), device_memory=num_bytes, mode=mode)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PenstockWarning)
            return build_plan(inventory, budget, unstreamable=fixed)

    return replan
