"""Offloaders of engines: layers leave the device as they are built, and one session takes over all of them.

:class:`PrefetchOffloader` and :class:`UVAOffloader` see only the layers that they wrapped. :class:`EngineOffloader`
gets the complete model in ``post_init``: its patterns also match modules that the engine does not build as layers
(vision towers, tables), and a device-memory budget is planned over all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headrace.config import UVA, Budget, Mechanism, Mode, Prefetch, Rule
from headrace.errors import BudgetError, OptionError, SelectionError, StateError, warn_user
from headrace.experts.rows import ExpertKernels
from headrace.formatting import format_size, listed
from headrace.model.inventory import is_embedding, take_inventory
from headrace.model.memory_profile import profile_of
from headrace.model.patterns import matching
from headrace.model.records import Inventory, StorageInfo, is_within
from headrace.model.semantic_groups import semantic_groups
from headrace.offloaders.base import BaseOffloader
from headrace.offloaders.build_time import BuildTimeFilter, BuildTimePool, mark_host_resident, mark_read_in_place
from headrace.plan.build import Planner, build_plan
from headrace.plan.nominal_rates import NOMINAL_GPU
from headrace.plan.plan import Plan
from headrace.plan.rates import Rates
from headrace.plan.units import TINY_BYTES, move_on_demand, plan_group_rule, selected, worth_moving
from headrace.planning.context import make_planner
from headrace.planning.request import PlanRequest, compute_device
from headrace.ranks.group import RankGroup
from headrace.runtime.prepare import Prepared, prepare
from headrace.runtime.replays import BreakCapture
from headrace.runtime.session import OffloadSession, SessionOptions
from headrace.stats import Stats

if TYPE_CHECKING:
    from headrace.experts.counts import CountsReader
    from headrace.lifetime.parking import Lifetime
    from headrace.offloaders.new_weights import NewWeights

EnginePolicy = Prefetch | UVA | Budget

_NEVER_PROMOTES = "an engine that has counted its memory has no room for more"


class LayerwiseOffloader(BaseOffloader):
    """Collects the layers as they are built; :meth:`post_init` makes the plan for them and offloads them.

    Layers are named by stack and index (``0.17.mlp.up_proj.weight``), because they have no name in a model yet.
    """

    _ranks: RankGroup | None = None  # for stores that span processes

    def __init__(self, policy: EnginePolicy) -> None:
        self._policy = policy
        self._leaves = BuildTimeFilter(policy)
        self._stacks = nn.ModuleList()
        self._pool = BuildTimePool()
        self._session: OffloadSession | None = None

    def wrap_modules(self, modules_generator: Iterable[nn.Module], prefix: str = "") -> list[nn.Module]:
        if self._session is not None:
            raise StateError("wrap_modules was called after post_init; use a new offloader for another model")
        stack = nn.ModuleList()
        self._stacks.append(stack)
        for index, module in enumerate(modules_generator):
            stack.append(module)
            # Before the next layer is built, which may not fit the device beside this one.
            apart = not self._leaves.is_exact
            self._pool.take(module, partial(self._leaves, index), apart=apart, cached=self._cached_in(module))
        return list(stack)

    def post_init(self) -> None:
        if self._session is not None:
            raise StateError("post_init was called twice; call remove() in between to take over new weights")
        self._pool.compact()
        prepared = self._prepare()
        session = OffloadSession(prepared, self._options(prepared))
        session.attach()
        mark_read_in_place(prepared.bound, prepared.plan.uva)
        self._session = session

    def _prepare(self, allocates: bool = True) -> Prepared:
        model, device, ranks, pool = self._model(), self._device(), self._ranks, self._pool
        inventory = self._take_inventory(model)
        plan = self._make_plan(inventory)
        split = {name for layer in plan.cached for name in layer.storages if layer.is_split(name)}
        pool.map_experts(parameter for name, parameter in model.named_parameters() if name in split)
        request = PlanRequest(model, plan, device=device, inventory=inventory, ranks=ranks)
        prepared = prepare(request, pool=pool, allocates=allocates)
        self._check_plan(prepared.plan, inventory)
        return prepared

    def sync_prev_onload(self) -> None:
        if self._session is not None:
            self._session.wait_all()

    def remove(self) -> None:
        if self._session is not None:
            self._session.remove(graphs_released=True)  # an engine ends its offload with its graphs
            self._session = None
            for parameter in self._model().parameters():
                mark_host_resident(parameter, False)

    @property
    def plan(self) -> Plan:
        """The active plan; after ``post_init``."""
        return self._require_session().plan

    def stats(self) -> Stats:
        """Counters of copies and stalls; after ``post_init``."""
        return self._require_session().stats()

    def _require_session(self) -> OffloadSession:
        if self._session is None:
            raise StateError("nothing is offloaded yet: call post_init() once the weights are loaded")
        return self._session

    def _cached_in(self, layer: nn.Module) -> Iterable[str]:
        """Modules within ``layer`` whose experts will be cached."""
        return ()

    def _layers(self) -> list[list[str]]:
        """Names of the layers within :meth:`_model`, by stack; a layer that is called several times counts once."""
        # By identity: an engine may put a layer anywhere in its model, or into another model.
        names = {id(module): name for name, module in self._model().named_modules()}
        stacks = [[names.get(id(layer), "") for layer in stack.children()] for stack in self._stacks]
        return [found for stack in stacks if (found := [name for name in stack if name])]

    # -- for subclasses to override -----------------------------------------------------------------------------------

    def _make_plan(self, inventory: Inventory) -> Plan:
        """The plan for the collected layers."""
        if isinstance(self._policy, Prefetch):
            return plan_group_rule(inventory, self._policy, self._layers())
        return build_plan(inventory, self._policy)

    def _model(self) -> nn.Module:
        """The model that is offloaded: by default the stacks alone."""
        return self._stacks

    def _device(self) -> torch.device:
        """Device of compute."""
        return compute_device(self._model())

    def _take_inventory(self, model: nn.Module) -> Inventory:
        return take_inventory(model)

    def _check_plan(self, plan: Plan, inventory: Inventory) -> None:
        """Raise ``OptionError`` for a plan that the engine cannot run, though ``headrace.offload`` could."""

    def _options(self, prepared: Prepared) -> SessionOptions:
        # The stacks have no forward of their own: a forward begins with the first layer.
        first = next((layer for stack in self._stacks for layer in stack.children()), None)
        return SessionOptions(entry=first, never_promotes=_NEVER_PROMOTES)


class PrefetchOffloader(LayerwiseOffloader):
    """Offloader of the last ``num_in_group`` of every ``group_size`` layers, which are copied ahead of use."""

    def __init__(
        self,
        group_size: int,
        num_in_group: int,
        prefetch_step: int,
        offload_params: Sequence[str] | None = None,
        mode: Mode = "cpu",
    ) -> None:
        """See :class:`headrace.Prefetch` for the arguments; ``offload_params`` is its ``params``."""
        super().__init__(Prefetch(group_size, num_in_group, prefetch_step, tuple(offload_params or ()), mode))


class UVAOffloader(LayerwiseOffloader):
    """Reads tensors in place: up to ``cpu_offload_max_bytes``, in the order in which the layers are built."""

    def __init__(self, cpu_offload_max_bytes: int, cpu_offload_params: Sequence[str] | None = None) -> None:
        """See :class:`headrace.UVA` for the arguments."""
        super().__init__(UVA(cpu_offload_max_bytes, tuple(cpu_offload_params or ())))


def lookup_rule(table: type[nn.Module], head: type[nn.Module]) -> Callable[[nn.Module], bool]:
    """Rule for :class:`EngineTraits`, by the engine's classes: whether a forward looks rows up in a module."""
    # A head derives from the table, but its forward reads the complete weight in a matrix product.
    return lambda module: isinstance(module, nn.Embedding | table) and not isinstance(module, head)


