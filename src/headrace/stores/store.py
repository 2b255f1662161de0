"""The interface of every store, and the stores that one process fills and reads by itself, without a GPU's driver.

Host memory (``cpu`` on a CPU), files (``disk``), nothing (``meta``), and several stores side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from headrace.checkpoint.safetensors_header import FileFingerprint, FileTensor
from headrace.checkpoint.weight_map import TensorSource, WeightMap
from headrace.codec.exponents import Piece
from headrace.errors import CheckpointError, OptionError
from headrace.memory.pages import map_parts
from headrace.memory.pinned import PinnedBuffer, pinned_region
from headrace.memory.split_range import MappedMemory
from headrace.model.live_tensors import BoundStorage
from headrace.plan.plan import Plan, Unit
from headrace.ranks.group import RankGroup
from headrace.stores.sources import (
    ByteRange,
    ConvertedFile,
    Copy,
    DiskOptions,
    File,
    ReadCounter,
    Source,
    fill,
    fill_in_threads,
)

__all__ = [
    "AlreadyPinned", "CpuStore", "Destinations", "DiskStore", "Load", "MetaStore", "Store", "StoreRequest",
    "Stores", "new_buffer", "require_weights",
]  # fmt: skip


@dataclass(frozen=True)
class AlreadyPinned:
    """A storage that is in pinned memory already, in memory made for it: it is neither copied nor pinned again."""

    memory: PinnedBuffer | MappedMemory
    start: int
    num_bytes: int


@dataclass(frozen=True)
class StoreRequest:
    """What the store of a plan is opened for.

    Attributes:
        plan: checked against model and machine.
        device: where compute runs.
        bound: the live tensors of every storage, by storage name.
        weights: the checkpoint; needed for tensors on ``meta`` and for what is stored in files.
        disk: how its files are read.
        ranks: of the same offload, for stores and links that span processes.
        pooled: storages that are in pinned memory already; those that are offloaded stay there.
        peer: the GPU whose memory holds the units of store ``peer``; ``None``: there are none.
    """

    plan: Plan
    device: torch.device
    bound: dict[str, BoundStorage] = field(repr=False)
    weights: WeightMap | None = None
    disk: DiskOptions | None = None
    ranks: RankGroup | None = None
    pooled: Mapping[str, AlreadyPinned] = field(default_factory=dict, repr=False)
    peer: torch.device | None = None

    @property
    def offloaded(self) -> dict[str, BoundStorage]:
        """Of ``bound``, what the plan offloads."""
        return {name: self.bound[name] for name in self.plan.offloaded_names}


@dataclass(frozen=True)
class Load:
    """What a link needs to copy one unit: its bytes, and its slab if that is ready in host memory.

    Attributes:
        unit: index in the plan.
        copies: of the whole unit, or of its code, into its slot, for links that read.
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

    @property
    def coded_bytes(self) -> int | None:
        """Bytes that cross the link; ``None``: it is not coded."""
        return sum(piece.code_bytes for piece in self.coded) if self.coded else None

    @property
    def in_memory(self) -> tuple[tuple[int, torch.Tensor], ...]:
        """What a link that copies has to copy: (offset in the slot, bytes); empty if it cannot."""
        return self.pieces if self.slab is None else ((0, self.slab),)


class Destinations(Mapping[str, torch.Tensor]):
    """By storage name, where its bytes go: memory that is made, or waited for, when it is looked up."""

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
    """

    is_split: ClassVar[bool] = False

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
        """What makes up ``storage``, with offsets relative to its first byte."""

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

    def require_mapped_unchanged(self, storage: str | None = None) -> None:
        """Raise ``TransferError`` if a file of which ``storage`` (default: any) is read in place was written to."""

    def load(self, unit: Unit) -> Load:
        """What a link needs to bring ``unit``."""
        return Load(unit.index, tuple(self.unit_copies(unit)))

    def unit_copies(self, unit: Unit) -> list[Copy]:
        """What makes up a whole unit, with offsets relative to the start of its slab."""
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


def require_weights(weights: WeightMap | None) -> WeightMap:
    """Return ``weights``; OptionError if there are none."""
    if weights is None:
        raise OptionError(
            "this offload reads weights from safetensors files, and none were given: pass checkpoint=FOLDER to "
            "headrace.offload (model.save_pretrained(FOLDER) or safetensors.torch.save_model writes one)"
        )
    return weights


class CpuStore(Store):
    """``cpu`` for compute on the CPU: keeps the given tensors alive and reads from them; copies nothing."""

    def __init__(self, buffers: Mapping[str, torch.Tensor], made: Collection[str] = ()) -> None:
        """``buffers``: per storage name its bytes (uint8, 1-D, CPU). ``made``: those allocated for this store."""
        self._buffers = dict(buffers)
        self._made = frozenset(made)

    def adopts(self, storage: str) -> bool:
        return storage not in self._made

    def copies(self, storage: str) -> list[Copy]:
        return [Copy(ByteRange.of(self._buffers[storage]), 0)]

    def in_place(self, storage: str) -> torch.Tensor:
        return self._buffers[storage]

    @property
    def host_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers.values())

    @property
    def account(self) -> dict[str, int]:
        made = sum(self._buffers[name].numel() for name in self._made & self._buffers.keys())
        return {"host": made, "adopted": self.host_bytes - made}

    def close(self) -> None:
        self._buffers.clear()


class _Nothing(Source):
    def read(self, offset: int, into: memoryview) -> None:
        """Leave the destination unchanged."""


class MetaStore(Store):
    """``meta``, no bytes at all: schedules, hooks and memory can be sized without weights; outputs mean nothing."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """``sizes``: bytes per storage name."""
        self._sizes = dict(sizes)

    def copies(self, storage: str) -> list[Copy]:
        return [Copy(ByteRange(_Nothing(), 0, self._sizes[storage]), 0)]

    def in_place(self, storage: str) -> torch.Tensor:
        return new_buffer(self._sizes[storage])  # never touched, so a large one takes no memory

    @property
    def host_bytes(self) -> int:
        return 0

    @property
    def account(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing to free."""


