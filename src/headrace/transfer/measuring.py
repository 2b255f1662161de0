"""Measures what this machine can do: a :class:`~headrace.transfer.machine_probe.Probe` of it.

Every value is the median of a few timed runs over buffers far larger than caches.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from headrace.errors import HeadraceError, OptionError, warn_user
from headrace.memory.pinned import device_view, pinned_region
from headrace.memory.system import num_cores
from headrace.plan.cached_experts import CachedLayer
from headrace.plan.rates import Curve, Rates
from headrace.ranks.group import this_host
from headrace.stores.expert_ranges import ExpertRanges
from headrace.stores.file_reads import DiskOptions, File
from headrace.transfer.machine_probe import (
    Probe,
    describe_machine,
    load_shared_link,
    planning_rates,
    save_shared_link,
)

MIB = 1 << 20
COPY_SIZES = (MIB // 4, MIB, 4 * MIB, 16 * MIB, 256 * MIB)

# Of an 8-billion-parameter decoder's MLP: 100 MB in bf16, so that six of them pass through any cache.
_PRODUCT_SHAPE = (12288, 4096)
_PRODUCT_WEIGHTS = 6
_PRODUCT_ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# A layer's experts of a fine-grained mixture: 738 MB.
_EXPERTS_SHAPE = (64, 2816, 2048)
_EXPERT_ROWS = (1, 4, 16, 64, 128, 256, 1024)
_CPU_PRODUCT_ROWS = (1, 16, 256)

# What a plan without a probe measures of the link: one large copy after another, for so long. By device, as a process
# has one figure for all its plans.
_LINK_BYTES, _LINK_S = 64 * MIB, 0.3
_links: dict[torch.device, float] = {}


def measure(folder: Path | None = None, num_bytes: int = 1024 * MIB) -> Probe:
    """Measure everything, over buffers of ``num_bytes``; about half a minute.

    ``folder``: on the disk to read from (default: temporary files).
    """
    try:
        rates: dict[str, Any] = dict(_disk(folder, num_bytes))
    except OSError as error:
        raise OptionError(
            f"folder {str(folder or tempfile.gettempdir())!r}: expected room for a file of {num_bytes} bytes to "
            f"measure with, found: {error.strerror}; choose a folder on another disk (--folder)"
        ) from error
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        rates |= _cuda(device, num_bytes)
        rates["fetch_bytes_per_s"] = _fetch_rate(device)
        rates |= peer_rates(device)  # last, when the other measurements have freed their memory
    else:
        weight = torch.randn(8192, 4096)
        rates["product_s_per_byte"] = {
            rows: median_s(partial(F.linear, _rows(rows, weight), weight)) / weight.nbytes for rows in _CPU_PRODUCT_ROWS
        }
    return Probe(describe_machine(), **rates)


def median_s(run: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of ``repeats`` calls, after one that does not count."""
    run()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _disk(folder: Path | None, num_bytes: int) -> dict[str, float | None]:
    with tempfile.TemporaryFile(dir=folder) as file:  # without a name, under which it would outlive a killed process
        block = os.urandom(16 * MIB)
        for _ in range(0, num_bytes, len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        path = Path(f"/proc/self/fd/{file.fileno()}")
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

    def read(start: int) -> None:
        source.read(start, into[start : start + piece])

    with ThreadPoolExecutor(num_cores()) as pool:
        seconds = median_s(lambda: list(pool.map(read, range(0, num_bytes, piece))), 3)
    source.close()
    return num_bytes / seconds


def _cuda(device: torch.device, num_bytes: int) -> dict[str, Any]:
    host = pinned_region(num_bytes)
    slot = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    other = torch.empty_like(slot)
    small = torch.zeros(2048, device=device)
    return {
        "h2d_bytes_per_s": {size: _copy_rate(slot, host, size, [device]) for size in COPY_SIZES},
        "device_copy_bytes_per_s": 2 * num_bytes / _timed(lambda: other.copy_(slot)),
        **_products(device, device_view(host, device)),
        "kernel_s": _timed(_graph(lambda: [small.add_(1.0) for _ in range(500)])) / 500,
    }


def _fetch_rate(device: torch.device) -> float | None:
    layer = CachedLayer("", num_experts=8, num_slots=4, storages={"": 8 * 32 * MIB})
    try:
        from headrace.experts.cache import ExpertCache

        ranges = ExpertRanges([layer], device)
    except (ImportError, OptionError):  # no Triton, or no range of both memories
        return None
    cache = ExpertCache([ranges.rows("")], layer.first_row + torch.arange(8, device=device), layer.num_slots)
    # Each step evicts three experts of the other; without a hit it would leave one expert where it is.
    steps = torch.tensor([[0, 1, 2, 3], [0, 4, 5, 6]], device=device)

    def fetch() -> None:
        for ids in steps:
            cache.admit(ids)

    run = _graph(fetch)
    before = cache.counts().fetched
    run()
    return (cache.counts().fetched - before) * layer.row_bytes("") / _timed(run)


def _timed(run: Callable[[], object]) -> float:
    """Median seconds of ``run`` until the current device, which is the one that is measured, has done it."""

    def step() -> None:
        run()
        torch.cuda.synchronize()

    return median_s(step)


def _graph(run: Callable[[], object]) -> Callable[[], None]:
    """``run`` as a captured graph: the time in which the host launches kernels does not count."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _products(device: torch.device, in_place: torch.Tensor) -> dict[str, dict[int, float]]:
    bf16 = torch.bfloat16
    dense = [torch.randn(_PRODUCT_SHAPE, device=device, dtype=bf16) for _ in range(_PRODUCT_WEIGHTS)]
    experts = torch.randn(_EXPERTS_SHAPE, device=device, dtype=bf16)
    weight, weights = _like(dense[0], in_place), _like(experts, in_place)
    # In place, a wide product and a narrow one are tiled differently; the mean of both.
    wide, narrow = (_by_rows(_PRODUCT_ROWS, [w], F.linear) for w in (weight, weight.view(_PRODUCT_SHAPE[::-1])))
    return {
        "product_s_per_byte": _by_rows(_PRODUCT_ROWS, dense, F.linear),
        "grouped_s_per_byte": _by_rows(_EXPERT_ROWS, [experts], _grouped),
        "in_place_s_per_byte": {rows: (wide[rows] + narrow[rows]) / 2 for rows in wide},
        "in_place_grouped_s_per_byte": _by_rows(_EXPERT_ROWS, [weights], _grouped),
    }


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _by_rows(counts: Sequence[int], weights: Sequence[torch.Tensor], product: Product) -> dict[int, float]:
    """Seconds per byte of ``weights``, by rows (per expert, if they have experts), in a graph."""
    num_bytes = sum(weight.nbytes for weight in weights)
    per_count = len(weights[0]) if weights[0].dim() == 3 else 1

    def seconds(count: int) -> float:
        x = _rows(count * per_count, weights[0])
        return _timed(_graph(lambda: [product(x, weight) for weight in weights]))

    return {count: seconds(count) / num_bytes for count in counts}


def _grouped(x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    each = len(x) // len(experts)
    ends = torch.arange(each, len(x) + 1, each, device=x.device, dtype=torch.int32)
    return F.grouped_mm(x, experts.mT, offs=ends)


def _like(weight: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    return memory[: weight.nbytes].view(weight.dtype).view(weight.shape)


def _rows(count: int, weight: torch.Tensor) -> torch.Tensor:
    return torch.randn(count, weight.shape[-1], device=weight.device, dtype=weight.dtype)


def _copy_rate(
    into: torch.Tensor, source: torch.Tensor, size: int, devices: Sequence[torch.device], repeats: int = 5
) -> float:
    """Bytes per second of copies of ``size`` bytes, one after the other; small ones are bound by their launches."""
    count = max(1, min(source.numel(), 512 * MIB) // size)

    def run() -> None:
        for i in range(count):
            piece = slice(i * size, (i + 1) * size)
            into[piece].copy_(source[piece], non_blocking=True)
        _wait_for(devices)

    return count * size / median_s(run, repeats)


# -- links of several processes at once --------------------------------------------------------------------------------

# A value (of JSON's types) of every rank, by rank, once all of them have given theirs.
Exchange = Callable[[Any], list[Any]]


def rates_among(device: torch.device, exchange: Exchange) -> Rates:
    """The rates for plans of ranks that copy to their devices at the same time. Collective.

    The links of a host share its memory, and often a switch, so each is measured while the others copy, too. The rates
    are saved by the number of ranks on the host: other rates at each start would make other plans, and code
    that was compiled for a plan is of no use with another. All ranks get the rates of the slowest, because a model
    that is split over ranks waits for it.

    Args:
        device: device of this rank.
        exchange: among all ranks that copy.
    """
    here = this_host()[0]
    hosts = exchange(here)
    num_ranks = hosts.count(here)
    if len(set(hosts)) == len(hosts):  # no link is shared
        return planning_rates(device, in_group=True)
    kept = load_shared_link(num_ranks) or {}
    links = exchange([kept.get(size) for size in COPY_SIZES])
    if any(None in link for link in links):
        measured = link_rates(device, lambda: exchange(None))
        links = exchange([measured[size] for size in COPY_SIZES])
        try:
            save_shared_link(num_ranks, _slowest(links[rank] for rank, host in enumerate(hosts) if host == here))
        except OptionError as error:
            warn_user(f"{error}; the next start measures again")
    return slowed(planning_rates(device, in_group=True), _slowest(links), num_ranks)


def _slowest(links: Iterable[list[float]]) -> dict[int, float]:
    return {size: min(rates) for size, rates in zip(COPY_SIZES, zip(*links, strict=True), strict=True)}


def slowed(alone: Rates, link: Mapping[int, float], num_ranks: int) -> Rates:
    """``alone`` with the copy rates of ``link``, by bytes of a copy; reads in place take longer by the same factor."""
    together = Curve.of(link)
    size = max(link)
    factor = max(1.0, alone.copy_bytes_per_s(size) / together(size))
    return replace(
        alone,
        machine=f"{alone.machine}, {num_ranks} links at once",
        copy_bytes_per_s=together,
        in_place_s_per_byte=_times(factor, alone.in_place_s_per_byte),
        in_place_grouped_s_per_byte=_times(factor, alone.in_place_grouped_s_per_byte),
    )


def _times(factor: float, curve: Curve | None) -> Curve | None:
    return curve and Curve(tuple((size, factor * value) for size, value in curve.points))


def link_rates(
    device: torch.device,
    meet: Callable[[], object] = lambda: None,
    sizes: Sequence[int] = COPY_SIZES,
    seconds: float = 0.2,
) -> dict[int, float]:
    """Bytes per second from host memory into ``device``, by bytes of one copy, while other processes copy, too.

    Args:
        device: a CPU copies within its memory.
        meet: returns when all processes have called it; before each size.
        sizes: ascending; the last is allocated on the host and on the device.
        seconds: for each size. Some processes begin and end later than others, which is why the median counts.
    """
    on_gpu = device.type == "cuda"
    host = pinned_region(sizes[-1], near=device) if on_gpu else torch.ones(sizes[-1], dtype=torch.uint8)
    into = torch.empty(sizes[-1], dtype=torch.uint8, device=device)
    devices = [device] if on_gpu else []
    rates = {}
    for size in sizes:
        meet()
        samples, end = [_copy_rate(into, host, size, devices, 1)], time.perf_counter() + seconds
        while time.perf_counter() < end:
            samples.append(_copy_rate(into, host, size, devices, 1))
        rates[size] = statistics.median(samples)
    del into
    if on_gpu:
        torch.cuda.empty_cache()
    return rates


def with_measured_link(rates: Rates, device: torch.device) -> Rates:
    """Nominal ``rates`` of ``device``, a GPU that is there, with its link as it is measured now. Raises nothing.

    Reads in place and fetches of experts take longer by the same factor. Without memory to measure with, the link stays
    nominal. Either way the machine of the result says so.
    """
    try:
        if device not in _links:
            with torch.cuda.device(device):  # a pinned buffer makes a context on the current one
                _links[device] = link_rates(device, sizes=(_LINK_BYTES,), seconds=_LINK_S)[_LINK_BYTES]
    except (HeadraceError, RuntimeError, MemoryError) as error:
        no_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        reason = "no memory for it" if no_memory else str(error).strip().splitlines()[0]
        return replace(rates, machine=f"{rates.machine} (its link could not be measured: {reason})")
    # Two digits: it varies by a per cent from start to start, and so would plans, and what was compiled for them.
    link = float(f"{_links[device]:.2g}")
    factor = link / rates.copy_bytes_per_s(_LINK_BYTES)
    return replace(
        rates,
        machine=f"{rates.machine} but for the link, measured at {link / 1e9:g} GB/s",
        copy_bytes_per_s=Curve(tuple((size, factor * rate) for size, rate in rates.copy_bytes_per_s.points)),
        in_place_s_per_byte=_times(1 / factor, rates.in_place_s_per_byte),
        in_place_grouped_s_per_byte=_times(1 / factor, rates.in_place_grouped_s_per_byte),
        fetch_bytes_per_s=rates.fetch_bytes_per_s and factor * rates.fetch_bytes_per_s,
    )


# -- among devices ---------------------------------------------------------------------------------------------------


def peer_rates(device: torch.device, sizes: Sequence[int] = COPY_SIZES) -> dict[str, dict[int, float]]:
    """How fast devices copy from one another: one pair alone, and all at once. Raises nothing.

    Both are measured from this one process, by the copy engines. A pair alone says little of several: of four H200 that
    gather at once each gets less than a pair alone does.

    ``sizes``: bytes of one copy, ascending; the last is also that of each copy when all devices gather.

    Returns:
        fields of a :class:`Probe`; none where ``device`` has no peers.
    """
    try:
        devices = mutual_peers(device)
        if len(devices) < 2:
            return {}
        into, source = (torch.empty(2 * sizes[-1], dtype=torch.uint8, device=each) for each in devices[:2])
        pair = {size: _copy_rate(into, source, size, devices[:2]) for size in sizes}
        del into, source
        every = {count: _gather(devices[:count], sizes[-1]) for count in range(2, len(devices) + 1)}
    except RuntimeError as error:  # no room on a peer that others use, a driver that refuses; plans do without
        reason = str(error).strip().splitlines()[0]
        warn_user(f"copies between devices could not be measured: {reason}")
        return {}
    return {"peer_bytes_per_s": pair, "gather_bytes_per_s": every}


def mutual_peers(device: torch.device) -> list[torch.device]:
    """``device``, and others of its kind such that each can address the memory of each."""
    can_access = torch.cuda.can_device_access_peer
    found = [device.index]
    for other in range(torch.cuda.device_count()):
        if other not in found and all(can_access(other, one) and can_access(one, other) for one in found):
            found.append(other)
    return [torch.device(device.type, index) for index in found]


def _gather(devices: Sequence[torch.device], size: int) -> float:
    """Bytes per second into each of ``devices`` while each copies ``size`` bytes from each of the others."""
    sources = [torch.empty(size, dtype=torch.uint8, device=device) for device in devices]
    copies = []
    for step in range(1, len(devices)):  # as the link of sharded_gpu does it: every device begins with its neighbour
        for index, device in enumerate(devices):
            source = sources[(index + step) % len(devices)]
            # torch lets the current streams of both devices wait for a copy between them, so copies side by side need
            # streams of their own on either.
            streams = torch.cuda.Stream(device), torch.cuda.Stream(source.device)
            copies.append((torch.empty_like(source, device=device), source, *streams))

    def run() -> None:
        for into, source, stream, source_stream in copies:
            with torch.cuda.stream(stream), torch.cuda.stream(source_stream):
                into.copy_(source, non_blocking=True)
        _wait_for(devices)

    return (len(devices) - 1) * size / median_s(run)


def _wait_for(devices: Sequence[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)
