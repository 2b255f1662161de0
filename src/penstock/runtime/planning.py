"""The planner of a model on a device: what it is told besides names and sizes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from penstock.checkpoint.weight_map import WeightMap
from penstock.env import pin_memory_disabled, uva_disabled
from penstock.errors import CheckpointError
from penstock.model.inventory import Inventory, StorageInfo
from penstock.model.memory_profile import traits_of
from penstock.plan.cost_model import Rates
from penstock.plan.disk_fallback import Spill
from penstock.plan.planner import Planner
from penstock.ranks.peers import Peers
from penstock.runtime.limits import read_limits
from penstock.stores.file_reader import DiskOptions
from penstock.transfer.probe import planning_rates

__all__ = ["not_in_files", "planner_for", "split_planner"]

_HEADROOM_BYTES = 1 << 30


def planner_for(
    model: nn.Module,
    inventory: Inventory,
    device: torch.device,
    weights: WeightMap | None = None,
    rates: Rates | None = None,
    unstreamable: Collection[str] = (),
    disk: DiskOptions | None = None,
) -> Planner:
    """The planner for ``model`` on ``device``.

    A budget is planned with ``rates``, or else the kept probe of this machine, or nominal rates if there is none; with
    the traits that the model's configuration tells; and with zero-copy where the device can address host memory. Given
    ``weights``, a CPU streams from its files, and for a GPU what host memory has no room for stays in them;
    ``unstreamable`` names what these do not hold as it is (:func:`not_in_files`). Free host memory counts only for the
    machine that is here: not with ``rates`` of another. ``disk``: how a CPU reads files, at the rate of that way.
    """
    on_gpu = device.type == "cuda"
    spill = None
    if weights is not None and on_gpu and not pin_memory_disabled():
        free_bytes = None if rates is not None else _free_bytes(device, inventory)
        spill = Spill(_unstreamable(inventory, weights, unstreamable), free_bytes)
    return Planner(
        inventory,
        rates or planning_rates(device, disk is not None and bool(disk.direct)),
        traits_of(model),
        zero_copy=on_gpu and not uva_disabled() and not pin_memory_disabled(),
        default_mode="cpu" if weights is None or on_gpu else "disk",
        unstreamable=unstreamable,
        spill=spill,
    )


def split_planner(planner: Planner, policy: object, peers: Peers | None) -> Planner:
    """``planner`` for the ranks that split the units of ``policy`` (a policy or a plan), if it has them split.

    Every rank plans for itself, and all have to come to one plan. So nothing counts that a rank may see alone: no free
    host memory, and of rates only what is kept of this machine, for all of its processes.
    """
    if peers is None or not (peers.pool_links or getattr(policy, "mode", None) == "sharded_gpu"):
        return planner
    return replace(planner, num_ranks=peers.size, spill=None)


def _free_bytes(device: torch.device, inventory: Inventory) -> int | None:
    """Host memory that units may take by themselves; a user may name more (``host_memory``)."""
    limits = read_limits(device, pinned_bytes=inventory.num_bytes)
    host = [limits.host_available_bytes, limits.cgroup_available_bytes, limits.memlock_bytes]
    free_bytes = min((found for found in host if found is not None), default=None)
    if free_bytes is None:
        return None
    # Residents pass through host memory one at a time, and the process has to live, too.
    staging = max((storage.num_bytes for storage in inventory.storages), default=0)
    return max(0, free_bytes - staging - min(_HEADROOM_BYTES, free_bytes // 16))


def _unstreamable(inventory: Inventory, weights: WeightMap, known: Collection[str]) -> frozenset[str]:
    """Storages that mode ``disk`` would refuse to read."""
    return frozenset(storage.name for storage in inventory.storages if not _streams(storage, weights)).union(known)


def _streams(storage: StorageInfo, weights: WeightMap) -> bool:
    if weights.sources.keys().isdisjoint(storage.names):
        return False
    try:
        weights.source(storage)
    except CheckpointError:
        return False
    return True


def not_in_files(inventory: Inventory, weights: WeightMap) -> list[str]:
    """Storages that are made or rearranged while loading, so that no file can stand in for them."""
    return [s.name for s in inventory.storages if weights.sources.keys().isdisjoint(s.names)]
