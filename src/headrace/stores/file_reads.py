"""Files that are read by position, through the page cache or past it, and compared with what was opened.

torch is not imported here: the process that fills a staging ring reads files without it.

Positional reads (``preadv``) share one file descriptor between threads and need no lock. Direct reads (``O_DIRECT``)
need aligned offsets, lengths and addresses, and tensors in a file are not aligned to its blocks. So each thread reads
aligned blocks into a buffer of its own and copies the wanted bytes out: a fraction of a core, and the operand in the
slot keeps its 256-byte alignment, on which the bits of a matrix product may depend. Blocks are large, because a disk
behind a hypervisor needs large requests, and buffers are used again and again, because memory that was never touched is
slow to receive (the hypervisor has to find it first). A caller whose buffer is larger than the range gets the whole
pages read there.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import CheckpointError, TransferError
from headrace.memory.pages import Bytes, map_file, map_pages, resident_bytes
from headrace.memory.system import dup_above_stdio, round_up
from headrace.stats import ReadStats
from headrace.stores.sources import Source, pieces

if TYPE_CHECKING:
    import torch

    from headrace.checkpoint.safetensors_header import FileFingerprint

_log = logging.getLogger(__name__)

# For O_DIRECT: a multiple of the logical block of every disk (512 or 4096 bytes).
ALIGN_BYTES = 4096
BLOCK_BYTES = 2 << 20
# Whether a range is in the page cache is judged by its beginning: what put it there read in large steps.
_SAMPLE_BYTES = 64 << 10
_MAX_VIEWS = 1024  # IOV_MAX
# Elements that torch converts in the calling thread. From 32,768 on (at::internal::GRAIN_SIZE) it shares the work with
# threads whose cores compute needs: conversion became 10 to 50 times slower beside other work.
_SERIAL = 16_384
_FLAGS = os.O_RDONLY | os.O_CLOEXEC
_FIX = "load the model again from files that no process writes to (replace files by renaming new ones over them)"


@dataclass(frozen=True)
class DiskOptions:
    """How files are read.

    Attributes:
        direct: ``False``: through the page cache, right for files that are read again and again and fit into it.
            ``True``: past it (``--disk-direct``). ``None``: pages that are cached are read from the cache, and the rest
            past it, where the file system can: right for reading a file once, since pages that nothing reads again do
            not push out others. Neither way is faster on every disk (direct reads gave 3.4 GB/s and buffered ones 2.0
            on one virtual disk, 1.2 and 2.0 on another): measure with both, and set what is faster on yours.
        drop_cache: give pages back to the system after reading them (``--disk-drop-cache``).
    """

    direct: bool | None = False
    drop_cache: bool = False


class ReadCounter:
    """Counts the bytes that several threads read."""

    def __init__(self) -> None:
        self._num_bytes: dict[tuple[int, str], int] = {}  # by thread and way, so that no thread needs a lock

    def add(self, way: str, num_bytes: int) -> None:
        """``num_bytes`` were read: ``direct``, ``cached`` or ``buffered``."""
        mine = (threading.get_ident(), way)
        self._num_bytes[mine] = self._num_bytes.get(mine, 0) + num_bytes

    @property
    def stats(self) -> ReadStats:
        """Counts of what was read so far."""
        counts = dict.fromkeys(("direct", "cached", "buffered"), 0)
        for (_, way), num_bytes in list(self._num_bytes.items()):
            counts[way] += num_bytes
        return ReadStats(**counts)


class File(Source):
    """One open file."""

    def __init__(
        self,
        path: Path,
        options: DiskOptions,
        stamp: FileFingerprint | None = None,
        counter: ReadCounter | None = None,
        opened: tuple[int, int | None] | None = None,
    ) -> None:
        """Open it.

        Args:
            path: path of the file.
            options: how it is read.
            stamp: what it has to be; default: it may change.
            counter: counter of what is read; shared by the files of one load.
            opened: the :attr:`descriptors` of another process, which this one has inherited and takes over: the file
                may be gone by its name. Default: open it.

        Raises:
            CheckpointError: it cannot be opened that way.
        """
        self.path = path
        self.counter = counter or ReadCounter()
        self.stamp = stamp
        self.options = options
        descriptors = {fd for fd in opened or () if fd is not None}
        self.close = functools.partial(_close_all, descriptors)
        # What an interrupt, or a store that is not closed, leaves open.
        self._leftover = weakref.finalize(self, self.close)
        self.fd, self._direct_fd = opened or _open(path, options, descriptors)
        self.num_bytes = os.fstat(self.fd).st_size
        # To ask which of its pages are cached; reading with RWF_NOWAIT would show it too, but starts to read ahead.
        self._mapped: Bytes | None = None
        if options.direct is None and self._direct_fd is not None and self.num_bytes > 0:
            with suppress(OSError):  # a file system or a limit of address space that allows no mapping
                self._mapped = map_file(self.fd, 0, self.num_bytes, read_only=True)

    @property
    def descriptors(self) -> tuple[int, int | None]:
        """Open descriptors: for any read, and for direct reads (the same one, or none)."""
        return self.fd, self._direct_fd

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled for a process that has inherited the descriptors under the same numbers and takes them over."""
        return File, (self.path, self.options, self.stamp, None, self.descriptors)

    def __str__(self) -> str:
        return str(self.path)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``offset`` on.

        Raises:
            TransferError: they cannot be read, or the file is shorter now.
        """
        self.scatter(offset, [into])

    def scatter(self, offset: int, views: Sequence[memoryview]) -> None:
        num_bytes = sum(map(len, views))
        with self._reading(offset, num_bytes):
            cached = self._is_cached(offset, num_bytes)
            if cached or self._direct_fd is None:
                self._read_fully(self.fd, offset, views, num_bytes)
                way = "cached" if cached else "buffered"
            else:
                self._scatter_direct(self._direct_fd, offset, views, num_bytes)
                way = "direct"
            self.counter.add(way, num_bytes)

    def read_around(self, offset: int, num_bytes: int, buffer: memoryview) -> int:
        """See :class:`Source`; a direct read needs a ``buffer`` that starts at a page and has 8 KiB to spare."""
        skip = offset % ALIGN_BYTES
        span = round_up(skip + num_bytes, ALIGN_BYTES)
        aligned = np.frombuffer(buffer, np.uint8).ctypes.data % ALIGN_BYTES == 0
        if self._direct_fd is None or not aligned or span > len(buffer) or self._is_cached(offset, num_bytes):
            self.read(offset, buffer[:num_bytes])
            return 0
        with self._reading(offset, num_bytes):
            self._read_fully(self._direct_fd, offset - skip, [buffer[:span]], skip + num_bytes)
        self.counter.add("direct", num_bytes)
        return skip

    def _is_cached(self, offset: int, num_bytes: int) -> bool:
        """Whether a range is read from the page cache because it is in it; where the options leave that open."""
        if self._mapped is None or offset + num_bytes > len(self._mapped):
            return False
        sample = self._mapped[offset : offset + min(num_bytes, _SAMPLE_BYTES)]
        return resident_bytes(sample) > len(sample) // 2

    @contextmanager
    def _reading(self, offset: int, num_bytes: int) -> Iterator[None]:
        """Around a read: an error of the system names the range, and pages are freed."""
        try:
            yield
        except OSError as error:
            raise TransferError(
                f"{self.path}: reading {num_bytes} bytes at {offset} failed: {error.strerror}"
            ) from error
        if self.options.drop_cache:
            # Pages at the ends stay if the range covers them only in part (posix_fadvise(2)).
            os.posix_fadvise(self.fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def require_unchanged(self) -> None:
        """Compare the open file, whatever its name means by now: one that was replaced still has the right bytes.

        Raises:
            TransferError: it no longer matches its stamp, if it has one.
        """
        stamp = self.stamp
        if stamp is None:
            return
        status = os.fstat(self.fd)
        now = stamp.of(stamp.path, status)
        if status.st_nlink == 0:  # the removal of its name is a change, after which nothing can open it
            now = replace(now, changed_ns=stamp.changed_ns)
        if now != stamp:
            raise TransferError(
                f"{self.path}: expected the file that was opened ({stamp}); found {now}: it was written to while in "
                f"use, or its attributes were set; {_FIX}"
            )

    def _read_fully(self, fd: int, offset: int, views: Sequence[memoryview], at_least: int) -> None:
        done = 0
        while done < at_least:
            # A read may be short: at most 0x7ffff000 bytes at a time, and less at a signal (read(2)).
            count = os.preadv(fd, views[:_MAX_VIEWS], offset + done)
            if count == 0:
                raise TransferError(
                    f"{self.path}: expected {at_least} bytes at {offset}, the file ended after {done}; it was "
                    f"truncated while in use; {_FIX}"
                )
            done += count
            views = _behind(views, count)

    def _scatter_direct(self, fd: int, offset: int, views: Sequence[memoryview], num_bytes: int) -> None:
        bounce = _bounce_buffer()
        left = list(views)
        for start, end in pieces(num_bytes, BLOCK_BYTES):
            skip, size = (offset + start) % ALIGN_BYTES, end - start
            # The last page of a file is shorter than the aligned request; only the wanted bytes must be there.
            self._read_fully(fd, offset + start - skip, [bounce[: round_up(skip + size, ALIGN_BYTES)]], skip + size)
            while size:
                count = min(size, len(left[0]))
                # numpy drops the interpreter lock for the copy, a slice assignment of memoryviews does not.
                np.copyto(np.frombuffer(left[0][:count], np.uint8), np.frombuffer(bounce, np.uint8, count, skip))
                skip, size, left = skip + count, size - count, _behind(left, count)


class ConvertedFile(Source):
    """The elements of a stretch of a file in another dtype; offsets count bytes of the result.

    The values are those of ``tensor.to(dtype)``, by the same kernel. Each reader converts one block at a time: no
    tensor exists in both dtypes.
    """

    def __init__(self, file: File, offset: int, stored: torch.dtype, dtype: torch.dtype) -> None:
        """``offset``: where the elements begin in ``file``, in bytes; ``stored``: their dtype there."""
        self._file = file
        self._offset = offset
        self._stored, self._dtype = stored, dtype

    def __str__(self) -> str:
        return f"{self._file}, {self._stored} as {self._dtype}"

    def read(self, offset: int, into: memoryview) -> None:
        import torch  # not at the top: see there

        if not into:
            return
        width, size = self._stored.itemsize, self._dtype.itemsize
        first, end = offset // size, -(-(offset + len(into)) // size)
        if (end - first) * size != len(into):  # cut inside an element, as ranks cut by bytes
            whole = memoryview(bytearray((end - first) * size))
            self.read(first * size, whole)
            into[:] = whole[offset - first * size :][: len(into)]
            return
        made = torch.frombuffer(into, dtype=self._dtype)
        block = _thread_buffer("converted", BLOCK_BYTES)
        for start, stop in pieces(end - first, BLOCK_BYTES // width):
            stored = block[: (stop - start) * width]
            self._file.read(self._offset + (first + start) * width, stored)
            elements = torch.frombuffer(stored, dtype=self._stored)
            for source, target in zip(elements.split(_SERIAL), made[start:stop].split(_SERIAL), strict=True):
                target.copy_(source)

    def require_unchanged(self) -> None:
        self._file.require_unchanged()


def _open(path: Path, options: DiskOptions, descriptors: set[int]) -> tuple[int, int | None]:
    """The descriptors of :attr:`File.descriptors`, which go into ``descriptors`` as they are opened."""
    from headrace.checkpoint.safetensors_header import require_file, too_many_open

    try:
        require_file(path)
        fd = _open_direct(path, descriptors) if options.direct else _open_file(path, _FLAGS, descriptors)
    except OSError as error:
        usual = "This file system may not support --disk-direct." if options.direct else "Check its permissions."
        fix = too_many_open(error) or usual
        raise CheckpointError(f"{path}: cannot be opened for reading: {error.strerror}. {fix}") from error
    if options.drop_cache or options.direct is None:
        # No read-ahead: requests are large and many already, and what it reads beyond them is not freed with them,
        # or is read twice. Eight readers of 2 MiB each reached 1.4 GB/s with it and 2.3 without.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    if options.direct is not None:
        return fd, fd if options.direct else None
    try:
        return fd, _open_direct(path, descriptors)
    except OSError as error:  # not on this file system
        _log.debug("%s: direct reads are refused (%s); it is read through the page cache", path, error.strerror)
        return fd, None


def can_read_direct(path: Path) -> bool:
    """Whether ``path`` can be read past the page cache."""
    descriptors = set[int]()
    try:
        _open_direct(path, descriptors)
    except OSError:
        return False
    finally:
        _close_all(descriptors)
    return True


def _open_direct(path: Path, descriptors: set[int]) -> int:
    """A descriptor for direct reads; tried out, since some systems refuse the first read and not the opening."""
    fd = _open_file(path, _FLAGS | os.O_DIRECT, descriptors)
    try:
        os.preadv(fd, [_bounce_buffer()[:ALIGN_BYTES]], 0)
    except BaseException:
        descriptors.remove(fd)
        os.close(fd)
        raise
    return fd


def _open_file(path: Path, flags: int, descriptors: set[int]) -> int:
    descriptors.add(fd := os.open(path, flags))
    descriptors.add(moved := dup_above_stdio(fd))
    if moved != fd:
        descriptors.remove(fd)
    return moved


def _behind(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Rest of ``views`` after their first ``num_bytes``."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []


def _close_all(descriptors: set[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


_local = threading.local()


def _bounce_buffer() -> memoryview:
    # A block begins anywhere in its first page.
    return _thread_buffer("bounce", BLOCK_BYTES + ALIGN_BYTES)


def _thread_buffer(name: str, num_bytes: int) -> memoryview:
    """Memory of this thread alone, which starts on a page boundary; made once.

    Of huge pages, where the system has them: the disk gets one request for what is contiguous, and 2 MiB of pages of 4
    KiB may be more parts than a request can have.
    """
    buffer = getattr(_local, name, None)
    if buffer is None:
        buffer = map_pages(num_bytes, forks=True).data
        setattr(_local, name, buffer)
    return buffer
