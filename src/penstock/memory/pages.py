"""Pages of ordinary host memory: mapped at their exact size and touched by several threads.

The kernel zeroes a page in the thread that touches it first, about 3 GB/s per thread, so touching is what has to be
spread. ``madvise(MADV_POPULATE_WRITE)`` (Linux 5.14, madvise(2)) touches a whole stretch in one call and, called
through ctypes, holds no interpreter lock.
"""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import numpy as np
import torch

from penstock.errors import BudgetError
from penstock.memory import libc
from penstock.memory.mapping import HUGE_PAGE_BYTES, collapse

__all__ = [
    "TOUCH_BYTES",
    "collapse_parallel",
    "map_pages",
    "pack",
    "pieces",
    "populate",
    "populate_parallel",
    "whole_pages",
]

# Large enough that a call costs nothing beside the zeroing, small enough that the threads end together.
TOUCH_BYTES = 32 << 20

_MADV_POPULATE_WRITE = 23  # <linux/mman.h>; the mmap module of Python 3.12 does not have it yet


def whole_pages(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


_Map = TypeVar("_Map", bound=mmap.mmap)


def map_pages(num_bytes: int, *, huge: bool = True, kind: type[_Map] = mmap.mmap) -> _Map:  # type: ignore[assignment]
    """A private anonymous mapping, untouched: it takes address space and no memory yet.

    ``huge``: ask for huge pages, where the system offers them. The kernel uses them only for whole aligned 2 MiB, so
    the size stays exact.

    A forked child does not get the mapping: the kernel would have to copy every pinned page at the fork itself.
    """
    # The mmap module's default is a shared mapping: shared memory, with other rules for huge pages and slower to touch.
    mapping = kind(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = [mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE] if huge else [mmap.MADV_DONTFORK]
    for value in advice:
        with suppress(OSError):  # a kernel built without it
            mapping.madvise(value)
    return mapping


def populate(blob: torch.Tensor) -> None:
    """Make every page that ``blob`` (uint8, 1-D, host) covers real, in the calling thread; keeps what is there.

    Raises:
        BudgetError: the system has no memory for it.
    """
    if blob.numel() == 0:
        return
    start = blob.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = whole_pages(blob.data_ptr() + blob.numel())
    error = libc.madvise(start, end - start, _MADV_POPULATE_WRITE)
    if error == 0:
        return
    if error == errno.ENOMEM:
        raise BudgetError(
            f"the system has no memory for another {blob.numel()} bytes of offloaded weights; free host memory, or "
            f"offload less",
            blob.numel(),
        )
    _touch(blob)  # an older kernel


def _touch(blob: torch.Tensor) -> None:
    """Write one byte of every page back to itself."""
    pages = blob.numpy()[:: mmap.PAGESIZE]
    np.bitwise_or(pages, np.uint8(0), out=pages)
    blob.numpy()[-1] |= 0  # the last page may begin behind the last stride


def populate_parallel(blob: torch.Tensor, num_threads: int, piece_bytes: int = TOUCH_BYTES) -> None:
    """:func:`populate` by ``num_threads`` threads, ``piece_bytes`` at a time."""
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in pool.map(populate, (blob[start:end] for start, end in pieces(blob.numel(), piece_bytes))):
            pass


def collapse_parallel(blob: torch.Tensor, num_threads: int) -> None:
    """Touch shared memory (uint8, 1-D, host) by huge pages, where the kernel can; whoever fills it does the rest.

    It is given up at the first refusal: a kernel that has no huge page left looks for one a long time, every time.
    """
    memory = blob.numpy()[-blob.data_ptr() % HUGE_PAGE_BYTES :]
    refused = threading.Event()

    def touch(start: int, end: int) -> None:
        if not refused.is_set() and not collapse(memory[start:end]):
            refused.set()

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(lambda ends: touch(*ends), pieces(memory.size, TOUCH_BYTES)))


def pieces(num_bytes: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Start and end of consecutive pieces of at most ``piece_bytes``."""
    for start in range(0, num_bytes, piece_bytes):
        yield start, min(start + piece_bytes, num_bytes)


def pack(sizes: Sequence[int], limit: int) -> list[range]:
    """Cut a row of sizes into runs of at most ``limit`` together, in order; a larger one has a run of its own."""
    runs, start, filled = [], 0, 0
    for index, size in enumerate(sizes):
        if index > start and filled + size > limit:
            runs.append(range(start, index))
            start, filled = index, 0
        filled += size
    return [*runs, range(start, len(sizes))] if sizes else []
