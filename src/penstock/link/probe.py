"""What this machine can do: the rates a plan is made from, measured once and kept.

Every figure is the median of a few timed runs over buffers far larger than caches. Rates are in bytes per second,
except ``matmul_flops_per_s``. The result is stored per machine (devices, CPU, torch) under the user's cache folder, so
that planning costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from penstock.store.disk import DiskOptions, File
from penstock.store.pinned import device_view, pinned_region

__all__ = ["Probe", "cache_path", "load", "measure", "save"]

MIB = 1 << 20
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Probe:
    """Measured rates of one machine.

    Attributes:
        machine: what was measured; a probe counts only where this is the same.
        h2d_bytes_per_s: pinned host to device, by bytes of one copy. Empty without a GPU, as the next four.
        uva_read_bytes_per_s: an elementwise kernel that reads pinned host memory in place.
        uva_gather_bytes_per_s: gathering rows in place, by bytes of a row.
        pin_bytes_per_s: mapping, touching and registering host memory.
        device_copy_bytes_per_s: device to device, bytes read plus bytes written.
        matmul_flops_per_s: an 8192-cubed bf16 product on the GPU.
        cpu_linear_bytes_per_s: weights read by ``F.linear`` with one row, float32, on the CPU.
        disk_read_bytes_per_s: reading a file past the page cache, with as many threads as cores.
        cached_read_bytes_per_s: the same out of the page cache.
    """

    machine: dict[str, str]
    h2d_bytes_per_s: dict[int, float] = field(default_factory=dict)
    uva_read_bytes_per_s: float | None = None
    uva_gather_bytes_per_s: dict[int, float] = field(default_factory=dict)
    pin_bytes_per_s: float | None = None
    device_copy_bytes_per_s: float | None = None
    matmul_flops_per_s: float | None = None
    cpu_linear_bytes_per_s: float = 0.0
    disk_read_bytes_per_s: float | None = None
    cached_read_bytes_per_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {"schema": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Probe:
        """The inverse of :meth:`to_json`; raises ``ValueError`` on another schema."""
        values = dict(data)
        if values.pop("schema", None) != SCHEMA_VERSION:
            raise ValueError(f"probe schema {data.get('schema')!r}, expected {SCHEMA_VERSION}")
        for name in ("h2d_bytes_per_s", "uva_gather_bytes_per_s"):
            values[name] = {int(size): rate for size, rate in values[name].items()}
        return cls(**values)


def describe_machine() -> dict[str, str]:
    """What a probe is valid for."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "host": platform.node(),
        "cpu": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "devices": ", ".join(devices) or "none",
        "torch": torch.__version__,
    }


def cache_path() -> Path:
    """Where the probe of this machine is kept (``XDG_CACHE_HOME``, else ``~/.cache``)."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(json.dumps(describe_machine(), sort_keys=True).encode()).hexdigest()[:16]
    return base / "penstock" / f"probe-{digest}.json"


def load() -> Probe | None:
    """The kept probe of this machine, or ``None`` if there is none that can be read."""
    try:
        probe = Probe.from_json(json.loads(cache_path().read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return probe if probe.machine == describe_machine() else None


def save(probe: Probe) -> Path:
    """Keep ``probe``; returns where."""
    path = cache_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(probe.to_json(), indent=1))
    return path


def measure(folder: Path | None = None, num_bytes: int = 1024 * MIB) -> Probe:
    """Measure everything; about half a minute. ``folder``: on the disk to read from (default: temporary files)."""
    rates: dict[str, Any] = {"cpu_linear_bytes_per_s": _cpu_linear(), **_disk(folder, num_bytes)}
    if torch.cuda.is_available():
        rates |= _cuda(torch.device("cuda", torch.cuda.current_device()), num_bytes)
    return Probe(describe_machine(), **rates)


def _median_s(run: Callable[[], object], repeats: int = 5) -> float:
    run()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _cpu_linear() -> float:
    weight = torch.randn(8192, 4096)
    x = torch.randn(1, 4096)
    return weight.numel() * 4 / _median_s(lambda: F.linear(x, weight))


def _disk(folder: Path | None, num_bytes: int) -> dict[str, float | None]:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        block = os.urandom(16 * MIB)
        for _ in range(0, num_bytes, len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        path = Path(file.name)
        return {
            "cached_read_bytes_per_s": _read_rate(path, num_bytes, DiskOptions()),
            "disk_read_bytes_per_s": _read_rate(path, num_bytes, DiskOptions(direct=True)),
        }


def _read_rate(path: Path, num_bytes: int, options: DiskOptions) -> float | None:
    try:
        source = File(path, options)
    except ValueError:  # no direct I/O on this file system
        return None
    piece = 8 * MIB
    into = memoryview(mmap.mmap(-1, num_bytes))
    threads = len(os.sched_getaffinity(0))

    def read(start: int) -> None:
        source.read(start, into[start : start + piece])

    with ThreadPoolExecutor(threads) as pool:
        seconds = _median_s(lambda: list(pool.map(read, range(0, num_bytes, piece))), 3)
    source.close()
    return num_bytes / seconds


def _cuda(device: torch.device, num_bytes: int) -> dict[str, Any]:
    start = time.perf_counter()
    host = pinned_region(num_bytes)
    pin_s = time.perf_counter() - start
    slot = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    other = torch.empty_like(slot)

    def timed(run: Callable[[], object]) -> float:
        def step() -> None:
            run()
            torch.cuda.synchronize(device)

        return _median_s(step)

    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    in_place = device_view(host, device)
    return {
        "pin_bytes_per_s": num_bytes / pin_s,
        "h2d_bytes_per_s": {
            size: _h2d(slot, host, size, timed) for size in (MIB // 4, MIB, 4 * MIB, 16 * MIB, 256 * MIB)
        },
        "uva_read_bytes_per_s": num_bytes / timed(lambda: torch.add(in_place, 1, out=slot)),
        "uva_gather_bytes_per_s": {row: _gather(in_place, row, timed) for row in (8192, MIB)},
        "device_copy_bytes_per_s": 2 * num_bytes / timed(lambda: other.copy_(slot)),
        "matmul_flops_per_s": 2 * 8192**3 / timed(lambda: a @ b),
    }


def _h2d(slot: torch.Tensor, host: torch.Tensor, size: int, timed: Callable[[Callable[[], object]], float]) -> float:
    count = max(1, min(host.numel(), 512 * MIB) // size)

    def run() -> None:
        for i in range(count):
            slot[i * size : (i + 1) * size].copy_(host[i * size : (i + 1) * size], non_blocking=True)

    return count * size / timed(run)


def _gather(in_place: torch.Tensor, row: int, timed: Callable[[Callable[[], object]], float]) -> float:
    rows = in_place.view(-1, row)
    chosen = torch.randperm(len(rows), device=in_place.device)[: len(rows) // 2]
    return len(chosen) * row / timed(lambda: rows[chosen])
