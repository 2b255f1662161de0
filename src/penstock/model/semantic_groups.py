"""What the parameters of a model are for: attention, experts, the vision tower, ..., told by structure.

A group is a set of storages. It is found from the tree of modules, the shapes of the parameters and which modules are
embedding tables; where these leave a choice, a fragment of a name counts as evidence (``attn``, ``router``). No list
of models or classes is kept, so that a model nobody has seen yet has groups too.

Buffers are in no group, because modules may write them during a forward; they move when named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from penstock.model.group_layers import sort_layer
from penstock.model.group_tree import HeldParameter, ModuleTree, parent
from penstock.model.group_vision import find_projectors, find_towers
from penstock.model.inventory import Inventory, is_within

__all__ = ["GROUPS", "semantic_groups"]

GROUPS: Final = ("attention", "mlp", "experts", "shared_experts", "embeddings", "lm_head", "vision")


def semantic_groups(inventory: Inventory) -> dict[str, frozenset[str]]:
    """Names of the storages in each group of :data:`GROUPS`, in that order; groups that a model lacks are empty.

    =================  =============================================================================================
    ``attention``      in a layer, the blocks that mix tokens: attention, and recurrences that stand in its place
    ``mlp``            in a layer, the dense feed-forward blocks; experts are not among them
    ``experts``        the routed experts of a mixture, as 3-D parameters [experts, ., .] or as numbered modules alike
    ``shared_experts`` what stands beside the experts in their block and is neither expert nor router
    ``embeddings``     tables of embedding modules
    ``lm_head``        outside the layers, the matrix with a row per entry of a vocabulary, and its bias
    ``vision``         the vision tower of a model that also reads text, and what projects from its width to the text's
    =================  =============================================================================================

    A storage is in one group at most, except that tied weights are in both ``embeddings`` and ``lm_head``. Norms
    between blocks, routers and poolers are in none.
    """
    tree = ModuleTree(inventory)
    towers = find_towers(tree)
    heads = _heads(tree, [*tree.layers, *towers, *tree.lookups])
    seen = [*towers, *find_projectors(tree, towers, heads)]
    in_layers = [item for layer in tree.layers if not _within_any(layer, seen) for item in sort_layer(tree, layer)]
    attention = [held for group, held in in_layers if group == "attention"]
    groups = {"vision": _storages(held for root in seen for held in tree.below(root))}
    groups["attention"] = _storages(attention) - groups["vision"]  # its tables of relative positions are in no other
    taken = groups["vision"] | groups["attention"]
    groups["embeddings"] = _storages(held for module in tree.lookups for held in tree.held_by(module)) - taken
    groups["lm_head"] = _storages(held for module in heads for held in tree.held_by(module)) - taken
    for group in ("experts", "shared_experts", "mlp"):
        taken = taken.union(*groups.values())
        groups[group] = _storages(held for name, held in in_layers if name == group) - taken
    return {group: frozenset(groups[group]) for group in GROUPS}


def _storages(parameters: Iterable[HeldParameter]) -> set[str]:
    return {held.storage for held in parameters}


def _within_any(module: str, places: Iterable[str]) -> bool:
    return any(is_within(module, place) for place in places)


def _heads(tree: ModuleTree, elsewhere: Sequence[str]) -> list[str]:
    """Modules outside ``elsewhere`` that hold a matrix with a row per entry of a vocabulary, or are called so."""
    sizes = _vocabulary_sizes(tree, elsewhere)
    # The name counts, too: a table that was padded has more rows than the head.
    found = [
        held.module
        for held in tree.below("")
        if len(held.shape) == 2 and (held.shape[0] in sizes or "lm_head" in held.module.split("."))
    ]
    return [module for module in dict.fromkeys(found) if module and not _within_any(module, elsewhere)]


def _vocabulary_sizes(tree: ModuleTree, elsewhere: Sequence[str]) -> set[int]:
    """Rows of the first table of each module: tables of positions and token types follow that of the tokens."""
    tables = [name for name in tree.lookups if not _within_any(name, (place for place in elsewhere if place != name))]
    first = {parent(name): held for name in reversed(tables) for held in tree.held_by(name)[:1]}
    return {held.shape[0] for held in first.values()}
