"""The last look before anything is allocated: is the plan for this machine, and has the machine room for it?"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from penstock.model.inventory import Inventory
from penstock.model.live_tensors import bind
from penstock.plan import Plan
from penstock.plan.plan import slab_bytes
from penstock.runtime.limits import check_limits, needs_of, read_limits
from penstock.runtime.under_construction import Holding, held_storages, strayed_storages

__all__ = ["require_room"]


def require_room(
    model: nn.Module,
    plan: Plan,
    inventory: Inventory,
    device: torch.device,
    holding: Holding | None = None,
) -> None:
    """Refuse ``plan`` if ``device`` or the host has no room for what it adds; ``model`` is not touched.

    Args:
        inventory: of ``model`` as it is now.
        holding: pinned memory in which weights lie already; what the store keeps there adds nothing.

    Raises:
        LimitError: the limit, by how much it is exceeded, and a budget that should fit.
    """
    bound = bind(model, inventory.storages)
    held = held_storages(bound, holding)
    elsewhere = {name for name, storage in bound.items() if storage.home != device or name in held}
    elsewhere |= strayed_storages(bound)
    on_meta = {name for name, storage in bound.items() if storage.on_meta}

    needs = needs_of(plan, on_gpu=device.type == "cuda", elsewhere=elsewhere, on_meta=on_meta)
    there = slab_bytes(held[name].num_bytes for name in _kept(plan, held))
    needs = replace(needs, host_bytes=max(0, needs.host_bytes - there), pinned_bytes=max(0, needs.pinned_bytes - there))
    check_limits(plan, read_limits(device, pinned_bytes=needs.pinned_bytes), needs)


def _kept(plan: Plan, held: Collection[str]) -> list[str]:
    """What a pinned store keeps where it is held: units that are there as a whole, and what is read in place."""
    if plan.mode != "cpu":
        return []
    units = [[entry.storage for entry in unit.entries] for unit in plan.units if unit.store == "cpu"]
    whole = [name for names in units if all(name in held for name in names) for name in names]
    return [*whole, *(name for name in plan.uva if name in held)]
