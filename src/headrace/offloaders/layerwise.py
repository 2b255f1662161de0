"""Offloaders of engines: layers leave the device as they are built, and one session takes over all of them.

:class:`PrefetchOffloader` and :class:`UVAOffloader` see only the layers that they were handed. :class:`EngineOffloader`
is given the whole model in ``post_init``: its patterns reach what the engine does not build as layers (vision towers,
tables), and a device-memory budget is planned over all of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headrace.config import UVA, Budget, Mechanism, Mode, Prefetch, Rule
from headrace.errors import BudgetError, OptionError, SelectionError, StateError, warn_user
from headrace.experts.rows import CachedExperts, ExpertKernels
from headrace.model.inventory import is_embedding, take_inventory
from headrace.model.memory_profile import profile_of
from headrace.model.patterns import matching
from headrace.model.records import Inventory, StorageInfo, is_within
from headrace.model.semantic_groups import semantic_groups
from headrace.offloaders.base import BaseOffloader
from headrace.plan.build import Planner, build_plan
from headrace.plan.cost_model import NOMINAL_GPU, Rates
from headrace.plan.plan import Plan
from headrace.plan.units import TINY_BYTES, move_on_demand, plan_group_rule, selected, some_names, worth_moving
from headrace.ranks.group import RankGroup
from headrace.runtime.planner_factory import PlanRequest, make_planner
from headrace.runtime.prepare import Prepared, compute_device, prepare
from headrace.runtime.session import OffloadSession, SessionOptions
from headrace.runtime.slot import BreakCapture
from headrace.runtime.under_construction import BuildTimeFilter, BuildTimePool, mark_read_in_place, unmark
from headrace.stats import Stats

if TYPE_CHECKING:
    from headrace.experts.cache import CountsReader

__all__ = ["EngineOffloader", "EnginePolicy", "EngineTraits", "LayerwiseOffloader", "PrefetchOffloader", "UVAOffloader"]

EnginePolicy = Prefetch | UVA | Budget

_NEVER_PROMOTES = "an engine that has counted its memory has no room for more"


class LayerwiseOffloader(BaseOffloader):
    """Collects the layers, and makes and carries out the plan for them in the end.

    Layers are named by stack and index (``0.17.mlp.up_proj.weight``), since an engine hands them over before they have
    a place in a model.
    """

    _ranks: RankGroup | None = None  # for stores that span processes

    def __init__(self, policy: EnginePolicy) -> None:
        """``policy``: what to do."""
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
            # At once: the next layer may not fit the device beside this one.
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
        request = PlanRequest(model, plan, device=device, inventory=inventory, ranks=ranks, pool=pool)
        prepared = prepare(request, allocates=allocates)
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
                unmark(parameter)

    @property
    def plan(self) -> Plan:
        """The plan in force; after ``post_init``."""
        return self._require_session().plan

    def stats(self) -> Stats:
        """What has moved; after ``post_init``."""
        return self._require_session().stats()

    def _require_session(self) -> OffloadSession:
        if self._session is None:
            raise StateError("nothing is offloaded yet: call post_init() once the weights are loaded")
        return self._session

    def _cached_in(self, layer: nn.Module) -> Iterable[str]:
        """Modules within ``layer`` whose experts will be cached."""
        return ()

    def _layers(self) -> list[list[str]]:
        """Names within :meth:`_model` of the layers, by stack; a layer that is called several times counts once."""
        # By identity: an engine may have put a layer anywhere in its model, or into another model.
        names = {id(module): name for name, module in self._model().named_modules()}
        stacks = [[names.get(id(layer), "") for layer in stack.children()] for stack in self._stacks]
        return [found for stack in stacks if (found := [name for name in stack if name])]

    # -- what subclasses decide ---------------------------------------------------------------------------------------

    def _make_plan(self, inventory: Inventory) -> Plan:
        """The plan for the collected layers."""
        if isinstance(self._policy, Prefetch):
            return plan_group_rule(inventory, self._policy, self._layers())
        return build_plan(inventory, self._policy)

    def _model(self) -> nn.Module:
        """What is offloaded: by default the stacks alone."""
        return self._stacks

    def _device(self) -> torch.device:
        """Where compute runs."""
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
    """Of every ``group_size`` layers the last ``num_in_group`` live in the store and are copied ahead of use."""

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
    """Reads tensors where they rest: up to ``cpu_offload_max_bytes``, in the order the layers are built."""

    def __init__(self, cpu_offload_max_bytes: int, cpu_offload_params: Sequence[str] | None = None) -> None:
        """See :class:`headrace.UVA` for the arguments."""
        super().__init__(UVA(cpu_offload_max_bytes, tuple(cpu_offload_params or ())))


@dataclass(frozen=True)
class EngineTraits:
    """How an engine builds and runs its model.

    Attributes:
        is_lookup: see :func:`headrace.model.inventory.take_inventory`.
        plain_name: the name that a pattern knows a tensor by, for modules that the engine wraps in others (LoRA).
        announces_replays: it calls ``sync_prev_onload`` before every capture and every replay of a whole forward, and
            puts neither end of a unit into a graph of a part of one.
        break_capture: for forwards that are captured in segments, see ``[Note: breakable captures]`` in slot.py.
        calls_forward: it calls the ``forward`` of the module that holds the layers past its hooks.
        copies_limited: what a :class:`~headrace.UVA` policy selects is copied ahead of its use, one unit per layer
            through two slots, and not read in place.
        expert_kernels: what reads cached experts by rows; without, a rule that says ``cache`` is refused.
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

    The group rule counts the layers of the largest stack that was wrapped. What a pattern names outside all layers is
    read in place: a tower runs by itself, and the schedule of the layers would be out of step with it. A budget that
    cannot be met otherwise has all of it read in place. Layers that belong to another model than ``find_model``'s, a
    draft model's, come back to the device: it runs several times per step of the other.
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
        """``policy``: what to do; ``find_model``: asked in :meth:`post_init`; ``traits``: of the engine.

        ``ranks``: for mode ``shm_cpu``. ``rates``: to plan a budget with, where others copy at the same time
        (:func:`headrace.transfer.measuring.rates_among`). ``measure_stalls``: time every wait, for :meth:`stats`.
        """
        super().__init__(policy)
        self._asks_for_cache = isinstance(policy, Budget) and any(how == "cache" for _, how in policy.rules)
        if self._asks_for_cache and traits.expert_kernels is None:
            raise OptionError(
                "rules: experts cannot be cached inside this engine, whose kernels read them by their numbers: say "
                "experts=uva in place of experts=cache"
            )
        self._find_model = find_model
        self._traits = traits
        self._ranks = ranks
        self._rates = rates
        self._measure_stalls = measure_stalls
        self._towers: list[nn.Module] = []
        self._others_replay = False
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
        """Weights are final: make the plan and carry it out. Further calls have no effect.

        Attributes set:
            added_device_bytes: by how much the device memory in use has grown; negative if it has shrunk.
        """
        if self._session is not None:
            return
        self._require_layers()
        before = _device_bytes(self._device())
        own = {id(parameter) for parameter in self._model().parameters()}
        for parameter in self._stacks.parameters():
            if id(parameter) not in own and parameter.is_cuda:  # of another model, which stays on the device
                parameter.data = parameter.data.clone()
                unmark(parameter)
        super().post_init()
        self.added_device_bytes = _device_bytes(self._device()) - before

    def _require_layers(self) -> None:
        if next(self._stacks.parameters(), None) is None:
            raise StateError(
                "no layers were wrapped: set the offloader before the model is built; inside vLLM, this stage of a "
                "pipeline has none (use fewer stages), or the model is not made of layers that are handed over"
            )

    # -- while it runs ------------------------------------------------------------------------------------------------

    def prepare_next(self) -> None:
        """A forward has been submitted to the device, perhaps as a replay: copy ahead for the next one."""
        if self._session is not None:
            self._session.reset()

    @contextmanager
    def replays_of_others(self) -> Iterator[None]:
        """Inside this context the engine announces replays of another model, a draft model's for instance."""
        self._others_replay = True
        try:
            yield
        finally:
            self._others_replay = False

    def sync_prev_onload(self) -> None:
        if not self._others_replay:
            super().sync_prev_onload()

    @contextmanager
    def as_placeholders(self) -> Iterator[None]:
        """Within, whatever uses an offloaded weight outside of its module's forward raises; no compiled code may run.

        Raises:
            OutsideAccessError: from the operator that was given the weight.
        """
        with nullcontext() if self._session is None else self._session.as_placeholders():
            yield

    @property
    def has_run(self) -> bool:
        """Whether the engine has run its model, or any module that is offloaded."""
        session = self._require_session()
        stats = session.stats()
        return session.has_run or any(unit.runs for unit in stats.units) or any(layer.steps for layer in stats.experts)

    def require_all_ran(self) -> None:
        """To be asked when the engine has run its model once, before its results count.

        Raises:
            StateError: a unit whose module did not run: what reads its weights would not wait for them.
        """
        stats = self.stats()
        idle = [unit.module_fqn for unit in stats.units if unit.runs == 0]
        idle += [layer.module_fqn for layer in stats.experts if layer.steps == 0]
        if idle:
            raise StateError(
                f"{len(idle)} of {len(stats.units) + len(stats.experts)} offloaded modules did not run when the engine "
                f"ran its model "
                f"({', '.join(idle[:3])}{', ...' if len(idle) > 3 else ''}), so nothing would wait for their weights: "
                f"leave them out of what is offloaded, with names that do not match them (--offload-params; with "
                f"device_memory: headrace.params, or headrace.rules such as '{idle[0]}=resident')"
            )

    def counts_reader(self) -> CountsReader | None:
        """Of all cached experts, for an engine to show while it runs; ``None``: there are none, or nothing moves."""
        return None if self._session is None else self._session.counts_reader()

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
        """Raises ``OptionError`` where they cannot be: before any weights are loaded."""
        experts = self._expert_modules(layer)
        for name, why in experts.items():
            if why is not None:
                raise _not_cached(name, why)
        return experts

    def _expert_modules(self, model: nn.Module) -> Mapping[str, str | None]:
        """See ``ExpertKernels.find``; none unless a rule caches experts.

        Where a budget alone would choose the cache, they would wait in memory that its ranges cannot take over.
        """
        kernels = self._traits.expert_kernels
        return kernels.find(model) if kernels is not None and self._asks_for_cache else {}

    def _model(self) -> nn.Module:
        return self._find_model()

    def _device(self) -> torch.device:
        return next(parameter.device for parameter in self._stacks.parameters())

    def _take_inventory(self, model: nn.Module) -> Inventory:
        """What lies on the device and is not tiny.

        What an engine keeps elsewhere it keeps there on purpose. Norms and biases are not worth a copy, even where a
        pattern names them; and model code that reads ``weight.data`` cannot be compiled if an op writes that weight.
        """
        device = self._device()
        tensors = chain(model.named_parameters(), model.named_buffers())
        elsewhere = {name for name, tensor in tensors if tensor.device != device}
        # Engines match the names that named_parameters() has. vLLM's runner of experts holds the router and the shared
        # experts of its layer, too, which "experts" does not mean.
        inventory = take_inventory(model, self._traits.is_lookup, aliases=False)
        # The name of an inner tensor of a subclass goes on after a colon.
        here = [s for s in inventory.storages if elsewhere.isdisjoint(n.partition(":")[0] for n in s.names)]
        # Scales of experts move with them.
        experts = {name for name, why in self._expert_modules(model).items() if why is None}
        kept = tuple(s for s in here if s.num_bytes >= TINY_BYTES or _is_scale(s, experts))
        if (plain_name := self._traits.plain_name) is not None:
            kept = tuple(_with_plain_names(s, plain_name) for s in kept)
        return replace(inventory, storages=kept)

    def _make_plan(self, inventory: Inventory) -> Plan:
        policy, stacks = self._policy, self._layers()
        # The solver would only warn; options of an engine that offload nothing are refused (contract 2).
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
        if not policy.params:  # as vLLM, which counts towers too since it hands them over
            modules = {id(module): name for name, module in self._model().named_modules()}
            towers = [modules[id(tower)] for tower in self._towers if id(tower) in modules]
            names = _worth_moving(inventory, [*towers, *layers])
        plan = Planner(inventory, NOMINAL_GPU).plan(policy, names)
        if not self._traits.copies_limited:
            return plan
        copied = move_on_demand(inventory, plan, num_slots=2)
        if left := sorted(plan.uva.keys() - copied.offloaded_names):
            message = (
                f"{some_names(left)}: no unit can hold what several modules share, or what runs around other units"
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
        else:  # layers, and tables that are only looked up; other modules may be read without a call
            names = _worth_moving(inventory, layers) | {s.name for s in inventory.storages if s.is_lookup}
        _refuse_copies(inventory, policy.rules, outside)
        # An engine multiplies with a head without calling it, so that stays. What else is named is read in place, as by
        # the group rule.
        forced: dict[str, Mechanism] = dict.fromkeys(outside & names, "uva")
        forced |= dict.fromkeys(heads, "resident")
        readers = tuple(name for name, why in self._expert_modules(self._model()).items() if why is None)
        profile = profile_of(self._model(), policy.workload.context)
        profile = replace(profile, row_readers=readers, kernels_per_step=None)  # an engine fuses kernels
        planner = make_planner(inventory, profile, self._device(), rates=self._rates)
        try:
            return planner.plan(policy, names, forced)
        except BudgetError:
            apart = outside - heads
            if policy.params or not apart:
                raise
            return planner.plan(policy, names | apart, {**forced, **dict.fromkeys(apart, "uva")})

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
            # Compilers of parts of a model replace __call__, and what they put there runs no hooks.
            if not _runs_hooks(module):
                raise OptionError(
                    f"{unit.module_fqn} ({type(module).__name__}) replaces Module.__call__, so nothing would wait for "
                    f"its weights: read them in place ('{unit.module_fqn}=uva'), or leave them out of what is offloaded"
                )
            for storage in (inventory.by_name[entry.storage] for entry in unit.entries):
                if not storage.is_lookup and _is_outside(storage, layers):
                    raise OptionError(
                        f"{storage.name} lies outside the layers that are handed over, where an engine may use weights "
                        f"without calling their module, so it has to be read in place, which HEADRACE_DISABLE_UVA=1 "
                        f"and HEADRACE_DISABLE_PIN_MEMORY=1 forbid: unset them, or leave it out of --offload-params"
                    )

    def _options(self, prepared: Prepared) -> SessionOptions:
        model, units = prepared.model, prepared.plan.units
        runs_hooks = _runs_hooks(model)  # a model that is compiled as a whole runs none of its own
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
            expert_kernel_factory=self._traits.expert_kernels or CachedExperts,
        )


