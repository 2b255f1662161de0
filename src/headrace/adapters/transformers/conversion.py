"""The bytes of a checkpoint that make each tensor of a transformers model.

The rules are transformers' own (``conversion_mapping``, ``core_model_loading``), called as ``from_pretrained`` calls
them in ``convert_and_load_state_dict_in_model``, whose steps :func:`match` follows one by one: rename, collect per
target, choose the dtype, convert. But the conversion code runs on :class:`FileSpans`, ranges of the files, and not on
data.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)

from headrace.adapters.transformers.quantised import (
    build_library_module,
    is_packed,
    select_library_modules,
    use_file_layout,
)
from headrace.checkpoint.safetensors_header import Checkpoint, FileTensor
from headrace.checkpoint.weight_map import Conversion, FilePart, TensorSource, WeightMap
from headrace.errors import CheckpointError
from headrace.model.inventory import take_inventory
from headrace.model.records import Inventory

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel
    from transformers.quantizers.base import HfQuantizer

_COMPARED_BYTES = 1 << 20
# Names in transformers' converters: scales of quantised weights, and the weights themselves.
_SCALE = re.compile(".*(?<!activation)_scale")
_NUMBERS = re.compile("(?!.*(scale|shape|zero_point))")
# More and smaller pieces than this are too slow to stream: each costs a system call and some Python.
_FEW_SPANS = 64
_WORTH_A_READ_BYTES = 64 * 2**10


@dataclass(frozen=True)
class Match:
    """A model on ``meta`` and the checkpoint that it is loaded from.

    Attributes:
        weights: for every tensor of the model that can be streamed, its ranges of the files; for others recipes.
        rearranged: names of the latter, which are made while loading, each with the reason in words.
        missing: names in the model that nothing in the checkpoint provides, without those that transformers tolerates.
        unexpected: names in the checkpoint that the model does not have, without those that transformers tolerates.
        untied: names that the configuration ties to others, but that have other values in the checkpoint.
        inventory: inventory of the model, as adapted to the checkpoint.
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


def match(
    model: PreTrainedModel, checkpoint: Checkpoint, device: torch.device | None = None, *, as_stored: bool = False
) -> Match:
    """Find the source of every tensor of ``model``, and make the model on ``meta`` like that of ``from_pretrained``.

    Three things depend on the checkpoint and are set in the model: the dtype of tensors that transformers keeps in
    float32; ties of the configuration between tensors with different values in the checkpoint, which are cut; and
    quantised modules, which their library finishes for ``device`` (:func:`build_library_module`). ``as_stored``: to
    plan without that library, these get the tensors of the files instead.

    Raises:
        CheckpointError: nothing in common, or tensors of another shape; modules that cannot run here.
    """
    sources: dict[str, TensorSource] = {}
    held: set[str] = set()
    decompressed: list[str] = []
    if as_stored:
        sources, held, decompressed = use_file_layout(model, checkpoint, _renaming(model))
    collected, unused = _collect(model, checkpoint, held)
    if not collected:
        examples = (", ".join(list(names)[:3]) for names in (model.state_dict(), checkpoint.tensors))
        expected, found = (names or "none at all" for names in examples)
        raise CheckpointError(
            f"{checkpoint.root}: expected weights of {type(model).__name__} such as {expected}, found "
            f"{len(checkpoint.tensors)} tensors that are none of them, such as {found}; give the folder of the right "
            f"model, or another model_class"
        )
    untied = _cut_false_ties(model, collected)
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    recipes: dict[str, Conversion] = {}
    if getattr(model, "hf_quantizer", None) is not None:
        quantised = select_library_modules(model, collected)
        sources, recipes = build_library_module(model, quantised, checkpoint, device or torch.device("cpu"))
    rearranged = dict.fromkeys((*recipes, *decompressed), "made by the library that quantised it")
    for assembly in collected.values():
        streamed, why = _stream(model, assembly)
        shapes = _shapes(model, assembly, state) if why else {name: source.shape for name, source in streamed.items()}
        # transformers, too, lets a conversion make more than this model has.
        names = tuple(name for name in shapes if name in state)
        for name in names:
            _fit(name, shapes[name], assembly, state[name])
        if why:
            recipes.update(dict.fromkeys(names, _recipe(model, names, assembly)))
            rearranged.update(dict.fromkeys(names, why))
        else:
            sources.update({name: streamed[name] for name in names})
    inventory = take_inventory(model)
    loaded = {*sources, *rearranged}
    # A tie to a loaded tensor provides the others' values, too.
    unprovided = [storage.names for storage in inventory.storages if loaded.isdisjoint(storage.names)]
    missing = {name for names in unprovided for name in names if name in state}
    keys: Any = SimpleNamespace(missing_keys=missing, unexpected_keys=unused)
    model._adjust_missing_and_unexpected_keys(keys)  # removes those that transformers tolerates
    if scales := sorted(name for name in keys.missing_keys if name.endswith(("_scale_inv", "activation_scale"))):
        # Other missing tensors are initialised, but without these scales the loaded weights have no values.
        raise checkpoint.lacks(scales[0], "Download or copy the checkpoint again.")
    return Match(
        WeightMap(checkpoint, sources, recipes),
        rearranged,
        tuple(sorted(keys.missing_keys, key=dot_natural_key)),
        tuple(sorted(keys.unexpected_keys)),
        untied,
        inventory,
    )


