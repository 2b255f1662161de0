"""How fast copies from host memory into a device are, alone and while others copy, too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from headrace.errors import HeadraceError
from headrace.memory.pinned import pinned_region
from headrace.plan.rates import Curve, Rates

MIB = 1 << 20
COPY_SIZES = (MIB // 4, MIB, 4 * MIB, 16 * MIB, 256 * MIB)

# What a plan without a probe measures of the link: one large copy after another, for so long. By device, as a process
# has one figure for all its plans.
_LINK_BYTES, _LINK_S = 64 * MIB, 0.3
_links: dict[torch.device, float] = {}


def median_s(run: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of ``repeats`` calls, after one that does not count."""
    run()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def wait_for(devices: Sequence[torch.device]) -> None:
    """Return when all work of ``devices`` is done."""
    for device in devices:
        torch.cuda.synchronize(device)


def copy_rate(
    into: torch.Tensor, source: torch.Tensor, size: int, devices: Sequence[torch.device], repeats: int = 5
) -> float:
    """Bytes per second of copies of ``size`` bytes, one after the other; small ones are bound by their launches."""
    count = max(1, min(source.numel(), 512 * MIB) // size)

    def run() -> None:
        for i in range(count):
            piece = slice(i * size, (i + 1) * size)
            into[piece].copy_(source[piece], non_blocking=True)
        wait_for(devices)

    return count * size / median_s(run, repeats)


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
        samples, end = [copy_rate(into, host, size, devices, 1)], time.perf_counter() + seconds
        while time.perf_counter() < end:
            samples.append(copy_rate(into, host, size, devices, 1))
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
