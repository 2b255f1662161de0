"""The cost model: from a machine's measured rates to the time of one step. Pure functions of sizes and rows.

A model is a row of *stages*, the modules that run one after another. A stage of ``rows`` rows takes

    compute = sum over its tensors of touched bytes x product_s_per_byte(rows)
              + kernels x kernel_s + (activation bytes + its share of the KV cache) / device copy rate

with all weights resident. Weights that it reads in place take the longer of that and

    in place = touched bytes x in_place_s_per_byte(rows)

during which the link is busy; a matrix product reads its weight again for every tile of rows. ``touched`` is everything
for dense weights; of the ``E`` experts of a layer, with each of ``r`` rows routed to ``k`` of them uniformly, a step
touches on average

    E x (1 - (1 - k / E) ^ r)

which then have ``r x k / touched`` rows each; a lookup touches one row per row. Of cached experts a step fetches those
that the cache misses (:class:`~headrace.plan.routing_traces.ExpertHits`), before its product. Copies take
bytes / copy rate(bytes), in the order of the schedule, and units in files bytes / file rate before that, a staging ring
ahead of the link. Units that are coded, or split over ranks, have a copy rate of
their own: :meth:`StoreKind.rates <headrace.plan.kinds.StoreKind.rates>`.

Where the form comes from: decode is bound by reading weights, prefill by arithmetic (roofline, Williams et al. 2009),
and one curve measured over rows covers both ends and the range between. The numbers of kernels and passes below are not
measured by the probe: they were fitted once, to resident steps of two stacks on an H200. Where the profile has a count
of kernels (transformers' eager forward, replayed in CUDA graphs), that counts instead, spread evenly over the layers.

How copies and reads overlap with the stages is simulated (:func:`step_s`) by the rules of :mod:`headrace.plan.schedule`
and of the prefetcher that carries them out, for steps that follow one another without a pause:

* a stage starts when the one before it has ended and its own unit is in its slot;
* one copy runs at a time, in the order of the units; that of unit ``u`` can start when ``u - S`` has been read;
* a step ends when its last copy is joined. The first units of the next step are copied within this one, except into
  the slot of the last unit, which is refilled at the beginning of the next step;
* while a stage reads in place, no copy runs;
* a unit in files is read by the disk, which begins when the copy of the last such unit has ended and gets no more than
  the staging ring ahead of the link. Its copy ends when it has been read, and occupies the link until then.

Every clock is made of sums and maxima, so no time gets shorter when a stage, a copy or a read takes longer.

The simulation's arguments are arrays over candidates, so that one pass over the stages times thousands of plans.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from headrace.model.layers import find_layers, reader_of
from headrace.model.records import Inventory, ModelProfile, StorageInfo, dotted_prefixes
from headrace.plan.cached_experts import CachedLayer
from headrace.plan.kinds import StoreKind, Unit
from headrace.plan.plan import Plan, UnitSpec
from headrace.plan.rates import Bools, Floats, Ints, Rates
from headrace.plan.routing_traces import ExpertHits, FixedHits
from headrace.plan.staging_ring import RING_BYTES

# Beside each weight's own kernel run its second half (split sums) and an activation, a residual sum, a rotation.
KERNELS_PER_TENSOR = 3
# Sorting rows by expert in several passes, gathering, grouping, weighing and summing them up again.
KERNELS_PER_EXPERT_LAYER = 45
# A layer with cached experts: admission, fetching, the rows of what was chosen, and what they delay. Of a step in vLLM
# 18 us (Qwen3-30B-A3B) and 16 (gpt-oss-120b) a layer (H100, docs/benchmarks/2026-11-26-vllm-experts-h100.md).
CACHED_LAYER_S = 17e-6
# A layer whose experts the host brings from files, between two graphs: it waits for the router's choice, and starts
# copies one by one. 28.5 ms a token of 6 layers, less reads, copies and the resident step; eagerly 0.7 ms a layer
# (docs/benchmarks/2026-11-30-expert-files-h200.md).
FILE_LAYER_S = 0.5e-3
# bitsandbytes stores two weights a byte, in one column. A byte of them takes the kernel for one row as long as so many
# of 16 bits (Llama-3.3-70B, 43.3 ms a token: docs/benchmarks/2026-11-25-card-24gb-h100.md).
PACKED_BYTE = 2.4
# It computes more than it reads: an H200, with 1.4 times the memory rate, takes 42.4 ms, as long as that H100.
PACKED_S_PER_BYTE = 0.95e-12
# A byte of MXFP4 codes for one row, by headrace's kernels: 60.5 us for 4 experts of gpt-oss, which unpacking limits and
# not memory (H200, docs/benchmarks/2026-11-28-served-h200.md).
MXFP4_S_PER_BYTE = 1.215e-12
MXFP4_ROWS = 8  # more are multiplied as bf16
# Between two tokens of ``generate``, which chooses one, without compute: 1.1 to 1.7 ms on the host of an H100 (table
# `card-between` there), less than 0.3 on that of an H200 (2026-11-26-generate-h200.md). Copies go on meanwhile.
BETWEEN_TOKENS_S = 0.8e-3
# A counted kernel in units of ``kernel_s``. It depends on the one before, and a static cache and masks have some more.
# Fitted to resident steps in graphs of Qwen3-8B and Qwen3-30B-A3B: with math attention on an H200 9.26 and 12.35 ms
# (predicted 9.2 and 11.8); on an H100 Qwen3-8B takes 9.63 ms of graph and 11.3 ms a token in ``generate`` (10.8).
EAGER_KERNEL = 2.2
# How often an activation is written or read by the kernels around the product it belongs to.
ACTIVATION_PASSES = 3.5


# -- stages and their costs --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A module that runs on its own in the order of the model, with what it reads.

    Attributes:
        module_fqn: its dotted name.
        storages: storages that it reads, each with the number of experts (:func:`experts_in`; 1: it is not of experts).
        is_layer: whether it is one of the layers.
    """

    module_fqn: str
    storages: tuple[tuple[StorageInfo, int], ...]
    is_layer: bool = False


