"""A model as names and sizes: its storages and modules, and the other facts that planning needs.

Made from a live model by :func:`headrace.model.inventory.take_inventory` and
:func:`headrace.model.memory_profile.profile_of`. Here is no torch: plans for a folder that was planned before are made
from kept records.

A module object with several parents goes by its first name, as in ``named_modules``; the other places are in
``Inventory.shared``, and the names that they give to tensors in ``TensorInfo.aliases``.

The unit of bookkeeping is the *storage*, not the tensor: tied weights, views and cached ``.view()`` attributes share
one storage, so they have to be copied together and stay views of one another. A :class:`StorageInfo` therefore
lists the tensors that view it, each with its own offset, shape and strides.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

from headrace.errors import OptionError
from headrace.json_files import Positive

Kind = Literal["parameter", "buffer", "attribute"]

# torch's allocator gives the pool of a captured step whole segments, one for small and one for large tensors; and the
# first capture of a process another one for the workspace of cuBLAS (of Hopper; of other GPUs it is 8 MiB).
_GRAPH_POOL_BYTES = (2 + 20 + 32) << 20

_NO_CACHE = "no KV cache is counted: the model's forward returns none"

# These hand a child's weight to a kernel without calling the child, whose hooks would never run.
_READS_CHILDREN = frozenset({"MultiheadAttention"})


@dataclass(frozen=True)
class ElementType:
    """Stands in records that are read without torch for the ``torch.dtype`` of that name; ``itemsize`` in bytes."""

    name: str
    itemsize: Positive

    def __str__(self) -> str:
        return self.name


if TYPE_CHECKING:
    import torch

    from headrace.config import Workload

    DType = torch.dtype
else:
    DType = ElementType


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
        return ":".join((dotted_name(self.module, self.attr), *self.inner))


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
    dtype: DType
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
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if step != expected:
                return False
            expected *= max(size, 1)
        return True


# Of batch norms and instance norms.
_STATISTICS = ("running_mean", "running_var")


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

    @property
    def counts(self) -> bool:
        """Whether it is a buffer that forwards write in training: a counter, or running statistics."""
        return any(
            tensor.kind == "buffer"
            and ((tensor.shape == () and "int" in str(tensor.dtype)) or tensor.locations[0].attr in _STATISTICS)
            for tensor in self.tensors
        )


def packed_modules(storages: Iterable[StorageInfo]) -> set[str]:
    """Modules whose weight is packed in a buffer ``qweight`` (GPTQ, AWQ): all that they hold are weights, no state."""
    places = (place for storage in storages for tensor in storage.tensors for place in tensor.locations)
    return {place.module for place in places if (place.kind, place.attr) == ("buffer", "qweight")}


@dataclass(frozen=True)
class ModuleAlias:
    """One place of a module: child ``attr`` of ``parent``; the name of the module may come from another place."""

    parent: str
    attr: str
    module: str


@dataclass(frozen=True)
class Inventory:
    """All storages of a model, in the order of ``named_modules``.

    Attributes:
        storages: storages with bytes.
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
    shared: tuple[ModuleAlias, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages."""
        return sum(storage.num_bytes for storage in self.storages)

    @cached_property
    def by_name(self) -> dict[str, StorageInfo]:
        """Storage of every tensor name."""
        return {name: storage for storage in self.storages for name in storage.names}

    @cached_property
    def separate_experts(self) -> dict[str, int]:
        """How many experts a module holds in parameters of their own, ``0_gate_proj_qweight``, as files have them."""
        places = {
            (place.module, *place.attr.partition("_")[:2]) for s in self.storages for place in s.tensors[0].locations
        }
        return Counter(module for module, number, mark in places if number.isdigit() and mark)

    def children(self, module: str) -> list[str]:
        """Direct children of ``module`` (``""`` is the root), in order."""
        return [place.module for place in self.places(module) if place.module == dotted_name(module, place.attr)]

    def places(self, module: str) -> list[ModuleAlias]:
        """The modules directly below ``module``: its children, then modules whose name comes from another place."""
        return self._places.get(module, [])

    @cached_property
    def _places(self) -> dict[str, list[ModuleAlias]]:
        found: dict[str, list[ModuleAlias]] = {}
        own = (ModuleAlias(name.rpartition(".")[0], name.rpartition(".")[2], name) for name in self.modules if name)
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
        """Dominators by iteration to a fixed point (Allen, Cocke 1972); a module comes after its first parent."""
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
        """Storages that are reached through ``module`` alone, so that its forward alone reads them; in model order."""
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


@lru_cache(1 << 16)  # a planner asks for those of every module again and again
def dotted_prefixes(module: str) -> tuple[str, ...]:
    """``""``, ``a`` and ``a.b`` for ``a.b``."""
    parts = module.split(".") if module else []
    return tuple(".".join(parts[:count]) for count in range(len(parts) + 1))


def dotted_name(parent: str, attr: str) -> str:
    """``parent.attr``; ``attr`` alone below the root, whose name is empty."""
    return f"{parent}.{attr}" if parent else attr


@dataclass(frozen=True)
class ModelProfile:
    """Facts about a model; the defaults are for a model about which nothing is known.

    Attributes:
        experts_per_token: how many experts of a mixture-of-experts layer one row is routed to (``top_k``); ``None``
            means that every row uses all of every tensor.
        kv_bytes_per_token: bytes one token of one sequence takes in the caches of all layers together.
        kv_window_bytes_per_token: those of layers that keep no more than ``window`` tokens; comes on top.
        window: tokens that those layers keep.
        state_bytes_per_sequence: bytes per sequence that do not grow with the context (recurrent states, convolutions).
        activation_bytes_per_row: peak of live intermediate tensors of a step per row, logits included.
        attention_bytes_per_token: peak of what the attention of one layer allocates in a step per token of the context
            of every sequence (a cache that grows by copying, latents that are expanded).
        max_context: the longest context the model was made for, in tokens; ``None`` if it states none.
        row_readers: modules whose experts may lie in any order of rows, by dotted name.
        kernels_per_step: kernels of a decoding step of transformers' eager forward, matrix products apart; ``None`` for
            a model whose kernels are fused (of an engine, of a compiler), or that was not measured.
        copied_experts_bytes_per_row: bytes of the experts of a row that such a step copies before it multiplies.
    """

    experts_per_token: int | None = None
    kv_bytes_per_token: int = 0
    kv_window_bytes_per_token: int = 0
    window: int = 0
    state_bytes_per_sequence: int = 0
    activation_bytes_per_row: int = 0
    attention_bytes_per_token: int = 0
    max_context: int | None = None
    row_readers: tuple[str, ...] = ()
    kernels_per_step: int | None = None
    copied_experts_bytes_per_row: int = 0

    def check_context(self, context: int) -> None:
        """Raise OptionError if ``context`` is longer than the model allows."""
        if self.max_context is not None and context > self.max_context:
            raise OptionError(
                f"a context of {context} tokens is longer than the {self.max_context} that the model was made for "
                f"(max_position_embeddings in its configuration); use --context {self.max_context} or less"
            )

    def for_workload(self, workload: Workload) -> ModelProfile:
        """Profile of the steps of ``workload``; of a pipeline that of the call whose size it states.

        Raises:
            OptionError: it states one, and the model is no pipeline.
        """
        return self._for_call(workload) if workload.call_size else self

    def _for_call(self, workload: Workload) -> ModelProfile:
        raise OptionError(
            f"{', '.join(workload.call_size)}: expected a pipeline of diffusers, whose calls have a size, found "
            f"another model; leave them out (--height, --width, --frames, --tiling, --steps)"
        )

    def cache_bytes(self, batch: int, context: int) -> int:
        """Bytes of the caches of ``batch`` sequences of ``context`` tokens each."""
        windowed = min(context, self.window) * self.kv_window_bytes_per_token
        return batch * (context * self.kv_bytes_per_token + windowed + self.state_bytes_per_sequence)

    def workload_bytes(self, batch: int, context: int) -> int:
        """Device memory beside the weights: caches, and activations of a step of ``batch`` rows; 0 without context."""
        if context == 0:
            return 0
        per_sequence = self.activation_bytes_per_row + context * self.attention_bytes_per_token
        graph_bytes = 0
        if self.kernels_per_step is not None:
            per_sequence += self.copied_experts_bytes_per_row
            graph_bytes = _GRAPH_POOL_BYTES
        return self.cache_bytes(batch, context) + batch * per_sequence + graph_bytes

    def describe(self, batch: int, context: int) -> str:
        """Name of what takes :meth:`workload_bytes`."""
        return f"batch {batch} at {context} tokens"

    def smaller(self, room_bytes: int, batch: int, context: int) -> str:
        """The largest batch and the longest context that take no more than ``room_bytes``, in words."""
        # By bisection: caches and activations grow with both.
        rows = bisect_right(range(batch), room_bytes, key=lambda rows: self.workload_bytes(rows, context)) - 1
        tokens = bisect_right(range(1, context), room_bytes, key=lambda tokens: self.workload_bytes(batch, tokens))
        fitting = [f"--batch {rows} at {context} tokens"] if rows > 0 else []
        fitting += [f"--context {tokens} with batch {batch}"] if tokens > 0 else []
        return ", or ".join(fitting)

    def notes(self, context: int, room_bytes: Callable[[], int | None], pass_s: Callable[..., float]) -> list[str]:
        """Sentences for a plan.

        Args:
            room_bytes: what the fewest weights leave on the device; ``None``: not known.
            pass_s: seconds that a module of the root, by name, takes under the plan for so many operations.
        """
        return [_NO_CACHE] if context and not self.cache_bytes(1, context) else []
