"""``penstock bench``: measure what an offload costs here, next to what no schedule could beat."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from penstock.cli.console import stdout
from penstock.cli.values import (
    counts,
    numbers,
    refuse_idle,
    require_folder,
    require_known,
    require_writable,
    target_device,
    words,
)

__all__ = ["bench"]

_ROWS = "1,16,256,2048,8192"
_VARIANTS = "even:0.25,group:4/1/2,group:1/1/2"
_LAYERS = 36

bench = typer.Typer(
    no_args_is_help=True, help="Measure a step, a plan's predictions, or loading, against what no schedule could beat."
)


@bench.callback()
def _root() -> None:
    """Measure a step, a plan's predictions, or loading, against what no schedule could beat."""


@bench.command()
def step(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    rows: Annotated[
        str | None, typer.Option(help=f"rows per step, comma-separated; cuda only (default {_ROWS})")
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(
            help=f"comma-separated: even:F, memory:F, group:A/B/C, each with +eager, +tensors, +fresh; cuda only "
            f"(default {_VARIANTS})"
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help=f"layers of the reference stack; cuda only (default {_LAYERS})", min=1)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="a decode step of a transformers model instead: qwen3-8b or deepseek-v2-lite; cuda only"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="rounds in which all variants take turns", min=1)] = 5,
    repeats: Annotated[int, typer.Option(help="steps per variant and round", min=1)] = 8,
    out: Annotated[Path | None, typer.Option(help="append results here, one JSON object per line")] = None,
) -> None:
    """One step, offloaded in several ways and interleaved, against the floor; bits are checked."""
    _require_out(out)
    results = list(_shown(_run(device, rows, variants, layers, model, rounds, repeats), out))
    broken = [f"{row['case']} rows {row['rows']}" for row in results if not row["bit_equal"]]
    typer.echo(json.dumps({"bench": "step", "device": device, "cases": len(results), "not_bit_equal": broken}))
    if broken:
        raise typer.Exit(1)


