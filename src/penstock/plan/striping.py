"""How the slab of a unit is divided among ranks: chunks in turn, as in a striped array of disks.

Chunk ``k * ranks + r`` belongs to rank ``r``: ``ranks`` chunks in a row are a stripe. With one stripe every rank has
one contiguous part. With several, what a rank has brought first can be passed on while it brings the next, and the
slab fills from the front on every rank. All chunks of a unit but the last ones are equally long, so the
parts are equal but for the alignment, and no rank keeps padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.plan.plan import Unit

__all__ = ["CHUNK_ALIGNMENT_BYTES", "CHUNK_BYTES", "PartLayout", "Stretch", "Striping"]

# That of storages in a slab (penstock.plan.plan), so that chunks start where copies are fastest.
CHUNK_ALIGNMENT_BYTES = 256
# Of pooled links: what a rank brings before it passes it on. The last chunk of a unit is passed on with nothing beside
# it, so small; each costs some microseconds of launches per peer, so not too small: 8 MiB take 150 us on PCIe 5.
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Stretch:
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
    """One slab over ``num_ranks`` ranks.

    Attributes:
        num_bytes: of the slab; a multiple of 256.
        chunk_bytes: a multiple of 256.
    """

    num_bytes: int
    num_ranks: int
    chunk_bytes: int

    @classmethod
    def of(cls, num_bytes: int, num_ranks: int, max_chunk_bytes: int | None = None) -> Striping:
        """As few stripes as ``max_chunk_bytes`` allows (``None``: one), all of the same length but the last."""
        stripes = 1 if max_chunk_bytes is None else max(1, -(-num_bytes // (num_ranks * max_chunk_bytes)))
        chunk = -(-num_bytes // (num_ranks * stripes))
        return cls(num_bytes, num_ranks, -(-chunk // CHUNK_ALIGNMENT_BYTES) * CHUNK_ALIGNMENT_BYTES)

    def stretches(self, rank: int) -> Iterator[Stretch]:
        """What ``rank`` keeps, in order."""
        offset = 0
        for start in range(rank * self.chunk_bytes, self.num_bytes, self.num_ranks * self.chunk_bytes):
            end = min(start + self.chunk_bytes, self.num_bytes)
            yield Stretch(start, end, offset)
            offset += end - start

    def in_order(self) -> Iterator[tuple[int, Stretch]]:
        """(rank, stretch) of the whole slab, from its first byte to its last."""
        every = ((rank, stretch) for rank in range(self.num_ranks) for stretch in self.stretches(rank))
        return iter(sorted(every, key=lambda item: item[1].start))

    def part_bytes(self, rank: int) -> int:
        """Bytes that ``rank`` keeps."""
        return sum(stretch.num_bytes for stretch in self.stretches(rank))


class PartLayout:
    """Where the parts of all units lie in a rank's memory, at the same offsets on every rank.

    Attributes:
        stripings: by unit.
        offsets: by unit, where its part begins.
        num_bytes: of the memory of each rank: the longest part of every unit.
    """

    def __init__(self, units: Sequence[Unit], num_ranks: int, max_chunk_bytes: int | None = None) -> None:
        self.stripings = [Striping.of(unit.num_bytes, num_ranks, max_chunk_bytes) for unit in units]
        ends = list(accumulate((striping.part_bytes(0) for striping in self.stripings), initial=0))
        self.offsets = ends[:-1]
        self.num_bytes = ends[-1]
        self.num_ranks = num_ranks
