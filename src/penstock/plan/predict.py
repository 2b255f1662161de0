"""What a plan will cost: the time of a step, its floor, and what bounds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from penstock.model.inventory import Inventory
from penstock.model.memory_profile import ModelProfile
from penstock.plan.cost_model import Rates, find_stages, stages_compute_s, storage_cost
from penstock.plan.plan import Plan
from penstock.plan.ring_layout import RING_BYTES
from penstock.plan.simulate import StageTimes, step_s

__all__ = ["Bound", "Forecast", "Forecaster", "forecast"]

Bound = Literal["compute", "link", "in place", "disk"]


@dataclass(frozen=True)
class Forecast:
    """A step of ``rows`` rows under a plan, in seconds.

    Attributes:
        rows: sequences that decode together, or tokens of a prefill.
        step_s: predicted time.
        resident_s: the same with all weights on the device.
        link_s: all copies, one after another.
        disk_s: all reading of files that comes before the copies.
        in_place_s: all reading in place.
        floor_s: what no schedule can beat: the longest of compute, the link's work and the disk's.
        bound: what the floor is made of.
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


def forecast(
    plan: Plan, inventory: Inventory, rates: Rates, traits: ModelProfile, rows: int, context: int = 0
) -> Forecast:
    """Play ``plan`` through; a pure function of sizes and rates (:mod:`penstock.plan.cost_model`).

    ``rates`` are those of the links that its units come over; see :func:`penstock.plan.split.split_rates`.
    """
    return Forecaster(inventory, rates, traits, rows, context)(plan)


class Forecaster:
    """:func:`forecast` of many plans for one model and step; what does not depend on the plan is reckoned once."""

    def __init__(self, inventory: Inventory, rates: Rates, traits: ModelProfile, rows: int, context: int = 0) -> None:
        self._rates, self._rows = rates, rows
        self._stages = find_stages(inventory)
        self._anchors = {s.name: stage.anchor for stage in self._stages for s, _ in stage.storages}
        self._beside = stages_compute_s(self._stages, rows, rates, traits, context)
        self._costs = [
            {s.name: storage_cost(s, experts, rows, rates, traits) for s, experts in stage.storages}
            for stage in self._stages
        ]
        self._resident = [
            beside + sum(cost.resident_s for cost in costs.values())
            for beside, costs in zip(self._beside, self._costs, strict=True)
        ]

    def __call__(self, plan: Plan) -> Forecast:
        """Play ``plan`` through."""
        rates = self._rates
        stages = list(self._stage_times(plan))
        slots, units = np.array([plan.num_slots]), np.array([len(plan.units)])
        ring_s = RING_BYTES * rates.file_s_per_byte if plan.staged_units else 0.0
        step = float(step_s(stages, slots, units, rates.copies_take_cores, ring_s)[0])
        in_place_s = sum(float(stage.in_place_s[0]) for stage in stages)
        link_s = sum(rates.copy_s(unit.payload_bytes) for unit in plan.moved_units)
        disk_s = rates.file_s_per_byte * plan.read_bytes
        resident_s = sum(self._resident)
        floor_s = max(resident_s, link_s + in_place_s, disk_s)
        link: Bound = "link" if link_s >= in_place_s else "in place"
        bound: Bound = "compute" if floor_s == resident_s else "disk" if floor_s == disk_s else link
        return Forecast(self._rows, step, resident_s, link_s, disk_s, in_place_s, floor_s, bound)

    def _stage_times(self, plan: Plan) -> Iterator[StageTimes]:
        # A unit of tied tensors may be anchored around the module that is the stage of the first of them.
        units = {self._anchors[unit.entries[0].storage]: unit for unit in plan.units}
        for stage, resident_s, costs in zip(self._stages, self._resident, self._costs, strict=True):
            linked = [cost for name, cost in costs.items() if name in plan.uva]
            in_place_s = sum(cost.in_place_s for cost in linked)
            compute_s = resident_s + sum(cost.in_place_s - cost.resident_s for cost in linked)
            unit = units.get(stage.anchor)
            copied_bytes = unit.payload_bytes if unit is not None else 0
            read_bytes = copied_bytes if unit is not None and unit.store == "disk" else 0
            times = (compute_s, in_place_s, self._rates.copy_s(copied_bytes), self._rates.file_s_per_byte * read_bytes)
            yield StageTimes(*(np.array([seconds], dtype=np.float64) for seconds in times))
