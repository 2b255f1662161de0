"""One walk over a model: every tensor it owns, under every name, and the memory behind it.

Everything that enumerates tensors uses :func:`take_inventory`; nothing else walks ``_parameters`` or ``_buffers``. What
it returns is described in :mod:`headrace.model.records`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from headrace.errors import OptionError, StateError
from headrace.model.records import (
    Inventory,
    Kind,
    Location,
    ModuleAlias,
    StorageInfo,
    TensorInfo,
    dotted_name,
)

# With the records that it makes.
# Attributes of a parameter that are objects with further tensors of it: scales and codes of bitsandbytes' 4 bits, and
# scales of these that are quantised themselves.
_SIDE_OBJECTS = ("quant_state", "state2")

# Shared modules inside shared modules have exponentially many names; beyond so many per module only the shortest count.
_NAMES_PER_MODULE = 4
_MIN_NAMES = 10_000


def is_embedding(module: nn.Module) -> bool:
    """Whether ``module`` is one of torch's lookup tables."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def take_inventory(
    model: nn.Module, is_lookup: Callable[[nn.Module], bool] = is_embedding, *, aliases: bool = True
) -> Inventory:
    """Describe every parameter, buffer and aliasing plain attribute of ``model``; reads no data.

    Works on any device, ``meta`` included. Tensor subclasses that implement ``__tensor_flatten__`` are described by
    their inner tensors.

    Args:
        model: the root.
        is_lookup: whether a forward of a module reads only a few rows of what it holds; engines have other classes.
        aliases: a tensor in a module that several modules hold has a name by each of them.

    Raises:
        OptionError: a module is TorchScript, whose code reads weights without running hooks.
        StateError: a tensor has no shape yet (lazy modules).
    """
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise OptionError(
                f"{f'module {name!r}' if name else 'the model'} ({type(module).__name__}) is TorchScript: expected a "
                f"module in Python, because TorchScript reads its weights without running hooks; offload the module "
                f"from which torch.jit.script or torch.jit.trace made it"
            )
    names = {id(module): name for name, module in modules.items()}
    shared = tuple(
        ModuleAlias(parent, attr, names[id(child)])
        for parent, module in modules.items()
        for attr, child in module._modules.items()
        if child is not None and names[id(child)] != dotted_name(parent, attr)
    )
    lookups = frozenset(name for name, module in modules.items() if is_lookup(module))
    walk = _Walk(lookups, _aliases(model, names) if shared and aliases else {})
    walk.add(modules)
    # The forward that ``nn.Module`` itself has only raises.
    without_forward = (name for name, module in modules.items() if type(module).forward is nn.Module.forward)
    containers = (name for name in without_forward if "forward" not in vars(modules[name]))
    order = {name: index for index, name in enumerate(modules)}
    storages = sorted(walk.storages(), key=lambda storage: order[storage.tensors[0].locations[0].module])
    classes = {name: type(module).__name__ for name, module in modules.items()}
    return Inventory(tuple(storages), tuple(walk.empty), classes, lookups, frozenset(containers), shared)


def _aliases(model: nn.Module, names: Mapping[int, str]) -> dict[str, list[str]]:
    """The further names of modules by their first, which ``names`` has by id; of very many the shortest."""
    found: dict[str, list[str]] = {}
    left: deque[tuple[str, tuple[nn.Module, ...]]] = deque([("", (model,))])
    for _ in range(max(_MIN_NAMES, _NAMES_PER_MODULE * len(names))):
        if not left:
            break
        name, path = left.popleft()
        if name != (first := names[id(path[-1])]):
            found.setdefault(first, []).append(name)
        for attr, child in path[-1]._modules.items():
            if child is not None and not any(child is outer for outer in path):  # a module may be inside itself
                left.append((dotted_name(name, attr), (*path, child)))
    return found


def inner_tensors(tensor: torch.Tensor) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The plain tensors inside ``tensor`` with the attribute path to each; itself under ``()`` if it is plain."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield (), tensor
        yield from _beside(getattr(tensor, "__dict__", {}), ())
        return
    names, _context = tensor.__tensor_flatten__()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):  # a DTensor lists its device mesh too
            for path, inner in inner_tensors(part):
                yield (name, *path), inner