def find_stages(inventory: Inventory, outside: Iterable[UnitSpec] = ()) -> list[Stage]:
    """The layers, and around them every other module that owns tensors, in the order of the model.

    ``outside``: units that may be hooked on other modules than the first that holds their tensors.
    """
    layers = set(find_layers(inventory))
    fqns = {storage.name: spec.module_fqn for spec in outside for storage in spec.storages}
    members: dict[str, list[StorageInfo]] = {}
    for storage in inventory.storages:
        owner = storage.tensors[0].locations[0].module
        layer = next((name for name in dotted_prefixes(owner) if name and name in layers), None)
        fqn = fqns.get(storage.name) or layer or reader_of(inventory, owner)
        members.setdefault(fqn, []).append(storage)
    order = {name: index for index, name in enumerate(inventory.modules)}
    return [
        Stage(fqn, tuple((s, experts_in(inventory, s) if fqn in layers else 1) for s in members[fqn]), fqn in layers)
        for fqn in sorted(members, key=order.__getitem__)
    ]


_NO_EXPERTS = re.compile(r"^conv|attn|attention", re.IGNORECASE)  # classes of modules


def experts_in(inventory: Inventory, storage: StorageInfo) -> int:
    """How many experts share ``storage`` of a layer, or in files that hold one each, how many the layer has; else 1.

    A fused parameter has them in its first dimension: [experts, ., .], and packed ones have more (MXFP4: [experts,
    rows, blocks, bytes]) or a last one of 1 (bitsandbytes).

    A convolution over one dimension has a weight of three as well, and so has latent attention in vLLM, by head, and
    the linear layer that vLLM takes for a convolution by channel [channels, 1, width].
    """
    tensor = storage.tensors[0]
    shape, owner = tensor.shape, tensor.locations[0].module
    if tensor.locations[0].attr[:1].isdigit() and len(shape) == 2:
        return inventory.separate_experts.get(owner, 1)
    is_packed = tensor.dtype.itemsize == 1 or "int" in str(tensor.dtype)
    is_matrices = (len(shape) == 3 and 1 not in shape[1:]) or (is_packed and len(shape) in (3, 4) and shape[1] > 1)
    return shape[0] if is_matrices and storage.has_parameter and not _NO_EXPERTS.search(inventory.modules[owner]) else 1


