"""The front door: from a model and a policy to a plan that this machine can carry out.

:func:`prepare` runs every step once and in one order: device, inventory, planner, plan, checks against model and
machine, limits. ``offload``, ``load``, the offloaders of engines and their reference all use it. Nothing is allocated
and the model is not touched.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn

from headrace.checkpoint.weight_map import WeightMap
from headrace.config import (
    SHARDED_MODES,
    Budget,
    Policy,
    as_policy,
    warn_about_variables,
)
from headrace.errors import OptionError, OptionTypeError, warn_user
from headrace.experts.rows import require_rows
from headrace.memory.pinned import PinnedBuffer
from headrace.model.inventory import Inventory, refuse_own_ways, take_inventory
from headrace.model.live_tensors import BoundStorage, bind
from headrace.model.memory_profile import profile_of
from headrace.plan.plan import Plan, slab_bytes
from headrace.ranks.group import RankGroup
from headrace.runtime.this_machine import (
    check_limits,
    describe_device,
    free_on_peer,
    make_planner,
    needs_of,
    peer_of,
    read_limits,
    settle,
)
from headrace.runtime.under_construction import BuildTimePool, storages_in_engine_memory
from headrace.stores.expert_ranges import mappable
from headrace.stores.pinned_host import Held
from headrace.stores.sources import DiskOptions

__all__ = [
    "Prepared",
    "compute_device",
    "open_ranks",
    "prepare",
]


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
        peer: the GPU whose memory holds units that rest in ``peer``; ``None``: there are none.
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
    peer: torch.device | None = None

    @property
    def offloaded(self) -> dict[str, BoundStorage]:
        """Of ``bound``, what the plan offloads."""
        return {name: self.bound[name] for name in self.plan.offloaded_names}

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
        policy: as for ``headrace.offload``. A finished plan needs no planner, so none is built.
        inventory: of ``model`` in its present state; taken here by default.
        device: where compute runs; default: see :func:`compute_device`.
        weights: the checkpoint.
        unstreamable: storages that its files do not hold in this form (:func:`not_in_files`).
        disk: how its files are read.
        ranks: those that share the weights.
        pool: where weights were put while the model was built.
        allocates: the plan will be carried out, so the machine must have room for it.

    Raises:
        OptionError, OptionTypeError: a wrong argument; a selection or budget that cannot be met; a plan for another
            model or machine.
        LimitError: the device or the host has no room for the plan.
    """
    warn_about_variables()
    target = compute_device(model, device)
    inventory = take_inventory(model) if inventory is None else inventory
    for name, module in model.named_modules():
        refuse_own_ways(name, module, target)
    machine = describe_device(target)
    num_ranks = 1 if ranks is None else ranks.size
    given = policy if isinstance(policy, Plan) else as_policy(policy)
    if isinstance(given, Plan):
        plan, may_need_files = given, False
    else:
        split = num_ranks if given.mode in SHARDED_MODES else 1
        profile = profile_of(model, given.workload.context if isinstance(given, Budget) else 0)
        planner = make_planner(
            inventory, profile, target, weights, disk=disk, unstreamable=unstreamable, num_ranks=split
        )
        plan = replace(planner.plan(given), made_for=machine)
        may_need_files = planner.spill is not None and given.mode is None
    plan = settle(plan, inventory, target, machine, weights, num_ranks)
    _require_cacheable(model, plan, target)
    _require_one_process(plan, ranks)
    bound = bind(model, inventory.storages)
    budget_bytes = given.num_bytes if isinstance(given, Budget) else None
    pooled = {} if pool is None else pool.find_storages(bound)
    on_host = frozenset() if pool is None else storages_in_engine_memory(bound)
    prepared = Prepared(
        model,
        inventory,
        plan,
        target,
        bound,
        weights,
        disk,
        ranks,
        budget_bytes,
        pooled=pooled,
        on_host=on_host,
        peer=peer_of(target) if plan.peer_bytes else None,
    )
    if allocates:
        _check_memory_limits(prepared)
    # With files to spill to, a checkpoint has shaped the choice of the plan even if no unit ended up in one.
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


