"""transformers models from a local folder of safetensors, without ever holding the offloaded weights.

``from_pretrained`` reads everything and then places it; here the order is turned round. The model is built on
``meta`` from config.json, brought together with the headers of the files, planned, and only what the plan calls
resident is read. Everything else stays in the unmodified files until a forward needs it.

What comes out is what ``from_pretrained(folder)`` gives, tensor for tensor: the same class, dtype, ties, conversions,
buffers, and the same treatment of tensors that are missing or too many. Nothing is downloaded, no code from the
folder is run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from penstock.adapters.transformers.conversion import Match, Rearranged, match
from penstock.adapters.transformers.meta_model import build_meta_model
from penstock.api import Handle, offload
from penstock.checkpoint.safetensors_header import Checkpoint
from penstock.checkpoint.weight_map import WeightMap
from penstock.config import Policy, as_policy, format_gib
from penstock.errors import CheckpointError, warn_user
from penstock.model.inventory import Inventory, StorageInfo, take_inventory
from penstock.model.live_tensors import bind
from penstock.model.tensor_guards import storage_id
from penstock.plan import Plan
from penstock.plan.planner import Planner
from penstock.ranks.peers import Peers
from penstock.runtime.agreement import attempt
from penstock.runtime.arguments import require_group, require_kinds
from penstock.runtime.limits import describe_device
from penstock.runtime.memory_check import require_room
from penstock.runtime.planning import not_in_files, planner_for, split_planner
from penstock.runtime.session import Progress
from penstock.runtime.store_factory import compute_device
from penstock.stores.disk import DiskOptions
from penstock.stores.store import new_blob

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from penstock.adapters.transformers.meta_model import ModelClass

__all__ = ["build_meta_model", "load", "plan_for", "weight_map"]

_NAMES_SHOWN = 8


def load(
    path: str | os.PathLike[str],
    policy: Policy | Plan | str | int,
    *,
    model_class: ModelClass | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    disk: DiskOptions | None = None,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
) -> tuple[PreTrainedModel, Handle]:
    """Load a model and offload it in one go; memory stays within the plan while loading, too.

    Args:
        path: a folder with config.json and safetensors files, as ``save_pretrained`` or a download leaves it.
        policy: as for :func:`penstock.offload`; on a CPU a size such as ``"20GiB"`` streams from the files (mode
            ``disk``), for a GPU it fills pinned host memory from them (mode ``cpu``), and what that has no room for
            streams from the files (mode ``disk``).
        model_class: a transformers class, ``Auto`` classes included; default the one that config.json names.
        dtype: of the weights; default the checkpoint's own. What has to be converted stays resident.
        device: where compute runs; default the CPU.
        disk: how the files are read.
        progress: called with (bytes loaded, bytes to load) while weights are read or moved.
        group: as for :func:`penstock.offload`: ranks that load the same folder and share its bytes.

    Returns:
        the model in evaluation mode, ready for ``generate``, and its handle; ``handle.remove()`` makes everything
        resident.

    Raises:
        CheckpointError: no folder, no model in it, or files for another configuration.
        OptionError, OptionTypeError: a policy, class or dtype that cannot be; a plan for another model or machine.
        LimitError: the device or the host has no room for the plan; found before anything is allocated.
        PeerError: another rank of ``group`` failed, ended, or did not come in time.

    To pool links or to measure stalls, :func:`penstock.offload` a model that is built already.
    """
    require_group(group)
    with attempt(None if group is None else Peers(group)) as peers:
        require_kinds(device, disk)
        model = build_meta_model(path, model_class=model_class, dtype=dtype)
        found = match(model, Checkpoint.open(path))
        _report(model, found)
        inventory, target = take_inventory(model), compute_device(model, device)
        planner = _planner(model, inventory, found.weights, target, disk)
        planner = split_planner(planner, policy, peers)
        plan = policy if isinstance(policy, Plan) else planner.plan(as_policy(policy))
        _refuse_early(model, plan, inventory, target)
        _materialise(model, found, plan)
        _take_generation_config(model, Path(path))
        model.train(False)
        if plan is not policy:
            plan = replace(plan, made_for=describe_device(target))
        handle = offload(
            model, plan, checkpoint=found.weights, device=device, disk=disk, progress=progress, group=group
        )
        handle._hold_to_budget(policy)  # the plan alone does not tell it
    return model, handle


def _planner(
    model: PreTrainedModel,
    inventory: Inventory,
    weights: WeightMap,
    device: torch.device,
    disk: DiskOptions | None = None,
) -> Planner:
    return planner_for(model, inventory, device, weights, unstreamable=not_in_files(inventory, weights), disk=disk)


def _refuse_early(model: PreTrainedModel, plan: Plan, inventory: Inventory, device: torch.device) -> None:
    """What :func:`penstock.offload` will refuse is refused here, before tensors that cannot be streamed are made."""
    plan.check(inventory)
    plan.check_machine(describe_device(device))
    require_room(model, plan, inventory, device)


def weight_map(model: PreTrainedModel, checkpoint: Checkpoint) -> WeightMap:
    """For every tensor of ``model`` that can be streamed, its stretches of the unmodified files.

    Tensors without a source are computed, initialised, or rearranged while loading; mode ``disk`` keeps them resident
    (:func:`plan_for`). Where the checkpoint demands it, the model on ``meta`` is adapted: take inventories afterwards.

    Raises:
        CheckpointError: nothing in common, or tensors of another shape.
    """
    return match(model, checkpoint).weights


def plan_for(
    model: PreTrainedModel, weights: WeightMap, policy: Policy | str | int, device: torch.device | str | None = None
) -> Plan:
    """The plan that :func:`load` would carry out on ``device``; loads nothing."""
    planner = _planner(model, take_inventory(model), weights, compute_device(model, device))
    return planner.plan(as_policy(policy))


# -- what is not streamed ---------------------------------------------------------------------------------------------


def _materialise(model: PreTrainedModel, found: Match, plan: Plan) -> None:
    """Give data to what is neither read from the files nor made of them during the offload."""
    inventory = take_inventory(model)
    if plan.mode != "meta":
        for entry in found.rearranged:
            if not all(_made_later(inventory.by_name[name], found.weights, plan) for name in entry.names):
                _make_now(model, inventory, found.weights, entry)
        _allocate(model, [s for s in inventory.storages if found.loaded.isdisjoint(s.names)])
        _allocate_empty(model, inventory.empty)
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for name in found.loaded:
        state[name]._is_hf_initialized = True
    initialise: Any = model.initialize_weights
    with _RefuseChanges({storage_id(state[name]): name for name in found.loaded if state[name].is_meta}):
        initialise()


class _RefuseChanges(TorchDispatchMode):
    """While transformers initialises what files do not hold: it may change a part of what they do hold.

    Its own loading then gives other values than the files have: ChineseCLIP sets rows for padding to zero. ``names``:
    of loaded tensors, by storage.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args and func._schema.is_mutable else None
        name = self._names.get(storage_id(target)) if isinstance(target, torch.Tensor) else None
        if name is not None:
            raise CheckpointError(
                f"{name}: Transformers changes a part of this tensor after it is read ({func}), so it cannot be "
                f"streamed from the files: build the model with from_pretrained() and give it to penstock.offload()"
            )
        return func(*args, **(kwargs or {}))


