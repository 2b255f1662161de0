"""What a plan will cost and what else there is, as one answer: for people a table, for programs JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.plan.alternatives import Alternative
from penstock.plan.predict import Forecast
from penstock.plan.report import gib, titled_table

__all__ = ["PredictionReport", "WorkloadBytes"]


@dataclass(frozen=True)
class WorkloadBytes:
    """Device memory beside the weights for one batch size; zeros when no context was stated."""

    batch: int
    cache_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both together."""
        return self.cache_bytes + self.activation_bytes


@dataclass(frozen=True)
class PredictionReport:
    """Predictions for a plan.

    Attributes:
        machine: whose rates they are made with.
        is_measured: false for nominal rates.
        context: tokens per sequence; 0 if none was stated.
        forecasts: one per batch size.
        memory: beside the weights, one per batch size.
        device_bytes: of weights: residents and slots.
        alternatives: other choices; empty unless the plan was made for a budget.
    """

    machine: str
    is_measured: bool
    context: int
    forecasts: tuple[Forecast, ...]
    memory: tuple[WorkloadBytes, ...]
    device_bytes: int
    alternatives: tuple[Alternative, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings; bytes and seconds."""
        return {
            "machine": self.machine,
            "is_measured": self.is_measured,
            "context": self.context,
            "steps": [forecast.to_json() for forecast in self.forecasts],
            "memory": [{**asdict(use), "device_bytes": self.device_bytes + use.total_bytes} for use in self.memory],
            "alternatives": [alternative.to_json() for alternative in self.alternatives],
        }

    def render(self) -> RenderableType:
        """A table of steps, and the alternatives below."""
        table = titled_table(
            "Predicted steps", "batch", "ms", "tokens/s", "floor ms", "share of floor", "bound by", "device GiB"
        )
        for forecast, use in zip(self.forecasts, self.memory, strict=True):
            table.add_row(
                str(forecast.rows),
                _ms(forecast.step_s),
                f"{forecast.rows_per_s:,.1f}",
                _ms(forecast.floor_s),
                f"{forecast.floor_s / forecast.step_s:.0%}",
                forecast.bound,
                gib(self.device_bytes + use.total_bytes),
            )
        return Group(table, self._notes())

    def _notes(self) -> Text:
        mend = "" if self.is_measured else "; run `penstock probe` on this machine for predictions that hold"
        lines = [f"\nRates of {self.machine}{mend}."]
        if self.context:
            largest = max(self.memory, key=lambda use: use.batch)
            lines.append(
                f"Batch {largest.batch} at {self.context} tokens: {gib(largest.cache_bytes)} GiB of KV cache, "
                f"{gib(largest.activation_bytes)} GiB of activations; device memory above includes both."
            )
        lines += [f"• {alternative.text}" for alternative in self.alternatives]
        return Text("\n".join(lines))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds >= 0.01 else f"{seconds * 1e3:.2f}"