@dataclass(frozen=True)
class Assembly:
    """Tensors of a file that together make one or more tensors of the model.

    Attributes:
        target: the first tensor of the model that they make.
        converter: makes the result; ``None``: it is the one file tensor, unchanged.
        dtype: dtype of the result and every part before it is converted; ``None``: parts keep the dtypes of the files,
            and the result has the dtype of the model's tensor.
        parts: the file tensors in natural order, each with the pattern of ``converter`` that it matched.
    """

    target: str
    converter: WeightConverter | None
    dtype: torch.dtype | None
    parts: list[tuple[str, FileTensor]] = field(default_factory=list)

    def run(self, model: nn.Module, get: Callable[[FileTensor], Any], report: Any = None) -> dict[str, Any]:
        """The model's tensors, by name, made from the result of ``get`` for each part, called when needed.

        ``report``: a ``LoadStateDictInfo``, for converters that change the model themselves.
        """
        if self.converter is None:
            return {self.target: get(self.parts[0][1])}
        # A converter keeps the tensors that were added to it, and an assembly runs several times.
        converter = deepcopy(self.converter)
        add: Any = converter.add_tensor  # takes functions as well as futures
        for pattern, tensor in self.parts:
            add(self.target, tensor.name, pattern, partial(get, tensor))
        made = converter.convert(self.target, model=model, config=model.config, loading_info=report)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    @property
    def operations(self) -> str:
        """Class names of the conversion's steps, for messages."""
        steps = self.converter.operations if self.converter else []
        return ", ".join(type(step).__name__ for step in steps)


