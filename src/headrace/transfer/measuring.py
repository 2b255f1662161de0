"""Measures what this machine can do: a :class:`~headrace.transfer.machine_probe.Probe` of it.

Every value is the median of a few timed runs over buffers far larger than caches.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from headrace.errors import OptionError, StateError, warn_user
from headrace.memory.pinned import device_view, pinned_region
from headrace.memory.system import EXPERT_READERS, num_cores
from headrace.plan.cached_experts import CachedLayer
from headrace.plan.rates import Rates
from headrace.ranks.group import this_host
from headrace.stores.expert_ranges import ExpertRanges
from headrace.stores.file_reads import DiskOptions, File
from headrace.transfer.link_rates import COPY_SIZES, MIB, copy_rate, link_rates, median_s, slowed, wait_for
from headrace.transfer.machine_probe import (
    Probe,
    describe_machine,
    load_shared_link,
    planning_rates,
    save_shared_link,
)

# Of an 8-billion-parameter decoder's MLP: 100 MB in bf16, so that six of them pass through any cache.
_PRODUCT_SHAPE = (12288, 4096)
_PRODUCT_WEIGHTS = 6
_PRODUCT_ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# A layer's experts of a fine-grained mixture: 738 MB.
_EXPERTS_SHAPE = (64, 2816, 2048)
_EXPERT_ROWS = (1, 4, 16, 64, 128, 256, 1024)
_CPU_PRODUCT_ROWS = (1, 16, 256)
# Experts of Qwen3-30B-A3B and gpt-oss-120b: inputs and inner width.
_CPU_BYTES, _CPU_LAYERS = 512 * MIB, {"bf16": (2048, 768), "mxfp4": (2880, 2880)}
_CPU_FORMS = {"bf16": 2, "mxfp4": 17 / 32}  # bytes of a weight


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
            "expert_read_bytes_per_s": _read_rate(path, num_bytes, DiskOptions(direct=True), EXPERT_READERS),
        }


def _read_rate(path: Path, num_bytes: int, options: DiskOptions, num_threads: int | None = None) -> float | None:
    try:
        source = File(path, options)
    except ValueError:  # no direct I/O on this file system
        return None
    piece = 8 * MIB
    into = memoryview(mmap.mmap(-1, num_bytes))

    def read(start: int) -> None:
        source.read(start, into[start : start + piece])

    with ThreadPoolExecutor(num_threads or num_cores()) as pool:
        seconds = median_s(lambda: list(pool.map(read, range(0, num_bytes, piece))), 3)
    source.close()
    return num_bytes / seconds


def _cuda(device: torch.device, num_bytes: int) -> dict[str, Any]:
    host = pinned_region(num_bytes)
    slot = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    other = torch.empty_like(slot)
    small = torch.zeros(2048, device=device)
    return {
        "h2d_bytes_per_s": {size: copy_rate(slot, host, size, [device]) for size in COPY_SIZES},
        "device_copy_bytes_per_s": 2 * num_bytes / _timed(lambda: other.copy_(slot)),
        **_products(device, device_view(host, device)),
        "cpu_bytes_per_s": cpu_rates(lambda: slot.copy_(host, non_blocking=True)),
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


def cpu_rates(
    copies: Callable[[], object], num_bytes: int = _CPU_BYTES, layers: Mapping[str, tuple[int, int]] = _CPU_LAYERS
) -> dict[str, float]:
    """Bytes per second at which all cores but one compute two experts at a time, by format, beside ``copies``.

    Two, since a step misses few of a layer. Empty with one core or without a compiler.

    Args:
        copies: starts copies over the link, which the host does not wait for.
        num_bytes: of experts, more than caches hold.
        layers: inputs and inner width by format.
    """
    from headrace.experts.cpu.pool import Pool, run, spare_cores

    if not (cores := spare_cores()):
        return {}
    try:
        pool = Pool(cores)
    except StateError as error:
        warn_user(f"how fast the CPU computes experts was not measured: {error}")
        return {}
    found = {}
    for form, (inputs, inner) in layers.items():
        size = 3 * inner * inputs * _CPU_FORMS[form]  # of an expert
        count = int(num_bytes // size)
        first, second = _experts(form, count, 2 * inner, inputs), _experts(form, count, inputs, inner)
        x, weights, glu = torch.randn(1, inputs).bfloat16(), torch.ones(1, 2), (1.702, 7.0) if form == "mxfp4" else ()
        pairs = list(torch.arange(count // 2 * 2).view(-1, 1, 2))
        two = partial(run, x, weights=weights, gate_up=first, down=second, is_interleaved=bool(glu), glu=glu, pool=pool)
        found[form] = 2 * len(pairs) * size / median_s(partial(_each, copies, two, pairs))
    pool.stop()
    return found


def _each(copies: Callable[[], object], two: Callable[[torch.Tensor], object], pairs: Sequence[torch.Tensor]) -> None:
    copies()
    for ids in pairs:
        two(ids)


def _experts(form: str, count: int, outputs: int, inputs: int) -> Any:
    from headrace.experts.order import Projection

    if form == "bf16":
        weight = torch.empty(count, outputs, inputs, dtype=torch.bfloat16)
        return Projection(weight.copy_(torch.randn(outputs, inputs) / inputs**0.5))
    codes = torch.randint(0, 256, (count, outputs, inputs // 2), dtype=torch.uint8)
    return Projection(codes, torch.full((count, outputs, inputs // 32), 118, dtype=torch.uint8))


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
        pair = {size: copy_rate(into, source, size, devices[:2]) for size in sizes}
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
        wait_for(devices)

    return (len(devices) - 1) * size / median_s(run)
