"""Groups the parameters of a model by function (attention, experts, vision tower, ...), from its structure.

A group is a set of storages. It is found from the tree of modules, the shapes of the parameters and which modules are
embedding tables; where these leave a choice, a fragment of a name counts as evidence (``attn``, ``router``). There is
no list of models or classes, so a model of an unknown family has groups, too.

Buffers are in no group, but for those of modules with packed weights (GPTQ, AWQ); they move when a pattern names them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import prod
from typing import Final, NamedTuple

from headrace.model.records import Inventory, dotted_prefixes, is_within, packed_modules

GROUPS: Final = ("attention", "mlp", "experts", "shared_experts", "embeddings", "lm_head", "vision")

# Evidence, where shapes leave a choice: fragments of the names of modules and classes.
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_FEED_FORWARD = re.compile(r"mlp|ffn|feed_?forward", re.IGNORECASE)
_ROUTER = re.compile(r"router|gate$", re.IGNORECASE)
# Spectrograms are convolved in two dimensions, too.
_NOT_IMAGES = re.compile(r"audio|speech")


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
    tree = _Tree(inventory)
    towers = _towers(tree)
    heads = _heads(tree, [*tree.layers, *towers, *tree.tables])
    vision = [*towers, *_projectors(tree, towers, heads)]
    found: dict[str, set[str]] = {group: set() for group in GROUPS}
    for layer in tree.layers:
        if not _within_any(layer, vision):
            for group, parameters in _Layer(tree, layer).split(layer):
                found[group].update(held.storage for held in parameters)
    found["vision"] = {held.storage for root in vision for held in tree.below[root]}
    found["embeddings"] = {held.storage for module in tree.tables for held in tree.held[module]}
    found["lm_head"] = {held.storage for module in heads for held in tree.held[module]}
    # A storage that several groups claim is in the first of them; for example attention's tables of relative positions.
    taken: set[str] = set()
    for groups in (("vision",), ("attention",), ("embeddings", "lm_head"), ("experts",), ("shared_experts",), ("mlp",)):
        for group in groups:
            found[group] -= taken
        taken.update(*(found[group] for group in groups))
    return {group: frozenset(found[group]) for group in GROUPS}


# -- the tree of modules -----------------------------------------------------------------------------------------------


class _Parameter(NamedTuple):
    """A parameter in the place where a module holds it; tied ones are in several places."""

    module: str
    attr: str
    shape: tuple[int, ...]
    storage: str
    num_bytes: int


class _Tree:
    """An index of an inventory for questions about subtrees.

    Attributes:
        held: by module, its own tensors.
        below: by module, the tensors of it and of all modules inside it.
        layers: outermost modules whose last segment is a number and that hold parameters, in model order.
        tables: embedding modules in model order.
    """

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.held: defaultdict[str, list[_Parameter]] = defaultdict(list)
        self.below: defaultdict[str, list[_Parameter]] = defaultdict(list)
        packed = packed_modules(inventory.storages)
        for storage in inventory.storages:
            for tensor in storage.tensors:
                for place in tensor.locations:
                    # Modules may write their buffers during a forward.
                    if place.kind == "parameter" or place.module in packed:
                        held = _Parameter(place.module, place.attr, tensor.shape, storage.name, storage.num_bytes)
                        self.held[place.module].append(held)
                        for module in dotted_prefixes(place.module):
                            self.below[module].append(held)
        self.layers: dict[str, None] = {}
        for name in inventory.modules:
            is_outermost = self.layers.keys().isdisjoint(dotted_prefixes(name))
            # One is enough, unlike for the planner's stacks: a model of one layer has an attention block, too.
            if is_outermost and _segment(name).isdigit() and name in self.below:
                self.layers[name] = None
        self.tables = [name for name in inventory.modules if name in inventory.lookups]
        # Layers of convolutions (the stem of an image model) do not count.
        flat_layers = [name for name in self.layers if any(len(shape) == 2 for shape in self.shapes(name))]
        self._num_layers = Counter(around for name in flat_layers for around in dotted_prefixes(name))
        self._num_tables = Counter(around for name in self.tables for around in dotted_prefixes(name))

    def matrices(self, module: str) -> list[_Parameter]:
        """Tensors of :attr:`below` with two or more dimensions; others (norms, biases) show no structure."""
        return [held for held in self.below[module] if len(held.shape) >= 2]

    def shapes(self, module: str) -> list[tuple[int, ...]]:
        """Shapes of :meth:`matrices`."""
        return [held.shape for held in self.matrices(module)]

    def text_in(self, module: str) -> tuple[int, int]:
        """(layers with a 2-D weight, embedding tables) at or below ``module``."""
        return self._num_layers[module], self._num_tables[module]


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _segment(module: str) -> str:
    return module.rpartition(".")[2]


def _within_any(module: str, places: Iterable[str]) -> bool:
    return any(is_within(module, place) for place in places)


# -- heads and vision --------------------------------------------------------------------------------------------------


def _heads(tree: _Tree, elsewhere: Sequence[str]) -> list[str]:
    """Modules outside ``elsewhere`` that hold a matrix with a row per vocabulary entry, or are named ``lm_head``."""
    tables = [name for name in tree.tables if not _within_any(name, (place for place in elsewhere if place != name))]
    # Of each module the first table: tables of positions and token types follow that of the tokens.
    first = {_parent(name): held for name in reversed(tables) for held in tree.held[name][:1]}
    vocabularies = {held.shape[0] for held in first.values()}
    # The name counts, too: a table that was padded has more rows than the head.
    found = [
        held.module
        for held in tree.below[""]
        if len(held.shape) == 2 and (held.shape[0] in vocabularies or "lm_head" in held.module.split("."))
    ]
    return [module for module in dict.fromkeys(found) if module and not _within_any(module, elsewhere)]


def _towers(tree: _Tree) -> dict[str, int]:
    """The outermost modules that see images and no text, each with the width of its patch embedding, in elements.

    A tower is found from its patch embedding (a convolution over images or frames, or a matrix in a module called so):
    the smallest module around it that also has layers, with text left outside. A model that reads no text has none: one
    of which all layers are inside of what would be towers, too.
    """
    towers: dict[str, int] = {}
    for seed in tree.matrices(""):
        # Quantised experts have four dimensions as well, but another name than a convolution's.
        convolution = len(seed.shape) >= 4 and seed.attr == "weight"
        embeds_patches = convolution or "patch_embed" in seed.module
        if not embeds_patches or _NOT_IMAGES.search(seed.module):
            continue
        if not _within_any(seed.module, towers) and (found := _tower_around(tree, seed.module)):
            towers = {name: width for name, width in towers.items() if not is_within(name, found)}
            towers[found] = seed.shape[0]
    return towers if any(not _within_any(layer, towers) for layer in tree.layers) else {}


def _tower_around(tree: _Tree, seed: str) -> str:
    """The tower around the patch embedding in module ``seed``, or ``""``."""

    def leaves_text(name: str) -> bool:
        return all(whole > inside for whole, inside in zip(tree.text_in(""), tree.text_in(name), strict=True))

    around = dotted_prefixes(seed)[:0:-1]  # from the innermost to the outermost, without the root
    for name in around:
        if tree.text_in(name)[0] and leaves_text(name):
            tower = name
            while (outer := _parent(tower)) and tree.text_in(outer) == tree.text_in(tower):
                tower = outer  # a wrapper that adds neither layers nor tables
            return tower
    # A tower of convolutions alone has no such layers: everything up to where the text begins.
    plain = [name for name in around if tree.text_in(name) == (0, 0)]
    return plain[-1] if plain and leaves_text(plain[-1]) else ""


def _projectors(tree: _Tree, towers: dict[str, int], heads: Collection[str]) -> list[str]:
    """Modules beside a tower, as large as can be, that read its width and write the text's."""
    text_bytes: Counter[str] = Counter()  # by container of layers
    for layer in tree.layers:
        if not _within_any(layer, towers):
            text_bytes[_parent(layer)] += sum(held.num_bytes for held in tree.below[layer])
    text = max(text_bytes, key=lambda name: text_bytes[name], default="")
    found: list[str] = []
    for tower, width in towers.items():
        writes = {held.shape[-1] for name in tree.tables if not is_within(name, tower) for held in tree.held[name]}
        outputs = {held.shape[0] for held in tree.matrices(tower) if not _within_any(held.module, tree.layers)}
        around = reversed(dotted_prefixes(tower)[:-1])
        for name in (child for outer in around for child in tree.inventory.children(outer)):
            holds_other = any(is_within(other, name) for other in (*towers, *heads, text)) or is_within(name, text)
            if not (holds_other or tree.text_in(name)[1] or name in found):
                sizes = [size for shape in tree.shapes(name) for size in shape]
                # Neighbouring patches may be merged, so multiples of the tower's width count.
                inputs = [index for index, size in enumerate(sizes) if size in outputs or size % width == 0]
                if any(size in writes and inputs and inputs != [index] for index, size in enumerate(sizes)):
                    found.append(name)
    return found


