"""Host memory for the bytes of residents while an offload is parked: copied once, pinned for a GPU, and kept.

A resident may be written while it is on the device, by any operator, kernel or graph, and no counter of torch sees all
of these. So each park takes a fingerprint of every resident where it lies, at the rate of the device's own memory, and
copies what has another one than its copy. A fingerprint has 64 bits for each 16 MiB: a write of one word always
changes it, and one of more words misses it with a chance of 2^-32 at most.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headrace.errors import LimitError
from headrace.formatting import format_size
from headrace.memory.system import Needs, read_limits
from headrace.plan.slabs import slab_bytes
from headrace.stores.pinned_host import PinnedStore, registrar_for

_WORDS = 1 << 22  # of 4 bytes, that are summed up at a time


class HostCopies:
    """Copies in host memory, by storage name."""

    def __init__(self, device: torch.device) -> None:
        """``device``: where the originals are."""
        self._device = device
        self._stores: list[PinnedStore] = []
        self._buffers: dict[str, torch.Tensor] = {}
        self._prints: dict[str, torch.Tensor] = {}  # of what the copies hold

    def bytes_of(self, name: str) -> torch.Tensor:
        """The copy of ``name``: uint8, 1-D, host."""
        return self._buffers[name]

    def forget(self, name: str) -> None:
        """The copy of ``name``, if there is one, or its original is written."""
        self._prints.pop(name, None)

    def make_room(self, sizes: Mapping[str, int]) -> None:
        """Take host memory for storages of these ``sizes`` that have no copy.

        Raises:
            LimitError, BudgetError: there is not enough.
            StateError: a graph is being captured.
        """
        new = {name: size for name, size in sizes.items() if name not in self._buffers}
        if not new:
            return
        num_bytes = slab_bytes(new.values())
        pinned_bytes = num_bytes if self._device.type == "cuda" else 0
        limits = read_limits(self._device, pinned_bytes=pinned_bytes)
        if shortage := limits.shortage(Needs(host_bytes=num_bytes, pinned_bytes=pinned_bytes)):
            limit, needed, available, fix = shortage
            raise LimitError(
                f"the residents need {format_size(needed)} of {limit} while the offload is parked, and "
                f"{format_size(available)} can be had: {fix}; nothing was changed",
                limit,
                needed,
                available,
            )
        store = PinnedStore([], new, registrar_for(self._device))
        store.pin_now()
        self._stores.append(store)
        self._buffers |= {name: store.in_place(name) for name in new}

    def update(self, current: Mapping[str, torch.Tensor]) -> int:
        """Copy what has no copy, or another one than it has ``current`` bytes (uint8, 1-D); returns bytes copied."""
        self.make_room({name: each.numel() for name, each in current.items()})
        found = self._fingerprints(current)
        stale = [n for n in current if n not in self._prints or not torch.equal(self._prints[n], found[n])]
        for name in stale:
            self._prints.pop(name, None)  # an interrupt may leave half of it
            self.bytes_of(name).copy_(current[name], non_blocking=True)
        _synchronize(self._device)
        self._prints |= {name: found[name] for name in stale}
        return sum(current[name].numel() for name in stale)

    def fill(self, places: Mapping[str, torch.Tensor]) -> int:
        """Begin to copy to ``places`` (uint8, 1-D, device), until :meth:`finish`; returns bytes copied."""
        for name, place in places.items():
            place.copy_(self.bytes_of(name), non_blocking=True)
        return sum(place.numel() for place in places.values())

    def finish(self, places: Mapping[str, torch.Tensor]) -> None:
        """Return when ``places`` are filled."""
        self._prints |= self._fingerprints({name: place for name, place in places.items() if name not in self._prints})
        _synchronize(self._device)

    def _fingerprints(self, buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Fingerprints, on the host; the device is waited for once."""
        if not buffers:
            return {}
        key = _key(min(_WORDS, -(-max(each.numel() for each in buffers.values()) // 4)), self._device)
        sums = {name: [_sum(part, key) for part in each.split(4 * _WORDS)] for name, each in buffers.items()}
        found = torch.stack([each for parts in sums.values() for each in parts]).cpu()
        return dict(zip(sums, found.split([len(parts) for parts in sums.values()]), strict=True))


def _key(num_words: int, device: torch.device) -> torch.Tensor:
    """Odd numbers of 64 bits, each of its position alone (splitmix64)."""
    key = torch.arange(1, num_words + 1, device=device).mul_(-0x61C8864680B583EB)
    for factor in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
        key.bitwise_xor_(key >> 30).mul_(factor)
    return key.bitwise_or_(1)


def _sum(part: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Sum, modulo 2^64, of the words of ``part``, each times one of ``key``."""
    if part.numel() % 4 or part.storage_offset() % 4 or part.data_ptr() % 4:
        padded = torch.zeros(-(-part.numel() // 4) * 4, dtype=torch.uint8, device=part.device)
        padded[: part.numel()].copy_(part)
        part = padded
    words = part.view(torch.int32)
    return (words * key[: len(words)]).sum()  # in 64 bits: two words that differ in their sign bits do not cancel out


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
