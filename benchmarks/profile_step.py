"""What the device did during two steps: host-to-device copies under compute, and how long compute waited per unit.

Runs the reference step on a GPU (one captured graph, an even spread of 25 %), records it with torch's profiler, and
writes the intervals as JSON and as a picture.

    python benchmarks/profile_step.py OUT_FOLDER [ROWS]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.profiler import ProfilerActivity, profile

import headrace
from harness import capture
from headrace.bench.reference_step import QWEN3_8B, build_stack, parse_policy
from headrace.model.inventory import take_inventory


def intervals(run) -> dict[str, list[tuple[float, float]]]:
    """Start and end in ms of copies and kernels, from the device's own record."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        run()
        torch.cuda.synchronize()
    found: dict[str, list[tuple[float, float]]] = {"copy": [], "compute": []}
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA or "Memset" in event.name:
            continue
        kind = "copy" if "Memcpy HtoD" in event.name else "compute"
        found[kind].append((event.time_range.start / 1e3, event.time_range.end / 1e3))
    origin = min(start for rows in found.values() for start, _ in rows)
    return {kind: sorted((a - origin, b - origin) for a, b in rows) for kind, rows in found.items()}


def overlap_ms(found: dict[str, list[tuple[float, float]]]) -> float:
    """Time during which a copy and a kernel ran at once."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in found["copy"] for c, d in found["compute"])


def draw(found: dict[str, list[tuple[float, float]]], path: Path, title: str) -> None:
    figure, axes = plt.subplots(figsize=(11, 2.4))
    for row, kind in enumerate(("compute", "copy")):
        bars = [(a, b - a) for a, b in found[kind]]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=("tab:blue", "tab:orange")[row], linewidth=0)
    axes.set_yticks([0, 1], ["kernels", "copies to device"])
    axes.set_xlabel("ms")
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


@torch.no_grad()
def main() -> None:
    out, rows = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2048
    device = torch.device("cuda", 0)
    stack = build_stack(QWEN3_8B, torch.bfloat16, "cpu", device)
    num_bytes = take_inventory(stack).num_bytes
    policy = parse_policy("even:0.25", num_bytes, num_bytes // QWEN3_8B.num_layers)
    handle = headrace.offload(stack, policy, device=device, measure_stalls=True)
    x = torch.randn(rows, QWEN3_8B.hidden, device=device).to(torch.bfloat16)
    for _ in range(2):
        stack(x)
    replay, _ = capture(lambda: stack(x))

    def two_steps() -> None:
        replay()
        replay()

    two_steps()
    torch.cuda.synchronize()
    stalls_ms = [1e3 * (unit.last_stall_s or 0.0) for unit in handle.stats().units]
    found = intervals(two_steps)
    copying = sum(b - a for a, b in found["copy"])
    span = max(b for rows_ in found.values() for _, b in rows_)
    summary = {
        "rows": rows,
        "span_ms": span,
        "copies": len(found["copy"]),
        "copy_ms": copying,
        "compute_ms": sum(b - a for a, b in found["compute"]),
        "overlap_ms": overlap_ms(found),
        "stall_ms_per_unit": [round(value, 3) for value in stalls_ms],
    }
    print(json.dumps(summary))
    (out / f"profile-{rows}.json").write_text(json.dumps({**summary, **found}))
    draw(found, out / f"profile-{rows}.png", f"two replays, {rows} rows, 25 % of the weights in host memory")


if __name__ == "__main__":
    main()