def _not_cached(name: str, why: str) -> OptionError:
    return OptionError(
        f"experts of {name} cannot be cached: {why}; or read them in place (experts=uva in place of experts=cache)"
    )


def _is_scale(storage: StorageInfo, experts: Collection[str]) -> bool:
    """Whether it has a row for each expert of one of the modules ``experts``."""
    return len(storage.tensors[0].shape) > 1 and any(module in experts for module in storage.modules)


def _device_bytes(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def _runs_hooks(module: nn.Module) -> bool:
    """Whether its ``__call__`` is torch's, or a wrapper that goes on to it, as transformers' layers have one."""
    call = type(module).__call__
    code = getattr(inspect.unwrap(call), "__code__", None)
    return call is nn.Module.__call__ or (code is not None and "super" in code.co_names)


def _is_outside(storage: StorageInfo, layers: Sequence[str]) -> bool:
    return not any(is_within(module, layer) for module in storage.modules for layer in layers)


def _refuse_copies(inventory: Inventory, rules: Sequence[Rule], outside: Collection[str]) -> None:
    """Raise ``OptionError`` for a rule that would have something outside the layers copied into a slot."""
    ruled: set[str] = set()
    for pattern, mechanism in rules:
        matched = matching(inventory, pattern) - ruled  # the first rule that matches counts
        if mechanism == "prefetch" and (found := sorted(matched.intersection(outside))):
            raise OptionError(
                f"rule '{pattern}=prefetch' reaches {found[0]}, outside the layers that are handed over, where an "
                f"engine may use weights without calling their module: say uva or resident for it, in a rule before "
                f"this one"
            )
        ruled |= matched


def _worth_moving(inventory: Inventory, layers: Sequence[str]) -> set[str]:
    """What is offloaded of ``layers`` when no names are given: neither buffers nor what is tiny."""
    return {s.name for layer in layers for s in worth_moving(inventory.under(layer)) if is_within(s.name, layer)}


def _with_plain_names(storage: StorageInfo, plain_name: Callable[[str], str]) -> StorageInfo:
    """``storage``, found by the names that its tensors had before their modules were wrapped, too."""
    tensors = []
    for tensor in storage.tensors:
        plain = {plain_name(name) for name in tensor.names}.difference(tensor.names)
        tensors.append(replace(tensor, aliases=(*tensor.aliases, *sorted(plain))))
    return replace(storage, tensors=tuple(tensors))