def _collect(
    model: PreTrainedModel, checkpoint: Checkpoint, without: Collection[str] = ()
) -> tuple[dict[str, Assembly], set[str]]:
    """The assemblies by their first target; and the keys, as renamed, that the model does not have.

    ``without``: names in the files that are left out.
    """
    quantizer: HfQuantizer | None = getattr(model, "hf_quantizer", None)
    mapping = get_model_conversion_mapping(model, None, quantizer)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    of_pattern: dict[str | None, WeightConverter] = {p: entry for entry in converters for p in entry.source_patterns}
    state, rename = model.state_dict(), _renaming(model, mapping)
    dtype_of = _dtype_rule(model)
    collected: dict[str, Assembly] = {}
    unexpected: set[str] = set()
    # Natural order, `experts.10` after `experts.9`: conversions stack the parts in the order in which they are added.
    # The sort key of a name is made of those of its parts, of which 46,000 names have a few hundred.
    keys = [key for key in checkpoint.tensors if key not in without]
    order = {part: dot_natural_key(part)[0] for part in {part for key in keys for part in key.split(".")}}
    for key in sorted(keys, key=lambda key: [order[part] for part in key.split(".")]):
        name, pattern = rename(key)
        if name not in state:
            unexpected.add(name)
            continue
        if name not in collected:
            converter = of_pattern.get(pattern)
            collected[name] = Assembly(name, converter, dtype_of(name, converter, checkpoint.tensors[key]))
        # A second tensor for the same target without a conversion is ignored, as in transformers.
        if collected[name].converter is not None or not collected[name].parts:
            collected[name].parts.append((pattern or key, checkpoint.tensors[key]))
    for name, assembly in collected.items():
        _require_pairs(assembly)
        if assembly.dtype is None and len(assembly.parts) == 1 and not is_packed(assembly.parts[0][1]):
            # Tensors that a quantizer leaves plain go through its converter, too, and get the dtype of its output.
            (value,) = assembly.run(
                model, lambda part: torch.empty(part.shape, dtype=part.dtype, device="meta")
            ).values()
            collected[name] = Assembly(name, None, value.dtype, assembly.parts)
    # save_pretrained reverses the conversions that were used.
    vars(model)["_weight_conversions"] = [entry for entry in mapping if entry.was_used()]
    return collected, unexpected


def _require_pairs(assembly: Assembly) -> None:
    """Raise CheckpointError if a module of the files has quantised weights without a scale, or the reverse."""
    # transformers takes numbers without a scale for plain weights, and pairs those of experts by their order.
    if assembly.converter is None or assembly.dtype is not None:
        return
    by_module: dict[str, list[tuple[str, FileTensor]]] = {}
    for kind, tensor in assembly.parts:
        by_module.setdefault(tensor.name.rpartition(".")[0], []).append((kind, tensor))
    for module, parts in by_module.items():
        tensor, is_scaled = parts[0][1], any(_SCALE.match(kind) for kind, _ in parts)
        numbers = [tensor for kind, tensor in parts if _NUMBERS.match(kind)]
        if numbers if is_scaled else not any(map(is_packed, numbers)):
            continue
        wanted, path = _NUMBERS if is_scaled else _SCALE, parts[0][0].rpartition(".")[0]
        kinds = [kind.rpartition(".") for kind in assembly.converter.source_patterns if wanted.match(kind)]
        lacks = next((attr for place, _, attr in kinds if place == path), None)
        if lacks is not None:
            raise CheckpointError(
                f"{module}.{lacks}: expected it in the checkpoint with {tensor.name} in {tensor.path}, which "
                f"cannot be used without it, found none; download or copy the checkpoint again"
            )


def _renaming(model: PreTrainedModel, mapping: list[Any] | None = None) -> Callable[[str], tuple[str, str | None]]:
    """From a name in the files to the one in the model, and the pattern of the converter that takes it."""
    mapping = get_model_conversion_mapping(model) if mapping is None else mapping
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix

    def rename(key: str) -> tuple[str, str | None]:
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            return rename_source_key(key, [], [], prefix, state)
        return name, pattern

    return rename


def _dtype_rule(
    model: PreTrainedModel,
) -> Callable[[str, WeightConverter | None, FileTensor], torch.dtype | None]:
    """The dtype a tensor of the state dict is loaded with: the model's, or float32 where the class requires it.

    If the model is quantised, its quantizer chooses the dtype for the tensor of the file; ``None``: as stored.
    """
    quantizer: HfQuantizer | None = getattr(model, "hf_quantizer", None)
    own = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    plan: dict[str, torch.dtype] = model._get_dtype_plan(cast(torch.dtype, model.config.dtype))
    pattern, glob_of_group, _ = build_glob_alternation(list(plan))

    def dtype_of(name: str, converter: WeightConverter | None, tensor: FileTensor) -> torch.dtype | None:
        found = pattern.search(name)
        dtype = plan[glob_of_group[found.lastgroup]] if found and found.lastgroup else own[name]
        if quantizer is None:
            return dtype
        like = torch.empty(0, dtype=tensor.dtype, device="meta")
        chosen: torch.dtype | None = quantizer.get_new_dtype(converter, like, dtype)
        is_input = any(getattr(step, "hf_quantizer", None) for step in getattr(converter, "operations", ()))
        return chosen if chosen is not None or is_input else tensor.dtype

    return dtype_of


