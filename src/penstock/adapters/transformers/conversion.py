"""Which tensors of a checkpoint make which tensors of a transformers model.

The rules are transformers' own (``conversion_mapping``, ``core_model_loading``), called as ``from_pretrained`` calls
them in ``convert_and_load_state_dict_in_model``, whose steps :func:`match` follows one by one: rename, collect per
target, settle the dtype, convert. It differs in what flows through: stretches of files instead of data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)

from penstock.adapters.transformers.stretches import Stretches
from penstock.checkpoint.safetensors_header import Checkpoint, FileTensor
from penstock.checkpoint.weight_map import Conversion, TensorSource, WeightMap
from penstock.errors import CheckpointError
from penstock.model.inventory import Inventory, take_inventory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Match", "match"]

_COMPARED_BYTES = 1 << 20


@dataclass(frozen=True)
class Assembly:
    """Tensors of a file that together make one or more tensors of the model.

    Attributes:
        target: the first tensor of the model that they make.
        converter: what makes it; ``None`` means the one file tensor as it is.
        parts: the file tensors in natural order, each with the pattern of ``converter`` that it matched.
        dtype: of the result, and of every part before it is converted.
    """

    target: str
    converter: WeightConverter | None
    parts: tuple[tuple[str, FileTensor], ...]
    dtype: torch.dtype

    def run(self, model: PreTrainedModel, get: Callable[[FileTensor], Any]) -> dict[str, Any]:
        """The model's tensors, by name, made from what ``get`` returns for each part when it is needed."""
        if self.converter is None:
            return {self.target: get(self.parts[0][1])}
        converter = deepcopy(self.converter)
        add: Any = converter.add_tensor  # takes what to call as well as futures
        for pattern, tensor in self.parts:
            add(self.target, tensor.name, pattern, partial(get, tensor))
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    @property
    def operations(self) -> str:
        """Class names of the conversion's steps, for messages."""
        steps = self.converter.operations if self.converter else []
        return ", ".join(type(step).__name__ for step in steps)


@dataclass(frozen=True)
class Match:
    """A model on ``meta`` and a checkpoint, brought together.

    Attributes:
        weights: for every tensor of the model that can be streamed, its stretches of the files; for others recipes.
        rearranged: names of the latter, which are made while loading, with the reason, for people.
        missing: names in the model that nothing in the checkpoint provides, those transformers tolerates left out.
        unexpected: names in the checkpoint that the model has no place for, those transformers tolerates left out.
        untied: names that the configuration ties to others, but the checkpoint holds with other values.
        inventory: of the model, as adapted to the checkpoint.
    """

    weights: WeightMap
    rearranged: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    untied: tuple[str, ...]
    inventory: Inventory

    @property
    def loaded(self) -> frozenset[str]:
        """Names in the model that the checkpoint provides."""
        return frozenset(self.weights.sources).union(self.rearranged)


def match(model: PreTrainedModel, checkpoint: Checkpoint) -> Match:
    """Find the source of every tensor of ``model``, and adapt the model on ``meta`` to what ``from_pretrained`` makes.

    Two things depend on the checkpoint and are set in the model: the dtype of what transformers keeps in float32, and
    ties the configuration asks for while the checkpoint holds different values (those are cut).

    Raises:
        CheckpointError: nothing in common, or tensors of another shape.
    """
    collected, unused = _collect(model, checkpoint)
    if not collected:
        raise CheckpointError(_nothing_in_common(model, checkpoint))
    dtype_of = _dtype_rule(model)
    untied = _cut_false_ties(model, collected, dtype_of)
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    sources: dict[str, TensorSource] = {}
    recipes: dict[str, Conversion] = {}
    rearranged: dict[str, str] = {}
    for target, (converter, parts) in collected.items():
        assembly = Assembly(target, converter, tuple(parts), dtype_of(target))
        streamed, why = _stream(model, assembly)
        shapes = _shapes(model, assembly) if why else {name: source.shape for name, source in streamed.items()}
        # transformers, too, lets a conversion make more than this model has.
        names = tuple(name for name in shapes if name in state)
        for name in names:
            _fit(name, shapes[name], assembly, state[name])
        if why:
            recipes.update(dict.fromkeys(names, _recipe(model, names, assembly)))
            rearranged.update(dict.fromkeys(names, why))
        else:
            sources.update({name: streamed[name] for name in names})
    weights = WeightMap(checkpoint, sources, recipes)
    inventory = take_inventory(model)
    missing, unexpected = _tolerated(model, _missing(inventory, state.keys(), {*sources, *recipes}), unused)
    return Match(weights, rearranged, missing, unexpected, untied, inventory)


