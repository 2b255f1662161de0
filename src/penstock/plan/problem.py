"""What the solver is asked, and the storages of a model by the part they play in the answer.

A *role* is a tensor's name inside its layer (``mlp.down_proj.weight``), the same in every layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from penstock.config import Mechanism, Mode
from penstock.model.inventory import Inventory, StorageInfo
from penstock.model.memory_profile import ModelProfile
from penstock.plan.cost_model import Rates, Stage, find_stages
from penstock.plan.disk_fallback import Spill
from penstock.plan.layers import find_stacks, outside_units, stranded
from penstock.plan.plan import UnitDraft

__all__ = ["Parts", "PlanningProblem", "RoleSets", "sort_out"]

# 2 ** 6 sets of roles: the five heaviest roles of a layer one by one, and all the others together.
_MAX_ATOMS = 6

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PlanningProblem:
    """What the solver is asked.

    Attributes:
        inventory: of the model.
        movable: storages that may leave the device; the others stay.
        forced: storages whose mechanism a rule has settled; not among ``movable``.
        rates: of the machine, and of the links that units come over (:func:`penstock.plan.split.split_rates`).
        zero_copy: whether compute may read any tensor in place, and not lookups alone.
        lookups_in_place: whether rows of lookup tables may be; mode ``meta`` has no rows to read.
        batch_sizes: rows of the steps that count.
        context: tokens per sequence that attention reads from the cache.
        ranks_on_device: over the devices of how many ranks offloaded units are split; ``None``: they rest elsewhere.
        mode: the store.
        spill: files for the units that host memory has no room for; ``None``: all rest in the one store.
    """

    inventory: Inventory
    movable: Sequence[StorageInfo]
    forced: Mapping[str, Mechanism]
    rates: Rates
    traits: ModelProfile
    zero_copy: bool
    lookups_in_place: bool
    batch_sizes: Sequence[int]
    context: int = 0
    ranks_on_device: int | None = None
    mode: Mode = "cpu"
    spill: Spill | None = None


@dataclass(frozen=True)
class Parts:
    """The storages of a question by the part they play."""

    stages: tuple[Stage, ...]
    layers: tuple[str, ...]
    roles: Mapping[str, Mapping[str, StorageInfo]]  # layer -> role -> storage, movable ones
    outside: tuple[UnitDraft, ...]
    always_prefetched: Mapping[str, tuple[StorageInfo, ...]]  # by anchor
    always_in_place: tuple[StorageInfo, ...]
    stranded: tuple[StorageInfo, ...]  # movable, but no module whose forward runs could wait for them


def sort_out(question: PlanningProblem) -> Parts:
    """Layers and roles, what lies outside, and what has no choice."""
    inventory = question.inventory
    layers = [layer for stack in find_stacks(inventory) for layer in stack.layers]
    forced = {s.name: s for s in inventory.storages if s.name in question.forced}
    must_move = [s for name, s in forced.items() if question.forced[name] == "prefetch"]
    # Rows of a lookup table are read in place: that costs neither memory nor a copy, and stays right when a model reads
    # the table again at its end (tied weights that are not tied tensors).
    lookups = [s for s in question.movable if s.is_lookup and question.lookups_in_place]
    free = [s for s in question.movable if s not in lookups]
    in_place = [s for name, s in forced.items() if question.forced[name] == "uva"]
    inside = {layer: inventory.under(layer) for layer in layers}
    names, must = {s.name for s in free}, {s.name for s in must_move}
    always = {layer: tuple(s for s in inside[layer] if s.name in must) for layer in layers}
    roles = {layer: {s.name.removeprefix(layer + "."): s for s in inside[layer] if s.name in names} for layer in layers}
    # Asked for together, so that no unit ends up inside another.
    beside = outside_units(inventory, [*free, *must_move], [layer for layer in layers if roles[layer] or always[layer]])
    always |= {draft.anchor: tuple(s for s in draft.storages if s.name in must) for draft in beside}
    outside = [UnitDraft(d.anchor, tuple(s for s in d.storages if s.name in names)) for d in beside]
    return Parts(
        tuple(find_stages(inventory, beside)),
        tuple(layers),
        roles,
        tuple(draft for draft in outside if draft.storages),
        {anchor: storages for anchor, storages in always.items() if storages},
        (*lookups, *in_place),
        tuple(stranded(inventory, free, _names_in(inside, beside))),
    )


def _names_in(inside: Mapping[str, Sequence[StorageInfo]], beside: Sequence[UnitDraft]) -> set[str]:
    return {s.name for group in (*inside.values(), *(draft.storages for draft in beside)) for s in group}


class RoleSets:
    """Every set of roles that may leave together, lightest first; the first one is empty."""

    def __init__(self, parts: Parts, allowed: Sequence[str]) -> None:
        totals = dict.fromkeys(allowed, 0)
        for roles in parts.roles.values():
            for role in totals.keys() & roles.keys():
                totals[role] += roles[role].num_bytes
        ordered = sorted(totals, key=lambda role: (-totals[role], role))
        atoms = [frozenset({role}) for role in ordered[:_MAX_ATOMS]]
        if len(ordered) > _MAX_ATOMS:  # the light ones go together: they add choices but hardly any bytes
            atoms[_MAX_ATOMS - 1] = frozenset(ordered[_MAX_ATOMS - 1 :])
        sets = {
            frozenset[str]().union(*chosen) for count in range(len(atoms) + 1) for chosen in combinations(atoms, count)
        }
        weight = {chosen: sum(totals[role] for role in chosen) for chosen in sets}
        self.sets = sorted(sets, key=lambda chosen: (weight[chosen], sorted(chosen)))
        self._parts = parts
        self._roles = ordered
        self._members = np.array([[role in chosen for role in ordered] for chosen in self.sets], dtype=np.float64)

    def table(self, value: Mapping[str, float]) -> Floats:
        """[sets, layers]: the sum of ``value`` over the storages of a set in a layer."""
        layers, roles = self._parts.layers, self._parts.roles
        values = [[value[roles[n][r].name] if r in roles[n] else 0.0 for n in layers] for r in self._roles]
        shape = (len(self._roles), len(layers))
        return self._members.reshape(len(self.sets), shape[0]) @ np.array(values, dtype=np.float64).reshape(shape)
