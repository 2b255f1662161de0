"""The offloader of an engine that builds its model layer by layer and knows the whole of it in the end.

Names are those of the whole model, so patterns reach what the engine does not build as layers (vision towers, tables),
and a device-memory budget is planned over all of it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import torch
from torch import nn

from penstock.config import UVA, Budget, Mechanism, Prefetch, Rule
from penstock.errors import OptionError, StateError
from penstock.model.inventory import Inventory, StorageInfo, is_embedding, is_within, take_inventory
from penstock.model.patterns import is_segments, matching
from penstock.model.semantic_groups import semantic_groups
from penstock.offloaders.layerwise import StackedOffloader
from penstock.plan.build import build_plan, plan_group_rule
from penstock.plan.layers import TINY_BYTES, worth_moving
from penstock.plan.plan import Plan
from penstock.ranks.group import RankGroup
from penstock.runtime.prepare import make_planner
from penstock.runtime.under_construction import BuildTimeFilter

__all__ = ["EngineOffloader", "EnginePolicy"]

EnginePolicy = Prefetch | UVA | Budget

# LoRA wraps a linear module in one that has it as a child of this name.
_WRAPPED = ".base_layer."


class EngineOffloader(StackedOffloader):
    """Executes ``policy`` on the model that ``find_model`` returns once it is built.

    The group rule counts the layers of the largest stack that was wrapped. What a pattern names outside all layers is
    read in place: a tower runs by itself, and the schedule of the layers would be out of step with it. Layers that
    belong to another model than ``find_model``'s, a draft model's, come back to the device: it runs several times per
    step of the other.
    """

    def __init__(
        self,
        policy: EnginePolicy,
        find_model: Callable[[], nn.Module],
        *,
        is_lookup: Callable[[nn.Module], bool] = is_embedding,
        ranks: RankGroup | None = None,
        measure_stalls: bool = False,
        announces_replays: bool = False,
    ) -> None:
        """``policy``: what to do; ``find_model``: asked in :meth:`post_init`.

        ``is_lookup``: see :func:`penstock.model.inventory.take_inventory`. ``ranks``: for mode ``shm_cpu``.
        ``measure_stalls``: time every wait, for :meth:`stats`. ``announces_replays``: the engine calls
        :meth:`sync_prev_onload` before every capture and every replay of a whole forward, and puts neither end of a
        unit into a graph of a part of one.
        """
        super().__init__(BuildTimeFilter(policy), ranks=ranks, measure_stalls=measure_stalls)
        self._policy = policy
        self._find_model = find_model
        self._is_lookup = is_lookup
        self._replays_are_announced = announces_replays
        self._others_replay = False
        self.added_device_bytes = 0

    def post_init(self) -> None:
        """Weights are final: make the plan and carry it out. Further calls have no effect.

        Attributes set:
            added_device_bytes: device memory that was in use before and is not any more counts as negative.
        """
        if self._session is not None:
            return
        self._require_layers()
        device = self._device(self._model())
        before = _device_bytes(device)
        self._bring_back_strangers()
        super().post_init()
        self.added_device_bytes = _device_bytes(device) - before

    def _require_layers(self) -> None:
        if next(self._stacks.parameters(), None) is None:
            raise StateError(
                "no layers were wrapped: set the offloader before the model is built; inside vLLM, this stage of a "
                "pipeline has none (use fewer stages), or the model is not made of layers that are handed over"
            )

    def _model(self) -> nn.Module:
        return self._find_model()

    def _device(self, model: nn.Module) -> torch.device:
        return next(parameter.device for parameter in self._stacks.parameters())

    def _take_inventory(self, model: nn.Module) -> Inventory:
        """What lies on the device and is not tiny.

        What an engine keeps elsewhere it keeps there on purpose. Norms and biases are not worth a copy, even where a
        pattern names them; and model code that reads ``weight.data`` cannot be compiled if an op writes that weight.
        """
        device = self._device(model)
        tensors = chain(model.named_parameters(), model.named_buffers())
        elsewhere = {name for name, tensor in tensors if tensor.device != device}
        inventory = take_inventory(model, self._is_lookup)
        # The name of an inner tensor of a subclass goes on behind a colon.
        here = [s for s in inventory.storages if elsewhere.isdisjoint(n.partition(":")[0] for n in s.names)]
        return replace(inventory, storages=tuple(s for s in here if s.num_bytes >= TINY_BYTES))

    def _main_stack(self, inventory: Inventory) -> list[str]:
        stacks = self._layers()
        if not stacks:
            raise StateError(
                "the model has none of the layers that were wrapped: set the offloader before the model is built"
            )
        return max(stacks, key=lambda layers: sum(s.num_bytes for layer in layers for s in inventory.under(layer)))

    def _bring_back_strangers(self) -> None:
        """Parameters of wrapped layers that are no part of the model return to the device."""
        own = {id(parameter) for parameter in self._model().parameters()}
        for parameter in self._stacks.parameters():
            if id(parameter) not in own and parameter.is_cuda:
                parameter.data = parameter.data.clone()

    def prepare_next(self) -> None:
        """A forward has been given to the device, as a replay perhaps: copy ahead for the next one."""
        if self._session is not None:
            self._session.rewind()

    @property
    def has_run(self) -> bool:
        """Whether any module that is offloaded ran."""
        return any(unit.runs for unit in self.stats().units)

    def require_all_ran(self) -> None:
        """To be asked when the engine has run its model once, before anything that it makes counts.

        Raises:
            StateError: a unit whose module did not run: what reads its weights would not wait for them.
        """
        units = self.stats().units
        idle = [unit.anchor for unit in units if unit.runs == 0]
        if idle:
            raise StateError(
                f"{len(idle)} of {len(units)} offloaded modules did not run when the engine ran its model "
                f"({', '.join(idle[:3])}{', ...' if len(idle) > 3 else ''}), so nothing would wait for their weights: "
                f"leave them out of what is offloaded, with names that do not match them (--offload-params; with "
                f"device_memory: penstock.params, or penstock.rules such as '{idle[0]}=resident')"
            )

    @contextmanager
    def replays_of_others(self) -> Iterator[None]:
        """Within, what the engine announces is none of the model's replays but, say, a draft model's."""
        self._others_replay = True
        try:
            yield
        finally:
            self._others_replay = False

    def sync_prev_onload(self) -> None:
        if not self._others_replay:
            super().sync_prev_onload()

    def join_after_forward(self) -> None:
        if not self._others_replay:
            super().join_after_forward()

    def _entry(self, model: nn.Module, plan: Plan) -> nn.Module | None:
        """A model that is compiled as a whole runs no hooks of its own; then its first unit begins a forward."""
        if _runs_hooks(model) or not plan.units:
            return None
        return model.get_submodule(plan.units[0].anchor)

    def _announces_replays(self, model: nn.Module) -> bool:
        return self._replays_are_announced and _runs_hooks(model)  # which say where a forward ends

    @property
    def _keeps_addresses(self) -> bool:
        return True

    def _make_plan(self, inventory: Inventory) -> Plan:
        if isinstance(self._policy, Budget) and self._policy.num_bytes >= inventory.num_bytes:
            raise OptionError(
                f"device_memory = {self._policy.num_bytes} bytes offloads nothing: all weights together have "
                f"{inventory.num_bytes} bytes; leave device_memory out, or lower it"
            )
        return self._plan_for(inventory)

    def _check_plan(self, plan: Plan, inventory: Inventory) -> None:
        model = self._model()
        # Compilers of parts of a model replace __call__, and what they put there runs no hooks.
        for unit in plan.units:
            anchor = model.get_submodule(unit.anchor)
            if not _runs_hooks(anchor):
                raise OptionError(
                    f"{unit.anchor} ({type(anchor).__name__}) replaces Module.__call__, so nothing would wait for its "
                    f"weights: read them in place ('{unit.anchor}=uva'), or leave them out of what is offloaded"
                )
        layers = [layer for stack in self._layers() for layer in stack]
        for name in (entry.storage for unit in plan.units for entry in unit.entries):
            storage = inventory.by_name[name]
            if not storage.is_lookup and _outside(storage, layers):
                raise OptionError(
                    f"{name} lies outside the layers that are handed over, where an engine may use weights without "
                    f"calling their module, so it has to be read in place, which PENSTOCK_DISABLE_UVA=1 and "
                    f"PENSTOCK_DISABLE_PIN_MEMORY=1 forbid: unset them, or leave it out of --offload-params"
                )

    def _plan_for(self, inventory: Inventory) -> Plan:
        layers = self._main_stack(inventory)
        params = tuple(_through_wrappers(inventory, pattern) for pattern in self._policy.params)
        if isinstance(self._policy, Prefetch):
            everywhere = [layer for stack in self._layers() for layer in stack]
            policy = replace(self._policy, params=params)
            outside = (lambda s: _outside(s, everywhere)) if params else (lambda s: False)
            return plan_group_rule(inventory, policy, [layers], outside, by_part=True)
        if isinstance(self._policy, UVA):
            return build_plan(inventory, replace(self._policy, params=params or [_pattern_of(inventory, layers)]))
        budget = replace(self._policy, params=params or self._movable(inventory, layers))
        return self._planned(inventory, budget, layers)

    def _movable(self, inventory: Inventory, layers: Sequence[str]) -> list[str]:
        """Layers, and tables that are only looked up; an engine may read other modules without calling them."""
        tables = [_exactly([s.name]) for s in inventory.storages if s.is_lookup]
        return [_pattern_of(inventory, layers), *tables]

    def _planned(self, inventory: Inventory, budget: Budget, layers: Sequence[str]) -> Plan:
        planner = make_planner(self._model(), inventory, self._device(self._model()))
        rules = [(_through_wrappers(inventory, pattern), mechanism) for pattern, mechanism in budget.rules]
        outside = {s.name for s in inventory.storages if not s.is_lookup and _outside(s, layers)}
        return planner.plan(replace(budget, rules=(*rules, *_rules_for(outside, inventory, budget.params, rules))))


def _device_bytes(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def _runs_hooks(module: nn.Module) -> bool:
    """Whether its ``__call__`` is torch's, or a wrapper that goes on to it, as transformers' layers have one."""
    call = type(module).__call__
    code = getattr(inspect.unwrap(call), "__code__", None)
    return call is nn.Module.__call__ or (code is not None and "super" in code.co_names)


def _outside(storage: StorageInfo, layers: Sequence[str]) -> bool:
    return not any(is_within(module, layer) for module in storage.modules for layer in layers)


def _rules_for(
    outside: Collection[str], inventory: Inventory, params: Sequence[str], rules: Sequence[Rule]
) -> list[Rule]:
    """For storages outside the layers, no tables, that have no rule of the user's (``rules``).

    An engine multiplies with a head without calling it, so that stays. The rest is read in place where ``params`` names
    it, as by the group rule.

    Raises:
        OptionError: a rule would have something of it copied into a slot.
    """
    ruled: set[str] = set()
    for pattern, mechanism in rules:
        matched = matching(inventory, pattern) - ruled
        if mechanism == "prefetch" and (found := sorted(matched.intersection(outside))):
            raise OptionError(
                f"rule '{pattern}=prefetch' reaches {found[0]}, outside the layers that are handed over, where an "
                f"engine may use weights without calling their module: say uva or resident for it, in a rule before "
                f"this one"
            )
        ruled |= matched
    free = set(outside) - ruled
    heads = free & semantic_groups(inventory)["lm_head"]
    named = free.intersection(chain.from_iterable(matching(inventory, pattern) for pattern in params)) - heads
    kinds: tuple[tuple[set[str], Mechanism], ...] = ((heads, "resident"), (named, "uva"))
    return [(_exactly(sorted(names)), mechanism) for names, mechanism in kinds if names]


def _pattern_of(inventory: Inventory, layers: Sequence[str]) -> str:
    """What is offloaded of ``layers`` when no names are given: neither buffers nor what is tiny."""
    worth = {storage.name for layer in layers for storage in worth_moving(inventory.under(layer))}
    within = {name.removeprefix(f"{layer}.") for layer in layers for name in worth if is_within(name, layer)}
    return f"re:(?:{'|'.join(map(re.escape, layers))})\\.(?:{'|'.join(map(re.escape, sorted(within)))})"


def _through_wrappers(inventory: Inventory, pattern: str) -> str:
    """``pattern``, or if wrapped modules have names that it means, the pattern for those too."""
    wrapped = [name for name in inventory.by_name if _WRAPPED in name]
    plain = {name.replace(_WRAPPED, "."): name for name in wrapped}
    if not plain or not is_segments(pattern):
        return pattern
    segments = f".{pattern}."
    found = [name for name in inventory.by_name if segments in f".{name}."]
    hidden = [real for name, real in plain.items() if segments in f".{name}." and segments not in f".{real}."]
    return _exactly([*found, *hidden]) if hidden else pattern


def _exactly(names: Iterable[str]) -> str:
    """The pattern that means these names and no other."""
    return f"re:{'|'.join(map(re.escape, names))}"
