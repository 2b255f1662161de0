"""Counters per unit, and a bounded record of spans for the timeline."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from headrace.errors import OptionError, OptionTypeError
from headrace.formatting import format_size, format_time, pluralize

if TYPE_CHECKING:
    import torch

__all__ = ["ReadStats", "Recorder", "Span", "SpeculationCounts", "StagingStats", "Stats", "UnitStats", "timed"]

_MAX_SPANS = 1 << 16  # bounded: a server runs for weeks


@contextmanager
def timed(log: logging.Logger, what: str, device: torch.device | None = None) -> Iterator[None]:
    """Within, a part of a first call: ``log`` gets the time that it takes, until ``device`` has done its work, too.

    Where the log is off, nothing waits for a device.
    """
    begin = time.perf_counter()
    yield
    if log.isEnabledFor(logging.INFO) and device is not None and device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    log.info("%s: %s", what, format_time(time.perf_counter() - begin))


_Kind = Literal["copy", "compute", "stall"]


class Span(NamedTuple):
    """A stretch of time on one thread; times in ns of ``time.perf_counter_ns``."""

    kind: _Kind
    unit: int
    track: str
    start_ns: int
    duration_ns: int
    num_bytes: int


class Recorder:
    """Keeps the last 65,536 spans; any thread may record."""

    def __init__(self) -> None:
        # deque.append is atomic, so that copy threads and forwards need no lock.
        self._spans: deque[Span] = deque(maxlen=_MAX_SPANS)

    @property
    def spans(self) -> list[Span]:
        """The recorded spans, by the time at which they ended."""
        return list(self._spans)

    def add(self, kind: _Kind, unit: int, start_ns: int, num_bytes: int = 0) -> None:
        """Record a span of ``unit`` that began in this thread at ``start_ns`` (``time.perf_counter_ns``) and ends now.

        ``kind``: ``copy``, a piece of the unit was copied; ``compute``, its module has finished; ``stall``, compute
        has stopped waiting for it.
        """
        duration_ns = time.perf_counter_ns() - start_ns
        # The thread by its name: idents are used again when a thread has ended.
        self._spans.append(Span(kind, unit, threading.current_thread().name, start_ns, duration_ns, num_bytes))

    def write(self, path: str | os.PathLike[str], names: Sequence[str]) -> None:
        """Write the spans as Chrome trace JSON (Trace Event Format, complete events, times in µs); Perfetto reads it.

        ``names``: the module of each unit, for labels.

        Raises:
            OptionError: no file can be written there.
            OptionTypeError: no path.
        """
        if not isinstance(path, str | os.PathLike):
            raise OptionTypeError(f"path of a trace: expected str or os.PathLike, found {type(path).__name__} {path!r}")
        spans = self.spans
        tracks = list(dict.fromkeys(span.track for span in spans))
        origin = min((span.start_ns for span in spans), default=0)
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": track}}
            for tid, track in enumerate(tracks)
        ]
        events += [
            {
                "name": f"{span.kind} {names[span.unit]}",
                "cat": span.kind,
                "ph": "X",
                "pid": 1,
                "tid": tracks.index(span.track),
                "ts": (span.start_ns - origin) / 1e3,
                "dur": span.duration_ns / 1e3,
                "args": {"unit": span.unit, "bytes": span.num_bytes},
            }
            for span in spans
        ]
        try:
            Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        except OSError as error:
            raise OptionError(
                f"{str(path)!r}: expected the name of a file to write the trace to, in a folder that exists; found: "
                f"{error.strerror} (--trace)"
            ) from error


@dataclass
class UnitStats:
    """Counters of one unit since it was offloaded.

    Attributes:
        store: where it is stored.
        copies: transfers started.
        bytes_moved: bytes of those transfers.
        runs: times its module ran.
        captured_copies: transfers recorded into graphs; each happens once per replay, and replays are not counted.
        stalls: runs that had to wait for bytes, and ``stall_s`` the seconds that they waited. Counted where waiting
            blocks the host, that is, on a CPU.
        last_stall_s: seconds that the latest run waited, replays included; ``None`` where it is not measured.
        misses: runs whose slot held, or was to hold, another unit: a layer skipped, repeated or out of order. An order
            other than the plan's is learned from a forward that runs every unit once.
    """

    module_fqn: str
    store: str = "cpu"
    copies: int = 0
    bytes_moved: int = 0
    captured_copies: int = 0
    runs: int = 0
    stalls: int = 0
    stall_s: float = 0.0
    last_stall_s: float | None = None
    misses: int = 0


@dataclass(frozen=True)
class ExpertStats:
    """Counters of one layer of cached experts, replays included; an expert counts once in each step that uses it.

    Attributes:
        module_fqn: the module that holds the experts.
        num_experts, num_slots: of the layer, and how many of them the device holds at a time.
        expert_bytes: bytes of one expert, all tensors together.
        steps: runs of the module.
        hits: experts that were on the device.
        fetched: experts that were copied to the device.
        in_place: experts for which no slot was free: read in host memory, or in an overflow row (copied once).
        evicted: experts whose slot another one took.
        read: experts that were in no memory, and were read from files; part of ``fetched`` and ``in_place``.
    """

    module_fqn: str
    num_experts: int
    num_slots: int
    expert_bytes: int
    steps: int = 0
    hits: int = 0
    fetched: int = 0
    in_place: int = 0
    evicted: int = 0
    read: int = 0

    @property
    def bytes_moved(self) -> int:
        """Bytes that crossed the link; what was read in place counts once."""
        return (self.fetched + self.in_place) * self.expert_bytes


@dataclass(frozen=True)
class SpeculationCounts:
    """Tokens that verification has accepted (:class:`headrace.plan.speculation.Speculation`).

    Attributes:
        guesser: what guesses.
        guesses: most guesses of a pass.
        passes: forwards of the model, prompts included.
        tokens: tokens of all answers.
    """

    guesser: str
    guesses: int
    passes: int = 0
    tokens: int = 0

    @property
    def tokens_per_pass(self) -> float:
        """Mean, the token of the model included; 0 before the first pass."""
        return self.tokens / self.passes if self.passes else 0.0


@dataclass(frozen=True)
class StagingStats:
    """Counters of the ring between files and a GPU, replays included.

    Attributes:
        bytes_read: bytes read from the files and copied to the device; bytes read ahead and not used do not count.
        stalls: requests of the device for a piece that was not in its entry yet, and ``stall_s`` the seconds that it
            waited in all, measured by a thread of the host (to about a millisecond).
        misses: pieces requested out of the expected order, for which the bytes that were read ahead had no use.
    """

    bytes_read: int = 0
    stalls: int = 0
    stall_s: float = 0.0
    misses: int = 0


@dataclass(frozen=True)
class ReadStats:
    """Bytes read from files, by path.

    Attributes:
        direct: past the page cache.
        cached: found in the page cache.
        buffered: through the page cache, whether they were in it or not.
    """

    direct: int = 0
    cached: int = 0
    buffered: int = 0

    def __str__(self) -> str:
        named = (("direct", self.direct), ("page cache", self.cached), ("through the page cache", self.buffered))
        return ", ".join(f"{name} {format_size(size)}" for name, size in named if size) or "nothing"


@dataclass(frozen=True, repr=False)
class Stats:
    """Counters of all units, bytes by mechanism and by store, and notes; ``str()`` has the totals in one line.

    Attributes:
        store_bytes: where bytes are: ``resident`` and ``slots`` on the device, ``host``, ``host_pinned``,
            ``host_shared`` (one for all ranks of the host), ``adopted`` (host memory the model came with), ``file``,
            ``peer`` (the memory of another GPU).
        staging: the ring between files and a GPU; ``None`` where there is none.
        loading: how the files were read when the offload began, for residents and for stores in memory.
        experts: counts of each layer of cached experts; empty in ``counters()``, which does not synchronize.
        speculation: what verification has accepted; ``None``: nothing guesses.
    """

    units: tuple[UnitStats, ...] = field(repr=False)
    mechanism_bytes: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    store_bytes: dict[str, int] = field(default_factory=dict)
    staging: StagingStats | None = None
    loading: ReadStats = field(default_factory=ReadStats)
    experts: tuple[ExpertStats, ...] = field(default=(), repr=False)
    speculation: SpeculationCounts | None = None

    @property
    def bytes_moved(self) -> int:
        """Bytes of all transfers started, and of cached experts that were fetched."""
        return sum(unit.bytes_moved for unit in self.units) + sum(layer.bytes_moved for layer in self.experts)

    @property
    def hit_rate(self) -> float | None:
        """Share of the cached experts in use that were on the device; ``None``: none have been used."""
        used = sum(layer.hits + layer.fetched + layer.in_place for layer in self.experts)
        return sum(layer.hits for layer in self.experts) / used if used else None

    @property
    def moved_by_store(self) -> dict[str, int]:
        """Bytes moved by store, as the plan names it."""
        moved: dict[str, int] = {}
        for unit in self.units:
            moved[unit.store] = moved.get(unit.store, 0) + unit.bytes_moved
        return moved

    @property
    def copies(self) -> int:
        """Transfers started."""
        return sum(unit.copies for unit in self.units)

    @property
    def stalls(self) -> int:
        """Runs that had to wait."""
        return sum(unit.stalls for unit in self.units)

    @property
    def stall_s(self) -> float:
        """Seconds that compute waited in all."""
        return sum(unit.stall_s for unit in self.units)

    @property
    def misses(self) -> int:
        """Runs out of the declared order."""
        return sum(unit.misses for unit in self.units)

    def __str__(self) -> str:
        parts = [f"{format_size(self.bytes_moved)} moved in {pluralize(self.copies, 'copy', 'copies')}", self._waits()]
        if self.staging is not None:
            parts.append(f"{format_size(self.staging.bytes_read)} through the ring")
        if self.hit_rate is not None:
            parts.append(f"{self.hit_rate:.1%} of experts hit")
        if num_read := sum(layer.read for layer in self.experts):
            parts.append(f"{pluralize(num_read, 'expert')} read from files")
        if self.speculation is not None and self.speculation.passes:
            parts.append(f"{self.speculation.tokens_per_pass:.2f} tokens a pass")
        if self.misses:
            parts.append(pluralize(self.misses, "miss", "misses"))
        if self.notes:
            parts.append(pluralize(len(self.notes), "note"))
        return ", ".join(parts)

    def _waits(self) -> str:
        """Stalls as text: counted on a CPU, where they block the host; measured on request on a GPU."""
        latest = [unit.last_stall_s for unit in self.units if unit.last_stall_s is not None]
        if self.stalls or not any(unit.runs for unit in self.units) or (latest and not any(latest)):
            return f"{pluralize(self.stalls, 'stall')} ({format_time(self.stall_s)})"
        return f"{format_time(sum(latest))} waited in the latest runs" if latest else "stalls not measured"

    def __repr__(self) -> str:
        return f"<headrace.Stats of {pluralize(len(self.units), 'unit')}: {self}>"

    def to_json(self) -> dict[str, Any]:
        """Totals and units as plain numbers."""
        totals = {name: getattr(self, name) for name in ("bytes_moved", "copies", "stalls", "stall_s", "misses")}
        return {**totals, "moved_by_store": self.moved_by_store, **asdict(self)}
