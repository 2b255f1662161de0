"""``penstock bench step`` on a CPU: a stack streamed from its checkpoint files, against the floor.

    floor = max(compute resident, bytes / read rate, (CPU s of compute + CPU s of reading) / cores)

The third term is there because on a CPU reading is work too: copying out of the page cache takes the cores that compute
wants. All terms are measured in the run: compute on the resident stack, reading with the same store and link and no
compute. ``accelerate.disk_offload`` of the same stack takes its turn with the others.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import penstock
from penstock.bench.measure import Timing, interleave, time_host
from penstock.bench.shapes import DecoderShape, Stack, build_stack
from penstock.checkpoint.safetensors_header import Checkpoint
from penstock.checkpoint.weight_map import WeightMap
from penstock.config import Prefetch
from penstock.memory.system import PeakMeter
from penstock.model.inventory import take_inventory
from penstock.plan import Plan, build_plan
from penstock.stores.disk import DiskOptions, DiskStore
from penstock.transfer.cpu_threads import ThreadLink

__all__ = ["run", "run_child"]

SHAPE = DecoderShape("cpu-reference", 8, 1536, 4096, 1536, 512)
DTYPE = torch.float32
POLICY = Prefetch(1, 1, 2, mode="disk")
ROWS_READ_BOUND, ROWS_COMPUTE_BOUND = 1, 256


@dataclass
class _Reader:
    """All units of a plan, read in order through the slots, with no compute in between."""

    plan: Plan
    store: DiskStore
    link: ThreadLink

    def __post_init__(self) -> None:
        self._loads = [self.store.load(unit) for unit in self.plan.units]
        self._slots = [self.link.allocate(num_bytes) for num_bytes in self.plan.slot_bytes]

    def step(self) -> None:
        """Read every unit once; as many are under way as there are slots."""
        pending: list[Any] = [None] * len(self._slots)
        for unit, load in zip(self.plan.units, self._loads, strict=True):
            if pending[unit.slot] is not None:
                self.link.wait(pending[unit.slot])
            pending[unit.slot] = self.link.copy(load, self._slots[unit.slot], ())
        for transfer in pending:
            self.link.wait(transfer)


def run(rounds: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield one result per case; see ``docs/design.md`` ("Evidence")."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder, torch.inference_mode(False), torch.no_grad():
        resident = build_stack(SHAPE, DTYPE, "cpu", "cpu")
        save_file(dict(resident.state_dict()), str(Path(folder) / "model.safetensors"))
        accelerated = _accelerate(folder)
        for disk in (DiskOptions(), DiskOptions(direct=True)):
            for rows in (ROWS_READ_BOUND, ROWS_COMPUTE_BOUND):
                yield from _measure(resident, accelerated, folder, disk, rows, rounds, repeats)


def _measure(
    resident: Stack,
    accelerated: torch.nn.Module | None,
    folder: str,
    disk: DiskOptions,
    rows: int,
    rounds: int,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    x = torch.randn(rows, SHAPE.hidden, dtype=DTYPE, generator=torch.Generator().manual_seed(rows))
    streamed = _on_meta()
    expected = resident(x)
    child = _child_growth(folder, disk, rows)
    with penstock.offload(streamed, POLICY, checkpoint=folder, disk=disk) as handle:
        reader = _open_reader(handle.plan, folder, disk)
        equal = all(torch.equal(streamed(x), expected) for _ in range(3))
        steps: dict[str, Callable[[], object]] = {
            "resident": lambda: resident(x),
            "read": reader.step,
            "penstock": lambda: streamed(x),
        }
        if accelerated is not None and not disk.direct:
            equal_accelerate = torch.equal(accelerated(x), expected)
            steps["accelerate"] = lambda: accelerated(x)
        metered = {name: _Metered(step) for name, step in steps.items()}
        timings = interleave(metered, rounds, repeats, time_host)
        cpu = {name: metered[name].cpu_ms for name in ("resident", "read")}
        equal = equal and torch.equal(streamed(x), expected)
        reader.link.close()
        bound = _floor(timings, cpu)
        case = f"{'direct' if disk.direct else 'page cache'}"
        common = {
            "rows": rows,
            "floor_ms": bound,
            "resident_ms": timings["resident"].ms,
            "read_ms": timings["read"].ms,
            "cpu_ms": cpu,
            "cores": _cores(),
            "bytes_moved": handle.plan.moved_bytes,
            "link_gb_per_s": handle.plan.moved_bytes / timings["read"].ms / 1e6,
            "planned_device_bytes": handle.plan.device_bytes,
        }
        ours = timings["penstock"]
        yield {
            "case": f"penstock, {case}",
            "ms": ours.ms,
            "spread_ms": ours.spread_ms,
            "bit_equal": bool(equal),
            **common,
            "peak_device_bytes": child,
            "accelerate_ratio": timings["accelerate"].ms / ours.ms if "accelerate" in timings else None,
        }
        if "accelerate" in timings:
            theirs = timings["accelerate"]
            row = {"case": f"accelerate, {case}", "ms": theirs.ms, "spread_ms": theirs.spread_ms}
            yield {**common, **row, "bit_equal": bool(equal_accelerate), "peak_device_bytes": handle.plan.device_bytes}


def _floor(timings: dict[str, Timing], cpu_ms: dict[str, float]) -> float:
    return max(timings["resident"].ms, timings["read"].ms, sum(cpu_ms.values()) / _cores())


def _cores() -> int:
    return len(os.sched_getaffinity(0))


class _Metered:
    """A step that notes the CPU time of all threads at each run, so that it is taken under the load of that moment."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        self._samples_ms: list[float] = []

    def __call__(self) -> None:
        before = time.process_time()
        self._step()
        self._samples_ms.append((time.process_time() - before) * 1e3)

    @property
    def cpu_ms(self) -> float:
        """Median."""
        return statistics.median(self._samples_ms)


