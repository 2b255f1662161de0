"""transformers models from a local folder of safetensors, without ever holding the offloaded weights.

``from_pretrained`` reads everything and then places it; here the order is turned round. The model is built on
``meta`` from config.json, brought together with the headers of the files, planned, and only what the plan calls
resident is read. Everything else stays in the unmodified files until a forward needs it.

What comes out is what ``from_pretrained(folder)`` gives, tensor for tensor: the same class, dtype, ties, conversions,
buffers, and the same treatment of tensors that are missing or too many. Nothing is downloaded, no code from the
folder is run.
"""

from __future__ import annotations

import difflib
import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.initialization import meta_device_safe_creation_ops
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from penstock.adapters._conversion import Match, Rearranged, match
from penstock.checkpoint import Checkpoint
from penstock.config import Policy, as_policy, format_gib
from penstock.errors import CheckpointError, OptionError, OptionTypeError, PenstockWarning
from penstock.handle import Handle, offload
from penstock.inventory import Inventory, StorageInfo, take_inventory
from penstock.limits import describe_device
from penstock.offloaders.attachment import Progress
from penstock.offloaders.binding import bind
from penstock.offloaders.opening import compute_device
from penstock.offloaders.planning import budget_planner, not_in_files, planner_for, split_planner
from penstock.offloaders.room import require_room
from penstock.peers import Peers
from penstock.plan import Plan
from penstock.plan.planner import Planner
from penstock.store.base import new_blob
from penstock.store.disk import DiskOptions
from penstock.weights import WeightMap

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    ModelClass = type[PreTrainedModel] | type[_BaseAutoModelClass]

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
            ``disk``), for a GPU it fills pinned host memory from them (mode ``cpu``).
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
    """
    model = build_meta_model(path, model_class=model_class, dtype=dtype)
    found = match(model, Checkpoint.open(path))
    _report(model, found)
    inventory, target = take_inventory(model), compute_device(model, device)
    planner = _planner(model, inventory, found.weights, target)
    planner = split_planner(planner, policy, None if group is None else Peers(group))
    plan = policy if isinstance(policy, Plan) else planner.plan(as_policy(policy))
    _refuse_early(model, plan, policy, planner, target)
    _materialise(model, found, plan)
    _take_generation_config(model, Path(path))
    model.train(False)
    if plan is not policy:
        plan = replace(plan, made_for=describe_device(target))
    handle = offload(model, plan, checkpoint=found.weights, device=device, disk=disk, progress=progress, group=group)
    return model, handle


def _planner(model: PreTrainedModel, inventory: Inventory, weights: WeightMap, device: torch.device) -> Planner:
    return planner_for(model, inventory, device, weights, unstreamable=not_in_files(inventory, weights))


def _refuse_early(
    model: PreTrainedModel, plan: Plan, policy: Policy | Plan | str | int, planner: Planner, device: torch.device
) -> None:
    """What :func:`penstock.offload` will refuse is refused here, before tensors that cannot be streamed are made."""
    plan.check(planner.inventory)
    plan.check_machine(describe_device(device))
    require_room(model, plan, planner.inventory, device, budget_planner(planner, policy, plan.mode))


def build_meta_model(
    path: str | os.PathLike[str], *, model_class: ModelClass | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The model of a folder on ``meta``, from its config.json alone: names, shapes, dtypes, ties, and no data.

    Where config.json states no dtype, that of the first floating-point tensor in the folder's files counts, if there
    are any; that is what ``from_pretrained`` does.

    Raises:
        CheckpointError: no folder, or no model in it that transformers can build.
        OptionError, OptionTypeError: a class or dtype that cannot be.
    """
    folder = _folder(path)
    raw = _read_config(folder)
    _refuse_quantised(folder, raw)
    if model_class is None or hasattr(model_class, "from_config"):
        _refuse_unknown(folder, raw)
    maker = model_class or _named_class(folder, raw) or AutoModel
    config = _make_config(folder, raw, maker)
    config.name_or_path = str(path)
    return _build(folder, maker, config, _choose_dtype(folder, config, dtype))


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


# -- the folder -------------------------------------------------------------------------------------------------------


def _folder(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise OptionTypeError(f"path: expected a str or path of a folder, found {type(path).__name__}")
    folder = Path(path)
    if not folder.is_dir():
        found = "a file" if folder.exists() else "no such folder"
        raise CheckpointError(
            f"{str(path)!r}: expected a folder with config.json and safetensors files, found {found}; penstock "
            f"downloads nothing: fetch the model first, e.g. `hf download NAME --local-dir FOLDER`"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: a folder that is no model: expected a config.json in it, found none; give the folder that "
            f"model.save_pretrained(FOLDER) or a download wrote"
        )
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder}: expected a whole model, found an adapter (adapter_config.json), which is not supported yet; "
            f"merge it into its base model and save that (peft: merge_and_unload(), save_pretrained)"
        )
    return folder


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or not JSON
        raise CheckpointError(f"{file}: expected a JSON object, found: {error}; download or copy it again") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(raw).__name__}; download it again")
    return raw


