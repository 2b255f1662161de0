"""``headrace bench``: measure an offloaded step on this machine against the lower bound of any schedule."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from headrace.cli.arguments import refuse_idle, require_writable, target_device, with_flags
from headrace.config import count
from headrace.flags import counts, row

_ROWS = "1,16,256,2048,8192"
_VARIANTS = "even:0.25,group:4/1/2,group:1/1/2"
_LAYERS = 36
_VARIANTS_HELP = (
    "even:F offloads a share F of every layer, memory:F leaves a share F of the weights on the device, group:A/B/C "
    f"offloads B of every A layers and copies C ahead; with +eager no CUDA graphs; cuda only (default {_VARIANTS})."
)

bench = typer.Typer(no_args_is_help=True)


@bench.callback()  # without it, typer would make the only verb the group itself
def _root() -> None:
    """Measure an offloaded step against the floor, the lower bound for any schedule."""


@dataclass(frozen=True)
class StepOptions:
    """The flags of ``bench step``."""

    device: str = row("NAME", "cpu (default) or cuda.", off="cpu")
    rows: str | None = row("N,N,...", f"Rows per step; cuda only (default {_ROWS}).", counts)
    variants: str | None = row("NAME,...", _VARIANTS_HELP)
    layers: int | None = row("N", f"Layers of the reference stack; cuda only (default {_LAYERS}).", count)
    rounds: int = row("N", "Rounds; each measures every variant (default 5).", count, off=5)
    repeats: int = row("N", "Steps per variant and round (default 8).", count, off=8)
    out: Path | None = row("FILE", "Append results to FILE, one JSON object per line.", require_writable)


@bench.command()
@with_flags(StepOptions, ())
def step(*, options: StepOptions) -> None:
    """Time a step with several offload policies, in turns, against the floor; check that results are bit-identical."""
    device, rounds, repeats, out = options.device, options.rounds, options.repeats, options.out
    on_cpu = target_device(device).type == "cpu"
    if on_cpu:
        given = {"--rows": options.rows, "--variants": options.variants, "--layers": options.layers}
        refuse_idle(given, "with --device cpu, whose step is always the same; add --device cuda, or leave it out")
    rows = counts("--rows", options.rows or _ROWS)
    from headrace.cli.bench_step import QWEN3_8B, run_cpu, run_cuda

    shape = replace(QWEN3_8B, num_layers=options.layers or _LAYERS)
    names = [*filter(None, (_VARIANTS if options.variants is None else options.variants).split(","))]
    broken, cases = [], 0
    # Each found at once: a run takes minutes, and an interrupt must not lose results.
    for found in run_cpu(rounds, repeats) if on_cpu else run_cuda(shape, names, rows, rounds, repeats):
        cases += 1
        broken += [] if found["bit_equal"] else [f"{found['case']} rows {found['rows']}"]
        typer.echo(
            f"{found['case']:<20} {found['rows']:>5} rows  floor {found['floor_ms']:9.2f}  "
            f"median {found['ms']:9.2f} ms (spread {found['spread_ms']:.2f}, {found['share_of_floor']:.3f} x floor)  "
            f"resident {found['resident_ms']:9.2f}  {found['bytes_moved'] / 1e9:.2f} GB  "
            f"{'same bits' if found['bit_equal'] else 'OTHER BITS'}"
        )
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(found) + "\n")
    typer.echo(json.dumps({"bench": "step", "device": device, "cases": cases, "not_bit_equal": broken}))
    if broken:
        raise typer.Exit(1)
