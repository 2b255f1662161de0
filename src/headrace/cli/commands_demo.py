"""``headrace demo``: a model resident and streamed from its files, without downloads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.arguments import require_folder
from headrace.cli.terminal import stdout
from headrace.errors import OptionError

__all__ = ["demo"]

_NAME = "Qwen3 architecture, random weights"
_BUDGET_SHARE = 0.30  # of the weights


def demo(
    folder: Annotated[Path, typer.Option("--folder", metavar="DIR", help="Where the model and the trace go.")] = Path(
        "headrace-demo"
    ),
    keep: Annotated[bool, typer.Option("--keep", help="Keep the model (1.2 GB) for the next time.")] = False,
) -> None:
    """Run a language model resident and streamed from disk; compare bits, memory and speed. Downloads nothing.

    Takes about two minutes, 1.3 GB of disk and as much memory. Exit code 1 if one bit differs or a memory limit is
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
    from headrace.cli.demo_run import ModelSize, ensure_model

    model = folder / "model"
    with stdout.status("writing the model"):
        written = ensure_model(model, ModelSize())
    stdout.print(f"{'wrote' if written else 'found'} {model}")
    try:
        broken = _compare(model, folder / "trace.json")
    finally:
        # Only a model that this run wrote: one that it found was kept by an earlier run.
        if written and not keep:
            shutil.rmtree(model, ignore_errors=True)
    for promise in broken:
        stdout.print(f"[red]broken: {promise}[/]")
    if broken:
        raise typer.Exit(1)
    stdout.print("[green]Every bit is equal, and memory stayed within the plan.[/]")


def _compare(model: Path, trace: Path) -> list[str]:
    """Print the plan, run resident and streamed, print the comparison; returns the promises that did not hold."""
    from headrace.adapters.transformers.opened_model import open_model
    from headrace.cli import demo_run
    from headrace.plan.report import render
    from headrace.planning import plan_model
    from headrace.runtime.planner_factory import PlanRequest

    opened = open_model(model)
    weight_bytes = opened.weights.checkpoint.num_bytes
    budget = int(weight_bytes * _BUDGET_SHARE)
    stdout.print(render(plan_model(PlanRequest(opened, budget, device="cpu")).plan, _NAME))
    with stdout.status("running, resident and streamed"):
        runs = demo_run.run_alone(model, None, trace), demo_run.run_alone(model, budget, trace)
    stdout.print(demo_run.comparison_table(weight_bytes, *runs))
    stdout.print(f"trace: {trace} (open it at https://ui.perfetto.dev)", highlight=False)
    return demo_run.broken_promises(*runs)
