"""The interface of every store, what one is opened for, and several stores side by side."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from headrace.errors import OptionError
from headrace.memory.system import touch_threads
from headrace.model.live_tensors import BoundStorage, used_elsewhere
from headrace.plan.kinds import Unit
from headrace.plan.plan import Plan
from headrace.plan.slabs import SlabEntry
from headrace.stores.sources import Copy, fill

if TYPE_CHECKING:
    from headrace.checkpoint.weight_map import WeightMap
    from headrace.codec.exponents import Piece
    from headrace.memory.pinned import PinnedBuffer
    from headrace.memory.split_range import MappedMemory
    from headrace.ranks.group import RankGroup
    from headrace.stores.file_reads import DiskOptions

# The code of a unit in memory of its own, and what it consists of.
Code = tuple["PinnedBuffer", tuple["Piece", ...]]

_TOUCHED_PIECE_BYTES = 4 << 20  # so that a weight of 64 MiB has one for each of sixteen cores

# Called with (bytes loaded, bytes to load).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class AlreadyPinned:
    """A storage that is in pinned memory already, in memory made for it: it is neither copied nor pinned again."""

    memory: PinnedBuffer | MappedMemory
    start: int
    num_bytes: int


class Pool(Protocol):
    """Memory in which an engine's weights were put while their model was built."""

    def find_storages(self, bound: Mapping[str, BoundStorage]) -> Mapping[str, AlreadyPinned]:
        """The storages of ``bound`` that lie in it, by name."""

    def find_in_engine_memory(self, bound: Mapping[str, BoundStorage]) -> frozenset[str]:
        """Names of the storages of a GPU that lie in pinned memory of the engine's own."""


@dataclass(frozen=True)
class StoreRequest:
    """Request to open the store of a plan.

    Attributes:
        plan: checked against model and machine.
        device: where compute runs.
        bound: the live tensors of every storage, by storage name.
        weights: the checkpoint; needed for tensors on ``meta`` and for what is stored in files.
        disk: how its files are read.
        ranks: ranks of the same offload, for stores and links that span processes.
        pooled: storages that are in pinned memory already; those that are offloaded stay there.
        taken: copies of storages out of the store of an offload before this one; their home is ``meta`` meanwhile.
        codes: codes that such a store has, by the entries of their unit.
        peer: the GPU whose memory holds the units of store ``peer``; ``None``: there are none.
        hosts: hosts of all ranks, once the ranks have been compared.
    """

    plan: Plan
    device: torch.device
    bound: dict[str, BoundStorage] = field(repr=False)
    weights: WeightMap | None = None
    disk: DiskOptions | None = None
    ranks: RankGroup | None = None
    pooled: Mapping[str, AlreadyPinned] = field(default_factory=dict, repr=False)
    taken: Mapping[str, Sequence[Copy]] = field(default_factory=dict, repr=False)
    codes: Mapping[tuple[SlabEntry, ...], Code] = field(default_factory=dict, repr=False)
    peer: torch.device | None = None
    hosts: Sequence[Sequence[str]] = ()

    @property
    def offloaded(self) -> dict[str, BoundStorage]:
        """Storages of ``bound`` that the plan offloads."""
        return {name: self.bound[name] for name in self.plan.offloaded_names}


@dataclass(frozen=True)
class Load:
    """Input of a link's copy of one unit: its bytes, and its slab if that is ready in host memory.

    Attributes:
        unit: index in the plan.
        copies: copies of the whole unit, or of its code, into its slot, for links that read.
        slab: the slab, or the code, as it will be in the slot (uint8, 1-D, host), for links that copy; ``None`` where
            the store has no such thing.
        pieces: in place of a slab, pinned parts of it that are not side by side: (offset in the slot, bytes).
        coded: what the code consists of.
    """

    unit: int
    copies: tuple[Copy, ...]
    slab: torch.Tensor | None = None
    pieces: tuple[tuple[int, torch.Tensor], ...] = ()
    coded: tuple[Piece, ...] = ()

    def link_bytes(self, unit: Unit) -> int:
        """Bytes that cross the link for ``unit``: of its code, whose length the plan has only expected."""
        return sum(piece.code_bytes for piece in self.coded) if self.coded else unit.payload_bytes

    @property
    def in_memory(self) -> tuple[tuple[int, torch.Tensor], ...]:
        """Copies of a link that copies: (offset in the slot, bytes); empty if it cannot."""
        return self.pieces if self.slab is None else ((0, self.slab),)


