"""Which bytes of a checkpoint make which tensors of a transformers model.

The rules are transformers' own (``conversion_mapping``, ``core_model_loading``), called as ``from_pretrained`` calls
them in ``convert_and_load_state_dict_in_model``, whose steps :func:`match` follows one by one: rename, collect per
target, settle the dtype, convert. It differs in what the conversion code runs on: not data, but :class:`FileSpans`,
which are ranges of the files.
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
from headrace.model.inventory import Inventory, take_inventory

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel
    from transformers.quantizers.base import HfQuantizer

__all__ = ["FileSpans", "Match", "NotStretchesError", "match"]

_COMPARED_BYTES = 1 << 20
# What transformers' converters call the scale of quantised weights, and what is neither that nor the numbers.
_SCALE = re.compile(".*(?<!activation)_scale")
_NUMBERS = re.compile("(?!.*(scale|shape|zero_point))")
# More and smaller pieces than this are no longer a stream: each costs a system call and some Python.
_FEW_STRETCHES = 64
_WORTH_A_READ_BYTES = 64 * 2**10


@dataclass(frozen=True)
class Match:
    """A model on ``meta`` and the checkpoint that it is loaded from.

    Attributes:
        weights: for every tensor of the model that can be streamed, its stretches of the files; for others recipes.
        rearranged: names of the latter, which are made while loading, each with the reason in words.
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


def match(
    model: PreTrainedModel, checkpoint: Checkpoint, device: torch.device | None = None, *, as_stored: bool = False
) -> Match:
    """Find the source of every tensor of ``model``, and adapt the model on ``meta`` to what ``from_pretrained`` makes.

    Three things depend on the checkpoint and are set in the model: the dtype of what transformers keeps in float32,
    ties the configuration asks for while the checkpoint holds different values (those are cut), and quantised modules
    that its library finishes for ``device`` (:func:`build_library_module`). ``as_stored``: to plan without that
    library, they get the tensors of the files instead.

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
        # Anything else that is missing is initialised; these say what loaded weights are worth.
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
        converter: what makes it; ``None`` means that it is the one file tensor, unchanged.
        dtype: of the result, and of every part before it is converted; ``None``: parts come as they lie in the files,
            and what is made of them has the dtype of the model's tensor.
        parts: the file tensors in natural order, each with the pattern of ``converter`` that it matched.
    """

    target: str
    converter: WeightConverter | None
    dtype: torch.dtype | None
    parts: list[tuple[str, FileTensor]] = field(default_factory=list)

    def run(self, model: nn.Module, get: Callable[[FileTensor], Any]) -> dict[str, Any]:
        """The model's tensors, by name, made from what ``get`` returns for each part when it is needed."""
        if self.converter is None:
            return {self.target: get(self.parts[0][1])}
        # A converter keeps the tensors that were added to it, and an assembly runs several times.
        converter = deepcopy(self.converter)
        add: Any = converter.add_tensor  # takes functions as well as futures
        for pattern, tensor in self.parts:
            add(self.target, tensor.name, pattern, partial(get, tensor))
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    @property
    def operations(self) -> str:
        """Class names of the conversion's steps, for messages."""
        steps = self.converter.operations if self.converter else []
        return ", ".join(type(step).__name__ for step in steps)


