"""What every script here shares: :mod:`headrace.cli.bench_step`'s protocol, types of arguments, rows, the end.

A script prints the floor, the median, the spread and the share of the floor, checks the values it times, appends one
JSON object per result to ``--out``, and ends with one line of JSON and exit code 1 if bits differ.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from headrace.cli.bench_step import LinkProbe, Timing, capture, event_times, interleave, time_cuda, time_host
from headrace.memory.system import num_cores

__all__ = [
    "LinkProbe",
    "Timing",
    "append",
    "capture",
    "counts",
    "event_times",
    "finish",
    "interleave",
    "kept",
    "link_bytes_per_s",
    "numbers",
    "parser_of",
    "print_step",
    "read_plainly",
    "time_cuda",
    "time_host",
    "words_of",
    "writable_file",
    "writable_folder",
]

_Row = TypeVar("_Row", bound=Mapping[str, Any])


def parser_of(
    description: str | None, *, rounds: int | None = None, repeats: int | None = None
) -> argparse.ArgumentParser:
    """A parser with ``--out``, and with ``--rounds`` and ``--repeats`` where they have a default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="rounds in which all variants take turns")
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help="of each variant, per round if there are any")
    parser.add_argument("--out", type=writable_file, help="append results here, one JSON object per line")
    return parser


def counts(text: str) -> list[int]:
    """Whole numbers from 1 on, separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"expected whole numbers, each at least 1, such as 1,16,256, found {text!r}")
    return [int(part) for part in parts]


def numbers(text: str) -> list[float]:
    """Numbers above zero, separated by commas; an empty text is none."""
    try:
        found = [float(part) for part in text.split(",") if part]
    except ValueError:
        found = [0.0]
    if min(found, default=1.0) <= 0:
        raise argparse.ArgumentTypeError(f"expected numbers above 0, separated by commas, found {text!r}")
    return found


def words_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Some of ``known``, separated by commas."""

    def parse(text: str) -> list[str]:
        found = [word for word in text.split(",") if word]
        if unknown := [word for word in found if word not in known]:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, found {unknown[0]!r}")
        return found

    return parse


def writable_file(text: str) -> Path:
    """A file that can be written, found out before hours of work go into it."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"expected a file that can be written, in a folder that exists, found {text!r}"
        )
    return path


def writable_folder(text: str) -> Path:
    """A folder that files can be made in."""
    if not Path(text).is_dir() or not os.access(text, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a folder that can be written to, found {text!r}")
    return Path(text)


def link_bytes_per_s(device: torch.device, repeats: int) -> float:
    """Bytes per second of a large copy to ``device``; on a CPU from memory to memory."""
    if device.type == "cuda":
        probe = LinkProbe(device)
        return probe.num_bytes / Timing(tuple(time_cuda(probe.copy, repeats))).ms * 1e3
    source, target = (torch.ones(64 << 20, dtype=torch.uint8) for _ in range(2))
    return source.numel() / Timing(tuple(time_host(lambda: target.copy_(source), repeats))).ms * 1e3


def read_plainly(files: Sequence[Path], direct: bool, block_bytes: int) -> float:
    """Seconds to read all of ``files``, ``block_bytes`` at a time, without headrace: the limit of a disk or page cache.

    One thread per core reads the files front to back, into touched memory.

    Raises:
        OSError: no direct reads on this file system.
    """
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    descriptors = [os.open(file, flags) for file in files]
    sizes = [file.stat().st_size for file in files]
    left = iter([(fd, at) for fd, size in zip(descriptors, sizes, strict=True) for at in range(0, size, block_bytes)])
    buffers = [mmap.mmap(-1, block_bytes) for _ in range(num_cores())]
    for buffer in buffers:
        buffer[:: mmap.PAGESIZE] = bytes(len(buffer) // mmap.PAGESIZE)
    lock = threading.Lock()

    def read(buffer: mmap.mmap) -> int:
        num_bytes = 0
        while True:
            with lock:
                piece = next(left, None)
            if piece is None:
                return num_bytes
            num_bytes += os.preadv(piece[0], [buffer], piece[1])  # Linux reads a local file to the end of the request

    begin = time.perf_counter()
    with ThreadPoolExecutor(len(buffers)) as pool:
        found = sum(pool.map(read, buffers))
    seconds = time.perf_counter() - begin
    for descriptor in descriptors:
        os.close(descriptor)
    if found != sum(sizes):
        raise OSError(f"expected {sum(sizes)} bytes in {len(files)} files, read {found}")
    return seconds


def append(row: Mapping[str, Any], out: Path | None) -> None:
    """Keep one result."""
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def kept(rows: Iterable[_Row], describe: Callable[[_Row], str], out: Path | None) -> Iterator[_Row]:
    """Each of ``rows`` once it is kept, and a line about it printed."""
    for row in rows:
        append(row, out)
        print(describe(row), flush=True)
        yield row


def print_step(row: Mapping[str, Any]) -> None:
    """One line about a step."""
    over_mib = (row["peak_device_bytes"] - row["planned_device_bytes"]) / 2**20
    print(
        f"{row['case']:<28} {row['rows']:>5} rows  floor {row['floor_ms']:9.2f}  median {row['ms']:9.2f} ms "
        f"(spread {row['spread_ms']:.2f}, {row['ms'] / row['floor_ms']:.3f} x floor)  "
        f"resident {row['resident_ms']:9.2f}  {row['bytes_moved'] / 1e9:.2f} GB at {row['link_gb_per_s']:.1f} GB/s  "
        f"peak - plan {over_mib:+.0f} MiB  {'same bits' if row['bit_equal'] else 'OTHER BITS'}",
        flush=True,
    )


def finish(name: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Print the last line of JSON; exit code 1 if the bits of a result differ."""
    broken = [f"{row['case']} rows {row.get('rows', '')}" for row in rows if not row.get("bit_equal", True)]
    print(json.dumps({"bench": name, "cases": len(rows), "not_bit_equal": broken, **more}))
    if broken:
        sys.exit(1)