def _beside(attributes: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The tensors in objects that a tensor has as attributes, such as scales, with the path to each."""
    for name in _SIDE_OBJECTS:
        if inside := getattr(attributes.get(name), "__dict__", None):
            found = ((key, value) for key, value in inside.items() if isinstance(value, torch.Tensor))
            yield from (((*path, name, key), value) for key, value in found)
            yield from _beside(inside, (*path, name))


def without_lora(name: str) -> str:
    """The name of a tensor before LoRA wrapped its module in one that has it as a child ``base_layer``."""
    return name.replace(".base_layer.", ".")


class _Walk:
    """Collects tensors by storage identity, then turns each group into a :class:`StorageInfo`."""

    def __init__(self, lookups: frozenset[str], aliases: Mapping[str, list[str]]) -> None:
        self._lookups = lookups
        self._aliases = aliases
        self._unsaved: set[tuple[str, str]] = set()
        self.empty: list[str] = []
        self._tensors: dict[int, tuple[torch.Tensor, list[Location]]] = {}
        self._groups: dict[int, list[int]] = {}

    def add(self, modules: Mapping[str, nn.Module]) -> None:
        for name, module in modules.items():
            for attr, parameter in module._parameters.items():
                self._add(name, attr, "parameter", parameter)
            for attr, buffer in module._buffers.items():
                self._add(name, attr, "buffer", buffer)
            self._unsaved.update((name, attr) for attr in module._non_persistent_buffers_set)
        # A cached `.view()` or `.t()` keeps the old bytes alive and would go stale unless it moves along.
        for name, module in modules.items():
            for attr, value in vars(module).items():
                if isinstance(value, torch.Tensor) and _storage_key(value) in self._groups:
                    self._add(name, attr, "attribute", value)

    def _add(self, module: str, attr: str, kind: Kind, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            return
        if is_lazy(tensor):
            raise StateError(
                f"{dotted_name(module, attr)}: expected a tensor with a shape, found {type(tensor).__name__}, to "
                f"which the first forward of its lazy module gives one; run the model once on an example, then offload "
                f"it"
            )
        for path, inner in inner_tensors(tensor):
            place = Location(module, attr, kind, path)
            if inner.layout is not torch.strided or inner.is_quantized or inner.is_nested:
                continue  # its bytes are not plain memory, so it never moves, and no figure counts it
            if inner.numel() == 0:
                self.empty.append(place.name)
            elif id(inner) in self._tensors:
                self._tensors[id(inner)][1].append(place)
            else:
                self._tensors[id(inner)] = (inner, [place])
                self._groups.setdefault(_storage_key(inner), []).append(id(inner))

    def storages(self) -> Iterator[StorageInfo]:
        for members in self._groups.values():
            infos = [self._describe(*self._tensors[member]) for member in members]
            for cluster in _overlapping(infos):
                # Not simply where the first begins: a view of another dtype must keep its alignment.
                start = cluster[0].byte_offset // (align := max(info.dtype.itemsize for info in cluster)) * align
                end = max(info.byte_offset + info.extent_bytes for info in cluster)
                tensors = [replace(info, byte_offset=info.byte_offset - start) for info in cluster]
                # Attributes only ever follow: the first tensor gives the storage its name.
                tensors.sort(key=lambda info: info.kind == "attribute")
                places = [place for info in tensors for place in info.locations]
                # A scalar, such as the scale of scaled embeddings, has no rows to look up.
                is_lookup = self._lookups.issuperset(place.module for place in places) and bool(tensors[0].shape)
                held = ((place.module, place.attr) for place in places if place.kind != "attribute")
                is_saved = any(place not in self._unsaved for place in held)
                yield StorageInfo(tuple(tensors), end - start, is_lookup, is_saved)

    def _describe(self, tensor: torch.Tensor, places: list[Location]) -> TensorInfo:
        offset = int(tensor.storage_offset()) * tensor.dtype.itemsize
        shape, stride = tuple(tensor.shape), tuple(map(int, tensor.stride()))
        aliases = tuple(
            replace(place, module=module).name for place in places for module in self._aliases.get(place.module, ())
        )
        return TensorInfo(tuple(places), offset, shape, stride, tensor.dtype, aliases)


def _overlapping(infos: list[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """Split tensors of one storage into clusters that share bytes."""
    cluster: list[TensorInfo] = []
    end = 0
    for info in sorted(infos, key=lambda info: info.byte_offset):
        # Loaders that map a checkpoint return every tensor of a file as a view of one storage. Those are neighbours
        # and not aliases, so each may be offloaded alone.
        if cluster and info.byte_offset >= end:
            yield cluster
            cluster = []
        cluster.append(info)
        end = max(end, info.byte_offset + info.extent_bytes)
    if cluster:
        yield cluster


def _storage_key(tensor: torch.Tensor) -> int:
    # The address of the StorageImpl and not data_ptr(): meta storages have no data pointer, yet ties of meta tensors
    # must be seen.
    if hasattr(tensor, "__tensor_flatten__") or tensor.layout is not torch.strided:
        return 0  # no storage of its own
    return int(tensor.untyped_storage()._cdata)