@dataclass(frozen=True)
class StorageCost:
    """The cost of one storage in a step.

    Attributes:
        resident_s: its compute when it is on the device.
        in_place_s: seconds when it is read in place, during which the link is busy.
    """

    resident_s: float
    in_place_s: float


def storage_cost(storage: StorageInfo, experts: int, rows: int, rates: Rates, profile: ModelProfile) -> StorageCost:
    """The cost of ``storage`` in a step of ``rows`` rows; the formulas are at the top of this module."""
    if storage.is_lookup:
        row_bytes = storage.num_bytes // max(1, storage.tensors[0].shape[0])
        touched: float = min(storage.num_bytes, rows * row_bytes)
        resident_s = touched / rates.device_bytes_per_s
        in_place = rates.in_place_s_per_byte
        return StorageCost(resident_s, resident_s if in_place is None else touched * in_place(1))
    share, rows_each = share_in_use(experts, rows, profile)
    touched = storage.num_bytes * share
    resident, in_place = rates.product_s_per_byte, rates.in_place_s_per_byte
    if experts > 1:
        resident, in_place = rates.grouped_s_per_byte, rates.in_place_grouped_s_per_byte
    # Vectors (norms, biases) belong to kernels that are counted one by one.
    shape = storage.tensors[0].shape
    resident_s = touched * resident.of_rows(rows_each) if len(shape) > 1 else 0.0
    if shape[1:] == (1,):  # for more rows than one, every weight is written and read in 16 bits
        many_s = 4 * resident_s + 5 * touched / rates.device_bytes_per_s
        resident_s = max(PACKED_BYTE * resident_s, PACKED_S_PER_BYTE * touched) if rows == 1 else many_s
    is_counted = profile.kernels_per_step is not None
    if len(shape) == 4 and is_counted and rows <= MXFP4_ROWS:
        resident_s = max(resident_s, MXFP4_S_PER_BYTE * touched * rows_each)
    is_copied = is_counted and profile.copied_experts_bytes_per_row > 0
    if experts > 1 and is_copied and not storage.modules.isdisjoint(profile.row_readers):
        # Decoding in `batched_mm` copies the experts of each row first. No more than all of them are counted: many rows
        # may be those of a prompt, which runs without.
        copied = storage.num_bytes * min(1.0, rows * (profile.experts_per_token or experts) / experts)
        resident_s += 2 * copied / rates.device_bytes_per_s
    # Without a rate only rules read in place, and it takes as long as a copy on demand.
    alone_s = resident_s + rates.copy_s(touched) if in_place is None else touched * in_place.of_rows(rows_each)
    return StorageCost(resident_s, max(resident_s, alone_s))


def share_in_use(experts: int, rows: int, profile: ModelProfile) -> tuple[float, float]:
    """The share of a layer's experts that a step reads, and rows per expert that it reads."""
    if experts == 1 or profile.experts_per_token is None or profile.experts_per_token >= experts:
        return 1.0, float(rows)
    share = 1.0 - (1.0 - profile.experts_per_token / experts) ** rows
    return share, max(1.0, rows * profile.experts_per_token / (experts * share))