class Destinations(Mapping[str, torch.Tensor]):
    """Memory for the bytes of each storage, by name: made, or waited for, when it is looked up."""

    def __init__(self, names: Iterable[str], find: Callable[[str], torch.Tensor]) -> None:
        self._names, self._find = dict.fromkeys(names), find

    def __getitem__(self, storage: str) -> torch.Tensor:
        return self._find(storage)

    def __contains__(self, storage: object) -> bool:  # by __getitem__ it would be made
        return storage in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Store(ABC):
    """Bytes of the offloaded storages, by storage name.

    A store owns what it opened and releases it in :meth:`close`; views handed out stay valid (contract 6).

    Attributes:
        is_split: this process holds only a part of every unit.
        notes: sentences for ``stats()`` about how it reads.
    """

    is_split: ClassVar[bool] = False
    notes: tuple[str, ...] = ()

    # -- filling ------------------------------------------------------------------------------------------------------

    def takes_over(self, storage: str) -> bool:
        """Whether live tensors may view the store's memory as soon as their bytes are loaded there."""
        return False

    def adopts(self, storage: str) -> bool:
        """Whether ``storage`` stays in the memory that the model came with."""
        return False

    def on_loaded(self, storage: str) -> None:
        """Called when the bytes of ``storage`` are in their destination; see ``open_store``."""

    def finish(self) -> None:
        """Called once, when everything is loaded: return when all of it can be read. May be collective.

        Raises:
            StateError: another thread is capturing a graph.
            PeerError, CheckpointError, OptionError: a store that ranks share, see ``SharedStore``.
        """

    # -- reading ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def copies(self, storage: str) -> list[Copy]:
        """Ranges that make up ``storage``, with offsets relative to its first byte."""

    @abstractmethod
    def in_place(self, storage: str) -> torch.Tensor:
        """The bytes of ``storage`` where they are stored: uint8, 1-D. For the ``uva`` mechanism."""

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """Host memory this store occupies."""

    @property
    def account(self) -> dict[str, int]:
        """Bytes of this store by where they are stored.

        ``host``: in memory this process has taken for them; ``host_pinned``: the same, page-locked; ``host_shared``: in
        memory that all ranks of the host share, counted once; ``adopted``: in memory the model came with; ``file``;
        ``peer``: in that of another GPU.
        """
        return {"host": self.host_bytes}

    def held(self, storage: str) -> AlreadyPinned | None:
        """Memory of ``storage`` for another store to keep; ``None``: its bytes have to be copied."""
        return None

    def require_mapped_unchanged(self, storage: str | None = None) -> None:
        """Raise ``TransferError`` if a file of which ``storage`` (default: any) is read in place was written to."""

    def load(self, unit: Unit) -> Load:
        """Input of a link's copy of ``unit``."""
        return Load(unit.index, tuple(self.unit_copies(unit)))

    def unit_copies(self, unit: Unit) -> list[Copy]:
        """Ranges that make up a whole unit, with offsets relative to the start of its slab."""
        return [copy.moved(entry.offset) for entry in unit.entries for copy in self.copies(entry.storage)]

    def read(self, storage: str, into: torch.Tensor) -> None:
        """Copy ``storage`` into ``into`` (uint8, 1-D, on the CPU)."""
        fill(into, self.copies(storage))

    # -- the end ------------------------------------------------------------------------------------------------------

    def unpin(self) -> None:
        """Unregister pinned memory now, even while tensors view it; it stays as ordinary memory."""

    @abstractmethod
    def close(self) -> None:
        """Close files and free memory; idempotent."""


