"""The front door: from a request about a module to a plan that this machine can carry out.

:func:`prepare` runs every step once and in one order: device, inventory, planner, plan, checks against model and
machine, limits. ``offload``, ``load``, the offloaders of engines and their reference all use it. ``make_plan`` takes
the same steps (:class:`~headrace.planning.context.PlanContext`). Nothing is allocated, the model is not touched.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from headrace.config import as_policy, warn_about_variables
from headrace.errors import OptionTypeError
from headrace.model.inventory import take_inventory
from headrace.model.live_tensors import bind
from headrace.model.records import Inventory, ModelProfile
from headrace.plan.kinds import HOST
from headrace.plan.plan import Plan
from headrace.plan.slabs import slab_bytes
from headrace.planning.context import PlanContext
from headrace.planning.request import PlanRequest, Target, compute_device, peer_of
from headrace.stores.store import AlreadyPinned, Pool, StoreRequest

if TYPE_CHECKING:
    from headrace.ranks.group import RankGroup

# Some of the modules of these manage their weights themselves; which do, their adapter knows.
_LIBRARIES = frozenset({"accelerate", "bitsandbytes", "compressed_tensors", "diffusers", "gptqmodel", "transformers"})
_SELF_MANAGED = "headrace.adapters.self_managed"


@dataclass(frozen=True, kw_only=True)
class Prepared(StoreRequest):
    """A checked plan and everything that carrying it out needs.

    Attributes:
        model: on any one device; tensors on ``meta`` are filled from ``weights``.
        inventory: inventory of the model.
        context: what the plan was made from, without the live tensors; for another one later.
        on_host: storages whose device is a GPU although the engine keeps their bytes in host memory.
    """

    model: nn.Module
    inventory: Inventory
    context: PlanContext
    on_host: frozenset[str] = frozenset()

    def must_move(self, name: str) -> bool:
        """Whether the storage ``name`` is not in the memory of the device; as a resident it has to go there."""
        return self.bound[name].home != self.device or name in self.pooled or name in self.on_host


def prepare(request: PlanRequest, *, pool: Pool | None = None, allocates: bool = True) -> Prepared:
    """The plan for a module, checked against the model, the machine and its limits.

    Args:
        request: without what is for other machines or for folders.
        pool: where weights were put while the model was built.
        allocates: the plan will be carried out, so the machine must have room for it.

    Raises:
        OptionError, OptionTypeError: a wrong argument; a selection or budget that cannot be met; a plan for another
            model or machine.
        LimitError: the device or the host has no room for the plan.
        CheckpointError: files missing, damaged or for another model.
    """
    warn_about_variables()
    if request.policy is None:
        as_policy(None)  # raises
    ranks, device = request.ranks, compute_device(request.model, request.device)
    request = replace(request, num_ranks=1 if ranks is None else ranks.size)
    context = module_context(request, Target.of(device)).sized()
    plan, bound = context.plan(), dict(context.bound)
    prepared = Prepared(
        plan,
        device,
        bound,
        context.weights,
        request.disk,
        ranks,
        peer=peer_of(device) if plan.peer_bytes else None,
        model=request.model,
        inventory=context.inventory,
        context=replace(context, request=request, bound={}),
    )
    if pool is not None:
        on_host = pool.find_in_engine_memory(bound)
        prepared = replace(prepared, pooled=pool.find_storages(bound), on_host=on_host)
    if allocates:
        pinned_already = _already_pinned_bytes(plan, prepared.pooled) if prepared.pooled else 0
        context.require_room(plan, {*prepared.pooled, *prepared.on_host}, pinned_already)
    return prepared


def module_context(request: PlanRequest, target: Target) -> PlanContext:
    """A request about a module, with the module as names and sizes."""
    model = request.model
    weights = None
    if request.checkpoint is not None:
        from headrace.checkpoint.weight_map import WeightMap

        weights = WeightMap.open(request.checkpoint)
    inventory = take_inventory(model) if request.inventory is None else request.inventory

    @cache  # for a second plan, of the offloaded model
    def read_profile() -> ModelProfile:
        if not hasattr(model, "config"):  # no model of transformers
            return request.profile or ModelProfile()
        from headrace.model.memory_profile import profile_of

        return profile_of(model, request.expected.context)

    if not _LIBRARIES.isdisjoint(sys.modules):
        reject = import_module(_SELF_MANAGED).reject_self_managed_weights
        for name, module in model.named_modules():
            reject(name, module, torch.device(target.device.type))
    bound = bind(model, inventory.storages)
    return PlanContext(request, target, inventory, read_profile, weights, type(model).__name__, model, bound)


# -- arguments --------------------------------------------------------------------------------------------------------


def open_ranks(group: dist.ProcessGroup | None) -> AbstractContextManager[RankGroup | None]:
    """One call of all ranks of ``group`` (:meth:`RankGroup.open`); without a group the context yields ``None``.

    Raises:
        OptionTypeError: not a process group, such as what ``new_group`` returns to a process outside of it.
    """
    if group is None:
        return nullcontext()
    if not isinstance(group, dist.ProcessGroup):
        raise OptionTypeError(
            f"group: expected a process group, such as torch.distributed.group.WORLD after "
            f"torch.distributed.init_process_group, found {type(group).__name__} {group!r}"
        )
    from headrace.ranks.group import RankGroup

    return RankGroup.open(group)


def _already_pinned_bytes(plan: Plan, pooled: Mapping[str, AlreadyPinned]) -> int:
    """Bytes of ``pooled`` that stay in the pinned memory in which they are."""
    if plan.kind is not HOST:
        return 0
    from headrace.memory.pinned import PinnedBuffer

    # A pinned store adopts tensors that are read in place and units that are all there; a cache, experts that it maps.
    units = [[entry.storage for entry in unit.entries] for unit in plan.units_by_kind[HOST]]
    names = [name for names in units if all(name in pooled for name in names) for name in names]
    names += [name for name in plan.uva if name in pooled]
    kept = slab_bytes(pooled[name].num_bytes for name in names if isinstance(pooled[name].memory, PinnedBuffer))
    if not plan.cached:
        return kept
    from headrace.stores.expert_ranges import mappable

    mapped = [mappable(layer, name, pooled) for layer in plan.cached for name in layer.storages]
    return kept + sum(memory.num_bytes for memory in mapped if memory is not None)