def cached_cost(
    layer: CachedLayer, rows: int, rates: Rates, profile: ModelProfile, hits: ExpertHits | FixedHits
) -> tuple[float, float]:
    """Seconds that caching the experts of ``layer`` adds to its compute, and that it occupies the link."""
    share, rows_each = share_in_use(layer.num_experts, rows, profile)
    in_use = share * layer.num_experts
    held = _held(layer, layer.num_slots, in_use, profile, hits)
    fetched = in_use - held
    if layer.host_slots is None:  # else overflow rows have room for all others
        fetched = min(fetched, layer.num_slots - held)
    expert_bytes = layer.num_bytes / layer.num_experts
    beyond_bytes = (in_use - held - fetched) * expert_bytes  # no slot is free: read in place
    in_place = rates.in_place_grouped_s_per_byte
    beyond_s = rates.copy_s(beyond_bytes) if in_place is None else beyond_bytes * in_place.of_rows(rows_each)
    resident_s = beyond_bytes * rates.grouped_s_per_byte.of_rows(rows_each)
    fetch_s = fetched * expert_bytes / rates.expert_bytes_per_s
    if layer.host_slots is not None and rates.file_bytes_per_s is not None:  # a GPU's
        leaving = min(fetched, layer.num_slots - held) if layer.host_slots else 0.0  # their slots, for host memory
        fetch_s += leaving * expert_bytes / rates.expert_bytes_per_s
        return fetch_s + read_experts_s(layer, rows, rates, profile, hits) + FILE_LAYER_S, fetch_s
    return fetch_s + max(0.0, beyond_s - resident_s) + CACHED_LAYER_S, fetch_s + beyond_s


def _held(
    layer: CachedLayer, num_slots: int, in_use: float, profile: ModelProfile, hits: ExpertHits | FixedHits
) -> float:
    """Number of the ``in_use`` experts of a step that ``num_slots`` slots hold."""
    top_k = profile.experts_per_token or layer.num_experts
    return min(in_use * hits(num_slots, layer.num_experts, top_k, in_use), num_slots)


def read_experts_s(
    layer: CachedLayer, rows: int, rates: Rates, profile: ModelProfile, hits: ExpertHits | FixedHits
) -> float:
    """Seconds in which the files are read for what the device and host memory lack of ``layer``."""
    if layer.host_slots is None:
        return 0.0
    in_use = share_in_use(layer.num_experts, rows, profile)[0] * layer.num_experts
    # Both hold what was used last, and nothing twice, as slots for all of it would.
    both = hits.both or hits if isinstance(hits, FixedHits) else hits
    held = _held(layer, layer.num_slots + layer.host_slots, in_use, profile, both)
    held = max(held, _held(layer, layer.num_slots, in_use, profile, hits))
    return (in_use - held) * layer.expert_bytes * rates.file_s_per_byte


def stages_compute_s(
    stages: Sequence[Stage], rows: int, rates: Rates, profile: ModelProfile, context: int = 0
) -> list[float]:
    """Seconds of each stage of a step without its tensors (:func:`storage_cost`).

    ``context``: tokens per sequence in the KV cache; attention reads all of it, and the layers share it equally.
    """
    num_layers = sum(stage.is_layer for stage in stages)
    counted = None if profile.kernels_per_step is None or not num_layers else profile.kernels_per_step / num_layers
    attention_s = profile.cache_bytes(rows, context) / rates.device_bytes_per_s / max(1, num_layers)
    found = []
    for stage in stages:
        tensors = [(storage.tensors[0], experts) for storage, experts in stage.storages if not storage.is_lookup]
        # Of an expert that has tensors of its own, one in so many is in use.
        parts = [1.0 if len(tensor.shape) > 2 else 1 / experts for tensor, experts in tensors]
        kernels = KERNELS_PER_TENSOR * sum(parts)
        if any(experts > 1 for _, experts in stage.storages):
            kernels += KERNELS_PER_EXPERT_LAYER
        if counted is not None:
            kernels = EAGER_KERNEL * counted * stage.is_layer
        activation_bytes = 0.0
        for (tensor, experts), part in zip(tensors, parts, strict=True):
            if len(tensor.shape) > 1 and tensor.shape[-1] > 1:  # inputs and outputs of the product with it
                active = min(profile.experts_per_token or experts, experts) if experts > 1 else 1
                activation_bytes += rows * active * part * sum(tensor.shape[-2:]) * tensor.dtype.itemsize
        kernels_s = kernels * rates.kernel_s if rates.layer_s is None else rates.layer_s * stage.is_layer
        passes_s = ACTIVATION_PASSES * activation_bytes / rates.device_bytes_per_s
        found.append(kernels_s + passes_s + attention_s * stage.is_layer)
    if counted is not None:
        found[-1] += BETWEEN_TOKENS_S
    return found


