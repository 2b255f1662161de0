"""How fast the devices of this machine copy from one another: one pair alone, and all at once.

Both are measured from this one process, by the copy engines. A pair alone says little of several: of four H200 that
gather at once each gets less than a pair alone does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from penstock.errors import warn_user

__all__ = ["COPY_SIZES", "mutual_peers", "peer_rates"]

MIB = 1 << 20
COPY_SIZES = (MIB // 4, MIB, 4 * MIB, 16 * MIB, 256 * MIB)

# Median seconds of a call that returns when all devices are done.
MedianS = Callable[[Callable[[], object]], float]


def peer_rates(
    device: torch.device, median_s: MedianS, sizes: Sequence[int] = COPY_SIZES
) -> dict[str, dict[int, float]]:
    """Fields of a :class:`penstock.transfer.machine_probe.Probe`; none where ``device`` has no peers. Raises nothing.

    ``sizes``: bytes of one copy, ascending; the last is also that of each copy when all devices gather.
    """
    try:
        devices = mutual_peers(device)
        if len(devices) < 2:
            return {}
        pair = {size: _pair(devices[0], devices[1], size, sizes[-1], median_s) for size in sizes}
        every = {count: _gather(devices[:count], sizes[-1], median_s) for count in range(2, len(devices) + 1)}
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


def _pair(device: torch.device, peer: torch.device, size: int, most: int, median_s: MedianS) -> float:
    """Bytes per second of copies of ``size`` bytes, one behind the other; small ones are bound by their launches."""
    count = 2 * most // size
    into, source = (torch.empty(2 * most, dtype=torch.uint8, device=each) for each in (device, peer))

    def run() -> None:
        for i in range(count):
            piece = slice(i * size, (i + 1) * size)
            into[piece].copy_(source[piece], non_blocking=True)
        _wait_for([device, peer])

    return count * size / median_s(run)


def _gather(devices: Sequence[torch.device], size: int, median_s: MedianS) -> float:
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
