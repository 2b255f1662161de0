"""The store of which every rank has a part: ``sharded_gpu``, and ``cpu`` under pooled links.

A rank keeps 1/N of every unit. For ``sharded_gpu`` that is device memory which the peers can address; for pooled links
it is pinned host memory, so that N processes hold one copy in all. On a CPU both are host memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from penstock.config import Mode
from penstock.errors import OptionError, StateError
from penstock.memory.byte_ranges import ByteRange, Copy
from penstock.memory.symmetric import SymmetricMemory
from penstock.plan.plan import PartLayout, Stretch, Unit
from penstock.ranks.channel import GlooChannel
from penstock.ranks.group import RankGroup
from penstock.stores.store import Load, Store, new_blob

__all__ = ["HostParts", "PartStore", "Parts", "SymmetricParts"]


class Parts(ABC):
    """The memory of all ranks' parts, as this rank reaches it."""

    @property
    @abstractmethod
    def local(self) -> torch.Tensor:
        """This rank's: uint8, 1-D."""

    @abstractmethod
    def fetch(self, rank: int, start: int, into: torch.Tensor) -> None:
        """Fill ``into`` (uint8, 1-D, host) with what lies at ``start`` of ``rank``'s memory."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it; idempotent."""


class HostParts(Parts):
    """Host memory: others' parts come over a channel, so :meth:`fetch` is collective."""

    def __init__(self, memory: torch.Tensor, channel: GlooChannel) -> None:
        self._memory = memory
        self._channel = channel

    @property
    def local(self) -> torch.Tensor:
        return self._memory

    def fetch(self, rank: int, start: int, into: torch.Tensor) -> None:
        if rank == self._channel.rank:
            into.copy_(self._memory[start : start + into.numel()])
        self._channel.broadcast(into, rank)

    def close(self) -> None:
        self._channel.close()
        self._memory = new_blob(0)


class SymmetricParts(Parts):
    """Device memory that peers address: any rank reads at any time, since the parts never change."""

    def __init__(self, memory: SymmetricMemory) -> None:
        self._memory: SymmetricMemory | None = memory

    @property
    def local(self) -> torch.Tensor:
        return self.views[self.rank]

    @property
    def rank(self) -> int:
        """This rank."""
        return self._open().rank

    @property
    def views(self) -> Sequence[torch.Tensor]:
        """By rank."""
        return self._open().views

    def fetch(self, rank: int, start: int, into: torch.Tensor) -> None:
        # By way of this device: a copy from a peer to the host need not be possible.
        into.copy_(self.views[rank][start : start + into.numel()].clone())

    def close(self) -> None:
        self._memory = None

    def _open(self) -> SymmetricMemory:
        if self._memory is None:
            raise StateError("this store is closed; offload the model again")
        return self._memory


@dataclass(frozen=True)
class _Home:
    unit: int
    offset: int  # in the slab
    num_bytes: int


class PartStore(Store):
    """A part of every unit; nothing can be read in place.

    Attributes:
        parts: the memory.
        layout: who keeps what.
        ranks: all of them.
        rank: this process.
    """

    is_split = True

    def __init__(self, units: Sequence[Unit], layout: PartLayout, parts: Parts, ranks: RankGroup, mode: Mode) -> None:
        """``parts`` are uninitialised: :meth:`own_stretches` says what belongs where."""
        self.mode = mode  # type: ignore[misc]
        self.layout = layout
        self.parts = parts
        self.ranks = ranks
        self.rank = ranks.rank
        self._homes = {e.storage: _Home(u.index, e.offset, e.num_bytes) for u in units for e in u.entries}

    def own_stretches(self, storage: str) -> Iterator[tuple[int, torch.Tensor]]:
        """(first byte of ``storage``, where it goes) of every run of bytes of ``storage`` that this rank keeps."""
        for _, start, part_start, num_bytes in self._runs(storage, ranks=[self.rank]):
            yield start, self.parts.local[part_start : part_start + num_bytes]

    def copies(self, storage: str) -> list[Copy]:
        """This rank's runs; the others' are not here."""
        return [Copy(ByteRange.of(blob), start) for start, blob in self.own_stretches(storage)]

    def load(self, unit: Unit) -> Load:
        """What this rank brings of ``unit``; ``slab`` is its part."""
        begin = self.layout.offsets[unit.index]
        striping = self.layout.stripings[unit.index]
        part = self.parts.local[begin : begin + striping.part_bytes(self.rank)]
        if not part.is_cpu:
            return Load(unit.index, (), part)
        return Load(unit.index, tuple(_copies(part, striping.stretches(self.rank))), part)

    def read(self, storage: str, into: torch.Tensor) -> None:
        """Copy all of ``storage`` into ``into``. Collective where the parts are host memory.

        Raises:
            TransferError: a rank that has to pass on its part is gone, or did not call this in time.
        """
        for rank, start, part_start, num_bytes in self._runs(storage, ranks=range(self.layout.num_ranks)):
            self.parts.fetch(rank, part_start, into[start : start + num_bytes])

    def in_place(self, storage: str) -> torch.Tensor:
        raise OptionError(
            f"{storage} is split over {self.layout.num_ranks} ranks and cannot be read in place; prefetch it, or leave "
            f"group= and pool_links out"
        )

    @property
    def host_bytes(self) -> int:
        return self.parts.local.numel() if isinstance(self.parts, HostParts) else 0

    @property
    def device_bytes(self) -> int:
        """Device memory of this rank's parts."""
        return 0 if self.parts.local.is_cpu else self.parts.local.numel()

    def close(self) -> None:
        self.parts.close()

    def _runs(self, storage: str, ranks: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """(rank, first byte of ``storage``, first byte of the rank's memory, bytes), in the same order everywhere."""
        home = self._homes[storage]
        begin = self.layout.offsets[home.unit]
        for rank in ranks:
            for stretch in self.layout.stripings[home.unit].stretches(rank):
                first = max(stretch.start, home.offset)
                last = min(stretch.end, home.offset + home.num_bytes)
                if first < last:
                    yield rank, first - home.offset, begin + stretch.offset + first - stretch.start, last - first


def _copies(part: torch.Tensor, stretches: Iterator[Stretch]) -> Iterator[Copy]:
    for stretch in stretches:
        yield Copy(ByteRange.of(part[stretch.offset : stretch.offset + stretch.num_bytes]), stretch.start)
