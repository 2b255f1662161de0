"""One walk over a model: every tensor it owns, under every name, and the memory behind it.

Everything that enumerates tensors uses :func:`take_inventory`; nothing else walks ``_parameters`` or ``_buffers``.

A module object with several parents goes by its first name, as in ``named_modules``; the other places are in
``Inventory.shared``, and the names that they give to tensors in ``TensorInfo.aliases``.

The unit of bookkeeping is the *storage*, not the tensor: tied weights, views and cached ``.view()`` attributes share
one storage, so they have to travel together and come back as views of one another. A :class:`StorageInfo` therefore
lists the tensors that view it, each with its own offset, shape and strides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from headrace.errors import OptionError, StateError

__all__ = ["Inventory", "Location", "Place", "StorageInfo", "TensorInfo", "common_prefix", "take_inventory"]

Kind = Literal["parameter", "buffer", "attribute"]

# These hand a child's weight to a kernel without calling the child, whose hooks would never run.
_READS_CHILDREN = frozenset({"MultiheadAttention"})

# Shared modules inside shared modules have exponentially many names; beyond so many per module only the shortest count.
_NAMES_PER_MODULE = 4
_MIN_NAMES = 10_000


@dataclass(frozen=True)
class Location:
    """One place of a tensor: ``module.attr``, and for a tensor subclass the path to the inner tensor."""

    module: str
    attr: str
    kind: Kind
    inner: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Dotted name, e.g. ``layers.0.mlp.up_proj.weight``; inner tensors follow a colon."""
        return ":".join((_join(self.module, self.attr), *self.inner))


@dataclass(frozen=True)
class TensorInfo:
    """One tensor object, described without its data.

    Attributes:
        locations: all places that hold this very object; the first gives its name. More than one means a tie.
        byte_offset: from the first byte of its :class:`StorageInfo`.
        shape, stride: in elements, as torch reports them.
        dtype: element type; ``num_bytes`` follows from it for packed and integer types alike.
        aliases: further names, by which it is found where a module around it has several parents.
    """

    locations: tuple[Location, ...]
    byte_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The first name."""
        return self.locations[0].name

    @property
    def names(self) -> tuple[str, ...]:
        """Every name."""
        return (*(place.name for place in self.locations), *self.aliases)

    @property
    def kind(self) -> Kind:
        """Parameter, buffer, or a plain attribute that views one of them."""
        return self.locations[0].kind

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
        return torch.empty(self.shape, device="meta").stride() == self.stride


@dataclass(frozen=True)
class StorageInfo:
    """A stretch of memory and the tensors that view it; the smallest thing that can be offloaded.

    Attributes:
        tensors: at least one; the first parameter or buffer names the storage.
        num_bytes: the stretch all its tensors cover together.
        is_lookup: only embedding modules hold it, so a forward reads a few of its rows.
        is_saved: a ``state_dict`` has it; false for buffers that are not persistent, which no checkpoint file holds.
    """

    tensors: tuple[TensorInfo, ...]
    num_bytes: int
    is_lookup: bool = False
    is_saved: bool = True

    @cached_property
    def name(self) -> str:
        """Name of its first tensor."""
        return self.tensors[0].name

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every name of every tensor in it."""
        return tuple(name for tensor in self.tensors for name in tensor.names)

    @cached_property
    def modules(self) -> frozenset[str]:
        """The modules that hold any of its tensors."""
        return frozenset(place.module for tensor in self.tensors for place in tensor.locations)

    @property
    def has_parameter(self) -> bool:
        """Whether any of its tensors is a parameter."""
        return any(tensor.kind == "parameter" for tensor in self.tensors)


@dataclass(frozen=True)
class Place:
    """One place of a module: child ``attr`` of ``parent``; the name of the module may come from another place."""

    parent: str
    attr: str
    module: str