@dataclass(frozen=True)
class EngineTraits:
    """How an engine builds and runs its model.

    Attributes:
        is_lookup: see :func:`headrace.model.inventory.take_inventory`.
        plain_name: the name of a tensor without the modules that the engine wraps around others (LoRA).
        announces_replays: it calls ``sync_prev_onload`` before every capture and every replay of a complete forward,
            and puts neither end of a unit into a graph of a part of one.
        break_capture: for forwards that are captured in segments, see ``[Note: breakable captures]`` in replays.py.
        calls_forward: it calls the ``forward`` of the module that holds the layers past its hooks.
        copies_limited: the selection of a :class:`~headrace.UVA` policy is copied ahead of its use, one unit per layer
            through two slots, and not read in place.
        expert_kernels: the kernels that read cached experts by rows; without them a rule ``=cache`` is refused.
    """

    is_lookup: Callable[[nn.Module], bool] = is_embedding
    plain_name: Callable[[str], str] | None = None
    announces_replays: bool = False
    break_capture: BreakCapture | None = None
    calls_forward: bool = False
    copies_limited: bool = False
    expert_kernels: ExpertKernels | None = None


class EngineOffloader(LayerwiseOffloader):
    """Executes ``policy`` on the model that ``find_model`` returns once it is built.

    The group rule counts the layers of the largest stack that was wrapped. Tensors outside all layers that a pattern
    names are read in place: a tower runs by itself, out of step with the schedule of the layers. A budget that cannot
    be met otherwise reads everything outside in place. Layers of another model than ``find_model``'s, such as a draft
    model, are copied back to the device: it runs several times per step of the other.
    """

    supports_tower_offload = True

    def __init__(
        self,
        policy: EnginePolicy,
        find_model: Callable[[], nn.Module],
        traits: EngineTraits = EngineTraits(),
        *,
        ranks: RankGroup | None = None,
        rates: Rates | None = None,
        measure_stalls: bool = False,
    ) -> None:
        """``find_model`` is called in :meth:`post_init`; ``traits``: of the engine; ``ranks``: for mode ``shm_cpu``.

        ``rates``: for planning a budget, where others copy at the same time
        (:func:`headrace.transfer.measuring.rates_among`). ``measure_stalls``: time every wait, for :meth:`stats`.
        """
        super().__init__(policy)
        self._asks_for_cache = isinstance(policy, Budget) and any(how == "cache" for _, how in policy.rules)
        if self._asks_for_cache and traits.expert_kernels is None:
            raise OptionError(
                "rules: experts cannot be cached inside this engine, whose kernels read them by their numbers: use "
                "experts=uva in place of experts=cache"
            )
        self._find_model = find_model
        self._traits = traits
        self._pool.hold_packed = getattr(traits.expert_kernels, "hold_packed", None)
        self._ranks = ranks
        self._rates = rates
        self._measure_stalls = measure_stalls
        self._towers: list[nn.Module] = []
        self._others_replay = False
        self._all_ran = False
        self._life: Lifetime | None = None
        self.added_device_bytes = 0

    def wrap_modules(self, modules_generator: Iterable[nn.Module], prefix: str = "") -> list[nn.Module]:
        if not prefix:
            return super().wrap_modules(modules_generator)
        towers = list(modules_generator)
        for tower in towers:
            self._pool.take(tower, partial(self._leaves.takes_of_tower, prefix), apart=True)
            self._towers.append(tower)
        return towers

    def post_init(self) -> None:
        """Weights are final: make the plan and offload. Further calls have no effect.

        Attributes set:
            added_device_bytes: by how much the device memory in use has grown; negative if it has shrunk.
        """
        if self._session is not None:
            return
        self._require_layers()
        before = _device_bytes(self._device())
        own = {id(parameter) for parameter in self._model().parameters()}
        for parameter in self._stacks.parameters():
            if id(parameter) not in own and parameter.is_cuda:  # of another model, which stays resident
                parameter.data = parameter.data.clone()
                mark_host_resident(parameter, False)
        super().post_init()
        self.added_device_bytes = _device_bytes(self._device()) - before

    def _require_layers(self) -> None:
        if next(self._stacks.parameters(), None) is None:
            raise StateError(
                "no layers were wrapped: set the offloader before the model is built; inside vLLM, this stage of a "
                "pipeline has none (use fewer stages), or the code of the model does not call make_layers"
            )

    # -- while it runs ------------------------------------------------------------------------------------------------

    def prepare_next(self) -> None:
        """Call it when a forward or replay has been submitted: starts the first copies of the next one."""
        if self._session is not None:
            self._session.reset()

    @contextmanager
    def replays_of_others(self) -> Iterator[None]:
        """Within, the engine announces replays of another model, for example a draft model."""
        self._others_replay = True
        try:
            yield
        finally:
            self._others_replay = False

    def sync_prev_onload(self) -> None:
        if not self._others_replay:
            super().sync_prev_onload()

    def as_placeholders(self) -> AbstractContextManager[None]:
        """Within, an operator that uses an offloaded weight outside its module's forward raises; run no compiled code.

        Raises:
            OutsideAccessError: from the operator that was given the weight.
        """
        return nullcontext() if self._session is None else self._session.as_placeholders()

    @property
    def has_run(self) -> bool:
        """Whether the engine has run its model, or any module that is offloaded."""
        session = self._require_session()
        stats = session.stats()
        return session.has_run or any(unit.runs for unit in stats.units) or any(layer.steps for layer in stats.experts)

    def require_all_ran(self) -> None:
        """Check the first run of the model, before its results count; later calls return at once.

        Raises:
            StateError: a unit whose module did not run: code that reads its weights would not wait for them.
        """
        if self._all_ran:
            return
        stats = self.stats()
        idle = [unit.module_fqn for unit in stats.units if unit.runs == 0]
        idle += [layer.module_fqn for layer in stats.experts if layer.steps == 0]
        if idle:
            raise StateError(
                f"{len(idle)} of {len(stats.units) + len(stats.experts)} offloaded modules did not run when the engine "
                f"ran its model "
                f"({', '.join(idle[:3])}{', ...' if len(idle) > 3 else ''}), so nothing would wait for their weights: "
                f"do not offload them, by names that do not match them (--offload-params; with "
                f"device_memory: headrace.params, or headrace.rules such as '{idle[0]}=resident')"
            )
        self._all_ran = True

    # -- between forwards ---------------------------------------------------------------------------------------------

    @property
    def life(self) -> Lifetime:
        """Sleep and new weights; after ``post_init``."""
        from headrace.lifetime.parking import Lifetime

        self._life = self._life or Lifetime(self._require_session(), in_engine=True)
        return self._life

    def require_usable(self) -> None:
        """Check before the engine runs its model, by a replay too.

        Raises:
            StateError: the weights are asleep, or some are new and others are not.
        """
        if self._life is not None and (self._life.parked or self._life.broken):
            raise StateError(
                self._life.broken
                or "the weights are asleep: end the sleep of the engine first (wake_up()), then call the model"
            )

    def new_weights(self, call: str) -> NewWeights:
        """Copies that the engine's ``call`` writes to; errors as :class:`NewWeights`."""
        from headrace.offloaders.new_weights import NewWeights

        model, hold = self._model(), self._pool.hold_packed
        if packed := [name for name, module in model.named_modules() if hold is not None and hold(module)]:
            raise OptionError(
                f"{call} is refused: the engine's kernel keeps the weights of {packed[0]} in objects of its own; "
                f"nothing was changed. Start the engine with the new weights"
            )
        return NewWeights(self.life, model, call)

    def remove(self) -> None:
        if self._life is not None and self._life.parked:
            self.require_usable()
        super().remove()
        self._life = None

    def counts_reader(self) -> CountsReader | None:
        """Counts of all cached experts, read without waiting for the device; ``None``: nothing is cached."""
        return None if self._session is None else self._session.counts_reader()

    def summary(self) -> list[str]:
        """Lines for an engine's log: what is offloaded, and how; after ``post_init``."""
        plan = self.plan
        slot_size = format_size(max(plan.slot_bytes, default=0))
        lines = [
            f"{format_size(plan.resident_bytes)} resident, {format_size(plan.prefetched_bytes)} prefetched in "
            f"{len(plan.units)} units through {plan.num_slots} slots of {slot_size}, {format_size(plan.uva_bytes)} "
            f"read in place; stored in {plan.mode}"
        ]
        if plan.cached:
            slots = sorted({f"{layer.num_slots} of {layer.num_experts}" for layer in plan.cached})
            lines.append(
                f"of {len(plan.cached)} layers, {' or '.join(slots)} experts on the GPU at a time, "
                f"{format_size(plan.cache_bytes)}"
            )
        return lines

    def metrics(self) -> dict[str, Any]:
        """The plan and the counters in plain numbers, for an engine to show; after ``post_init``."""
        plan, stats = self.plan, self.stats()
        return {
            "num_units": len(plan.units),
            "units": [unit.module_fqn for unit in plan.units],
            "num_slots": plan.num_slots,
            "device_bytes": plan.device_bytes,
            "prefetched_bytes": plan.prefetched_bytes,
            "moved_bytes_per_forward": plan.moved_bytes,
            "uva_bytes": plan.uva_bytes,
            "uva_names": sorted(plan.uva)[:1000],
            "store_bytes": stats.store_bytes,
            "bytes_moved": stats.bytes_moved,
            "copies": stats.copies,
            "captured_copies": sum(unit.captured_copies for unit in stats.units),
            "misses": stats.misses,
            "experts": [asdict(layer) for layer in stats.experts],
            "last_stalls_s": [unit.last_stall_s for unit in stats.units],
            "added_device_bytes": self.added_device_bytes,
        }

    # -- the plan -----------------------------------------------------------------------------------------------------

    def _cached_in(self, layer: nn.Module) -> Iterable[str]:
        """Experts that a rule asks for; ``OptionError`` if they cannot be cached, before weights are loaded."""
        experts = self._expert_modules(layer) if self._asks_for_cache else {}
        for name, why in experts.items():
            if why is not None:
                raise _not_cached(name, why)
        return experts

    def _expert_modules(self, model: nn.Module) -> Mapping[str, str | None]:
        """See ``ExpertKernels.find``; none without a budget, which alone caches experts."""
        kernels = self._traits.expert_kernels
        return kernels.find(model) if kernels is not None and isinstance(self._policy, Budget) else {}

    def _model(self) -> nn.Module:
        return self._find_model()

    def _device(self) -> torch.device:
        # vLLM keeps tables of n-grams in pinned host memory, and a layer may begin with one.
        devices = list(dict.fromkeys(parameter.device for parameter in self._stacks.parameters()))
        return next((device for device in devices if device.type != "cpu"), devices[0])

    def _take_inventory(self, model: nn.Module) -> Inventory:
        """The storages on the device that are not tiny."""
        # An engine keeps others elsewhere on purpose. Norms and biases are not worth a copy, even if a pattern names
        # them; and model code that reads ``weight.data`` cannot be compiled if an op writes that weight.
        device = self._device()
        if (hold := self._pool.hold_packed) is not None:
            list(map(hold, model.modules()))
        tensors = chain(model.named_parameters(), model.named_buffers())
        elsewhere = {name for name, tensor in tensors if tensor.device != device}
        # Engines match the names of named_parameters(). vLLM's runner of experts also contains the router and the
        # shared experts of its layer, which a pattern "experts" does not mean.
        inventory = take_inventory(model, self._traits.is_lookup, aliases=False)
        # After a colon comes the name of an inner tensor of a subclass.
        here = [s for s in inventory.storages if elsewhere.isdisjoint(n.partition(":")[0] for n in s.names)]
        # Scales of experts move with them.
        experts = {name for name, why in self._expert_modules(model).items() if why is None}
        # Only a scale that has a row for each expert has several dimensions.
        scales = {s.name for s in here if len(s.tensors[0].shape) > 1 and not experts.isdisjoint(s.modules)}
        large = tuple(s for s in here if _is_large(s) or s.name in scales)
        if (plain_name := self._traits.plain_name) is not None:
            large = tuple(_with_plain_names(s, plain_name) for s in large)
        return replace(inventory, storages=large)

    def _make_plan(self, inventory: Inventory) -> Plan:
        policy, stacks = self._policy, self._layers()
        # The solver would only warn; an engine's options that offload nothing are refused (contract 2).
        if isinstance(policy, Budget) and policy.num_bytes >= inventory.num_bytes:
            raise OptionError(
                f"device_memory = {policy.num_bytes} bytes offloads nothing: all weights together have "
                f"{inventory.num_bytes} bytes; leave device_memory out, or lower it"
            )
        if not stacks:
            raise StateError(
                "the model has none of the layers that were wrapped: set the offloader before the model is built"
            )
        layers = self._largest_stack(inventory)
        if isinstance(policy, Prefetch):
            everywhere = list(chain.from_iterable(stacks))
            outside = (lambda s: _is_outside(s, everywhere)) if policy.params else (lambda s: False)
            return plan_group_rule(inventory, policy, [layers], outside, by_part=True)
        if isinstance(policy, UVA):
            return self._plan_limited(inventory, policy, layers)
        return self._plan_budget(inventory, policy, layers)

    def _plan_limited(self, inventory: Inventory, policy: UVA, layers: Sequence[str]) -> Plan:
        names = None
        if not policy.params:  # towers count, too, as in vLLM
            modules = {id(module): name for name, module in self._model().named_modules()}
            towers = [modules[id(tower)] for tower in self._towers if id(tower) in modules]
            names = _worth_moving(inventory, [*towers, *layers])
        plan = Planner(inventory, NOMINAL_GPU).plan(policy, names)
        if not self._traits.copies_limited:
            return plan
        copied = move_on_demand(inventory, plan, num_slots=2)
        if left := sorted(plan.uva.keys() - copied.offloaded_names):
            message = (
                f"{listed(left, 'tensor')}: no unit can have tensors that several modules share, or of a module around "
                f"units"
            )
            if not copied.units:
                raise SelectionError(f"{message}; select other names, or offload nothing")
            warn_user(f"{message}. They stay resident")
        return copied

    def _plan_budget(self, inventory: Inventory, policy: Budget, layers: Sequence[str]) -> Plan:
        outside = {s.name for s in inventory.storages if not s.is_lookup and _is_outside(s, layers)}
        heads = outside & semantic_groups(inventory)["lm_head"]
        if policy.params:
            names = {s.name for s in selected(inventory, policy.params)}
        else:  # layers, and lookup tables; an engine may read other modules without calling them
            names = _worth_moving(inventory, layers) | {s.name for s in inventory.storages if s.is_lookup}
        _refuse_copies(inventory, policy.rules, outside)
        # An engine multiplies with a head without calling it, so a head stays resident. Everything else that is named
        # is read in place, as by the group rule.
        forced: dict[str, Mechanism] = dict.fromkeys(outside & names, "uva")
        forced |= dict.fromkeys(heads, "resident")
        profile = replace(profile_of(self._model(), policy.workload.context), kernels_per_step=None)  # engines fuse

        def solve(policy: Budget, row_readers: tuple[str, ...]) -> Plan:
            facts = inventory, replace(profile, row_readers=row_readers), self._device()
            planner = make_planner(*facts, rates=self._rates, in_group=self._ranks is not None)
            try:
                return planner.plan(policy, names, forced)
            except BudgetError:
                apart = outside - heads
                if policy.params or not apart:
                    raise
                return planner.plan(policy, names | apart, {**forced, **dict.fromkeys(apart, "uva")})

        readers = tuple(name for name, why in self._expert_modules(self._model()).items() if why is None)
        plan = solve(policy, readers)
        if plan.cached or not readers:
            return plan
        # Without a cache, small scales of experts are worth no copy, even if a rule names them.
        rules: tuple[Rule, ...] = tuple((s.name, "resident") for s in inventory.storages if not _is_large(s))
        return solve(replace(policy, rules=(*rules, *policy.rules)), ())

    def _largest_stack(self, inventory: Inventory) -> list[str]:
        """Names of its layers. Towers and draft models have stacks too, whose layers run at other times."""
        return max(self._layers(), key=lambda names: sum(s.num_bytes for name in names for s in inventory.under(name)))

    def _check_plan(self, plan: Plan, inventory: Inventory) -> None:
        model, layers = self._model(), list(chain.from_iterable(self._layers()))
        experts = self._expert_modules(model) if plan.cached else {}
        for name in (layer.module_fqn for layer in plan.cached):
            if (why := experts.get(name, "no kernel of the engine that is known to read rows runs them")) is not None:
                raise _not_cached(name, why)
        for unit in plan.units:
            module = model.get_submodule(unit.module_fqn)
            # Compilers of parts of a model replace __call__ by code that runs no hooks.
            if not _runs_hooks(module):
                raise OptionError(
                    f"{unit.module_fqn} ({type(module).__name__}) replaces Module.__call__, so nothing would wait for "
                    f"its weights: read them in place ('{unit.module_fqn}=uva'), or do not offload them"
                )
            for storage in (inventory.by_name[entry.storage] for entry in unit.entries):
                if not storage.is_lookup and _is_outside(storage, layers):
                    raise OptionError(
                        f"{storage.name} is outside the layers, where an engine may use weights without calling their "
                        f"module, so it has to be read in place, which HEADRACE_DISABLE_UVA=1 and "
                        f"HEADRACE_DISABLE_PIN_MEMORY=1 forbid: unset them, or leave it out of --offload-params"
                    )

    def _options(self, prepared: Prepared) -> SessionOptions:
        model, units = prepared.model, prepared.plan.units
        runs_hooks = _runs_hooks(model)  # a compiled model runs none
        called = None
        if self._traits.calls_forward:
            layers = self._largest_stack(prepared.inventory)
            called = model.get_submodule(layers[0].rpartition(".")[0].rpartition(".")[0])  # model of model.layers.0
        return SessionOptions(
            entry=model.get_submodule(units[0].module_fqn) if units and not runs_hooks else None,
            called=called,
            measure_stalls=self._measure_stalls,
            replays_announced=self._traits.announces_replays and runs_hooks,  # the hooks mark where a forward ends
            break_capture=self._traits.break_capture,
            keeps_addresses=True,
            never_promotes=_NEVER_PROMOTES,
            expert_kernel_factory=self._traits.expert_kernels,
        )


