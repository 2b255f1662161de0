"""The vision tower of a multimodal model, and what projects from it into the text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from penstock.model.group_tree import HeldParameter, ModuleTree, ancestors, parent
from penstock.model.inventory import is_within

__all__ = ["find_projectors", "find_towers"]

# Spectrograms are convolved in two dimensions, too.
_NOT_IMAGES = ("audio", "speech")


def find_towers(tree: ModuleTree) -> dict[str, int]:
    """The outermost modules that see images and no text, each with the width of its patch embedding, in elements.

    A tower is found from its patch embedding (a convolution over images or frames, or a matrix in a module called so):
    the smallest module around it that also has layers, with text left outside. A model that reads no text has none: one
    of which all layers are inside of what would be towers, too.
    """
    towers: dict[str, int] = {}
    for seed in tree.matrices(""):
        if any(is_within(seed.module, tower) for tower in towers) or not _embeds_patches(seed):
            continue
        if found := _tower(tree, seed.module):
            towers = {name: width for name, width in towers.items() if not is_within(name, found)}
            towers[found] = seed.shape[0]
    return towers if any(not any(is_within(layer, tower) for tower in towers) for layer in tree.layers) else {}


def find_projectors(tree: ModuleTree, towers: Mapping[str, int], heads: Collection[str]) -> list[str]:
    """Modules beside a tower that read its width and write the text's; ``heads`` are known to be none."""
    found: list[str] = []
    for tower, width in towers.items():
        candidates = [name for name in _beside_text(tree, tower, towers) if not any(is_within(h, name) for h in heads)]
        found += [name for name in candidates if name not in found and _is_projector(tree, name, tower, width)]
    return found


def _embeds_patches(held: HeldParameter) -> bool:
    # Quantised experts have four dimensions as well, but another name than a convolution's.
    convolution = len(held.shape) >= 4 and held.attr == "weight"
    return (convolution or "patch_embed" in held.module) and not any(word in held.module for word in _NOT_IMAGES)


def _tower(tree: ModuleTree, seed: str) -> str:
    """The tower around the patch embedding in module ``seed``, or ``""``."""
    around = [name for name in (seed, *ancestors(seed)) if name]
    for name in around:
        if tree.num_layers(name) and _leaves_text(tree, name):
            return _widened(tree, name)
    # A tower of convolutions alone has no such layers: everything up to where the text begins.
    plain = [name for name in around if not tree.num_layers(name) and not tree.num_lookups(name)]
    return plain[-1] if plain and _leaves_text(tree, plain[-1]) else ""


def _leaves_text(tree: ModuleTree, tower: str) -> bool:
    return tree.num_layers("") > tree.num_layers(tower) and tree.num_lookups("") > tree.num_lookups(tower)


def _widened(tree: ModuleTree, tower: str) -> str:
    """``tower`` with the wrappers around it that add no layers and no tables."""
    while (outer := parent(tower)) and _same_layers(tree, outer, tower):
        tower = outer
    return tower


def _same_layers(tree: ModuleTree, outer: str, inner: str) -> bool:
    return tree.num_layers(outer) == tree.num_layers(inner) and tree.num_lookups(outer) == tree.num_lookups(inner)


def _beside_text(tree: ModuleTree, tower: str, towers: Collection[str]) -> Iterator[str]:
    """Modules around which neither a tower nor any text lies, as large as can be."""
    text = _text_layers(tree, towers)
    for outer in ancestors(tower):
        for child in tree.children(outer):
            holds_tower = any(is_within(name, child) for name in towers)
            if not (holds_tower or tree.num_lookups(child) or is_within(text, child) or is_within(child, text)):
                yield child


def _is_projector(tree: ModuleTree, name: str, tower: str, width: int) -> bool:
    """Whether one dimension can read the tower (neighbouring patches may be merged) and another one write text."""
    text = {h.shape[-1] for table in tree.lookups if not is_within(table, tower) for h in tree.held_by(table)}
    outputs = {held.shape[0] for held in tree.matrices(tower) if not _in_layer(tree, held.module)}
    sizes = [size for shape in tree.shapes(name) for size in shape]
    reads = [index for index, size in enumerate(sizes) if size in outputs or size % width == 0]
    writes = [index for index, size in enumerate(sizes) if size in text]
    return any(one != other for one in reads for other in writes)


def _in_layer(tree: ModuleTree, module: str) -> bool:
    return any(is_within(module, layer) for layer in tree.layers)


def _text_layers(tree: ModuleTree, towers: Collection[str]) -> str:
    """The container of the most bytes of layers outside the towers."""
    num_bytes: dict[str, int] = {}
    for layer in tree.layers:
        if not any(is_within(layer, tower) for tower in towers):
            container = parent(layer)
            num_bytes[container] = num_bytes.get(container, 0) + sum(held.num_bytes for held in tree.below(layer))
    return max(num_bytes, key=lambda name: num_bytes[name])
