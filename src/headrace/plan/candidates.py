"""All the plans the solver chooses from, as arrays, and what each of them costs.

A *role* is a tensor's name inside its layer (``mlp.down_proj.weight``), the same in every layer. A candidate says

* which roles leave the device: the set B in ``k`` layers, evenly spaced, and the next smaller set A (or none) in the
  others, which reaches sizes between two sets of roles without bunching;
* their mechanism: all prefetched, all in place, or experts in place everywhere and the others prefetched; where units
  may be stored in files also experts prefetched in ``k`` layers, which then are those in files, resident in some other
  layers and in place in the remaining ones;
* the mechanism of the modules outside the layers: resident, prefetched or in place;
* the number of slots;
* whether experts are cached, and how many of each layer: a few numbers; memory that is left over is added to them.
  Where host memory is short of what all of them take, those of some layers are resident, and of some prefetched.

None of this depends on the budget, but for the number of slots in such a mixture. So more memory only ever adds
candidates, and the best one gets no slower.

Units that host memory has no room for stay in the checkpoint's files (:class:`Spill`). Reading files is many times
slower than the link, so as few as possible are left in them, spread over the forward: while units of host memory are
copied, the readers get a staging ring ahead. Units go to the files in one order, whatever the limit
(:func:`spill_order`), so those in files under a larger limit are among those under a smaller one. A unit fewer in files
makes no copy later (:mod:`headrace.plan.cost_model` uses only sums and maxima), so more host memory is never predicted
to be slower.

The memory of a peer, which is another GPU, comes before host memory, because a copy from there takes less time. Units
go to it in the reverse of that order, each for which there is room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.config import Budget, Mechanism, Mode
from headrace.model.layers import find_layers
from headrace.model.records import Inventory, ModelProfile, StorageInfo, dotted_prefixes
from headrace.plan.cached_experts import (
    PIECE_BYTES,
    CachedLayer,
    cache_bytes,
    cached_layers,
    fill_host_memory,
    staging_rows,
)
from headrace.plan.cost_model import Forecaster, StepModel, UnitStores, experts_in, find_stages
from headrace.plan.kinds import HOST, StoreKind, kind_of
from headrace.plan.plan import Plan, UnitSpec, assemble
from headrace.plan.rates import Bools, Floats, Ints, Rates
from headrace.plan.routing_traces import ExpertHits, FixedHits
from headrace.plan.schedule import MAX_SLOTS
from headrace.plan.slabs import SLAB_ALIGNMENT_BYTES, slab_bytes
from headrace.plan.staging_ring import RING_BYTES
from headrace.plan.units import TINY_BYTES, outside_units, stranded

# 2 ** 6 sets of roles: the five heaviest roles of a layer one by one, and all the others together.
_MAX_ATOMS = 6
# Shares of its experts that a layer may have slots for.
_CACHED_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 15 / 16)
# Where the experts of some layers alone are cached, times with other numbers of slots are interpolated.
_TIMED_SHARES = (0.0, *np.geomspace(1 / 64, 1, 24))
# A layer is one of the evenly spaced, one of the others, or one of these that keeps resident what they read in place.
LOW, HIGH, KEPT = range(3)
_REFUSED = " (not in place)"
_WITH_OVERFLOW = 9 / 8  # memory of slots and overflow rows, over that of the slots
# A size with which any sum is below zero.
_NEVER = -1e30

Kinds = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Spill:
    """Files that units may be stored in, for a plan whose store is host memory.

    Attributes:
        unstreamable: storages whose bytes are in no file unchanged; units with one of them stay in host memory.
        free_bytes: available host memory, for budgets that set no limit; ``None``: not known, or not limited.
        ring_bytes: host memory of the staging ring, needed from the first unit in files on; 0 on a CPU.
        is_device_memory: the GPU computes in host memory, so none of it is worth more than a slot.
        may_cache: a budget that names no store may have experts in the files, which a cache holds some of.
    """

    unstreamable: Collection[str] = ()
    free_bytes: int | None = None
    ring_bytes: int = RING_BYTES
    is_device_memory: bool = False
    may_cache: bool = True

    def hold_experts(
        self, layers: Sequence[CachedLayer], host_bytes: float | None, beside_bytes: float
    ) -> tuple[CachedLayer, ...]:
        """``layers`` with experts in what ``beside_bytes`` leave of ``host_bytes`` (``None``: there is no limit)."""
        room = math.inf if host_bytes is None else host_bytes
        room -= beside_bytes + math.prod(staging_rows(layers, on_gpu=True))
        return tuple(fill_host_memory(layers, 0 if self.is_device_memory else room))


@dataclass(frozen=True)
class MappedFiles:
    """Files that compute on a CPU can read in place, because they are mapped into memory.

    Attributes:
        refused: storages that cannot be read in place, each with the reason; it follows the name.
        joined_bytes: bytes of storages in pieces, by name: memory for the pages in which the mapped pieces meet.
    """

    refused: Mapping[str, str] = field(default_factory=dict)
    joined_bytes: Mapping[str, int] = field(default_factory=dict)


_MOST_ROUNDED = 1024  # bytes that a code has more than its share of a slab


def spill_order(count: int) -> list[int]:
    """0 to ``count`` - 1 in an order of which every beginning is spread nearly evenly (van der Corput, base 2)."""
    bits = max(1, (count - 1).bit_length())
    reversed_bits = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [number for number in reversed_bits if number < count]


@dataclass(eq=False)
class CandidateTable:
    """A request to the solver, the storages by their role, and the families of candidates over them.

    Attributes:
        inventory: inventory of the model.
        movable: storages that may leave the device; the others stay.
        forced: storages whose mechanism a rule decides; not among ``movable``.
        rates: rates of the machine, and of the links that units come over (:meth:`StoreKind.rates`).
        profile: profile of the model beyond names and sizes.
        zero_copy: whether compute may read any tensor in place, and not lookups alone.
        lookups_in_place: whether rows of lookup tables may be; mode ``meta`` has no rows to read.
        mapped: files that lookups and experts are read in place from; ``None``: weights are not stored in files.
        stored_bytes: by storage, bytes that are read from the files for it, where that is not its own size.
        batch_sizes: rows of the steps that count.
        context: tokens per sequence that attention reads from the cache.
        ranks_on_device: ranks over whose devices offloaded units are split; ``None``: they are not on devices.
        mode: the store.
        kind: kind of the store of units: that of the codec, if there is one, or of ``mode``.
        spill: files for the units that host memory has no room for; ``None``: all are in the one store.
        above_files: host memory that holds some of a GPU's cached experts, which are in files; ``None``: they are not.
        cacheable: experts that may be cached, by name.
        expert_slots: slots of each layer of experts; ``None``: any number.
        hits: what a cache of experts is expected to hit.
        peer_bytes: memory of another GPU that is used before host memory.
        stages: stages of the model, in order.
        spill_order: module names (FQNs) of all stages, in the order in which their units go to the files.
        layers: names of those that are layers.
        layer_index: position of every layer.
        roles: layer -> role -> storage, movable ones.
        outside: units outside the layers.
        always_prefetched: by module, storages that a rule prefetches.
        always_in_place: lookup tables, and storages that a rule reads in place.
        stranded: movable, but in no module whose forward could wait for them.
        tied_tables: movable lookup tables that another module reads, too, such as the head: no unit can hold them.
        sizes, slabs: bytes of every storage by name, alone and in a slab.
        read_sizes: bytes that are read for a transfer of it.
    """

    inventory: Inventory
    movable: Sequence[StorageInfo]
    forced: Mapping[str, Mechanism]
    rates: Rates
    profile: ModelProfile
    zero_copy: bool
    lookups_in_place: bool
    mapped: MappedFiles | None
    stored_bytes: Mapping[str, int]
    batch_sizes: Sequence[int]
    context: int
    ranks_on_device: int | None
    mode: Mode
    kind: StoreKind
    spill: Spill | None
    above_files: Spill | None = None
    cacheable: Collection[str] = ()
    expert_slots: int | None = None
    hits: ExpertHits | FixedHits = field(default_factory=ExpertHits)
    peer_bytes: int = 0

    def __post_init__(self) -> None:
        inventory = self.inventory
        must_move = {s.name: s for s in inventory.storages if self.forced.get(s.name) == "prefetch"}
        # Rows of a lookup table are read in place: this costs neither memory nor a copy, and also holds where a model
        # reads the table again at its end (tied weights that are not tied tensors).
        refused = self.mapped.refused if self.mapped is not None else {}
        lookups = [s for s in self.movable if s.is_lookup and self.lookups_in_place and s.name not in refused]
        looked_up = {s.name for s in lookups}
        free = {s.name: s for s in self.movable if s.name not in looked_up}
        self.layers = find_layers(inventory)
        self.layer_index = {layer: index for index, layer in enumerate(self.layers)}
        inside = {layer: inventory.under(layer) for layer in self.layers}
        self.roles = {
            layer: {self._role(layer, s): s for s in inside[layer] if s.name in free} for layer in self.layers
        }
        self._experts: dict[str, list[StorageInfo]] = {}  # by their role
        for role, storage in (item for mine in self.roles.values() for item in mine.items()):
            if experts_in(inventory, storage) > 1:
                self._experts.setdefault(role, []).append(storage)
        self._every_role = list(dict.fromkeys(role for mine in self.roles.values() for role in mine))
        always = {layer: tuple(s for s in inside[layer] if s.name in must_move) for layer in self.layers}
        # Asked for together, so that no unit ends up inside another.
        with_units = [layer for layer in self.layers if self.roles[layer] or always[layer]]
        beside = outside_units(inventory, [*free.values(), *must_move.values()], with_units)
        always |= {spec.module_fqn: tuple(s for s in spec.storages if s.name in must_move) for spec in beside}
        self.always_prefetched = {fqn: storages for fqn, storages in always.items() if storages}
        by_rule = [s for s in inventory.storages if self.forced.get(s.name) == "uva"]
        self.always_in_place = (*lookups, *by_rule)
        specs = [UnitSpec(d.module_fqn, tuple(s for s in d.storages if s.name in free)) for d in beside]
        self.outside = [spec for spec in specs if spec.storages]
        self.stages = find_stages(inventory, beside)
        self.spill_order = [self.stages[index].module_fqn for index in spill_order(len(self.stages))]
        placed = {s.name for group in (*inside.values(), *(spec.storages for spec in beside)) for s in group}
        self.stranded = stranded(inventory, free.values(), placed)
        tables = (s for s in free.values() if not inventory.lookups.isdisjoint(s.modules))
        self.tied_tables = [s for s in tables if s.name not in placed and s not in self.stranded]
        self.sizes = {s.name: float(s.num_bytes) for s in inventory.storages}
        self.slabs = {s.name: float(slab_bytes([s.num_bytes])) for s in inventory.storages}
        # With a code: bytes that have none. One of them in a unit, and all of it is stored as it is.
        self.uncodable: dict[str, float] = {}
        if not all(map(self.kind.can_hold, inventory.storages)):
            self.uncodable = {s.name: 0.0 if self.kind.can_hold(s) else float(s.num_bytes) for s in inventory.storages}
        self.read_sizes = self.sizes | {name: float(size) for name, size in self.stored_bytes.items()}

    def _role(self, layer: str, storage: StorageInfo) -> str:
        """Name inside the layer; experts that cannot be read in place have a role of their own."""
        role = storage.name.removeprefix(layer + ".")
        is_refused = self.mapped is not None and storage.name in self.mapped.refused
        return f"{role}{_REFUSED}" if is_refused and experts_in(self.inventory, storage) > 1 else role

    @cached_property
    def spillable(self) -> dict[str, float]:
        """``slabs``, with negative sizes for storages that the files lack."""
        spill = self.spill
        missing = frozenset(spill.unstreamable) if spill is not None else frozenset()
        return {name: _NEVER if name in missing else slab for name, slab in self.slabs.items()}

    @cached_property
    def steps(self) -> list[StepModel]:
        """Per batch size."""
        return [
            StepModel(self.stages, self.rates, self.profile, rows, self.context, self.hits) for rows in self.batch_sizes
        ]

    def forecaster(self, rows: int) -> Forecaster:
        """Forecaster of any plan, for a step of ``rows`` rows."""
        facts = (self.inventory, self.rates, self.profile, rows, self.context, self.stored_bytes)
        return Forecaster(*facts, self.hits)

    def host_limit(self, budget: Budget) -> int | None:
        """Host memory that weights may take: the budget's, or where units can be left in files, all that is free."""
        files = self.above_files or self.spill
        if not (self.kind.on_host or self.above_files):
            return None
        return files.free_bytes if budget.host_limit_bytes is None and files is not None else budget.host_limit_bytes

    def reserved_bytes(self, budget: Budget) -> int:
        """Device memory that the workload takes beside the weights."""
        return self.profile.workload_bytes(max(budget.workload.batch_sizes), budget.workload.context)

    @cached_property
    def has_code(self) -> bool:
        """Whether any candidate has a unit in the code of ``rates``."""
        return any(family.memory.is_coded.any() for family in self.families)

    @cached_property
    def families(self) -> list[Family]:
        """All candidates, in runs that differ in numbers only."""
        forced = {name for name, how in self.forced.items() if how == "cache"}
        families = list(self._uncached_families())
        if forced:
            families = [replace(family, cached=cached) for cached in self._caches(forced) for family in families]
        if forced or not self.cacheable or not (names := self._cached_by_choice()):
            return families
        beside = {role for mine in self.roles.values() for role, s in mine.items() if s.name in names}
        dense_sets = RoleSets(self, [role for role in self._every_role if role not in beside])
        dense = [self._evenly_spaced(dense_sets, how, uva) for how, uva in self._outside_ways()]
        return families + [replace(family, cached=cached) for cached in self._caches(names) for family in dense]

    def families_within(self, device_bytes: float, host_bytes: int | None) -> list[Family]:
        """``families``, and where host memory is short, those that cache the experts of some layers."""
        if self.above_files is not None:
            return [family.with_experts_in(self.above_files, host_bytes) for family in self.families]
        is_short = self.expert_slots is None and self.is_short(device_bytes, host_bytes)
        return self.families + (self._mixed_families(device_bytes) if is_short else [])

    def is_short(self, device_bytes: float, host_bytes: int | None) -> bool:
        """Whether ``host_bytes`` alone keep the experts of all layers from being cached."""
        cached = [family for family in self.families if family.cached]
        if host_bytes is None or any(len(family.fitting(device_bytes, host_bytes)) for family in cached):
            return False
        return any(len(family.fitting(device_bytes)) for family in cached)

    def _mixed_families(self, device_bytes: float) -> list[Family]:
        """Candidates that cache the experts of some layers; those of the others are resident, or prefetched.

        Of the dense roles all stay or all leave.
        """
        if not (names := self._cached_by_choice()):  # a rule caches them
            return []
        experts = frozenset(role for mine in self.roles.values() for role, s in mine.items() if s.name in names)
        sets = RoleSets(self, self._every_role, [experts, experts.symmetric_difference(self._every_role)])
        patterns = _three_ways([not experts.isdisjoint(mine) for mine in self.roles.values()], least_moved=0)
        lows = [low for low in sets.sets if experts.isdisjoint(low)]
        high, low = (
            np.repeat([sets.sets.index(each | more) for each in lows], len(patterns))
            for more in (experts, frozenset[str]())
        )
        none, every = np.zeros_like(high), np.tile(np.arange(len(patterns)), len(lows))
        cached = self._layers_of(names)
        return [
            Family(self, sets, high, low, none, none, every, patterns, how, uva)
            .with_all_slots()
            .with_some_cached(cached, device_bytes)
            for how, uva in self._outside_ways()
        ]

    @cached_property
    def cached_reads(self) -> tuple[list[int], list[Floats]]:
        """Numbers of slots, and by step :meth:`StepModel.read_in_place` of all experts in each of them."""
        layers = self._layers_of(self._cached_by_choice())
        most = max(layer.num_experts for layer in layers)
        counts = sorted({max(1, round(share * most)) for share in _TIMED_SHARES})
        sized = [[replace(layer, num_slots=min(count, layer.num_experts)) for layer in layers] for count in counts]
        return counts, [np.array([step.read_in_place((), each) for each in sized]) for step in self.steps]

    def layer_around(self, fqn: str) -> int:
        """The position of the layer that the module ``fqn`` is in."""
        return next(self.layer_index[name] for name in dotted_prefixes(fqn) if name in self.layer_index)

    def _cached_by_choice(self) -> set[str]:
        """Movable experts with what belongs to them, such as biases; empty where not all of that may be cached."""
        weights = {s for storages in self._experts.values() for s in storages}
        modules = {module for s in weights for module in s.modules}
        found = [s for s in self.inventory.storages if not modules.isdisjoint(s.modules)]
        # Small scales, which are worth no copy of their own, go with their experts like biases.
        others = [s for s in found if s not in weights and s.num_bytes >= TINY_BYTES]
        stays = [s for s in others if experts_in(self.inventory, s) > 1]
        names = {s.name for s in found if s.name in self.cacheable}
        if stays or not names.issuperset(s.name for s in weights) or not names.isdisjoint(self.forced):
            return set()
        return names

    def _caches(self, names: Collection[str]) -> list[tuple[CachedLayer, ...]]:
        """The experts ``names`` with several numbers of slots."""
        most = max(layer.num_experts for layer in self._layers_of(names))
        counts = {max(1, round(share * most)) for share in _CACHED_SHARES}
        counts |= {1} if self.above_files is not None else set()  # host memory is nearly as good
        counts = {self.expert_slots} if self.expert_slots is not None else counts
        return [tuple(self._layers_of(names, count)) for count in sorted(counts)]

    def _layers_of(self, names: Collection[str], num_slots: int = 1) -> list[CachedLayer]:
        return cached_layers(self.inventory, names, num_slots, kind_of(self.mode).host_slots)

    def _uncached_families(self) -> Iterator[Family]:
        experts = {role: storages for role, storages in self._experts.items() if not role.endswith(_REFUSED)}
        dense = [role for role in self._every_role if role not in experts]
        all_sets, dense_sets = RoleSets(self, self._every_role), RoleSets(self, dense)
        in_model = {s.name for storages in experts.values() for s in storages}
        expert_storages = [s for mine in self.roles.values() for s in mine.values() if s.name in in_model]
        for how, uva in self._outside_ways():
            yield self._evenly_spaced(all_sets, how, uva)
            if self.zero_copy:
                yield self._evenly_spaced(all_sets, how, uva, in_place=True)
            elif self.mapped is None or self.rates.in_place_grouped_s_per_byte is None:
                continue
            if experts and (dense or not self.zero_copy):
                yield self._evenly_spaced(dense_sets, how, (*uva, *expert_storages))
            if experts and self.spill is not None:
                yield from self._split_experts(all_sets, how, uva, frozenset(experts))

    def _outside_ways(self) -> Iterator[tuple[Mechanism, tuple[StorageInfo, ...]]]:
        """Each mechanism for what is outside the layers, with all that is read in place then."""
        yield "resident", self.always_in_place
        if self.outside:
            yield "prefetch", self.always_in_place
        storages = [*(s for spec in self.outside for s in spec.storages), *self.tied_tables]
        if storages and self.zero_copy:
            yield "uva", (*self.always_in_place, *storages)

    def _evenly_spaced(
        self, sets: RoleSets, outside: Mechanism, uva: tuple[StorageInfo, ...], in_place: bool = False
    ) -> Family:
        """Every set of roles in every number of layers, and none or the next smaller one in the others."""
        counts = np.arange(1, len(self._even_patterns), dtype=np.int64)
        runs = [np.zeros((3, 1), dtype=np.int64)]
        for high in range(1, len(sets.sets)):
            for low in dict.fromkeys((0, high - 1)):
                run = counts if low == 0 else counts[:-1]
                runs.append(np.stack([np.full_like(run, high), np.full_like(run, low), run]))
        high, low, pattern = np.concatenate(runs, axis=1)
        none = np.zeros_like(high)
        chosen = (none, none, high, low) if in_place else (high, low, none, none)
        first = Family(self, sets, *chosen, pattern, self._even_patterns, outside, uva)
        return first if in_place else first.with_all_slots()  # in place, nothing is prefetched in the layers

    @cached_property
    def _even_patterns(self) -> Kinds:
        """[patterns, layers]: in row n, n ``HIGH`` layers, evenly spaced among those with a role.

        The gap comes after the last of them: what its slot needs next is then copied beside the compute that remains.
        """
        layers = np.flatnonzero([bool(mine) for mine in self.roles.values()])
        patterns = np.full((len(layers) + 1, len(self.layers)), LOW, dtype=np.int8)
        for count in range(1, len(layers) + 1):
            patterns[count, layers[np.arange(count) * len(layers) // count]] = HIGH
        return patterns

    def _split_experts(
        self, sets: RoleSets, outside: Mechanism, uva: tuple[StorageInfo, ...], experts: frozenset[str]
    ) -> Iterator[Family]:
        """Experts prefetched in evenly spaced layers, resident in some of the others, read in place in the last ones.

        Of the dense roles all stay or all leave.
        """
        index = {chosen: number for number, chosen in enumerate(sets.sets)}
        has_experts = [not experts.isdisjoint(mine) for mine in self.roles.values()]
        if experts not in index or sum(has_experts) < 2:
            return
        lows = dict.fromkeys((frozenset[str](), frozenset[str]().union(*sets.sets) - experts))
        patterns = _three_ways(has_experts)
        every = np.tile(np.arange(len(patterns)), len(lows))
        low = np.repeat([index[chosen] for chosen in lows], len(patterns))
        high = np.repeat([index[chosen | experts] for chosen in lows], len(patterns))
        chosen = (high, low, np.zeros_like(high), np.full_like(low, index[experts]))
        yield Family(self, sets, *chosen, every, patterns, outside, uva).with_all_slots()


def _three_ways(has_experts: Sequence[bool], least_moved: int = 1) -> Kinds:
    """[patterns, layers]: every number of evenly spaced layers with experts that are ``HIGH``, and of those between
    them that are ``KEPT``."""
    layers = np.flatnonzero(has_experts)
    patterns = []
    for moved in range(least_moved, len(layers)):
        spaced = np.arange(moved) * len(layers) // max(1, moved)
        between = np.delete(layers, spaced)
        for kept in range(len(between)):
            pattern = np.full(len(has_experts), LOW, dtype=np.int8)
            pattern[layers[spaced]] = HIGH
            pattern[between[np.arange(kept) * len(between) // max(1, kept)]] = KEPT
            patterns.append(pattern)
    return np.array(patterns)


class RoleSets:
    """Every set of roles that may leave together, lightest first; the first one is empty."""

    def __init__(self, table: CandidateTable, allowed: Sequence[str], groups: Sequence[frozenset[str]] = ()) -> None:
        totals = dict.fromkeys(allowed, 0)
        for roles in table.roles.values():
            for role in totals.keys() & roles.keys():
                totals[role] += roles[role].num_bytes
        ordered = sorted(totals, key=lambda role: (-totals[role], role))
        atoms = [frozenset({role}) for role in ordered[:_MAX_ATOMS]]
        if len(ordered) > _MAX_ATOMS:  # the light ones go together: they add choices but hardly any bytes
            atoms[_MAX_ATOMS - 1] = frozenset(ordered[_MAX_ATOMS - 1 :])
        atoms = [group for group in groups if group] or atoms
        sets = {
            frozenset[str]().union(*chosen) for count in range(len(atoms) + 1) for chosen in combinations(atoms, count)
        }
        weight = {chosen: sum(totals[role] for role in chosen) for chosen in sets}
        # A set of strings has another order in each process, and all ranks have to make the same plan.
        self.sets = sorted(sets, key=lambda chosen: (weight[chosen], sorted(chosen)))
        self._names = [[mine[role].name if role in mine else None for mine in table.roles.values()] for role in ordered]
        self._num_layers = len(table.roles)
        self._members = np.array([[role in chosen for role in ordered] for chosen in self.sets], dtype=np.float64)

    def totals(self, value: Mapping[str, float]) -> Floats:
        """[layers, sets]: the sum of ``value`` over the storages of a set in a layer."""
        values = [[0.0 if name is None else value[name] for name in names] for names in self._names]
        by_role = np.array(values, dtype=np.float64).reshape(len(self._names), self._num_layers)
        return (self._members.reshape(len(self.sets), len(self._names)) @ by_role).T


class Memory(NamedTuple):
    """Memory by candidate, and whether any of its units has a code."""

    num_units: Ints
    num_slots: Ints
    moved_bytes: Floats
    offloaded_bytes: Floats
    device_bytes: Floats
    is_coded: Bools


class Placed(NamedTuple):
    """Stores of units, by candidate.

    Attributes:
        stores: stores of all units.
        host_bytes: host memory for units, for tensors that are read in place, and for the staging ring.
    """

    stores: UnitStores
    host_bytes: Floats


def _fill(
    units: Iterable[tuple[str, Floats]], left: Floats, until_full: bool = False
) -> tuple[dict[str, Bools], Floats]:
    """The units (module, bytes) that ``left`` bytes have room for, in this order, and the bytes that are left.

    ``until_full``: take units until nothing is left, so the result may be negative.
    """
    chosen: dict[str, Bools] = {}
    for fqn, num_bytes in units:
        chosen[fqn] = (num_bytes > 0) & (left > 0 if until_full else num_bytes <= left)
        left = left - chosen[fqn] * num_bytes
    return chosen, left


@dataclass(frozen=True, eq=False)
class Family:
    """Candidates that differ in numbers only, as arrays of one value per candidate: their memory and step times.

    Where a method takes ``host_bytes``, as many of a candidate's units are in files as do not fit into them.

    Attributes:
        table: table of all families.
        sets: what the next four index.
        high, low: the set that is prefetched in the ``HIGH`` layers, and that in the others.
        high_uva, low_uva: the set that is read in place in the ``HIGH`` layers, and that in the ``LOW`` ones.
        pattern: row of ``patterns``.
        patterns: [patterns, layers]: the kind of each layer.
        outside: the mechanism outside the layers.
        uva: storages that all of them read in place.
        cached: experts that all of them cache.
        slots: by candidate, slots of ``LOW`` layers, which alone cache experts then; ``None``: all ``cached`` are.
        memories: :attr:`memory` without cached experts once it is known; shared by the families of these candidates.
        hosts: :attr:`least_host_bytes` once it is known; shared by those, too.
        repeats: how often all candidates are there: with one slot, with two and so on.
    """

    table: CandidateTable
    sets: RoleSets
    high: Ints
    low: Ints
    high_uva: Ints
    low_uva: Ints
    pattern: Ints
    patterns: Kinds
    outside: Mechanism
    uva: tuple[StorageInfo, ...]
    cached: tuple[CachedLayer, ...] = ()
    slots: Ints | None = None
    memories: list[Memory] = field(default_factory=list)
    hosts: list[Floats] = field(default_factory=list)
    repeats: int = 1

    def with_all_slots(self) -> Family:
        """The candidates with one slot, with two and so on."""
        return replace(self._take(np.tile(np.arange(len(self.high)), MAX_SLOTS)), repeats=MAX_SLOTS)

    def _take(self, rows: Ints) -> Family:
        """The family with only the candidates of these indices, with one slot each, whatever they had."""
        names = ["high", "low", "high_uva", "low_uva", "pattern", *["slots"] * (self.slots is not None)]
        arrays = {name: getattr(self, name)[rows] for name in names}
        return replace(self, memories=[], hosts=[], repeats=1, **arrays)

    @property
    def num_slots(self) -> Ints:
        """Slots of each candidate at most; no more than there are units."""
        return np.repeat(np.arange(1, self.repeats + 1), len(self.high) // self.repeats)

    @cached_property
    def _first(self) -> Family:
        """The candidates with one slot."""
        return self._take(np.arange(len(self.high) // self.repeats))

    def with_some_cached(self, layers: Sequence[CachedLayer], device_bytes: float) -> Family:
        """The candidates with experts of their ``LOW`` layers in as many slots as ``device_bytes`` have room for."""
        made = replace(self, cached=tuple(layers), slots=np.zeros(len(self.high), np.int64))
        room = device_bytes - made.memory.device_bytes
        slots = np.floor(room / (_WITH_OVERFLOW * made._of_caches(lambda layer: layer.num_bytes // layer.num_experts)))
        return replace(made, slots=np.clip(slots, 0, max(layer.num_experts for layer in layers)).astype(np.int64))

    def with_experts_in(self, files: Spill, host_bytes: float | None) -> Family:
        """The candidates with experts in host memory above ``files``: as many as there is room for."""
        ring_bytes = files.ring_bytes * bool(self.memory.num_units.any())
        cached = files.hold_experts(self.cached, host_bytes, ring_bytes) if self.cached else ()
        return replace(self, cached=cached)

    @cached_property
    def _chosen(self) -> Kinds:
        """[layers, candidates]: the set that each prefetches in each layer."""
        return np.where(self._kinds == HIGH, self.high.astype(np.int8), self.low.astype(np.int8))

    @property
    def _kinds(self) -> Kinds:
        """[layers, candidates]: the kind of each layer."""
        return self.patterns.T.take(self.pattern, axis=1)

    @cached_property
    def _in_place(self) -> Kinds | None:
        """[layers, candidates]: the set that each reads in place in each layer; ``None``: all of them the empty one."""
        if not (self.high_uva.any() or self.low_uva.any()):
            return None
        kinds, high, low = self._kinds, self.high_uva.astype(np.int8), self.low_uva.astype(np.int8)
        return np.where(kinds == HIGH, high, np.where(kinds == LOW, low, np.int8(0)))

    @cached_property
    def _always(self) -> dict[str, list[StorageInfo]]:
        """Storages that every candidate prefetches, by module."""
        always = {fqn: list(storages) for fqn, storages in self.table.always_prefetched.items()}
        for spec in self.table.outside if self.outside == "prefetch" else ():
            always.setdefault(spec.module_fqn, []).extend(spec.storages)
        return always

    def _units(self, value: Mapping[str, float]) -> Iterator[tuple[str, Floats]]:
        """(module, value of its unit per candidate), in order, for every stage that may have a unit."""
        totals = self.sets.totals(value)
        for stage in self.table.stages:
            always = float(sum(value[s.name] for s in self._always.get(stage.module_fqn, ())))
            layer = self.table.layer_index.get(stage.module_fqn)
            if layer is not None:
                yield stage.module_fqn, totals[layer].take(self._chosen[layer]) + always
            elif always:
                yield stage.module_fqn, np.full(len(self.high), always)

    # -- memory --------------------------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> Memory:
        """Memory as :class:`~headrace.plan.plan.Plan` counts it once a candidate is laid out."""
        if not self.memories:
            by_slots = islice(self._first._memories(), self.repeats)
            self.memories.append(Memory(*map(np.concatenate, zip(*by_slots, strict=True))))
        (found,) = self.memories
        if not self.cached:
            return found
        num_bytes = self._of_caches(lambda layer: layer.num_bytes)
        slots_bytes = cache_bytes(self.cached) if self.slots is None else self._of_caches(self._fixed_bytes)
        device_bytes = found.device_bytes - num_bytes + slots_bytes
        return found._replace(offloaded_bytes=found.offloaded_bytes + num_bytes, device_bytes=device_bytes)

    @cached_property
    def _caching(self) -> Bools:
        """[layers, candidates], where ``slots`` are given: whether each caches the experts that a layer has."""
        caching: Bools = self._kinds == LOW
        return caching

    def _of_caches(self, value: Callable[[CachedLayer], float]) -> Floats | float:
        """Per candidate: the sum of ``value`` over the layers whose experts it caches."""
        if self.slots is None:
            return sum(map(value, self.cached))
        by_layer = np.zeros(len(self.table.layers))
        for layer in self.cached:
            by_layer[self.table.layer_around(layer.module_fqn)] += value(layer)
        return by_layer @ self._caching

    @staticmethod
    def _fixed_bytes(layer: CachedLayer) -> float:
        """The most device memory of ``layer`` beside its slots: for tensors with small rows, and where pieces begin."""
        sizes = (PIECE_BYTES if layer.is_split(name) else 3 * size for name, size in layer.storages.items())
        return _WITH_OVERFLOW * sum(sizes)

    def _memories(self) -> Iterator[Memory]:
        """:attr:`memory` of all candidates with one slot, with two and so on."""
        count, ranks, counts = len(self.high), self.table.ranks_on_device, range(1, MAX_SLOTS + 1)
        parts_bytes, moved, num_units = np.zeros(count), np.zeros(count), np.zeros(count, dtype=np.int64)
        # By the index of a unit modulo a number that every number of slots divides, and the place of the next one.
        largest, places = np.zeros(math.lcm(*counts) * count), np.arange(count)
        first, decoded, uncoded = np.zeros((MAX_SLOTS, count)), np.zeros(count), self._uncoded()
        is_coded, has_peer = self.table.kind.is_coded, bool(self.table.peer_bytes)
        on_peer = self._on_peer(dict(self._units(self.table.slabs)))[0] if is_coded and has_peer else {}
        for (fqn, slab), (_, size) in zip(self._units(self.table.slabs), self._units(self.table.sizes), strict=True):
            has_unit = slab > 0
            if not has_unit.any():
                continue
            in_slot = slab
            if is_coded:  # but for what is on the peer
                is_plain = np.logical_or(uncoded.get(fqn, False), on_peer.get(fqn, False))
                in_slot = self._code_bytes(slab, is_plain)
                np.maximum(decoded, slab * ~is_plain, out=decoded)
            largest[places] = np.maximum(largest[places], in_slot)
            early = np.flatnonzero(has_unit & (num_units < MAX_SLOTS))
            first[num_units[early], early] = size[early]
            num_units += has_unit
            places += count * has_unit
            places -= len(largest) * (places >= len(largest))
            if ranks is not None:  # as Split.part_bytes
                parts_bytes += np.ceil(slab / (ranks * SLAB_ALIGNMENT_BYTES)) * SLAB_ALIGNMENT_BYTES
            moved += size
        offloaded = moved + self._in_place_bytes(self.table.sizes)
        resident = self.table.inventory.num_bytes - offloaded + parts_bytes
        for wanted in counts:
            # A unit that has its slot alone is copied once and stays.
            alone = np.arange(wanted)[:, None] + wanted >= num_units
            device_bytes = resident + decoded + largest.reshape(-1, wanted, count).max(axis=0).sum(axis=0)
            moved_bytes = moved - (first[:wanted] * alone).sum(0)
            yield Memory(num_units, np.minimum(wanted, num_units), moved_bytes, offloaded, device_bytes, decoded > 0)

    def _uncoded(self) -> dict[str, Bools]:
        """Whether each module's unit has no code, where others have one."""
        return (
            {fqn: num_bytes > 0 for fqn, num_bytes in self._units(self.table.uncodable)} if self.table.uncodable else {}
        )

    def _code_bytes(self, slab: Floats, uncoded: Bools | None) -> Floats:
        """Upper bound of the bytes of code for units of these bytes."""
        share = 1.001 * self.table.rates.coded_share
        code = np.where(slab > 0, np.ceil(slab * share + _MOST_ROUNDED), 0.0)
        return code if uncoded is None else np.where(uncoded, slab, code)

    def _in_place_bytes(self, sizes: Mapping[str, float]) -> Floats:
        """Per candidate: what is read in place, each storage counted with its bytes in ``sizes``."""
        found = np.full(len(self.high), float(sum(sizes[s.name] for s in self.uva)))
        if self._in_place is not None:
            for totals, chosen in zip(self.sets.totals(sizes), self._in_place, strict=True):
                found += totals.take(chosen)
        return found

    def _on_peer(self, slabs: Mapping[str, Floats]) -> tuple[dict[str, Bools], Floats]:
        """Units of these bytes that the peer has room for, and the bytes that are left there."""
        if not self.table.peer_bytes:
            return {}, np.zeros(len(self.high))
        order = [fqn for fqn in reversed(self.table.spill_order) if fqn in slabs]
        return _fill(((fqn, slabs[fqn]) for fqn in order), np.full(len(self.high), float(self.table.peer_bytes)))

    def _placed(self, host_bytes: float | None) -> Placed:
        """Stores of units: the peer as far as it has room, then host memory, then files."""
        table, uncoded = self.table, self._uncoded()
        if table.above_files is not None:
            return self._placed_in(table.above_files)
        if table.peer_bytes or host_bytes is not None:
            return self._placed_within(host_bytes, uncoded)
        return Placed(UnitStores(table.kind, [(HOST, uncoded)]), np.zeros(len(self.high)))

    def _placed_in(self, files: Spill) -> Placed:
        """Stores of units that are all in ``files``, and what they, and experts, pass through on the host."""
        ring_bytes = files.ring_bytes * np.any([slab > 0 for _, slab in self._units(self.table.slabs)], axis=0)
        staging = math.prod(staging_rows(self.cached, on_gpu=True))
        return Placed(UnitStores(self.table.kind), ring_bytes + self._in_place_bytes(self.table.slabs) + staging)

    def _placed_within(self, host_bytes: float | None, uncoded: dict[str, Bools]) -> Placed:
        table, spill, on_peer, in_files = self.table, self.table.spill, dict[str, Bools](), dict[str, Bools]()
        slabs = dict(self._units(table.slabs))
        order = [fqn for fqn in table.spill_order if fqn in slabs]
        # What memory is left becomes slots, and with their number host memory begins elsewhere in a piece.
        cached_bytes = self._of_caches(lambda layer: layer.most_host_bytes)
        on_host = sum(slabs.values(), self._in_place_bytes(table.slabs)) + cached_bytes
        if table.peer_bytes:
            on_peer, left = self._on_peer(slabs)
            on_host -= table.peer_bytes - left
        for fqn, slab in slabs.items() if table.kind.is_coded else ():
            on_host -= (slab - self._code_bytes(slab, uncoded.get(fqn))) * np.logical_not(on_peer.get(fqn, False))
        if spill is not None and host_bytes is not None:
            # The ring takes host memory as soon as one unit is in files.
            excess = np.where(on_host > host_bytes, on_host - host_bytes + spill.ring_bytes, 0.0)
            if excess.any():
                units = dict(self._units(table.spillable))
                off_peer = ((fqn, units[fqn] * ~on_peer[fqn] if on_peer else units[fqn]) for fqn in order)
                in_files, left = _fill(off_peer, excess, until_full=True)
                on_host = np.where(excess > 0, host_bytes + left, on_host)
        others = [(HOST, uncoded), *zip(map(kind_of, ("disk", "peer")), (in_files, on_peer), strict=True)]
        return Placed(UnitStores(table.kind, others), on_host)

    @property
    def least_host_bytes(self) -> Floats:
        """The least host memory of each candidate."""
        if not self.hosts:
            limits = (np.inf, 0) if self.table.spill is not None else (np.inf,)
            least = np.min([self._first._placed(limit).host_bytes for limit in limits], axis=0)
            self.hosts.append(np.tile(least, self.repeats))
        return self.hosts[0]

    def fitting(self, device_bytes: float, host_bytes: int | None = None, *, must_code: bool = False) -> Ints:
        """Candidates within both limits; ``must_code``: those alone that have a coded unit."""
        fits = (self.memory.device_bytes <= device_bytes) & (self.memory.is_coded | (not must_code))
        if self.slots is not None:
            fits &= self.slots > 0
        if host_bytes is not None:
            fits &= self.least_host_bytes <= host_bytes
        # With more slots than units a candidate is the plan of another one with fewer slots.
        return np.flatnonzero(fits & (self.num_slots <= np.maximum(self.memory.num_slots, 1)))

    # -- time ----------------------------------------------------------------------------------------------------------

    def least_score(self, rows: Ints) -> Floats:
        """A lower bound of :func:`mean_log` of the steps of the candidates of these indices.

        No step is shorter than its compute, or than what occupies the link.
        """
        rates, as_stored = self.table.rates, not self.table.stored_bytes  # else fewer bytes may be read
        curves = [rates.copy_bytes_per_s, *[rates.from_peer_bytes_per_s] * bool(self.table.peer_bytes)]
        moved_s = as_stored * self.memory.moved_bytes[rows] / max(rate for curve in curves for _, rate in curve.points)
        least_s, taken = [], self if self.slots is None else self._take(rows)
        for step in self.table.steps:
            extra_s, link_s = map(sum, zip(*taken._fixed_reads(step), strict=True))
            least_s.append(np.maximum(moved_s + link_s, sum(step.resident_s) + extra_s))
        return mean_log(np.array(least_s)) - 1e-8  # of rounding

    def step_s(self, rows: Ints, host_bytes: int | None = None) -> Floats:
        """[batch sizes, ``rows``]: seconds of a step of the candidates of these indices."""
        taken, counts = self._take(rows), (self.memory.num_slots[rows], self.memory.num_units[rows])
        units, placed = dict(taken._units(self.table.read_sizes)), taken._placed(host_bytes)
        reads = [(taken._read_in_place(step), *counts, step.read_experts_s(self.cached)) for step in self.table.steps]
        pairs = zip(self.table.steps, reads, strict=True)
        return np.array([step.step_s(units, placed.stores, *each) for step, each in pairs])

    def _read_in_place(self, step: StepModel) -> list[tuple[Floats | float, Floats | float]]:
        """Per stage, by candidate: seconds that reading in place adds to compute, and that it occupies the link."""
        reads = self._fixed_reads(step)
        if self._in_place is not None:
            extra = self.sets.totals({name: cost.in_place_s - cost.resident_s for name, cost in step.costs.items()})
            link = self.sets.totals({name: cost.in_place_s for name, cost in step.costs.items()})
            for index, stage in enumerate(self.table.stages):
                if (layer := self.table.layer_index.get(stage.module_fqn)) is not None:
                    (extra_s, link_s), chosen = reads[index], self._in_place[layer]
                    reads[index] = extra_s + extra[layer].take(chosen), link_s + link[layer].take(chosen)
        return reads

    def _fixed_reads(self, step: StepModel) -> list[tuple[Floats | float, Floats | float]]:
        """:meth:`_read_in_place` of what all candidates read, and of cached experts."""
        names, reads = [s.name for s in self.uva], list[tuple[Floats | float, Floats | float]]()
        if self.slots is None:
            return reads + step.read_in_place(names, self.cached)
        counts, by_step = self.table.cached_reads
        by_count = by_step[self.table.steps.index(step)]
        others = step.read_in_place(names)
        for index, (stage, (extra_s, link_s)) in enumerate(zip(self.table.stages, others, strict=True)):
            if (layer := self.table.layer_index.get(stage.module_fqn)) is not None and by_count[:, index].any():
                missed_s, fetch_s = (np.interp(self.slots, counts, column) for column in by_count[:, index].T)
                extra_s, link_s = extra_s + missed_s * self._caching[layer], link_s + fetch_s * self._caching[layer]
            reads.append((extra_s, link_s))
        return reads

    # -- one candidate -------------------------------------------------------------------------------------------------

    def plan(self, candidate: int, host_bytes: int | None = None) -> Plan:
        """The candidate of this index, laid out."""
        table, taken = self.table, self._take(np.array([candidate]))
        stores = taken._placed(host_bytes).stores
        # In the order of the model, as every other policy lays out a unit.
        order = {s.name: index for index, s in enumerate(self.table.inventory.storages)}
        specs, uva = [], list(self.uva)
        for fqn in (stage.module_fqn for stage in self.table.stages):
            storages = list(self._always.get(fqn, ()))
            for role, storage in self.table.roles.get(fqn, {}).items():
                layer = self.table.layer_index[fqn]
                if role in self.sets.sets[taken._chosen[layer, 0]]:
                    storages.append(storage)
                elif taken._in_place is not None and role in self.sets.sets[taken._in_place[layer, 0]]:
                    uva.append(storage)
            if storages:
                kind = stores.kind_of(fqn, 0)  # codes are given to units later
                store = None if kind in (table.kind, HOST) else kind.name
                specs.append(UnitSpec(fqn, tuple(sorted(storages, key=lambda s: order[s.name])), store))
        cached = self.cached
        if self.slots is not None:
            cached = tuple(e for e in cached if taken._caching[table.layer_around(e.module_fqn), 0])
        num_slots = int(self.memory.num_slots[candidate])
        return assemble(self.table.inventory, specs, num_slots, self.table.mode, uva=uva, cached=cached)


def mean_log(step_s: Floats) -> Floats:
    """Mean logarithm over the batch sizes, [sizes, candidates], rounded so that equal times are equal."""
    # The mean logarithm orders like the geometric mean: each batch size counts by its ratio, not by its seconds.
    rounded: Floats = np.round(np.log(step_s).mean(axis=0), 9)
    return rounded
