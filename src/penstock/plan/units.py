"""Layers of a model, found by structure, and the group rule over them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.errors import SelectionError
from penstock.inventory import Inventory, StorageInfo, is_within
from penstock.plan.model import UnitDraft

__all__ = ["TINY_BYTES", "Stack", "find_stacks", "group_rule", "outside_units", "worth_moving"]

# Norms, biases and scales: together a thousandth of a layer, but each would cost a copy of its own.
TINY_BYTES = 64 * 2**10

_NUMBERED = re.compile(r"(.*?)\.?(\d+)")


@dataclass(frozen=True)
class Stack:
    """A run of numbered sibling modules that hold most of the weights: decoder layers, encoder blocks, ...

    Attributes:
        name: dotted name of the container.
        layers: dotted names, in order.
    """

    name: str
    layers: tuple[str, ...]


def find_stacks(inventory: Inventory) -> list[Stack]:
    """The outermost containers of at least two numbered children that own bytes, in model order.

    A model without such a container is treated as one stack of its leaf modules, so that any ``nn.Module`` has layers.
    """
    stacks: list[Stack] = []
    owners = {owner for storage in inventory.storages for owner in storage.modules}
    for name in inventory.modules:
        if any(is_within(name, layer) for stack in stacks for layer in stack.layers):
            continue
        layers = tuple(child for child in inventory.children(name) if _is_layer(child, owners))
        if len(layers) >= 2:
            stacks.append(Stack(name, layers))
    if stacks:
        return stacks
    leaves = tuple(name for name in inventory.modules if name in owners)
    return [Stack("", leaves)] if leaves else []


def group_rule(num_layers: int, group_size: int, num_in_group: int) -> list[int]:
    """Indices of the layers that are offloaded: of every ``group_size``, the last ``num_in_group``."""
    return [index for index in range(num_layers) if index % group_size >= group_size - num_in_group]


def worth_moving(storages: Iterable[StorageInfo]) -> list[StorageInfo]:
    """What is offloaded when no names are given: storages that hold a parameter and are not tiny.

    Buffers are left out because modules may write them during a forward; they move when named.
    """
    return [s for s in storages if s.has_parameter and s.num_bytes >= TINY_BYTES]


def outside_units(candidates: Sequence[StorageInfo], stacks: Sequence[Stack]) -> list[UnitDraft]:
    """Units for candidates outside the stacks that one module alone reads (an untied lm_head, say)."""
    layers = {layer for stack in stacks for layer in stack.layers}
    drafts: dict[str, list[StorageInfo]] = {}
    for storage in candidates:
        module = next(iter(storage.modules))
        if len(storage.modules) == 1 and not any(is_within(module, layer) for layer in layers):
            drafts.setdefault(module, []).append(storage)
    _refuse_nested(drafts, layers)
    return [UnitDraft(anchor, tuple(storages)) for anchor, storages in drafts.items()]


def _refuse_nested(anchors: Iterable[str], layers: Iterable[str]) -> None:
    # A module around the layers runs while they run: its slot would never be free for theirs.
    for anchor in list(anchors):
        inside = next((layer for layer in layers if is_within(layer, anchor)), None)
        if inside is not None:
            raise SelectionError(
                f"module {anchor or 'the model itself'!r} has weights of its own and contains the layer {inside!r}; "
                f"they cannot be prefetched, keep them resident by selecting other names"
            )


def _is_layer(name: str, owners: set[str]) -> bool:
    return _NUMBERED.fullmatch(name) is not None and any(is_within(owner, name) for owner in owners)