# -- inside one layer --------------------------------------------------------------------------------------------------


class _Layer:
    """The group of each parameter of one layer: experts first, whose structure is unmistakable, then other blocks."""

    def __init__(self, tree: _Tree, layer: str) -> None:
        self.tree = tree
        self.layer = layer
        self.inside = list(self._descendants(layer))
        # ``post_attention_layernorm`` holds no matrix.
        self.attention = [name for name in self.inside if self._named(_ATTENTION, name) and tree.matrices(name)]
        outer = [held for held in tree.matrices(layer) if not _within_any(held.module, self.attention)]
        fused = dict(_fused_experts(outer))
        modules = dict(self._expert_modules(outer, fused))
        num_experts = {**fused, **modules}
        # Modules that are experts own all that is inside; a router may be inside a module of fused experts.
        self.experts = {
            module
            for module in (layer, *self.inside)
            if module in num_experts or not modules.keys().isdisjoint(dotted_prefixes(module))
        }
        self._around_experts: set[str] = set()
        around_others: set[str] = set()
        for held in tree.matrices(layer):
            around = self._around_experts if held.module in self.experts else around_others
            around.update(dotted_prefixes(held.module))
        # A block is the innermost module that holds the experts and a matrix that is none of them; at most the layer.
        self.blocks: dict[str, int] = {}
        for root, count in num_experts.items():
            inward = (name for name in reversed(dotted_prefixes(root)) if name in around_others or name == layer)
            self.blocks[next(inward, layer)] = count

    def split(self, node: str) -> Iterator[tuple[str, list[_Parameter]]]:
        """(group, parameters) for all parameters at or below ``node`` that are in a group."""
        own = self.tree.held[node]
        if node in self.experts:
            yield "experts", own
        elif node not in self.blocks and any(len(held.shape) >= 2 for held in own):
            yield "mlp", own
        for child in self.tree.inventory.children(node):  # whole, when it is of one kind, else part by part
            if not self.tree.matrices(child):
                continue
            if child in self.attention:
                yield "attention", self.tree.below[child]
            elif child in self._around_experts or any(is_within(name, child) for name in self.attention):
                yield from self.split(child)
            elif node not in self.blocks:
                yield from self._dense(child)
            elif not self._is_router(child, self.blocks[node]):
                # Where the experts' block is the layer itself, any block of a layer may stand beside them.
                shared = ("shared_experts", self.tree.below[child])
                yield from self._dense(child) if node == self.layer else [shared]

    def _dense(self, node: str) -> Iterator[tuple[str, list[_Parameter]]]:
        lookups = self.tree.inventory.lookups
        shapes = [held.shape for held in self.tree.matrices(node) if held.module not in lookups]
        flat = [shape for shape in shapes if len(shape) == 2]
        if not flat:
            return  # convolutions alone: a stem, or a layer of another kind of model
        mixes_tokens = len(flat) < len(shapes)  # a convolution along the sequence
        unnamed = not self.attention and not self._named(_FEED_FORWARD, node)
        is_attention = mixes_tokens or (unnamed and not _is_feed_forward(flat))
        yield "attention" if is_attention else "mlp", self.tree.below[node]

    def _is_router(self, node: str, num_experts: int) -> bool:
        shapes = self.tree.shapes(node)
        return bool(_ROUTER.search(_segment(node))) or (len(shapes) == 1 and num_experts in shapes[0])

    def _descendants(self, node: str) -> Iterator[str]:
        for child in self.tree.inventory.children(node):
            yield child
            yield from self._descendants(child)

    def _named(self, fragment: re.Pattern[str], node: str) -> bool:
        return any(fragment.search(text) for text in (_segment(node), self.tree.inventory.modules[node]))

    def _expert_modules(self, outer: Sequence[_Parameter], fused: Collection[str]) -> Iterator[tuple[str, int]]:
        """Modules that are experts, each with their number in the layer (0: not known)."""
        found = dict(item for name in (self.layer, *self.inside) for item in self._numbered_experts(name, outer))
        yield from found.items()
        around = {module for root in (*found, *fused) for module in dotted_prefixes(root)}
        for name in self.inside:  # laid out in a way of their own, e.g. [experts * rows, width]
            if _segment(name) == "experts" and self.tree.matrices(name) and name not in around:
                yield name, 0

    def _numbered_experts(self, container: str, outer: Sequence[_Parameter]) -> Iterator[tuple[str, int]]:
        """Numbered children of equal layout, as many as a matrix beside them (the router) has rows."""
        families: dict[str, list[str]] = {}
        for child in self.tree.inventory.children(container):
            stem = child.rstrip("0123456789")
            if stem != child and self.tree.matrices(child) and not _within_any(child, self.attention):
                families.setdefault(stem, []).append(child)
        for stem, family in families.items():
            layouts = {
                tuple((held.module[len(child) :], held.attr, held.shape) for held in self.tree.below[child])
                for child in family
            }
            if len(family) < 2 or len(layouts) > 1:
                continue
            beside = [held.shape for held in outer if not held.module.startswith(stem)]
            routed = any(len(shape) == 2 and len(family) in shape for shape in beside)
            if routed or "expert" in stem[len(self.layer) :]:
                yield from ((child, len(family)) for child in family)


