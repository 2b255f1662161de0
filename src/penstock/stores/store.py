"""The interface of every store: filling it, reading a unit or a storage from it, reaching a storage in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from penstock.config import Mode
from penstock.plan.plan import Unit
from penstock.stores.source import Source

__all__ = ["Load", "Segment", "Source", "Store", "new_blob", "writable_view"]


@dataclass(frozen=True)
class Segment:
    """One stretch of a unit: ``num_bytes`` of ``source``, which go to ``slot_offset``."""

    source: Source
    slot_offset: int
    num_bytes: int


@dataclass(frozen=True)
class Load:
    """What a link needs to bring one unit: its stretches, and its whole slab if that lies ready in host memory.

    Attributes:
        unit: index in the plan.
        segments: stretches with offsets relative to the slab, for links that read.
        slab: the slab as it will be in the slot (uint8, 1-D, host), for links that copy; ``None`` where the store has
            no such thing.
        pieces: in place of a slab, pinned stretches of it that do not lie side by side: (offset in the slot, bytes).
    """

    unit: int
    segments: tuple[Segment, ...]
    slab: torch.Tensor | None = None
    pieces: tuple[tuple[int, torch.Tensor], ...] = ()

    @property
    def stretches(self) -> tuple[tuple[int, torch.Tensor], ...]:
        """What a link that copies has to copy, with offsets in the slot; empty if it cannot."""
        return self.pieces if self.slab is None else ((0, self.slab),)


class Store(ABC):
    """Bytes of the offloaded storages, by storage name.

    A store owns what it opened and gives it back in :meth:`close`; views handed out stay valid (contract 6).

    Attributes:
        mode: its name in policies and plans.
        takes_over: live tensors may look into the store's memory as soon as their bytes are loaded there.
        is_split: this process holds only a part of every unit.
    """

    mode: ClassVar[Mode]
    takes_over: ClassVar[bool] = False
    is_split: ClassVar[bool] = False

    # -- filling ------------------------------------------------------------------------------------------------------

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
    def segments(self, storage: str) -> list[Segment]:
        """The stretches that make up ``storage``, offsets relative to its first byte."""

    @abstractmethod
    def in_place(self, storage: str) -> torch.Tensor:
        """The bytes of ``storage`` where they rest: uint8, 1-D. For the ``uva`` mechanism."""

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """Host memory this store occupies."""

    @property
    def account(self) -> dict[str, int]:
        """Bytes of this store by where they rest.

        ``host``: in memory this process has taken for them; ``host_pinned``: the same, page-locked; ``host_shared``: in
        memory that all ranks of the host share, counted once; ``adopted``: in memory the model came with; ``file``.
        """
        return {"host": self.host_bytes}

    def require_mapped_unchanged(self) -> None:
        """Raise ``TransferError`` if a file that is read in place was written to since it was opened."""

    def load(self, unit: Unit) -> Load:
        """What a link needs to bring ``unit``."""
        return Load(unit.index, tuple(self.unit_segments(unit)))

    def unit_segments(self, unit: Unit) -> list[Segment]:
        """The stretches of a whole unit, offsets relative to the start of its slab."""
        return [
            Segment(segment.source, entry.offset + segment.slot_offset, segment.num_bytes)
            for entry in unit.entries
            for segment in self.segments(entry.storage)
        ]

    def read(self, storage: str, into: torch.Tensor) -> None:
        """Copy ``storage`` into ``into`` (uint8, 1-D, on the CPU), in the calling thread."""
        view = writable_view(into)
        for segment in self.segments(storage):
            segment.source.read(0, view[segment.slot_offset : segment.slot_offset + segment.num_bytes])

    # -- the end ------------------------------------------------------------------------------------------------------

    def unpin(self) -> None:
        """Unregister pinned memory now, even while tensors look into it; it stays as ordinary memory."""

    @abstractmethod
    def close(self) -> None:
        """Give back files and memory; idempotent."""


def new_blob(num_bytes: int) -> torch.Tensor:
    """Uninitialised host memory: uint8, 1-D, 64-byte aligned by torch's allocator."""
    return torch.empty(num_bytes, dtype=torch.uint8)


def writable_view(blob: torch.Tensor) -> memoryview:
    """The memory of a uint8 CPU tensor as a buffer that ``preadv`` can fill."""
    return blob.numpy().data