def _cut_false_ties(model: PreTrainedModel, collected: Mapping[str, Assembly]) -> tuple[str, ...]:
    """Cut ties between tensors with different values in the checkpoint, as ``tie_weights`` does."""
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    groups: dict[str, list[str]] = {}
    for target, source in ties.items():
        groups.setdefault(source, [source]).append(target)
    cut: list[str] = []
    for names in groups.values():
        stored = [name for name in names if name in collected]  # of these the first keeps its tensor
        cut += [name for name in stored[1:] if not _equal(collected[stored[0]], collected[name])]
    for name in cut:
        owner, _, attr = name.rpartition(".")
        setattr(model.get_submodule(owner), attr, deepcopy(model.get_parameter_or_buffer(name)))
        ties.pop(name, None)
    return tuple(cut)


def _equal(one: Assembly, other: Assembly) -> bool:
    """Whether both have the same values in the files."""
    if one.dtype != other.dtype or len(one.parts) != len(other.parts):
        return False
    for (_, some), (_, others) in zip(one.parts, other.parts, strict=True):
        if (some.dtype, some.shape) != (others.dtype, others.shape):
            return False
        with open(some.path, "rb") as first, open(others.path, "rb") as second:
            first.seek(some.offset)
            second.seek(others.offset)
            # In pieces of 1 MiB, because embeddings are large.
            for start in range(0, some.num_bytes, _COMPARED_BYTES):
                size = min(_COMPARED_BYTES, some.num_bytes - start)
                if first.read(size) != second.read(size):
                    return False
    return True


def _stream(model: PreTrainedModel, assembly: Assembly) -> tuple[dict[str, TensorSource], str]:
    """The sources of the tensors that ``assembly`` makes; or none, and the reason."""
    stored = {tensor.dtype for _, tensor in assembly.parts}
    if assembly.dtype is None:
        return {}, f"made by {assembly.operations}"
    # All operations of FileSpans only move elements, so they may run before or after a conversion of the dtype.
    if len(stored) > 1 or not all(dtype == assembly.dtype or dtype.is_floating_point for dtype in stored):
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in stored))
        return {}, f"converted from {names} to {str(assembly.dtype).removeprefix('torch.')}"
    try:
        made = assembly.run(model, FileSpans.of)
        return {name: value.to_source(assembly.dtype) for name, value in made.items()}, ""
    except Exception:  # NotSpansError, or an error of any type of an operation that needs real tensors
        return {}, f"rearranged by {assembly.operations}"