# -- a step, simulated -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitStores:
    """The kinds of store of units, by candidate.

    Attributes:
        main: the kind of a unit that is in none of the others.
        others: by module, whether its unit is of the kind; a later one counts before an earlier one.
    """

    main: StoreKind
    others: Sequence[tuple[StoreKind, Mapping[str, Bools]]] = ()

    def kind_of(self, fqn: str, candidate: int) -> StoreKind:
        """The kind of the unit at module ``fqn``."""
        return next((kind for kind, has in reversed(self.others) if fqn in has and has[fqn][candidate]), self.main)

    def seconds(self, rates: Rates, fqn: str, num_bytes: Floats) -> tuple[Floats, Floats, Floats]:
        """Seconds that units at module ``fqn`` take to be copied, read before and decoded after; 0 for no bytes."""
        sizes = np.maximum(num_bytes, 1.0)
        found = [np.asarray(seconds) for seconds in _seconds(self.main, rates, sizes)]
        for kind, has in self.others:
            if fqn in has:
                pairs = zip(_seconds(kind, rates, sizes), found, strict=True)
                found = [np.where(has[fqn], there, seconds) for there, seconds in pairs]
        copy_s, read_s, decode_s = (np.where(num_bytes > 0, seconds, 0.0) for seconds in found)
        return copy_s, read_s, decode_s


def _seconds(kind: StoreKind, rates: Rates, sizes: Floats) -> tuple[Floats | float, ...]:
    return kind.copy_s(rates, sizes), kind.read_s(rates, sizes), kind.decode_s(rates, sizes)


