"""What the demo asks of a child process, and what comes back: two records that travel as JSON, tensors beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from penstock.errors import StateError

__all__ = ["Job", "Result", "run_job"]

JOB_FILE, RESULT_FILE, TENSORS_FILE, TRACE_FILE = "job.json", "result.json", "tensors.pt", "trace.json"


@dataclass(frozen=True)
class Job:
    """One measured run.

    Attributes:
        kind: ``embed`` texts with an encoder, or ``generate`` from them with a causal language model.
        model: folder of the checkpoint.
        texts: what goes in.
        batch: texts per forward.
        steps: for ``generate`` the number of new tokens, for ``embed`` how often all texts are embedded.
        budget_bytes: device memory for the streamed run; ``None`` is the resident run, by transformers alone.
    """

    kind: Literal["embed", "generate"]
    model: str
    texts: tuple[str, ...]
    batch: int
    steps: int
    budget_bytes: int | None = None


@dataclass(frozen=True)
class Result:
    """What a child measured.

    Attributes:
        sha256: of the raw bytes of every result tensor, by name.
        growth_bytes: by how much resident memory grew at most, from before the weights until the work was done.
        items: texts embedded, or tokens generated, in ``seconds``.
        steps: (seconds, CPU seconds of all threads) of each forward after the first.
        plan: ``Plan.to_json()``; empty for the resident run, and so are the following.
        stats: ``Stats.to_json()``.
        read_bytes_per_s: the files read with as many threads as the offloader has and nothing else to do, and
        read_cpu_s_per_byte: what that costs.
        restored_steps: of the same work in the same process after ``handle.remove()``, with all weights resident.
        restored_sha256: of the results of that.
        folder: where the child left its tensors and the trace.
    """

    sha256: dict[str, str]
    growth_bytes: int
    items: int
    seconds: float
    steps: list[tuple[float, float]]
    plan: dict[str, Any]
    stats: dict[str, Any]
    read_bytes_per_s: float
    read_cpu_s_per_byte: float
    restored_steps: list[tuple[float, float]]
    restored_sha256: dict[str, str]
    folder: str

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The results themselves."""
        return torch.load(Path(self.folder, TENSORS_FILE), weights_only=True)  # type: ignore[no-any-return]

    @property
    def median_step_s(self) -> float:
        """Median seconds of a forward."""
        return median(seconds for seconds, _ in self.steps)

    @property
    def fastest_step(self) -> tuple[float, float]:
        """(seconds, CPU seconds) of the forward that other programs on this machine disturbed least."""
        return min((seconds, cpu_seconds) for seconds, cpu_seconds in self.steps)

    @property
    def trace_path(self) -> Path:
        """The timeline of a streamed run, as Chrome trace JSON."""
        return Path(self.folder, TRACE_FILE)


def run_job(job: Job, folder: Path) -> Result:
    """Run ``job`` in a fresh Python process that leaves its files in ``folder``.

    Raises:
        StateError: the process failed; carries the end of what it said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT_FILE).unlink(missing_ok=True)
    (folder / JOB_FILE).write_text(json.dumps(asdict(job)))
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-m", "penstock.demo.child", str(folder)],
        env=os.environ | quiet,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise StateError(f"the process of this run ended with code {done.returncode}: {last[0]}")
    return Result(**json.loads((folder / RESULT_FILE).read_text()), folder=str(folder))
