"""How much of a file is in the page cache, asked without reading it.

``cachestat`` (Linux 6.5) answers in one call. Before it there was ``mincore`` on a mapping, which knows the same. Who
neither owns a file nor may write it is not to learn what others read: ``mincore`` calls all of it resident to them
(Linux 5.2), and newer kernels refuse ``cachestat``. Such files, model folders of several users say, tell nothing.
Reading with ``RWF_NOWAIT`` would tell as much, but starts to read ahead.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Literal

import numpy as np

from penstock.memory import libc

__all__ = ["Teller", "cached_bytes", "teller_for"]

Teller = Literal["cachestat", "mincore"]

_CACHESTAT = 451  # the same on every architecture


def teller_for(fd: int) -> Teller | None:
    """What can be asked about ``fd`` here; ``None``: nothing can."""
    if _by_cachestat(fd, 0, mmap.PAGESIZE) is not None:
        return "cachestat"
    return "mincore" if _is_told(fd) and _by_mincore(fd, 0, mmap.PAGESIZE) is not None else None


def cached_bytes(fd: int, offset: int, num_bytes: int, teller: Teller) -> int | None:
    """Bytes of whole pages of a stretch of ``fd`` that are in the page cache; ``None`` if ``teller`` fails."""
    ask = _by_cachestat if teller == "cachestat" else _by_mincore
    return ask(fd, offset, num_bytes)


def _is_told(fd: int) -> bool:
    """Whether the kernel tells this user the truth about ``fd``."""
    return os.fstat(fd).st_uid == os.geteuid() or os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)


def _by_cachestat(fd: int, offset: int, num_bytes: int) -> int | None:
    stretch = (ctypes.c_uint64 * 2)(offset, num_bytes)
    counts = (ctypes.c_uint64 * 5)()  # the first: pages in the cache
    if libc.keeping_the_lock.syscall(_CACHESTAT, fd, stretch, counts, 0):
        return None
    return int(counts[0]) * mmap.PAGESIZE


def _by_mincore(fd: int, offset: int, num_bytes: int) -> int | None:
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    length = offset + num_bytes - start
    try:
        address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)
    except OSError:
        return None
    try:
        pages = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
        if libc.libc.mincore(address, length, pages.ctypes.data):
            return None
        return int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE
    finally:
        libc.munmap(address, length)
