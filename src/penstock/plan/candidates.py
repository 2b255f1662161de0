"""All the plans the solver chooses from, as arrays, and what each of them costs.

A *role* is a tensor's name inside its layer (``mlp.down_proj.weight``), the same in every layer. A candidate says

* which roles leave the device: the set B in ``k`` layers, evenly spaced, and the next smaller set A (or none) in the
  others; so that sizes between two sets of roles are reached without bunching;
* how they are reached: all by prefetch, all in place, or experts in place everywhere and the rest by prefetch; where
  units may rest in files also experts prefetched in ``k`` layers, which then are those in files, resident in some
  others and in place in the rest;
* what happens to the modules outside the layers: resident, prefetched or in place;
* the number of slots.

None of this depends on the budget. So more memory only ever adds candidates, and the best one gets no slower. What a
limit of host memory does to a candidate is to leave some of its units in files, in the order of
:mod:`penstock.plan.disk_fallback`: the fewer, the higher the limit, and the candidate gets no slower either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from penstock.config import Mechanism
from penstock.model.inventory import StorageInfo
from penstock.plan.cost_model import StorageCost, experts_in, stages_compute_s, storage_cost
from penstock.plan.costed import HIGH, KEPT, LOW, MAX_SLOTS, Choice, Costed, Family, Floats, Ints, Kinds
from penstock.plan.disk_fallback import spill_order
from penstock.plan.plan import slab_bytes
from penstock.plan.problem import PlanningProblem, RoleSets, sort_out

__all__ = ["CandidateTable", "Choice", "Costed", "Floats", "Ints"]


# As a size: any sum with it is below zero.
_NEVER = -1e30


class CandidateTable:
    """The families of a question with their costs.

    Attributes:
        sizes, slabs: bytes of every storage by name, and what it takes of a slab.
    """

    def __init__(self, question: PlanningProblem) -> None:
        self.question = question
        self.parts = sort_out(question)
        self.sizes = {s.name: float(s.num_bytes) for s in question.inventory.storages}
        self.slabs = {s.name: float(slab_bytes([s.num_bytes])) for s in question.inventory.storages}
        self.groups = [Costed(self, family) for family in self._families()]

    @cached_property
    def spillable(self) -> dict[str, float]:
        """``slabs``, such that a unit of which the files lack a part has less than no bytes."""
        spill = self.question.spill
        missing = frozenset(spill.unstreamable) if spill is not None else frozenset()
        return {name: _NEVER if name in missing else slab for name, slab in self.slabs.items()}

    @cached_property
    def spill_order(self) -> list[str]:
        """Anchors of all stages, in the order in which their units go to the files."""
        return [self.parts.stages[index].anchor for index in spill_order(len(self.parts.stages))]

    @cached_property
    def _order(self) -> dict[str, int]:
        return {s.name: index for index, s in enumerate(self.question.inventory.storages)}

    def order(self, storage: StorageInfo) -> int:
        """Its place in the model."""
        return self._order[storage.name]

    @cached_property
    def costs(self) -> list[dict[str, StorageCost]]:
        """Per batch size: the cost of every storage by name."""
        question = self.question
        experts = {s.name: n for stage in self.parts.stages for s, n in stage.storages}
        return [
            {s.name: storage_cost(s, experts[s.name], rows, question.rates, question.traits)
             for s in question.inventory.storages}
            for rows in question.batch_sizes
        ]  # fmt: skip

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """Index of the stage that reads a storage, by its name."""
        return {s.name: number for number, stage in enumerate(self.parts.stages) for s, _ in stage.storages}

    @cached_property
    def resident_s(self) -> Floats:
        """[batch sizes, stages]: compute with all weights resident."""
        own = [
            [sum(costs[s.name].resident_s for s, _ in stage.storages) for stage in self.parts.stages]
            for costs in self.costs
        ]
        found: Floats = self._stage_s + np.array(own)
        return found

    @cached_property
    def _stage_s(self) -> Floats:
        """[batch sizes, stages]: compute beside the tensors' own."""
        question, stages = self.question, self.parts.stages
        return np.array(
            [stages_compute_s(stages, rows, question.rates, question.traits, question.context)
             for rows in question.batch_sizes]
        )  # fmt: skip

    def _families(self) -> Iterator[Family]:
        roles = list(dict.fromkeys(role for mine in self.parts.roles.values() for role in mine))
        experts = [role for role in roles if self._is_expert(role)]
        dense = [role for role in roles if role not in experts]
        outside: list[Mechanism] = ["resident"]
        if self.parts.outside:
            outside += ["prefetch", "uva"] if self.question.zero_copy else ["prefetch"]
        all_sets, dense_sets = RoleSets(self.parts, roles), RoleSets(self.parts, dense)
        uva = tuple(s for mine in self.parts.roles.values() for r, s in mine.items() if r in experts)
        for how in outside:
            yield from self._prefetched(all_sets, how, ())
            if self.question.zero_copy:
                yield self._patterned(all_sets, how, in_place=True)
                if experts and dense:
                    yield from self._prefetched(dense_sets, how, uva)
                if experts and self.question.spill is not None:
                    yield from self._split(all_sets, how, frozenset(experts))

    def _split(self, sets: RoleSets, outside: Mechanism, experts: frozenset[str]) -> Iterator[Family]:
        """Experts prefetched in evenly spaced layers, resident in some of the others, read in place in the rest.

        Of the dense roles all stay or all leave: what matters here is where the experts are.
        """
        index = {chosen: number for number, chosen in enumerate(sets.sets)}
        dense = frozenset[str]().union(*sets.sets) - experts
        lows = [low for low in dict.fromkeys((frozenset[str](), dense)) if {low, low | experts} <= index.keys()]
        layers = [layer for layer, mine in self.parts.roles.items() if experts & mine.keys()]
        if not lows or len(layers) < 2:
            return
        others = {layer: tuple(s for r, s in self.parts.roles[layer].items() if r in experts) for layer in layers}
        patterns = _three_ways([layer in others for layer in self.parts.layers])
        every = np.tile(np.arange(len(patterns)), len(lows))
        high, low = (
            np.repeat([index[chosen | extra] for chosen in lows], len(patterns))
            for extra in (experts, frozenset[str]())
        )
        for num_slots in range(1, MAX_SLOTS + 1):
            slots = np.full(len(every), num_slots, dtype=np.int64)
            yield Family(sets, high, low, every, slots, False, outside, (), others, patterns)

    def _is_expert(self, role: str) -> bool:
        return any(experts_in(mine[role], True) > 1 for mine in self.parts.roles.values() if role in mine)

    def _prefetched(self, sets: RoleSets, outside: Mechanism, uva: tuple[StorageInfo, ...]) -> Iterator[Family]:
        for num_slots in range(1, MAX_SLOTS + 1):
            yield self._patterned(sets, outside, num_slots=num_slots, fixed_uva=uva)

    def _patterned(
        self,
        sets: RoleSets,
        outside: Mechanism,
        in_place: bool = False,
        num_slots: int = 1,
        fixed_uva: tuple[StorageInfo, ...] = (),
    ) -> Family:
        spaced = np.arange(1, len(self.parts.layers) + 1, dtype=np.int64)
        runs = [np.zeros((3, 1), dtype=np.int64)]
        for high in range(1, len(sets.sets)):
            for low in dict.fromkeys((0, high - 1)):
                run = spaced if low == 0 else spaced[:-1]
                runs.append(np.stack([np.full_like(run, high), np.full_like(run, low), run]))
        high, low, spaced = np.concatenate(runs, axis=1)
        slots = np.full(len(spaced), num_slots, dtype=np.int64)
        return Family(sets, high, low, spaced, slots, in_place, outside, fixed_uva)


def _three_ways(has_experts: Sequence[bool]) -> Kinds:
    """[patterns, layers]: every number of evenly spaced layers with experts that are ``HIGH``, and of those between
    them that are ``KEPT``."""
    layers = np.flatnonzero(has_experts)
    patterns = []
    for moved in range(1, len(layers)):
        spaced = np.arange(moved) * len(layers) // moved
        between = np.delete(layers, spaced)
        for kept in range(len(between)):
            pattern = np.full(len(has_experts), LOW, dtype=np.int8)
            pattern[layers[spaced]] = HIGH
            pattern[between[np.arange(kept) * len(between) // max(1, kept)]] = KEPT
            patterns.append(pattern)
    return np.array(patterns)
