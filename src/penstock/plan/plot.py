"""A plan as a picture: where each layer's bytes are, and what more or less device memory would do to the step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import OptionError
from penstock.plan.build import Planner
from penstock.plan.cost_model import find_stages
from penstock.plan.plan import Mechanism, Plan
from penstock.plan.report import PredictionReport
from penstock.plan.solver import Point

__all__ = ["draw_plan", "require_picture"]

MIB, GIB = 2**20, 2**30
# (mechanism, whether out of files): colour and label
_COLOURS: dict[tuple[Mechanism, bool], tuple[str, str]] = {
    ("resident", False): ("#3aa655", "resident"),
    ("prefetch", False): ("#4c8ed9", "prefetched"),
    ("prefetch", True): ("#8a63c9", "prefetched from files"),
    ("uva", False): ("#e8a33d", "read in place"),
    ("uva", True): ("#e8a33d", "read in place"),
}


def require_picture(path: str | os.PathLike[str]) -> None:
    """Raise ``OptionError`` unless matplotlib is installed and draws what the suffix of ``path`` says."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise OptionError(
            "--plot draws with matplotlib, which is not installed; pip install 'penstock[plot]'"
        ) from error
    if Path(path).suffix.lower().removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
        raise OptionError(
            f"--plot {str(path)!r}: expected a name that ends in a format of pictures, .png, .svg or .pdf say, found "
            f"{Path(path).suffix or 'no suffix'!r}"
        )


def draw_plan(
    path: str | os.PathLike[str],
    name: str,
    plan: Plan,
    planner: Planner,
    outlook: PredictionReport,
    points: Sequence[Point],
) -> None:
    """Write the picture to ``path``; its suffix says the format.

    Args:
        name: of the model.
        points: the memory curve of the same question (:meth:`Planner.curve`); empty leaves the second panel out.

    Raises:
        OptionError: see :func:`require_picture`.
    """
    require_picture(path)
    from matplotlib.figure import Figure

    panels = 2 if points else 1
    figure = Figure(figsize=(10, 4.2 * panels), layout="constrained")
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    figure.suptitle(f"{name}: {plan.weight_bytes / GIB:.2f} GiB of weights in {plan.device_bytes / GIB:.2f} GiB")
    _draw_layers(axes[0], plan, planner)
    if points:
        _draw_curve(axes[1], plan, outlook, points)
    figure.savefig(path, dpi=120)


def _draw_layers(axes: Any, plan: Plan, planner: Planner) -> None:
    stages = [
        stage for stage in find_stages(planner.inventory) if sum(s.num_bytes for s, _ in stage.storages) > GIB / 1e4
    ]
    largest = max((sum(s.num_bytes for s, _ in stage.storages) for stage in stages), default=0)
    unit, unit_name = (GIB, "GiB") if largest >= GIB / 10 else (MIB, "MiB")
    bottom = [0.0] * len(stages)
    # Where the bytes rest: the key of the colours.
    kinds = {s.name: (plan.mechanism_of(s.name), plan.store_of(s.name) == "disk") for s in planner.inventory.storages}
    for kind, (colour, label) in _COLOURS.items():
        heights = [sum(s.num_bytes for s, _ in stage.storages if kinds[s.name] == kind) / unit for stage in stages]
        if any(heights):
            axes.bar(range(len(stages)), heights, 0.85, bottom, color=colour, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    names = [stage.anchor.rpartition(".")[2] or "(model)" for stage in stages]
    step = max(1, len(names) // 24)
    shown = [index for index in range(len(names)) if index % step == 0 or not names[index].isdigit()]
    # Words get a slant; where there are many layers only some numbers fit.
    axes.set_xticks(shown, [names[index] for index in shown], fontsize=7)
    for label in axes.get_xticklabels():
        if not label.get_text().isdigit():
            label.set(rotation=30, ha="right")
    axes.set_ylim(0, 1.05 * largest / unit or 1)
    axes.set_ylabel(unit_name)
    axes.set_title("Weights by layer", loc="left", fontsize=10)
    axes.margins(x=0.01)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)


def _draw_curve(axes: Any, plan: Plan, outlook: PredictionReport, points: Sequence[Point]) -> None:
    from matplotlib.ticker import LogFormatter

    memory = [point.device_bytes / GIB for point in points]
    for index, forecast in enumerate(outlook.forecasts):
        steps = [point.step_s[index] * 1e3 for point in points]
        (line,) = axes.step(memory, steps, where="post", label=f"batch {forecast.rows}")
        axes.axhline(forecast.resident_s * 1e3, color=line.get_color(), linestyle=":", linewidth=1)
        axes.plot(plan.device_bytes / GIB, forecast.step_s * 1e3, "o", color=line.get_color())
    axes.axvline(plan.device_bytes / GIB, color="#888888", linewidth=0.8, label="this plan")
    axes.set_yscale("log")
    for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        ticks(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    axes.set_xlabel("device memory for weights, GiB")
    axes.set_ylabel("step, ms")
    axes.set_title("Predicted step; dots: this plan, dotted: all weights resident", loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
