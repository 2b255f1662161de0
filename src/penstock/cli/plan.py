"""``penstock plan``: what would be offloaded and what it would cost. Reads headers, no weights."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.console import stderr, stdout
from penstock.cli.options import OffloadFlags, with_offload_flags
from penstock.cli.values import refuse_idle, require_writable
from penstock.config import Budget
from penstock.errors import OptionError

if TYPE_CHECKING:
    import torch

    from penstock.plan.cost_model import Rates
    from penstock.plan.plan import Machine

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
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the plan, and the step time against device memory."),
    ] = None,
    machine: Annotated[
        Path | None,
        typer.Option("--machine", metavar="FILE", help="Plan for the machine of FILE, from `penstock probe --json`."),
    ] = None,
    flags: OffloadFlags,
) -> None:
    """Show what would be offloaded and what it would cost; loads no weights.

    Without offloading flags: what the model weighs and the smallest budget that runs it.
    """
    ground = _ground(flags, machine)
    policy = flags.policy(ground.device.type == "cuda")
    places = {"--save": save, "--plot": plot}
    if policy is None:
        reads = {"--disk-direct": flags.disk_direct, "--disk-drop-cache": flags.disk_drop_cache}
        refuse_idle({**places, **reads}, "without a plan: nothing would be offloaded; add --device-memory, say")
    from penstock.cli.model import minimum_bytes, no_collections, open_model
    from penstock.plan.plot import draw_plan, require_picture
    from penstock.plan.report import render, render_weights

    for flag, file in places.items():
        if file is not None:
            require_writable(flag, file)
    if plot is not None:
        require_picture(plot)
    with no_collections():
        opened = open_model(model)
        planner = opened.planner(ground.device, ground.rates, flags.disk())
        made = opened.plan(planner, policy, ground.machine)
        opened.check_files(flags.disk())
        points = planner.curve(policy) if isinstance(policy, Budget) and made.offloaded_bytes else ()
        outlook = planner.outlook(policy, made, points)
    if save is not None:
        made.save(save)
        stderr.print(f"plan saved in {save} (--plan {save} carries it out)", highlight=False, soft_wrap=True)
    if plot is not None:
        draw_plan(plot, opened.name, made, planner, outlook, points)
        stderr.print(f"picture: {plot}", highlight=False, soft_wrap=True)
    if as_json:
        json.dump({**made.to_json(), "outlook": outlook.to_json()}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    elif policy is None:
        stdout.print(render_weights(made, opened.name, minimum_bytes(planner)))
    else:
        stdout.print(render(made, opened.name), outlook.render())


@dataclass(frozen=True)
class _Ground:
    """Where the plan is to be carried out."""

    device: torch.device
    machine: Machine
    rates: Rates | None


def _ground(flags: OffloadFlags, file: Path | None) -> _Ground:
    if file is None:
        from penstock.runtime.limits import describe_device

        device = flags.target()
        return _Ground(device, describe_device(device), None)
    if flags.device is not None:
        raise OptionError("--machine and --device contradict each other: the file says what device there is")
    import torch

    from penstock.transfer.machine_probe import read_probe

    probe = read_probe(file)
    rates = probe.gpu_rates()
    if rates is None:
        return _Ground(torch.device("cpu"), probe.planned_machine, probe.cpu_rates(flags.disk_direct))
    return _Ground(torch.device("cuda", 0), probe.planned_machine, rates)
