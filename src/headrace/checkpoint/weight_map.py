"""The bytes of a checkpoint that make each tensor of a model.

A tensor of the model may be one tensor of the file, the same under another name, or several of them side by side
(fused experts are their members in a row). All of these are contiguous ranges of a file that go to an offset of the
destination, so that a slot can be filled by plain positional reads of the unmodified files. Their elements may have
another dtype in the file; they are converted as they are read. Any other tensor, such as a transposed one, has a
conversion: it can be loaded, and not streamed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.checkpoint.safetensors_header import Checkpoint, FileTensor
from headrace.errors import CheckpointError, OptionTypeError
from headrace.memory.system import round_up
from headrace.model.records import Inventory, StorageInfo, TensorInfo

if TYPE_CHECKING:
    import torch

_FIX = (
    "The checkpoint is of another model, or was saved without this tensor, or with names or shapes that transformers "
    "changes while it loads (older names, unfused experts). Load the last with headrace.adapters.transformers.load; "
    "for the others: pass checkpoint= of this model."
)


class FilePart(NamedTuple):  # as many as there are tensors in the files
    """All elements of one file tensor, and the byte offset where they start in the model's tensor."""

    tensor: FileTensor
    offset: int = 0


@dataclass(frozen=True)
class TensorSource:
    """Source of one tensor of the model.

    Attributes:
        parts: cover the tensor without gaps or overlaps, in order of offset.
        shape: shape of the model's tensor that the parts make.
        dtype: dtype of the model's tensor; parts of another dtype are converted while they are read.
    """

    parts: tuple[FilePart, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: FileTensor) -> TensorSource:
        """A tensor that is one tensor of the file."""
        return cls((FilePart(tensor),), tensor.shape, tensor.dtype)

    @property
    def is_converted(self) -> bool:
        """Whether its bytes are not those of the files."""
        return any(part.tensor.dtype != self.dtype for part in self.parts)

    @property
    def file_bytes(self) -> int:
        """Bytes in the files."""
        return sum(part.tensor.num_bytes for part in self.parts)

    @property
    def why_not_mappable(self) -> str:
        """Why the mapped pages of its parts, side by side, are not the tensor; empty if they are. Follows its name."""
        if self.is_converted:
            return f"is {self.parts[0].tensor.dtype} in the checkpoint and {self.dtype} in the model"
        starts = {part.tensor.offset % mmap.PAGESIZE for part in self.parts}
        if min(starts) % self.dtype.itemsize:
            return f"starts in its file at no multiple of the {self.dtype.itemsize} bytes of an element"
        if len(starts) > 1 or any(part.tensor.num_bytes % mmap.PAGESIZE for part in self.parts[:-1]):
            return f"lies in {len(self.parts)} pieces in the checkpoint, which do not meet at whole pages,"
        return ""

    @property
    def joined_bytes(self) -> int:
        """Memory for the pages in which mapped parts meet (:func:`headrace.memory.pages.map_parts`)."""
        return (len(self.parts) - 1) * mmap.PAGESIZE if self.parts[0].tensor.offset % mmap.PAGESIZE else 0


