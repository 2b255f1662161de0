"""``headrace demo``: run a model resident and streamed from its files, without downloads."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import typer

from headrace.cli.arguments import require_folder, require_packages, with_flags
from headrace.cli.terminal import stdout
from headrace.errors import OptionError
from headrace.flags import row

_NAME = "Qwen3 architecture, random weights"
_BUDGET_SHARE = 0.30  # of the weights


@dataclass(frozen=True)
class DemoOptions:
    """The flags of the verb."""

    folder: Path = row("DIR", "Folder for the model and the trace (default headrace-demo).", off=Path("headrace-demo"))
    keep: bool = row("", "Keep the model (1.2 GB) for the next run.", off=False)


@with_flags(DemoOptions, ())
def demo(*, options: DemoOptions) -> None:
    """Run a language model resident and streamed from disk; compare results, memory and speed. Downloads nothing.

    Takes a minute or two, 1.3 GB of disk and as much memory. Exit code 1 if one bit differs or memory exceeds the
    plan.
    """
    require_packages("demo", "transformers", "transformers", "tokenizers")
    folder = options.folder
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
        if written and not options.keep:
            shutil.rmtree(model, ignore_errors=True)
    for check in broken:
        stdout.print(f"[red]failed: {check}[/]")
    if broken:
        raise typer.Exit(1)
    stdout.print("[green]Every bit is equal, and memory stayed within the plan.[/]")


def _compare(model: Path, trace: Path) -> list[str]:
    """Print the plan, run resident and streamed, print the comparison; returns the checks that failed."""
    from headrace.adapters.transformers.opened_model import open_model
    from headrace.cli import demo_run
    from headrace.plan.tables import render
    from headrace.plan_model import plan_model
    from headrace.planning.request import PlanRequest

    opened = open_model(model)
    weight_bytes = opened.weights.checkpoint.num_bytes
    budget = int(weight_bytes * _BUDGET_SHARE)
    stdout.print(render(plan_model(PlanRequest(opened, budget, device="cpu")).plan, _NAME))
    with stdout.status("running, resident and streamed"):
        runs = demo_run.run_alone(model, None, trace), demo_run.run_alone(model, budget, trace)
    stdout.print(demo_run.comparison_table(weight_bytes, *runs))
    stdout.print(f"trace: {trace} (open it at https://ui.perfetto.dev)")
    return demo_run.failed_checks(*runs)
