"""The plan itself: for every storage a mechanism, for every unit a slab layout, a slot and a store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from penstock.config import Mechanism, Mode
from penstock.errors import OptionError
from penstock.model.inventory import Inventory, StorageInfo
from penstock.plan.difference import (
    foreign_machine,
    foreign_model,
    misplaced_storage,
    nested_units,
    storages_digest,
    uncalled_anchor,
)
from penstock.plan.machine import Machine
from penstock.plan.slots import chain, slot_of
from penstock.plan.striping import Striping

__all__ = [
    "SCHEMA_VERSION",
    "SLAB_ALIGNMENT_BYTES",
    "Mechanism",
    "Plan",
    "SlabEntry",
    "Unit",
    "UnitDraft",
    "assemble",
    "slab_bytes",
]

# Large enough for every vector load and for tensor-map descriptors; matrix kernels may pick another summation order
# for a less aligned operand, so alignment is part of the promise of equal bits.
SLAB_ALIGNMENT_BYTES = 256

# Of :meth:`Plan.to_json`, and so of plan files. Raise it with any change of a key or of its meaning.
SCHEMA_VERSION = 3


@dataclass(frozen=True)
class SlabEntry:
    """One storage inside a unit's slab: its name, its offset from the start of the slab, its size."""

    storage: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Unit:
    """What travels in one transfer.

    Attributes:
        index: position in the order of execution.
        anchor: dotted name of the module whose forward reads the unit; the wait goes before it, the release after.
        slot: always ``index mod num_slots``.
        entries: the layout of the slab.
        num_bytes: size of the slab, alignment gaps included.
        store: where it rests; a unit travels in one transfer, so it rests in one place.
    """

    index: int
    anchor: str
    slot: int
    entries: tuple[SlabEntry, ...]
    num_bytes: int
    store: Mode

    @property
    def payload_bytes(self) -> int:
        """Bytes that a transfer of this unit moves."""
        return sum(entry.num_bytes for entry in self.entries)


