"""What a user should know about how an offload runs here: ``stats().notes``."""

from __future__ import annotations

from torch import nn

from penstock.model.patterns import compile_pattern
from penstock.plan.plan import Plan

__all__ = ["notes_on"]


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
