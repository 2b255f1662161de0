"""Layers of a model, found by structure, the group rule over them, and the modules that units are anchored on.

A unit is waited for and released by hooks of its anchor, so an anchor is called (it has a forward of its own), every
path to the tensors of its unit leads through it, and no anchor runs inside another.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from penstock.model.inventory import Inventory, StorageInfo, common_prefix
from penstock.plan.plan import UnitDraft, slab_bytes

__all__ = [
    "TINY_BYTES",
    "called_within",
    "draft_units",
    "drafts_at",
    "find_layers",
    "find_stacks",
    "group_rule",
    "outside_units",
    "reader_of",
    "split_by_part",
    "stranded",
    "why_stranded",
    "worth_moving",
]

# Norms, biases and scales: together a thousandth of a layer, but each would cost a copy of its own.
TINY_BYTES = 64 * 2**10

# A copy of this size takes the link at nine tenths of its rate (H200).
MIN_PART_BYTES = 2**20

_NUMBERED = re.compile(r".*\d")


def find_stacks(inventory: Inventory) -> dict[str, list[str]]:
    """Runs of numbered sibling modules that hold most of the weights (decoder layers, encoder blocks, ...), in order.

    By the container's name, the outermost with at least two numbered children that own bytes. Layers are children that
    have a forward. One of a list that has none (a list of lists, say) is replaced by the outermost modules inside it
    that have. A child that hangs at several places of a container is one layer.

    A model without such a container is treated as one stack of its leaf modules, so that any ``nn.Module`` has layers.
    """
    owners = {owner for storage in inventory.storages for owner in storage.modules}
    holders = {outer for owner in owners for outer in inventory.dominators(owner)}
    numbered = {name: _numbered_children(inventory, name, holders) for name in inventory.modules}
    lists = {name: children for name, children in numbered.items() if len(children) >= 2}
    every = {child for children in lists.values() for child in children}
    called = {
        name: [layer for child in children for layer in called_within(inventory, child) if layer in holders]
        for name, children in lists.items()
        if name not in every and every.isdisjoint(inventory.ancestors(name))
    }
    every_layer = {layer for layers in called.values() for layer in layers}
    order = {name: index for index, name in enumerate(inventory.modules)}
    stacks: dict[str, list[str]] = {}
    seen: set[str] = set()
    for name, layers in called.items():
        # Only modules that hang in several places can be in two lists, or inside a layer of another list.
        mine = {layer for layer in layers if layer not in seen and every_layer.isdisjoint(inventory.ancestors(layer))}
        seen |= mine
        if mine:
            stacks[name] = sorted(mine, key=order.__getitem__)
    if stacks:
        return stacks
    # The innermost modules that read tensors of their own; never one inside another, nor the root for another.
    readers = dict.fromkeys(reader_of(inventory, name) for name in inventory.modules if name in owners)
    around = {outer for name in readers for outer in inventory.ancestors(name)}
    leaves = [name for name in readers if name not in around | inventory.uncalled and (name or name in owners)]
    return {"": leaves} if leaves else {}


def find_layers(inventory: Inventory) -> list[str]:
    """The layers of all stacks."""
    return [layer for layers in find_stacks(inventory).values() for layer in layers]


def _numbered_children(inventory: Inventory, container: str, holders: Collection[str]) -> list[str]:
    """By place: what hangs at several places of ``container`` is listed as often."""
    return [
        place.module
        for place in inventory.places(container)
        if place.module in holders
        and _NUMBERED.fullmatch(place.attr)
        # `norm1` and `norm2` that are lists stand beside each other; items of a list that are lists, behind each other.
        and (place.module not in inventory.uncalled or place.attr.isdigit())
    ]


def called_within(inventory: Inventory, module: str) -> list[str]:
    """``module`` itself, or if it has no forward, the outermost modules inside it that have."""
    found: dict[str, None] = {}
    left, seen = [module], {module}
    while left:
        name = left.pop()
        if name not in inventory.uncalled:
            found[name] = None
            continue
        inner = [place.module for place in inventory.places(name) if place.module not in seen]
        seen.update(inner)
        left += reversed(inner)
    return list(found)


def group_rule(num_layers: int, group_size: int, num_in_group: int) -> list[int]:
    """Indices of the layers that are offloaded: of every ``group_size``, the last ``num_in_group``."""
    return [index for index in range(num_layers) if index % group_size >= group_size - num_in_group]


def worth_moving(storages: Iterable[StorageInfo]) -> list[StorageInfo]:
    """What is offloaded when no names are given: storages that hold a parameter and are not tiny.

    Buffers are left out because modules may write them during a forward; they move when named.
    """
    return [s for s in storages if s.has_parameter and s.num_bytes >= TINY_BYTES]


def outside_units(inventory: Inventory, candidates: Sequence[StorageInfo], layers: Collection[str]) -> list[UnitDraft]:
    """Units for candidates outside ``layers`` (those that have units themselves): an untied lm_head, say.

    Each is anchored on the innermost module that every path to it leads through and that is called. Left out, hence
    resident: what no module but the root is called around, and what would be anchored inside or around another unit's
    module, since one would be overwritten while it is read.
    """
    inside = {storage.name for layer in layers for storage in inventory.under(layer)}
    drafts: dict[str, list[StorageInfo]] = {}
    for storage in candidates:
        around = common_prefix([inventory.dominators(module) for module in storage.modules])
        anchor = next((name for name in reversed(around) if name not in inventory.uncalled), None)
        if anchor and storage.name not in inside:
            drafts.setdefault(anchor, []).append(storage)
    outer = {name for anchor in (*layers, *drafts) for name in inventory.ancestors(anchor)}
    return [
        UnitDraft(anchor, tuple(storages))
        for anchor, storages in drafts.items()
        if anchor not in outer and inventory.ancestors(anchor).isdisjoint(layers)
    ]


def drafts_at(inventory: Inventory, anchors: Iterable[str], wanted: Collection[str]) -> list[UnitDraft]:
    """A unit at each of ``anchors`` that alone leads to any of the storages ``wanted`` (by name)."""
    drafts = (UnitDraft(anchor, tuple(s for s in inventory.under(anchor) if s.name in wanted)) for anchor in anchors)
    return [draft for draft in drafts if draft.storages]


def draft_units(inventory: Inventory, storages: Sequence[StorageInfo]) -> list[UnitDraft]:
    """``storages`` as one unit per layer, and per module outside the layers, in order of execution.

    Left out: what several layers share, and what :func:`outside_units` leaves out.
    """
    wanted = {storage.name for storage in storages}
    drafts = drafts_at(inventory, find_layers(inventory), wanted)
    drafts += outside_units(inventory, storages, [draft.anchor for draft in drafts])
    order = {name: index for index, name in enumerate(inventory.modules)}
    return sorted(drafts, key=lambda draft: order[draft.anchor])


def stranded(inventory: Inventory, candidates: Iterable[StorageInfo], placed: Collection[str]) -> list[StorageInfo]:
    """Of ``candidates`` that are not ``placed`` in units (by name), those that modules without a forward hold."""
    return [s for s in candidates if s.name not in placed and not inventory.containers.isdisjoint(s.modules)]


def why_stranded(inventory: Inventory, storage: StorageInfo) -> str:
    """Why no unit can hold a tensor of :func:`stranded`; goes on after "because"."""
    holder = min(inventory.containers & storage.modules)
    return (
        f"{holder or 'the model'} ({inventory.modules[holder]}), which holds it, has no forward before which it could "
        f"be waited for, and what has one around it is the model itself or runs around other units"
    )


def split_by_part(inventory: Inventory, layers: Sequence[UnitDraft]) -> list[UnitDraft]:
    """Each of ``layers`` as one unit per child that holds any of its storages, in the order of the children.

    Part i of a layer then shares its slots with part i of the others. So all of them have to have as many parts, each
    with a forward, none of these tiny, and nothing that belongs to two; otherwise the layers stay whole.
    """
    every: list[UnitDraft] = []
    counts = set()
    for layer in layers:
        parts = drafts_at(inventory, inventory.children(layer.anchor), {storage.name for storage in layer.storages})
        if sum(len(part.storages) for part in parts) != len(layer.storages):
            return list(layers)
        counts.add(len(parts))
        every += parts
    anchors = {part.anchor for part in every}
    apart = all(anchors.isdisjoint(inventory.ancestors(anchor)) for anchor in anchors)
    large = all(slab_bytes(s.num_bytes for s in part.storages) >= MIN_PART_BYTES for part in every)
    can_split = len(counts) == 1 and apart and large and anchors.isdisjoint(inventory.uncalled)
    return every if can_split else list(layers)


def reader_of(inventory: Inventory, module: str) -> str:
    """The module whose forward reads the tensors of ``module``: itself, unless it is not called; then one around it."""
    around = inventory.dominators(module)
    return next((name for name in reversed(around) if name not in inventory.uncalled), module)
