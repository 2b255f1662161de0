"""``headrace demo``: the main job, no downloads."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.arguments import require_folder
from headrace.cli.terminal import stdout
from headrace.errors import OptionError

if TYPE_CHECKING:
    from headrace.demo.comparison import Comparison, Job

__all__ = ["demo"]

_GENERATOR = "Qwen3 architecture, random weights"


def demo(
    folder: Annotated[Path, typer.Option("--folder", metavar="DIR", help="Where the model and the trace go.")] = Path(
        "headrace-demo"
    ),
    keep: Annotated[bool, typer.Option("--keep", help="Keep the model (1.2 GB) for the next time.")] = False,
) -> None:
    """Run two models resident and streamed from disk; compare bits, memory and speed. Downloads nothing.

    Takes two to three minutes, 1.3 GB of disk and as much memory. Exit code 1 if one bit differs or a memory limit is
    broken.
    """
    from importlib.util import find_spec

    # Found and not imported, which takes seconds.
    if find_spec("transformers") is None or find_spec("tokenizers") is None:
        raise OptionError("the demo needs packages that are not installed: pip install headrace[transformers]")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--folder {str(folder)!r}: expected a folder that can be written to: {error}") from error
    require_folder("--folder", folder)  # an existing folder may still not be writable
    with TemporaryDirectory(dir=folder, prefix="runs-") as runs:
        broken = [*_embed_sentences(Path(runs)), *_generate_text(folder, Path(runs), keep)]
    for promise in broken:
        stdout.print(f"[red]broken: {promise}[/]")
    if broken:
        raise typer.Exit(1)
    stdout.print("[green]Every bit is equal, and memory stayed within the plan.[/]")


def _embed_sentences(runs: Path) -> list[str]:
    from headrace.demo.comparison import ENCODER_SHARE, SENTENCES, embed_job, find_encoder, most_similar

    job = embed_job(find_encoder())
    stdout.rule("Part A: real weights, all-MiniLM-L6-v2 embeds English sentences")
    found = _compare(job, "all-MiniLM-L6-v2", "sentences", ENCODER_SHARE, runs / "a")
    stdout.print("The most similar sentences, by the streamed run:")
    for cosine, first, second in most_similar(found.streamed, 2):
        stdout.print(f"  {cosine:.3f}  {SENTENCES[first]}\n         {SENTENCES[second]}", highlight=False)
    return found.broken


def _generate_text(folder: Path, runs: Path, keep: bool) -> list[str]:
    from headrace.demo.comparison import GENERATOR_SHARE, TRACE_FILE, generate_job
    from headrace.demo.synthetic_model import ModelSize, ensure_model

    stdout.rule(f"Part B: a language model of 1 GB ({_GENERATOR}) generates text")
    model, trace = folder / "model", folder / TRACE_FILE
    with stdout.status("writing the model"):
        written = ensure_model(model, ModelSize())
    stdout.print(f"{'wrote' if written else 'found'} {model}")
    try:
        found = _compare(generate_job(model), _GENERATOR, "tokens", GENERATOR_SHARE, runs / "b")
    finally:
        # Only a model that this run wrote: one that it found was kept by an earlier run.
        if written and not keep:
            shutil.rmtree(model, ignore_errors=True)
    # The folder of the runs is removed at the end.
    shutil.copyfile(runs / "b" / "streamed" / TRACE_FILE, trace)
    stdout.print(f"trace: {trace} (open it at https://ui.perfetto.dev)", highlight=False)
    return found.broken


def _compare(job: Job, name: str, item: str, share: float, runs: Path) -> Comparison:
    """Print the plan, run the job resident and streamed, print the comparison."""
    from headrace.adapters.transformers.opened_model import open_model
    from headrace.demo.comparison import compare, comparison_table
    from headrace.plan.report import render
    from headrace.planning import plan_model
    from headrace.runtime.this_machine import PlanRequest

    opened = open_model(Path(job.model))
    budget = int(opened.weights.checkpoint.num_bytes * share)
    stdout.print(render(plan_model(PlanRequest(opened, budget, device="cpu")).plan, name))
    with stdout.status("running, resident and streamed"):
        found = compare(name, item, job, share, runs)
    stdout.print(comparison_table(found))
    return found
