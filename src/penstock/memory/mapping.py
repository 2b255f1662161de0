"""Files that lie in memory, mapped where huge pages can serve them; without torch, for processes that need none.

Memory that processes share has ordinary pages of 4 KiB unless the system says otherwise
(``/sys/kernel/mm/transparent_hugepage/shmem_enabled``), and by default it does not. ``madvise(MADV_COLLAPSE)`` (Linux
6.1, madvise(2)) asks for huge ones whatever the system says. A huge page can only be mapped where its address and its
place in the file agree modulo 2 MiB, which the mmap module of Python cannot be told.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from penstock.memory import libc

__all__ = ["HUGE_PAGE_BYTES", "Bytes", "collapse", "map_file"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

HUGE_PAGE_BYTES = 2 << 20  # of x86-64, and of arm64 with pages of 4 KiB
_MADV_COLLAPSE = 25  # <linux/mman.h>
_MAP_FIXED = 0x10  # <linux/mman.h>; the mmap module does not have it


class _Mapping:
    """Address space of its own, carried to numpy by the array interface (version 3) and given back at its end."""

    def __init__(self, num_bytes: int, fd: int, start: int, flags: int, huge: bool) -> None:
        self._munmap = libc.munmap  # at the end of the interpreter the module may be empty
        self._room_bytes = num_bytes + HUGE_PAGE_BYTES
        # Nothing can be in it, so it costs nothing; the file is then put over a part of it.
        self._room = libc.mmap(None, self._room_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        address = self._room + (start - self._room) % HUGE_PAGE_BYTES
        libc.mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, fd, start)
        if huge:
            libc.madvise(address, num_bytes, mmap.MADV_HUGEPAGE)  # a kernel built without it refuses
        self.__array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}

    def __del__(self) -> None:
        if (room := getattr(self, "_room", None)) is not None:
            self._munmap(room, self._room_bytes)


def map_file(fd: int, start: int, num_bytes: int, *, private: bool = False, huge: bool = False) -> Bytes:
    """``num_bytes`` (at least 1) of the file from ``start`` (a multiple of the page size) on; writable.

    The array, and views of it, keep the mapping, which lives on without ``fd``. ``private``: a write stays in this
    process. ``huge``: ask for huge pages, where the system offers them for such files; one may go beyond the end.

    Raises:
        OSError: the system has no address space left, or the file cannot be mapped.
    """
    return np.asarray(_Mapping(num_bytes, fd, start, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED, huge))


def collapse(memory: Bytes) -> bool:
    """Touch the whole huge pages within ``memory`` and make them such; whether the system did.

    Memory that nobody has touched yet is ready several times as soon as by pages of 4 KiB. What lies there stays.
    """
    address = memory.ctypes.data
    first = -address % HUGE_PAGE_BYTES
    num_bytes = (memory.size - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if num_bytes <= 0:
        return True
    # The kernel refuses a stretch in which there is nothing at all; the rest of it may be missing.
    one_of_each = memory[first : first + num_bytes : HUGE_PAGE_BYTES]
    np.bitwise_or(one_of_each, np.uint8(0), out=one_of_each)
    return libc.madvise(address + first, num_bytes, _MADV_COLLAPSE) == 0