def _collect(
    model: PreTrainedModel, checkpoint: Checkpoint, without: Collection[str] = ()
) -> tuple[dict[str, Assembly], set[str]]:
    """The assemblies by their first target; and the keys, as renamed, that have no place in the model.

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
    # Natural order, `experts.10` after `experts.9`: conversions stack the parts in the order in which they come. The
    # rule treats the parts of a name one by one, and 46,000 names are made of a few hundred.
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
        # A second tensor for the same target without a conversion is passed over, as in transformers.
        if collected[name].converter is not None or not collected[name].parts:
            collected[name].parts.append((pattern or key, checkpoint.tensors[key]))
    for name, assembly in collected.items():
        _require_pairs(assembly)
        if assembly.dtype is None and len(assembly.parts) == 1 and not is_packed(assembly.parts[0][1]):
            # What a quantizer leaves plain comes through its converter, too, and with the dtype that this gives it.
            (value,) = assembly.run(
                model, lambda part: torch.empty(part.shape, dtype=part.dtype, device="meta")
            ).values()
            collected[name] = Assembly(name, None, value.dtype, assembly.parts)
    # save_pretrained turns back what was used.
    vars(model)["_weight_conversions"] = [entry for entry in mapping if entry.was_used()]
    return collected, unexpected


def _require_pairs(assembly: Assembly) -> None:
    """Raise CheckpointError if a module of the files has quantised numbers and no scale of them, or the reverse."""
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
                f"{module}.{lacks}: expected it in the checkpoint beside {tensor.name} in {tensor.path}, which is of "
                f"no use without it, found none; download or copy the checkpoint again"
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
    """The dtype a tensor of the state dict is loaded with: the model's, or float32 where the class insists on it.

    Where it is quantised: what its quantizer says of the tensor of the file; ``None``: as it lies there.
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
    """Cut the ties between tensors that the checkpoint holds both, with different values, as ``tie_weights`` does."""
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
    """Whether the files hold the same values for both."""
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
    """The sources of what ``assembly`` makes; or none, and why."""
    stored = {tensor.dtype for _, tensor in assembly.parts}
    if assembly.dtype is None:
        return {}, f"made by {assembly.operations}"
    # Every operation that FileSpans allow only moves elements, so it may come before the conversion as well as after.
    if len(stored) > 1 or not all(dtype == assembly.dtype or dtype.is_floating_point for dtype in stored):
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in stored))
        return {}, f"converted from {names} to {str(assembly.dtype).removeprefix('torch.')}"
    try:
        made = assembly.run(model, FileSpans.of)
        return {name: value.to_source(assembly.dtype) for name, value in made.items()}, ""
    except Exception:  # NotStretchesError, or an error of any type of an operation that needs real tensors
        return {}, f"rearranged by {assembly.operations}"


