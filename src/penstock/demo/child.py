"""``python -m penstock.demo.child FOLDER``: one measured run in a process of its own.

Reads the job from FOLDER, leaves result, tensors and trace there. Memory counts from after the imports and a tiny run
of the same architecture, so that libraries, thread pools and buffers of kernels are not taken for weights.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from penstock.adapters.transformers import load
from penstock.api import Handle
from penstock.config import Budget
from penstock.demo.jobs import JOB_FILE, RESULT_FILE, TENSORS_FILE, TRACE_FILE, Job
from penstock.demo.reading import measure_reading
from penstock.memory.system import PeakMeter, cpu_seconds

__all__ = ["run"]

# Shrinks any configuration to a model of a few hundred KB with the same modules.
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": None,
}


class Clock:
    """Wall and CPU time of each forward after the first, which also warms caches up."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []

    def tick(self) -> None:
        """A forward has ended."""
        self._marks.append((time.perf_counter(), cpu_seconds()))

    def steps(self) -> list[tuple[float, float]]:
        """(wall, CPU) seconds between the ticks."""
        return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(self._marks)]


class _Ticker(BaseStreamer):
    """Ticks for every token of ``generate``; the first call hands over the prompt, before any forward."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self._clock.tick()
        self._has_prompt = True

    def end(self) -> None:
        pass


Work = Callable[[Any, Any, Job, Clock], dict[str, torch.Tensor]]


@torch.inference_mode()
def embed(model: Any, tokenizer: Any, job: Job, clock: Clock) -> dict[str, torch.Tensor]:
    """Sentence embeddings as all-MiniLM-L6-v2 defines them: mean over the tokens, length 1. [texts, hidden]"""
    batches = [
        tokenizer(list(job.texts[start : start + job.batch]), padding=True, return_tensors="pt")
        for start in range(0, len(job.texts), job.batch)
    ]
    for _ in range(job.steps):
        parts = [_embed_batch(model, inputs, clock) for inputs in batches]
    return {"embeddings": torch.cat(parts)}


def _embed_batch(model: Any, inputs: Any, clock: Clock) -> torch.Tensor:
    hidden = model(**inputs).last_hidden_state
    clock.tick()
    mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def generate(model: Any, tokenizer: Any, job: Job, clock: Clock) -> dict[str, torch.Tensor]:
    """Greedy continuation. ``tokens`` [texts, steps] and, since equal tokens prove little, every step's ``logits``."""
    inputs = tokenizer(list(job.texts), padding=True, padding_side="left", return_tensors="pt")
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=job.steps,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        streamer=_Ticker(clock),
    )
    tokens = output.sequences[:, inputs["input_ids"].shape[1] :].contiguous()
    return {"tokens": tokens, "logits": torch.stack(output.logits)}


_WORK: dict[str, tuple[Any, Work]] = {"embed": (AutoModel, embed), "generate": (AutoModelForCausalLM, generate)}


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Do ``job``; returns the fields of :class:`~penstock.demo.jobs.Result` and leaves the files in ``folder``."""
    model_class, work = _WORK[job.kind]
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    _warm_up(model_class, work, tokenizer, job)
    meter = PeakMeter()
    clock = Clock()
    model, handle = _load(model_class, job)
    begin = time.perf_counter()
    tensors = work(model, tokenizer, job, clock)
    seconds = time.perf_counter() - begin
    growth_bytes = meter.growth_bytes()
    torch.save(tensors, folder / TENSORS_FILE)
    result = {
        "sha256": _sha256(tensors),
        "growth_bytes": growth_bytes,
        "items": len(job.texts) * job.steps,
        "seconds": seconds,
        "steps": clock.steps(),
        "plan": {},
        "stats": {},
        "read_bytes_per_s": 0.0,
        "read_cpu_s_per_byte": 0.0,
        "restored_steps": [],
        "restored_sha256": {},
    }
    if handle is None:
        return result
    streamed = _about_stream(handle, job, folder)
    handle.remove()
    clock = Clock()
    restored = work(model, tokenizer, job, clock)
    return result | streamed | {"restored_steps": clock.steps(), "restored_sha256": _sha256(restored)}


def _warm_up(model_class: Any, work: Work, tokenizer: Any, job: Job) -> None:
    config = AutoConfig.from_pretrained(job.model)
    for name, value in _TINY.items():
        if hasattr(config, name):
            setattr(config, name, value if value is not None else getattr(config, name)[: config.num_hidden_layers])
    tiny = model_class.from_config(config).eval()
    work(tiny, tokenizer, Job(job.kind, job.model, job.texts[: job.batch], job.batch, 2), Clock())


def _load(model_class: Any, job: Job) -> tuple[Any, Handle | None]:
    """The resident model comes from transformers without any of our code: it is what the bits are compared with."""
    if job.budget_bytes is None:
        return model_class.from_pretrained(job.model, dtype="auto").eval(), None
    return load(job.model, Budget(job.budget_bytes), model_class=model_class)


def _about_stream(handle: Handle, job: Job, folder: Path) -> dict[str, Any]:
    handle.trace(folder / TRACE_FILE)
    rate, cpu_s_per_byte = measure_reading(sorted(Path(job.model).glob("*.safetensors")), sum(handle.plan.slot_bytes))
    return {
        "plan": handle.plan.to_json(),
        "stats": handle.stats().to_json(),
        "read_bytes_per_s": rate,
        "read_cpu_s_per_byte": cpu_s_per_byte,
    }


def _sha256(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    raw = {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}
    return {name: hashlib.sha256(value).hexdigest() for name, value in raw.items()}


def main() -> None:
    """The run of the folder on the command line."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = Path(sys.argv[1])
    job = json.loads((folder / JOB_FILE).read_text())
    result = run(Job(**job | {"texts": tuple(job["texts"])}), folder)
    (folder / RESULT_FILE).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
