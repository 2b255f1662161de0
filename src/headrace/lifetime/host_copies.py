"""Host memory for the bytes of residents while an offload is parked: copied once, pinned for a GPU, and kept.

A resident may be written while it is on the device, by any operator, kernel or graph, and no counter of torch sees all
of these. So each park takes a fingerprint of every resident where it lies, at the rate of the device's own memory, and
copies what has another one than its copy. A fingerprint has 64 bits for each 256 KiB: a write of one word always
changes it, and one of more words misses it with a chance of 2^-32 at most.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headrace.errors import LimitError, warn_user
from headrace.formatting import format_size
from headrace.memory.system import Needs, read_limits
from headrace.plan.slabs import slab_bytes
from headrace.planning.request import has_triton
from headrace.stores.pinned_host import PinnedStore, registrar_for
from headrace.stores.store import AlreadyPinned

_PART = 1 << 16  # words, of 4 bytes, that have a sum of their own: so few that their key stays in a cache
_PARTS = 64  # that torch multiplies at a time, in memory of twice their size


class HostCopies:
    """Copies in host memory, by storage name."""

    def __init__(self, device: torch.device) -> None:
        """``device``: where the originals are."""
        self._device = device
        self._held: dict[str, AlreadyPinned] = {}
        self._prints: dict[str, torch.Tensor] = {}  # of what the copies hold
        self._has_kernel = device.type == "cuda" and has_triton(device)

    def bytes_of(self, name: str) -> torch.Tensor:
        """The copy of ``name``: uint8, 1-D, host."""
        at = self._held[name]
        return at.memory.buffer[at.start : at.start + at.num_bytes]

    def forget(self, name: str) -> None:
        """The copy of ``name``, if there is one, or its original is written."""
        self._prints.pop(name, None)

    def has(self, name: str) -> bool:
        """Whether there is memory for a copy of ``name``."""
        return name in self._held

    def held(self, name: str) -> AlreadyPinned:
        """The memory of the copy of ``name``."""
        return self._held[name]

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(each.num_bytes for each in self._held.values())

    def keep(self, held: Mapping[str, AlreadyPinned]) -> None:
        """Have copies of these storages alone, in this memory; those that have been elsewhere hold nothing yet."""
        same = {name for name, at in held.items() if self._held.get(name) == at}
        self._prints = {name: prints for name, prints in self._prints.items() if name in same}
        self._held = dict(held)

    def make_room(self, sizes: Mapping[str, int], what: str = "the residents of a parked offload") -> None:
        """Take host memory for storages of these ``sizes`` that have no copy; errors call them ``what``.

        Raises:
            LimitError, BudgetError: there is not enough.
            StateError: a graph is being captured.
        """
        new = {name: size for name, size in sizes.items() if name not in self._held}
        if not new:
            return
        num_bytes = slab_bytes(new.values())
        pinned_bytes = num_bytes if self._device.type == "cuda" else 0
        limits = read_limits(self._device, pinned_bytes=pinned_bytes)
        if shortage := limits.shortage(Needs(host_bytes=num_bytes, pinned_bytes=pinned_bytes)):
            limit, needed, available, fix = shortage
            raise LimitError(
                f"{what} need {format_size(needed)} of {limit}, and {format_size(available)} can be had: {fix}; "
                f"nothing was changed",
                limit,
                needed,
                available,
            )
        store = PinnedStore([], new, registrar_for(self._device))
        store.pin_now()
        self.keep({**self._held, **{name: store.held(name) for name in new}})

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
        key = _key(self._device)
        sums = {name: self._sums(each, key) for name, each in buffers.items()}
        found = torch.cat(list(sums.values())).cpu()
        return dict(zip(sums, found.split([len(each) for each in sums.values()]), strict=True))

    def _sums(self, buffer: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Sum, modulo 2^64, of the words of each part of ``buffer``, each times one of ``key``."""
        aligned = buffer.numel() % 4 == 0 and buffer.storage_offset() % 4 == 0 and buffer.data_ptr() % 4 == 0
        if self._has_kernel and aligned and buffer.numel():
            try:
                from headrace.lifetime.print_kernels import sums_on_gpu

                with torch.cuda.device(self._device):
                    return sums_on_gpu(buffer.view(torch.int32), key)
            except Exception as error:  # Triton finds no compiler of C, or does not know the device
                self._has_kernel = False
                warn_user(f"park() takes some ms more, because Triton cannot compile its kernel here: {error}")
        return torch.cat([_sums(piece, key) for piece in buffer.split(4 * _PART * _PARTS)])


def _key(device: torch.device) -> torch.Tensor:
    """Odd numbers of 64 bits, each of its position alone (splitmix64)."""
    key = torch.arange(1, _PART + 1, device=device).mul_(-0x61C8864680B583EB)
    for factor in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
        key.bitwise_xor_(key >> 30).mul_(factor)
    return key.bitwise_or_(1)


def _sums(piece: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    size = 4 * _PART if piece.numel() > 4 * _PART else 4
    if piece.numel() % size or piece.storage_offset() % 4 or piece.data_ptr() % 4:
        padded = torch.zeros(-(-piece.numel() // size) * size, dtype=torch.uint8, device=piece.device)
        padded[: piece.numel()].copy_(piece)
        piece = padded
    words = piece.view(torch.int32).view(-1, max(1, min(piece.numel() // 4, _PART)))
    # In 64 bits: two words that differ in their sign bits do not cancel out.
    return (words * key[: words.shape[1]]).sum(1)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