def new_buffer(num_bytes: int) -> torch.Tensor:
    """Uninitialised host memory: uint8, 1-D, 64-byte aligned by torch's allocator."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def touched_buffer(num_bytes: int) -> torch.Tensor:
    """:func:`new_buffer` whose pages all cores have made: the one thread of a copy to it takes several times as long.

    Raises:
        BudgetError: the system has no memory for it.
    """
    buffer = new_buffer(num_bytes)
    if num_bytes > _TOUCHED_PIECE_BYTES:
        from headrace.memory.pages import populate_parallel

        populate_parallel(buffer, touch_threads(), _TOUCHED_PIECE_BYTES)
    return buffer


def require_weights(weights: WeightMap | None) -> WeightMap:
    """Return ``weights``; OptionError if there are none."""
    if weights is None:
        raise OptionError(
            "this offload reads weights from safetensors files, and none were given: pass checkpoint=FOLDER to "
            "headrace.offload (model.save_pretrained(FOLDER) or safetensors.torch.save_model writes one)"
        )
    return weights


@dataclass(frozen=True)
class Opened:
    """A store before it is filled.

    Attributes:
        store: closed by the caller.
        on_host: by storage name, the memory of the store that is still to be filled (uint8, 1-D, host).
        on_device: the memory as a GPU's, as seen from the device that computes.
    """

    store: Store
    on_host: Mapping[str, torch.Tensor] = field(default_factory=dict)
    on_device: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Stores(Store):
    """Several stores for one plan, such as host memory and beside it files, a peer, codes or cached experts."""

    def __init__(self) -> None:
        self._every: list[Store] = []
        self._store_of: dict[str, Store] = {}

    def add(self, store: Store, names: Iterable[str]) -> None:
        """``store`` holds the storages ``names``; this closes it."""
        self._every.append(store)
        self._store_of |= dict.fromkeys(names, store)

    @property
    def single(self) -> Store | None:
        """The store, if there is one alone."""
        return self._every[0] if len(self._every) == 1 else None

    def of(self, storage: str) -> Store:
        """The store that holds ``storage``."""
        return self._store_of[storage]

    def takes_over(self, storage: str) -> bool:
        return self.of(storage).takes_over(storage)

    def adopts(self, storage: str) -> bool:
        return self.of(storage).adopts(storage)

    def on_loaded(self, storage: str) -> None:
        self.of(storage).on_loaded(storage)

    def finish(self) -> None:
        for store in self._every:
            store.finish()

    def copies(self, storage: str) -> list[Copy]:
        return self.of(storage).copies(storage)

    def load(self, unit: Unit) -> Load:
        # A unit in memory comes with its slab and one in files without: links distinguish them by that.
        return self.of(unit.entries[0].storage).load(unit)

    def in_place(self, storage: str) -> torch.Tensor:
        return self.of(storage).in_place(storage)

    def read(self, storage: str, into: torch.Tensor) -> None:
        self.of(storage).read(storage, into)

    def held(self, storage: str) -> AlreadyPinned | None:
        return self.of(storage).held(storage)

    def require_mapped_unchanged(self, storage: str | None = None) -> None:
        for store in self._every if storage is None else [self.of(storage)]:
            store.require_mapped_unchanged(storage)

    @property
    def host_bytes(self) -> int:
        return sum(store.host_bytes for store in self._every)

    @property
    def account(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for store in self._every:
            total.update(store.account)
        return dict(total)

    def unpin(self) -> None:
        for store in self._every:
            store.unpin()

    def close(self) -> None:
        for store in reversed(self._every):
            store.close()


def kept_by_others(bound: Mapping[str, BoundStorage], in_files: Mapping[str, BoundStorage]) -> list[str]:
    """Storages of ``in_files`` whose live memory something else views, and may write to."""
    names: list[str] = []
    for _ in range(2):
        names = [storage.info.name for storage in used_elsewhere(bound.values()) if storage.info.name in in_files]
        if not names or not gc.collect():
            break
    return names
