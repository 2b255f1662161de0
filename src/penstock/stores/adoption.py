"""Which tensors in host memory can rest where they are, pinned in place, instead of being copied into a slab."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from penstock.plan.plan import SLAB_ALIGNMENT_BYTES

__all__ = ["MIN_BYTES", "can_adopt", "is_anonymous"]

# glibc never raises its threshold for mappings above this (DEFAULT_MMAP_THRESHOLD_MAX, mallopt(3)), so a larger tensor
# shares no page with anything else that may be pinned one day.
MIN_BYTES = 32 << 20
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+)")


def can_adopt(blob: torch.Tensor, *, read_in_place: bool, maps: str | None = None) -> bool:
    """Whether ``blob`` (uint8, 1-D, host) may be pinned where it lies.

    Args:
        blob: all its storage, but for one part in a hundred; the rest would be kept for nothing.
        read_in_place: by kernels, which need the alignment of a slab for the same bits; a copy does not.
        maps: ``/proc/self/maps``; default read now.
    """
    if not blob.is_cpu or blob.numel() < MIN_BYTES or blob.is_pinned():
        return False
    if blob.untyped_storage().nbytes() > 1.01 * blob.numel():
        return False
    if read_in_place and blob.data_ptr() % SLAB_ALIGNMENT_BYTES:
        return False
    text = Path("/proc/self/maps").read_text() if maps is None else maps
    return is_anonymous(text, blob.data_ptr(), blob.data_ptr() + blob.numel())


def is_anonymous(maps: str, start: int, end: int) -> bool:
    """Whether the addresses from ``start`` to ``end`` are private, writable and no file's (proc_pid_maps(5)).

    Pinning pages of a mapped file would copy each of them, one by one.
    """
    for line in maps.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        first, last = int(found[1], 16), int(found[2], 16)
        if first <= start < last:
            if not found[3].startswith("rw") or found[3][3] != "p" or found[4] != "0":
                return False
            start = last
        if start >= end:
            return True
    return False
