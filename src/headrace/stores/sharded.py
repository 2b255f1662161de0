"""Stores ``sharded_cpu`` and ``sharded_gpu``: each of N ranks keeps 1/N of every unit; together they hold one copy.

``sharded_gpu`` keeps the parts in device memory which the other ranks can address, ``sharded_cpu`` in pinned host
memory. On a CPU both are host memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from headrace.errors import OptionError, StateError, TransferError
from headrace.memory.shared import SymmetricMemory
from headrace.plan.kinds import Unit
from headrace.plan.slabs import equal_chunk_bytes
from headrace.ranks.group import GlooChannel, RankGroup
from headrace.stores.sources import ByteRange, Copy
from headrace.stores.store import Load, Store, new_buffer


@dataclass(frozen=True)
class Stripe:
    """Bytes ``start`` to ``end`` of a slab, which lie at ``offset`` of the part of their rank."""

    start: int
    end: int
    offset: int

    @property
    def num_bytes(self) -> int:
        """Length."""
        return self.end - self.start


@dataclass(frozen=True)
class Striping:
    """One slab over ``num_ranks`` ranks: chunks in turn, as in a striped array of disks.

    Chunk ``k * ranks + r`` belongs to rank ``r``: ``ranks`` chunks in a row are a stripe. With one stripe every rank
    has one contiguous part. With several, a rank can send a chunk on while it copies the next, and the slab fills from
    the front on every rank. All chunks of a unit but the last ones are equally long, so the parts are equal but for the
    alignment, and no rank keeps padding.

    Attributes:
        num_bytes: bytes of the slab; a multiple of 256.
        chunk_bytes: a multiple of 256.
    """

    num_bytes: int
    num_ranks: int
    chunk_bytes: int

    @classmethod
    def of(cls, num_bytes: int, num_ranks: int, max_chunk_bytes: int | None = None) -> Striping:
        """The fewest stripes that ``max_chunk_bytes`` allows (``None``: one), all of the same length but the last."""
        stripes = 1 if max_chunk_bytes is None else max(1, -(-num_bytes // (num_ranks * max_chunk_bytes)))
        return cls(num_bytes, num_ranks, equal_chunk_bytes(num_bytes, num_ranks * stripes))

    def stretches(self, rank: int) -> Iterator[Stripe]:
        """The stripes that ``rank`` stores, in order."""
        offset = 0
        for start in range(rank * self.chunk_bytes, self.num_bytes, self.num_ranks * self.chunk_bytes):
            end = min(start + self.chunk_bytes, self.num_bytes)
            yield Stripe(start, end, offset)
            offset += end - start

    def in_order(self) -> Iterator[tuple[int, Stripe]]:
        """(rank, stripe) of the slab, from its first byte to its last."""
        every = ((rank, stripe) for rank in range(self.num_ranks) for stripe in self.stretches(rank))
        return iter(sorted(every, key=lambda item: item[1].start))

    def part_bytes(self, rank: int) -> int:
        """Bytes that ``rank`` stores."""
        return sum(stripe.num_bytes for stripe in self.stretches(rank))


class PartLayout:
    """Layout of the parts of all units in a rank's memory, at the same offsets on every rank.

    Attributes:
        stripings: by unit.
        offsets: by unit, where its part begins.
        num_bytes: bytes of the memory of each rank: the longest part of every unit.
    """

    def __init__(self, units: Sequence[Unit], num_ranks: int, max_chunk_bytes: int | None = None) -> None:
        self.stripings = [Striping.of(unit.num_bytes, num_ranks, max_chunk_bytes) for unit in units]
        # Rank 0's part is the longest of each unit, and equal offsets let a rank address another's part by its own.
        *self.offsets, self.num_bytes = accumulate((s.part_bytes(0) for s in self.stripings), initial=0)
        self.num_ranks = num_ranks


class ShardedStore(Store):
    """A part of every unit; nothing can be read in place.

    The memory is uninitialised: :meth:`own_runs` gives the bytes that belong in it.

    Attributes:
        layout: which rank keeps what.
        ranks: all of them.
    """

    is_split = True

    def __init__(self, units: Sequence[Unit], layout: PartLayout, ranks: RankGroup) -> None:
        self.layout = layout
        self.ranks = ranks
        self._entries = {entry.storage: (unit.index, entry) for unit in units for entry in unit.entries}

    @property
    @abstractmethod
    def local(self) -> torch.Tensor:
        """The memory of this rank's parts: uint8, 1-D."""

    @abstractmethod
    def _fetch(self, rank: int, start: int, into: torch.Tensor) -> None:
        """Fill ``into`` (uint8, 1-D, host) with what is at ``start`` of ``rank``'s memory."""

    def own_runs(self, storage: str) -> Iterator[tuple[int, torch.Tensor]]:
        """(first byte of ``storage``, where it goes) of every run of bytes of ``storage`` that this rank keeps."""
        for _, start, part_start, num_bytes in self._runs(storage, [self.ranks.rank]):
            yield start, self.local[part_start : part_start + num_bytes]

    def copies(self, storage: str) -> list[Copy]:
        """Runs of this rank; the others' are not here."""
        return [Copy(ByteRange.of(run), start) for start, run in self.own_runs(storage)]

    def load(self, unit: Unit) -> Load:
        """Load of this rank's part of ``unit``, which ``slab`` holds."""
        begin = self.layout.offsets[unit.index]
        stretches = list(self.layout.stripings[unit.index].stretches(self.ranks.rank))
        part = self.local[begin : begin + sum(stretch.num_bytes for stretch in stretches)]
        # Links that read need bytes in host memory; device memory is gathered by copies alone.
        if not part.is_cpu:
            return Load(unit.index, (), part)
        source = ByteRange.of(part)
        copies = (Copy(source.part(stretch.offset, stretch.num_bytes), stretch.start) for stretch in stretches)
        return Load(unit.index, tuple(copies), part)

    def read(self, storage: str, into: torch.Tensor) -> None:
        """Copy all of ``storage`` into ``into``. Collective where the parts are host memory.

        Raises:
            TransferError: a rank that has to pass on its part has ended, or did not call this in time.
        """
        for rank, start, part_start, num_bytes in self._runs(storage, range(self.layout.num_ranks)):
            self._fetch(rank, part_start, into[start : start + num_bytes])

    def in_place(self, storage: str) -> torch.Tensor:
        raise OptionError(
            f"{storage} is split over {self.layout.num_ranks} ranks and cannot be read in place; prefetch it, or use "
            f"mode 'shm_cpu' or 'cpu'"
        )

    # Each kind of store overrides one of the two.
    @property
    def host_bytes(self) -> int:
        return 0

    @property
    def device_bytes(self) -> int:
        """Device memory of this rank's parts."""
        return 0

    def _runs(self, storage: str, ranks: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """(rank, first byte of ``storage``, first byte of the rank's memory, bytes), in the same order everywhere."""
        # The order counts: broadcasts of several ranks are matched by it.
        unit, entry = self._entries[storage]
        for rank in ranks:
            for stretch in self.layout.stripings[unit].stretches(rank):
                first = max(stretch.start, entry.offset)
                last = min(stretch.end, entry.offset + entry.num_bytes)
                if first < last:
                    part_start = self.layout.offsets[unit] + stretch.offset + first - stretch.start
                    yield rank, first - entry.offset, part_start, last - first


class HostShardedStore(ShardedStore):
    """Parts in host memory. Those of others come over a channel, so :meth:`read` is collective."""

    def __init__(
        self, units: Sequence[Unit], layout: PartLayout, ranks: RankGroup, memory: torch.Tensor, channel: GlooChannel
    ) -> None:
        """``memory``: of the layout's size; ``channel``: for this store alone, closed with it."""
        super().__init__(units, layout, ranks)
        self._memory = memory
        self._channel = channel
        self._numbers = {storage: number for number, storage in enumerate(self._entries)}

    @property
    def local(self) -> torch.Tensor:
        return self._memory

    @property
    def host_bytes(self) -> int:
        return self._memory.numel()

    def read(self, storage: str, into: torch.Tensor) -> None:
        found = self._channel.gather_numbers(self._numbers[storage])
        if len(set(found)) > 1:
            names = list(self._entries)
            each = ", ".join(f"rank {rank} {names[number]}" for rank, number in enumerate(found))
            raise TransferError(
                f"ranks with a sharded store have to read the same weights in the same order, and here read {each}; "
                f"call state_dict() of the same module, or remove(), on all ranks"
            )
        super().read(storage, into)

    def _fetch(self, rank: int, start: int, into: torch.Tensor) -> None:
        # A broadcast sends what the source has in its own buffer.
        if rank == self._channel.rank:
            into.copy_(self._memory[start : start + into.numel()])
        self._channel.broadcast(into, rank)

    def close(self) -> None:
        self._channel.close()
        # Views that were handed out keep the bytes (contract 6); this store does not.
        self._memory = new_buffer(0)


class DeviceShardedStore(ShardedStore):
    """Parts in device memory that every rank reads at any time, since they never change."""

    def __init__(
        self, units: Sequence[Unit], layout: PartLayout, ranks: RankGroup, memory: SymmetricMemory | None
    ) -> None:
        """``memory``: of the layout's size."""
        super().__init__(units, layout, ranks)
        self._memory = memory

    @property
    def local(self) -> torch.Tensor:
        return self.views[self.ranks.rank]

    @property
    def device_bytes(self) -> int:
        return 0 if self._memory is None else self.local.numel()

    @property
    def views(self) -> Sequence[torch.Tensor]:
        """The memory of all ranks' parts, by rank."""
        if self._memory is None:
            raise StateError("this store is closed; offload the model again")
        return self._memory.views

    def _fetch(self, rank: int, start: int, into: torch.Tensor) -> None:
        # By way of this device: a copy from another rank's device to the host need not be possible.
        into.copy_(self.views[rank][start : start + into.numel()].clone())

    def close(self) -> None:
        self._memory = None