def _made_later(storage: StorageInfo, weights: WeightMap, plan: Plan) -> bool:
    """Whether the offload makes ``storage`` straight into its place, tensor by tensor.

    A rank that keeps a part of every tensor takes it from stretches of files or from live tensors.
    """
    split = plan.mode == "sharded_gpu" and plan.mechanism_of(storage.name) != "resident"
    return not split and weights.recipe(storage) is not None


def _make_now(model: PreTrainedModel, inventory: Inventory, weights: WeightMap, entry: Rearranged) -> None:
    recipe = entry.recipe(model)
    made = recipe.make({part.name: weights.checkpoint.read(part.name) for part in recipe.parts})
    for name, value in made.items():
        _allocate(model, [inventory.by_name[name]])
        model.get_parameter_or_buffer(name).data.copy_(value)


def _allocate(model: PreTrainedModel, storages: Iterable[StorageInfo]) -> None:
    """Move storages from ``meta`` to the CPU, ties and views kept, filled with zeros."""
    for bound in bind(model, storages).values():
        if bound.on_meta:
            bound.point_at(new_blob(bound.info.num_bytes).zero_())


def _allocate_empty(model: PreTrainedModel, names: Iterable[str]) -> None:
    """The same for tensors without elements, which no inventory describes."""
    for name in names:
        owner, _, attr = name.rpartition(".")
        module = model.get_submodule(owner)
        tensor = getattr(module, attr)
        empty = torch.empty_like(tensor, device="cpu")
        setattr(module, attr, nn.Parameter(empty, tensor.requires_grad) if attr in module._parameters else empty)


def _take_generation_config(model: PreTrainedModel, folder: Path) -> None:
    adjust: Any = getattr(model, "adjust_generation_fn", None)
    if adjust is None or not model.can_generate():
        return
    adjust(
        None,
        False,
        None,
        str(folder),
        cache_dir=None,
        force_download=False,
        proxies=None,
        local_files_only=True,
        token=None,
        revision="main",
        subfolder="",
        trust_remote_code=False,
    )


# -- what has to be said ----------------------------------------------------------------------------------------------


def _report(model: PreTrainedModel, found: Match) -> None:
    root = found.weights.checkpoint.root
    if found.missing:
        _warn(
            f"{_some(found.missing)} of {type(model).__name__} not in {root}: initialised anew, as from_pretrained "
            f"does; outputs that depend on them mean nothing until they are trained"
        )
    if found.unexpected:
        _warn(f"{_some(found.unexpected)} in {root} not used: {type(model).__name__} has no place for them")
    if found.untied:
        _warn(
            f"{_some(found.untied)} in {root} differ from the tensors that config.json ties them to: not tied, as "
            f"from_pretrained does; say tie_word_embeddings: false in config.json"
        )
    if found.rearranged:
        state = model.state_dict()
        sizes = {name: state[name].nbytes for entry in found.rearranged for name in entry.names}
        why = {name: entry.why for entry in found.rearranged for name in entry.names}
        named = [f"{name} ({size} bytes, {why[name]})" for name, size in sizes.items()]
        _warn(
            f"{_some(named)}, {format_gib(sum(sizes.values()))} in all, cannot be streamed from the unmodified files: "
            f"made while loading, tensor by tensor, and resident where the rest is streamed; a checkpoint saved in the "
            f"form and dtype the model uses streams them"
        )


def _some(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _NAMES_SHOWN} more" if len(every) > _NAMES_SHOWN else ""
    noun = "tensor" if len(every) == 1 else "tensors"
    return f"{len(every)} {noun} ({', '.join(every[:_NAMES_SHOWN])}{more})"


def _warn(message: str) -> None:
    warn_user(message)
