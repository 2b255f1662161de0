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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from penstock.adapters.transformers.conversion import Match, match
from penstock.adapters.transformers.meta_model import build_meta_model
from penstock.api import Handle, start
from penstock.checkpoint.safetensors_header import Checkpoint
from penstock.checkpoint.weight_map import WeightMap
from penstock.config import SHARDED_MODES, Policy, format_gib
from penstock.errors import CheckpointError, warn_user
from penstock.model.inventory import StorageInfo
from penstock.model.live_tensors import BoundStorage, storage_id
from penstock.plan.plan import Plan
from penstock.ranks.group import RankGroup
from penstock.runtime.prepare import (
    Prepared,
    not_in_files,
    open_ranks,
    prepare,
    require_kinds,
)
from penstock.runtime.session import Progress
from penstock.stores.file_reader import DiskOptions
from penstock.stores.store import new_blob

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from penstock.adapters.transformers.meta_model import ModelClass

__all__ = ["build_meta_model", "load", "load_matched", "weight_map"]

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

    To measure stalls, :func:`penstock.offload` a model that is built already.
    """
    with open_ranks(group) as ranks:
        require_kinds(device, disk)
        model = build_meta_model(path, model_class=model_class, dtype=dtype)
        found = match(model, Checkpoint.open(path))
        return model, load_matched(path, model, found, policy, device, disk, progress, ranks)


def load_matched(
    path: str | os.PathLike[str],
    model: PreTrainedModel,
    found: Match,
    policy: Policy | Plan | str | int,
    device: torch.device | str | None,
    disk: DiskOptions | None,
    progress: Progress | None,
    ranks: RankGroup | None,
) -> Handle:
    """:func:`load` for a ``model`` on ``meta`` that has been built and brought together with its files already."""
    _report(model, found)
    prepared = prepare(
        model,
        policy,
        inventory=found.inventory,
        device=device,
        weights=found.weights,
        unstreamable=not_in_files(found.inventory, found.weights),
        disk=disk,
        ranks=ranks,
    )
    _materialise(model, found, prepared)
    _take_generation_config(model, Path(path))
    model.train(False)
    return start(prepared, progress=progress)


def weight_map(model: PreTrainedModel, checkpoint: Checkpoint) -> WeightMap:
    """For every tensor of ``model`` that can be streamed, its stretches of the unmodified files.

    Tensors without a source are computed, initialised, or rearranged while loading; mode ``disk`` keeps them resident
    (:func:`plan_for`). Where the checkpoint demands it, the model on ``meta`` is adapted: take inventories afterwards.

    Raises:
        CheckpointError: nothing in common, or tensors of another shape.
    """
    return match(model, checkpoint).weights


# -- what is not streamed ---------------------------------------------------------------------------------------------


def _materialise(model: PreTrainedModel, found: Match, prepared: Prepared) -> None:
    """Give data to what is neither read from the files nor made of them during the offload."""
    plan, bound, inventory = prepared.plan, prepared.bound, prepared.inventory
    if plan.mode != "meta":
        for recipe in dict.fromkeys(found.weights.recipes.values()):
            storages = [inventory.by_name[name] for name in recipe.names]
            if all(_made_later(storage, found.weights, plan) for storage in storages):
                continue
            made = recipe.make({part.name: found.weights.checkpoint.read(part.name) for part in recipe.parts})
            for storage in storages:
                _allocate(bound[storage.name])
            for name, value in made.items():
                model.get_parameter_or_buffer(name).data.copy_(value)
        for storage in inventory.storages:
            if found.loaded.isdisjoint(storage.names):
                _allocate(bound[storage.name])
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
    split = plan.mode in SHARDED_MODES and plan.mechanism_of(storage.name) != "resident"
    return not split and weights.recipe(storage) is not None


def _allocate(storage: BoundStorage) -> None:
    """Move a storage from ``meta`` to the CPU, ties and views kept, filled with zeros."""
    if storage.on_meta:
        storage.adopt(new_blob(storage.info.num_bytes).zero_())


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
    # What from_pretrained passes for a local folder.
    options = {"cache_dir": None, "force_download": False, "proxies": None, "local_files_only": True, "token": None}
    adjust(None, False, None, str(folder), **options, revision="main", subfolder="", trust_remote_code=False)


# -- what has to be said ----------------------------------------------------------------------------------------------


def _report(model: PreTrainedModel, found: Match) -> None:
    root = found.weights.checkpoint.root
    if found.missing:
        warn_user(
            f"{_some(found.missing)} of {type(model).__name__} not in {root}: initialised anew, as from_pretrained "
            f"does; outputs that depend on them mean nothing until they are trained"
        )
    if found.unexpected:
        warn_user(f"{_some(found.unexpected)} in {root} not used: {type(model).__name__} has no place for them")
    if found.untied:
        warn_user(
            f"{_some(found.untied)} in {root} differ from the tensors that config.json ties them to: not tied, as "
            f"from_pretrained does; say tie_word_embeddings: false in config.json"
        )
    if found.rearranged:
        state = model.state_dict()
        sizes = {name: state[name].nbytes for name in found.rearranged}
        named = [f"{name} ({size} bytes, {found.rearranged[name]})" for name, size in sizes.items()]
        warn_user(
            f"{_some(named)}, {format_gib(sum(sizes.values()))} in all, cannot be streamed from the unmodified files: "
            f"made while loading, tensor by tensor, and resident where the rest is streamed; a checkpoint saved in the "
            f"form and dtype the model uses streams them"
        )


def _some(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _NAMES_SHOWN} more" if len(every) > _NAMES_SHOWN else ""
    noun = "tensor" if len(every) == 1 else "tensors"
    return f"{len(every)} {noun} ({', '.join(every[:_NAMES_SHOWN])}{more})"
