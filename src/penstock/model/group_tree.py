"""The parameters of a model by the module that holds them, and what the tree of modules says about layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.model.inventory import Inventory

__all__ = ["HeldParameter", "ModuleTree", "ancestors", "last_segment", "parent"]


class HeldParameter(NamedTuple):
    """A parameter in the place where a module holds it; tied ones are in several places."""

    module: str
    attr: str
    shape: tuple[int, ...]
    storage: str
    num_bytes: int

    @property
    def is_matrix(self) -> bool:
        """Whether it has two or more dimensions; the others (norms, biases) say nothing about structure."""
        return len(self.shape) >= 2


class ModuleTree:
    """An index of an inventory for questions about subtrees.

    Attributes:
        layers: outermost modules whose last segment is a number and that hold parameters, in model order. One is
            enough, unlike for the planner's stacks: a model of one layer has an attention block, too.
        lookups: embedding modules in model order.
    """

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self._held: dict[str, list[HeldParameter]] = {}
        self._below: dict[str, list[HeldParameter]] = {}
        for held in _parameters(inventory):
            self._held.setdefault(held.module, []).append(held)
            for module in (held.module, *ancestors(held.module)):
                self._below.setdefault(module, []).append(held)
        self.layers = tuple(self._outermost_numbered())
        self.lookups = tuple(name for name in inventory.modules if name in inventory.lookups)
        self._num_layers = _counts_below(name for name in self.layers if any(len(s) == 2 for s in self.shapes(name)))
        self._num_lookups = _counts_below(self.lookups)

    def held_by(self, module: str) -> list[HeldParameter]:
        """What ``module`` itself holds."""
        return self._held.get(module, [])

    def below(self, module: str) -> list[HeldParameter]:
        """What ``module`` and all modules inside it hold."""
        return self._below.get(module, [])

    def matrices(self, module: str) -> list[HeldParameter]:
        """Of :meth:`below`, those with two or more dimensions."""
        return [held for held in self.below(module) if held.is_matrix]

    def shapes(self, module: str) -> list[tuple[int, ...]]:
        """Shapes of :meth:`matrices`."""
        return [held.shape for held in self.matrices(module)]

    def children(self, module: str) -> list[str]:
        """Direct children of ``module``, in order."""
        return self.inventory.children(module)

    def num_layers(self, module: str) -> int:
        """Layers with a 2-D weight at or below ``module``; a stem of convolutions does not count."""
        return self._num_layers.get(module, 0)

    def num_lookups(self, module: str) -> int:
        """Embedding modules at or below ``module``."""
        return self._num_lookups.get(module, 0)

    def _outermost_numbered(self) -> Iterator[str]:
        found: set[str] = set()
        for name in self.inventory.modules:
            if last_segment(name).isdigit() and name in self._below and found.isdisjoint(ancestors(name)):
                found.add(name)
                yield name


def parent(module: str) -> str:
    """The module around ``module``; that of the root is the root."""
    return module.rpartition(".")[0]


def last_segment(module: str) -> str:
    """The name of ``module`` in its parent."""
    return module.rpartition(".")[2]


def ancestors(module: str) -> Iterator[str]:
    """Every module around ``module``, the innermost first, the root last."""
    while module:
        module = parent(module)
        yield module


def _parameters(inventory: Inventory) -> Iterator[HeldParameter]:
    for storage in inventory.storages:
        for tensor in storage.tensors:
            for place in tensor.locations:
                if place.kind == "parameter":
                    yield HeldParameter(place.module, place.attr, tensor.shape, storage.name, storage.num_bytes)


def _counts_below(modules: Iterator[str] | tuple[str, ...]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in modules:
        for module in (name, *ancestors(name)):
            counts[module] = counts.get(module, 0) + 1
    return counts