@dataclass(frozen=True, eq=False)
class Conversion:
    """Computes tensors of the model from tensors of the files.

    Attributes:
        names: names of the model's tensors, the outputs.
        parts: the inputs.
        make: from the parts, by their names in the files and unchanged, to the model's tensors by name, in the
            model's dtype and contiguous.
    """

    names: tuple[str, ...]
    parts: tuple[FileTensor, ...]
    make: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class WeightMap:
    """A checkpoint with, for every name of the model, its source in the files.

    Attributes:
        checkpoint: the opened files.
        sources: by tensor name of the model.
        recipes: by tensor name of the model, of those without a source.
    """

    checkpoint: Checkpoint
    sources: Mapping[str, TensorSource]
    recipes: Mapping[str, Conversion] = field(default_factory=dict)

    @classmethod
    def open(cls, weights: WeightMap | Checkpoint | str | os.PathLike[str]) -> WeightMap:
        """A weight map as given, or one in which the names of a checkpoint (or of a path to one) are the model's.

        Raises:
            OptionTypeError: none of these.
            CheckpointError: see :meth:`Checkpoint.open`.
        """
        if isinstance(weights, WeightMap):
            return weights
        if not isinstance(weights, Checkpoint | str | os.PathLike):
            raise OptionTypeError(
                f"checkpoint: expected the path of a folder or file of safetensors, a Checkpoint or a WeightMap, found "
                f"{type(weights).__name__} {weights!r}"
            )
        checkpoint = weights if isinstance(weights, Checkpoint) else Checkpoint.open(weights)
        return cls(checkpoint, {name: TensorSource.of(tensor) for name, tensor in checkpoint.tensors.items()})

    @classmethod
    def expected(cls, inventory: Inventory, root: Path) -> WeightMap:
        """Weight map of a model whose files are not here, as if one file held every tensor unchanged and aligned."""
        sources, file, offset = {}, root.absolute() / "model.safetensors", 0
        for storage in inventory.storages:
            if storage.is_saved and (found := _names_of(storage)):
                tensor, name = found[0]
                part = FileTensor(name, tensor.dtype, tensor.shape, file, offset, storage.num_bytes)
                sources[name] = TensorSource.of(part)
                offset += round_up(storage.num_bytes, mmap.PAGESIZE)
        return cls(Checkpoint(root.absolute(), {}, ()), sources)

    def source(self, storage: StorageInfo) -> TensorSource:
        """The source of the bytes of ``storage``, found under any name of the tensor that covers it.

        Raises:
            CheckpointError: no such tensor, or its dtype, shape or layout disagrees with the model's.
        """
        # A file holds tied weights under one of their names, and not always under the model's first.
        for tensor, name in _names_of(storage):
            if name in self.sources:
                return _checked(name, tensor, self.sources[name], self.checkpoint)
        if storage.name not in self.checkpoint.tensors:
            raise self.checkpoint.lacks(storage.name, _FIX)
        raise CheckpointError(
            f"{storage.name}: {self.checkpoint.root} holds the tensor, but not in the form this model needs (it is "
            f"rearranged while loading); offload it with mode 'cpu' or keep it resident"
        )

    def sources_of(self, inventory: Inventory) -> Iterator[tuple[StorageInfo, TensorSource]]:
        """The storages that files hold, under any of their names."""
        for storage in inventory.storages:
            source = next((self.sources[name] for name in storage.names if name in self.sources), None)
            if source is not None:
                yield storage, source

    def converted_bytes(self, inventory: Inventory) -> dict[str, int]:
        """Bytes in the files of every storage that has another dtype there."""
        return {
            storage.name: source.file_bytes for storage, source in self.sources_of(inventory) if source.is_converted
        }

    def recipe(self, storage: StorageInfo) -> tuple[str, Conversion] | None:
        """The name of the tensor that covers ``storage`` and its recipe, if it has one."""
        for tensor, name in _names_of(storage):
            # The result of a recipe is contiguous; its bytes would be in the wrong order for other strides.
            if name in self.recipes and tensor.is_contiguous:
                return name, self.recipes[name]
        return None


def _names_of(storage: StorageInfo) -> list[tuple[TensorInfo, str]]:
    """The tensors that own all bytes of ``storage``, each with every name that it has."""
    # An attribute that caches a view has no entry in a state_dict, and therefore none in a file.
    covering = (t for t in storage.tensors if t.extent_bytes == storage.num_bytes and t.kind != "attribute")
    return [(tensor, name) for tensor in covering for name in tensor.names]


def _checked(name: str, tensor: TensorInfo, source: TensorSource, checkpoint: Checkpoint) -> TensorSource:
    # No cast but those that transformers asks for: a checkpoint of another dtype is more often a mistake.
    if source.dtype != tensor.dtype:
        raise CheckpointError(
            f"{name}: the model expects {tensor.dtype}, {checkpoint.root} holds {source.dtype}; load the model with "
            f"dtype={source.dtype} or convert the checkpoint"
        )
    if tuple(source.shape) != tensor.shape:
        raise CheckpointError(
            f"{name}: the model expects shape {list(tensor.shape)}, {checkpoint.root} holds {list(source.shape)}; the "
            f"checkpoint belongs to another configuration, or transformers rearranges it while it loads: then use "
            f"headrace.adapters.transformers.load"
        )
    if not tensor.is_contiguous:
        raise CheckpointError(
            f"{name}: the model's tensor has strides {list(tensor.stride)}, the file is row-major; make it contiguous, "
            f"keep it resident, or use mode 'cpu'"
        )
    return source