def _on_meta() -> Stack:
    with torch.device("meta"):
        return Stack(SHAPE, DTYPE, "meta").eval().requires_grad_(False)


def _open_reader(plan: Plan, folder: str, disk: DiskOptions) -> _Reader:
    weights = WeightMap.identity(Checkpoint.open(folder))
    inventory = take_inventory(_on_meta())
    names = {entry.storage for unit in plan.units for entry in unit.entries}
    sources = {name: weights.source(inventory.by_name[name]) for name in names}
    return _Reader(plan, DiskStore(sources, disk), ThreadLink())


def _accelerate(folder: str) -> torch.nn.Module | None:
    try:
        from accelerate import disk_offload
    except ImportError:
        return None
    model = build_stack(SHAPE, DTYPE, "cpu", "cpu")
    offload_dir = Path(folder) / "accelerate"
    offload_dir.mkdir()
    return disk_offload(model, str(offload_dir), execution_device=torch.device("cpu"))  # type: ignore[no-any-return]


def _child_growth(folder: str, disk: DiskOptions, rows: int) -> int:
    """Growth of peak resident memory of a process that does nothing but stream, in bytes."""
    command = [sys.executable, "-m", "penstock.bench.cpu_step", folder, str(int(bool(disk.direct))), str(rows)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(json.loads(done.stdout.splitlines()[-1])["growth_bytes"])


@torch.no_grad()
def run_child(folder: str, direct: bool, rows: int) -> int:
    """Stream three steps; the growth of this process's peak resident memory, activations included, in bytes."""
    x = torch.randn(rows, SHAPE.hidden, dtype=DTYPE)
    tiny = build_stack(DecoderShape("tiny", 1, 64, 64, 64, 64), DTYPE, "cpu", "cpu")
    tiny(torch.randn(rows, 64))
    streamed = _on_meta()
    build_plan(take_inventory(streamed), POLICY)
    meter = PeakMeter()
    with penstock.offload(streamed, POLICY, checkpoint=folder, disk=DiskOptions(direct=direct)):
        for _ in range(3):
            streamed(x)
        return meter.growth_bytes()


if __name__ == "__main__":
    print(json.dumps({"growth_bytes": run_child(sys.argv[1], sys.argv[2] == "1", int(sys.argv[3]))}))
