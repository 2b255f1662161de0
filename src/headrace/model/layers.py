"""The layers of a model: numbered siblings that hold most of the weights, found by structure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from headrace.model.records import Inventory, StorageInfo, packed_modules
from headrace.model.semantic_groups import semantic_groups

# A copy of this size takes the link at nine tenths of its rate (H200).
MIN_PART_BYTES = 2**20

# Three slots of a stack of blocks are then a tenth of the weights.
MAX_BLOCK_SHARE = 1 / 32

_NUMBERED = re.compile(r".*\d")


def find_stacks(inventory: Inventory) -> dict[str, list[str]]:
    """Runs of numbered sibling modules that hold most of the weights (decoder layers, encoder blocks, ...), in order.

    By the container's name, the outermost with at least two numbered children that own bytes. Layers are children that
    have a forward. One of a list that has none (a list of lists) is replaced by the outermost modules inside it
    that have. A child that a container holds in several places is one layer.

    A model without such a container is treated as one stack of its leaf modules, so that any ``nn.Module`` has layers.
    """
    owners = {owner for storage in inventory.storages for owner in storage.modules}
    holders = {outer for owner in owners for outer in inventory.dominators(owner)}
    numbered = {name: _numbered_children(inventory, name, holders) for name in inventory.modules}
    lists = {name: children for name, children in numbered.items() if len(children) >= 2}
    every = {child for children in lists.values() for child in children}
    # The outermost lists only: a list inside a layer, such as its experts, is no stack.
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
        # Only modules with several parents can be in two lists, or inside a layer of another list.
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
    """The layers of all stacks; of a stack of blocks, the modules inside these blocks.

    Layers of a stack are much alike. The down and up blocks of a UNet, or the stages of an image model, are not: one
    block may hold half of all weights, and so would a slot. Where the layers of a stack differ twofold and one of them
    holds a tenth of the weights, each that is larger than ``MAX_BLOCK_SHARE`` of the weights is replaced by the modules
    directly inside it, and these likewise.
    """
    found = []
    for layers in find_stacks(inventory).values():
        sizes = [sum(s.num_bytes for s in inventory.under(layer)) for layer in layers]
        if max(sizes) <= max(2 * min(sizes), inventory.num_bytes / 10):
            found += layers
        else:
            most_bytes = max(MIN_PART_BYTES, MAX_BLOCK_SHARE * inventory.num_bytes)
            experts = semantic_groups(inventory)["experts"]
            found += [part for layer in layers for part in _parts_of(inventory, layer, most_bytes, experts)]
    return found


def _parts_of(inventory: Inventory, module: str, most_bytes: float, experts: frozenset[str]) -> list[str]:
    """Modules inside ``module`` that together hold all its parameters, as large as can be within ``most_bytes``.

    A module is not divided if it has tensors beside those of its children, or children that share some: a tensor in no
    part could not leave the device. Nor is one of several experts, of which a forward runs a few.
    """
    storages = weights_of(inventory.under(module))
    if sum(s.num_bytes for s in storages) <= most_bytes:
        return [module]
    inside = dict.fromkeys(fqn for place in inventory.places(module) for fqn in called_within(inventory, place.module))
    wanted = {s.name for s in storages}
    within = {fqn: [s for s in inventory.under(fqn) if s.name in wanted] for fqn in inside}
    parts = {fqn: mine for fqn, mine in within.items() if mine}
    of_experts = sum(experts.issuperset(s.name for s in mine) for mine in parts.values())
    if not parts or of_experts > 1 or not are_apart(inventory, parts, len(storages)):
        return [module]
    return [part for fqn in parts for part in _parts_of(inventory, fqn, most_bytes, experts)]


def are_apart(inventory: Inventory, parts: Mapping[str, Sequence[StorageInfo]], num_storages: int) -> bool:
    """Whether ``parts`` (by module) hold ``num_storages``, and none is inside another: it would be overwritten while
    it is read."""
    return sum(map(len, parts.values())) == num_storages and all(
        parts.keys().isdisjoint(inventory.ancestors(fqn)) for fqn in parts
    )


def _numbered_children(inventory: Inventory, container: str, holders: Collection[str]) -> list[str]:
    """A child that ``container`` holds in several places is listed as often."""
    found = [
        place
        for place in inventory.places(container)
        if place.module in holders
        and _NUMBERED.fullmatch(place.attr)
        # Items of a list that are lists run one after the other; lists called `norm1` and `norm2` need not.
        and (place.module not in inventory.uncalled or place.attr.isdigit())
    ]
    # Nor are models called `text_encoder_2` and `text_encoder_3` layers of one.
    kinds = {inventory.modules[place.module] for place in found if not place.attr.isdigit()}
    return [place.module for place in found if place.attr.isdigit() or len(kinds) == 1]


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


def reader_of(inventory: Inventory, module: str) -> str:
    """The module whose forward reads the tensors of ``module``: itself, unless it is not called; then one around it."""
    around = inventory.dominators(module)
    return next((name for name in reversed(around) if name not in inventory.uncalled), module)


def weights_of(storages: Iterable[StorageInfo]) -> list[StorageInfo]:
    """Storages that hold a parameter, or are of a module with packed weights.

    Other buffers are left out because modules may write them during a forward; they move when named.
    """
    found = list(storages)
    packed = packed_modules(found)
    return [s for s in found if s.has_parameter or not packed.isdisjoint(s.modules)]
