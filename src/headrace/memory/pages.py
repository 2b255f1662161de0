"""Pages of host memory: mapped at their exact size, made of huge pages where possible, touched by several threads.

The kernel zeroes a page in the thread that touches it first, about 3 GB/s per thread, so touching is what has to be
spread. ``madvise(MADV_POPULATE_WRITE)`` (Linux 5.14, madvise(2)) touches a whole range in one call and, called through
ctypes, holds no interpreter lock.

Memory that processes share has pages of 4 KiB unless the system is set up otherwise
(``/sys/kernel/mm/transparent_hugepage/shmem_enabled``), and by default it does not. ``madvise(MADV_COLLAPSE)`` (Linux
6.1) asks for huge pages whatever that setting is. A huge page can only be mapped where its address and its offset in
the file agree modulo 2 MiB, which Python's mmap module does not allow to ask for: so mappings are made through ctypes.

torch is not imported here: the process that fills a staging ring maps memory without it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from headrace.errors import BudgetError
from headrace.memory.system import each_in_threads, round_up

if TYPE_CHECKING:
    import torch

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Large enough that a call costs nothing beside the zeroing, small enough that the threads end together.
TOUCH_BYTES = 32 << 20
HUGE_PAGE_BYTES = 2 << 20  # of x86-64, and of arm64 with pages of 4 KiB

# <linux/mman.h>; the mmap module of Python 3.12 has none of them.
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MREMAP_TO = 0x3  # MREMAP_MAYMOVE | MREMAP_FIXED
_MADV_REMOVE = 9
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
# Keeps the interpreter lock, for a call that returns at once: getting the lock back from many readers takes longer.
_locked_libc = ctypes.PyDLL(None)
_locked_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class RawMemory:
    """Gives an address range to numpy or torch through their array interfaces (version 3 of both).

    The array made from it keeps it alive, and with it ``keeps``, the owner of the memory.
    """

    def __init__(self, address: int, num_bytes: int, keeps: object = None, *, read_only: bool = False) -> None:
        self._keeps = keeps
        interface = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, read_only), "version": 3}
        self.__array_interface__ = interface
        self.__cuda_array_interface__ = interface


_Ended = TypeVar("_Ended")


def give_back(ended: list[_Ended], call: Callable[[_Ended], object]) -> None:
    """``call`` with each of ``ended``, which then is none; those that raise, in another thread's capture, stay."""
    for memory in tuple(ended):
        with suppress(ValueError):  # another thread was first
            ended.remove(memory)
            try:
                call(memory)
            except Exception:
                ended.append(memory)


