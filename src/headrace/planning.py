"""A model, a policy and a machine to a plan: :func:`make_plan`. Names and sizes only; nothing is allocated.

The command line plans with :func:`plan_model`, which also returns what a picture needs. Nothing at the top of this file
imports torch or transformers.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.checkpoint.model_folder import is_quantised, model_folder, model_name
from headrace.config import SHARDED_MODES, Budget, Policy, Workload, as_policy
from headrace.errors import LimitError, OptionError, OptionTypeError, warn_user
from headrace.figures import format_size
from headrace.memory.system import no_collections

if TYPE_CHECKING:
    import torch
    from torch import nn

    from headrace.adapters.transformers.opened_model import OpenedModel
    from headrace.checkpoint.kept_folder import FolderFacts
    from headrace.checkpoint.safetensors_header import Checkpoint
    from headrace.checkpoint.weight_map import WeightMap
    from headrace.model.records import Inventory, ModelProfile
    from headrace.plan.alternatives import Point
    from headrace.plan.build import Outlook, Planner
    from headrace.plan.cost_model import Rates
    from headrace.plan.plan import Machine, Plan
    from headrace.plan.traces import ExpertHits
    from headrace.stores.sources import DiskOptions
    from headrace.transfer.machine_probe import DeviceName

__all__ = ["Planned", "make_plan", "plan_model"]


def make_plan(
    model: nn.Module | str | os.PathLike[str],
    policy: Policy | Plan | str | int | None = None,
    *,
    workload: Workload | None = None,
    machine: str | os.PathLike[str] | None = None,
    checkpoint: WeightMap | Checkpoint | str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    disk: DiskOptions | None = None,
    num_ranks: int = 1,
    expert_trace: str | os.PathLike[str] | None = None,
) -> Plan:
    """The plan that :func:`headrace.offload` or ``load`` would carry out, and its predicted cost; allocates nothing.

    ``print(plan)`` shows both, as ``headrace plan`` does. The plan can be saved, and passed to ``offload`` or ``load``
    in place of a policy::

        plan = headrace.make_plan("Qwen3-8B", "6GiB", workload=headrace.Workload([1, 16], context=4096), machine="h200")
        print(plan)

    Args:
        model: a module, on ``meta`` too, or a transformers folder of safetensors (or its name in the local cache of the
            Hub), of which config and headers are read.
        policy: as for ``offload``. ``None``: everything stays resident, and the smallest budget is shown. A plan is
            checked against model and machine.
        workload: the batch sizes and the context that a budget is planned for, and that predictions are about.
        machine: another machine to plan for: ``"h200"``, ``"h100"``, ``"4090"``, or a file that ``headrace probe
            --json`` printed there. Default: this one, with its kept probe or nominal rates.
        checkpoint: as for ``offload``; a folder given as ``model`` is its own.
        dtype: of the weights, as for ``load``; for folders alone.
        device: where compute runs; default as for ``offload`` and ``load``. Not with ``machine``, which says it.
        disk: how files are read.
        num_ranks: over how many ranks the modes ``sharded_cpu`` and ``sharded_gpu`` split units (``group=``).
        expert_trace: a file of ``headrace generate --expert-trace``, from which hits of cached experts are predicted.

    Returns:
        the plan. What ``machine``, or this one, has no room for is a warning, and printed with the plan.

    Raises:
        OptionError, OptionTypeError: a wrong argument; a selection or budget that cannot be met; a plan for another
            model or machine.
        CheckpointError: no model in the folder, or files for another one.
    """
    planned = plan_model(
        model,
        policy,
        workload=workload,
        machine=machine,
        checkpoint=checkpoint,
        dtype=dtype,
        device=device,
        disk=disk,
        num_ranks=num_ranks,
        expert_trace=expert_trace,
    )
    if planned.misfit:
        warn_user(f"the plan {planned.misfit}")
    return planned.with_outlook()


@dataclass(frozen=True)
class Planned:
    """A plan with what it was made from.

    Attributes:
        plan: without predictions (:meth:`with_outlook`).
        planner: of the model, for the machine.
        policy: that ``plan`` is the plan for.
        workload: that predictions are about.
        misfit: why the machine has no room for the plan, as the rest of a sentence; ``None``: it has.
    """

    plan: Plan
    planner: Planner
    policy: Policy | Plan | None
    workload: Workload
    misfit: str | None

    @cached_property
    def points(self) -> Sequence[Point]:
        """Step time against device memory; empty unless the policy is a budget that offloads something."""
        return self.planner.curve(self.policy) if isinstance(self.policy, Budget) and self.plan.offloaded_bytes else ()

    @cached_property
    def curves(self) -> Sequence[Sequence[Point]]:
        """For a picture: for each batch size of the workload the points of a plan for it alone; empty as ``points``."""
        return self.planner.curves(self.policy) if isinstance(self.policy, Budget) and self.points else ()

    @cached_property
    def outlook(self) -> Outlook:
        """Predictions, and for budgets the alternatives."""
        outlook = self.planner.outlook(self.policy, self.plan, self.points, self.workload)
        return replace(outlook, misfit=self.misfit)

    def with_outlook(self) -> Plan:
        """The plan with its predictions, which it prints."""
        return self.plan.with_outlook(self.outlook)


def plan_model(
    model: nn.Module | OpenedModel | str | os.PathLike[str],
    policy: Policy | Plan | str | int | None,
    *,
    workload: Workload | None = None,
    machine: str | os.PathLike[str] | None = None,
    checkpoint: WeightMap | Checkpoint | str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    disk: DiskOptions | None = None,
    num_ranks: int = 1,
    expert_trace: str | os.PathLike[str] | None = None,
) -> Planned:
    """:func:`make_plan` with the planner, for a folder that is open already, too; warns about nothing that is missing.

    Raises the errors of :func:`make_plan`.
    """
    from headrace.plan.plan import Plan, assemble
    from headrace.runtime.this_machine import make_planner, require_kinds, settle
    from headrace.stores.sources import File

    require_kinds(device, disk)
    if workload is not None and not isinstance(workload, Workload):
        raise OptionTypeError(f"workload: expected a headrace.Workload, found {type(workload).__name__} {workload!r}")
    given = policy if policy is None or isinstance(policy, Plan) else _with_workload(as_policy(policy), workload)
    _check_ranks(given, num_ranks)
    work = workload or (given.workload if isinstance(given, Budget) else Workload())
    with no_collections():
        # A folder is read for the device: quantised weights take other forms on a GPU and on a CPU.
        target = _target(None, machine, device, disk) if isinstance(model, str | os.PathLike) else None
        facts = _facts_of(model, checkpoint, dtype, target.device.type if target is not None else "", work.context)
        if disk is not None and facts.weights is not None:
            # The file system may refuse O_DIRECT. Opening the files finds this now, and not when the plan is carried
            # out.
            for path in facts.weights.checkpoint.files:
                File(path, disk).close()
        target = target or _target(facts.module, machine, device, disk)
        inventory = facts.inventory
        planner = make_planner(
            inventory, facts.profile, target.device, facts.weights, target.rates, facts.unstreamable, disk, num_ranks
        )
        if expert_trace is not None:
            planner = replace(planner, hits=_hits_of(expert_trace, facts))
        if isinstance(given, Plan):
            plan = replace(given, model_name=given.model_name or facts.name)
        else:
            plan = assemble(inventory, [], 0, planner.default_mode) if given is None else planner.plan(given)
            plan = replace(plan, model_name=facts.name, made_for=target.machine)
        split = num_ranks if num_ranks > 1 else plan.num_ranks  # a finished plan says itself over how many
        plan = settle(plan, inventory, target.device, target.machine, facts.weights, split)
        _check_files(plan, facts)
        # Without a policy the question is what the model weighs, and which budget runs it.
        misfit = None if given is None else _misfit(plan, planner, facts, target, work)
        return Planned(plan, planner, given, work, misfit)


def _with_workload(policy: Policy, workload: Workload | None) -> Policy:
    if workload is None or not isinstance(policy, Budget) or policy.workload == workload:
        return policy
    if policy.workload != Workload():
        raise OptionError(f"workload: the budget has {policy.workload}, found {workload} beside it; leave one out")
    return replace(policy, workload=workload)


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Facts:
    """What is planned; ``module`` is ``None`` for a folder, of which no model is built for the caller."""

    inventory: Inventory
    profile: ModelProfile
    weights: WeightMap | None = None
    unstreamable: Collection[str] = ()
    name: str | None = None
    module: nn.Module | None = None


def _check_ranks(policy: Policy | Plan | None, num_ranks: int) -> None:
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int):
        raise OptionTypeError(f"num_ranks: expected an int, found {type(num_ranks).__name__} {num_ranks!r}")
    if num_ranks < 1 or (num_ranks > 1 and getattr(policy, "mode", None) not in SHARDED_MODES):
        raise OptionError(
            f"num_ranks = {num_ranks}: expected at least 1, and more for a policy of mode {' or '.join(SHARDED_MODES)} "
            f"alone; in other modes no unit is split (--num-ranks)"
        )


def _facts_of(model: Any, checkpoint: Any, dtype: Any, device: str, context: int) -> _Facts:
    if dtype is not None and not isinstance(model, str | os.PathLike):
        raise OptionError("dtype: of a module, its own counts; leave dtype out, or plan a folder")
    if isinstance(model, str | os.PathLike):
        from headrace.checkpoint.kept_folder import folder_facts
        from headrace.runtime.this_machine import not_in_files
        from headrace.transfer.machine_probe import may_have_gpu

        _refuse_checkpoint(checkpoint)
        folder = model_folder(model)
        options = f"{dtype} {device} {may_have_gpu()}" if is_quantised(folder) else str(dtype)
        if context:  # what is measured for one is kept, too
            options += " with caches"
        facts = folder_facts(folder, partial(_read, folder, dtype, device, context), options)
        _warn_of(facts.differences)
        unstreamable = not_in_files(facts.inventory, facts.weights)
        return _Facts(facts.inventory, facts.profile, facts.weights, unstreamable, model_name(folder))
    if hasattr(model, "unstreamable"):  # an OpenedModel; its class needs transformers
        _refuse_checkpoint(checkpoint)
        _warn_of(model.differences)
        return _Facts(model.inventory, model.profile(context), model.weights, model.unstreamable, model.name)
    from torch import nn

    from headrace.checkpoint.weight_map import WeightMap
    from headrace.model.inventory import take_inventory
    from headrace.model.memory_profile import profile_of

    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    if not isinstance(model, nn.Module):
        raise OptionTypeError(f"model: expected a torch.nn.Module or a folder, found {type(model).__name__}")
    weights = None if checkpoint is None else WeightMap.open(checkpoint)
    return _Facts(take_inventory(model), profile_of(model, context), weights, name=type(model).__name__, module=model)


def _read(folder: Path, dtype: Any, device: str, context: int) -> tuple[FolderFacts, Collection[str]]:
    from headrace.adapters.transformers.opened_model import open_model

    return open_model(folder, dtype, None, device, True).facts(context)


def _hits_of(expert_trace: str | os.PathLike[str], facts: _Facts) -> ExpertHits:
    from headrace.plan.cost_model import experts_in
    from headrace.plan.traces import ExpertHits, load_trace

    recorded = load_trace(expert_trace)
    found = {experts_in(facts.inventory, storage) for storage in facts.inventory.storages}
    if recorded.num_experts not in found:
        raise OptionError(
            f"{os.fspath(expert_trace)}: a trace of {recorded.num_experts} experts; expected one of this model, whose "
            f"layers have {max(found)} (--expert-trace)"
        )
    return ExpertHits(recorded)


def _check_files(plan: Plan, facts: _Facts) -> None:
    """Raise ``CheckpointError`` if files that ``plan`` streams from hold a tensor in another form; warn if unknown."""
    if plan.reads_files and facts.weights is None:
        warn_user(
            "the plan reads weights from safetensors files, and none were given: pass checkpoint=FOLDER here and to "
            "headrace.offload"
        )
    elif facts.weights is not None:
        for name, placement in plan.placements.items():
            if placement.store == "disk":
                facts.weights.source(facts.inventory.by_name[name])


def _warn_of(differences: Iterable[str]) -> None:
    for difference in differences:
        warn_user(difference)


def _refuse_checkpoint(checkpoint: object) -> None:
    if checkpoint is not None:
        raise OptionError("checkpoint: a folder is its own checkpoint; leave checkpoint out")


# -- the machine -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Target:
    """Where a plan is to be carried out; ``rates`` are ``None`` for this machine, whose own count."""

    device: torch.device | DeviceName
    machine: Machine
    rates: Rates | None = None


def _target(module: nn.Module | None, machine: Any, device: Any, disk: DiskOptions | None) -> _Target:
    from headrace.runtime.this_machine import describe_device
    from headrace.transfer.machine_probe import DeviceName, may_have_gpu, named_machine

    if machine is None:
        here: torch.device | DeviceName = DeviceName("cpu")
        if module is not None or (may_have_gpu() if device is None else device != "cpu"):
            from torch import nn

            from headrace.runtime.prepare import compute_device

            here = compute_device(module or nn.Module(), device)
        return _Target(here, describe_device(here))
    if device is not None:
        raise OptionError("machine and device contradict each other: the machine says the device; leave device out")
    made_for, rates = named_machine(machine, disk is not None and bool(disk.direct))
    return _Target(DeviceName("cpu" if made_for.device == "cpu" else "cuda"), made_for, rates)


def _misfit(plan: Plan, planner: Planner, facts: _Facts, target: _Target, workload: Workload) -> str | None:
    """What the machine lacks for ``plan`` with the caches and activations of ``workload``; ``None``: nothing."""
    from headrace.runtime.this_machine import Limits, check_limits, free_on_peer, needs_of, read_limits

    on_gpu = target.device.type == "cuda"
    names = {storage.name for storage in facts.inventory.storages}
    elsewhere = on_meta = names
    if facts.module is not None:
        from headrace.model.live_tensors import bind

        bound = bind(facts.module, facts.inventory.storages)
        elsewhere = {name for name, storage in bound.items() if storage.home != target.device}
        on_meta = {name for name, storage in bound.items() if storage.on_meta}
    if target.rates is not None:
        elsewhere = names
    needs = needs_of(plan, on_gpu=on_gpu, elsewhere=elsewhere, on_meta=on_meta)
    batch, context = max(workload.batch_sizes), workload.context
    beside = planner.profile.workload_bytes(batch, context)
    if on_gpu:
        needs = replace(needs, device_bytes=needs.device_bytes + beside)
    else:
        joined = planner.mapped.joined_bytes if planner.mapped is not None and plan.mode == "disk" else {}
        in_place = sum(joined.get(name, 0) for name in plan.uva)
        needs = replace(needs, host_bytes=needs.host_bytes + beside + in_place)
    # Of another machine only the memory of its device is known.
    limits = Limits(target.machine.device_bytes)
    if target.rates is None:
        limits = read_limits(target.device, pinned_bytes=needs.pinned_bytes)
        limits = replace(limits, peer_free_bytes=free_on_peer(plan, target.device))
    try:
        check_limits(plan, limits, needs)
    except LimitError as error:
        where = "this machine" if target.rates is None else str(target.machine)
        text = f"does not fit {where}: {str(error).removesuffix('; nothing was allocated')}"
        use = f". The cache and activations of batch {batch} at {context} tokens take {format_size(beside)} of it"
        return text + (use if beside else "")
    return None