def _fused_experts(outer: Sequence[_Parameter]) -> Iterator[tuple[str, int]]:
    """Modules with parameters [experts, ., .]: several of one count, and a matrix elsewhere that has a row for each."""
    stacks: dict[int, list[_Parameter]] = {}
    for held in outer:
        # A convolution [out, in / groups, kernel] has three dimensions, too, but one of the last two is 1, or no other
        # parameter has the same first dimension.
        if len(held.shape) >= 3 and held.shape[0] > 1 and held.shape[1] > 1 and prod(held.shape[2:]) > 1:
            stacks.setdefault(held.shape[0], []).append(held)
    for count, stack in stacks.items():
        holders = {held.module for held in stack}
        routed = any(len(held.shape) == 2 and count in held.shape and held.module not in holders for held in outer)
        if len(stack) > 1 and routed:
            yield from ((holder, count) for holder in holders)


def _is_feed_forward(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether matrices can be those of ``width -> inner -> width``, the gate beside ``up`` or fused with it."""
    # Attention has four matrices, or a fused one that is three widths wide, or with grouped heads one that is between
    # one and two; only its output projection is square.
    for width in set.intersection(*(set(shape) for shape in shapes)):
        inner = sorted(prod(shape) // width for shape in shapes)
        if len(shapes) <= 3 and len(set(inner)) == 1:
            return True
        if len(shapes) == 2 and inner[1] == 2 * inner[0] and inner[0] != width:
            return True
    return len(shapes) == 1
