"""The schedule: which slot a unit uses, what refills a slot, and which entry of the staging ring a piece uses.

Pure functions of sizes and counts. The process that reads files into a ring imports this module and has no torch.

CUDA graphs need fixed addresses, so unit ``u`` always uses slot ``u mod S``. The units of one slot form a *chain*:
``s, s + S, s + 2S, ...``. When a unit has run, its slot is refilled with the next unit of the same chain, and after
the last one with the first, ready for the next forward.

A model may run its units in another order than it declares them: a UNet declares the attentions of a block, then its
convolutions, and runs one after the other in turn. A pipeline runs the units of its transformer once per step.
Addresses stay, so a unit keeps its slot, but each chain then runs in the order that was seen (:class:`Schedule`).

The refill must come from the slot's own chain. The rule ``(u + S) mod N`` used elsewhere looks alike but, whenever
``S`` does not divide ``N``, names a unit of *another* slot, or one whose slot is still being read.

Before a GPU, units in files pass through a ring of pinned host memory. A captured copy has a fixed host address as
well, so a piece of a unit always uses the same entry. Units are cut into pieces, because a ring of whole units would
take gigabytes of host memory for large layers and let nothing cross the link before the first of them is read.

The pieces of a forward form a cycle, which is divided into laps of (almost) equal length; the piece that is ``j``-th
in its lap uses entry ``j``. Lap lengths differ by one at most, so any ``P // laps`` consecutive pieces of the cycle of
``P``, across its end too, lie in different entries: that many can be read ahead. With ``p mod R`` it would be only
``P mod R`` of them at the end of the cycle.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain as concatenate
from itertools import pairwise

from headrace.errors import warn_user
from headrace.memory.system import round_up

__all__ = [
    "ENTRY_BYTES",
    "MAX_ENTRIES",
    "MAX_SLOTS",
    "RING_BYTES",
    "STATUS_BYTES",
    "WORD_BYTES",
    "Piece",
    "RingLayout",
    "Schedule",
    "chain",
    "cut",
    "lay_out_ring",
    "next_in_chain",
    "slot_of",
    "steady_order",
    "usable_slots",
]

# Slots that a budget may choose, so that copies run as many units ahead.
MAX_SLOTS = 3
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


# How many runs a loop is expected to go on for when it is seen first; the next forward knows its true length.
_EXPECTED_RUNS = 4096


# -- slots -------------------------------------------------------------------------------------------------------------


def usable_slots(prefetch_step: int, num_units: int) -> int:
    """``prefetch_step`` slots, but no more than there are units."""
    if prefetch_step > num_units > 0:
        warn_user(
            f"prefetch_step = {prefetch_step} is larger than the number of units; {num_units} slot(s) are used "
            f"(--offload-prefetch-step {num_units} says the same)"
        )
    return min(prefetch_step, num_units)


def slot_of(unit: int, num_slots: int) -> int:
    """The slot that ``unit`` always uses."""
    return unit % num_slots


def next_in_chain(unit: int, num_units: int, num_slots: int) -> int:
    """The unit that refills the slot of ``unit`` once ``unit`` has run; ``unit`` itself if it has the slot alone."""
    following = unit + num_slots
    return following if following < num_units else slot_of(unit, num_slots)


def chain(slot: int, num_units: int, num_slots: int) -> range:
    """All units of one slot, in the order they use it."""
    return range(slot, num_units, num_slots)


def steady_order(num_units: int, num_slots: int) -> list[int]:
    """The units that one forward copies, in order, each forward the same; the cycle that all forwards together walk.

    A unit that has its slot alone stays there and is not among them. Where a forward begins in this cycle (the
    prefetcher may hold the refill of the last slot back for the next one) makes no difference to it.
    """
    refills = ((unit, next_in_chain(unit, num_units, num_slots)) for unit in range(num_units))
    return [refill for unit, refill in refills if refill != unit]


@dataclass(frozen=True)
class Schedule:
    """The order in which units are expected to run, from which the next unit of each slot follows.

    Attributes:
        order: units in order of execution; one may be in it several times, as in a loop of a pipeline, or not at all.
        num_slots: unit ``u`` uses slot ``u mod num_slots`` whatever the order.
    """

    order: tuple[int, ...]
    num_slots: int

    @cached_property
    def chains(self) -> list[list[int]]:
        """By slot: its units, in the order they use it."""
        return [[self.order[position] for position in positions] for positions in self._uses]

    @cached_property
    def first(self) -> dict[int, int]:
        """By slot that is used: the unit in it when a forward begins; those that run earlier come first."""
        begins = sorted(positions[0] for positions in self._uses if positions)
        return {slot_of(self.order[position], self.num_slots): self.order[position] for position in begins}

    def find(self, unit: int, start: int) -> int | None:
        """The first position from ``start`` on, and around the end, at which ``unit`` runs; ``None``: at none."""
        return _from(self._runs.get(unit, ()), start)

    def following(self, slot: int, position: int) -> int | None:
        """The next unit of ``slot`` after the run at ``position``; ``None``: no unit uses it."""
        found = _from(self._uses[slot], position + 1)
        return None if found is None else self.order[found]

    def again(self, start: int, end: int) -> Schedule:
        """The same, but the runs from ``start`` to ``end`` (included) are repeated many times before what follows."""
        loop = self.order[start : end + 1]
        times = max(1, _EXPECTED_RUNS // len(loop))
        return Schedule((*self.order[: end + 1], *(loop * times), *self.order[end + 1 :]), self.num_slots)

    @cached_property
    def _uses(self) -> list[list[int]]:
        """By slot: the positions at which it is used."""
        uses: list[list[int]] = [[] for _ in range(self.num_slots)]
        for position, unit in enumerate(self.order):
            uses[slot_of(unit, self.num_slots)].append(position)
        return uses

    @cached_property
    def _runs(self) -> dict[int, list[int]]:
        """By unit: the positions at which it runs."""
        runs: dict[int, list[int]] = {}
        for position, unit in enumerate(self.order):
            runs.setdefault(unit, []).append(position)
        return runs


def _from(positions: Sequence[int], start: int) -> int | None:
    """Of ``positions``, which ascend, the first from ``start`` on, else the first of all."""
    return positions[bisect_left(positions, start) % len(positions)] if positions else None


# -- the staging ring --------------------------------------------------------------------------------------------------


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
        pieces: those of the cycle in its order, then those of units that stay in their slots and are copied once.
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
        """Where in the memory the words begin, in bytes: after the entries."""
        return self.num_entries * self.entry_bytes

    @property
    def status_at(self) -> int:
        """Where the status begins, in bytes: after a word for each entry and one more."""
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
        entry_bytes: of an entry at most; rounded up to whole pages.
        max_entries: of the ring, at least 1.
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