class StepModel:
    """A step of ``rows`` rows, by the cost model: of many candidates at once, or of the one that a plan is.

    Attributes:
        costs: costs of every storage by name.
        resident_s: by stage, compute with all weights on the device.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        rates: Rates,
        profile: ModelProfile,
        rows: int,
        context: int = 0,
        hits: ExpertHits | FixedHits | None = None,
    ) -> None:
        self._rates, self._stages = rates, stages
        self._facts: dict[str, Any] = {"rows": rows, "rates": rates, "profile": profile}
        self._hits = hits or ExpertHits()
        self._stage_of = {s.name: index for index, stage in enumerate(stages) for s, _ in stage.storages}
        self.costs = {s.name: storage_cost(s, n, rows, rates, profile) for stage in stages for s, n in stage.storages}
        self.resident_s = stages_compute_s(stages, rows, rates, profile, context)
        for name, cost in self.costs.items():
            self.resident_s[self._stage_of[name]] += cost.resident_s

    def read_experts_s(self, cached: Iterable[CachedLayer], hits: ExpertHits | FixedHits | None = None) -> float:
        """Seconds in which the files are read for experts of ``cached``."""
        return sum(read_experts_s(layer, **self._facts, hits=hits or self._hits) for layer in cached)

    def read_in_place(
        self, names: Iterable[str], cached: Sequence[CachedLayer] = (), hits: ExpertHits | FixedHits | None = None
    ) -> list[tuple[float, float]]:
        """Per stage: seconds that reading these storages in place, and experts through these caches, adds to compute,
        and that it occupies the link."""
        added = [(0.0, 0.0)] * len(self.resident_s)

        def add(name: str, more_s: float, busy_s: float) -> None:
            extra_s, link_s = added[self._stage_of[name]]
            added[self._stage_of[name]] = extra_s + more_s, link_s + busy_s

        for name in names:
            cost = self.costs[name]
            add(name, cost.in_place_s - cost.resident_s, cost.in_place_s)
        costs = dict[tuple[int | None, ...], tuple[float, float]]()
        for layer in cached:
            costs[layer.form] = costs.get(layer.form) or cached_cost(layer, **self._facts, hits=hits or self._hits)
            add(next(iter(layer.storages)), *costs[layer.form])
        return added

    def step_s(
        self,
        sizes: Mapping[str, Floats],
        stores: UnitStores,
        in_place: Iterable[tuple[Floats | float, Floats | float]],
        num_slots: Ints,
        num_units: Ints,
        read_s: Floats | float = 0.0,
    ) -> Floats:
        """Seconds of a step, by candidate.

        Args:
            sizes: bytes of units by the module of their stage.
            stores: stores of the units.
            in_place: as :meth:`read_in_place`, by candidate.
            read_s: in which the same disk reads experts (:meth:`read_experts_s`).
        """
        rates, none, stages = self._rates, np.zeros(len(num_slots)), []
        for stage, resident_s, (extra_s, link_s) in zip(self._stages, self.resident_s, in_place, strict=True):
            fqn = stage.module_fqn
            size = sizes.get(fqn, none)
            copy_s, disk_s, decode_s = stores.seconds(rates, fqn, size) if size.any() else (none, none, none)
            stages.append(StageTimes(resident_s + extra_s + decode_s, link_s, copy_s, disk_s))
        reads_files = any(stage.disk_s.any() for stage in stages)
        ring_s = RING_BYTES * rates.file_s_per_byte if reads_files else 0.0
        found = step_s(stages, num_slots, num_units, rates.copies_take_cores, ring_s)
        if not np.any(read_s):
            return found
        # Of a cache that reads nothing the disk reads units ahead, as without one.
        return np.where(read_s, np.maximum(found, read_s + sum(stage.disk_s for stage in stages)), found)


class StageTimes(NamedTuple):
    """One stage of all candidates, in seconds: one value per candidate, or one for all.

    Attributes:
        compute_s: with its unit in the slot; reading in place included.
        in_place_s: the part of it in which the link is busy.
        copy_s: seconds of its unit; 0 where it has none.
        disk_s: reading its unit from the files; 0 where it is not in files.
    """

    compute_s: Floats | float
    in_place_s: Floats | float
    copy_s: Floats
    disk_s: Floats


def step_s(
    stages: Sequence[StageTimes],
    num_slots: Ints,
    num_units: Ints,
    copies_take_cores: bool = False,
    ring_s: float = 0.0,
) -> Floats:
    """Seconds of a step in the steady state, per candidate.

    Args:
        stages: in order of execution.
        num_slots, num_units: per candidate; no candidate has more slots than units.
        copies_take_cores: copies and compute need the same cores, so a step takes no less than both together.
        ring_s: how long the disk reads until the staging ring is full; 0 where nothing is read.
    """
    state = _State(num_slots, num_units, ring_s)
    if ring_s:
        state.read_ahead(stages)
    for stage in stages:
        state.run(stage)
    step = state.finish()
    return np.maximum(step, state.busy_s) if copies_take_cores else step


class _State:
    """Clocks of all candidates."""

    def __init__(self, num_slots: Ints, num_units: Ints, ring_s: float) -> None:
        count = len(num_slots)
        self._ring_s = ring_s
        self._disk_free = np.zeros(count)  # when the disk could begin to read ahead
        self._every = np.arange(count)
        self._slots = np.maximum(num_slots, 1)
        self._units = num_units
        self._moves = num_units > num_slots
        self._held_back = (num_units - 1) % self._slots
        self._next = np.zeros(count, np.int64)  # index of the next unit
        self._now = np.zeros(count)
        self._link_free = np.zeros(count)
        most = int(self._slots.max(initial=1))
        self._released = np.zeros((count, most))  # by slot: when its last unit had been read
        self._first_copy = np.zeros((count, most))  # by slot: the copy of its first unit
        self._first_disk = np.zeros((count, most))  # and its reading
        self.busy_s = np.zeros(count)  # compute and copies, end to end

    def read_ahead(self, stages: Sequence[StageTimes]) -> None:
        """How long the disk has read for this step when it begins: during the copies after the last read of the step
        before, as long as the ring has room; 0 where a first unit is read after the last stage."""
        count = len(self._every)
        since, wrapping = np.zeros(count), np.zeros(count)  # copies since the last read; those after the last stage
        following = np.zeros(count, np.int64)
        reads_behind = np.zeros(count, dtype=bool)
        for stage in stages:
            has_unit = (stage.copy_s > 0) & self._moves
            reads = has_unit & (stage.disk_s > 0)
            behind = has_unit & (following < self._slots) & (following % self._slots != self._held_back)
            within = has_unit & ~behind
            since = np.where(reads & within, 0.0, since + np.where(within, stage.copy_s, 0.0))
            behind &= following + self._slots < self._units  # a unit that has its slot alone stays in it
            wrapping += np.where(behind, stage.copy_s, 0.0)
            reads_behind |= behind & reads
            following += stage.copy_s > 0
        self._disk_free = np.where(reads_behind, 0.0, -np.minimum(since + wrapping, self._ring_s))

    def _arrival(self, start: Floats, copy_s: Floats, disk_s: Floats, copied: Bools) -> Floats:
        """End of a copy that can start at ``start``; the disk moves on to the next unit then."""
        arrival = start + copy_s
        if not self._ring_s:
            return arrival
        read = np.maximum(self._disk_free + disk_s, start + np.maximum(disk_s - self._ring_s, 0.0))
        reads = disk_s > 0
        arrival = np.where(reads, np.maximum(arrival, read), arrival)
        self._disk_free = np.where(reads & copied, arrival, self._disk_free)
        return arrival

    def run(self, stage: StageTimes) -> None:
        has_unit = stage.copy_s > 0
        begin, any_unit = self._now, has_unit.any()
        if any_unit:
            slot = self._next % self._slots
            is_first = self._next < self._slots
            copied = has_unit & self._moves & (~is_first | (slot == self._held_back))
            start = np.maximum(self._link_free, np.where(is_first, 0.0, self._released[self._every, slot]))
            arrival = np.where(copied, self._arrival(start, stage.copy_s, stage.disk_s, copied), 0.0)
            self._link_free = np.where(copied, arrival, self._link_free)
            self.busy_s += copied * stage.copy_s
            begin = np.maximum(begin, arrival)
        self.busy_s += stage.compute_s
        self._now = begin + stage.compute_s
        is_busy = np.greater(stage.in_place_s, 0)
        if is_busy.any():
            busy_until = np.maximum(self._link_free, begin) + stage.in_place_s
            self._link_free = np.where(is_busy, busy_until, self._link_free)
        if any_unit:
            rows = np.flatnonzero(has_unit)
            self._released[rows, slot[rows]] = self._now[rows]
            rows = np.flatnonzero(has_unit & is_first)
            self._first_copy[rows, slot[rows]] = stage.copy_s[rows]
            self._first_disk[rows, slot[rows]] = stage.disk_s[rows]
            self._next += has_unit

    def finish(self) -> Floats:
        """The first units of the next step are copied after the last units of this one, in the same order.

        Except into the slot of the last unit, which is held back, and where a unit has its slot alone.
        """
        for behind in range(int(self._slots.max(initial=1)), 1, -1):
            unit = self._units - behind
            valid = (behind <= self._slots) & (unit >= self._slots)
            slot = np.where(valid, unit % self._slots, 0)
            copy_s = valid * self._first_copy[self._every, slot]
            start = np.maximum(self._link_free, self._released[self._every, slot])
            arrival = self._arrival(start, copy_s, valid * self._first_disk[self._every, slot], valid)
            self._link_free = np.where(valid, arrival, self._link_free)
            self.busy_s += copy_s
        return np.maximum(self._now, self._link_free)


# -- a plan's step -----------------------------------------------------------------------------------------------------


Bound = Literal["compute", "link", "in place", "experts", "disk"]


@dataclass(frozen=True)
class Forecast:
    """A step of ``rows`` rows under a plan, in seconds.

    Attributes:
        rows: sequences that decode together, or tokens of a prefill.
        step_s: predicted time.
        resident_s: seconds with all weights on the device.
        link_s: all copies, one after another.
        disk_s: all reading of files that comes before the copies.
        in_place_s: all reading in place, and fetching of cached experts.
        floor_s: the lower bound of any schedule: the longest of compute with decoding, the link's work and the disk's.
        bound: the longest of these.
    """

    rows: int
    step_s: float
    resident_s: float
    link_s: float
    disk_s: float
    in_place_s: float
    floor_s: float
    bound: Bound

    @property
    def rows_per_s(self) -> float:
        """Tokens per second of a decode step."""
        return self.rows / self.step_s

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {**asdict(self), "rows_per_s": self.rows_per_s}


class Forecaster:
    """Predicts a step under any plan for one model, from sizes and rates alone.

    ``rates`` are those of the links that copy the units; see :meth:`StoreKind.rates`. ``stored_bytes``: by storage, the
    bytes that are read for it, where that is not its own size.
    """

    def __init__(
        self,
        inventory: Inventory,
        rates: Rates,
        profile: ModelProfile,
        rows: int,
        context: int = 0,
        stored_bytes: Mapping[str, int] = {},
        hits: ExpertHits | FixedHits | None = None,
    ) -> None:
        self._rates, self._rows, self._stored_bytes = rates, rows, stored_bytes
        stages = find_stages(inventory)
        # A unit of tied tensors may be hooked around the module that is the stage of the first of them.
        self._fqns = {s.name: stage.module_fqn for stage in stages for s, _ in stage.storages}
        self._step = StepModel(stages, rates, profile, rows, context, hits)

    def __call__(self, plan: Plan) -> Forecast:
        """The forecast for ``plan``."""
        rates = self._rates
        in_place_s = sum(seconds for _, seconds in self._step.read_in_place(plan.uva, plan.cached))
        moved = plan.moved_units
        moved_bytes, copies_s = np.array([float(self._bytes_of(unit)) for unit in moved]), np.zeros(len(moved))
        for kind in plan.units_by_kind if moved else ():
            copies_s = np.where([unit.kind is kind for unit in moved], kind.copy_s(rates, moved_bytes), copies_s)
        link_s = float(copies_s.sum())
        disk_s = rates.file_s_per_byte * plan.read_bytes + self._step.read_experts_s(plan.cached)
        resident_s = sum(self._step.resident_s)
        compute_s = resident_s + rates.decode_s_per_byte * sum(map(self._bytes_of, plan.coded_units))
        floor_s = max(compute_s, link_s + in_place_s, disk_s)
        link: Bound = "link" if link_s >= in_place_s else "experts" if plan.cached else "in place"
        bound: Bound = "compute" if floor_s == compute_s else "disk" if floor_s == disk_s else link
        (step_s,) = self._steps_s(plan, [(plan.cached, None)])
        return Forecast(self._rows, float(step_s), resident_s, link_s, disk_s, in_place_s, floor_s, bound)

    def rows_per_s(
        self, plan: Plan, caches: Sequence[Sequence[CachedLayer]], hits: Sequence[ExpertHits | FixedHits]
    ) -> Floats:
        """[caches, hits]: rows per second under ``plan`` with each of ``caches`` in place of its own."""
        step_s = self._steps_s(plan, [(cached, each) for cached in caches for each in hits])
        return self._rows / step_s.reshape(len(caches), len(hits))

    def _steps_s(
        self, plan: Plan, caches: Sequence[tuple[Sequence[CachedLayer], ExpertHits | FixedHits | None]]
    ) -> Floats:
        """Seconds of a step with each of ``caches`` and its hits, which are timed as candidates of a table are."""
        every = np.ones(len(caches), dtype=bool)
        sizes = {self._fqns[unit.entries[0].storage]: every * self._bytes_of(unit) for unit in plan.units}
        by_kind = plan.units_by_kind.items()
        others = [(kind, {self._fqns[u.entries[0].storage]: every for u in units}) for kind, units in by_kind]
        in_place = np.array([self._step.read_in_place(plan.uva, *each) for each in caches])
        by_stage = [(extra_s, link_s) for extra_s, link_s in in_place.reshape(len(caches), -1, 2).transpose(1, 2, 0)]
        read_s = np.array([self._step.read_experts_s(*each) for each in caches])
        counts = every * plan.num_slots, every * len(plan.units)
        return self._step.step_s(sizes, UnitStores(plan.kind, others), by_stage, *counts, read_s)

    def _bytes_of(self, unit: Unit) -> float:
        """Bytes that are read for a transfer of ``unit``, before they are coded."""
        return sum(self._stored_bytes.get(entry.storage, entry.num_bytes) for entry in unit.entries)
