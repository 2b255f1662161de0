"""What a user should know about how an offload runs here: as ``stats().notes``, and as a warning."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from penstock.errors import PenstockWarning
from penstock.plan.model import Plan
from penstock.select import compile_pattern
from penstock.telemetry import UnitStats

__all__ = ["notes_on", "warn_of_idle_units"]


def warn_of_idle_units(units: Sequence[UnitStats]) -> None:
    """After a forward: a unit whose module did not run may have been read behind our back."""
    idle = [stats.anchor for stats in units if stats.runs == 0]
    if idle:
        warnings.warn(
            f"{len(idle)} of {len(units)} offloaded modules did not run in this forward ({', '.join(idle[:3])}"
            f"{', ...' if len(idle) > 3 else ''}). If they are skipped, all is well. If the model calls their "
            f"methods or reads their weights directly, it has read other bytes and the output is wrong: leave them "
            f"out with params=... (--offload-params)",
            PenstockWarning,
            stacklevel=3,
        )


def notes_on(model: nn.Module, plan: Plan) -> tuple[str, ...]:
    """Which implementation reads experts in place, and what that means."""
    config = getattr(model, "config", None)
    implementation = getattr(config, "_experts_implementation", None)
    is_expert = compile_pattern("experts")
    if implementation is None or not any(map(is_expert, plan.uva)):
        return ()
    return (f"experts are read in place by {implementation!r}: {_MEANING.get(implementation, _UNKNOWN)}",)


_UNKNOWN = "whether it reads only the routed experts is not known to penstock"
_MEANING = {
    "grouped_mm": "each routed expert crosses the link once per step, the others not at all",
    "batched_mm": "only routed experts cross the link, once per token that chose them; 'grouped_mm' reads each once",
    "eager": "only routed experts cross the link, but the host waits for the routing and the step cannot be captured; "
    "model.set_experts_implementation('grouped_mm') does without",
}
