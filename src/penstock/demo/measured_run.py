"""One run of the demo, resident or streamed, measured in a process of its own.

Memory counts from after the imports and a tiny run of the same architecture, so that libraries, thread pools and
buffers of kernels are not taken for weights.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from penstock.adapters.transformers import load
from penstock.config import Budget
from penstock.errors import StateError
from penstock.memory.system import PeakMeter

__all__ = ["TRACE_FILE", "Arrays", "Job", "Result", "run", "run_job"]

TRACE_FILE = "trace.json"

Arrays = dict[str, np.ndarray[Any, Any]]

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


def run_job(job: Job, folder: Path) -> Result:
    """:func:`run` in a fresh Python process.

    Raises:
        StateError: the process failed; has the last line that it wrote.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "result.pickle"
    child = "import sys; from penstock.demo.measured_run import run_child; run_child(sys.argv[1])"
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
    tiny = model_class.from_config(config).eval()
    work(tiny, tokenizer, replace(job, steps=2))
    meter = PeakMeter()
    handle = None
    if job.budget_bytes is None:  # the reference of the bits, without any of our code
        model = model_class.from_pretrained(job.model, dtype="auto").eval()
    else:
        model, handle = load(job.model, Budget(job.budget_bytes), model_class=model_class)
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
    """Greedy continuation. ``tokens`` [texts, steps] and, since equal tokens prove little, every step's ``logits``."""
    inputs = tokenizer(list(job.texts), padding=True, padding_side="left", return_tensors="pt")
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=job.steps,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[:, inputs["input_ids"].shape[1] :]
    return {"tokens": tokens.numpy(), "logits": torch.stack(output.logits).numpy()}
