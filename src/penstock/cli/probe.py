"""``penstock probe``: measure this machine once; plans use the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from penstock.cli.console import stderr, stdout
from penstock.cli.values import require_folder

if TYPE_CHECKING:
    from penstock.transfer.machine_probe import Probe

__all__ = ["probe"]


def probe(
    folder: Annotated[Path | None, typer.Option(help="a folder on the disk that checkpoints are read from")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON and nothing else")] = False,
) -> None:
    """Measure the link, the device, the CPU and the disk of this machine; takes about half a minute."""
    if folder is not None:
        require_folder("--folder", folder)
    from penstock.transfer.machine_probe import measure, save

    if not as_json:
        stderr.print("measuring ...")
    result = measure(folder)
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    else:
        stdout.print(_table(result))
    path = save(result)  # last: what was measured is seen even if it cannot be kept
    if not as_json:
        stderr.print(f"kept in {path}", soft_wrap=True)


def _table(result: Probe) -> Table:
    table = Table(title="this machine")
    table.add_column("what")
    table.add_column("rate", justify="right")
    for what, rate in result.machine.items():
        table.add_row(what, rate)
    table.add_section()
    for what, rate in _rates(result.to_json()):
        table.add_row(what, rate)
    return table


_NAMES = {
    "h2d_bytes_per_s": "host to device, copies of {} KiB",
    "uva_read_bytes_per_s": "host memory read in place",
    "uva_gather_bytes_per_s": "host memory gathered in place, rows of {} KiB",
    "pin_bytes_per_s": "pinning host memory",
    "device_copy_bytes_per_s": "device copy (read + written)",
    "peer_bytes_per_s": "device to device, copies of {} KiB",
    "cached_read_bytes_per_s": "file read, page cache",
    "disk_read_bytes_per_s": "file read, direct",
}


def _rates(values: dict[str, object]) -> list[tuple[str, str]]:
    rows = []
    for key, name in _NAMES.items():
        value = values[key]
        by_size: dict[int, Any] = value if isinstance(value, dict) else {0: value}
        rows += [(name.format(int(size) // 1024), f"{rate / 1e9:.1f} GB/s") for size, rate in by_size.items() if rate]
    gathers: Any = values["gather_bytes_per_s"]
    rows += [(f"into each of {n} devices from all others at once", f"{r / 1e9:.1f} GB/s") for n, r in gathers.items()]
    if flops := values["matmul_flops_per_s"]:
        rows.append(("bf16 matrix product", f"{float(str(flops)) / 1e12:.0f} TFLOP/s"))
    products: Any = values["product_s_per_byte"]
    rows += [
        (f"matrix product, {n} row{'' if int(n) == 1 else 's'}, per GB of weight", f"{s * 1e12:.2f} ms")
        for n, s in products.items()
    ]
    if kernel_s := values["kernel_s"]:
        rows.append(("small kernel in a graph", f"{float(str(kernel_s)) * 1e6:.1f} us"))
    return rows