@dataclass(frozen=True)
class Plan:
    """Where every storage rests and how compute reaches it.

    Attributes:
        units: in order of execution.
        num_slots: device buffers; 0 when there are no units.
        mode: the store of everything that leaves the device, except for units whose own store is ``disk``.
        resident: names of storages that stay on the device, with their bytes.
        uva: names of storages read in place, with their bytes.
        model_name: what the model is called, if anybody said; for people, compared with nothing.
        made_for: the machine whose figures the plan was made from; ``None`` binds it to none.
        num_ranks: over how many ranks every unit is split; 1: each process keeps them whole.
    """

    units: tuple[Unit, ...] = field(repr=False)
    num_slots: int
    mode: Mode
    resident: dict[str, int] = field(repr=False)
    uva: dict[str, int] = field(repr=False)
    model_name: str | None = None
    made_for: Machine | None = None
    num_ranks: int = 1

    @cached_property
    def slot_bytes(self) -> tuple[int, ...]:
        """Size of each slot: the largest slab of its chain."""
        return tuple(
            max(self.units[unit].num_bytes for unit in chain(slot, len(self.units), self.num_slots))
            for slot in range(self.num_slots)
        )

    @property
    def offloaded_names(self) -> list[str]:
        """Storages that leave the device: those of the units in order, then what is read in place."""
        return [entry.storage for unit in self.units for entry in unit.entries] + list(self.uva)

    @property
    def resident_bytes(self) -> int:
        """Bytes that never leave the device."""
        return sum(self.resident.values())

    @property
    def prefetched_bytes(self) -> int:
        """Bytes of all units."""
        return sum(unit.payload_bytes for unit in self.units)

    @property
    def moved_bytes(self) -> int:
        """Bytes moved by one forward that runs every unit once, in order; a unit that has its slot alone stays."""
        return sum(unit.payload_bytes for unit in self.moved_units)

    @property
    def read_bytes(self) -> int:
        """The part of ``moved_bytes`` that comes from files."""
        return sum(unit.payload_bytes for unit in self.moved_units if unit.store == "disk")

    @property
    def moved_units(self) -> list[Unit]:
        """Units that come with every forward: one that has its slot alone stays there."""
        return [unit for unit in self.units if len(chain(unit.slot, len(self.units), self.num_slots)) > 1]

    @property
    def uva_bytes(self) -> int:
        """Bytes read in place."""
        return sum(self.uva.values())

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that rest in a store."""
        return self.prefetched_bytes + self.uva_bytes

    @property
    def device_bytes(self) -> int:
        """Device memory for weights: residents and slots, and for ``sharded_gpu`` this rank's part of the units."""
        parts = self.part_bytes if self.mode == "sharded_gpu" else 0
        return self.resident_bytes + sum(self.slot_bytes) + parts

    @cached_property
    def staged_units(self) -> tuple[Unit, ...]:
        """Units that rest in files: before a GPU they pass through the staging ring."""
        return tuple(unit for unit in self.units if unit.store == "disk")

    @property
    def spilled_bytes(self) -> int:
        """Bytes of the units that rest in files while the rest of the plan does not; 0 for one store."""
        return 0 if self.mode == "disk" else sum(unit.payload_bytes for unit in self.staged_units)

    @property
    def reads_files(self) -> bool:
        """Whether steps read checkpoint files."""
        return self.mode == "disk" or bool(self.staged_units)

    @cached_property
    def _stores(self) -> dict[str, Mode]:
        in_units = {entry.storage: unit.store for unit in self.units for entry in unit.entries}
        return {**dict.fromkeys(self.uva, self.mode), **in_units}

    def store_of(self, storage: str) -> Mode | None:
        """Where ``storage`` rests; ``None`` for residents."""
        return self._stores.get(storage)

    @property
    def part_bytes(self) -> int:
        """What one rank keeps of the slabs of all units."""
        return sum(Striping.of(unit.num_bytes, self.num_ranks).part_bytes(0) for unit in self.units)

    @property
    def store_bytes(self) -> dict[str, int]:
        """Bytes by where they rest: ``resident`` and ``slots`` on the device, the rest under the names of the stores.

        Those of ``shm_cpu`` are there once for all ranks of a host.
        """
        spilled = self.spilled_bytes
        on_device = {"resident": self.resident_bytes, "slots": sum(self.slot_bytes)}
        return {**on_device, self.mode: self.offloaded_bytes - spilled, **({"disk": spilled} if spilled else {})}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, wherever they rest."""
        return self.resident_bytes + self.offloaded_bytes

    def mechanism_of(self, storage: str) -> Mechanism:
        """How compute reaches ``storage`` (the name of its first tensor).

        Raises:
            OptionError: the plan knows no storage of that name.
        """
        if storage in self.resident:
            return "resident"
        if storage in self.uva:
            return "uva"
        if storage in self._storages:
            return "prefetch"
        raise OptionError(f"{storage!r}: no storage of this plan has this name; tied tensors go by the first of theirs")

    def check(self, inventory: Inventory) -> None:
        """Raise ``OptionError`` unless this plan places every storage of ``inventory`` at its size, and no other.

        Also where bits are at stake: each unit has to be waited for before anything reads it, and to keep its slot.
        """
        found = {storage.name: storage.num_bytes for storage in inventory.storages}
        missing = [unit.anchor for unit in self.units if unit.anchor not in inventory.modules]
        if self._storages != found or missing:
            raise OptionError(foreign_model(self._storages, found, missing, self.model_name))
        if problem := nested_units(inventory, [unit.anchor for unit in self.units]):
            raise OptionError(problem)
        for unit in self.units:
            if problem := uncalled_anchor(inventory, unit.anchor):
                raise OptionError(problem)
            if unit.store != self.mode and (unit.store, self.mode) != ("disk", "cpu"):
                raise OptionError(
                    f"unit {unit.index} ({unit.anchor}) rests in {unit.store!r} and the plan in {self.mode!r}; a unit "
                    f"rests where the plan does, or in 'disk' beside 'cpu'"
                )
            for entry in unit.entries:
                if problem := misplaced_storage(inventory, inventory.by_name[entry.storage], unit.anchor):
                    raise OptionError(problem)

    def check_machine(self, here: Machine) -> None:
        """Raise ``OptionError`` if this plan was made for another device than ``here``, or for one with more memory."""
        if self.made_for is not None and not self.made_for.suits(here):
            raise OptionError(foreign_machine(self.made_for, here))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a file that :meth:`load` and ``--plan`` read."""
        from penstock.plan.serialize import save_plan

        save_plan(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan of a file that :meth:`save` or ``penstock plan --save`` wrote.

        Raises:
            PlanFileError: no such file, or one that is no plan; see :func:`penstock.plan.serialize.load_plan`.
        """
        from penstock.plan.serialize import load_plan

        return load_plan(path)

    @cached_property
    def _storages(self) -> dict[str, int]:
        in_units = {entry.storage: entry.num_bytes for unit in self.units for entry in unit.entries}
        return {**self.resident, **self.uva, **in_units}

    def to_json(self) -> dict[str, Any]:
        """The plan for programs: plain numbers and strings, bytes throughout."""
        return {
            "schema": SCHEMA_VERSION,
            "model": {
                "name": self.model_name,
                "num_storages": len(self._storages),
                "weight_bytes": self.weight_bytes,
                "sha256": storages_digest(self._storages),
            },
            "machine": None if self.made_for is None else asdict(self.made_for),
            "mode": self.mode,
            "num_ranks": self.num_ranks,
            "num_slots": self.num_slots,
            "slot_bytes": list(self.slot_bytes),
            "device_bytes": self.device_bytes,
            "resident_bytes": self.resident_bytes,
            "prefetched_bytes": self.prefetched_bytes,
            "moved_bytes": self.moved_bytes,
            "store_bytes": self.store_bytes,
            "uva_bytes": self.uva_bytes,
            "units": [{**asdict(unit), "entries": [asdict(entry) for entry in unit.entries]} for unit in self.units],
            "resident": dict(self.resident),
            "uva": dict(self.uva),
        }


@dataclass(frozen=True)
class UnitDraft:
    """A unit before layout: the anchor, what travels with it, and its store where that is not the plan's."""

    anchor: str
    storages: tuple[StorageInfo, ...]
    store: Mode | None = None

    @property
    def num_bytes(self) -> int:
        """Slab size."""
        return slab_bytes(storage.num_bytes for storage in self.storages)


def slab_bytes(sizes: Iterable[int]) -> int:
    """Size of a slab that holds stretches of these sizes, each aligned."""
    return sum(_aligned(size) for size in sizes)


def assemble(
    inventory: Inventory,
    drafts: Sequence[UnitDraft],
    num_slots: int,
    mode: Mode,
    uva: Iterable[StorageInfo] = (),
) -> Plan:
    """Lay out slabs, assign slots, and call everything else resident. Drafts are in order of execution."""
    slots = min(num_slots, len(drafts))
    units = tuple(_lay_out(index, draft, slots, mode) for index, draft in enumerate(drafts))
    in_place = {storage.name: storage.num_bytes for storage in uva}
    offloaded = {entry.storage for unit in units for entry in unit.entries} | in_place.keys()
    resident = {s.name: s.num_bytes for s in inventory.storages if s.name not in offloaded}
    return Plan(units, slots, mode, resident, in_place)


def _lay_out(index: int, draft: UnitDraft, num_slots: int, mode: Mode) -> Unit:
    entries: list[SlabEntry] = []
    offset = 0
    for storage in draft.storages:
        entries.append(SlabEntry(storage.name, offset, storage.num_bytes))
        offset += _aligned(storage.num_bytes)
    return Unit(index, draft.anchor, slot_of(index, num_slots), tuple(entries), offset, draft.store or mode)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // SLAB_ALIGNMENT_BYTES) * SLAB_ALIGNMENT_BYTES