def compute_device(model: nn.Module, device: torch.device | str | None = None) -> torch.device:
    """Where ``model`` will run: ``device``, or where it is; if that is ``meta``, a GPU where there is one.

    A model whose parameters are all on ``meta`` waits for its weights there, wherever its buffers are.

    Raises:
        OptionError: tensors on several devices and none named; a device that is neither a CPU nor CUDA.
    """
    parameters = list(model.parameters())
    waits = bool(parameters) and all(parameter.is_meta for parameter in parameters)
    tensors = [] if waits else [*parameters, *model.buffers()]
    found = sorted({str(tensor.device) for tensor in tensors if not tensor.is_meta})
    if device is None and len(found) > 1:
        raise OptionError(f"the model's tensors are on {', '.join(found)}; say where it runs with device=...")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    target = torch.device(device if device is not None else found[0] if found else default)
    if target.type not in ("cpu", "cuda"):
        raise OptionError(f"device {target}: expected a CPU or a CUDA device")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            f"device {target}: torch sees no CUDA device here; leave device out to run on the CPU; "
            f"headrace.make_plan(..., machine=...) plans for a machine that has one"
        )
    # With its index, because it is compared with the devices of tensors, which always have one.
    if target.type == "cuda" and target.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return target


def _require_cacheable(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Raise ``OptionError`` unless the experts that ``plan`` caches can be read by rows on ``device``."""
    if plan.cached and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise OptionError(
            f"experts of {plan.cached[0].module_fqn} are cached, and the device is a CPU; expected a CUDA device, "
            f"which has memory of its own (on a CPU say experts=uva)"
        )
    for layer in plan.cached:
        require_rows(model.get_submodule(layer.module_fqn))


def _require_one_process(plan: Plan, ranks: RankGroup | None) -> None:
    """Raise ``OptionError`` if units of ``plan`` rest on another GPU although that may be another process's own."""
    num_processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if plan.peer_bytes and (ranks is not None or num_processes > 1):
        raise OptionError(
            f"peer_memory is for one process beside an idle GPU, and this is one of {num_processes}: let them share "
            f"their memory (mode 'sharded_gpu' with group=), or leave peer_memory out (--peer-memory)"
        )


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


def _check_memory_limits(prepared: Prepared) -> None:
    """Raise ``LimitError`` if the device or the host has no room for what the plan adds."""
    plan, device, bound = prepared.plan, prepared.device, prepared.bound
    needs = needs_of(
        plan,
        on_gpu=device.type == "cuda",
        elsewhere={name for name in bound if prepared.must_move(name)},
        on_meta={name for name, storage in bound.items() if storage.on_meta},
    )
    pooled, kept = prepared.pooled, 0
    if plan.mode == "cpu":
        # A pinned store leaves there what is read in place, and units that are there as a whole; a cache, what it maps.
        units = [[entry.storage for entry in unit.entries] for unit in plan.units if unit.store == "cpu"]
        names = [name for names in units if all(name in pooled for name in names) for name in names]
        names += [name for name in plan.uva if name in pooled]
        kept = slab_bytes(pooled[name].num_bytes for name in names if isinstance(pooled[name].memory, PinnedBuffer))
        mapped = [mappable(layer, name, pooled) for layer in plan.cached for name in layer.storages]
        kept += sum(memory.num_bytes for memory in mapped if memory is not None)
    needs = replace(needs, host_bytes=max(0, needs.host_bytes - kept), pinned_bytes=max(0, needs.pinned_bytes - kept))
    if plan.mode == "disk" and device.type == "cpu" and prepared.weights is not None:
        joined = (prepared.weights.source(bound[name].info).joined_bytes for name in plan.uva)
        needs = replace(needs, host_bytes=needs.host_bytes + sum(joined))
    limits = read_limits(device, pinned_bytes=needs.pinned_bytes)
    check_limits(plan, replace(limits, peer_free_bytes=free_on_peer(plan, device)), needs)
