"""``headrace bench``: measure an offloaded step on this machine against the lower bound of any schedule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.arguments import refuse_idle, require_writable, target_device, with_verbose
from headrace.flags import counts

__all__ = ["bench"]

_ROWS = "1,16,256,2048,8192"
_VARIANTS = "even:0.25,group:4/1/2,group:1/1/2"
_LAYERS = 36

bench = typer.Typer(no_args_is_help=True)


@bench.callback()  # without it, typer would make the only verb the group itself
def _root() -> None:
    """Measure an offloaded step against the floor, the lower bound for any schedule."""


@bench.command()
@with_verbose
def step(
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu or cuda.")] = "cpu",
    rows: Annotated[
        str | None, typer.Option(metavar="N,N,...", help=f"Rows per step; cuda only (default {_ROWS}).")
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="even:F offloads a share F of every layer, memory:F leaves a share F of the weights on the device, "
            "group:A/B/C offloads B of every A layers and copies C ahead; with +eager no CUDA graphs; cuda only "
            f"(default {_VARIANTS}).",
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"Layers of the reference stack; cuda only (default {_LAYERS}).", min=1),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds; each measures every variant.", min=1)] = 5,
    repeats: Annotated[int, typer.Option(metavar="N", help="Steps per variant and round.", min=1)] = 8,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append results to FILE, one JSON object per line.")
    ] = None,
) -> None:
    """Time a step with several offload policies, in turns, against the floor; check that results are bit-identical."""
    if out is not None:  # before minutes of measuring
        require_writable("--out", out)
    on_cpu = target_device(device).type == "cpu"
    if on_cpu:
        given = {"--rows": rows, "--variants": variants, "--layers": layers}
        refuse_idle(given, "with --device cpu, whose step is always the same; add --device cuda, or leave it out")
    row_counts = counts("--rows", _ROWS if rows is None else rows)
    from headrace.cli.bench_step import QWEN3_8B, run_cpu, run_cuda

    shape = replace(QWEN3_8B, num_layers=layers or _LAYERS)
    names = [*filter(None, (_VARIANTS if variants is None else variants).split(","))]
    broken, cases = [], 0
    # Each result at once: a run takes minutes, and an interrupt must not lose results.
    for row in run_cpu(rounds, repeats) if on_cpu else run_cuda(shape, names, row_counts, rounds, repeats):
        cases += 1
        broken += [] if row["bit_equal"] else [f"{row['case']} rows {row['rows']}"]
        typer.echo(
            f"{row['case']:<20} {row['rows']:>5} rows  floor {row['floor_ms']:9.2f}  median {row['ms']:9.2f} ms "
            f"(spread {row['spread_ms']:.2f}, {row['share_of_floor']:.3f} x floor)  "
            f"resident {row['resident_ms']:9.2f}  {row['bytes_moved'] / 1e9:.2f} GB  "
            f"{'same bits' if row['bit_equal'] else 'OTHER BITS'}"
        )
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    typer.echo(json.dumps({"bench": "step", "device": device, "cases": cases, "not_bit_equal": broken}))
    if broken:
        raise typer.Exit(1)
