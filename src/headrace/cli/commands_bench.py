"""``headrace bench``: measure what an offload costs on this machine, beside the floor of any schedule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.arguments import refuse_idle, require_writable, target_device, with_verbose
from headrace.errors import OptionError
from headrace.flags import counts

__all__ = ["bench"]

_ROWS = "1,16,256,2048,8192"
_VARIANTS = "even:0.25,group:4/1/2,group:1/1/2"
_LAYERS = 36

bench = typer.Typer(no_args_is_help=True)


@bench.callback()  # without it, typer would take the only verb for the group itself
def _root() -> None:
    """Measure an offloaded step against the floor that no schedule can beat."""


@bench.command()
@with_verbose
def step(
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu or cuda")] = "cpu",
    rows: Annotated[
        str | None, typer.Option(metavar="N,N,...", help=f"rows per step, comma-separated; cuda only (default {_ROWS})")
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help=f"comma-separated: even:F, memory:F, group:A/B/C, each with +eager; cuda only (default {_VARIANTS})",
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"layers of the reference stack; cuda only (default {_LAYERS})", min=1),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="rounds in which all variants take turns", min=1)] = 5,
    repeats: Annotated[int, typer.Option(metavar="N", help="steps per variant and round", min=1)] = 8,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="append results here, one JSON object per line")
    ] = None,
) -> None:
    """One step, offloaded in several ways and interleaved, against the floor; bits are checked."""
    if out is not None:  # before minutes of measuring
        require_writable("--out", out)
    on_cpu = target_device(device).type == "cpu"
    if on_cpu:
        given = {"--rows": rows, "--variants": variants, "--layers": layers}
        refuse_idle(given, "with --device cpu, whose step is always the same; add --device cuda, or leave it out")
    row_counts = counts("--rows", _ROWS if rows is None else rows)
    from headrace.bench.reference_step import QWEN3_8B, describe, run_cpu, run_cuda

    shape = replace(QWEN3_8B, num_layers=layers or _LAYERS)
    names = [*filter(None, (_VARIANTS if variants is None else variants).split(","))]
    measured = run_cpu(rounds, repeats) if on_cpu else run_cuda(shape, names, row_counts, rounds, repeats)
    results: list[dict[str, Any]] = []
    for row in measured:
        # At once: a run takes minutes, and an interrupt must not lose what is measured.
        results.append(row)
        typer.echo(describe(row))
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    broken = [f"{row['case']} rows {row['rows']}" for row in results if not row["bit_equal"]]
    typer.echo(json.dumps({"bench": "step", "device": device, "cases": len(results), "not_bit_equal": broken}))
    if broken:
        raise typer.Exit(1)


@bench.command()
@with_verbose
def experts(
    device: Annotated[
        str, typer.Option(metavar="NAME", help="cuda; cpu: hits of the trace alone, nothing is timed")
    ] = "cpu",
    shape: Annotated[
        str, typer.Option(metavar="NAME", help="deepseek-v2-lite, qwen3-30b-a3b or gpt-oss-20b")
    ] = "deepseek-v2-lite",
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="replay what --expert-trace recorded (default: a seeded trace)")
    ] = None,
    hits: Annotated[
        str | None, typer.Option(metavar="SHARE,...", help="traces that hit these shares, 0 to 1, in place of it")
    ] = None,
    slots: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="experts of each layer on the device (default: half of them)")
    ] = None,
    rows: Annotated[int, typer.Option(metavar="N", help="sequences of a step", min=1)] = 1,
    layers: Annotated[
        int | None, typer.Option(metavar="N", help="layers (default the shape's, or the trace's)", min=1)
    ] = None,
    resident: Annotated[bool, typer.Option(help="also with all experts on the device")] = True,
    rounds: Annotated[int, typer.Option(metavar="N", help="rounds in which all cases take turns", min=1)] = 5,
    repeats: Annotated[int, typer.Option(metavar="N", help="steps per case and round", min=1)] = 40,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="append results here, one JSON object per line")
    ] = None,
) -> None:
    """Layers of experts that replay a trace: cached, in place and resident, against the floor; bits are checked."""
    if out is not None:
        require_writable("--out", out)
    if trace is not None and hits is not None:
        raise OptionError("--trace and --hits contradict each other: each is a trace; leave one out")
    shares = [] if hits is None else _shares(hits)
    target = target_device(device)
    if target.type == "cpu":
        given = {"--rows": rows if rows > 1 else None, "--out": out, "--no-resident": None if resident else True}
        refuse_idle(given, "with --device cpu, which times nothing; add --device cuda, or leave it out")
    from headrace.bench.experts_step import SHAPES, driven, run, seeded
    from headrace.plan.traces import load_trace, lru_hits

    if shape not in SHAPES:
        raise OptionError(f"--shape {shape!r}: expected one of {', '.join(SHAPES)}")
    sizes = replace(SHAPES[shape], num_layers=layers or SHAPES[shape].num_layers)
    num_tokens = rows * (rounds * repeats + 64)
    if trace is not None:
        recorded = load_trace(trace)
        num_layers = min(sizes.num_layers if layers else len(recorded.layers), len(recorded.layers))
        top_k = recorded.layers[0].shape[1]
        sizes = replace(sizes, num_layers=num_layers, num_experts=recorded.num_experts, top_k=top_k)
        traces = {str(trace): replace(recorded, layers=recorded.layers[:num_layers])}
    else:
        traces = {f"{share:.0%} hits": driven(sizes, num_tokens, share) for share in shares}
        traces = traces or {"seeded": seeded(sizes, num_tokens)}
    numbers = counts("--slots", slots) if slots is not None else [sizes.num_experts // 2]
    if target.type == "cpu":
        for name, each in traces.items():
            for number in numbers:
                found = sum(lru_hits(one, number, warm_up=len(one) // 5) for one in each.layers) / len(each.layers)
                typer.echo(f"{name}: {number} of {sizes.num_experts} experts on the device, {found:.1%} of choices hit")
        return
    results = []
    for row in run(sizes, traces, numbers, rows, rounds, repeats, target, resident):
        results.append(row)
        share = "" if row["hits"] is None else f"  {row['hits']:6.1%} hit"
        typer.echo(
            f"{row['trace']:<10} {row['case']:<10} {rows:>4} rows  {row['ms']:8.2f} ms  {row['tokens_per_s']:7.1f} "
            f"tokens/s  {row['over_floor']:6.3f} x floor{share}  {'same bits' if row['bit_equal'] else 'OTHER BITS'}"
        )
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps({"shape": shape, **row}) + "\n")
    if not all(row["bit_equal"] for row in results):
        raise typer.Exit(1)


def _shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share <= 1 for share in shares):
        raise OptionError(f"--hits {text!r}: expected shares from 0 to 1, such as 0.5,0.9")
    return shares
