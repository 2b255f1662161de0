"""Whether model, files and machine can carry a plan out: refusals, needs and limits. Allocates nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.config import pin_memory_disabled
from headrace.errors import LimitError, OptionError, warn_user
from headrace.formatting import format_size
from headrace.memory.system import DEVICE, PEER, Limits, Needs, Shortage, round_up
from headrace.model.records import Inventory
from headrace.plan.cached_experts import host_memory_bytes
from headrace.plan.plan import DeviceName, Machine, Plan
from headrace.plan.slabs import slab_bytes
from headrace.planning.request import can_read_in_place, gpu_memory_kind, has_triton, peer_of

if TYPE_CHECKING:
    import torch

    from headrace.checkpoint.weight_map import WeightMap
    from headrace.ranks.group import RankGroup

_log = logging.getLogger(__name__)

_MIB = 2**20


def finalize_plan(
    plan: Plan,
    inventory: Inventory,
    device: torch.device | DeviceName,
    machine: Machine,
    weights: WeightMap | None = None,
    num_ranks: int = 1,
) -> Plan:
    """``plan`` checked against model, files and ``machine``, in the form that ``num_ranks`` of it can carry out."""
    plan.check(inventory)
    plan.check_machine(machine)
    if device.type == "cuda" and weights is not None and plan.staged_units:
        _refuse_converting(plan, inventory, weights)
    if plan.cached or plan.coded_units:
        _require_kernels(plan, device)
    if device.type == "cuda":
        _warn_of_memory(plan, device, machine)
    if plan.peer_bytes and (device.type == "cpu" or not isinstance(device, DeviceName)):
        peer_of(device)
    num_ranks = num_ranks if plan.kind.is_split else 1
    if plan.uva and (plan.kind.is_split or not can_read_in_place(device)):  # split: no rank has a whole tensor
        from headrace.plan.units import move_on_demand

        moved = move_on_demand(inventory, plan)
        moved = replace(moved, model_name=plan.model_name, made_for=plan.made_for)
        plan = replace(moved, context=plan.context, budget_bytes=plan.budget_bytes)
    plan = plan if plan.num_ranks == num_ranks else replace(plan, num_ranks=num_ranks)
    if plan.offloaded_bytes and plan.device_bytes > plan.weight_bytes:
        warn_user(
            f"the plan takes {format_size(plan.device_bytes)} of device memory, more than all weights, which have "
            f"{format_size(plan.weight_bytes)}: leave the model resident, or use fewer slots (prefetch_step, "
            f"expert_slots)"
        )
    _log.info("plan: %r, %d bytes moved per forward, for %s", plan, plan.moved_bytes, machine)
    return plan


def require_one_process(ranks: RankGroup | None) -> None:
    """Refuse units on another GPU where that may be another process's own."""
    import torch.distributed as dist

    num_processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks is not None or num_processes > 1:
        raise OptionError(
            f"peer_memory is for one process beside an idle GPU, and this is one of {num_processes}: let them share "
            f"their memory (mode 'sharded_gpu' with group=), or leave peer_memory out (--peer-memory)"
        )


def _require_kernels(plan: Plan, device: torch.device | DeviceName) -> None:
    """Refuse cached experts and codes where their kernels do not run."""
    from_files = bool(plan.cached) and plan.kind.host_slots is not None
    if plan.cached and not from_files and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise OptionError(
            f"experts of {plan.cached[0].module_fqn} are cached, and the device is a CPU; expected a CUDA device, "
            f"which has memory of its own, or files below the cache (mode 'disk'; or use experts=uva)"
        )
    if not from_files and not has_triton(device):
        raise OptionError(
            "cached experts and codecs are run by Triton, which is not installed: install it (pip install triton; on "
            "Windows triton-windows), or use experts=uva and codec='none' (--offload-codec none)"
        )
    if plan.cached and not can_read_in_place(device):
        raise OptionError(
            f"experts of {plan.cached[0].module_fqn} are cached, for which {device} has to address host memory; "
            f"expected HEADRACE_DISABLE_UVA and HEADRACE_DISABLE_PIN_MEMORY not to be set"
        )


def _refuse_converting(plan: Plan, inventory: Inventory, weights: WeightMap) -> None:
    """Refuse to have a GPU read units from files that hold them in another dtype."""
    converted = weights.converted_bytes(inventory)
    names = [entry.storage for unit in plan.staged_units for entry in unit.entries if entry.storage in converted]
    if names:
        raise OptionError(
            f"{names[0]} and {len(names) - 1} others have another dtype in the files than in the model, and a GPU "
            f"reads files without converting: store them in host memory, where they are converted once (no mode, or "
            f"--offload-mode cpu), or save the model in its dtype first: model.save_pretrained(FOLDER)"
        )


def memory_kind(device: torch.device | DeviceName, machine: Machine) -> str:
    """:func:`gpu_memory_kind` of ``device``, which may be of another machine."""
    from headrace.transfer.cards import shares_host_memory

    elsewhere = isinstance(device, DeviceName)
    return ("shared" if shares_host_memory(machine.device) else "own") if elsewhere else gpu_memory_kind(device)


def _warn_of_memory(plan: Plan, device: torch.device | DeviceName, machine: Machine) -> None:
    """Warn where offloading to host memory frees nothing, because the GPU computes in it."""
    kind = memory_kind(device, machine)
    if kind == "shared" and plan.kind.on_host and plan.offloaded_bytes > plan.spilled_bytes:
        warn_user(
            f"{machine.device} computes in the host's memory, so offloading weights to host memory frees nothing: "
            f"store them in files (mode 'disk', --offload-mode disk), or leave the model resident"
        )
    elif kind == "coherent":
        _log.info("%s reads host memory coherently; `headrace probe` measures how fast", device)


