"""How the rates of a :class:`penstock.transfer.probe.Probe` are measured on this machine.

Every figure is the median of a few timed runs over buffers far larger than caches.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from penstock.memory.pinned import device_view, pinned_region
from penstock.stores.disk import DiskOptions, File
from penstock.transfer.peer_rates import peer_rates

__all__ = ["measured_rates", "median_s"]

MIB = 1 << 20

# Of an 8-billion-parameter decoder's MLP: 100 MB in bf16, so that six of them pass through any cache.
_PRODUCT_SHAPE = (12288, 4096)
_PRODUCT_WEIGHTS = 6
_PRODUCT_ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# A layer's experts of a fine-grained mixture: 738 MB.
_EXPERTS_SHAPE = (64, 2816, 2048)
_EXPERT_ROWS = (1, 4, 16, 64, 128, 256, 1024)
_CPU_PRODUCT_ROWS = (1, 16, 256)


def measured_rates(folder: Path | None, num_bytes: int) -> dict[str, Any]:
    """All fields of a probe but its machine; ``folder``: on the disk to read from, ``num_bytes``: of each buffer."""
    rates: dict[str, Any] = {"product_s_per_byte": _cpu_products(), **_disk(folder, num_bytes)}
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        rates |= _cuda(device, num_bytes)
        rates |= peer_rates(device, median_s)  # last, when what else was measured has let go of its memory
    return rates


def median_s(run: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of ``repeats`` calls, behind one that does not count."""
    run()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _cpu_products() -> dict[int, float]:
    weight = torch.randn(8192, 4096)
    return {
        rows: median_s(partial(F.linear, _rows(rows, weight), weight)) / weight.nbytes for rows in _CPU_PRODUCT_ROWS
    }


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
        seconds = median_s(lambda: list(pool.map(read, range(0, num_bytes, piece))), 3)
    source.close()
    return num_bytes / seconds


def _cuda(device: torch.device, num_bytes: int) -> dict[str, Any]:
    start = time.perf_counter()
    host = pinned_region(num_bytes)
    pin_s = time.perf_counter() - start
    slot = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    other = torch.empty_like(slot)
    timed = partial(_timed, device)
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
        **_products(device, in_place, timed),
        "kernel_s": _kernel_s(device),
    }


Timed = Callable[[Callable[[], object]], float]


def _timed(device: torch.device, run: Callable[[], object]) -> float:
    def step() -> None:
        run()
        torch.cuda.synchronize(device)

    return median_s(step)


def _graph(device: torch.device, run: Callable[[], object]) -> Callable[[], None]:
    """``run`` as a captured graph: what the host takes to launch kernels does not count."""
    run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _products(device: torch.device, in_place: torch.Tensor, timed: Timed) -> dict[str, dict[int, float]]:
    bf16 = torch.bfloat16
    dense = [torch.randn(_PRODUCT_SHAPE, device=device, dtype=bf16) for _ in range(_PRODUCT_WEIGHTS)]
    experts = torch.randn(_EXPERTS_SHAPE, device=device, dtype=bf16)
    return {
        "product_s_per_byte": _by_rows(_PRODUCT_ROWS, dense, F.linear, timed),
        "grouped_s_per_byte": _by_rows(_EXPERT_ROWS, [experts], _grouped, timed),
        "in_place_s_per_byte": _both_ways(_like(dense[0], in_place), timed),
        "in_place_grouped_s_per_byte": _by_rows(_EXPERT_ROWS, [_like(experts, in_place)], _grouped, timed),
    }


def _both_ways(weight: torch.Tensor, timed: Timed) -> dict[int, float]:
    """In place, a wide product and a narrow one are tiled differently; the mean of both."""
    wide, narrow = (_by_rows(_PRODUCT_ROWS, [w], F.linear, timed) for w in (weight, weight.view(_PRODUCT_SHAPE[::-1])))
    return {rows: (wide[rows] + narrow[rows]) / 2 for rows in wide}


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _by_rows(
    counts: Sequence[int], weights: Sequence[torch.Tensor], product: Product, timed: Timed
) -> dict[int, float]:
    """Seconds per byte of ``weights``, by rows (per expert, if they have experts), in a graph."""
    num_bytes = sum(weight.nbytes for weight in weights)
    per_count = len(weights[0]) if weights[0].dim() == 3 else 1

    def seconds(count: int) -> float:
        x = _rows(count * per_count, weights[0])
        return timed(_graph(x.device, lambda: [product(x, weight) for weight in weights]))

    return {count: seconds(count) / num_bytes for count in counts}


def _grouped(x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    each = len(x) // len(experts)
    ends = torch.arange(each, len(x) + 1, each, device=x.device, dtype=torch.int32)
    return F.grouped_mm(x, experts.mT, offs=ends)


def _like(weight: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    return memory[: weight.nbytes].view(weight.dtype).view(weight.shape)


def _kernel_s(device: torch.device, count: int = 500) -> float:
    x = torch.zeros(2048, device=device)
    replay = _graph(device, lambda: [x.add_(1.0) for _ in range(count)])
    return _timed(device, replay) / count


def _rows(count: int, weight: torch.Tensor) -> torch.Tensor:
    return torch.randn(count, weight.shape[-1], device=weight.device, dtype=weight.dtype)


def _h2d(slot: torch.Tensor, host: torch.Tensor, size: int, timed: Timed) -> float:
    count = max(1, min(host.numel(), 512 * MIB) // size)

    def run() -> None:
        for i in range(count):
            slot[i * size : (i + 1) * size].copy_(host[i * size : (i + 1) * size], non_blocking=True)

    return count * size / timed(run)


def _gather(in_place: torch.Tensor, row: int, timed: Timed) -> float:
    rows = in_place.view(-1, row)
    chosen = torch.randperm(len(rows), device=in_place.device)[: len(rows) // 2]
    return len(chosen) * row / timed(lambda: rows[chosen])
