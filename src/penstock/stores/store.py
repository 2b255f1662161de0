"""What every store answers: how to read a unit, how to bring a storage back, how to reach it in place."""

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
    """

    mode: ClassVar[Mode]

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

    @abstractmethod
    def close(self) -> None:
        """Give back files and memory; idempotent."""

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


def new_blob(num_bytes: int) -> torch.Tensor:
    """Uninitialised host memory: uint8, 1-D, 64-byte aligned by torch's allocator."""
    return torch.empty(num_bytes, dtype=torch.uint8)


def writable_view(blob: torch.Tensor) -> memoryview:
    """The memory of a uint8 CPU tensor as a buffer that ``preadv`` can fill."""
    return blob.numpy().data
