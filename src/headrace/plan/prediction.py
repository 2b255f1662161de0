"""Predictions for a plan: steps, memory beside the weights, alternatives. Printed by :mod:`headrace.plan.tables`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from headrace.plan.alternatives import Alternative
    from headrace.plan.cost_model import Forecast

Engine = Literal["generate", "vllm"]


@dataclass(frozen=True)
class WorkloadBytes:
    """Device memory beside the weights for one batch size; zeros without a context."""

    batch: int
    cache_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both together."""
        return self.cache_bytes + self.activation_bytes


@dataclass(frozen=True)
class CachePoint:
    """A plan with a number of slots for the experts of each layer.

    Attributes:
        num_slots: slots of the first layer.
        device_bytes: for weights.
        hits: expected share of the experts of one row that are on the device.
        rows_per_s: tokens per second of the first batch size.
        at_hits: (share, tokens per second) for other shares.
        cpu_rows_per_s: ``rows_per_s`` with the CPU's share in missed experts; ``None``: its rate is not known.
    """

    num_slots: int
    device_bytes: int
    hits: float
    rows_per_s: float
    at_hits: tuple[tuple[float, float], ...]
    cpu_rows_per_s: float | None = None


@dataclass(frozen=True)
class EngineStep:
    """A step of the first batch size in one engine.

    Attributes:
        engine: ``"generate"`` or ``"vllm"``.
        rows_per_s: tokens per second; ``None``: not predicted, with the reason in ``note``.
        command: runs the plan.
        note: the measurements behind the prediction, or why there is none.
    """

    engine: Engine
    rows_per_s: float | None
    command: str = ""
    note: str = ""


@dataclass(frozen=True)
class PlanPrediction:
    """Predictions for a plan.

    Attributes:
        machine: machine that the rates are of.
        is_measured: false for nominal rates.
        context: tokens per sequence; 0: none was given.
        forecasts: one per batch size.
        memory: beside the weights, one per batch size.
        device_bytes: bytes of weights: residents and slots.
        alternatives: empty unless the plan was made for a budget.
        least_budget_bytes: the smallest budget, if no policy was given.
        caches: the plan with other numbers of slots for experts; empty unless it caches some.
        shortage: why the machine has no room for it: ``"does not fit ..."``; ``None``: it has, or nothing was asked.
        notes: sentences for people.
        is_pipeline: the steps are of a pipeline of diffusers, whose rows are no tokens.
        engines: the first batch size in ``generate`` and in vLLM, within the same budget; empty: not compared.
    """

    machine: str
    is_measured: bool
    context: int
    forecasts: tuple[Forecast, ...]
    memory: tuple[WorkloadBytes, ...]
    device_bytes: int
    alternatives: tuple[Alternative, ...] = ()
    least_budget_bytes: int | None = None
    shortage: str | None = None
    notes: tuple[str, ...] = ()
    caches: tuple[CachePoint, ...] = ()
    is_pipeline: bool = False
    engines: tuple[EngineStep, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings; bytes and seconds."""
        return {
            "machine": self.machine,
            "is_measured": self.is_measured,
            "context": self.context,
            "steps": [forecast.to_json() for forecast in self.forecasts],
            "memory": [{**asdict(use), "device_bytes": self.device_bytes + use.total_bytes} for use in self.memory],
            "alternatives": [asdict(alternative) for alternative in self.alternatives],
            "least_budget_bytes": self.least_budget_bytes,
            "shortage": self.shortage,
            "notes": list(self.notes),
            "caches": [asdict(cache) for cache in self.caches],
            "engines": [asdict(engine) for engine in self.engines],
        }
