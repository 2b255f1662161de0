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
from headrace.plan.slabs import SLAB_ALIGNMENT_BYTES, slab_bytes
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
        runs = list[tuple[torch.Tensor, AlreadyPinned]]()
        for name, place in places.items():
            at = self._held[name]
            if runs and (run := _joined(*runs[-1], place, at)) is not None:
                runs[-1] = run
            else:
                runs.append((place, at))
        for place, at in runs:
            place.copy_(at.memory.buffer[at.start : at.start + at.num_bytes], non_blocking=True)
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
        sums = self._sums_by_kernel(buffers, key)
        for name, each in buffers.items():
            if name not in sums:
                sums[name] = torch.cat([_sums(piece, key) for piece in each.split(4 * _PART * _PARTS)])
        found = torch.cat([sums[name] for name in buffers]).cpu()
        return dict(zip(buffers, found.split([len(sums[name]) for name in buffers]), strict=True))

    def _sums_by_kernel(self, buffers: Mapping[str, torch.Tensor], key: torch.Tensor) -> dict[str, torch.Tensor]:
        """Sums of those of ``buffers`` that have whole words, by one launch; none where Triton compiles nothing."""
        whole = {name: each for name, each in buffers.items() if each.numel() and not _begins_or_ends_in_a_word(each)}
        if not whole or not self._has_kernel:
            return {}
        try:
            from headrace.lifetime.print_kernels import sums_on_gpu

            with torch.cuda.device(self._device):
                sums = sums_on_gpu([each.view(torch.int32) for each in whole.values()], key)
        except Exception as error:  # Triton finds no compiler of C, or does not know the device
            self._has_kernel = False
            warn_user(f"park() takes some ms more, because Triton cannot compile its kernel here: {error}")
            return {}
        return dict(zip(whole, sums.split([-(-each.numel() // (4 * _PART)) for each in whole.values()]), strict=True))


def _joined(
    place: torch.Tensor, at: AlreadyPinned, next_place: torch.Tensor, next_at: AlreadyPinned
) -> tuple[torch.Tensor, AlreadyPinned] | None:
    """One copy in place of two that follow each other on both sides, with the padding between them."""
    step, is_one = next_at.start - at.start, next_place.untyped_storage()._cdata == place.untyped_storage()._cdata
    padding = step - at.num_bytes
    if not is_one or next_at.memory is not at.memory or not 0 <= padding < SLAB_ALIGNMENT_BYTES:
        return None
    if next_place.storage_offset() - place.storage_offset() != step:
        return None
    num_bytes = step + next_at.num_bytes
    return place.as_strided((num_bytes,), (1,)), AlreadyPinned(at.memory, at.start, num_bytes)


def _begins_or_ends_in_a_word(buffer: torch.Tensor) -> bool:
    return any(each % 4 for each in (buffer.numel(), buffer.storage_offset(), buffer.data_ptr()))


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
