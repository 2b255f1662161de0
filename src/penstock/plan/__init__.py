"""From candidates to a :class:`Plan`: units, slots, budget, report. Pure Python over names and sizes."""

from penstock.plan.build import build_plan, move_on_demand
from penstock.plan.model import Plan, SlabEntry, Unit

__all__ = ["Plan", "SlabEntry", "Unit", "build_plan", "move_on_demand"]
