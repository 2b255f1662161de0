"""The planner of a model on a device: what it is told besides names and sizes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import nn

from penstock.config import Budget, Mode, pin_memory_disabled, uva_disabled
from penstock.errors import PenstockWarning
from penstock.inventory import Inventory
from penstock.link.probe import planning_rates
from penstock.plan import Plan
from penstock.plan.cost import Rates
from penstock.plan.planner import Planner
from penstock.traits import traits_of
from penstock.weights import WeightMap

__all__ = ["budget_planner", "not_in_files", "planner_for"]


def planner_for(
    model: nn.Module,
    inventory: Inventory,
    device: torch.device,
    weights: WeightMap | None = None,
    rates: Rates | None = None,
    unstreamable: Collection[str] = (),
) -> Planner:
    """The planner for ``model`` on ``device``.

    A budget is planned with ``rates``, or else the kept probe of this machine, or nominal rates if there is none; with
    the traits that the model's configuration tells; and with zero-copy where the device can address host memory. Given
    ``weights``, a CPU streams from its files; ``unstreamable`` names what these do not hold as it is
    (:func:`not_in_files`).
    """
    on_gpu = device.type == "cuda"
    return Planner(
        inventory,
        rates or planning_rates(device),
        traits_of(model),
        zero_copy=on_gpu and not uva_disabled() and not pin_memory_disabled(),
        default_mode="cpu" if weights is None or on_gpu else "disk",
        unstreamable=unstreamable,
    )


def budget_planner(planner: Planner, policy: object, mode: Mode) -> Callable[[int], Plan]:
    """What ``--device-memory`` in place of ``policy`` would give: a function from bytes to the plan for them."""

    def replan(num_bytes: int) -> Plan:
        budget = replace(policy if isinstance(policy, Budget) else Budget(1), device_memory=num_bytes, mode=mode)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PenstockWarning)
            return planner.plan(budget)

    return replan


def not_in_files(inventory: Inventory, weights: WeightMap) -> list[str]:
    """Storages that are made or rearranged while loading, so that no file can stand in for them."""
    return [s.name for s in inventory.storages if weights.sources.keys().isdisjoint(s.names)]
