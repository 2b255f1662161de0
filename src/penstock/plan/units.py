"""Layers of a model, found by structure, and the group rule over them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.inventory import Inventory, StorageInfo, is_within
from penstock.plan.model import UnitDraft

__all__ = [
    "TINY_BYTES",
    "Stack",
    "draft_units",
    "find_stacks",
    "group_rule",
    "outside_units",
    "reader_of",
    "split_by_part",
    "worth_moving",
]

# Norms, biases and scales: together a thousandth of a layer, but each would cost a copy of its own.
TINY_BYTES = 64 * 2**10

# A copy of this size takes the link at nine tenths of its rate (H200).
MIN_PART_BYTES = 2**20

# These hand a child's weight to a kernel without calling the child, whose hooks would never run.
_READS_CHILDREN = frozenset({"MultiheadAttention"})

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
    holders = _ancestors(owners) | owners
    inside: set[str] = set()  # of a layer, or a layer itself; parents come before their children
    for name in inventory.modules:
        if name in inside or (name and name.rpartition(".")[0] in inside):
            inside.add(name)
            continue
        layers = tuple(child for child in inventory.children(name) if child in holders and _NUMBERED.fullmatch(child))
        if len(layers) >= 2:
            stacks.append(Stack(name, layers))
            inside.update(layers)
    if stacks:
        return stacks
    leaves = tuple(_leaves(inventory, owners))
    return [Stack("", leaves)] if leaves else []


def group_rule(num_layers: int, group_size: int, num_in_group: int) -> list[int]:
    """Indices of the layers that are offloaded: of every ``group_size``, the last ``num_in_group``."""
    return [index for index in range(num_layers) if index % group_size >= group_size - num_in_group]


def worth_moving(storages: Iterable[StorageInfo]) -> list[StorageInfo]:
    """What is offloaded when no names are given: storages that hold a parameter and are not tiny.

    Buffers are left out because modules may write them during a forward; they move when named.
    """
    return [s for s in storages if s.has_parameter and s.num_bytes >= TINY_BYTES]


def outside_units(inventory: Inventory, candidates: Sequence[StorageInfo], stacks: Sequence[Stack]) -> list[UnitDraft]:
    """Units for candidates outside the stacks that one module alone reads (an untied lm_head, say).

    Left out, hence resident: what several modules share, and what a module holds that runs while another unit's module
    runs inside it, since its slot would not be free for that one's.
    """
    layers = {layer for stack in stacks for layer in stack.layers}
    drafts: dict[str, list[StorageInfo]] = {}
    for storage in candidates:
        readers = {reader_of(inventory, module) for module in storage.modules}
        reader = next(iter(readers))
        if len(readers) == 1 and not any(is_within(reader, layer) for layer in layers):
            drafts.setdefault(reader, []).append(storage)
    around = _ancestors(layers | drafts.keys())
    return [UnitDraft(anchor, tuple(storages)) for anchor, storages in drafts.items() if anchor not in around]


def draft_units(inventory: Inventory, storages: Sequence[StorageInfo]) -> list[UnitDraft]:
    """``storages`` as one unit per layer, and per module outside the layers, in order of execution.

    Left out: what several layers share, and what :func:`outside_units` leaves out.
    """
    stacks = find_stacks(inventory)
    wanted = {storage.name for storage in storages}
    layers = [layer for stack in stacks for layer in stack.layers]
    drafts = [UnitDraft(layer, tuple(s for s in inventory.under(layer) if s.name in wanted)) for layer in layers]
    inside = {storage.name for draft in drafts for storage in draft.storages}
    rest = [storage for storage in storages if storage.name not in inside]
    order = {name: index for index, name in enumerate(inventory.modules)}
    every = [*(draft for draft in drafts if draft.storages), *outside_units(inventory, rest, stacks)]
    return sorted(every, key=lambda draft: order[draft.anchor])


def split_by_part(inventory: Inventory, layers: Sequence[UnitDraft]) -> list[UnitDraft]:
    """Each of ``layers`` as one unit per child that holds any of its storages, in the order of the children.

    Part i of a layer then shares its slots with part i of the others. So all of them have to have as many parts,
    none of these tiny, and nothing that belongs to two; otherwise the layers stay whole.
    """
    split = [_parts_of(inventory, layer) for layer in layers]
    same = len({len(parts) for parts in split}) == 1
    whole = [
        sum(len(part.storages) for part in parts) == len(layer.storages)
        for parts, layer in zip(split, layers, strict=True)
    ]
    if not same or not all(whole) or any(part.num_bytes < MIN_PART_BYTES for parts in split for part in parts):
        return list(layers)
    return [part for parts in split for part in parts]


def _parts_of(inventory: Inventory, layer: UnitDraft) -> list[UnitDraft]:
    wanted = {storage.name for storage in layer.storages}
    children = [
        UnitDraft(child, tuple(s for s in inventory.under(child) if s.name in wanted))
        for child in inventory.children(layer.anchor)
    ]
    return [child for child in children if child.storages]


def _leaves(inventory: Inventory, owners: set[str]) -> Iterator[str]:
    """The innermost modules that read tensors of their own; never one inside another."""
    readers = dict.fromkeys(reader_of(inventory, name) for name in inventory.modules if name in owners)
    around = _ancestors(readers)
    return (name for name in readers if name not in around)


def reader_of(inventory: Inventory, module: str) -> str:
    """The module whose forward reads the tensors of ``module``: itself, unless one around it takes them by hand."""
    parts = module.split(".")
    outer = (".".join(parts[:count]) for count in range(len(parts)))
    return next((name for name in outer if inventory.modules[name] in _READS_CHILDREN), module)


def _ancestors(names: Iterable[str]) -> set[str]:
    """Every module that has one of ``names`` inside it."""
    parts = [name.split(".") for name in names if name]
    return {".".join(part[:count]) for part in parts for count in range(len(part))}
