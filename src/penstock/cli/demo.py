"""``penstock demo``: the main job, no downloads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.console import byte_bar, stderr, stdout
from penstock.cli.values import require_folder
from penstock.errors import OptionError
from penstock.memory.system import num_cores

if TYPE_CHECKING:
    from penstock.demo.jobs import Result
    from penstock.demo.model import ModelSize
    from penstock.demo.report import Comparison

__all__ = ["demo"]

_GENERATOR = "Qwen3 architecture, random weights"
_NEEDS = {
    "transformers": "penstock[transformers]",
    "tokenizers": "penstock[transformers]",
    "matplotlib": "penstock[plot]",
}


def demo(
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Where the model, the timeline and the trace go.")
    ] = Path("penstock-demo"),
    keep: Annotated[bool, typer.Option("--keep", help="Keep the model (1.2 GB) for the next time.")] = False,
) -> None:
    """Run two models resident and streamed from disk; compare bits, memory and speed. Downloads nothing.

    Takes two to three minutes, 1.3 GB of disk and as much memory. Exit code 1 if one bit differs or a memory limit is
    broken.
    """
    _require_packages()
    _note_busy_machine()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--folder {str(folder)!r}: expected a folder that can be written to: {error}") from error
    require_folder("--folder", folder)  # that it is there does not mean that it may be written to
    with TemporaryDirectory(dir=folder, prefix="runs-") as runs:
        broken = [*_part_a(Path(runs)), *_part_b(folder, Path(runs), keep)]
    for promise in broken:
        stdout.print(f"[red]broken: {promise}[/]")
    if broken:
        raise typer.Exit(1)
    stdout.print("[green]Every bit is equal, and memory stayed within the plan.[/]")


def _require_packages() -> None:
    from importlib.util import find_spec

    missing = {extra for name, extra in _NEEDS.items() if find_spec(name) is None}
    if missing:
        raise OptionError(f"the demo needs packages that are not installed: pip install {' '.join(sorted(missing))}")


def _note_busy_machine() -> None:
    load, cores = os.getloadavg()[0], num_cores()
    if load > 0.5 * cores:
        stderr.print(
            f"note: other programs keep this machine busy (load {load:.1f} on {cores} cores); bits and memory are not "
            f"affected, times are",
            style="yellow",
            soft_wrap=True,
        )


def _part_a(runs: Path) -> list[str]:
    from penstock.demo.parts import ENCODER_SHARE, compare, embed_job, find_encoder

    model = find_encoder()
    stdout.rule("Part A: real weights, all-MiniLM-L6-v2 embeds English sentences")
    _print_plan(model, ENCODER_SHARE, "all-MiniLM-L6-v2")
    with stdout.status("embedding, resident and streamed"):
        found = compare(
            "all-MiniLM-L6-v2", "sentences", lambda budget: embed_job(model, budget), ENCODER_SHARE, runs / "a"
        )
    _print_comparison(found)
    _print_pairs(found.streamed)
    return found.broken


def _part_b(folder: Path, runs: Path, keep: bool) -> list[str]:
    from penstock.demo.model import ModelSize
    from penstock.demo.parts import GENERATOR_SHARE, compare, generate_job

    stdout.rule(f"Part B: a language model of 1 GB ({_GENERATOR}) generates text")
    model = folder / "model"
    written = _write_model(model, ModelSize())
    try:
        _print_plan(model, GENERATOR_SHARE, _GENERATOR)
        with stdout.status("generating, resident and streamed"):
            found = compare(
                _GENERATOR, "tokens", lambda budget: generate_job(model, budget), GENERATOR_SHARE, runs / "b"
            )
    finally:
        if written and not keep:
            shutil.rmtree(model, ignore_errors=True)
    _print_comparison(found)
    _save_timeline(folder, found)
    return found.broken


def _write_model(model: Path, size: ModelSize) -> bool:
    from penstock.demo.model import ensure_model

    with byte_bar("writing the model", stdout) as progress:
        written = ensure_model(model, size, progress)
    stdout.print(f"{'wrote' if written else 'found'} {model}")
    return written


def _print_plan(model: Path, share: float, name: str) -> None:
    import torch

    from penstock.cli.model import open_model
    from penstock.config import Budget
    from penstock.plan.report import render

    opened = open_model(str(model))
    planner = opened.planner(torch.device("cpu"))
    stdout.print(render(planner.plan(Budget(int(opened.weights.checkpoint.num_bytes * share))), name))


def _print_comparison(found: Comparison) -> None:
    from penstock.demo.report import comparison_table

    stdout.print(comparison_table(found))


def _print_pairs(result: Result) -> None:
    from penstock.demo.report import most_similar
    from penstock.demo.sentences import SENTENCES

    stdout.print("The most similar sentences, by the streamed run:")
    for cosine, first, second in most_similar(result.tensors["embeddings"], 2):
        stdout.print(f"  {cosine:.3f}  {SENTENCES[first]}\n         {SENTENCES[second]}", highlight=False)


def _save_timeline(folder: Path, found: Comparison) -> None:
    from penstock.demo.timeline import draw, read_trace

    trace, picture = folder / "trace.json", folder / "timeline.png"
    shutil.copyfile(found.streamed.trace_path, trace)
    draw(read_trace(trace), picture, f"penstock demo: {found.name}, streamed from disk")
    stdout.print(f"timeline: {picture}\ntrace:    {trace} (open it at https://ui.perfetto.dev)", highlight=False)