def _not_cached(name: str, why: str) -> OptionError:
    return OptionError(
        f"experts of {name} cannot be cached: {why}; or read them in place (experts=uva in place of experts=cache)"
    )


def _is_large(storage: StorageInfo) -> bool:
    return storage.num_bytes >= TINY_BYTES


def _device_bytes(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def _runs_hooks(module: nn.Module) -> bool:
    """Whether its ``__call__`` is torch's, or a wrapper that calls it, as transformers' layers have one."""
    call = type(module).__call__
    code = getattr(inspect.unwrap(call), "__code__", None)
    return call is nn.Module.__call__ or (code is not None and "super" in code.co_names)


def _is_outside(storage: StorageInfo, layers: Sequence[str]) -> bool:
    return not any(is_within(module, layer) for module in storage.modules for layer in layers)


def _refuse_copies(inventory: Inventory, rules: Sequence[Rule], outside: Collection[str]) -> None:
    """Raise ``OptionError`` for a rule that would prefetch something outside the layers."""
    ruled: set[str] = set()
    for pattern, mechanism in rules:
        matched = matching(inventory, pattern) - ruled  # the first matching rule applies
        if mechanism == "prefetch" and (found := sorted(matched.intersection(outside))):
            raise OptionError(
                f"rule '{pattern}=prefetch' matches {found[0]} outside the layers, where an engine may use weights "
                f"without calling their module: give it uva or resident in a rule before this one"
            )
        ruled |= matched


def _worth_moving(inventory: Inventory, layers: Sequence[str]) -> set[str]:
    """The storages of ``layers`` that are offloaded when no names are given: neither buffers nor tiny ones."""
    return {s.name for layer in layers for s in worth_moving(inventory.under(layer)) if is_within(s.name, layer)}


def _with_plain_names(storage: StorageInfo, plain_name: Callable[[str], str]) -> StorageInfo:
    """``storage``, which patterns also find by the names of its tensors before their modules were wrapped."""
    plain = ({plain_name(name) for name in tensor.names}.difference(tensor.names) for tensor in storage.tensors)
    pairs = zip(storage.tensors, plain, strict=True)
    tensors = (replace(tensor, aliases=(*tensor.aliases, *sorted(names))) for tensor, names in pairs)
    return replace(storage, tensors=tuple(tensors))