def _refuse_quantised(folder: Path, raw: dict[str, Any]) -> None:
    for part in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        quantised = part.get("quantization_config") or part.get("compression_config")
        if quantised:
            method = quantised.get("quant_method", "unnamed") if isinstance(quantised, dict) else "unnamed"
            raise CheckpointError(
                f"{folder}: expected plain weights, found quantised ones (quantization_config in config.json, method "
                f"{method!r}), which are not supported yet; use the model's unquantised checkpoint"
            )


def _refuse_unknown(folder: Path, raw: dict[str, Any]) -> None:
    kind = raw.get("model_type")
    if kind in CONFIG_MAPPING:
        return
    if raw.get("auto_map"):
        raise CheckpointError(
            f"{folder}: model_type {kind!r} is not part of transformers {transformers.__version__} and comes with code "
            f"of its own (auto_map in config.json), which penstock does not run; load it with "
            f"from_pretrained(..., trust_remote_code=True) and hand the model to penstock.offload"
        )
    nearest = ", ".join(difflib.get_close_matches(str(kind), CONFIG_MAPPING.keys())) or "none"
    raise CheckpointError(
        f"{folder}/config.json: expected a model_type that transformers {transformers.__version__} knows, found "
        f"{kind!r} (the nearest it knows: {nearest}); mend config.json, or install a transformers that knows it"
    )


def _named_class(folder: Path, raw: dict[str, Any]) -> type[PreTrainedModel] | None:
    names = raw.get("architectures")
    if not names:
        return None
    found = getattr(transformers, str(names[0]), None)
    if isinstance(found, type) and issubclass(found, PreTrainedModel):
        return found
    raise CheckpointError(
        f"{folder}/config.json: expected an architecture that transformers {transformers.__version__} has, found "
        f"{names[0]!r}; pass model_class=, e.g. transformers.AutoModelForCausalLM"
    )


# -- the model on meta ------------------------------------------------------------------------------------------------


def _make_config(folder: Path, raw: dict[str, Any], maker: Any) -> PretrainedConfig:
    # A concrete class reads config.json with its own configuration class, which may be a part of a composite one.
    is_auto = hasattr(maker, "from_config")
    if not is_auto and not (isinstance(maker, type) and issubclass(maker, PreTrainedModel)):
        raise OptionTypeError(f"model_class: expected a transformers model class, found {maker!r}")
    reader = AutoConfig if is_auto or maker.config_class is None else maker.config_class
    try:
        config: PretrainedConfig = reader.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a configuration class makes of values it does not expect
        raise CheckpointError(
            f"{folder}/config.json: transformers {transformers.__version__} makes no {raw.get('model_type')} "
            f"configuration of it: {error}"
        ) from error
    return config


def _choose_dtype(folder: Path, config: PretrainedConfig, asked: torch.dtype | None) -> torch.dtype:
    if asked is not None:
        if not isinstance(asked, torch.dtype):
            raise OptionTypeError(f"dtype: expected a torch.dtype such as torch.bfloat16, found {asked!r}")
        if not asked.is_floating_point:
            raise OptionError(f"dtype {asked}: expected a floating-point dtype; leave it out for the checkpoint's own")
        return asked
    stated: torch.dtype | str | None = config.dtype
    if isinstance(stated, str):
        return getattr(torch, stated)  # type: ignore[no-any-return]
    if stated is not None:
        return stated
    return _first_float_dtype(folder) if any(folder.glob("*.safetensors")) else torch.get_default_dtype()


def _first_float_dtype(folder: Path) -> torch.dtype:
    checkpoint = Checkpoint.open(folder)
    first_file = [tensor for tensor in checkpoint.tensors.values() if tensor.path == checkpoint.files[0]]
    stored = [tensor.dtype for tensor in sorted(first_file, key=lambda tensor: tensor.name)]
    return next((t for t in stored if t.is_floating_point and t.itemsize > 1), torch.get_default_dtype())


def _build(folder: Path, maker: Any, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    make = getattr(maker, "from_config", None) or maker._from_config
    try:
        with torch.device("meta"), meta_device_safe_creation_ops():
            model: PreTrainedModel = make(config, dtype=dtype)
        if any(tensor.device.type != "meta" for tensor in (*model.parameters(), *model.buffers())):
            # Some classes create a tensor in a way that ignores the device asked for (`torch.Tensor(size)`).
            nn.Module.to(model, torch.device("meta"))
            model.tie_weights(recompute_mapping=False)
    except ImportError:
        raise  # a package the architecture needs; its message says which
    except Exception as error:  # whatever a model class makes of a configuration it does not expect
        raise CheckpointError(
            f"{folder}: {maker.__name__} cannot be built from its config.json: {error}; mend the file, or pass "
            f"another model_class"
        ) from error
    return model


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
    initialise()


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
    warnings.warn(message, PenstockWarning, stacklevel=4)