# -- what a plan needs of the machine ---------------------------------------------------------------------------------


def needs_of(plan: Plan, *, on_gpu: bool, elsewhere: Collection[str] = (), on_meta: Collection[str] = ()) -> Needs:
    """Memory that ``plan`` adds to what is in use, before anything old is freed; memory that ranks share counts once.

    Args:
        on_gpu: compute runs on a GPU; on a CPU its memory is host memory.
        elsewhere: names of the storages that are not on the device yet; as residents they have to move there.
        on_meta: storages of them that have no bytes yet and are read from files; others are adopted by a CPU's store.
    """
    moved = [num_bytes for name, num_bytes in plan.resident.items() if name in elsewhere]
    experts_bytes = host_memory_bytes(plan.cached, on_gpu) if plan.cached else 0
    if not on_gpu:
        stored = plan.cache_bytes + experts_bytes
        for kind, units in plan.units_by_kind.items():
            sizes = {entry.storage: entry.num_bytes for unit in units for entry in unit.entries}
            stored += kind.host_bytes(plan, units, {**(plan.uva if kind is plan.kind else {}), **sizes}, on_meta)
        return Needs(host_bytes=plan.slots_bytes + sum(moved) + stored)
    return _needs_beside_gpu(plan, moved, experts_bytes)


def _needs_beside_gpu(plan: Plan, moved: Sequence[int], experts_bytes: int) -> Needs:
    """``moved``: bytes of residents that have to move to the GPU."""
    in_place = sum(slab_bytes([size]) for size in plan.uva.values())  # a GPU cannot address a mapped file
    pinned = experts_bytes + sum(
        kind.pinned_bytes(plan, units, in_place if kind is plan.kind else 0)
        for kind, units in plan.units_by_kind.items()
    )
    parts = sum(kind.device_bytes(plan, units) for kind, units in plan.units_by_kind.items())
    staging = max(moved, default=0)  # residents pass through host memory one at a time
    return Needs(
        device_bytes=plan.slots_bytes + slab_bytes(moved) + parts + plan.cache_bytes,
        host_bytes=pinned + staging,
        pinned_bytes=0 if pin_memory_disabled() else pinned,
        peer_bytes=plan.peer_bytes,
    )


def check_limits(plan: Plan, limits: Limits, needs: Needs) -> None:
    """Refuse ``plan`` if ``limits`` (:func:`read_limits`) have no room for its ``needs`` (:func:`needs_of`); pure.

    Raises:
        LimitError: names the limit that misses most, by how much, and a device-memory budget that should fit.
    """
    if (shortage := limits.shortage(needs)) is not None:
        raise _limit_error(plan, limits, needs, shortage)


def _limit_error(plan: Plan, limits: Limits, needs: Needs, shortage: Shortage) -> LimitError:
    limit, needed, available, fix = shortage
    missing = needed - available
    on_gpu, budget = limits.device_free_bytes is not None, _fitting_budget(plan, limit, missing, limits, needs)
    advice = "Offload less or in smaller units"
    if budget is not None:
        size = f"{budget // _MIB}MiB" if budget % _MIB == 0 else f"{budget}B"
        which = "larger" if budget > plan.device_bytes else "smaller"
        advice = f"A {which} budget should fit, about --device-memory {size}; use it"
    if plan.kind.on_host and not (on_gpu and limit in (DEVICE, PEER)):
        fix += f", or store the weights in the files (--offload-mode disk{', no codec' if plan.coded_units else ''})"
        fix += ", or what does not fit: pass checkpoint=FOLDER and no mode" if on_gpu else ""
        fix += " or codec" if on_gpu and plan.coded_units else ""
    message = (
        f"the plan needs {format_size(needed)} ({needed} bytes) of {limit}, and {format_size(available)} ({available} "
        f"bytes) can be had: {format_size(missing)} ({missing} bytes) too little. {advice}, or {fix}; nothing was "
        f"allocated"
    )
    return LimitError(message, limit, needed, available, budget)


def _fitting_budget(plan: Plan, limit: str, missing: int, limits: Limits, needs: Needs) -> int | None:
    """A device-memory budget that should fit, in whole MiB where that is possible; ``None`` if none would.

    A first-order estimate: every byte of weights that is not in one memory is in the other.
    """
    if limit == PEER:
        return None
    less = max(0, plan.device_bytes - missing)
    smaller = less // _MIB * _MIB or less or None
    if limits.device_free_bytes is None:  # on a CPU both are host memory
        return smaller
    if limit == DEVICE:
        host = (limits.host_available_bytes, limits.cgroup_available_bytes)
        spare = min((found - needs.host_bytes for found in host if found is not None), default=missing)
        return None if plan.kind.on_host and spare < missing else smaller
    # Residents pass through host memory one storage at a time; a rank holds only its part of a split unit.
    staging = max((p.num_bytes for p in plan.placements.values() if p.mechanism in ("uva", "prefetch")), default=0)
    more = (missing + staging) * plan.num_ranks  # 1 where no unit is split
    if not plan.kind.on_host or more > min(plan.offloaded_bytes, limits.device_free_bytes - needs.device_bytes):
        return None
    return round_up(plan.device_bytes + more, _MIB)
