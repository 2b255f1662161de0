"""A unit, and the kinds of store that it may be in.

Everything that differs between stores is asked of one object per kind, :class:`StoreKind`: sizes in slots and on the
link, rates, needs of memory, refusals, and what opens the store. The class itself is host memory of the process; each
other kind is a file of ``headrace.kinds``, imported when a plan or a request first names it. Kinds need no torch: the
store and the link that a kind needs are named, and imported by what opens them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from headrace.config import StoreName
from headrace.plan.slabs import SlabEntry

if TYPE_CHECKING:
    from headrace.model.records import Inventory, StorageInfo
    from headrace.plan.rates import Floats, Rates

# Modules of the other kinds, by name. Each has KINDS, by the same names.
WINGS = {
    "disk": "headrace.kinds.in_files",
    "peer": "headrace.kinds.on_peer",
    "exp3": "headrace.kinds.coded",
    "shm_cpu": "headrace.kinds.across_ranks",
    "sharded_cpu": "headrace.kinds.across_ranks",
    "sharded_gpu": "headrace.kinds.across_ranks",
    "meta": "headrace.kinds.without_bytes",
}


@dataclass(frozen=True)
class Unit:
    """Tensors that are copied to the device in one transfer.

    Attributes:
        index: position in the order of execution.
        module_fqn: dotted name of the module whose forward reads the unit; the wait goes before it, the release after.
        slot: always ``index mod num_slots``.
        entries: the layout of the slab.
        num_bytes: size of the slab, alignment gaps included.
        store: where all of them are stored.
    """

    index: int
    module_fqn: str
    slot: int
    entries: tuple[SlabEntry, ...]
    num_bytes: int
    store: StoreName

    @property
    def kind(self) -> StoreKind:
        """The kind of ``store``."""
        return kind_of(self.store)

    @property
    def payload_bytes(self) -> int:
        """Bytes that one transfer copies, alignment gaps not included."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def link_bytes(self) -> int:
        """Bytes that cross the link: the payload, or the expected length of its code."""
        return self.kind.link_bytes(self)

    @property
    def bytes_in_slot(self) -> int:
        """Bytes that a slot holds: the slab or its code."""
        return self.kind.slot_bytes(self)


class PlacedUnits(Protocol):
    """Fields of a plan that a kind of store reads."""

    @property
    def num_ranks(self) -> int:
        """Ranks that every unit is split over."""

    @property
    def ring_bytes(self) -> int:
        """Pinned host memory of the staging ring of a GPU."""

    @property
    def staged_units(self) -> tuple[Unit, ...]:
        """Units that are stored in files."""


class StoreKind:
    """One kind of store; this class is host memory of the process (``cpu``).

    Attributes:
        name: in plans and policies.
        label: in tables.
        beside: names of the kinds in which a plan of this mode may have units, too.
        on_host: the bytes are host memory.
        in_files: the bytes are in checkpoint files.
        is_coded: a slot holds a code, which is decoded into memory beside the slots.
        is_split: each rank of a group stores a part of every unit.
        needs_ranks: the store spans the processes of a group.
        has_bytes: weights are kept at all.
        reads_in_place: compute can address whole tensors of the store.
        state_is_store: a state dict has the very memory of the store, where other ranks do not see it.
        takes_writes: a write to a tensor outside of its module goes to the store, which this process has alone.
        remark: a sentence below a plan of this mode.
        store_module: module whose ``open_units`` opens the store (:mod:`headrace.stores.open_store`).
        link_module: module whose ``open_link`` opens the link that a plan with such units needs; ``None``: any does.
        experts_module: module whose ``open_experts`` opens the store of cached experts; ``None``: it holds none.
        caches_module: module whose ``open_caches`` makes their caches.
        host_slots: see :class:`headrace.plan.cached_experts.CachedLayer`.
    """

    name: StoreName = "cpu"
    label = "host"
    beside: tuple[StoreName, ...] = ("disk", "peer", "exp3")
    on_host = True
    in_files = False
    is_coded = False
    is_split = False
    needs_ranks = False
    has_bytes = True
    reads_in_place = True
    state_is_store = True
    takes_writes = True
    remark = ""
    store_module = "headrace.stores.plain_host"
    link_module: str | None = None
    experts_module: str | None = "headrace.stores.expert_ranges"
    caches_module = "headrace.experts.cache"
    host_slots: int | None = None

    # -- bytes and seconds of a unit -----------------------------------------------------------------------------------

    def link_bytes(self, unit: Unit) -> int:
        """Bytes that cross the link for ``unit``."""
        return unit.payload_bytes

    def slot_bytes(self, unit: Unit) -> int:
        """Bytes that a slot holds of ``unit``."""
        return unit.num_bytes

    def rates(self, rates: Rates, num_ranks: int) -> Rates:
        """``rates`` of one rank alone, as copies of units of this kind find them."""
        return rates

    def copy_s(self, rates: Rates, num_bytes: Floats) -> Floats:
        """Seconds of copies of units of ``num_bytes`` (more than 0) by ``rates``, those of the plan's codec."""
        return rates.copies_s(num_bytes / rates.coded_share)

    def read_s(self, rates: Rates, num_bytes: Floats) -> Floats | float:
        """Seconds of reading files before the copies."""
        return 0.0

    def decode_s(self, rates: Rates, num_bytes: Floats) -> Floats | float:
        """Seconds of compute to decode units."""
        return 0.0

    # -- memory of a plan's units --------------------------------------------------------------------------------------

    def device_bytes(self, plan: PlacedUnits, units: Sequence[Unit]) -> int:
        """Memory of the GPU that computes, beside slots."""
        return 0

    def pinned_bytes(self, plan: PlacedUnits, units: Sequence[Unit], in_place_bytes: int) -> int:
        """Pinned host memory beside a GPU for ``units``, and for tensors that are read in place."""
        return sum(unit.num_bytes for unit in units) + in_place_bytes

    def host_bytes(
        self, plan: PlacedUnits, units: Sequence[Unit], sizes: Mapping[str, int], on_meta: Collection[str]
    ) -> int:
        """Host memory where a CPU computes, for storages of these ``sizes`` by name, in units or read in place.

        ``on_meta``: names of those that have no bytes yet; a CPU's store adopts the others.
        """
        return sum(size for name, size in sizes.items() if name in on_meta)

    # -- refusals ------------------------------------------------------------------------------------------------------

    def can_hold(self, storage: StorageInfo) -> bool:
        """Whether the store has a form for ``storage``."""
        return True

    def why_not(self, plan: PlacedUnits, unit: Unit, inventory: Inventory) -> str | None:
        """Why ``plan`` cannot have ``unit`` in this store, after "unit N is"; ``None``: it can."""
        return None


HOST = StoreKind()


@cache
def kind_of(name: str) -> StoreKind:
    """The kind of store called ``name``."""
    if name == HOST.name:
        return HOST
    kinds: dict[str, StoreKind] = import_module(WINGS[name]).KINDS
    return kinds[name]
