"""Two trees of the package beside one another: the reference step on a GPU, and what an eager forward costs the host.

    python3 benchmarks/overhead.py --trees before/src src --rounds 5 --out overhead.jsonl

Every round runs every tree in a process of its own, in turns, and every other round in reverse. One row per
measurement: ``reference`` is the step of 36 layers of Qwen3-8B's shape with the down projection of every layer
offloaded, by events; ``host`` is the time until an eager forward of 36 small layers returns, with an idle device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

ROWS = 256


def measure() -> list[dict[str, Any]]:
    """Of the tree that Python finds."""
    import torch

    import headrace

    try:
        from headrace.cli.bench_step import QWEN3_8B, DecoderShape, build_stack, time_cuda
    except ImportError:  # a tree from before 2026-11-25
        from headrace.bench.reference_step import QWEN3_8B, DecoderShape, build_stack, time_cuda

    found: list[dict[str, Any]] = []
    device = torch.device("cuda")
    with torch.no_grad():
        stack = build_stack(QWEN3_8B, torch.bfloat16, device, device)
        x = torch.randn(ROWS, QWEN3_8B.hidden, device=device).to(torch.bfloat16)
        expected = stack(x).clone()
        resident = statistics.median(time_cuda(partial(stack, x), 5))
        handle = headrace.offload(stack, headrace.Rules([("down_proj", "prefetch")]))
        for _ in range(2):
            equal = torch.equal(stack(x), expected)
        eager = statistics.median(time_cuda(partial(stack, x), 7))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = stack(x)
        graph.replay()
        graph.replay()
        replayed = statistics.median(time_cuda(graph.replay, 7))
        equal = equal and torch.equal(captured, expected)
        moved = handle.plan.moved_bytes
        for case, ms in (("reference eager", eager), ("reference graph", replayed), ("resident eager", resident)):
            found.append({"case": case, "ms": ms, "bytes_moved": moved, "bit_equal": equal})
        del stack, graph, captured
        torch.cuda.empty_cache()
        small = build_stack(DecoderShape("small", 36, 256, 1024, 256, 64), torch.bfloat16, device, device)
        x = torch.randn(4, 256, device=device).to(torch.bfloat16)
        expected = small(x).clone()
        alone = host_ms(small, x)
        handle = headrace.offload(small, headrace.Prefetch(1, 1, 2, params=["ALL_MODEL_PARAMS"]))
        small(x)
        ms = host_ms(small, x)
        equal = torch.equal(small(x), expected)
        tensors = sum(len(unit.entries) for unit in handle.plan.units)
        row = {"bytes_moved": handle.plan.moved_bytes, "bit_equal": equal, "units": 36, "tensors": tensors}
        found += [{"case": "host", "ms": ms, **row}, {"case": "host resident", "ms": alone, **row}]
    return found


def host_ms(model: Any, x: Any, repeats: int = 200) -> float:
    """Median time until a forward has been given to the device."""
    import torch

    samples = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(x)
        samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples)


def main() -> None:
    """Run the trees in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="+", type=Path, help="folders that hold the package")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.trees is None:
        print(json.dumps(measure()))
        return
    rows: list[dict[str, Any]] = []
    for turn in range(options.rounds):
        for tree in options.trees[:: -1 if turn % 2 else 1]:
            environment = {**os.environ, "PYTHONPATH": f"{tree}:{os.environ.get('PYTHONPATH', '')}"}
            done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            rows += [{**row, "tree": str(tree), "round": turn} for row in json.loads(done.stdout.splitlines()[-1])]
            if options.out is not None:
                options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for case in dict.fromkeys(row["case"] for row in rows):
        for tree in dict.fromkeys(row["tree"] for row in rows):
            values = [row["ms"] for row in rows if (row["case"], row["tree"]) == (case, tree)]
            equal = all(row["bit_equal"] for row in rows if row["tree"] == tree)
            spread = max(values) - min(values)
            print(f"{case:16} {tree:20} {statistics.median(values):9.3f} ms, spread {spread:.3f}, bits equal: {equal}")


if __name__ == "__main__":
    main()
