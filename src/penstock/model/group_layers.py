"""What each parameter of one layer is for: experts first, whose structure is unmistakable, then the other blocks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from math import prod

from penstock.model.group_tree import HeldParameter, ModuleTree, ancestors, last_segment, parent
from penstock.model.inventory import is_within

__all__ = ["sort_layer"]

# Evidence, where shapes leave a choice: fragments of the names that modules and classes have.
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_FEED_FORWARD = re.compile(r"mlp|ffn|feed_?forward", re.IGNORECASE)
_ROUTER = re.compile(r"router|gate$", re.IGNORECASE)

Sorted = tuple[str, HeldParameter]


def sort_layer(tree: ModuleTree, layer: str) -> Iterator[Sorted]:
    """(group, parameter) for every parameter of ``layer`` that is in a group."""
    yield from _Layer(tree, layer).sort()


class _Layer:
    """One layer, its attention and its experts found."""

    def __init__(self, tree: ModuleTree, layer: str) -> None:
        self.tree = tree
        self.layer = layer
        self.inside = list(self._descendants(layer))
        self.attention = [name for name in self.inside if self._is_attention(name)]
        outer = [held for held in tree.matrices(layer) if not self._in_attention(held.module)]
        fused = dict(_fused_experts(outer))
        modules = dict(self._expert_modules(outer, fused))
        self.num_experts = {**fused, **modules}
        self.whole = modules.keys()  # experts with all that is inside; a router may hang inside a module of fused ones
        self._num_experts_below: Counter[str] = Counter()
        self._num_others_below: Counter[str] = Counter()
        for held in tree.matrices(layer):
            counts = self._num_experts_below if self._is_expert(held.module) else self._num_others_below
            counts.update((held.module, *ancestors(held.module)))
        self.blocks = {self._block_of(root): count for root, count in self.num_experts.items()}

    def sort(self) -> Iterator[Sorted]:
        yield from self._split(self.layer)

    def _visit(self, node: str) -> Iterator[Sorted]:
        """One module inside the layer: whole, when it is of one kind, else part by part."""
        below = self.tree.below(node)
        if not any(held.is_matrix for held in below):
            return
        if node in self.attention:
            yield from (("attention", held) for held in below)
        elif self._num_experts_below[node] or any(is_within(name, node) for name in self.attention):
            yield from self._split(node)
        elif parent(node) in self.blocks:
            yield from self._beside_experts(node)
        else:
            yield from self._sort_plain(node)

    def _split(self, node: str) -> Iterator[Sorted]:
        own = self.tree.held_by(node)
        if own and self._is_expert(node):
            yield from (("experts", held) for held in own)
        elif node not in self.blocks and any(held.is_matrix for held in own):
            yield from (("mlp", held) for held in own)
        for child in self.tree.children(node):
            yield from self._visit(child)

    def _beside_experts(self, node: str) -> Iterator[Sorted]:
        block = parent(node)
        if self._is_router(node, self.blocks[block]):
            return
        if block == self.layer:  # the experts' block is the layer: what stands beside them is any block of a layer
            yield from self._sort_plain(node)
        else:
            yield from (("shared_experts", held) for held in self.tree.below(node))

    def _is_router(self, node: str, num_experts: int) -> bool:
        shapes = self.tree.shapes(node)
        return bool(_ROUTER.search(last_segment(node))) or (len(shapes) == 1 and num_experts in shapes[0])

    def _sort_plain(self, node: str) -> Iterator[Sorted]:
        shapes = [held.shape for held in self.tree.matrices(node) if held.module not in self.tree.inventory.lookups]
        flat = [shape for shape in shapes if len(shape) == 2]
        if not flat:
            return  # convolutions alone: a stem, or a layer of another kind of model
        mixes_tokens = len(flat) < len(shapes)  # a convolution along the sequence
        unnamed = not self.attention and not self._named(_FEED_FORWARD, node)
        group = "attention" if mixes_tokens or (unnamed and not _is_feed_forward(flat)) else "mlp"
        yield from ((group, held) for held in self.tree.below(node))

    # -- evidence ------------------------------------------------------------------------------------------------------

    def _descendants(self, node: str) -> Iterator[str]:
        for child in self.tree.children(node):
            yield child
            yield from self._descendants(child)

    def _is_attention(self, node: str) -> bool:
        """Whether it is named so and holds weights: ``post_attention_layernorm`` does not."""
        return self._named(_ATTENTION, node) and bool(self.tree.matrices(node))

    def _named(self, fragment: re.Pattern[str], node: str) -> bool:
        return any(fragment.search(text) for text in (last_segment(node), self.tree.inventory.modules[node]))

    def _in_attention(self, module: str) -> bool:
        return any(is_within(module, name) for name in self.attention)

    # -- experts -------------------------------------------------------------------------------------------------------

    def _expert_modules(self, outer: Sequence[HeldParameter], fused: Collection[str]) -> Iterator[tuple[str, int]]:
        """Modules that are experts, each with their number in the layer (0: not known)."""
        found = dict(item for name in (self.layer, *self.inside) for item in self._numbered_experts(name, outer))
        yield from found.items()
        around = {module for root in (*found, *fused) for module in (root, *ancestors(root))}
        for name in self.inside:  # laid out in a way of their own, e.g. [experts * rows, width]
            if last_segment(name) == "experts" and self.tree.matrices(name) and name not in around:
                yield name, 0

    def _numbered_experts(self, container: str, outer: Sequence[HeldParameter]) -> Iterator[tuple[str, int]]:
        """Children alike whose names end in numbers, as many as a matrix beside them has rows: the router's."""
        families: dict[str, list[str]] = {}
        for child in self.tree.children(container):
            stem = child.rstrip("0123456789")
            if stem != child and self.tree.matrices(child) and not self._in_attention(child):
                families.setdefault(stem, []).append(child)
        for stem, family in families.items():
            if len(family) < 2 or len({self._signature(child) for child in family}) > 1:
                continue
            beside = [held.shape for held in outer if not held.module.startswith(stem)]
            routed = any(len(shape) == 2 and len(family) in shape for shape in beside)
            if routed or "expert" in stem[len(self.layer) :]:
                yield from ((child, len(family)) for child in family)

    def _signature(self, node: str) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        return tuple((held.module[len(node) :], held.attr, held.shape) for held in self.tree.below(node))

    def _is_expert(self, module: str) -> bool:
        """Whether what ``module`` itself holds is of experts."""
        return module in self.num_experts or not self.whole.isdisjoint(ancestors(module))

    def _block_of(self, root: str) -> str:
        """The innermost module that holds the experts and a matrix that is none of them; at most the layer."""
        inward = (root, *ancestors(root))
        return next((name for name in inward if self._num_others_below[name] or name == self.layer), self.layer)