def _shapes(
    model: PreTrainedModel, assembly: Assembly, state: Mapping[str, torch.Tensor]
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what ``assembly`` makes, by a run on ``meta``."""
    if assembly.dtype is None:  # its code reads numbers, such as a shape that the file holds
        return {assembly.target: tuple(state[assembly.target].shape)}

    def get(tensor: FileTensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=assembly.dtype, device="meta")

    try:
        return {name: tuple(value.shape) for name, value in assembly.run(model, get).items()}
    except Exception as error:  # conversion code raises errors of any type for shapes that it does not expect
        raise _misfit(assembly, error) from error


def _misfit(assembly: Assembly, error: Exception) -> CheckpointError:
    shapes = Counter(tensor.shape for _, tensor in assembly.parts)
    parts = sorted((tensor for _, tensor in assembly.parts), key=lambda tensor: shapes[tensor.shape])  # odd ones first
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
        except Exception as error:  # as in _shapes(), which does not run what reads numbers
            raise _misfit(assembly, error) from error
        for name, tensor in expected.items():
            if made[name].shape != tensor.shape:  # known now where it depends on what the files hold
                _fit(name, tuple(made[name].shape), assembly, tensor)
        return {name: made[name].to(tensor.dtype).contiguous() for name, tensor in expected.items()}

    return Conversion(names, tuple({tensor.name: tensor for _, tensor in assembly.parts}.values()), make)


# -- stretches of files in place of tensors ---------------------------------------------------------------------------


class NotStretchesError(Exception):
    """The operation does more than stack, concatenate and cut; internal, never seen by users."""


class FileSpans:
    """Stands in for a tensor in ``torch.stack``, ``cat``, ``chunk``, ``split`` and ``.contiguous()``.

    It has the shape, the dtype, and the stretches of files that hold the bytes in row-major order. transformers fuses,
    splits and rearranges weights while it loads. Stacking, concatenating, cutting and reshaping stretches gives
    stretches again, and the result can be read from the unmodified files into place; any other operation fails.
    """

    # Not by the names of conversions, which change from release to release; and not by a conversion of tensors of
    # running numbers, which takes eight bytes per element, several times the memory of the weights.

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, stretches: Iterable[FileTensor]) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.stretches = list(stretches)

    @classmethod
    def of(cls, tensor: FileTensor) -> FileSpans:
        """All of one tensor of a file."""
        return cls(tensor.shape, tensor.dtype, [tensor])

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Only these keep rows of bytes whole. Any other operation, a new one too, makes the tensor a recipe.
        handler = _HANDLERS.get(function)
        if handler is None:
            raise NotStretchesError(getattr(function, "__name__", str(function)))
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
        """Itself: stretches are in row-major order."""
        return self

    def reshape(self, *shape: Any) -> FileSpans:
        """The same stretches in another shape, at most one length -1, as ``torch.Tensor.reshape`` has it."""
        try:
            lengths = torch.empty(self.shape, device="meta").reshape(*shape).shape
        except RuntimeError as error:
            raise NotStretchesError(f"reshape of {list(self.shape)} to {list(shape)}") from error
        return FileSpans(lengths, self.dtype, self.stretches)

    view = reshape

    def squeeze(self, dim: int) -> FileSpans:
        """Without a dimension of length one."""
        dim = range(self.ndim)[dim]
        return self if self.shape[dim] != 1 else FileSpans(_without(self.shape, dim), self.dtype, self.stretches)

    def to_source(self, dtype: torch.dtype | None = None) -> TensorSource:
        """Where the bytes are, neighbours joined, for a tensor of ``dtype`` (default that of the files).

        Raises:
            NotStretchesError: in too many small pieces to be read in time.
        """
        joined: list[FileTensor] = []
        for stretch in self.stretches:
            last = joined[-1] if joined else None
            if last is not None and (last.path, last.offset + last.num_bytes) == (stretch.path, stretch.offset):
                joined[-1] = _part(last, 0, last.num_bytes + stretch.num_bytes)
            else:
                joined.append(stretch)
        num_bytes = sum(stretch.num_bytes for stretch in joined)
        if len(joined) > max(_FEW_STRETCHES, num_bytes // _WORTH_A_READ_BYTES):
            raise NotStretchesError(f"{len(joined)} pieces of {num_bytes // len(joined)} bytes")
        dtype = dtype or self.dtype
        starts = itertools.accumulate((stretch.num_bytes // self.dtype.itemsize for stretch in joined), initial=0)
        offsets = (start * dtype.itemsize for start in starts)
        return TensorSource(tuple(map(FilePart, joined, offsets)), tuple(self.shape), dtype)


def _cat(tensors: Sequence[FileSpans], dim: int = 0) -> FileSpans:
    first = tensors[0]
    dim = range(first.ndim)[dim]
    if len({(_without(tensor.shape, dim), tensor.dtype) for tensor in tensors}) > 1:
        raise NotStretchesError(f"cat of {', '.join(str(list(tensor.shape)) for tensor in tensors[:4])}")
    shape = [*first.shape[:dim], sum(tensor.shape[dim] for tensor in tensors), *first.shape[dim + 1 :]]
    num_rows = math.prod(first.shape[:dim])
    rows = [_cut(tensor.stretches, [_num_bytes(tensor) // num_rows] * num_rows) for tensor in tensors]
    return FileSpans(shape, first.dtype, [piece for row in zip(*rows, strict=True) for part in row for piece in part])


def _stack(tensors: Sequence[FileSpans], dim: int = 0) -> FileSpans:
    dim = range(tensors[0].ndim + 1)[dim]
    return _cat([FileSpans([*t.shape[:dim], 1, *t.shape[dim:]], t.dtype, t.stretches) for t in tensors], dim)


def _split(tensor: FileSpans, sizes: int | Sequence[int], dim: int = 0) -> tuple[FileSpans, ...]:
    dim = range(tensor.ndim)[dim]
    length = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    num_rows = math.prod(tensor.shape[:dim])
    unit = _num_bytes(tensor) // (num_rows * length)
    pieces = _cut(tensor.stretches, [size * unit for _ in range(num_rows) for size in sizes])
    parts = []
    for index, size in enumerate(sizes):
        shape = [*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]]
        of_every_row = [stretch for piece in pieces[index :: len(sizes)] for stretch in piece]
        parts.append(FileSpans(shape, tensor.dtype, of_every_row))
    return tuple(parts)


def _chunk(tensor: FileSpans, chunks: int, dim: int = 0) -> tuple[FileSpans, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.split: _split,
    torch.chunk: _chunk,
}


def _num_bytes(tensor: FileSpans) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _cut(stretches: Sequence[FileTensor], sizes: Sequence[int]) -> list[list[FileTensor]]:
    """Cut the run of ``stretches`` into consecutive pieces of these sizes, in bytes."""
    left = list(reversed(stretches))
    pieces: list[list[FileTensor]] = []
    for size in sizes:
        piece: list[FileTensor] = []
        while size:
            stretch = left.pop()
            if stretch.num_bytes > size:
                left.append(_part(stretch, size, stretch.num_bytes - size))
                stretch = _part(stretch, 0, size)
            piece.append(stretch)
            size -= stretch.num_bytes
        pieces.append(piece)
    return pieces


def _part(stretch: FileTensor, start: int, num_bytes: int) -> FileTensor:
    """Bytes from ``start`` of a stretch on; more than it has where its neighbour in the file follows."""
    shape = (num_bytes // stretch.dtype.itemsize,)
    return FileTensor(stretch.name, stretch.dtype, shape, stretch.path, stretch.offset + start, num_bytes)