class _Mapping(RawMemory):
    """A mapping at the address that huge pages need; unmapped at its end."""

    def __init__(self, num_bytes: int, fd: int, start: int, flags: int, read_only: bool = False) -> None:
        self._munmap = _libc.munmap  # at the end of the interpreter the module may be empty
        self._reserved_bytes = num_bytes + HUGE_PAGE_BYTES
        # Address space that nothing can be in, so it costs nothing; the mapping is then put over a part of it.
        self._reserved = _mmap(None, self._reserved_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        address = self._reserved + (start - self._reserved) % HUGE_PAGE_BYTES
        protection = mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE
        _mmap(address, num_bytes, protection, flags | _MAP_FIXED, fd, start)
        super().__init__(address, num_bytes, read_only=read_only)

    def __del__(self) -> None:
        if (reserved := getattr(self, "_reserved", None)) is not None:
            self._munmap(reserved, self._reserved_bytes)


def _mmap(address: int | None, num_bytes: int, protection: int, flags: int, fd: int, start: int) -> int:
    """mmap(2), with its errors as ``OSError``."""
    found = _libc.mmap(address, num_bytes, protection, flags, fd, start)
    if found == _MAP_FAILED or found is None:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(found)


def _advise(memory: Bytes, advice: int) -> int:
    """madvise(2) for the pages that ``memory`` covers: 0, or the number of the error."""
    address, num_bytes = _covering_pages(memory)
    return 0 if _libc.madvise(address, num_bytes, advice) == 0 else ctypes.get_errno()


def _covering_pages(memory: Bytes) -> tuple[int, int]:
    """Address and bytes of the pages that ``memory`` covers."""
    address = memory.ctypes.data
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    return start, whole_pages(address + memory.size - start)


def map_pages(num_bytes: int, *, huge: bool = True, forks: bool = False) -> Bytes:
    """Private anonymous memory of ``num_bytes`` (at least 1), untouched: it takes address space and no memory yet.

    ``huge``: ask for huge pages, where the system offers them. The kernel uses them only for whole aligned 2 MiB, so
    the size stays exact.

    A forked child gets the mapping only with ``forks``: the kernel would have to copy every pinned page at the fork
    itself.

    Raises:
        BudgetError: the system has no memory, or no address space, for it.
    """
    try:
        memory: Bytes = np.asarray(_Mapping(num_bytes, -1, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError as error:
        raise _out_of_memory(num_bytes) from error
    if not forks:
        _advise(memory, mmap.MADV_DONTFORK)
    if huge:
        _advise(memory, mmap.MADV_HUGEPAGE)  # a kernel built without it refuses
    return memory


def map_file(
    fd: int, start: int, num_bytes: int, *, private: bool = False, huge: bool = False, read_only: bool = False
) -> Bytes:
    """``num_bytes`` (at least 1) of the file from ``start`` (a multiple of the page size) on.

    The array, and views of it, keep the mapping, which lives on without ``fd``. ``private``: a write stays in this
    process. ``huge``: ask for huge pages, where the system offers them for such files; one may go beyond the end.

    Raises:
        OSError: the system has no address space left, or the file cannot be mapped.
    """
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    memory: Bytes = np.asarray(_Mapping(num_bytes, fd, start, flags, read_only))
    if huge:
        _advise(memory, mmap.MADV_HUGEPAGE)
    return memory


def map_parts(parts: Sequence[tuple[int, int, int]], *, at_random: bool = False) -> Bytes:
    """Parts of files, each (descriptor, start, bytes), as one range of memory in this order; a write stays private.

    Nothing is read but the pages in which two parts meet: memory has to hold both, so each of these is a copy, of which
    there is one per part after the first unless parts start with a page.

    Args:
        parts: all start at the same byte of a page, and all but the last are whole pages long.
        at_random: what is read next is not beside it, so that reading ahead would only fill memory.

    Raises:
        OSError: no address space or no further mapping is left (``vm.max_map_count``), or a file cannot be mapped.
    """
    fd, start, _ = parts[0]
    head = start % mmap.PAGESIZE
    num_bytes = sum(size for _, _, size in parts)
    memory: Bytes = np.asarray(_Mapping(head + num_bytes, fd, start - head, mmap.MAP_PRIVATE))
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    at = parts[0][2]
    for fd, start, size in parts[1:]:
        tail = memory[at : at + head].copy()
        _mmap(memory.ctypes.data + at, head + size, protection, flags, fd, start - head)
        if head:
            memory[at : at + head] = tail
        at += size
    if at_random:
        _advise(memory, mmap.MADV_RANDOM)
    return memory[head:]


def map_again(memory: Bytes, over: Bytes) -> None:
    """Map the pages of ``memory``, a shared mapping, in place of those of ``over``, which are as many (mremap(2)).

    Raises:
        BudgetError: no further mapping is left (``vm.max_map_count``).
    """
    found = _libc.mremap(memory.ctypes.data, 0, memory.size, _MREMAP_TO, over.ctypes.data)
    if found == _MAP_FAILED:
        raise _out_of_memory(memory.size)


def drop_pages(memory: Bytes, *, shared: bool = False) -> None:
    """Give the whole pages of ``memory`` back; they are zeros when they are used next.

    ``shared``: those of a shared mapping, wherever else they are mapped.
    """
    if memory.size:
        _advise(memory, _MADV_REMOVE if shared else mmap.MADV_DONTNEED)


def resident_bytes(memory: Bytes) -> int:
    """Bytes of the pages of ``memory`` that are in memory (mincore(2)); for a mapped file, in the page cache.

    Of a file that the user neither owns nor may write, the kernel reports all of it as cached (Linux 5.2).
    """
    address, num_bytes = _covering_pages(memory)
    pages = np.zeros(num_bytes // mmap.PAGESIZE, np.uint8)
    if _locked_libc.mincore(address, num_bytes, pages.ctypes.data):
        return 0
    return int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE


# -- touching ---------------------------------------------------------------------------------------------------------


def populate(buffer: torch.Tensor) -> None:
    """Make every page that ``buffer`` (uint8, 1-D, host) covers real, in the calling thread; keeps its bytes.

    Raises:
        BudgetError: the system has no memory for it.
    """
    if buffer.numel() == 0:
        return
    memory: Bytes = buffer.numpy()
    error = _advise(memory, _MADV_POPULATE_WRITE)
    if error == errno.ENOMEM:
        raise _out_of_memory(buffer.numel())
    if error:  # an older kernel: write one byte of every page back to itself
        pages = memory[:: mmap.PAGESIZE]
        np.bitwise_or(pages, np.uint8(0), out=pages)
        memory[-1] |= 0  # the last page may begin after the last stride


def _out_of_memory(num_bytes: int) -> BudgetError:
    return BudgetError(
        f"the system has no memory for another {num_bytes} bytes of offloaded weights; free host memory (ulimit -v "
        f"limits it, too), or offload less",
        num_bytes,
    )


def populate_parallel(buffer: torch.Tensor, num_threads: int, piece_bytes: int = TOUCH_BYTES) -> None:
    """:func:`populate` by ``num_threads`` threads, ``piece_bytes`` at a time."""
    each_in_threads(populate, buffer.split(piece_bytes), num_threads)


def collapse(memory: Bytes) -> bool:
    """Touch the whole huge pages within ``memory`` and make them such; whether the system did.

    Memory that was never touched is ready several times as soon as by pages of 4 KiB. The bytes in it stay.
    """
    first = -memory.ctypes.data % HUGE_PAGE_BYTES
    num_bytes = (memory.size - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if num_bytes <= 0:
        return True
    huge_pages = memory[first : first + num_bytes]
    # The kernel refuses a range without a single page; all but one of each huge page may be missing.
    one_of_each = huge_pages[::HUGE_PAGE_BYTES]
    np.bitwise_or(one_of_each, np.uint8(0), out=one_of_each)
    return _advise(huge_pages, _MADV_COLLAPSE) == 0


def collapse_parallel(buffer: torch.Tensor, num_threads: int) -> None:
    """Touch shared memory (uint8, 1-D, host) by huge pages, where the kernel can; filling it touches the other pages.

    It gives up at the first refusal: a kernel that has no huge page left looks for one a long time, every time.
    """
    memory = buffer.numpy()[-buffer.data_ptr() % HUGE_PAGE_BYTES :]
    refused = threading.Event()

    def touch(start: int) -> None:
        if not refused.is_set() and not collapse(memory[start : start + TOUCH_BYTES]):
            refused.set()

    each_in_threads(touch, range(0, memory.size, TOUCH_BYTES), num_threads)


# -- sizes ------------------------------------------------------------------------------------------------------------


def whole_pages(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole pages."""
    return round_up(num_bytes, mmap.PAGESIZE)


def pack(sizes: Sequence[int], limit: int) -> list[range]:
    """Cut a row of sizes into runs of at most ``limit`` together, in order; a larger one has a run of its own."""
    runs, start, filled = [], 0, 0
    for index, size in enumerate(sizes):
        if index > start and filled + size > limit:
            runs.append(range(start, index))
            start, filled = index, 0
        filled += size
    return [*runs, range(start, len(sizes))] if sizes else []
