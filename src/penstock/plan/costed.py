"""The cost of every candidate of a family, as arrays: memory on either side, and step times.

A family is a run of candidates that differ in numbers only (:mod:`penstock.plan.candidates` says which there are). A
limit of host memory does not change the candidates: it leaves so many of their units in files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from penstock.config import Mechanism, Mode
from penstock.model.inventory import StorageInfo
from penstock.plan.plan import SLAB_ALIGNMENT_BYTES, UnitDraft
from penstock.plan.problem import RoleSets
from penstock.plan.ring_layout import RING_BYTES
from penstock.plan.simulate import StageTimes, step_s

if TYPE_CHECKING:
    from penstock.plan.candidates import CandidateTable

__all__ = ["HIGH", "KEPT", "LOW", "MAX_SLOTS", "Choice", "Costed", "Family", "Floats", "Ints", "Kinds"]

MAX_SLOTS = 3
# What a layer is: one of the evenly spaced, one of the others, one of them that keeps what these read in place.
LOW, HIGH, KEPT = range(3)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Kinds = npt.NDArray[np.int8]


# Seconds, by candidate, of a unit's copy and of reading it from files; ``None``: no candidate does.
_Move = tuple[Floats, Floats | None]


@dataclass(frozen=True)
class Choice:
    """One candidate, ready to be laid out."""

    drafts: tuple[UnitDraft, ...]
    uva: tuple[StorageInfo, ...]
    num_slots: int


@dataclass(frozen=True)
class Family:
    """Candidates that differ in numbers only, as arrays of one value per candidate.

    Attributes:
        sets: the sets that ``high`` and ``low`` index.
        high, low: the set of the ``spaced`` layers, and that of the others.
        spaced: how many layers have the first.
        slots: 0 where nothing is prefetched from the layers or outside.
        in_place: whether the sets are read in place instead of prefetched.
        outside: what happens outside the layers.
        fixed_uva: storages that all of them read in place.
        others_uva: by layer, what is read in place there if the layer is ``LOW``.
        patterns: [patterns, layers], of which ``spaced`` then says the row: what each layer is. ``HIGH`` layers have
            the set ``high``, others ``low``.
    """

    sets: RoleSets
    high: Ints
    low: Ints
    spaced: Ints
    slots: Ints
    in_place: bool
    outside: Mechanism
    fixed_uva: tuple[StorageInfo, ...]
    others_uva: Mapping[str, tuple[StorageInfo, ...]] | None = None
    patterns: Kinds | None = None


class Costed:
    """One family with its memory and its step times."""

    def __init__(self, space: CandidateTable, family: Family) -> None:
        self._space = space
        self._parts = space.parts
        self.family = family
        self._patterns = _evenly(len(self._parts.layers)) if family.patterns is None else family.patterns
        self._index = {layer: number for number, layer in enumerate(self._parts.layers)}
        # Slab bytes that have to go to files, by candidate; ``None`` until a limit of host memory says.
        self._excess: Floats | None = None
        self._measure_memory()

    def _column(self, table: Floats, layer: int) -> Floats:
        """Per candidate: ``table`` [sets, layers] at the set it has in ``layer``."""
        column: Floats = table[:, layer].take(self._chosen[layer])
        return column

    @cached_property
    def _chosen(self) -> Ints:
        """[layers, candidates]: the set that each has in each layer."""
        family = self.family
        chosen: Ints = np.where(self._patterns.T[:, family.spaced] == HIGH, family.high, family.low)
        return chosen

    def _drafted(self, value: Mapping[str, float]) -> Iterator[tuple[str, Floats]]:
        """(anchor, value of its unit per candidate), in order, for every stage that may have a unit."""
        parts, family = self._parts, self.family
        count = len(family.high)
        table = family.sets.table(value) if not family.in_place else None
        index = self._index
        outside = {draft.anchor: draft.storages for draft in parts.outside if family.outside == "prefetch"}
        for stage in parts.stages:
            always = sum(value[s.name] for s in parts.always_prefetched.get(stage.anchor, ()))
            always += sum(value[s.name] for s in outside.get(stage.anchor, ()))
            if table is not None and stage.anchor in index:
                yield stage.anchor, self._column(table, index[stage.anchor]) + always
            elif always:
                yield stage.anchor, np.full(count, float(always))

    def _measure_memory(self) -> None:
        inventory, family = self._space.question.inventory, self.family
        count = len(family.high)
        slabs, sizes = self._space.slabs, self._space.sizes
        ranks = self._space.question.ranks_on_device
        parts_bytes = np.zeros(count)
        moved, units = np.zeros(count), np.zeros(count, dtype=np.int64)
        wanted = family.slots
        slot_bytes, first = np.zeros((MAX_SLOTS, count)), np.zeros((MAX_SLOTS, count))
        for (_, slab), (_, size) in zip(self._drafted(slabs), self._drafted(sizes), strict=True):
            has = slab > 0
            place = units % wanted
            for slot in range(int(wanted.max(initial=0))):
                here = has & (place == slot)
                np.maximum(slot_bytes[slot], slab, out=slot_bytes[slot], where=here)
                np.copyto(first[slot], size, where=here & (units < wanted))
            units += has
            if ranks is not None:
                parts_bytes += np.ceil(slab / (ranks * SLAB_ALIGNMENT_BYTES)) * SLAB_ALIGNMENT_BYTES
            moved += size
        self.num_units = units
        self.num_slots = np.minimum(wanted, units)
        # A unit that has its slot alone is copied once and stays.
        alone = np.arange(MAX_SLOTS)[:, None] + wanted >= units
        self.moved_bytes = moved - (first * alone).sum(0)
        uva = self._in_place_bytes(sizes)
        self.offloaded_bytes = moved + uva
        self.device_bytes = inventory.num_bytes - moved - uva + slot_bytes.sum(0) + parts_bytes

    def _in_place_bytes(self, sizes: Mapping[str, float]) -> Floats:
        """Per candidate: what is read in place, each storage counted with its bytes in ``sizes``."""
        family, count = self.family, len(self.family.high)
        uva = np.full(count, float(sum(sizes[s.name] for s in self._fixed_uva())))
        if family.in_place:
            table = family.sets.table(sizes)
            uva += sum((self._column(table, layer) for layer in range(len(self._parts.layers))), np.zeros(count))
        for layer, storages in (family.others_uva or {}).items():
            uva += self._is_low(layer) * float(sum(sizes[s.name] for s in storages))
        return uva

    def _is_low(self, layer: str) -> Bools:
        """Per candidate: whether ``layer`` is ``LOW``."""
        low: Bools = self._patterns[self.family.spaced, self._index[layer]] == LOW
        return low

    # -- host memory and files ----------------------------------------------------------------------------------------

    @cached_property
    def _host_bytes(self) -> tuple[Floats, Floats]:
        """Per candidate: slab bytes with all units in host memory, and how much of that could be in files."""
        host_bytes = self._in_place_bytes(self._space.slabs)
        spillable_bytes = np.zeros(len(host_bytes))
        for _, slab in self._drafted(self._space.slabs):
            host_bytes += slab
        for _, slab in self._drafted(self._space.spillable):
            spillable_bytes += np.maximum(slab, 0.0)
        return host_bytes, spillable_bytes

    def least_host_bytes(self, rows: Ints) -> Floats:
        """What the candidates of these indices cannot do without in host memory."""
        spill = self._space.question.spill
        if spill is None:
            return self.offloaded_bytes[rows]
        none, most = (num_bytes[rows] for num_bytes in self._host_bytes)
        least: Floats = np.minimum(none, none - most + spill.ring_bytes)
        return least

    def within(self, host_bytes: int | None) -> Costed:
        """The same candidates with so much of them in files that the rest stays within ``host_bytes``."""
        spill = self._space.question.spill
        if spill is None or host_bytes is None or host_bytes >= sum(self._space.slabs.values()):
            return self
        too_much = self._host_bytes[0] - host_bytes
        limited = copy(self)
        limited._excess = np.where(too_much > 0, too_much + spill.ring_bytes, 0.0)
        return limited

    @cached_property
    def _no_files(self) -> Bools:
        return np.zeros(len(self.family.high), dtype=bool)

    def _staged(self) -> dict[str, Bools]:
        """By anchor of a unit: in which candidates it rests in files."""
        if self._space.question.mode == "disk":
            return dict.fromkeys((stage.anchor for stage in self._parts.stages), ~self._no_files)
        if self._excess is None or not self._excess.any():
            return {}
        units = dict(self._drafted(self._space.spillable))
        left, staged = self._excess, {}
        for anchor in self._space.spill_order:
            if anchor in units:
                staged[anchor] = (left > 0) & (units[anchor] > 0)
                left = left - staged[anchor] * units[anchor]
        return staged

    def _fixed_uva(self) -> tuple[StorageInfo, ...]:
        outside = [s for draft in self._parts.outside for s in draft.storages] if self.family.outside == "uva" else []
        return (*self._parts.always_in_place, *self.family.fixed_uva, *outside)

    def fitting(self, device_bytes: float, host_bytes: int | None) -> Ints:
        """Candidates within both limits."""
        fits = self.device_bytes <= device_bytes
        if self._excess is not None:
            fits &= self._excess <= self._host_bytes[1]
        elif host_bytes is not None:
            fits &= self.offloaded_bytes <= host_bytes
        rows: Ints = np.flatnonzero(fits & (self.family.slots <= np.maximum(self.num_slots, 1)))
        return rows

    def bound(self, rows: Ints) -> Floats:
        """Mean logarithm, over the batch sizes, of a time that no schedule of the candidate can beat."""
        rates = self._space.question.rates
        moved_s = self.moved_bytes[rows] / max(rate for _, rate in rates.copy_bytes_per_s.points)
        if self._space.question.mode == "disk":
            moved_s = np.maximum(moved_s, self.moved_bytes[rows] * rates.file_s_per_byte)
        elif self._excess is not None and self._excess[rows].any():
            moved_s = np.maximum(moved_s, _narrow(self, rows)._transfer_s())
        least = [np.maximum(moved_s, compute_s) for compute_s in self._least_compute_s]
        bound: Floats = np.log(np.array(least)).mean(axis=0) - 1e-8
        return bound

    def _transfer_s(self) -> Floats:
        """Per candidate: all copies and reads of a step, with as much beside one another as the ring allows."""
        rates = self._space.question.rates
        sizes = self._space.sizes
        staged = self._staged()
        following = np.zeros(len(self.num_units), np.int64)
        links_s, disk_s = np.zeros(len(following)), np.zeros(len(following))
        for anchor, size in self._drafted(sizes):
            stays = (following < self.num_slots) & (following + self.num_slots >= self.num_units)
            read_s = size * rates.file_s_per_byte * staged.get(anchor, self._no_files)
            ahead_s = np.minimum(read_s, RING_BYTES * rates.file_s_per_byte)
            links_s += ~stays * np.maximum(rates.copies_s(size), read_s - ahead_s)
            disk_s += ~stays * read_s
            following += size > 0
        return np.maximum(links_s, disk_s)

    @cached_property
    def _least_compute_s(self) -> list[float]:
        """Per batch size: compute that every candidate of the family has."""
        return [float(sum(compute_s for compute_s, _ in always)) for always in self._always_s]

    @cached_property
    def _always_s(self) -> list[list[tuple[float, float]]]:
        """Per batch size and stage: (compute, reading in place) that every candidate of the family has."""
        space = self._space
        found = []
        for batch, costs in enumerate(space.costs):
            compute_s, in_place_s = space.resident_s[batch].copy(), np.zeros(len(self._parts.stages))
            for storage in self._fixed_uva():
                cost, stage = costs[storage.name], space.stage_of[storage.name]
                compute_s[stage] += cost.in_place_s - cost.resident_s
                in_place_s[stage] += cost.in_place_s
            found.append(list(zip(compute_s.tolist(), in_place_s.tolist(), strict=True)))
        return found

    def step_s(self, rows: Ints) -> Floats:
        """[batch sizes, ``rows``]: seconds of a step of the candidates of these indices."""
        narrowed = _narrow(self, rows)
        moves = narrowed._moves()
        return np.array([narrowed._play(batch, moves) for batch in range(len(self._space.question.batch_sizes))])

    def _play(self, batch: int, moves: Sequence[_Move]) -> Floats:
        rates = self._space.question.rates
        ring_s = RING_BYTES * rates.file_s_per_byte if any(disk_s is not None for _, disk_s in moves) else 0.0
        stages = self._stage_times(batch, moves)
        return step_s(stages, self.num_slots, self.num_units, rates.copies_take_cores, ring_s)

    def _moves(self) -> list[_Move]:
        """Per stage: seconds of the copy of its unit and of reading that from files, by candidate."""
        rates = self._space.question.rates
        units = dict(self._drafted(self._space.sizes))
        staged = self._staged() if rates.file_s_per_byte else {}
        none = np.zeros(len(self.family.high))
        moves: list[_Move] = []
        for stage in self._parts.stages:
            size, in_files = units.get(stage.anchor), staged.get(stage.anchor)
            disk_s = None if size is None or in_files is None else size * in_files * rates.file_s_per_byte
            moves.append((none if size is None else rates.copies_s(size), disk_s))
        return moves

    def _stage_times(self, batch: int, moves: Sequence[_Move]) -> Iterator[StageTimes]:
        family, costs = self.family, self._space.costs[batch]
        count = len(family.high)
        extra = in_place = None
        if family.in_place:
            extra = family.sets.table({n: c.in_place_s - c.resident_s for n, c in costs.items()})
            in_place = family.sets.table({n: c.in_place_s for n, c in costs.items()})
        always = self._always_s[batch]
        for stage, (compute, linked), (copy_s, disk_s) in zip(self._parts.stages, always, moves, strict=True):
            compute_s, in_place_s = np.full(count, compute), np.full(count, linked)
            if extra is not None and in_place is not None and stage.anchor in self._index:
                compute_s += self._column(extra, self._index[stage.anchor])
                in_place_s += self._column(in_place, self._index[stage.anchor])
            if others := (family.others_uva or {}).get(stage.anchor):
                there = self._is_low(stage.anchor)
                compute_s += there * sum(costs[s.name].in_place_s - costs[s.name].resident_s for s in others)
                in_place_s += there * sum(costs[s.name].in_place_s for s in others)
            yield StageTimes(compute_s, in_place_s, copy_s, disk_s)

    def choice(self, candidate: int) -> Choice:
        """The candidate of this index, laid out."""
        parts, family = self._parts, self.family
        pattern = self._patterns[family.spaced[candidate]]
        outside = {draft.anchor: draft.storages for draft in parts.outside if family.outside == "prefetch"}
        drafts, uva = [], list(self._fixed_uva())
        staged = _narrow(self, np.array([candidate]))._staged() if self._excess is not None else {}
        for stage in parts.stages:
            storages = list(parts.always_prefetched.get(stage.anchor, ())) + list(outside.get(stage.anchor, ()))
            if stage.anchor in parts.roles:
                kind = pattern[self._index[stage.anchor]]
                chosen_set = family.high if kind == HIGH else family.low
                roles = family.sets.sets[chosen_set[candidate]]
                chosen = [s for role, s in parts.roles[stage.anchor].items() if role in roles]
                (uva if family.in_place else storages).extend(chosen)
                uva.extend((family.others_uva or {}).get(stage.anchor, ()) if kind == LOW else ())
            if storages:
                store: Mode | None = "disk" if stage.anchor in staged and staged[stage.anchor][0] else None
                drafts.append(UnitDraft(stage.anchor, tuple(sorted(storages, key=self._space.order)), store))
        return Choice(tuple(drafts), tuple(uva), int(self.num_slots[candidate]))


def _evenly(layers: int) -> Kinds:
    """[layers + 1, layers]: as many ``HIGH`` layers as the row says, evenly spaced.

    The gap comes after the last of them: what its slot needs next is then copied beside the compute that remains.
    """
    patterns = np.full((layers + 1, layers), LOW, dtype=np.int8)
    for count in range(1, layers + 1):
        patterns[count, [index * layers // count for index in range(count)]] = HIGH
    return patterns


def _narrow(costed: Costed, rows: Ints) -> Costed:
    """The same family with only the candidates of these indices."""
    family = costed.family
    narrowed = copy(costed)
    narrowed.family = replace(
        family, high=family.high[rows], low=family.low[rows], spaced=family.spaced[rows], slots=family.slots[rows]
    )
    names = ["num_units", "num_slots", "moved_bytes", "offloaded_bytes", "device_bytes"]
    if costed._excess is not None:
        names += ["_excess"]
    for name in names:
        setattr(narrowed, name, getattr(costed, name)[rows])
    for name in ("_no_files", "_chosen", "_host_bytes"):
        narrowed.__dict__.pop(name, None)
    return narrowed