@dataclass(frozen=True)
class Inventory:
    """All storages of a model, in the order of ``named_modules``.

    Attributes:
        storages: those with bytes.
        empty: names of 0-element tensors (placeholders); they never move.
        modules: module names in order, with the class name of each.
        lookups: names of the embedding modules; unlike ``StorageInfo.is_lookup`` this includes tied tables.
        containers: names of the modules without a ``forward`` (``ModuleList``, ``ParameterList``, a bare ``Module``).
        shared: the further places of modules that have several.
    """

    storages: tuple[StorageInfo, ...]
    empty: tuple[str, ...]
    modules: dict[str, str]
    lookups: frozenset[str] = frozenset()
    containers: frozenset[str] = frozenset()
    shared: tuple[Place, ...] = ()

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
        return [place.module for place in self.places(module) if place.module == _join(module, place.attr)]

    def places(self, module: str) -> list[Place]:
        """The modules directly below ``module``: its children, then modules whose name comes from another place."""
        return self._places.get(module, [])

    @cached_property
    def _places(self) -> dict[str, list[Place]]:
        found: dict[str, list[Place]] = {}
        own = (Place(name.rpartition(".")[0], name.rpartition(".")[2], name) for name in self.modules if name)
        for place in (*own, *self.shared):
            found.setdefault(place.parent, []).append(place)
        return found

    def dominators(self, module: str) -> tuple[str, ...]:
        """The modules on every path from the root to ``module``, outermost first, ``module`` itself last."""
        # Without shared modules every module has one path from the root, and all modules on it dominate it.
        return self._dominators[module] if self.shared else dotted_prefixes(module)

    def ancestors(self, module: str) -> frozenset[str]:
        """The modules on any path from the root to ``module``, itself left out: it may run inside each of them."""
        if not self.shared:
            return frozenset(dotted_prefixes(module)[:-1])
        found: set[str] = set()
        left = list(self._parents[module])
        while left:
            if (name := left.pop()) not in found:
                found.add(name)
                left += self._parents[name]
        return frozenset(found - {module})

    @cached_property
    def _parents(self) -> dict[str, list[str]]:
        parents = {name: [name.rpartition(".")[0]] if name else [] for name in self.modules}
        for place in self.shared:
            parents[place.module].append(place.parent)
        return parents

    @cached_property
    def _dominators(self) -> dict[str, tuple[str, ...]]:
        """By iteration to a fixed point (Allen and Cocke 1972); modules come after the parent in their first name."""
        found: dict[str, tuple[str, ...]] = {"": ("",)}
        changed = True
        while changed:
            changed = False
            for name in self.modules:
                known = [found[parent] for parent in self._parents[name] if parent in found]
                chain = (*common_prefix(known), name) if name else ("",)
                changed |= found.get(name) != chain
                found[name] = chain
        return found

    @cached_property
    def uncalled(self) -> frozenset[str]:
        """Modules whose hooks never run: they have no forward, or a module around them reads their tensors itself."""
        readers = {name for name, kind in self.modules.items() if kind in _READS_CHILDREN}
        inside = {name for name in self.modules if readers and not readers.isdisjoint(self.ancestors(name))}
        return self.containers | inside

    def under(self, module: str) -> list[StorageInfo]:
        """Storages that are reached through ``module`` alone: what its forward alone reads; in model order."""
        return list(self._under.get(module, ()))

    @cached_property
    def _under(self) -> dict[str, list[StorageInfo]]:
        """Storages by module; each is listed under every module on all paths from the root to all its owners."""
        found: dict[str, list[StorageInfo]] = {}
        for storage in self.storages:
            for name in common_prefix([self.dominators(module) for module in storage.modules]):
                found.setdefault(name, []).append(storage)
        return found


def is_within(module: str, ancestor: str) -> bool:
    """Whether dotted name ``module`` is ``ancestor`` or lies below it."""
    return not ancestor or module == ancestor or module.startswith(ancestor + ".")


def common_prefix(chains: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The longest common beginning of ``chains``, of which there is at least one."""
    return tuple(names[0] for names in takewhile(lambda names: len(set(names)) == 1, zip(*chains, strict=False)))


def dotted_prefixes(module: str) -> tuple[str, ...]:
    """``""``, ``a`` and ``a.b`` for ``a.b``."""
    parts = module.split(".") if module else []
    return tuple(".".join(parts[:count]) for count in range(len(parts) + 1))


def is_embedding(module: nn.Module) -> bool:
    """Whether ``module`` is one of torch's lookup tables."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def take_inventory(model: nn.Module, is_lookup: Callable[[nn.Module], bool] = is_embedding) -> Inventory:
    """Describe every parameter, buffer and aliasing plain attribute of ``model``; reads no data.

    Works on any device, ``meta`` included. Tensor subclasses that implement ``__tensor_flatten__`` are described by
    their inner tensors.

    Args:
        model: the root.
        is_lookup: whether a forward of a module reads only a few rows of what it holds; engines have other classes.

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
        Place(parent, attr, names[id(child)])
        for parent, module in modules.items()
        for attr, child in module._modules.items()
        if child is not None and names[id(child)] != _join(parent, attr)
    )
    lookups = frozenset(name for name, module in modules.items() if is_lookup(module))
    walk = _Walk(lookups, _aliases(model, names) if shared else {})
    walk.add(modules)
    # The forward that ``nn.Module`` itself has only raises.
    without_forward = (name for name, module in modules.items() if type(module).forward is nn.Module.forward)
    containers = (name for name in without_forward if "forward" not in vars(modules[name]))
    order = {name: index for index, name in enumerate(modules)}
    storages = sorted(walk.storages(), key=lambda storage: order[storage.tensors[0].locations[0].module])
    return Inventory(
        tuple(storages),
        tuple(walk.empty),
        {name: type(module).__name__ for name, module in modules.items()},
        lookups,
        frozenset(containers),
        shared,
    )


def _join(parent: str, attr: str) -> str:
    return f"{parent}.{attr}" if parent else attr


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
                left.append((_join(name, attr), (*path, child)))
    return found


def inner_tensors(tensor: torch.Tensor) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The plain tensors inside ``tensor`` with the attribute path to each; itself under ``()`` if it is plain."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield (), tensor
        return
    names, _context = tensor.__tensor_flatten__()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):  # a DTensor lists its device mesh too
            for path, inner in inner_tensors(part):
                yield (name, *path), inner


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
                f"{_join(module, attr)}: expected a tensor with a shape, found {type(tensor).__name__}, to which the "
                f"first forward of its lazy module gives one; run the model once on an example, then offload it"
            )
        for path, inner in inner_tensors(tensor):
            place = Location(module, attr, kind, path)
            if inner.layout is not torch.strided or inner.is_quantized:
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
