"""Calls of the C library that Python has not, or not in full: mappings at an address, and advice of any number.

Called through ctypes they hold no interpreter lock, but for those through ``keeping_the_lock``: of a call that comes
back at once, the longest part is to get the lock again that many threads want.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["keeping_the_lock", "libc", "madvise", "mmap", "munmap"]

_MAP_FAILED = ctypes.c_void_p(-1).value

libc = ctypes.CDLL(None, use_errno=True)
keeping_the_lock = ctypes.PyDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def mmap(address: int | None, num_bytes: int, protection: int, flags: int, fd: int, start: int) -> int:
    """mmap(2): the address of the mapping.

    Raises:
        OSError: as the system says.
    """
    found = libc.mmap(address, num_bytes, protection, flags, fd, start)
    if found == _MAP_FAILED or found is None:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(found)


munmap = libc.munmap  # munmap(2): 0 if it is done


def madvise(address: int, num_bytes: int, advice: int) -> int:
    """madvise(2): 0, or the number of the error."""
    return 0 if libc.madvise(address, num_bytes, advice) == 0 else ctypes.get_errno()