@bench.command(name="plan")
def plan_step(
    model: Annotated[str, typer.Option(help="qwen3-8b or deepseek-v2-lite: a stack of that shape")] = "qwen3-8b",
    shares: Annotated[str, typer.Option(help="budgets as shares of the weights")] = "0.1,0.25,0.5,0.75",
    rivals: Annotated[str, typer.Option(help="group rules to compare with, GROUP/NUMBER/STEP")] = "",
    rows: Annotated[str, typer.Option(help="rows per step, comma-separated")] = "1,16,256,2048",
    rounds: Annotated[int, typer.Option(help="rounds in which all variants take turns", min=1)] = 3,
    repeats: Annotated[int, typer.Option(help="steps per variant and round", min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="append results here, one JSON object per line")] = None,
) -> None:
    """What the planner predicts against what is measured, and against settings made by hand; needs a GPU."""
    from penstock.bench.plan_step import run
    from penstock.transfer.probe import load, measure, save

    _require_out(out)
    asked, row_counts = numbers("--shares", shares), counts("--rows", rows)
    probe = load()
    if probe is None:
        probe = measure()
        save(probe)
    results = []
    for row in run(model, asked, words(rivals), row_counts, rounds, repeats, probe):
        results.append(row)
        typer.echo(
            f"{row['contest']:>6} {row['case']:<32} {row['rows']:>5} rows  predicted {row['predicted_ms']:9.2f}  "
            f"measured {row['ms']:9.2f} ms  error {row['error']:+7.1%}  memory "
            f"{(row['peak_device_bytes'] - row['planned_device_bytes']) / 2**20:+6.0f} MiB  "
            f"{'same bits' if row['bit_equal'] else 'OTHER BITS'}"
        )
        _keep(row, out)
    broken = [f"{row['contest']} {row['case']} rows {row['rows']}" for row in results if not row["bit_equal"]]
    errors = sorted(abs(row["error"]) for row in results)
    summary = {"bench": "plan", "cases": len(results), "not_bit_equal": broken}
    typer.echo(json.dumps({**summary, "median_error": errors[len(errors) // 2], "worst_error": errors[-1]}))
    if broken:
        raise typer.Exit(1)


@bench.command()
def load(
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default cuda where there is one)")] = None,
    layers: Annotated[int, typer.Option(help="layers of Qwen3-8B's shape in the checkpoint", min=2)] = 16,
    ways: Annotated[
        str,
        typer.Option(
            help="penstock, penstock-direct, penstock-buffered, penstock-disk, pin_memory, accelerate; "
            "comma-separated; default all"
        ),
    ] = "",
    repeats: Annotated[int, typer.Option(help="of everything, in another order each time", min=1)] = 1,
    plain_blocks: Annotated[str, typer.Option(help="requests of the plain direct reads, in MiB")] = "8",
    files: Annotated[str, typer.Option(help="cached, cold; comma-separated")] = "cached,cold",
    folder: Annotated[
        Path | None, typer.Option(help="where the checkpoint is written (default: temporary files)")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="append results here, one JSON object per line")] = None,
) -> None:
    """From a checkpoint on disk to the first step, against torch's and accelerate's ways; files cached and not."""
    from penstock.bench.load import WAYS, run, summary

    asked = words(ways) or list(WAYS)
    require_known("--ways", asked, WAYS)
    require_known("--files", words(files), ("cached", "cold"))
    states = [word == "cold" for word in words(files)]
    blocks = counts("--plain-blocks", plain_blocks, "sizes in MiB")
    target = str(target_device(device))
    _require_out(out)
    if folder is not None:
        require_folder("--folder", folder)
    results = []
    for row in run(folder, layers, asked, target, repeats=repeats, block_mib=blocks, states=states):
        results.append(row)
        rate = f"{row['gb_per_s']:6.2f} GB/s" if "gb_per_s" in row else ""
        step = f"first step after {row['first_step_s']:6.2f} s" if "first_step_s" in row else ""
        beyond = (row["rss_growth_bytes"] - row["offloaded_bytes"]) / 2**20 if "offloaded_bytes" in row else None
        memory = "" if beyond is None else f"resident memory - offloaded bytes {beyond:+8.0f} MiB"
        where = "cold" if row["cold"] else "cached"
        typer.echo(
            f"{where:<7} {row['case']:<25} {row['load_s']:7.2f} s  {rate:<12}  {step}  {memory}  {row.get('reads', '')}"
        )
        _keep(row, out)
    typer.echo("\n".join(["", *summary(results)]))
    broken = [row["case"] for row in results if not row.get("bit_equal", True)]
    typer.echo(json.dumps({"bench": "load", "cases": len(results), "not_bit_equal": broken}))
    if broken:
        raise typer.Exit(1)


def _require_out(out: Path | None) -> None:
    if out is not None:
        require_writable("--out", out)


def _keep(row: Mapping[str, Any], out: Path | None) -> None:
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _run(
    device: str,
    rows: str | None,
    variants: str | None,
    layers: int | None,
    model: str | None,
    rounds: int,
    repeats: int,
) -> Iterable[dict[str, Any]]:
    if target_device(device).type == "cpu":
        given = {"--rows": rows, "--variants": variants, "--layers": layers, "--model": model}
        refuse_idle(given, "with --device cpu, whose step is always the same; add --device cuda, or leave it out")
        from penstock.bench.cpu_step import run as run_cpu

        return run_cpu(rounds, repeats)
    row_counts, asked = counts("--rows", _ROWS if rows is None else rows), _VARIANTS if variants is None else variants
    if model is not None:
        refuse_idle({"--layers": layers}, "with --model, which has its own; leave one of the two out")
        from penstock.bench.real_step import run as run_real

        return run_real(model, words(asked), row_counts, rounds, repeats)
    from dataclasses import replace

    from penstock.bench.cuda_step import run as run_cuda
    from penstock.bench.shapes import QWEN3_8B

    shape = replace(QWEN3_8B, num_layers=_LAYERS if layers is None else layers)
    return run_cuda(shape, words(asked), row_counts, rounds, repeats)


def _shown(results: Iterable[dict[str, Any]], out: Path | None) -> Iterator[dict[str, Any]]:
    """Print each result as it comes, in groups of equal rows with the floor first, and keep it."""
    table: Table | None = None
    for row in results:
        if table is None:
            table = _table()
        table.add_row(*_cells(row))
        _keep(row, out)
        yield row
    if table is not None:
        stdout.print(table)


def _table() -> Table:
    table = Table(title="step (ms)")
    for heading in ("case", "rows", "floor", "median", "spread", "x floor", "resident", "GB moved", "link GB/s"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    table.add_column("peak - plan MiB", justify="right")
    table.add_column("same bits")
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    over = (row["peak_device_bytes"] - row["planned_device_bytes"]) / 2**20
    return [
        row["case"],
        str(row["rows"]),
        f"{row['floor_ms']:.2f}",
        f"{row['ms']:.2f}",
        f"{row['spread_ms']:.2f}",
        f"{row['ms'] / row['floor_ms']:.3f}",
        f"{row['resident_ms']:.2f}",
        f"{row['bytes_moved'] / 1e9:.2f}",
        f"{row['link_gb_per_s']:.2f}",
        f"{over:.0f}",
        "yes" if row["bit_equal"] else "NO",
    ]