def _shapes(
    model: PreTrainedModel, assembly: Assembly, state: Mapping[str, torch.Tensor]
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that ``assembly`` makes, by a run on ``meta``."""
    if assembly.dtype is None:  # its code reads values, such as a shape that the file holds
        return {assembly.target: tuple(state[assembly.target].shape)}

    def get(tensor: FileTensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=assembly.dtype, device="meta")

    try:
        return {name: tuple(value.shape) for name, value in assembly.run(model, get).items()}
    except Exception as error:  # conversion code raises errors of any type for shapes that it does not expect
        raise _load_error(assembly, error) from error


def _load_error(assembly: Assembly, error: Exception) -> CheckpointError:
    shapes = Counter(tensor.shape for _, tensor in assembly.parts)
    parts = sorted((tensor for _, tensor in assembly.parts), key=lambda tensor: shapes[tensor.shape])  # rare ones first
    found = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in parts[:4])
    more = ", ..." if len(assembly.parts) > 4 else ""
    return CheckpointError(
        f"{assembly.target}: expected tensors in the checkpoint that {assembly.operations} can join, found "
        f"{len(assembly.parts)} ({found}{more}) that do not fit together ({error}); the checkpoint is incomplete "
        f"or belongs to another configuration"
    )


def _fit(name: str, shape: tuple[int, ...], assembly: Assembly, tensor: torch.Tensor) -> None:
    """Check the shape of ``tensor``, the model's on ``meta``, and give it the dtype it will be loaded with."""
    if tuple(tensor.shape) != shape:
        of = ", ".join(part.name for _, part in assembly.parts[:2])
        raise CheckpointError(
            f"{name}: expected shape {list(tensor.shape)} by config.json, found {list(shape)} in "
            f"{assembly.parts[0][1].path} ({of}{', ...' if len(assembly.parts) > 2 else ''}); the checkpoint belongs "
            f"to another configuration"
        )
    if assembly.dtype is not None and tensor.dtype != assembly.dtype:
        tensor.data = tensor.data.to(assembly.dtype)  # in place, so that ties stay


def _recipe(model: PreTrainedModel, names: tuple[str, ...], assembly: Assembly) -> Conversion:
    """How tensors ``names`` are made of the file's tensors, with ``from_pretrained``'s rounding."""
    expected = {name: model.get_parameter_or_buffer(name) for name in names}

    @torch.no_grad()
    def make(parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        try:
            made = assembly.run(model, lambda tensor: parts[tensor.name].to(assembly.dtype))
        except Exception as error:  # as in _shapes(), which does not run code that reads values
            raise _load_error(assembly, error) from error
        for name, tensor in expected.items():
            if made[name].shape != tensor.shape:  # it may depend on values in the files
                _fit(name, tuple(made[name].shape), assembly, tensor)
        return {name: made[name].to(tensor.dtype).contiguous() for name, tensor in expected.items()}

    return Conversion(names, tuple({tensor.name: tensor for _, tensor in assembly.parts}.values()), make)


# -- ranges of files in place of tensors ------------------------------------------------------------------------------


class NotSpansError(Exception):
    """The operation does more than stack, concatenate and cut; internal, never seen by users."""


class FileSpans:
    """Stands in for a tensor in ``torch.stack``, ``cat``, ``chunk``, ``split`` and ``.contiguous()``.

    It has the shape, the dtype, and the ranges of files with the bytes in row-major order. transformers fuses, splits
    and rearranges weights while it loads. Stacking, concatenating, cutting and reshaping ranges gives ranges again,
    and the result can be read from the unmodified files directly; any other operation fails.
    """

    # Not by the names of conversions, which change from release to release; and not by a conversion of tensors of
    # running numbers, which takes eight bytes per element, several times the memory of the weights.

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, spans: Iterable[FileTensor]) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.spans = list(spans)

    @classmethod
    def of(cls, tensor: FileTensor) -> FileSpans:
        """All of one tensor of a file."""
        return cls(tensor.shape, tensor.dtype, [tensor])

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Only these keep runs of bytes together. Any other operation, also a new one, makes the tensor a recipe.
        handler = _HANDLERS.get(function)
        if handler is None:
            raise NotSpansError(getattr(function, "__name__", str(function)))
        return handler(*args, **(kwargs or {}))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int) -> int:
        """Length of one dimension."""
        return self.shape[dim]

    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def contiguous(self) -> FileSpans:
        """Itself: the ranges are in row-major order."""
        return self

    def reshape(self, *shape: Any) -> FileSpans:
        """The ranges in another shape, as ``torch.Tensor.reshape``."""
        try:
            lengths = torch.empty(self.shape, device="meta").reshape(*shape).shape
        except RuntimeError as error:
            raise NotSpansError(f"reshape of {list(self.shape)} to {list(shape)}") from error
        return FileSpans(lengths, self.dtype, self.spans)

    view = reshape

    def squeeze(self, dim: int) -> FileSpans:
        """Remove a dimension of length one."""
        dim = range(self.ndim)[dim]
        return self if self.shape[dim] != 1 else FileSpans(_without(self.shape, dim), self.dtype, self.spans)

    def to_source(self, dtype: torch.dtype | None = None) -> TensorSource:
        """Ranges of bytes in the files, neighbours joined, for a tensor of ``dtype`` (default that of the files).

        Raises:
            NotSpansError: in too many small pieces to be read in time.
        """
        joined: list[FileTensor] = []
        for span in self.spans:
            last = joined[-1] if joined else None
            if last is not None and (last.path, last.offset + last.num_bytes) == (span.path, span.offset):
                joined[-1] = _part(last, 0, last.num_bytes + span.num_bytes)
            else:
                joined.append(span)
        num_bytes = sum(span.num_bytes for span in joined)
        if len(joined) > max(_FEW_SPANS, num_bytes // _WORTH_A_READ_BYTES):
            raise NotSpansError(f"{len(joined)} pieces of {num_bytes // len(joined)} bytes")
        dtype = dtype or self.dtype
        starts = itertools.accumulate((span.num_bytes // self.dtype.itemsize for span in joined), initial=0)
        offsets = (start * dtype.itemsize for start in starts)
        return TensorSource(tuple(map(FilePart, joined, offsets)), tuple(self.shape), dtype)


def _cat(tensors: Sequence[FileSpans], dim: int = 0) -> FileSpans:
    first = tensors[0]
    dim = range(first.ndim)[dim]
    if len({(_without(tensor.shape, dim), tensor.dtype) for tensor in tensors}) > 1:
        raise NotSpansError(f"cat of {', '.join(str(list(tensor.shape)) for tensor in tensors[:4])}")
    shape = [*first.shape[:dim], sum(tensor.shape[dim] for tensor in tensors), *first.shape[dim + 1 :]]
    num_rows = math.prod(first.shape[:dim])
    rows = [_cut(tensor.spans, [_num_bytes(tensor) // num_rows] * num_rows) for tensor in tensors]
    return FileSpans(shape, first.dtype, [piece for row in zip(*rows, strict=True) for part in row for piece in part])


def _stack(tensors: Sequence[FileSpans], dim: int = 0) -> FileSpans:
    dim = range(tensors[0].ndim + 1)[dim]
    return _cat([FileSpans([*t.shape[:dim], 1, *t.shape[dim:]], t.dtype, t.spans) for t in tensors], dim)


def _split(tensor: FileSpans, sizes: int | Sequence[int], dim: int = 0) -> tuple[FileSpans, ...]:
    dim = range(tensor.ndim)[dim]
    length = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    num_rows = math.prod(tensor.shape[:dim])
    unit = _num_bytes(tensor) // (num_rows * length)
    pieces = _cut(tensor.spans, [size * unit for _ in range(num_rows) for size in sizes])
    parts = []
    for index, size in enumerate(sizes):
        shape = [*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]]
        of_every_row = [span for piece in pieces[index :: len(sizes)] for span in piece]
        parts.append(FileSpans(shape, tensor.dtype, of_every_row))
    return tuple(parts)


def _chunk(tensor: FileSpans, chunks: int, dim: int = 0) -> tuple[FileSpans, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


_HANDLERS: dict[Any, Any] = {torch.cat: _cat, torch.stack: _stack, torch.split: _split, torch.chunk: _chunk}


def _num_bytes(tensor: FileSpans) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _cut(spans: Sequence[FileTensor], sizes: Sequence[int]) -> list[list[FileTensor]]:
    """Split the sequence of ``spans`` into consecutive pieces of these sizes, in bytes."""
    left = list(reversed(spans))
    pieces: list[list[FileTensor]] = []
    for size in sizes:
        piece: list[FileTensor] = []
        while size:
            span = left.pop()
            if span.num_bytes > size:
                left.append(_part(span, size, span.num_bytes - size))
                span = _part(span, 0, size)
            piece.append(span)
            size -= span.num_bytes
        pieces.append(piece)
    return pieces


def _part(span: FileTensor, start: int, num_bytes: int) -> FileTensor:
    """``num_bytes`` of a span from ``start``; they may go on into its neighbour in the file."""
    shape = (num_bytes // span.dtype.itemsize,)
    return FileTensor(span.name, span.dtype, shape, span.path, span.offset + start, num_bytes)
