"""The plan itself: for every storage a mechanism, for every unit a slab layout, a slot and a store."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from headrace.config import Codec, Mechanism, Mode, StoreName
from headrace.errors import OptionError, OptionTypeError, PlanFileError
from headrace.formatting import format_size, listed, pluralize
from headrace.json_files import FormatError, Positive, decode, encode, parse, read_file, require, write_file
from headrace.model.records import Inventory, StorageInfo
from headrace.plan.cached_experts import CachedLayer, cache_bytes, cached_layers, why_not_cached
from headrace.plan.kinds import HOST, StoreKind, Unit, kind_of
from headrace.plan.schedule import chain, slot_of
from headrace.plan.slabs import lay_out_slab

if TYPE_CHECKING:
    from headrace.plan.staging_ring import RingLayout

# Of :meth:`Plan.to_json`, and so of plan files. Raise it with any change of a key or of its meaning.
SCHEMA_VERSION = 7

_MOST_BYTES = 1 << 30  # of a plan file

# Prints plans; imported when one is printed, since it needs rich.
_TABLES = "headrace.plan.tables"

_REPLAN = "make it again for this one: `headrace plan MODEL ... --save FILE`, or pass a policy instead of a plan"


@dataclass(frozen=True)
class Machine:
    """A device as a plan knows it: only what a reboot does not change, and no host name.

    Attributes:
        device: ``"cpu"``, or the name of the GPU as the driver reports it.
        device_bytes: total memory of the GPU; ``None`` for a CPU, whose memory is that of the host, and for a GPU whose
            memory is not known.
    """

    device: str
    device_bytes: Positive | None = None

    def __str__(self) -> str:
        return self.device if self.device_bytes is None else f"{self.device} with {format_size(self.device_bytes)}"

    def suits(self, here: Machine) -> bool:
        """Whether a plan made for this machine may run on ``here``: the same device, no less memory."""
        return self.device == here.device and (self.device_bytes or 0) <= (here.device_bytes or 0)


@dataclass(frozen=True)
class DeviceName:
    """Stands for the ``torch.device`` of that type and index where torch is not needed otherwise."""

    type: str
    index: int | None = None


class Placement(NamedTuple):
    """The mechanism of a storage, its store (``None``: it is resident), and its bytes."""

    mechanism: Mechanism
    store: StoreName | None
    num_bytes: int

    @property
    def kind(self) -> StoreKind | None:
        """The kind of ``store``."""
        return None if self.store is None else kind_of(self.store)


@dataclass(frozen=True)
class Plan:
    """The mechanism and the store of every storage.

    Attributes:
        units: in order of execution.
        num_slots: device buffers; 0 when there are no units.
        mode: the store of everything that leaves the device, except for units whose own store is ``disk`` or ``peer``.
        resident: names of storages that stay on the device, with their bytes.
        uva: names of storages read in place, with their bytes.
        cached: layers of experts of which some are on the device at a time, in the order of the model.
        model_name: optional display name of the model; not used in comparisons.
        made_for: the machine that it was made for; ``None``: any.
        num_ranks: ranks that every unit is split over; 1: none is split.
        context: tokens per sequence whose KV cache it leaves memory for; 0: it counts weights alone.
        budget_bytes: device memory that weights may take, also when a tensor is promoted; ``None``: no such limit. Not
            used in comparisons: plans of two budgets that place everything alike are equal.
        prediction: a :class:`headrace.plan.prediction.PlanPrediction`, if asked for: printed, but neither compared nor
            saved. ``replace()`` drops it.
    """

    units: tuple[Unit, ...] = field(repr=False)
    num_slots: int
    mode: Mode
    resident: dict[str, Positive] = field(repr=False)
    uva: dict[str, Positive] = field(repr=False)
    model_name: str | None = field(default=None, compare=False)
    made_for: Machine | None = None
    num_ranks: Positive = 1
    context: int = 0
    budget_bytes: Positive | None = field(default=None, compare=False)
    cached: tuple[CachedLayer, ...] = field(default=(), repr=False)
    prediction: object = field(default=None, init=False, repr=False, compare=False)

    def __str__(self) -> str:
        try:
            text: str = import_module(_TABLES).text_of(self)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "rich":
                raise
            shortage = getattr(self.prediction, "shortage", None)
            refusal = f"\nThis plan {shortage}." if shortage else ""
            return f"{self!r}{refusal}\nIts tables need rich, which is not installed: pip install 'headrace[cli]'"
        return text

    def __repr__(self) -> str:
        name = f"{self.model_name}: " if self.model_name else ""
        return (
            f"<headrace.Plan {name}{format_size(self.device_bytes)} of {format_size(self.weight_bytes)} of weights on "
            f"the device, {pluralize(len(self.units), 'unit')} in {pluralize(self.num_slots, 'slot')}, "
            f"mode {self.mode!r}>"
        )

    def _repr_html_(self) -> str | None:
        try:
            text: str = import_module(_TABLES).text_of(self, html=True)
        except ModuleNotFoundError:
            return None  # a notebook shows the text then
        return text

    def with_prediction(self, prediction: object) -> Plan:
        """The plan with these predictions."""
        plan = replace(self)
        object.__setattr__(plan, "prediction", prediction)
        return plan

    # -- bytes ---------------------------------------------------------------------------------------------------------

    @cached_property
    def slot_bytes(self) -> tuple[int, ...]:
        """Size of each slot: the largest slab or code of its chain."""
        return tuple(
            max(self.units[unit].bytes_in_slot for unit in chain(slot, len(self.units), self.num_slots))
            for slot in range(self.num_slots)
        )

    @property
    def resident_bytes(self) -> int:
        """Bytes that never leave the device."""
        return sum(self.resident.values())

    @property
    def prefetched_bytes(self) -> int:
        """Bytes of all units."""
        return sum(unit.payload_bytes for unit in self.units)

    @property
    def moved_units(self) -> list[Unit]:
        """Units that every forward copies: one that has its slot alone stays there."""
        return [unit for unit in self.units if len(chain(unit.slot, len(self.units), self.num_slots)) > 1]

    @property
    def moved_bytes(self) -> int:
        """Bytes copied by one forward that runs every unit once, in order."""
        return sum(unit.link_bytes for unit in self.moved_units)

    @property
    def read_bytes(self) -> int:
        """The part of ``moved_bytes`` that is read from files."""
        return sum(unit.payload_bytes for unit in self.moved_units if unit.kind.in_files)

    @property
    def uva_bytes(self) -> int:
        """Bytes read in place."""
        return sum(self.uva.values())

    @property
    def cached_bytes(self) -> int:
        """Bytes of all cached experts, on the device or not."""
        return sum(layer.num_bytes for layer in self.cached)

    @property
    def cache_bytes(self) -> int:
        """Device memory for cached experts."""
        return cache_bytes(self.cached) if self.cached else 0

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are stored off the device."""
        return self.prefetched_bytes + self.uva_bytes + self.cached_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, on the device or not."""
        return self.resident_bytes + self.offloaded_bytes

    @property
    def device_bytes(self) -> int:
        """Device memory for weights: residents, slots with code, cached experts, and a store that is there."""
        stored = sum(kind.device_bytes(self, units) for kind, units in self.units_by_kind.items())
        return self.resident_bytes + self.slots_bytes + self.cache_bytes + stored

    @property
    def slots_bytes(self) -> int:
        """Memory of all slots, and of the unit that is decoded beside them."""
        return sum(self.slot_bytes) + self.decoding_bytes

    @property
    def decoding_bytes(self) -> int:
        """Memory beside the slots for the coded unit that compute reads, decoded."""
        return max((unit.num_bytes for unit in self.coded_units), default=0)

    @property
    def spilled_bytes(self) -> int:
        """Bytes of the units that are stored in files beside another store."""
        return 0 if self.kind.in_files else sum(unit.payload_bytes for unit in self.staged_units)

    @property
    def peer_bytes(self) -> int:
        """Memory of another GPU for the units that are stored there."""
        return sum(unit.num_bytes for unit in self.units_by_kind.get(kind_of("peer"), ()))

    @property
    def store_bytes(self) -> dict[str, int]:
        """Bytes on the device (``resident``, ``slots``, ``cache``), and by the names of stores.

        Those of ``shm_cpu`` exist once for all ranks of a host.
        """
        on_device = {"resident": self.resident_bytes, "slots": self.slots_bytes}
        on_device |= {"cache": self.cache_bytes} if self.cached else {}
        found = {kind.name: sum(unit.link_bytes for unit in units) for kind, units in self.units_by_kind.items()}
        main = found.pop(self.mode, 0) + self.uva_bytes + self.cached_bytes
        return {**on_device, self.mode: main, **{name: found[name] for name in self.kind.beside if name in found}}

    # -- storages ------------------------------------------------------------------------------------------------------

    @property
    def offloaded_names(self) -> list[str]:
        """Storages that leave the device: prefetched ones in the order of units, then read in place, then cached."""
        moved = [entry.storage for unit in self.units for entry in unit.entries]
        return [*moved, *self.uva, *(name for layer in self.cached for name in layer.storages)]

    @property
    def kind(self) -> StoreKind:
        """The kind of the store ``mode``."""
        return kind_of(self.mode)

    @cached_property
    def units_by_kind(self) -> dict[StoreKind, list[Unit]]:
        """Units by the kind of their store; the kind of ``mode`` always, and first."""
        found: dict[StoreKind, list[Unit]] = {self.kind: []}
        for unit in self.units:
            found.setdefault(unit.kind, []).append(unit)
        return found

    @cached_property
    def coded_units(self) -> tuple[Unit, ...]:
        """Units that are stored in host memory in a code."""
        return tuple(unit for unit in self.units if unit.kind.is_coded)

    @property
    def codec(self) -> Codec:
        """The codec of the units that have one."""
        return cast(Codec, self.coded_units[0].store) if self.coded_units else "none"

    @cached_property
    def staged_units(self) -> tuple[Unit, ...]:
        """Units that are stored in files; on the way to a GPU they pass through the staging ring."""
        return tuple(unit for unit in self.units if unit.kind.in_files)

    def lay_out_ring(self, **limits: int) -> RingLayout:
        """The staging ring for the units that are stored in files, of which there is at least one.

        ``limits``: those of :func:`headrace.plan.staging_ring.lay_out_ring`.
        """
        from headrace.plan.staging_ring import lay_out_ring

        sizes, staged = [unit.num_bytes for unit in self.units], [unit.index for unit in self.staged_units]
        return lay_out_ring(sizes, self.num_slots, staged=staged, **limits)

    @property
    def ring_bytes(self) -> int:
        """Pinned host memory of the staging ring of a GPU; 0 without units in files."""
        return self.lay_out_ring().num_bytes if self.staged_units else 0

    @property
    def reads_files(self) -> bool:
        """Whether steps read checkpoint files."""
        return self.kind.in_files or bool(self.staged_units)

    @cached_property
    def placements(self) -> dict[str, Placement]:
        """Placement of every storage by the name of its first tensor."""
        found = {name: Placement("resident", None, size) for name, size in self.resident.items()}
        found |= {name: Placement("uva", self.mode, size) for name, size in self.uva.items()}
        for unit in self.units:
            found |= {e.storage: Placement("prefetch", unit.store, e.num_bytes) for e in unit.entries}
        for layer in self.cached:
            found |= {name: Placement("cache", self.mode, size) for name, size in layer.storages.items()}
        return found

    def mechanism_of(self, storage: str) -> Mechanism:
        """How compute reaches ``storage`` (the name of its first tensor).

        Raises:
            OptionError: the plan has no storage of that name.
        """
        if storage not in self.placements:
            raise OptionError(
                f"{storage!r}: no storage of this plan has this name; tied tensors have the name of the first of them"
            )
        return self.placements[storage].mechanism

    # -- checks --------------------------------------------------------------------------------------------------------

    def check(self, inventory: Inventory) -> None:
        """Raise ``OptionError`` unless this plan places every storage of ``inventory`` at its size, and no other.

        Each unit must also be waited for before anything reads it, and keep its slot until it has been read.
        """
        found = {storage.name: storage.num_bytes for storage in inventory.storages}
        planned = {name: placement.num_bytes for name, placement in self.placements.items()}
        missing = [unit.module_fqn for unit in self.units if unit.module_fqn not in inventory.modules]
        if planned != found or missing:
            raise OptionError(_foreign_model(planned, found, missing, self.model_name))
        for problem in self._misplaced_units(inventory):
            raise OptionError(f"{problem}; {_REPLAN}")
        if self.cached:
            self._check_cached(inventory)
        for unit in self.units:
            # Several stores in one plan are host memory and others beside it (Stores).
            if unit.store not in (self.mode, *self.kind.beside):
                raise OptionError(
                    f"unit {unit.index} ({unit.module_fqn}) is stored in {unit.store!r}, and the plan has mode "
                    f"{self.mode!r}; expected the store of the mode, or one of {', '.join(HOST.beside)} in mode 'cpu'"
                )
            if reason := unit.kind.why_not(self, unit, inventory):
                raise OptionError(f"unit {unit.index} ({unit.module_fqn}) is {reason}; {_REPLAN}")

    def _check_cached(self, inventory: Inventory) -> None:
        for layer in self.cached:
            if self.kind.experts_module is None:
                raise OptionError(
                    f"experts of {layer.module_fqn} are cached and stored in {self.mode!r}; expected 'cpu' or "
                    f"'disk', the stores that a cache of experts is filled from (--offload-mode cpu)"
                )
            for name, why in why_not_cached(inventory, layer.storages).items():
                raise OptionError(f"the plan caches {name}, which cannot be: {why}; {_REPLAN}")
            host_slots = None if self.kind.host_slots is None else layer.host_slots or 0
            there = cached_layers(inventory, layer.storages, layer.num_slots, host_slots)
            if self.kind.host_slots is None:  # else every expert without a slot has one
                there = [replace(each, overflow_rows=layer.overflow_rows) for each in there]
            if [layer] != there:
                raise OptionError(f"the plan caches experts at {layer.module_fqn!r} that are not there; {_REPLAN}")

    def _misplaced_units(self, inventory: Inventory) -> Iterator[str]:
        """Why units could be read before they are copied, or overwritten while they are read."""
        first: dict[str, int] = {}
        for index, unit in enumerate(self.units):
            first.setdefault(unit.module_fqn, index)
        for index, fqn in enumerate(unit.module_fqn for unit in self.units):
            # Two units at one module are in use at the same time, too.
            around = [fqn] if first[fqn] != index else sorted(first.keys() & inventory.ancestors(fqn))
            if around:
                yield (
                    f"the plan has units {first[around[0]]} and {index} at {around[0]!r} and {fqn!r}; expected "
                    f"modules none of which runs inside another, because one would be overwritten while it is read"
                )
        for unit in self.units:
            fqn = unit.module_fqn
            if fqn in inventory.uncalled:
                why = "has no forward" if fqn in inventory.containers else "is not called by the module around it"
                yield (
                    f"the plan has a unit at {fqn!r} ({inventory.modules[fqn]}), which {why}, so that nothing "
                    f"would wait for its tensors; expected a module that is called"
                )
            for storage in (inventory.by_name[entry.storage] for entry in unit.entries):
                outside = sorted(module for module in storage.modules if fqn not in inventory.dominators(module))
                if outside:
                    elsewhere = fqn in inventory.ancestors(outside[0])
                    where = "is used in another place as well" if elsewhere else "is not inside it"
                    yield (
                        f"the plan has {storage.name} in the unit of {fqn!r}, but module {outside[0]!r}, which "
                        f"holds it, {where} and would read it before it is copied"
                    )

    def check_machine(self, here: Machine) -> None:
        """Raise ``OptionError`` if this plan was made for another device than ``here``, or for one with more memory."""
        if self.made_for is not None and not self.made_for.suits(here):
            raise OptionError(
                f"the plan was made for another machine: for {self.made_for}, and this is {here}; {_REPLAN}"
            )

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as a file that :meth:`load` and ``--plan`` read.

        Raises:
            OptionError: no file can be written there.
        """
        target = _as_path(path)
        if not target.parent.is_dir():
            raise OptionError(f"{str(target)!r}: expected a file name in a folder that exists, found no such folder")
        if target.exists() and not target.is_file():
            found = "a folder" if target.is_dir() else "something that is no file"
            raise OptionError(f"{str(target)!r}: expected the name of a file to write the plan to, found {found}")
        try:
            # Through a link, which the rename would replace.
            write_file(target.resolve(), json.dumps(_without_gaps(self).to_json(), indent=1) + "\n")
        except OSError as error:
            raise OptionError(f"{str(target)!r}: the plan cannot be written there: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan of a file that :meth:`save` or ``headrace plan --save`` wrote.

        Raises:
            PlanFileError: no such file; not JSON; another schema; a key or value that is missing, unknown, of another
                type, or at odds with the rest. The message says where in the file.
            OptionTypeError: no path.
        """
        source = _as_path(path)
        try:
            return _plan_from(parse(read_file(source, _MOST_BYTES)))
        except OSError as error:
            problem = f"expected a plan file, found: {error.strerror}"
        except FormatError as error:
            problem = str(error)
        except ValueError as error:  # UnicodeDecodeError is one
            problem = f"expected a plan in JSON, found: {error}"
        raise PlanFileError(f"{source}: {problem}; make it again with `headrace plan MODEL ... --save FILE`")

    def to_json(self) -> dict[str, Any]:
        """The plan for programs, and for its file: plain numbers and strings, sizes in bytes.

        ================  ============================================================================================
        key               meaning
        ================  ============================================================================================
        ``schema``        version of this table; another one is refused
        ``model``         ``name`` (or null), ``num_storages``, ``weight_bytes``, ``sha256`` (:func:`_digest`)
        ``machine``       null, or what it was made for: ``device`` (``"cpu"`` or a GPU's name), ``device_bytes``
        ``mode``          the store of tensors that are read in place, and of units by default
        ``num_ranks``     ranks that every unit is split over
        ``context``       tokens per sequence whose KV cache it leaves memory for, or 0
        ``budget_bytes``  device memory that weights may take, or null
        ``num_slots``     slots, each of ``slot_bytes``
        ``units``         ``index``, ``module_fqn``, ``slot``, ``num_bytes``, ``store`` (as ``mode``; where that is
                          ``cpu`` also ``disk``, ``peer``: another GPU, ``exp3``: host memory in this
                          code), and ``entries`` of ``storage``, ``offset`` and ``num_bytes``
        ``resident``      storage name -> bytes
        ``uva``           the same, of tensors that are read in place
        ``cached``        layers of experts: ``module_fqn``, ``num_experts``, ``num_slots``, ``storages`` (their bytes)
        the others        sums over the above; ``store_bytes`` by store
        ``prediction``    only in what ``headrace plan --json`` prints: predictions; not read back
        ================  ============================================================================================
        """
        return {
            "schema": SCHEMA_VERSION,
            "model": {
                "name": self.model_name,
                "num_storages": len(self.placements),
                "weight_bytes": self.weight_bytes,
                "sha256": _digest({name: placement.num_bytes for name, placement in self.placements.items()}),
            },
            "machine": encode(self.made_for),
            "mode": self.mode,
            "num_ranks": self.num_ranks,
            "context": self.context,
            "budget_bytes": self.budget_bytes,
            "num_slots": self.num_slots,
            "slot_bytes": list(self.slot_bytes),
            "device_bytes": self.device_bytes,
            "resident_bytes": self.resident_bytes,
            "prefetched_bytes": self.prefetched_bytes,
            "moved_bytes": self.moved_bytes,
            "store_bytes": self.store_bytes,
            "uva_bytes": self.uva_bytes,
            "units": encode(self.units),
            "resident": dict(self.resident),
            "uva": dict(self.uva),
            "cached": encode(self.cached),
        }


def with_code(plan: Plan, inventory: Inventory, codec: Codec) -> Plan:
    """``plan`` with all units in host memory coded in ``codec`` that are bf16; with "none" and "auto" ``plan`` itself.

    Raises:
        OptionError: there are none, or units are in files.
    """
    return plan if codec == "none" or codec == "auto" else _coded(plan, inventory, codec)


def _coded(plan: Plan, inventory: Inventory, codec: StoreName) -> Plan:
    if plan.staged_units:
        raise OptionError(
            f"codec {codec!r}: {len(plan.staged_units)} units are stored in files, from which nothing coded is read; "
            f"give it more --host-memory, or leave the codec out (--offload-codec)"
        )
    code = kind_of(codec)
    units = tuple(
        replace(unit, store=codec)
        if unit.kind is HOST and all(code.can_hold(inventory.by_name[entry.storage]) for entry in unit.entries)
        else unit
        for unit in plan.units
    )
    coded = replace(plan, units=units)
    if plan.offloaded_bytes and not coded.coded_units:
        fix = "leave it out (--offload-codec)"
        if HOST in {unit.kind for unit in plan.units}:
            why = "no unit in host memory has bf16 weights alone"
        elif plan.units:
            why, fix = "all units are in the memory of another GPU", f"{fix}, or give less --peer-memory"
        elif plan.cached:
            why = "cached experts are not coded, and nothing else is copied"
        else:
            why = "what is offloaded is read in place"
            fix = f"{fix}, or give more device memory, for slots and a decoded unit"
        raise OptionError(f"codec {codec!r} has no effect: {why}; {fix}")
    return coded


# -- layout ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitSpec:
    """A unit before layout: its module, its storages, and its store where that is not the plan's mode."""

    module_fqn: str
    storages: tuple[StorageInfo, ...]
    store: StoreName | None = None


def assemble(
    inventory: Inventory,
    specs: Sequence[UnitSpec],
    num_slots: int,
    mode: Mode,
    uva: Iterable[StorageInfo] = (),
    cached: Sequence[CachedLayer] = (),
) -> Plan:
    """Lay out slabs and assign slots; what is in no argument is resident. Specs are in order of execution."""
    slots = min(num_slots, len(specs))  # a slot without a unit would have no size
    units = tuple(
        _lay_out(index, spec.module_fqn, {s.name: s.num_bytes for s in spec.storages}, slots, spec.store or mode)
        for index, spec in enumerate(specs)
    )
    in_place = {storage.name: storage.num_bytes for storage in uva}
    offloaded = {entry.storage for unit in units for entry in unit.entries} | in_place.keys()
    offloaded = offloaded.union(*(layer.storages for layer in cached))
    resident = {s.name: s.num_bytes for s in inventory.storages if s.name not in offloaded}
    return Plan(units, slots, mode, resident, in_place, cached=tuple(cached))


def _lay_out(index: int, fqn: str, sizes: Mapping[str, int], num_slots: int, store: StoreName) -> Unit:
    entries, num_bytes = lay_out_slab(sizes)
    return Unit(index, fqn, slot_of(index, num_slots), entries, num_bytes, store)


def _without_gaps(plan: Plan) -> Plan:
    """``plan``, laid out again: weights that became resident while it was in force leave gaps in units."""
    units = [unit for unit in plan.units if unit.entries]
    slots = min(plan.num_slots, len(units))
    laid_out = (
        _lay_out(index, unit.module_fqn, {e.storage: e.num_bytes for e in unit.entries}, slots, unit.store)
        for index, unit in enumerate(units)
    )
    return replace(plan, num_slots=slots, units=tuple(laid_out))


# -- reading a plan's JSON ---------------------------------------------------------------------------------------------


def _plan_from(data: Any) -> Plan:
    """The plan of which ``data`` is :meth:`Plan.to_json`."""
    require(isinstance(data, dict), "", "an object", data)
    version = data.get("schema")  # first, since the keys below are those of this version
    known = f"{SCHEMA_VERSION}, the version that this headrace reads and writes"
    require(type(version) is int and version == SCHEMA_VERSION, "schema", known, version)
    # `headrace plan --json` prints a plan file with predictions, which are not read.
    given = {key: value for key, value in data.items() if key != "prediction"}
    for key in ("model", "machine"):
        require(key in given, "", f"the key {key!r}", sorted(given))
    require(isinstance(given["model"], dict), "model", "an object", given["model"])
    num_slots, count = given.get("num_slots"), len(given["units"]) if isinstance(given.get("units"), list) else 0
    fits = type(num_slots) is int and min(1, count) <= num_slots <= count
    plan: Plan = decode(Plan, {**given, "num_slots": num_slots if fits else 0})
    require(fits, "num_slots", f"1 to {count}, the number of units" if count else "0 without units", num_slots)
    stores = {plan.mode, *plan.kind.beside}
    for unit in plan.units:
        require(bool(unit.entries), f"units[{unit.index}].entries", "at least one entry", [])
        require(unit.store in stores, f"units[{unit.index}].store", f"one of {', '.join(sorted(stores))}", unit.store)
    for index, layer in enumerate(plan.cached):
        most, rows, place = layer.num_experts, layer.overflow_rows, f"cached[{index}]"
        require(layer.num_slots <= most, f"{place}.num_slots", f"1 to {most}, the number of experts", layer.num_slots)
        require(rows < most, f"{place}.overflow_rows", f"0 to {most - 1}", rows)
        left, held = most - layer.num_slots, layer.host_slots
        require(held is None or 0 <= held <= left, f"{place}.host_slots", f"null, or 0 to {left}", held)
    twice = next((name for name, times in Counter([*plan.resident, *plan.offloaded_names]).items() if times > 1), None)
    places = "units, resident, uva and cached"
    require(twice is None, places, "each storage in one place, and this one is in two", twice)
    name: str | None = decode(str | None, given["model"].get("name"), "model.name")
    machine: Machine | None = decode(Machine | None, given["machine"], "machine")
    # Offsets, slots and sums are computed again, and compared with those of the file.
    plan = replace(_without_gaps(plan), model_name=name, made_for=machine)
    _require_same(plan.to_json(), given)
    return plan


def _require_same(expected: Any, found: Any, place: str = "") -> None:
    """Refuse the file unless its value at ``place`` is ``expected``, as follows from its other values."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in expected:
            require(key in found, place, f"the key {key!r}", sorted(found))
        for key, value in found.items():
            require(key in expected, place, f"no key but {', '.join(expected)}", key)
            _require_same(expected[key], value, f"{place}.{key}" if place else key)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, pair in enumerate(zip(expected, found, strict=True)):
            _require_same(*pair, f"{place}[{index}]")
    else:  # neither true nor 1.0 is 1
        same = type(expected) is type(found) and expected == found
        require(same, place, f"{json.dumps(expected):.60}, which follows from the rest of the file", found)


# -- refusals ----------------------------------------------------------------------------------------------------------


def _as_path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise OptionTypeError(f"path: expected a str or path of a plan file, found {type(path).__name__}")
    return Path(path).expanduser()


def _digest(storages: Mapping[str, int]) -> str:
    """SHA-256, in hexadecimal, of the sorted list of [storage name, bytes], as JSON in ASCII without spaces."""
    # Names and sizes, not values: a plan is valid for every checkpoint of the same architecture.
    text = json.dumps(sorted(storages.items()), separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _foreign_model(
    planned: Mapping[str, int], found: Mapping[str, int], missing_modules: Sequence[str], name: str | None
) -> str:
    """Why a plan with storages ``planned`` is not for a model with storages ``found`` (name -> bytes)."""
    differing = [
        *(
            f"{name} ({planned[name]} bytes in the plan, {found[name]} in the model)"
            for name in sorted(planned.keys() & found.keys())
            if planned[name] != found[name]
        ),
        *(f"{name} ({planned[name]} bytes, in the plan alone)" for name in sorted(planned.keys() - found.keys())),
        *(f"{name} ({found[name]} bytes, in the model alone)" for name in sorted(found.keys() - planned.keys())),
    ]
    parts = []
    if differing:
        count = f"{len(differing)} of {len(planned.keys() | found.keys())} storages differ"
        parts.append(f"{count}: {listed(differing)}")
    if missing_modules:
        parts.append(f"the model has no module {missing_modules[0]!r}")
    totals = [f"{len(s)} storages, {format_size(sum(s.values()))} ({sum(s.values())} bytes)" for s in (planned, found)]
    return (
        f"the plan was made for another model{f' ({name})' if name else ''}: {'; '.join(parts)}. The plan places "
        f"{totals[0]}, the model has {totals[1]}; {_REPLAN}"
    )
