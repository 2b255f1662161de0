"""``penstock plan``: what would be offloaded and what it would cost. Reads headers, no weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.console import stderr, stdout
from penstock.cli.options import OffloadFlags, with_offload_flags
from penstock.errors import OptionError

__all__ = ["plan"]


@with_offload_flags
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder with config.json and safetensors files.")],
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON, in bytes, and nothing else.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the plan to FILE, for --plan FILE.")
    ] = None,
    flags: OffloadFlags,
) -> None:
    """Show what would be offloaded and what it would cost; loads no weights.

    Without offloading flags: what the model weighs and the smallest budget that runs it.
    """
    policy = flags.policy()
    if save is not None and policy is None:
        raise OptionError("--save has no effect without a plan: nothing would be offloaded; add --device-memory, say")
    from penstock.cli.model import open_model, require_writable
    from penstock.plan.report import render, render_weights

    if save is not None:
        require_writable(save, "--save")
    opened = open_model(model)
    made = opened.plan(policy)
    opened.check_files(flags.disk())
    if save is not None:
        opened.save(made, save)
        stderr.print(f"plan saved in {save} (--plan {save} carries it out)", highlight=False, soft_wrap=True)
    if as_json:
        json.dump(made.to_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    elif policy is None:
        stdout.print(render_weights(made, opened.name, opened.minimum_bytes()))
    else:
        stdout.print(render(made, opened.name))
