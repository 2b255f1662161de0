"""One walk over a model: every tensor it owns, under every name, and the memory behind it.

Everything that enumerates tensors uses :func:`take_inventory`; nothing else walks ``_parameters`` or ``_buffers``.

The unit of bookkeeping is the *storage*, not the tensor: tied weights, views and cached ``.view()`` attributes share
one storage, so they have to travel together and come back as views of one another. A :class:`StorageInfo` therefore
lists the tensors that look into it, each with its own offset, shape and strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import nn

__all__ = ["Inventory", "Location", "StorageInfo", "TensorInfo", "take_inventory"]

Kind = Literal["parameter", "buffer", "attribute"]


@dataclass(frozen=True)
class Location:
    """Where a tensor hangs: ``module.attr``, and for a tensor subclass the path to the inner tensor."""

    module: str
    attr: str
    kind: Kind
    inner: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Dotted name, e.g. ``layers.0.mlp.up_proj.weight``; inner tensors follow a colon."""
        base = f"{self.module}.{self.attr}" if self.module else self.attr
        return ":".join((base, *self.inner))


@dataclass(frozen=True)
class TensorInfo:
    """One tensor object, described without its data.

    Attributes:
        locations: all places that hold this very object; the first gives its name. More than one means a tie.
        byte_offset: from the first byte of its :class:`StorageInfo`.
        shape, stride: in elements, as torch reports them.
        dtype: element type; ``num_bytes`` follows from it for packed and integer types alike.
    """

    locations: tuple[Location, ...]
    byte_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The first name."""
        return self.locations[0].name

    @property
    def kind(self) -> Kind:
        """Parameter, buffer, or a plain attribute that views one of them."""
        return self.locations[0].kind

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return torch.Size(self.shape).numel()

    @property
    def extent_bytes(self) -> int:
        """Bytes from the first to the last element, gaps of the strides included."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        return self.stride == _row_major(self.shape)


@dataclass(frozen=True)
class StorageInfo:
    """A stretch of memory and the tensors that look into it; the smallest thing that can be offloaded.

    Attributes:
        tensors: at least one; the first parameter or buffer names the storage.
        num_bytes: the stretch all its tensors cover together.
        is_lookup: only embedding modules hold it, so a forward reads a few of its rows.
    """

    tensors: tuple[TensorInfo, ...]
    num_bytes: int
    is_lookup: bool = False

    @cached_property
    def name(self) -> str:
        """Name of its first tensor."""
        return self.tensors[0].name

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every name of every tensor in it."""
        return tuple(place.name for tensor in self.tensors for place in tensor.locations)

    @cached_property
    def modules(self) -> frozenset[str]:
        """The modules that hold any of its tensors."""
        return frozenset(place.module for tensor in self.tensors for place in tensor.locations)

    @property
    def has_parameter(self) -> bool:
        """Whether any of its tensors is a parameter."""
        return any(tensor.kind == "parameter" for tensor in self.tensors)


@dataclass(frozen=True)
class Inventory:
    """All storages of a model, in the order of ``named_modules``.

    Attributes:
        storages: those with bytes.
        empty: names of 0-element tensors (placeholders); they never move.
        modules: module names in order, with the class name of each.
        opaque: names of tensors whose bytes are not plain memory (sparse, quantised by torch's own types); they never
            move, and no figure counts them.
        lookups: names of the embedding modules; unlike ``StorageInfo.is_lookup`` this tells them for tied tables too.
    """

    storages: tuple[StorageInfo, ...]
    empty: tuple[str, ...]
    modules: dict[str, str]
    opaque: tuple[str, ...] = ()
    lookups: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages."""
        return sum(storage.num_bytes for storage in self.storages)

    @cached_property
    def by_name(self) -> dict[str, StorageInfo]:
        """Storage of every tensor name."""
        return {name: storage for storage in self.storages for name in storage.names}

    def children(self, module: str) -> list[str]:
        """Direct children of ``module`` (``""`` is the root), in order."""
        return self._children.get(module, [])

    @cached_property
    def _children(self) -> dict[str, list[str]]:
        children: dict[str, list[str]] = {}
        for name in self.modules:
            if name:
                children.setdefault(name.rpartition(".")[0], []).append(name)
        return children

    def under(self, module: str) -> list[StorageInfo]:
        """Storages all of whose tensors hang at or below ``module``: what its forward alone reads; in model order."""
        return list(self._under.get(module, ()))

    @cached_property
    def _under(self) -> dict[str, list[StorageInfo]]:
        """By every module that has any: a storage under the module that holds all its owners, and those around."""
        found: dict[str, list[StorageInfo]] = {}
        for storage in self.storages:
            parts = _common_ancestor(storage.modules)
            for count in range(len(parts) + 1):
                found.setdefault(".".join(parts[:count]), []).append(storage)
        return found


def is_within(module: str, ancestor: str) -> bool:
    """Whether dotted name ``module`` is ``ancestor`` or lies below it."""
    return not ancestor or module == ancestor or module.startswith(ancestor + ".")


def _common_ancestor(modules: Iterable[str]) -> list[str]:
    """The segments that all of ``modules`` begin with."""
    parts = [module.split(".") if module else [] for module in modules]
    first, last = min(parts), max(parts)
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:shared]


