"""The staging ring: which entry of it a piece of a unit uses on its way from a file to a GPU.

Pure functions of sizes. The process that reads files into a ring imports this module and has no torch.

Before a GPU, units in files pass through a ring of pinned host memory. A captured copy has a fixed host address as
well, so a piece of a unit always uses the same entry. Units are cut into pieces, because a ring of whole units would
take gigabytes of host memory for large layers and let nothing cross the link before the first of them is read.

The pieces of a forward form a cycle, which is divided into laps of (almost) equal length; the piece that is ``j``-th
in its lap uses entry ``j``. Lap lengths differ by one at most, so any ``P // laps`` consecutive pieces of the cycle of
``P``, across its end too, lie in different entries: that many can be read ahead. With ``p mod R`` it would be only
``P mod R`` of them at the end of the cycle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain as concatenate
from itertools import pairwise

from headrace.memory.system import round_up
from headrace.plan.schedule import steady_order

# One copy each: long enough for 98 % of the rate of the link, short enough that the first one starts soon.
ENTRY_BYTES = 16 << 20
# As many as the readers of files in the page cache need so that none has to wait: one being copied, three being read
# into, and as many again for the time between. All of them together may stay in a processor's cache; through four times
# as much, copies for which a link has 55 GB/s came at 30, since every byte then crosses the memory bus thrice.
MAX_ENTRIES = 8
# A word of the handshake has a cache line alone, so that the device's polling disturbs no other.
WORD_BYTES = 64
_PAGE_BYTES = 4096
# Counters and an error message, after the words.
STATUS_BYTES = 4096
# The largest ring.
RING_BYTES = MAX_ENTRIES * (ENTRY_BYTES + WORD_BYTES) + WORD_BYTES + STATUS_BYTES


@dataclass(frozen=True)
class Piece:
    """``num_bytes`` from ``start`` of the slab of ``unit``, which pass through ``entry``."""

    unit: int
    start: int
    num_bytes: int
    entry: int


@dataclass(frozen=True)
class RingLayout:
    """Entries, and the pieces that pass through them.

    Attributes:
        entry_bytes, num_entries: of the ring.
        pieces: pieces of the cycle in its order, then those of units that stay in their slots and are copied once.
        of_unit: positions in ``pieces`` by unit.
        following: by position, the position that is expected next; ``None``: nothing is.
    """

    entry_bytes: int
    num_entries: int
    pieces: tuple[Piece, ...]
    of_unit: Mapping[int, range]
    following: tuple[int | None, ...]

    @property
    def words_at(self) -> int:
        """Offset of the words in the memory, in bytes: after the entries."""
        return self.num_entries * self.entry_bytes

    @property
    def status_at(self) -> int:
        """Offset of the status, in bytes: after a word for each entry and one more."""
        return self.words_at + (1 + self.num_entries) * WORD_BYTES

    @property
    def num_bytes(self) -> int:
        """Host memory: the entries, the words and the status."""
        return self.status_at + STATUS_BYTES


def lay_out_ring(
    unit_bytes: Sequence[int],
    num_slots: int,
    entry_bytes: int = ENTRY_BYTES,
    max_entries: int = MAX_ENTRIES,
    staged: Collection[int] | None = None,
) -> RingLayout:
    """The ring for units of these slab sizes, at least one, in order of execution, over ``num_slots`` slots.

    Args:
        entry_bytes: most bytes of an entry; rounded up to whole pages.
        max_entries: most entries of the ring, at least 1.
        staged: the units that pass through it, at least one; the others take part in the schedule alone. Default all.
    """
    through = set(range(len(unit_bytes)) if staged is None else staged)
    moving = [unit for unit in dict.fromkeys(steady_order(len(unit_bytes), num_slots)) if unit in through]
    staying = sorted(through.difference(moving))
    cuts = {unit: cut(unit_bytes[unit], round_up(entry_bytes, _PAGE_BYTES)) for unit in through}
    entry_bytes = round_up(max(num_bytes for pieces in cuts.values() for _, num_bytes in pieces), _PAGE_BYTES)
    length = sum(len(cuts[unit]) for unit in moving)
    laps = -(-length // max_entries)
    bounds = [lap * length // laps for lap in range(laps + 1)] if laps else []
    entries = [entry for start, end in pairwise(bounds) for entry in range(end - start)]  # of each piece of the cycle
    num_entries = max(entries, default=min(max_entries, sum(map(len, cuts.values()))) - 1) + 1
    pieces: list[Piece] = []
    of_unit: dict[int, range] = {}
    for unit in concatenate(moving, staying):
        of_unit[unit] = range(len(pieces), len(pieces) + len(cuts[unit]))
        for start, num_bytes in cuts[unit]:
            position = len(pieces)
            entry = entries[position] if position < length else position % num_entries
            pieces.append(Piece(unit, start, num_bytes, entry))
    following: list[int | None] = [(position + 1) % length for position in range(length)]
    following += [_behind(position, pieces) for position in range(length, len(pieces))]
    return RingLayout(entry_bytes, num_entries, tuple(pieces), of_unit, tuple(following))


def cut(num_bytes: int, most: int) -> list[tuple[int, int]]:
    """Start and size of as few stretches as it takes, of one size in whole pages if ``most`` is in pages.

    A small one at the end would keep an entry from reading ahead, or a reader from the next read.
    """
    if not num_bytes:
        return []
    count = -(-num_bytes // most)
    size = min(most, round_up(-(-num_bytes // count), _PAGE_BYTES))
    return [(start, min(size, num_bytes - start)) for start in range(0, num_bytes, size)]


def _behind(position: int, pieces: Sequence[Piece]) -> int | None:
    """Within a unit that stays in its slot: its next piece. After its last piece nothing is expected."""
    same = position + 1 < len(pieces) and pieces[position + 1].unit == pieces[position].unit
    return position + 1 if same else None