def _recipe(model: PreTrainedModel, names: tuple[str, ...], assembly: Assembly) -> Conversion:
    """How tensors ``names`` are made of the file's tensors, with ``from_pretrained``'s rounding."""

    @torch.no_grad()
    def make(parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = assembly.run(model, lambda tensor: parts[tensor.name].to(assembly.dtype))
        return {name: made[name].to(assembly.dtype).contiguous() for name in names}

    return Conversion(names, tuple({tensor.name: tensor for _, tensor in assembly.parts}.values()), make)


_Collected = dict[str, tuple[WeightConverter | None, list[tuple[str, FileTensor]]]]


def _collect(model: PreTrainedModel, checkpoint: Checkpoint) -> tuple[_Collected, set[str]]:
    """Per first target its converter and parts; and the keys, as renamed, that have no place in the model."""
    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    of_pattern: dict[str | None, WeightConverter] = {p: entry for entry in converters for p in entry.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    collected: _Collected = {}
    unexpected: set[str] = set()
    for key in sorted(checkpoint.tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            unexpected.add(name)
            continue
        converter, parts = collected.setdefault(name, (of_pattern.get(pattern), []))
        # A second tensor for the same target without a conversion is passed over, as in transformers.
        if converter is not None or not parts:
            parts.append((pattern or key, checkpoint.tensors[key]))
    # save_pretrained turns back what was used.
    vars(model)["_weight_conversions"] = [entry for entry in mapping if entry.was_used()]
    return collected, unexpected


def _dtype_rule(model: PreTrainedModel) -> Callable[[str], torch.dtype]:
    """The dtype a tensor of the state dict is loaded with: the model's, or float32 where the class insists on it."""
    own = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    plan: dict[str, torch.dtype] = model._get_dtype_plan(cast(torch.dtype, model.config.dtype))
    if not plan:
        return own.__getitem__
    pattern, glob_of_group, _ = build_glob_alternation(list(plan))

    def dtype_of(name: str) -> torch.dtype:
        found = pattern.search(name)
        return plan[glob_of_group[found.lastgroup]] if found and found.lastgroup else own[name]

    return dtype_of


def _shapes(model: PreTrainedModel, assembly: Assembly) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what ``assembly`` makes, by a run on ``meta``."""

    def get(tensor: FileTensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=assembly.dtype, device="meta")

    try:
        return {name: tuple(value.shape) for name, value in assembly.run(model, get).items()}
    except Exception as error:  # whatever the conversion code makes of shapes it does not expect
        found = ", ".join(f"{tensor.name} {list(tensor.shape)}" for _, tensor in assembly.parts[:4])
        more = ", ..." if len(assembly.parts) > 4 else ""
        raise CheckpointError(
            f"{assembly.target}: expected tensors in the checkpoint that {assembly.operations} can join, found "
            f"{len(assembly.parts)} ({found}{more}) that do not fit together ({error}); the checkpoint is incomplete "
            f"or belongs to another configuration"
        ) from error


def _fit(name: str, shape: tuple[int, ...], assembly: Assembly, tensor: torch.Tensor) -> None:
    """Check the shape of ``tensor``, the model's on ``meta``, and give it the dtype it will be loaded with."""
    if tuple(tensor.shape) != shape:
        of = ", ".join(part.name for _, part in assembly.parts[:2])
        raise CheckpointError(
            f"{name}: expected shape {list(tensor.shape)} by config.json, found {list(shape)} in "
            f"{assembly.parts[0][1].path} ({of}{', ...' if len(assembly.parts) > 2 else ''}); the checkpoint belongs "
            f"to another configuration"
        )
    if tensor.dtype != assembly.dtype:
        tensor.data = tensor.data.to(assembly.dtype)  # in place, so that ties stay


def _stream(model: PreTrainedModel, assembly: Assembly) -> tuple[dict[str, TensorSource], str]:
    """The sources of what ``assembly`` makes; or none, and why."""
    stored = {tensor.dtype for _, tensor in assembly.parts}
    if stored != {assembly.dtype}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in stored))
        return {}, f"converted from {names} to {str(assembly.dtype).removeprefix('torch.')}"
    if assembly.converter is None:
        return {assembly.target: TensorSource.of(assembly.parts[0][1])}, ""
    try:
        return {name: value.to_source() for name, value in assembly.run(model, Stretches.of).items()}, ""
    except Exception:  # NotStretchesError, or whatever an operation raises that asks for more than a stretch can do
        return {}, f"rearranged by {assembly.operations}"


def _missing(inventory: Inventory, persistent: Collection[str], loaded: set[str]) -> set[str]:
    """Names of the state dict whose memory no loaded tensor provides; a tie to a loaded tensor provides it."""
    storages = [storage.names for storage in inventory.storages]
    return {name for names in storages if loaded.isdisjoint(names) for name in names if name in persistent}


def _tolerated(
    model: PreTrainedModel, missing: set[str], unexpected: set[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    info: Any = SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)
    model._adjust_missing_and_unexpected_keys(info)
    return tuple(sorted(info.missing_keys, key=dot_natural_key)), tuple(sorted(info.unexpected_keys))


def _cut_false_ties(
    model: PreTrainedModel, collected: _Collected, dtype_of: Callable[[str], torch.dtype]
) -> tuple[str, ...]:
    """Cut the ties between tensors that the checkpoint holds both, with different values, as ``tie_weights`` does."""
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    cut: list[str] = []
    for first, *others in _tied_and_stored(ties, collected):
        for other in others:
            if dtype_of(first) != dtype_of(other) or not _equal(collected[first][1], collected[other][1]):
                cut.append(other)
    for name in cut:
        tied = model.get_parameter_or_buffer(name)
        own = torch.empty_like(tied)
        owner, _, attr = name.rpartition(".")
        is_parameter = isinstance(tied, nn.Parameter)
        setattr(model.get_submodule(owner), attr, nn.Parameter(own, tied.requires_grad) if is_parameter else own)
        ties.pop(name, None)
    return tuple(cut)


def _tied_and_stored(ties: dict[str, str], collected: _Collected) -> Iterator[list[str]]:
    """Groups of tied names that the checkpoint holds, the one to keep first."""
    groups: dict[str, list[str]] = {}
    for target, source in ties.items():
        groups.setdefault(source, [source]).append(target)
    for names in groups.values():
        if stored := [name for name in names if name in collected]:
            yield stored


def _equal(some: list[tuple[str, FileTensor]], others: list[tuple[str, FileTensor]]) -> bool:
    if len(some) != len(others):
        return False
    return all(_same_bytes(one, other) for (_, one), (_, other) in zip(some, others, strict=True))


def _same_bytes(one: FileTensor, other: FileTensor) -> bool:
    """Whether two file tensors are equal, read a little at a time: embeddings are large."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with open(one.path, "rb") as first, open(other.path, "rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        sizes = [min(_COMPARED_BYTES, one.num_bytes - start) for start in range(0, one.num_bytes, _COMPARED_BYTES)]
        return all(first.read(size) == second.read(size) for size in sizes)


def _nothing_in_common(model: PreTrainedModel, checkpoint: Checkpoint) -> str:
    return (
        f"{checkpoint.root}: expected weights of {type(model).__name__} such as {_first(model.state_dict())}, found "
        f"{len(checkpoint.tensors)} tensors that are none of them, such as {_first(checkpoint.tensors)}; give the "
        f"folder of the right model, or another model_class"
    )


def _first(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:3]) or "none at all"
