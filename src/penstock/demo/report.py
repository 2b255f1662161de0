"""What the demo found, for people: resident against streamed, and whether the promises held."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from rich.table import Table

from penstock.demo.jobs import Result
from penstock.memory.system import num_cores
from penstock.plan.report import gib, titled_table

__all__ = ["TOLERANCE_BYTES", "Comparison", "comparison_table", "most_similar"]

# Contract 3: the device peak stays within the plan's figure and this much for activations and buffers.
TOLERANCE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Comparison:
    """One part of the demo: the same work resident and streamed.

    Attributes:
        item: what ``Result.items`` counts, e.g. ``tokens``.
        weight_bytes: of the model.
    """

    name: str
    item: str
    weight_bytes: int
    resident: Result
    streamed: Result

    @property
    def bits_equal(self) -> bool:
        """Whether all result tensors are ``torch.equal`` and their bytes, also after ``remove()``, the same digest."""
        mine, theirs = self.resident.tensors, self.streamed.tensors
        return (
            self.resident.sha256 == self.streamed.sha256 == self.streamed.restored_sha256
            and mine.keys() == theirs.keys()
            and all(torch.equal(mine[name], theirs[name]) for name in mine)
        )

    @property
    def limit_bytes(self) -> int:
        """What the streamed run may grow by."""
        return int(self.streamed.plan["device_bytes"]) + TOLERANCE_BYTES

    @property
    def within_memory(self) -> bool:
        """Whether it stayed within that."""
        return self.streamed.growth_bytes <= self.limit_bytes

    @property
    def bytes_moved(self) -> bool:
        """Whether anything moved at all: without, equal bits would prove nothing."""
        return int(self.streamed.stats["bytes_moved"]) > 0

    @property
    def floor_s(self) -> float:
        """The time of a forward that no schedule can beat on this machine.

        The largest of: compute with all weights resident; the bytes of a forward at the speed of reading alone; and,
        since here copies are made by the same cores that compute, the CPU time of both, spread over all cores. Each at
        its fastest: a floor that includes what other programs took away would be none.
        """
        moved = int(self.streamed.plan["moved_bytes"])
        compute_s, compute_cpu_s = min((s, c) for s, c in (*self.resident.steps, *self.streamed.restored_steps))
        reading_cpu_s = moved * self.streamed.read_cpu_s_per_byte
        return max(compute_s, moved / self.streamed.read_bytes_per_s, (compute_cpu_s + reading_cpu_s) / num_cores())

    @property
    def broken(self) -> list[str]:
        """Promises that did not hold, in words."""
        checks = {
            f"{self.name}: the streamed results differ from the resident ones": self.bits_equal,
            f"{self.name}: nothing was streamed": self.bytes_moved,
            f"{self.name}: memory grew by {gib(self.streamed.growth_bytes)} GiB, the limit is "
            f"{gib(self.limit_bytes)} GiB": self.within_memory,
        }
        return [what for what, held in checks.items() if not held]


def comparison_table(part: Comparison) -> Table:
    """Resident against streamed, row by row."""
    table = titled_table(f"{part.name}, resident and streamed", "", "resident", "streamed")
    for row in _rows(part):
        table.add_row(*row)
    return table


def _rows(part: Comparison) -> Iterable[tuple[str, str, str]]:
    resident, streamed = part.resident, part.streamed
    planned = int(streamed.plan["device_bytes"])
    yield "weights", f"{gib(part.weight_bytes)} GiB", f"{gib(part.weight_bytes)} GiB"
    yield "planned memory for weights", f"{gib(part.weight_bytes)} GiB", _with_share(planned, part.weight_bytes)
    yield (
        "measured growth (mapped pages that were touched count)",
        f"{gib(resident.growth_bytes)} GiB",
        f"{gib(streamed.growth_bytes)} GiB",
    )
    yield "limit: planned + 64 MiB", "", f"{gib(part.limit_bytes)} GiB, {_kept(part.within_memory)}"
    yield f"{part.item} per second", _rate(resident), _rate(streamed)
    yield "forward, fastest", _ms(resident.fastest_step[0]), _ms(streamed.fastest_step[0])
    yield "forward, median", _ms(resident.median_step_s), _ms(streamed.median_step_s)
    yield "moved per forward", "", f"{gib(streamed.plan['moved_bytes'])} GiB"
    yield "files read alone at", "", f"{streamed.read_bytes_per_s / 1e9:.2f} GB/s"
    yield "floor of a forward", "", _ms(part.floor_s)
    yield "fastest / floor, median / floor", "", _floor_ratios(part)
    yield "stalls", "", f"{streamed.stats['stalls']} ({streamed.stats['stall_s']:.2f} s)"
    digest = next(iter(resident.sha256.values()))[:12]
    yield "sha256 of the results", digest, next(iter(streamed.sha256.values()))[:12]
    yield "bits equal", "", "[green]yes[/]" if part.bits_equal else "[red]NO[/]"


def _with_share(num_bytes: int, total: int) -> str:
    return f"{gib(num_bytes)} GiB ({100 * num_bytes / total:.0f} %)"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _floor_ratios(part: Comparison) -> str:
    times = (part.streamed.fastest_step[0], part.streamed.median_step_s)
    return ", ".join(f"{seconds / part.floor_s:.2f} ×" for seconds in times)


def _kept(held: bool) -> str:
    return "[green]kept[/]" if held else "[red]BROKEN[/]"


def _rate(result: Result) -> str:
    return f"{result.items / result.seconds:.1f}"


def most_similar(embeddings: torch.Tensor, count: int) -> list[tuple[float, int, int]]:
    """The ``count`` pairs of rows with the highest cosine: (cosine, first, second). Rows have length 1."""
    scores = (embeddings @ embeddings.T).triu(diagonal=1)
    best = scores.flatten().topk(count)
    size = embeddings.shape[0]
    return [(float(s), int(i) // size, int(i) % size) for s, i in zip(best.values, best.indices, strict=True)]