def _fused_experts(outer: Sequence[HeldParameter]) -> Iterator[tuple[str, int]]:
    """Modules with parameters [experts, ., .]: several of one count, and a matrix elsewhere that has a row for each.

    A convolution [out, in / groups, kernel] has the same number of dimensions, but either 1 as one of the last two or
    no companion with the same first dimension.
    """
    stacks: dict[int, list[HeldParameter]] = {}
    for held in outer:
        if len(held.shape) >= 3 and held.shape[0] > 1 and held.shape[1] > 1 and prod(held.shape[2:]) > 1:
            stacks.setdefault(held.shape[0], []).append(held)
    for count, stack in stacks.items():
        holders = {held.module for held in stack}
        routed = any(len(held.shape) == 2 and count in held.shape and held.module not in holders for held in outer)
        if len(stack) > 1 and routed:
            yield from ((holder, count) for holder in holders)


def _is_feed_forward(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether matrices can be those of ``width -> inner -> width``, the gate beside the up projection or fused with it.

    Attention has four matrices, or a fused one that is three widths wide, or with grouped heads one that is between one
    and two; only its output projection is square.
    """
    for width in set.intersection(*(set(shape) for shape in shapes)):
        inner = sorted(prod(shape) // width for shape in shapes)
        if len(shapes) <= 3 and len(set(inner)) == 1:
            return True
        if len(shapes) == 2 and inner[1] == 2 * inner[0] and inner[0] != width:
            return True
    return len(shapes) == 1
