"""Everything a plan is made from, in one object: the model's inventory and traits, the machine's rates."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.config import Budget, Mode, Policy, Workload
from penstock.model.inventory import Inventory
from penstock.model.memory_profile import ModelProfile
from penstock.plan.alternatives import Alternative, alternatives
from penstock.plan.build import build_plan, question_of
from penstock.plan.candidates import CandidateTable
from penstock.plan.cost_model import Rates
from penstock.plan.disk_fallback import Spill
from penstock.plan.outlook import PredictionReport, WorkloadBytes
from penstock.plan.plan import Plan
from penstock.plan.predict import Forecast, forecast
from penstock.plan.solver import Point, curve, host_limit, solve
from penstock.plan.split import split_rates

__all__ = ["Planner"]


@dataclass(frozen=True)
class Planner:
    """Answers what a policy comes to, what it will cost, and what else there is.

    Attributes:
        inventory: of the model, which may be on ``meta``.
        rates: of the machine, one rank alone; what units come at that are split is reckoned from them.
        traits: of the model beyond names and sizes.
        zero_copy: whether a budget may have compute read any tensor in place, and not only lookups.
        default_mode: the store of a policy that names none.
        unstreamable: storages that the checkpoint files do not hold as they are.
        num_ranks: over how many ranks units are split: mode ``sharded_gpu`` over their devices, else for pooled links.
        spill: the files in which a budget that names no store leaves what host memory has no room for; ``None``: there
            are none.
    """

    inventory: Inventory
    rates: Rates
    traits: ModelProfile
    zero_copy: bool = False
    default_mode: Mode = "cpu"
    unstreamable: Collection[str] = ()
    num_ranks: int = 1
    spill: Spill | None = None
    # Candidates do not depend on the size of the budget, and are asked for again with other sizes.
    _spaces: dict[object, CandidateTable] = field(default_factory=dict, compare=False, repr=False)

    def plan(self, policy: Policy) -> Plan:
        """The plan for ``policy``; raises as :func:`penstock.plan.build.build_plan` does."""
        if isinstance(policy, Budget):
            space = self._space(policy)
            made = solve(space.question, policy, policy.mode or self.default_mode, space)
        else:
            made = build_plan(self.inventory, policy, self.default_mode, self.unstreamable, **self._ground)
        return replace(made, num_ranks=self.num_ranks)

    def forecast(self, plan: Plan, rows: int, context: int = 0) -> Forecast:
        """What a step of ``rows`` rows will take under ``plan``, with ``context`` tokens per sequence in the cache."""
        rates = split_rates(self.rates, plan.mode, plan.num_ranks)
        return forecast(plan, self.inventory, rates, self.traits, rows, context)

    def outlook(
        self, policy: Policy | Plan | None, plan: Plan, points: Sequence[Point] | None = None
    ) -> PredictionReport:
        """What ``plan`` will cost for the workload of ``policy``; alternatives too where that is a budget."""
        budget = policy if isinstance(policy, Budget) else None
        workload = budget.workload if budget is not None else Workload()
        return PredictionReport(
            self.rates.machine,
            self.rates.is_measured,
            workload.context,
            tuple(self.forecast(plan, rows, workload.context) for rows in workload.batch_sizes),
            tuple(self._memory(rows, workload.context) for rows in workload.batch_sizes),
            plan.device_bytes,
            tuple(self.alternatives(budget, plan, points)) if budget is not None and plan.offloaded_bytes else (),
        )

    def _memory(self, rows: int, context: int) -> WorkloadBytes:
        if not context:
            return WorkloadBytes(rows, 0, 0)
        cache_bytes = self.traits.cache_bytes(rows, context)
        return WorkloadBytes(rows, cache_bytes, self.traits.workload_bytes(rows, context) - cache_bytes)

    def alternatives(self, budget: Budget, plan: Plan, points: Sequence[Point] | None = None) -> list[Alternative]:
        """What a little more would bring, ``plan`` being the one for ``budget``; ``points``: the curve, if at hand."""
        return alternatives(self._space(budget), budget, plan, points)

    def curve(self, budget: Budget) -> list[Point]:
        """Step times against device memory for weights, for the workload and rules of ``budget``."""
        space = self._space(budget)
        return curve(space, host_limit(space.question, budget))

    def _space(self, budget: Budget) -> CandidateTable:
        key = (budget.params, budget.mode, budget.rules, budget.workload)
        if key not in self._spaces:
            self._spaces[key] = CandidateTable(
                question_of(self.inventory, budget, self.default_mode, self.unstreamable, **self._ground)
            )
        return self._spaces[key]

    @property
    def _ground(self) -> dict[str, Any]:
        return {
            "rates": self.rates,
            "traits": self.traits,
            "zero_copy": self.zero_copy,
            "num_ranks": self.num_ranks,
            "spill": self.spill,
        }
