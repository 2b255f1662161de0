"""The front door: from a model and a policy to a plan that this machine can carry out.

:func:`prepare` runs every step once and in one order: device, inventory, planner, plan, checks against model and
machine, limits. ``offload``, ``load``, the offloaders of engines and their reference all use it. Nothing is allocated
and the model is not touched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn

from penstock.checkpoint.weight_map import WeightMap
from penstock.config import SHARDED_MODES, Budget, Policy, as_policy
from penstock.env import pin_memory_disabled, uva_disabled
from penstock.errors import CheckpointError, OptionError, OptionTypeError, warn_user
from penstock.model.inventory import Inventory, StorageInfo, take_inventory
from penstock.model.live_tensors import BoundStorage, bind
from penstock.model.memory_profile import profile_of
from penstock.plan.build import Planner, move_on_demand
from penstock.plan.candidates import Spill
from penstock.plan.cost_model import Rates
from penstock.plan.plan import Plan, slab_bytes
from penstock.ranks.group import RankGroup
from penstock.runtime.limits import check_limits, describe_device, needs_of, read_limits
from penstock.runtime.under_construction import BuildTimePool, storages_in_engine_memory
from penstock.stores.file_reader import DiskOptions
from penstock.stores.pinned_host import Held
from penstock.transfer.machine_probe import planning_rates

__all__ = [
    "Prepared",
    "can_read_in_place",
    "compute_device",
    "make_planner",
    "not_in_files",
    "open_ranks",
    "prepare",
    "require_kinds",
]

_HEADROOM_BYTES = 1 << 30


@dataclass(frozen=True)
class Prepared:
    """A checked plan and everything that carrying it out needs.

    Attributes:
        model: on any one device; tensors on ``meta`` are filled from ``weights``.
        inventory: of the model.
        plan: checked against the inventory and the machine, and within its limits.
        device: where compute runs.
        bound: the live tensors of every storage, by storage name.
        weights: the checkpoint; needed for what rests in ``disk`` and for tensors on ``meta``.
        disk: how its files are read.
        ranks: of the same offload, for stores and links that span processes.
        budget_bytes: device memory that weights may take, also when a tensor is promoted; ``None``: no such limit.
        pooled: where storages wait in pinned memory already; what of it is offloaded stays there.
        on_host: storages whose device is a GPU although the engine keeps their bytes in host memory.
    """

    model: nn.Module
    inventory: Inventory
    plan: Plan
    device: torch.device
    bound: dict[str, BoundStorage] = field(repr=False)
    weights: WeightMap | None = None
    disk: DiskOptions | None = None
    ranks: RankGroup | None = None
    budget_bytes: int | None = None
    pooled: Mapping[str, Held] = field(default_factory=dict, repr=False)
    on_host: frozenset[str] = frozenset()

    def must_move(self, name: str) -> bool:
        """Whether the storage ``name`` is not in the memory of the device; as a resident it has to go there."""
        return self.bound[name].home != self.device or name in self.pooled or name in self.on_host


def prepare(
    model: nn.Module,
    policy: Policy | Plan | str | int,
    *,
    inventory: Inventory | None = None,
    device: torch.device | str | None = None,
    weights: WeightMap | None = None,
    unstreamable: Collection[str] = (),
    disk: DiskOptions | None = None,
    ranks: RankGroup | None = None,
    pool: BuildTimePool | None = None,
    allocates: bool = True,
) -> Prepared:
    """The plan for ``policy`` on ``model``, checked against the model, the machine and its limits.

    Args:
        model: any module; not touched.
        policy: as for ``penstock.offload``. A finished plan needs no planner, so none is built.
        inventory: of ``model`` as it is now; taken here by default.
        device: where compute runs; default: see :func:`compute_device`.
        weights: the checkpoint.
        unstreamable: storages that its files do not hold as they are (:func:`not_in_files`).
        disk: how its files are read.
        ranks: those that share the weights.
        pool: where weights were put while the model was built.
        allocates: the plan will be carried out, so the machine must have room for it.

    Raises:
        OptionError, OptionTypeError: a wrong argument; a selection or budget that cannot be met; a plan for another
            model or machine.
        LimitError: the device or the host has no room for the plan.
    """
    target = compute_device(model, device)
    inventory = take_inventory(model) if inventory is None else inventory
    given = policy if isinstance(policy, Plan) else as_policy(policy)
    if isinstance(given, Plan):
        plan, may_need_files = given, False
    else:
        planner = make_planner(model, inventory, target, weights, disk=disk, unstreamable=unstreamable)
        if ranks is not None and given.mode in SHARDED_MODES:
            # Every rank plans for itself, and all have to come to one plan. So nothing counts that ranks may see
            # differently: no free host memory, and of rates only what is kept of this machine.
            planner = replace(planner, num_ranks=ranks.size, spill=None)
        plan = replace(planner.plan(given), made_for=describe_device(target))
        may_need_files = planner.spill is not None and given.mode is None
    plan = _settle(plan, inventory, target, ranks)
    bound = bind(model, inventory.storages)
    prepared = Prepared(
        model,
        inventory,
        plan,
        target,
        bound,
        weights,
        disk,
        ranks,
        given.num_bytes if isinstance(given, Budget) else None,
        {} if pool is None else pool.find_storages(bound),
        frozenset() if pool is None else storages_in_engine_memory(bound),
    )
    if allocates:
        _check_memory_limits(prepared)
    if not may_need_files:
        _warn_about_idle_options(prepared)
    return prepared


# -- arguments --------------------------------------------------------------------------------------------------------


def open_ranks(group: dist.ProcessGroup | None) -> AbstractContextManager[RankGroup | None]:
    """One call of all ranks of ``group`` (:meth:`RankGroup.open`); without a group the context yields ``None``.

    Raises:
        OptionTypeError: not a process group. What ``new_group`` returns to a process outside of it is none, either.
    """
    if group is None:
        return nullcontext()
    if not isinstance(group, dist.ProcessGroup):
        raise OptionTypeError(
            f"group: expected a process group, such as torch.distributed.group.WORLD after "
            f"torch.distributed.init_process_group, found {type(group).__name__} {group!r}"
        )
    return RankGroup.open(group)


def require_kinds(device: object, disk: object) -> None:
    """Refuse arguments of a wrong type by name; ``None`` means not given."""
    expected = "expected 'cpu', 'cuda', 'cuda:N' or a torch.device"
    if device is not None and (isinstance(device, bool) or not isinstance(device, torch.device | str | int)):
        raise OptionTypeError(f"device: {expected}, found {type(device).__name__} {device!r}")
    if isinstance(device, str):
        try:
            torch.device(device)
        except RuntimeError:  # its message lists all devices that torch has a name for
            raise OptionError(f"device {device!r}: {expected}") from None
    if disk is not None and not isinstance(disk, DiskOptions):
        raise OptionTypeError(
            f"disk: expected penstock.DiskOptions, such as DiskOptions(direct=True), found {type(disk).__name__} "
            f"{disk!r}"
        )


def compute_device(model: nn.Module, device: torch.device | str | None = None) -> torch.device:
    """Where ``model`` will run: ``device``, or the one device its tensors are on (a CPU if all are on ``meta``).

    Raises:
        OptionError: tensors on several devices and none named; a device that is neither a CPU nor CUDA.
    """
    found = sorted({str(t.device) for t in (*model.parameters(), *model.buffers()) if t.device.type != "meta"})
    if device is None and len(found) > 1:
        raise OptionError(f"the model's tensors are on {', '.join(found)}; say where it runs with device=...")
    target = torch.device(device if device is not None else found[0] if found else "cpu")
    if target.type not in ("cpu", "cuda"):
        raise OptionError(f"device {target}: expected a CPU or a CUDA device")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"device {target}: torch sees no CUDA device here; leave device out to run on the CPU")
    if target.type == "cuda" and target.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return target


def can_read_in_place(device: torch.device) -> bool:
    """Whether compute on ``device`` may address host memory; memory that is not pinned has no address on a GPU."""
    return device.type != "cuda" or not (uva_disabled() or pin_memory_disabled())


# -- the plan ---------------------------------------------------------------------------------------------------------


def make_planner(
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
    what the model's configuration says of its caches and activations; and with zero-copy where the device can address
    host memory. Given ``weights``, a CPU streams from its files, and for a GPU what host memory has no room for stays
    in them. Free host memory counts only for the machine that is here: not with ``rates`` of another. ``disk``: how a
    CPU reads files, at the rate of that way.
    """
    on_gpu = device.type == "cuda"
    spill = None
    if weights is not None and on_gpu and not pin_memory_disabled():
        not_readable = {storage.name for storage in inventory.storages if not _streams(storage, weights)}
        free_bytes = None if rates is not None else _free_host_bytes(device, inventory)
        spill = Spill(frozenset(not_readable.union(unstreamable)), free_bytes)
    return Planner(
        inventory,
        rates or planning_rates(device, disk is not None and bool(disk.direct)),
        profile_of(model),
        zero_copy=on_gpu and can_read_in_place(device),
        default_mode="cpu" if weights is None or on_gpu else "disk",
        unstreamable=unstreamable,
        spill=spill,
    )