class DiskStore(Store):
    """``disk``: the unmodified safetensors files that the storages came in, read by position straight into the slot.

    What the files hold in another dtype is converted by the thread that reads it.
    """

    def __init__(
        self,
        sources: Mapping[str, TensorSource],
        options: DiskOptions | None = None,
        *,
        stamps: Iterable[FileFingerprint] = (),
        pin_in_place: bool = False,
        lookups: Collection[str] = (),
        adopted: Mapping[str, torch.Tensor] | None = None,
        counter: ReadCounter | None = None,
    ) -> None:
        """Open the files; nothing is read.

        Args:
            sources: per storage name where its bytes are.
            options: how files are read.
            stamps: what files have to be; those without may change.
            pin_in_place: what is read in place is copied into pinned memory first, because a GPU cannot address a
                mapped file.
            lookups: of what is read in place, tables of which single rows are looked up.
            adopted: storages whose bytes are read from the memory that they came in (uint8, 1-D, CPU).
            counter: of what is read; default one of its own.
        """
        self._sources = dict(sources)
        options = options or DiskOptions()
        paths = {part.tensor.path for source in self._sources.values() for part in source.parts}
        # Of the files that the plan was made from: offsets of their headers are not valid in others.
        expected = {stamp.path: stamp for stamp in stamps}
        counter = counter or ReadCounter()
        self._files = {path: File(path, options, expected.get(path), counter) for path in sorted(paths)}
        self._lookups = frozenset(lookups)
        self._adopted = dict(adopted or {})
        self._mapped: dict[str, torch.Tensor] = {}
        self._mapped_paths: dict[str, set[Path]] = {}
        self._pin_in_place = pin_in_place
        self._pinned: dict[str, torch.Tensor] = {}

    def adopts(self, storage: str) -> bool:
        return storage in self._adopted

    def copies(self, storage: str) -> list[Copy]:
        if storage in self._adopted:
            return [Copy(ByteRange.of(self._adopted[storage]), 0)]
        return [
            Copy(self._range(part.tensor, self._sources[storage].dtype), part.offset)
            for part in self._sources[storage].parts
        ]

    def _range(self, tensor: FileTensor, dtype: torch.dtype) -> ByteRange:
        """The bytes of a file tensor as elements of ``dtype``."""
        file = self._files[tensor.path]
        if tensor.dtype == dtype:
            return ByteRange(file, tensor.offset, tensor.num_bytes)
        converted = ConvertedFile(file, tensor.offset, tensor.dtype, dtype)
        return ByteRange(converted, 0, tensor.num_bytes // tensor.dtype.itemsize * dtype.itemsize)

    def in_place(self, storage: str) -> torch.Tensor:
        if storage in self._adopted:
            return self._adopted[storage]
        if self._pin_in_place:
            if storage not in self._pinned:
                self._pinned[storage] = self._read_pinned(storage)
            return self._pinned[storage]
        source = self._sources[storage]
        if why := source.why_not_mappable:
            raise CheckpointError(f"{storage} {why} and cannot be read in place; prefetch it instead")
        if storage not in self._mapped:
            parts = [(self._files[p.tensor.path].fd, p.tensor.offset, p.tensor.num_bytes) for p in source.parts]
            self._mapped[storage] = torch.from_numpy(map_parts(parts, at_random=storage in self._lookups))
            self._mapped_paths[storage] = {part.tensor.path for part in source.parts}
        return self._mapped[storage]

    def require_mapped_unchanged(self, storage: str | None = None) -> None:
        names = self._mapped_paths if storage is None else [storage]
        for path in set().union(*(self._mapped_paths.get(name, ()) for name in names)):
            self._files[path].require_unchanged()

    @property
    def host_bytes(self) -> int:
        joined = sum(self._sources[name].joined_bytes for name in self._mapped)
        return joined + sum(buffer.numel() for buffer in self._pinned.values())

    @property
    def account(self) -> dict[str, int]:
        joined = sum(self._sources[name].joined_bytes for name in self._mapped)
        in_files = sum(source.file_bytes for source in self._sources.values())
        adopted = sum(buffer.numel() for buffer in self._adopted.values())
        return {"file": in_files - adopted} | {
            name: size for name, size in (("host", joined), ("adopted", adopted)) if size
        }

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._mapped.clear()  # tensors may view a mapping, which ends with the last of them
        self._adopted.clear()
        self._pinned.clear()

    def _read_pinned(self, storage: str) -> torch.Tensor:
        """A copy of ``storage`` in pinned memory, read by several threads."""
        copies = self.copies(storage)
        buffer = pinned_region(sum(copy.num_bytes for copy in copies))
        fill_in_threads(buffer, copies)
        return buffer


class Stores(Store):
    """Several stores for one plan: most of it in one; beside it units in files, on a peer or coded, cached experts."""

    def __init__(self, most: Store) -> None:
        self._every, self._store_of = [most], dict[str, Store]()

    def add(self, store: Store, names: Iterable[str]) -> None:
        """``store`` holds the storages ``names``; this closes it."""
        self._every.append(store)
        self._store_of |= dict.fromkeys(names, store)

    @property
    def single(self) -> Store | None:
        """The store, if there is one alone."""
        return self._every[0] if len(self._every) == 1 else None

    def of(self, storage: str) -> Store:
        """The one that holds ``storage``."""
        return self._store_of.get(storage, self._every[0])

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
