"""From candidates to a :class:`Plan`: units, slots, budget, report. Pure Python over names and sizes.

Names are imported on first use: the process that reads files for a GPU needs the layout of its ring and no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.plan.build import build_plan, move_on_demand
    from penstock.plan.plan import Plan, SlabEntry, Unit

__all__ = ["Plan", "SlabEntry", "Unit", "build_plan", "move_on_demand"]

_HOME_OF = {
    **dict.fromkeys(("build_plan", "move_on_demand"), "penstock.plan.build"),
    **dict.fromkeys(("Plan", "SlabEntry", "Unit"), "penstock.plan.plan"),
}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'penstock.plan' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value
