"""The trace of a few forwards as a picture: what was copied, computed and waited for, thread by thread."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Event", "draw", "read_trace", "window"]

_COLOURS = {"copy": "#4c8ed9", "compute": "#3aa655", "stall": "#e8862b"}
_LABELS = {
    "copy": "copy: a piece of a unit, file to slot",
    "compute": "compute: the layer of a unit, with its number; white: no layer runs",
    "stall": "stall: compute waits for a unit",
}
_SHOWN_FORWARDS = 2


@dataclass(frozen=True)
class Event:
    """One span of the trace; times in ms."""

    kind: str
    unit: int
    name: str
    track: str
    start_ms: float
    duration_ms: float

    @property
    def end_ms(self) -> float:
        """When it ended."""
        return self.start_ms + self.duration_ms


def read_trace(path: Path) -> list[Event]:
    """The spans of a Chrome trace written by ``Handle.trace``, by start."""
    raw = json.loads(path.read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in raw if event["ph"] == "M"}
    spans = [_event(event, tracks) for event in raw if event["ph"] == "X"]
    return sorted(spans, key=lambda event: event.start_ms)


def _event(raw: dict[str, Any], tracks: dict[int, str]) -> Event:
    name = raw["name"].partition(" ")[2]
    return Event(raw["cat"], raw["args"]["unit"], name, tracks[raw["tid"]], raw["ts"] / 1e3, raw["dur"] / 1e3)


def window(events: Sequence[Event], forwards: int = _SHOWN_FORWARDS) -> tuple[float, float]:
    """From when to when, in ms, the last ``forwards`` whole ones ran. A forward begins where unit 0 is needed."""
    begins = [e.start_ms for e in events if e.kind == "compute" and e.unit == 0]
    if len(begins) < 2:
        return events[0].start_ms, max(event.end_ms for event in events)
    return begins[max(0, len(begins) - 1 - forwards)], begins[-1]


def draw(events: Sequence[Event], path: Path, title: str) -> None:
    """Write the picture (PNG) of the last forwards; needs matplotlib."""
    from matplotlib.figure import Figure

    begin, end = window(events)
    shown = [event for event in events if event.end_ms > begin and event.start_ms < end]
    tracks = _tracks(shown)
    figure = Figure(figsize=(15, 1.6 + 0.75 * len(tracks)), dpi=110, layout="constrained")
    axes = figure.subplots()
    for row, track in enumerate(tracks):
        for kind in _COLOURS:
            _draw_spans(axes, row, [e for e in shown if (e.track, e.kind) == (track, kind)], kind, begin)
    _draw_forwards(axes, events, begin, end, len(tracks))
    axes.set_xlim(0, end - begin)
    axes.set_ylim(len(tracks) - 0.45, -0.75)
    axes.set_yticks(range(len(tracks)), [_track_label(track) for track in tracks])
    axes.set_xlabel("milliseconds")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _legend(figure)
    figure.savefig(path)


def _tracks(events: Sequence[Event]) -> list[str]:
    """Compute on top, then the readers in order of number."""
    computing = {event.track for event in events if event.kind != "copy"}
    return sorted({event.track for event in events}, key=lambda track: (track not in computing, track))


def _track_label(track: str) -> str:
    reader = re.fullmatch(r"penstock-reader-(\d+)", track)
    return f"reader {reader[1]}" if reader else "compute" if track == "MainThread" else track


def _draw_spans(axes: Any, row: int, events: Sequence[Event], kind: str, begin: float) -> None:
    bars = [(event.start_ms - begin, event.duration_ms) for event in events]
    # Pieces of one unit follow one another closely: white edges would leave nothing of them.
    edge = 0.0 if kind == "copy" else 0.5
    axes.broken_barh(bars, (row - 0.36, 0.72), facecolors=_COLOURS[kind], edgecolors="white", linewidth=edge, zorder=3)
    if kind == "compute":
        for event in events:
            axes.text(
                event.start_ms - begin + event.duration_ms / 2, row, str(event.unit), ha="center", va="center",
                fontsize=7, color="white", zorder=4, clip_on=True,
            )  # fmt: skip


def _draw_forwards(axes: Any, events: Sequence[Event], begin: float, end: float, rows: int) -> None:
    begins = [e.start_ms for e in events if e.kind == "compute" and e.unit == 0 and begin <= e.start_ms < end]
    for number, start in enumerate(begins, 1):
        axes.axvline(start - begin, color="0.35", linewidth=0.9, linestyle=(0, (4, 3)), zorder=2)
        axes.text(start - begin, -0.5, f" forward {number}", fontsize=8.5, color="0.25", va="center")


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=_COLOURS[kind], label=_LABELS[kind]) for kind in _COLOURS]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
