"""From a policy and an inventory to a plan, and the predicted cost of the plan.

A byte budget gets the fastest plan within it. Offloading a quarter of *every* layer beats offloading every fourth
layer: slots are a quarter of the size, and all compute has a copy that runs beside it. So
:mod:`headrace.plan.candidates` offers sets of roles, the same in every layer, with evenly spaced layers that keep more;
here each is timed by the cost model and the fastest is taken. Memory that is left over keeps more weights resident.

Of equally fast candidates: slots that divide the units, then fewer bytes moved, then less device memory.

Where units may be stored in files (:class:`headrace.plan.candidates.Spill`), host memory comes first: a candidate
leaves as many units in files as do not fit into it, and is timed with them there.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from headrace.config import (
    UVA,
    Budget,
    Codec,
    Mechanism,
    Mode,
    Policy,
    Prefetch,
    Rules,
    Workload,
)
from headrace.errors import BudgetError, OptionError, RuleError, SelectionError, warn_user
from headrace.formatting import format_size, format_time, listed
from headrace.model.layers import find_layers, find_stacks
from headrace.model.patterns import matching
from headrace.model.records import Inventory, ModelProfile, StorageInfo
from headrace.plan.alternatives import Alternative, Alternatives
from headrace.plan.cached_experts import cache_bytes, cached_layers, with_slots
from headrace.plan.candidates import CandidateTable, Family, MappedFiles, Spill, mean_log
from headrace.plan.codec_choice import faster_codec
from headrace.plan.cost_model import Forecast, Forecaster, experts_in
from headrace.plan.cpu_share import CpuShareForecast, slowdown
from headrace.plan.kinds import HOST, StoreKind, kind_of
from headrace.plan.nominal_rates import NOMINAL_CPU, NOMINAL_GPU
from headrace.plan.plan import Plan, assemble, with_code
from headrace.plan.prediction import CachePoint, PlanPrediction, WorkloadBytes
from headrace.plan.rates import Rates
from headrace.plan.routing_traces import ExpertHits, FixedHits
from headrace.plan.schedule import usable_slots
from headrace.plan.slabs import slab_bytes
from headrace.plan.units import (
    plan_group_rule,
    read_in_place,
    resolve_rules,
    selected,
    unit_specs,
    warn_of_stranded,
)

# To join a piece to the one before it: two system calls, and a page that is read and copied (2 GHz Xeon, cached file).
_JOIN_S = 50e-6
# Of a step that the user's policy leads to, over that of a budget of the same size.
_WORTH_SAYING = 1.1
# Candidates of a family that are timed first; logarithms of times that are equal, but for rounding.
_FIRST, _EQUAL = 64, 2e-8
_DOUBLE_BUFFER = 2  # slots: with one, no copy runs beside the compute of the unit before
# Shares of the experts that the device holds, and hit rates, in the predictions for a cache.
_SHOWN_SHARES, _SHOWN_HITS = (0.25, 0.4, 0.5, 0.75), (0.5, 0.8, 0.9, 1.0)


@dataclass(frozen=True)
class Planner:
    """Makes plans from policies, predicts their cost, and suggests alternatives; loads nothing.

    Attributes:
        inventory: inventory of the model, which may be on ``meta``.
        rates: rates of the machine, one rank alone; those of units that are split are derived from them.
        profile: profile of the model beyond names and sizes.
        zero_copy: whether a budget may read any tensor in place, and not only lookups.
        default_mode: the store of a :class:`~headrace.config.Budget` that names none.
        unstreamable: storages whose bytes are in no checkpoint file unchanged; mode ``disk`` keeps them resident.
        stored_bytes: by storage, its bytes in the files if they differ from its size: mode ``disk`` converts them.
        num_ranks: ranks that a budget's units are split over in a sharded mode, in which nothing is read in place.
        mapped: the files that a CPU reads in place in mode ``disk``; ``None``: there are none, or a GPU computes.
        cacheable: experts that a budget may cache, by name.
        hits: the expected hit rate of a cache of experts.
        has_triton: whether a budget may choose a code, which kernels decode.
        spill: the files for units that host memory has no room for, of a budget without a store; ``None``: none.
    """

    inventory: Inventory
    rates: Rates
    profile: ModelProfile = field(default_factory=ModelProfile)
    zero_copy: bool = False
    default_mode: Mode = "cpu"
    unstreamable: Collection[str] = ()
    stored_bytes: Mapping[str, int] = field(default_factory=dict)
    num_ranks: int = 1
    spill: Spill | None = None
    mapped: MappedFiles | None = None
    cacheable: Collection[str] = ()
    hits: ExpertHits | FixedHits = field(default_factory=ExpertHits)
    has_triton: bool = True
    # Candidates do not depend on the size of the budget, and are asked for again with other sizes.
    _tables: dict[object, CandidateTable] = field(default_factory=dict, init=False, compare=False, repr=False)

    def plan(
        self, policy: Policy, movable: Collection[str] | None = None, forced: Mapping[str, Mechanism] | None = None
    ) -> Plan:
        """The plan for ``policy``.

        Args:
            movable: of a :class:`~headrace.config.UVA` or a budget, names of the storages that may leave the device;
                default those that its patterns select.
            forced: mechanisms of a budget's storages by name; its rules override them.

        Raises:
            SelectionError: a pattern, or the policy as a whole, selects nothing that can be offloaded.
            RuleError: offload rules that contradict one another or cannot be obeyed.
            BudgetError: the budget is below the minimum.
            OptionError: the workload's context is longer than the model allows; slots for experts, and none is cached.
        """
        storages = self.inventory.storages
        if isinstance(policy, Budget) and policy.codec == "auto":
            if not self.has_triton or kind_of(policy.mode or self.default_mode) is not HOST:
                return self.plan(replace(policy, codec="none"), movable, forced)
            make = partial(self.plan, movable=movable, forced=forced)
            return faster_codec(policy, make, self.forecast, self.spill, decodes_slowly=self.rates.copies_take_cores)
        if isinstance(policy, Budget):
            table = self.candidates(policy, movable, forced)
            made = solve(table, policy)
            made = replace(made, context=policy.workload.context, budget_bytes=policy.num_bytes)
            if policy.mode is None and made.spilled_bytes:
                made = self._faster(made, replace(policy, mode="disk"), movable, forced)
            if policy.expert_slots is not None and not made.cached:
                raise OptionError(
                    f"expert_slots = {policy.expert_slots} has no effect: the plan caches no experts; add the rule "
                    f"--offload-rule experts=cache, or leave it out (--expert-slots)"
                )
        elif isinstance(policy, Rules):
            # One unit per layer, and per module outside the layers, of what the rules prefetch.
            forced = resolve_rules(self.inventory, policy.rules, self._fixed(policy.mode), self._refused(policy.mode))
            moving, uva = ([s for s in storages if forced.get(s.name) == how] for how in ("prefetch", "uva"))
            names = {name for name, how in forced.items() if how == "cache"}
            host_slots = kind_of(policy.mode).host_slots
            cached = cached_layers(self.inventory, names, policy.expert_slots or 0, host_slots)
            specs = unit_specs(self.inventory, moving)
            if not specs and not uva and not cached:
                raise RuleError(
                    f"the {len(policy.rules)} rule(s) keep everything resident: without a budget at least one must be "
                    f"prefetch, uva or cache, e.g. --offload-rule experts=uva (or give --device-memory)"
                )
            num_slots = usable_slots(policy.prefetch_step, len(specs))
            made = assemble(self.inventory, specs, num_slots, policy.mode, uva=uva, cached=cached)
            if cached and self.spill is not None and kind_of(policy.mode).in_files:
                made = _with_host_slots(made, self.spill, self.spill.free_bytes)
        elif isinstance(policy, Prefetch):
            stacks = find_stacks(self.inventory)
            made = plan_group_rule(self.inventory, policy, list(stacks.values()), candidates=self._movable(policy))
        else:
            refused = self._refused(policy.mode)
            uva = read_in_place(self.inventory, self._movable(policy, movable), policy.limit_bytes, refused)
            made = assemble(self.inventory, [], 0, policy.mode, uva=uva)
        made = replace(made, num_ranks=self.num_ranks)
        return made if isinstance(policy, UVA) else with_code(made, self.inventory, policy.codec)

    def _faster(
        self, plan: Plan, other: Budget, movable: Collection[str] | None, forced: Mapping[str, Mechanism] | None
    ) -> Plan:
        """``plan``, or that for ``other`` if it caches experts and is predicted to be faster."""
        if (
            self.spill is None
            or not self.spill.may_cache
            or not (self.cacheable or any(how == "cache" for _, how in other.rules))
        ):
            return plan
        with suppress(BudgetError, OptionError):
            found, work = self.plan(other, movable, forced), other.workload
            forecasts = [[self.forecast(p, rows, work.context) for p in (plan, found)] for rows in work.batch_sizes]
            now, then = mean_log(np.array([[each.step_s for each in pair] for pair in forecasts]))
            names = {entry.storage for unit in found.units for entry in unit.entries}
            can_read = names.isdisjoint(self.spill.unstreamable)  # units are not converted on their way to a GPU
            return found if found.cached and can_read and then < now else plan
        return plan

    def _movable(self, policy: Budget | Prefetch | UVA, names: Collection[str] | None = None) -> list[StorageInfo]:
        """The storages that ``policy`` (or ``names``) selects and that its store can hold."""
        if names is None:
            candidates = selected(self.inventory, policy.params)
        else:
            candidates = [s for s in self.inventory.storages if s.name in names]
        fixed = self._fixed(policy.mode or self.default_mode)
        if unsaved := [s.name for s in candidates if s.name in fixed and s.name not in self.unstreamable]:
            warn_user(
                f"{listed(unsaved, 'tensor')}: buffers that are not persistent are in no checkpoint file, so mode "
                f"'disk' cannot stream them: they stay resident"
            )
        movable = [s for s in candidates if s.name not in fixed]
        if candidates and not movable and not isinstance(policy, Budget):
            raise SelectionError(
                f"the files do not hold {listed((s.name for s in candidates), 'tensor')}, all that are selected, in "
                f"this form; use mode 'cpu' (--offload-mode cpu) or select other names"
            )
        return movable

    def _fixed(self, mode: Mode) -> frozenset[str]:
        """Names of storages that mode ``disk`` keeps resident: in no file unchanged, or in no state dict."""
        if not kind_of(mode).in_files:
            return frozenset()
        return frozenset(self.unstreamable).union(s.name for s in self.inventory.storages if not s.is_saved)

    def _refused(self, mode: Mode) -> Mapping[str, str]:
        """Storages that cannot be read in place in ``mode``, with the reason."""
        return self.mapped.refused if self.mapped is not None and kind_of(mode).in_files else {}

    # -- budgets -------------------------------------------------------------------------------------------------------

    def candidates(
        self, budget: Budget, names: Collection[str] | None = None, forced: Mapping[str, Mechanism] | None = None
    ) -> CandidateTable:
        """All candidates for ``budget``, whatever its size; the other arguments as for :meth:`plan`."""
        if names is not None or forced:
            return self._make_table(budget, names, forced)
        # Candidates do not depend on the sizes of device and host memory.
        key = replace(budget, device_memory=1, host_memory=None)
        if key not in self._tables:
            self._tables[key] = self._make_table(budget)
        return self._tables[key]

    def _make_table(
        self, budget: Budget, names: Collection[str] | None = None, unruled: Mapping[str, Mechanism] | None = None
    ) -> CandidateTable:
        workload, mode = budget.workload, budget.mode or self.default_mode
        kind = kind_of(mode)
        self.profile.check_context(workload.context)
        if budget.peer_memory is not None and kind is not HOST:
            both = "; leave one of the two out (--peer-memory, --offload-mode)"
            raise OptionError(
                f"peer_memory: expected mode 'cpu', since it is used before host memory, found {mode!r}"
                f"{both if budget.mode else ', the default on a CPU; leave --peer-memory out'}"
            )
        movable = self._movable(budget, names)
        forced = dict(unruled or {})
        if budget.rules:
            forced |= resolve_rules(self.inventory, budget.rules, self._fixed(mode), self._refused(mode))
        if workload.repeated:
            once: dict[str, Mechanism] = {s.name: "prefetch" for s in self._run_once(movable, workload)}
            forced = once | forced
        stored_as = self._kind_of_units(budget.codec, mode)
        table = CandidateTable(
            self.inventory,
            [s for s in movable if s.name not in forced],
            forced,
            stored_as.rates(self.rates, self.num_ranks),
            self.profile,
            # A GPU reads files in place only from pinned memory, so lookups alone save any.
            zero_copy=self.zero_copy and kind.reads_in_place and not kind.in_files,
            lookups_in_place=kind.reads_in_place,
            mapped=self.mapped if kind.in_files else None,
            stored_bytes=self.stored_bytes if kind.in_files else {},
            batch_sizes=workload.batch_sizes,
            context=workload.context,
            ranks_on_device=self.num_ranks if kind.is_split and not kind.on_host else None,
            mode=mode,
            kind=stored_as,
            spill=self.spill if budget.mode is None and kind is HOST and budget.codec == "none" else None,
            cacheable=self.cacheable if mode == self.default_mode else (),
            expert_slots=budget.expert_slots,
            hits=self.hits,
            peer_bytes=budget.peer_limit_bytes,
        )
        return table if self.spill is None or not kind.in_files else self._above_files(table)

    def _above_files(self, table: CandidateTable) -> CandidateTable:
        """``table`` of mode ``disk`` for a GPU, with experts that may be cached from the files."""
        cacheable = self.cacheable if self._fixed(table.mode).isdisjoint(self.cacheable) else ()
        chooses = bool(cacheable) and table.forced.keys().isdisjoint(cacheable)
        is_cached = chooses or "cache" in table.forced.values()
        return replace(table, cacheable=cacheable, above_files=self.spill) if is_cached else table

    def _run_once(self, movable: Sequence[StorageInfo], workload: Workload) -> list[StorageInfo]:
        """Storages of ``movable`` that units can hold, of modules that a call runs once, and not once per step."""
        steps = {name for pattern in workload.repeated for name in matching(self.inventory, pattern)}
        once = [s for s in movable if s.name not in steps and not s.is_lookup]
        return [s for spec in unit_specs(self.inventory, once) for s in spec.storages]

    # -- predictions ---------------------------------------------------------------------------------------------------

    def forecast(self, plan: Plan, rows: int, context: int = 0) -> Forecast:
        """A step of ``rows`` rows under ``plan``, with ``context`` tokens per sequence in the KV cache."""
        return self._forecaster(plan, rows, context)(plan)

    def forecast_cpu_share(self, plan: Plan, rows: int, context: int = 0) -> CpuShareForecast | str:
        """A step of ``rows`` rows with the CPU's share in missed experts; a text: why there is no forecast."""
        factor = slowdown(plan.cached, self.inventory, self.rates, self.profile, self.hits, rows)
        if isinstance(factor, str):
            return factor
        # As if the link fetched in that time.
        other = replace(self, rates=replace(self.rates, fetch_bytes_per_s=self.rates.expert_bytes_per_s / factor))
        return CpuShareForecast(*(each.forecast(plan, rows, context).rows_per_s for each in (other, self)))

    def _kind_of_units(self, codec: Codec, mode: Mode) -> StoreKind:
        """The kind of store that most units are in: the code ``codec``, or that of ``mode``."""
        return kind_of(mode if codec in ("none", "auto") else codec)

    def _forecaster(self, plan: Plan, rows: int, context: int) -> Forecaster:
        """Forecaster of plans with the stores of ``plan``."""
        rates = self._kind_of_units(plan.codec, plan.mode).rates(self.rates, self.num_ranks)
        stored_bytes = self.stored_bytes if plan.kind.in_files else {}
        return Forecaster(self.inventory, rates, self.profile, rows, context, stored_bytes, self.hits)

    def alternatives(self, budget: Budget, plan: Plan) -> list[Alternative]:
        """Gains by more memory or rows; ``plan`` is the one for ``budget``."""
        table, ample = self.candidates(replace(budget, codec=plan.codec)), None
        of_plan = table
        if budget.mode is None and plan.cached and plan.kind.in_files:  # more memory adds to that plan, see _faster
            of_plan = self.candidates(replace(budget, codec=plan.codec, mode=plan.mode))
        if table.is_short(budget.num_bytes - table.reserved_bytes(budget), table.host_limit(budget)):
            codec: Codec = "none" if budget.codec == "auto" else budget.codec
            ample = self.plan(replace(budget, codec=codec, host_memory=2 * self.inventory.num_bytes))
        return list(Alternatives(of_plan, budget, plan, ample).find())

    def predict(self, policy: Policy | Plan | None, plan: Plan, workload: Workload | None = None) -> PlanPrediction:
        """The cost of ``plan`` for ``workload`` (default that of ``policy``); for a budget also alternatives.

        Without a policy, the smallest budget.
        """
        budget = policy if isinstance(policy, Budget) else None
        workload = workload or (Workload() if budget is None else budget.workload)
        context, profile = workload.context, self.profile
        memory = []
        for rows in workload.batch_sizes:
            cache_bytes = profile.cache_bytes(rows, context) if context else 0
            memory.append(WorkloadBytes(rows, cache_bytes, profile.workload_bytes(rows, context) - cache_bytes))
        return PlanPrediction(
            self.rates.machine,
            self.rates.is_measured,
            context,
            tuple(self.forecast(plan, rows, context) for rows in workload.batch_sizes),
            tuple(memory),
            plan.device_bytes,
            tuple(self.alternatives(budget, plan)) if budget is not None and plan.offloaded_bytes else (),
            self.least_budget_bytes(workload) if policy is None else None,
            notes=(*self._notes(plan, workload), *self._advice(policy, plan, workload)),
            caches=tuple(self._caches(plan, workload.batch_sizes[0], context)) if plan.cached else (),
            is_pipeline=bool(workload.repeated),
        )

    def least_budget_bytes(self, workload: Workload) -> int:
        """The smallest budget that has a plan."""
        try:
            return self.plan(Budget(1, workload=workload)).device_bytes  # 0 or 1
        except BudgetError as error:
            return error.minimum_bytes

    def _advice(self, policy: Policy | Plan | None, plan: Plan, workload: Workload) -> Iterator[str]:
        """A sentence on a budget of the same size whose step is predicted to be faster by more than a tenth."""
        is_own_choice = isinstance(policy, Budget) and not policy.rules and not policy.params
        if policy is None or is_own_choice or not plan.offloaded_bytes or plan.mode != self.default_mode:
            return
        yield from self._advice_on_size(policy, plan, workload)

    def _advice_on_size(self, policy: Policy | Plan, plan: Plan, workload: Workload) -> Iterator[str]:
        beside = self.profile.workload_bytes(max(workload.batch_sizes), workload.context)
        num_bytes = policy.num_bytes if isinstance(policy, Budget) else plan.device_bytes + beside
        if num_bytes >= self.inventory.num_bytes + beside:
            return  # all weights fit there
        try:
            best = self.plan(Budget(num_bytes, workload=workload))
        except (BudgetError, OptionError):  # it is below the least that a budget needs
            return
        rows, context = workload.batch_sizes[0], workload.context
        now_s, other_s = (self.forecast(each, rows, context).step_s for each in (plan, best))
        if now_s > _WORTH_SAYING * other_s:
            yield (
                f"a budget alone would take {format_time(other_s)} per step in place of {format_time(now_s)}: "
                f"--device-memory {-(-num_bytes >> 20)}MiB"
            )

    def _caches(self, plan: Plan, rows: int, context: int) -> Iterator[CachePoint]:
        """``plan``, which caches some, with other numbers of slots for experts, and at given hit rates."""
        hits = (self.hits, *(FixedHits(share, both=self.hits) for share in _SHOWN_HITS))
        shares = (layer.num_slots / layer.num_experts for layer in plan.cached)
        most = max(layer.num_experts for layer in plan.cached)
        counts = [max(1, round(share * most)) for share in sorted({*_SHOWN_SHARES, sum(shares) / len(plan.cached)})]
        caches = [with_slots(plan.cached, count) for count in counts]
        found = self._forecaster(plan, rows, context).rows_per_s(plan, caches, hits)
        for cached, (expected, *at_hits) in zip(caches, found.tolist(), strict=True):
            other, layer, top_k = replace(plan, cached=tuple(cached)), cached[0], self.profile.experts_per_token or 1
            shared = self.forecast_cpu_share(other, rows, context)
            yield CachePoint(
                layer.num_slots,
                other.device_bytes,
                self.hits(layer.num_slots, layer.num_experts, top_k, top_k),
                expected,
                tuple(zip(_SHOWN_HITS, at_hits, strict=True)),
                shared.rows_per_s if isinstance(shared, CpuShareForecast) else None,
            )

    def _notes(self, plan: Plan, workload: Workload) -> Iterator[str]:
        """Sentences on the KV cache, cached experts, and experts read in place in files."""
        room_bytes, pass_s = partial(self._room_bytes, plan, workload), partial(self._pass_s, plan)
        yield from self.profile.notes(workload.context, room_bytes, pass_s)
        if plan.cached:
            yield f"expected hit rate of cached experts from {self.hits.source}; misses are fetched before use"
            if plan.kind.in_files and self.spill is not None:
                layer = plan.cached[-1]  # layers before it may have one more
                yield (
                    f"experts: {layer.num_slots} of {layer.num_experts} on the device, {layer.host_slots} in host "
                    f"memory, the rest in files" + "; steps run without CUDA graphs" * bool(plan.units)
                )
            shared = self.forecast_cpu_share(plan, workload.batch_sizes[0], workload.context)
            if isinstance(shared, CpuShareForecast):
                yield f"{shared}: --cpu-experts {'on' if shared.is_worthwhile else 'gains too little'}"
        if self.mapped is not None and plan.kind.in_files:
            yield from self._notes_on_files(plan, self.mapped)

    def _pass_s(self, plan: Plan, module: str, operations: int) -> float:
        """Seconds that a module of the root takes under ``plan``: of so many rows that its weights, as 16-bit numbers,
        multiply in ``operations``, which may be of attention, too."""
        inventory = replace(self.inventory, storages=tuple(self.inventory.under(module)))
        units = tuple(unit for unit in plan.units if unit.entries[0].storage in inventory.by_name)
        in_place = {name: size for name, size in plan.uva.items() if name in inventory.by_name}
        part = replace(self, inventory=inventory)
        return part.forecast(replace(plan, units=units, uva=in_place), operations // inventory.num_bytes or 1).step_s

    def _room_bytes(self, plan: Plan, workload: Workload) -> int | None:
        """Device memory beside the fewest weights, of the budget or the card; ``None``: neither is known."""
        most = plan.budget_bytes or (plan.made_for.device_bytes if plan.made_for else None)
        beside = self.profile.workload_bytes(max(workload.batch_sizes), workload.context)
        return None if most is None else most - (self.least_budget_bytes(workload) - beside)

    def _notes_on_files(self, plan: Plan, mapped: MappedFiles) -> Iterator[str]:
        if joined := {name: mapped.joined_bytes[name] for name in plan.uva if name in mapped.joined_bytes}:
            num_bytes = sum(joined.values())
            seconds = num_bytes // mmap.PAGESIZE * _JOIN_S
            yield (
                f"{listed(joined, 'tensor')} in pieces in the files: loading maps and joins them, which takes "
                f"{format_size(num_bytes)} of host memory for the pages in which they meet and {seconds:.2f} s"
            )
        layered = (s for layer in find_layers(self.inventory) for s in self.inventory.under(layer))
        experts = [s.name for s in layered if experts_in(self.inventory, s) > 1 and s.name in mapped.refused]
        if stay := [name for name in experts if plan.mechanism_of(name) == "prefetch"]:
            yield (
                f"{listed(stay, 'tensor')} of experts cannot be read in place, so every forward copies all of them: "
                f"{stay[0]} {mapped.refused[stay[0]]}; save_pretrained(FOLDER, save_original_format=False) writes "
                f"files from which they can"
            )


def build_plan(
    inventory: Inventory, policy: Policy, default_mode: Mode = "cpu", rates: Rates | None = None, **facts: Any
) -> Plan:
    """The plan for ``policy`` by a :class:`Planner` of these facts; without ``rates`` by nominal ones."""
    if rates is None:
        rates = NOMINAL_CPU if kind_of(policy.mode or default_mode).in_files else NOMINAL_GPU
    return Planner(inventory, rates, default_mode=default_mode, **facts).plan(policy)


# -- the search within a budget ----------------------------------------------------------------------------------------


def solve(table: CandidateTable, budget: Budget) -> Plan:
    """The plan with the least geometric mean of step times over the batch sizes.

    Raises:
        BudgetError: even with everything offloaded the budget is too small; carries the minimum.
    """
    if budget.host_limit_bytes is not None and not (table.kind.on_host or table.above_files):
        warn_user(
            f"--host-memory has no effect: mode {table.mode!r} stores no weights in host memory; leave it out, or use "
            f"--offload-mode cpu"
        )
    weights_budget = budget.num_bytes - table.reserved_bytes(budget)
    num_bytes = table.inventory.num_bytes
    # A rule is obeyed even if everything would fit.
    if num_bytes <= weights_budget and not budget.rules:
        warn_user(
            f"the weights ({format_size(num_bytes)}) fit the budget ({format_size(budget.num_bytes)}): nothing is "
            f"offloaded; give a smaller --device-memory to offload some of them"
        )
        return assemble(table.inventory, [], 0, table.mode)
    warn_of_stranded(table.inventory, table.stranded)
    best = _best(table, weights_budget, table.host_limit(budget), budget.codec)
    if best is None:
        raise _too_small(table, budget)
    if budget.peer_limit_bytes and not best.peer_bytes:
        warn_user(
            "--peer-memory has no effect: it is too small for any unit, or not faster than host memory by the rates of "
            "this machine; leave it out, or run `headrace probe` if it was not run"
        )
    return best


def _best(table: CandidateTable, device_bytes: int, host_bytes: int | None, codec: Codec) -> Plan | None:
    # The best by number of slots for cached experts: these get the memory that is left, which may change the order.
    best: dict[int, tuple[tuple[float, ...], Family, int]] = {}
    must_code = table.kind.is_coded and table.has_code
    # Those that leave the most memory to experts: of candidates that differ in slots for them alone, the first.
    roomiest: dict[int, tuple[Family, int]] = {}
    bounds = []
    for index, family in enumerate(table.families_within(device_bytes, host_bytes)):
        rows, memory = family.fitting(device_bytes, host_bytes, must_code=must_code), family.memory
        if not len(rows):
            continue
        least = family.least_score(rows)
        bounds.append((float(least.min()), index, family, rows, least))
        if family.cached and family.slots is None and len(two := rows[family.num_slots[rows] == _DOUBLE_BUFFER]):
            roomiest.setdefault(id(family.memories), (family, int(two[memory.device_bytes[two].argmin()])))
    # By the least time of any of their steps: of most families none is left to time then.
    for bound, index, family, rows, least in sorted(bounds, key=lambda each: each[:2]):
        expert_slots = family.cached[0].num_slots if family.cached else 0
        if expert_slots in best and bound > best[expert_slots][0][0]:
            continue
        memory, moved_bytes = family.memory, family.memory.moved_bytes[rows]
        order = np.lexsort((moved_bytes, least))
        # Those that may be the fastest first: most of the others cannot be faster, and are not timed.
        for some in (order[:_FIRST], order[_FIRST:]):
            so_far = best.get(expert_slots)
            if so_far is not None:
                score, uneven, moved = so_far[0][:3]
                may_win = (moved_bytes[some] <= moved) | bool(uneven) | (least[some] < score - _EQUAL)
                some = some[may_win & (least[some] <= score)]
            timed = rows[some]
            if len(timed):
                slots = np.maximum(memory.num_slots[timed], 1)
                # What decides among equally fast candidates; less is better.
                is_uneven = memory.num_units[timed] % slots > 0
                scores = mean_log(family.step_s(timed, host_bytes))
                keys = (scores, is_uneven, moved_bytes[some], memory.device_bytes[timed], slots)
                first = np.lexsort(keys[::-1])[0]  # the last key counts first
                found = ((*(float(key[first]) for key in keys), index), family, int(timed[first]))
                best[expert_slots] = found if so_far is None or found[0] < so_far[0] else so_far
    plans = []
    fastest = [(family, row) for _, family, row in sorted(best.values(), key=lambda found: found[0])]
    for family, row in [*fastest, *roomiest.values()]:
        plan = family.plan(row, host_bytes)
        with suppress(OptionError):  # it has no unit for a code
            plan = with_code(plan, table.inventory, codec)
        left = device_bytes - (int(family.memory.device_bytes[row]) if family.slots is None else plan.device_bytes)
        if left < 0:  # only the least of some caches is known before
            continue
        plans.append(_filled(plan, table, left, host_bytes) if plan.cached else plan)
    if len(plans) < 2:
        return plans[0] if plans else None
    forecasters = [table.forecaster(rows) for rows in table.batch_sizes]
    scores = mean_log(np.array([[forecaster(plan).step_s for plan in plans] for forecaster in forecasters]))
    return plans[int(scores.argmin())]  # the first of equal ones


def _filled(plan: Plan, table: CandidateTable, left: int, host_bytes: int | None) -> Plan:
    """``plan`` with more experts on the device and above files, as far as there is room."""
    plan = _with_more_experts(plan, left) if table.expert_slots is None else plan
    return plan if table.above_files is None else _with_host_slots(plan, table.above_files, host_bytes)


def _with_more_experts(plan: Plan, left: int) -> Plan:
    """``plan`` with as many more slots for experts as ``left`` bytes have room for, spread evenly over the layers."""
    room = left + plan.cache_bytes
    counts = range(plan.cached[0].num_slots, max(layer.num_experts for layer in plan.cached) + 1)
    fitting = bisect_right(counts, room, key=partial(cache_bytes, plan.cached))
    layers = with_slots(plan.cached, counts[max(0, fitting - 1)])
    left = room - cache_bytes(layers)
    # Overflow rows of layers of files are one memory only while they are as many.
    for index, layer in enumerate(layers) if layers[0].host_slots is None else ():
        larger = replace(layer, num_slots=min(layer.num_slots + 1, layer.num_experts))
        more = larger.device_bytes - layer.device_bytes
        if more <= left:
            layers[index], left = larger, left - more
    return replace(plan, cached=tuple(layers))


def _with_host_slots(plan: Plan, above_files: Spill, host_bytes: int | None) -> Plan:
    """``plan`` of a GPU with as many of the experts in files as ``host_bytes`` of host memory have room for."""
    beside_bytes = plan.ring_bytes + sum(slab_bytes([size]) for size in plan.uva.values())
    return replace(plan, cached=above_files.hold_experts(plan.cached, host_bytes, beside_bytes))


def _too_small(table: CandidateTable, budget: Budget) -> BudgetError:
    """The refusal of a budget that no candidate fits, with one that some candidate fits."""
    work, given, families = budget.workload, format_size(budget.num_bytes), table.families
    beside, limit = table.reserved_bytes(budget), table.host_limit(budget)
    must_code = table.kind.is_coded and table.has_code

    def sizes(host_bytes: int | None) -> list[int]:
        """The least device memory of each family."""
        rows_of = [(family, family.fitting(np.inf, host_bytes, must_code=must_code)) for family in families]
        return [int(family.memory.device_bytes[rows].min()) for family, rows in rows_of if len(rows)]

    least, fitting = beside + min(sizes(None)), sizes(limit)
    if not fitting and not budget.rules:  # everything resident needs no host memory
        fitting = [table.inventory.num_bytes]
    enough = max(least, budget.num_bytes)
    rows_of = [(family, family.fitting(enough - beside, must_code=must_code)) for family in families]
    least_host = int(min(float(family.least_host_bytes[rows].min()) for family, rows in rows_of if len(rows)))
    use = beside + min(fitting) if fitting else enough
    device, host = (
        f"--{kind}-memory {-(-size // 2**20)}MiB or more" for kind, size in (("device", use), ("host", least_host))
    )
    if budget.num_bytes >= least:
        limit = limit or 0
        whose = "--host-memory" if budget.host_limit_bytes is not None else "the free host memory of"
        ring = " with the staging ring, beside units in the checkpoint's files" if table.spill is not None else ""
        files = (
            ""
            if ring or table.kind.is_coded or table.above_files
            else ", or leave units in files: checkpoint=FOLDER without a mode (on a CPU mode 'disk')"
        )
        return BudgetError(
            f"a budget of {given} leaves more than {whose} {format_size(limit)} to be offloaded: at least "
            f"{format_size(least_host)}{ring}, {format_size(least_host - limit)} too much; use "
            f"{f'{device}, or ' if fitting else ''}{host}{files}",
            use,
        )
    most = "as much offloaded as the rules allow" if budget.rules else "everything offloaded"
    if not table.movable and not budget.rules:
        most = "everything of 64 KiB or more offloaded"
    most += " and a unit coded" if must_code else ""
    cache, smaller = "", ""
    if beside:
        largest, profile = (max(work.batch_sizes), work.context), table.profile
        cache = f", {format_size(beside)} of it for the cache and activations of {profile.describe(*largest)}"
        smaller = profile.smaller(budget.num_bytes - (least - beside), *largest)
    return BudgetError(
        f"a budget of {given} ({budget.num_bytes} bytes) is too small: this model's weights are "
        f"{format_size(table.inventory.num_bytes)} and with {most} headrace still needs {format_size(least)} ({least} "
        f"bytes){cache}; use {device}{'' if fitting else f' with {host}'}"
        f"{smaller and f'. Within this budget fits {smaller}'}",
        use,
    )