def not_in_files(inventory: Inventory, weights: WeightMap) -> list[str]:
    """Storages that are made or rearranged while loading, so that no file can stand in for them."""
    return [s.name for s in inventory.storages if weights.sources.keys().isdisjoint(s.names)]


def _streams(storage: StorageInfo, weights: WeightMap) -> bool:
    """Whether mode ``disk`` can read ``storage``."""
    if weights.sources.keys().isdisjoint(storage.names):
        return False
    try:
        weights.source(storage)
    except CheckpointError:
        return False
    return True


def _free_host_bytes(device: torch.device, inventory: Inventory) -> int | None:
    """Host memory that units may take by themselves; a user may name more (``host_memory``)."""
    limits = read_limits(device, pinned_bytes=inventory.num_bytes)
    host = [limits.host_available_bytes, limits.cgroup_available_bytes, limits.memlock_bytes]
    free_bytes = min((found for found in host if found is not None), default=None)
    if free_bytes is None:
        return None
    # Residents pass through host memory one at a time, and the process itself needs some.
    staging = max((storage.num_bytes for storage in inventory.storages), default=0)
    return max(0, free_bytes - staging - min(_HEADROOM_BYTES, free_bytes // 16))


def _settle(plan: Plan, inventory: Inventory, device: torch.device, ranks: RankGroup | None) -> Plan:
    """``plan`` checked against the model and the machine, in the form that this machine can carry out."""
    plan.check(inventory)
    plan.check_machine(describe_device(device))
    split = plan.mode in SHARDED_MODES  # and then no rank has a whole tensor to read in place
    num_ranks = ranks.size if ranks is not None and split else 1
    if plan.uva and (split or not can_read_in_place(device)):
        plan = replace(move_on_demand(inventory, plan), model_name=plan.model_name, made_for=plan.made_for)
    return plan if plan.num_ranks == num_ranks else replace(plan, num_ranks=num_ranks)


# -- what the machine has room for ------------------------------------------------------------------------------------


def _check_memory_limits(prepared: Prepared) -> None:
    """Raise ``LimitError`` if the device or the host has no room for what the plan adds."""
    plan, device, bound = prepared.plan, prepared.device, prepared.bound
    needs = needs_of(
        plan,
        on_gpu=device.type == "cuda",
        elsewhere={name for name in bound if prepared.must_move(name)},
        on_meta={name for name, storage in bound.items() if storage.on_meta},
    )
    kept = slab_bytes(prepared.pooled[name].num_bytes for name in _kept_in_pool(plan, prepared.pooled))
    needs = replace(needs, host_bytes=max(0, needs.host_bytes - kept), pinned_bytes=max(0, needs.pinned_bytes - kept))
    check_limits(plan, read_limits(device, pinned_bytes=needs.pinned_bytes), needs)


def _kept_in_pool(plan: Plan, pooled: Collection[str]) -> list[str]:
    """What a pinned store leaves where it is: units that are in the pool as a whole, and what is read in place."""
    if plan.mode != "cpu":
        return []
    units = [[entry.storage for entry in unit.entries] for unit in plan.units if unit.store == "cpu"]
    whole = [name for names in units if all(name in pooled for name in names) for name in names]
    return [*whole, *(name for name in plan.uva if name in pooled)]


def _warn_about_idle_options(prepared: Prepared) -> None:
    on_meta = any(storage.on_meta for storage in prepared.bound.values())
    if on_meta or prepared.plan.reads_files:
        return
    for name, given in (("checkpoint", prepared.weights), ("disk", prepared.disk)):
        if given is not None:
            warn_user(
                f"{name}=... has no effect: mode {prepared.plan.mode!r} takes the weights from the model itself, not "
                f"from files"
            )