def is_embedding(module: nn.Module) -> bool:
    """Whether ``module`` is one of torch's lookup tables."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def take_inventory(model: nn.Module, is_lookup: Callable[[nn.Module], bool] = is_embedding) -> Inventory:
    """Describe every parameter, buffer and aliasing plain attribute of ``model``; reads no data.

    Works on any device, ``meta`` included. Tensor subclasses that implement ``__tensor_flatten__`` are described by
    their inner tensors.

    Args:
        model: the root.
        is_lookup: whether a forward of a module reads only a few rows of what it holds; engines have own classes.
    """
    walk = _Walk(is_lookup)
    modules = {name: type(module).__name__ for name, module in model.named_modules()}
    for name, module in model.named_modules():
        walk.add_module(name, module)
    for name, module in model.named_modules():
        walk.add_attributes(name, module)
    order = {name: index for index, name in enumerate(modules)}
    storages = sorted(walk.storages(), key=lambda storage: order[storage.tensors[0].locations[0].module])
    return Inventory(tuple(storages), tuple(walk.empty), modules, tuple(walk.opaque), frozenset(walk.lookups))


def inner_tensors(tensor: torch.Tensor) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The plain tensors inside ``tensor`` with the attribute path to each; itself under ``()`` if it is plain."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield (), tensor
        return
    names, _context = flatten()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):  # a DTensor lists its device mesh too
            for path, inner in inner_tensors(part):
                yield (name, *path), inner


class _Walk:
    """Collects tensors by storage identity, then turns each group into a :class:`StorageInfo`."""

    def __init__(self, is_lookup: Callable[[nn.Module], bool]) -> None:
        self._is_lookup = is_lookup
        self.empty: list[str] = []
        self.opaque: list[str] = []
        self._tensors: dict[int, tuple[torch.Tensor, list[Location]]] = {}
        self._groups: dict[int, list[int]] = {}
        self.lookups: set[str] = set()

    def add_module(self, name: str, module: nn.Module) -> None:
        if self._is_lookup(module):
            self.lookups.add(name)
        for attr, parameter in module._parameters.items():
            self._add(name, attr, "parameter", parameter)
        for attr, buffer in module._buffers.items():
            self._add(name, attr, "buffer", buffer)

    def add_attributes(self, name: str, module: nn.Module) -> None:
        # A cached `.view()` or `.t()` keeps the old bytes alive and would go stale unless it moves along.
        for attr, value in vars(module).items():
            if isinstance(value, torch.Tensor) and _storage_key(value) in self._groups:
                self._add(name, attr, "attribute", value)

    def _add(self, module: str, attr: str, kind: Kind, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            return
        for path, inner in inner_tensors(tensor):
            place = Location(module, attr, kind, path)
            if inner.layout is not torch.strided or inner.is_quantized:
                self.opaque.append(place.name)
            elif inner.numel() == 0:
                self.empty.append(place.name)
            elif id(inner) in self._tensors:
                self._tensors[id(inner)][1].append(place)
            else:
                self._tensors[id(inner)] = (inner, [place])
                self._groups.setdefault(_storage_key(inner), []).append(id(inner))

    def storages(self) -> Iterator[StorageInfo]:
        for members in self._groups.values():
            infos = [_describe(*self._tensors[member]) for member in members]
            for cluster in _overlapping(infos):
                # Not simply where the first begins: a view of another dtype must keep its alignment.
                start = cluster[0].byte_offset // (align := max(info.dtype.itemsize for info in cluster)) * align
                end = max(info.byte_offset + info.extent_bytes for info in cluster)
                tensors = [replace(info, byte_offset=info.byte_offset - start) for info in cluster]
                # Attributes only ever follow: the first tensor gives the storage its name.
                tensors.sort(key=lambda info: info.kind == "attribute")
                holders = {place.module for info in tensors for place in info.locations}
                yield StorageInfo(tuple(tensors), end - start, holders <= self.lookups)


def _overlapping(infos: list[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """Split tensors of one storage into clusters that share bytes.

    Loaders that map a checkpoint hand out every tensor of a file as a view of one storage; those are neighbours, not
    aliases, and each may go its own way.
    """
    cluster: list[TensorInfo] = []
    end = 0
    for info in sorted(infos, key=lambda info: info.byte_offset):
        if cluster and info.byte_offset >= end:
            yield cluster
            cluster = []
        cluster.append(info)
        end = max(end, info.byte_offset + info.extent_bytes)
    if cluster:
        yield cluster


def _describe(tensor: torch.Tensor, places: list[Location]) -> TensorInfo:
    offset = int(tensor.storage_offset()) * tensor.dtype.itemsize
    return TensorInfo(tuple(places), offset, tuple(tensor.shape), tuple(map(int, tensor.stride())), tensor.dtype)


def _storage_key(tensor: torch.Tensor) -> int:
    # The address of the StorageImpl: meta storages have no data pointer, yet ties of meta tensors must be seen.
    if hasattr(tensor, "__tensor_flatten__") or tensor.layout is not torch.strided:
        return 0  # no storage of its own
    return int(tensor.untyped_storage()._cdata)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
