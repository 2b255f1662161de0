"""A pipeline of diffusers in a folder as planning needs it, from its configs; nothing is loaded.

Headers of files are read for components that were saved quantised, since their configs do not say what is stored.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from headrace.adapters.pipeline_peaks import describe
from headrace.checkpoint.metadata_cache import FolderFacts
from headrace.checkpoint.safetensors_header import Checkpoint, read_json
from headrace.checkpoint.weight_map import WeightMap
from headrace.errors import CheckpointError
from headrace.model.inventory import take_inventory
from headrace.model.records import ModelProfile, dotted_prefixes

INDEX = "model_index.json"
_LIBRARIES = ("diffusers", "transformers")
_ROWS = 4096  # tokens of an image of 1024 x 1024, as headrace.adapters.diffusers counts a step
_NOTE = (
    "{folder}: planned from the configs of its components in {dtype}, which headrace.adapters.diffusers.load runs; its "
    "step is a call with one step of each transformer, of {rows} tokens (an image of 1024 x 1024; --batch for others)"
)


def pipeline_facts(folder: Path, dtype: torch.dtype | str | None) -> FolderFacts:
    """Facts of all components together, in the order in which a call runs them.

    Raises:
        CheckpointError: an index or a component that diffusers and transformers cannot build.
    """
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.bfloat16
    index = read_json(folder / INDEX)
    parts = {name: made for name, stated in index.items() if (made := _part(folder / name, stated))}
    if not parts:
        raise CheckpointError(f"{folder}/{INDEX}: expected components of {' or '.join(_LIBRARIES)}, found none")
    components = nn.Module()
    for name in sorted(parts, key=lambda each: (not each.startswith("text"), each.startswith("vae"))):
        part, config = parts[name]
        components.add_module(name, part.to(wanted).eval())
        if config.get("quantization_config"):
            _hold_as_stored(part, folder / name)
    inventory = take_inventory(components)
    note = _NOTE.format(folder=folder, dtype=str(wanted).removeprefix("torch."), rows=_ROWS)
    schedulers: dict[str, Any] = {
        name: ("diffusers", stated[1], read_json(file), None, {})
        for name, stated in index.items()
        if (file := folder / name / "scheduler_config.json").is_file()
    }
    described = describe(index, dict(components.named_children()), schedulers)
    return FolderFacts(inventory, ModelProfile(), WeightMap.expected(inventory, folder), (note,), _ROWS, described)


def _part(folder: Path, stated: Any) -> tuple[nn.Module, dict[str, Any]] | None:
    """The component on ``meta`` and its config; ``None`` for what has no weights: a scheduler, a tokenizer."""
    library, named = stated if isinstance(stated, list) and len(stated) == 2 else (None, None)
    if not isinstance(library, str) or not isinstance(named, str):
        return None
    module = import_module(library) if library in _LIBRARIES else getattr(diffusers.pipelines, library, None)
    kind: Any = getattr(module, named, None)
    if not _is_module(kind):
        return None
    try:
        config = read_json(folder / "config.json")
        with torch.device("meta"):
            made: nn.Module = (
                kind.from_config(config, trust_remote_code=False)
                if library != "transformers"
                else kind(kind.config_class.from_dict(config))
            )
    except Exception as error:  # of any type, for values that a class does not expect
        raise CheckpointError(f"{folder}: {named} of {library} cannot be made of its config: {error}") from error
    return made, config


def _hold_as_stored(part: nn.Module, folder: Path) -> None:
    """Give quantised layers of ``part`` what their files hold, on ``meta``: packed numbers, scales, codes.

    Raises:
        CheckpointError: no files, or such a tensor of another module than a layer of ``part``.
    """
    from headrace.adapters.diffusers import weight_file

    stored = Checkpoint.open(weight_file(folder, None)).tensors
    layers = dict(part.named_modules())
    shapes = {name: tuple(tensor.shape) for name, tensor in (*part.named_parameters(), *part.named_buffers())}
    for name, tensor in stored.items():
        if shapes.get(name) == tensor.shape:
            continue
        layer = next((at for at in reversed(dotted_prefixes(name)) if at in layers), "")
        held, attr = layers[layer], name.removeprefix(f"{layer}.").replace(".", ":")
        if f"{layer}.weight" not in shapes:
            raise CheckpointError(
                f"{folder}: expected quantised weights of layers of {type(part).__name__}, found {name}; load the "
                f"pipeline with headrace.adapters.diffusers.load, whose handle has the plan"
            )
        held._parameters.pop("weight", None)
        # load() finds in files what has the same name and shape in the model, and keeps the rest in host memory.
        held.register_buffer(attr, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), attr == "weight")


def _is_module(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, nn.Module)
