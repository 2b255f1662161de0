"""Mode ``disk`` on a GPU: a step against the floor, from files past the page cache and out of it, eager and replayed.

    floor = max(resident step, bytes moved / link rate, bytes moved / rate of reading the files)

All rates are measured in the same run: the files as one plain thread per core reads them into memory of its own, over
and over the same few MiB, before and after each variant; the faster of the two counts, which makes the floor lower.

    python benchmarks/disk_gpu.py [--layers 10] [--rows 1] [--files cached] [--folder DISK]
        [--out FILE.jsonl]
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import headrace
from harness import LinkProbe, Timing, append, capture, event_times, read_plainly, writable_file, writable_folder
from headrace.api import start as start_offload
from headrace.checkpoint.weight_map import WeightMap
from headrace.cli.bench_step import QWEN3_8B, DecoderShape, Stack, build_stack
from headrace.config import ALL_MODEL_PARAMS
from headrace.planning.request import PlanRequest
from headrace.runtime.prepare import prepare as prepare_offload
from headrace.stores.file_reads import DiskOptions

SECONDS_PER_VARIANT = 6.0
MIN_STEPS, MAX_STEPS = 4, 40
READ_BYTES = 2 << 20


@dataclass(frozen=True)
class Ground:
    """What all variants are compared with."""

    path: Path
    shape: DecoderShape
    x: torch.Tensor
    expected: torch.Tensor
    resident_ms: float
    link_bytes_per_s: float


def read_rate(path: Path, options: DiskOptions) -> float:
    """Bytes per second of reading the file once."""
    return path.stat().st_size / read_plainly([path], bool(options.direct), READ_BYTES)


def step_times(step: Callable[[], object]) -> Timing:
    """By events, one after the other without a pause; two steps before them are not counted."""
    step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    once_s = time.perf_counter() - begin
    count = min(MAX_STEPS, max(MIN_STEPS, int(SECONDS_PER_VARIANT / once_s)))
    return Timing(tuple(event_times(step, count)))


def prepare(folder: Path, shape: DecoderShape, rows: int, device: torch.device) -> Ground:
    """Write the file; measure the resident step and the link."""
    stack = build_stack(shape, torch.bfloat16, device, device)
    x = torch.randn(rows, shape.hidden, device=device, generator=torch.Generator(device).manual_seed(rows))
    x = x.to(torch.bfloat16)
    stack(x)
    replay, out = capture(lambda: stack(x))
    resident_ms = step_times(replay).ms
    probe = LinkProbe(device)
    link = probe.num_bytes / (step_times(probe.copy).ms / 1e3)
    start = time.perf_counter()
    path = folder / "model.safetensors"
    save_file({name: tensor.cpu() for name, tensor in stack.state_dict().items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    print(f"wrote {path.stat().st_size / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return Ground(path, shape, x, out.clone(), resident_ms, link)


def measure(ground: Ground, options: DiskOptions, device: torch.device) -> Iterator[dict[str, Any]]:
    """An eager and a replayed row."""
    gc.collect()
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.device("meta"):
        stack = Stack(ground.shape, torch.bfloat16, "meta").eval().requires_grad_(False)
    policy = headrace.Prefetch(1, 1, 2, params=[ALL_MODEL_PARAMS], mode="disk")
    weights = WeightMap.open(ground.path)
    prepared = prepare_offload(PlanRequest(stack, policy, device=device, checkpoint=weights, disk=options))
    handle = start_offload(prepared)
    replay = out = None
    for how in ("eager", "graph"):
        if how == "graph":
            stack(ground.x)
            replay, out = capture(lambda: stack(ground.x))
        step = replay or (lambda: stack(ground.x))
        rates = [read_rate(ground.path, options)]
        start_stats, start = handle.stats(), time.perf_counter()
        timing = step_times(step)
        seconds = time.perf_counter() - start
        rates.append(read_rate(ground.path, options))
        step()
        found = out if out is not None else stack(ground.x)
        torch.cuda.synchronize()
        moved = handle.plan.moved_bytes
        floor_ms = 1e3 * max(ground.resident_ms / 1e3, moved / ground.link_bytes_per_s, moved / max(rates))
        staging, before = handle.stats().staging, start_stats.staging
        assert staging is not None
        assert before is not None
        yield {
            "case": f"disk, {'direct' if options.direct else 'page cache'}, {how}",
            "rows": ground.x.shape[0],
            "ms": timing.ms,
            "spread_ms": timing.spread_ms,
            "num_steps": len(timing.samples_ms),
            "floor_ms": floor_ms,
            "share_of_floor": timing.ms / floor_ms,
            "resident_ms": ground.resident_ms,
            "bytes_moved": moved,
            "link_gb_per_s": ground.link_bytes_per_s / 1e9,
            "disk_gb_per_s": [rate / 1e9 for rate in rates],
            "peak_device_bytes": torch.cuda.max_memory_allocated(device) - before_bytes,
            "planned_device_bytes": handle.plan.device_bytes,
            "host_bytes": handle.plan.ring_bytes,
            "read_gb_per_s": (staging.bytes_read - before.bytes_read) / seconds / 1e9,
            "stalls": staging.stalls - before.stalls,
            "stall_s": staging.stall_s - before.stall_s,
            "misses": staging.misses - before.misses,
            "bit_equal": bool(torch.equal(found, ground.expected)),
        }
    handle._session.prefetcher.close()  # type: ignore[union-attr]  # remove() would bring all weights back


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10, help="of 386 MB each")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--folder", type=writable_folder, help="on the disk to read from (default: temporary files)")
    parser.add_argument("--files", choices=("both", "direct", "cached"), default="both", help="how they are read")
    parser.add_argument("--repeats", type=int, default=1, help="turns of all ways to read")
    parser.add_argument("--out", type=writable_file, help="append results here, one JSON object per line")
    args = parser.parse_args()
    start = time.perf_counter()
    device = torch.device("cuda", 0)
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        ground = prepare(Path(folder), replace(QWEN3_8B, num_layers=args.layers), args.rows, device)
        ways = {"direct": DiskOptions(direct=True), "cached": DiskOptions()}
        chosen = list(ways.values()) if args.files == "both" else [ways[args.files]]
        for options in chosen * args.repeats:
            for row in measure(ground, options, device):
                rows.append(row)
                rates = ", ".join(f"{rate:.2f}" for rate in row["disk_gb_per_s"])
                print(
                    f"{row['case']:26} {row['ms']:9.1f} ms ± {row['spread_ms']:.1f}, floor {row['floor_ms']:.1f} ms: "
                    f"{row['share_of_floor']:.3f} x; files {rates} GB/s, link {row['link_gb_per_s']:.1f} GB/s, "
                    f"stalls {row['stalls']} ({row['stall_s']:.2f} s), misses {row['misses']}, "
                    f"bits {'equal' if row['bit_equal'] else 'DIFFER'}",
                    flush=True,
                )
    for row in rows:
        append(row, args.out)
    worst = max(row["share_of_floor"] for row in rows)
    print(f"worst share of the floor {worst:.3f} (bar: 1.10); {time.perf_counter() - start:.0f} s in all")
    if not all(row["bit_equal"] for row in rows):
        sys.exit("bits differ from the resident stack's")


if __name__ == "__main__":
    main()
