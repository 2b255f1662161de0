"""Store ``disk``: the unmodified safetensors files, read by position straight into the slot.

Positional reads (``preadv``) share one file descriptor between threads and need no lock. Two options:

* ``direct``: ``O_DIRECT`` past the page cache. The kernel wants aligned offsets, lengths and addresses, and tensors
  in a file are not aligned to its blocks; so each thread reads aligned pieces into a small buffer of its own and
  copies the wanted bytes out. The copy costs a fraction of a core and buys that the operand in the slot keeps its
  256-byte alignment, on which the bits of a matrix product may depend. ``None`` decides piece by piece: what is in
  the page cache already comes from there, the rest past it. That is right for reading a file once; who reads it again
  and again wants it to enter the cache.
* ``drop_cache``: after a read, tell the kernel that these pages are not needed again (``POSIX_FADV_DONTNEED``).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from penstock.checkpoint import FileStamp
from penstock.errors import CheckpointError, TransferError
from penstock.store.base import Segment, Store, writable_view
from penstock.store.pages import pieces
from penstock.store.pinned import pin_threads, pinned_region
from penstock.weights import TensorSource

__all__ = ["DiskOptions", "DiskStore", "File"]

BLOCK_BYTES = 4096
BOUNCE_BYTES = 1 << 20
PINNED_PIECE_BYTES = 8 << 20

# cachestat(2), Linux 6.5: {offset, length} in, {pages in the cache, ...} out; the number is the same everywhere.
# Reading with RWF_NOWAIT would tell as much on older kernels, but starts to read ahead.
_CACHESTAT = 451
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class DiskOptions:
    """How files are read.

    Attributes:
        direct: past the page cache (``--disk-direct``); ``None``: past it what is not in it.
        drop_cache: give pages back to the system after reading them (``--disk-drop-cache``).
    """

    direct: bool | None = False
    drop_cache: bool = False


class File:
    """One open file; reads any stretch into any buffer."""

    def __init__(self, path: Path, options: DiskOptions, stamp: FileStamp | None = None) -> None:
        """``stamp``: what the file has to be, after every read too; default: it may change."""
        self.path = path
        self._stamp = stamp
        self._drop = options.drop_cache
        self._direct = options.direct
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if options.direct else 0)
        try:
            self.fd = os.open(path, flags)
        except OSError as error:
            hint = "; this file system may not support --disk-direct" if options.direct else ""
            raise CheckpointError(f"{path}: cannot be opened for reading: {error.strerror}{hint}") from error
        self.num_bytes = os.fstat(self.fd).st_size
        self._direct_fd = self.fd if options.direct else None
        if options.direct is None:
            with suppress(OSError):  # not on this file system
                self._direct_fd = os.open(path, flags | os.O_DIRECT)
        # Descriptors outlive close() only through garbage collection of a store nobody closed.
        self.close = weakref.finalize(self, _close_all, {fd for fd in (self.fd, self._direct_fd) if fd is not None})

    def read(self, offset: int, into: memoryview) -> None:
        try:
            if self._direct_fd is not None and (self._direct or not self._is_cached(offset, len(into))):
                self._read_direct(self._direct_fd, offset, into)
            else:
                self._read_fully(self.fd, offset, into, len(into))
        except OSError as error:
            raise TransferError(
                f"{self.path}: reading {len(into)} bytes at {offset} failed: {error.strerror}"
            ) from error
        if self._drop:
            os.posix_fadvise(self.fd, offset, len(into), os.POSIX_FADV_DONTNEED)
        if self._stamp is not None:
            self._require_unchanged(self._stamp)

    def _require_unchanged(self, stamp: FileStamp) -> None:
        """The open file, whatever its name means by now: one that was replaced or removed still has the right bytes."""
        now = os.fstat(self.fd)
        if (now.st_size, now.st_mtime_ns, now.st_ino) != (stamp.num_bytes, stamp.modified_ns, stamp.inode):
            raise TransferError(
                f"{self.path}: expected the file that was opened ({stamp.num_bytes} bytes, modified at "
                f"{stamp.modified_ns} ns); found {now.st_size} bytes, modified at {now.st_mtime_ns} ns: it was written "
                f"to while in use, restore it and offload again"
            )

    def _is_cached(self, offset: int, num_bytes: int) -> bool:
        """Whether most of a stretch is in the page cache; true where the kernel does not tell."""
        stretch = (ctypes.c_uint64 * 2)(offset, num_bytes)
        counts = (ctypes.c_uint64 * 5)()
        if _libc.syscall(_CACHESTAT, self.fd, stretch, counts, 0):
            return True
        return int(counts[0]) * mmap.PAGESIZE > num_bytes // 2

    def _read_fully(self, fd: int, offset: int, into: memoryview, at_least: int) -> None:
        done = 0
        while done < at_least:
            count = os.preadv(fd, [into[done:]], offset + done)
            if count == 0:
                raise TransferError(
                    f"{self.path}: expected {at_least} bytes at {offset}, the file ended after {done}; it was "
                    f"truncated while in use, restore it and offload again"
                )
            done += count

    def _read_direct(self, fd: int, offset: int, into: memoryview) -> None:
        bounce = _bounce_buffer()
        done = 0
        while done < len(into):
            start = (offset + done) // BLOCK_BYTES * BLOCK_BYTES
            skip = offset + done - start
            wanted = min(len(into) - done, BOUNCE_BYTES - skip)
            span = -(-(skip + wanted) // BLOCK_BYTES) * BLOCK_BYTES
            # The last block of a file is shorter than the aligned request; only the wanted bytes must be there.
            self._read_fully(fd, start, bounce[:span], skip + wanted)
            # numpy drops the interpreter lock for the copy, a slice assignment of memoryviews does not.
            np.copyto(np.frombuffer(into[done:], np.uint8, wanted), np.frombuffer(bounce[skip:], np.uint8, wanted))
            done += wanted


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


_local = threading.local()


def _bounce_buffer() -> memoryview:
    buffer = getattr(_local, "buffer", None)
    if buffer is None:
        # An anonymous mapping starts on a page boundary.
        buffer = _local.buffer = memoryview(mmap.mmap(-1, BOUNCE_BYTES))
    return buffer


@dataclass(frozen=True)
class _FileStretch:
    file: File
    offset: int

    def read(self, start: int, into: memoryview) -> None:
        self.file.read(self.offset + start, into)


class DiskStore(Store):
    """Reads storages from the checkpoint files they came in."""

    mode = "disk"

    def __init__(
        self,
        sources: Mapping[str, TensorSource],
        options: DiskOptions | None = None,
        *,
        stamps: Iterable[FileStamp] = (),
        pin_in_place: bool = False,
    ) -> None:
        """Open the files; nothing is read.

        Args:
            sources: per storage name where its bytes are.
            options: how files are read.
            stamps: what files have to be at every read; those without may change.
            pin_in_place: what is read in place is copied into pinned memory first, because a GPU cannot address a
                mapped file.
        """
        self._sources = dict(sources)
        options = options or DiskOptions()
        paths = {part.tensor.path for source in self._sources.values() for part in source.parts}
        expected = {stamp.path: stamp for stamp in stamps}
        self._files = {path: File(path, options, expected.get(path)) for path in sorted(paths)}
        self._maps: dict[Path, mmap.mmap] = {}
        self._pin_in_place = pin_in_place
        self._pinned: dict[str, torch.Tensor] = {}

    def segments(self, storage: str) -> list[Segment]:
        return [
            Segment(
                _FileStretch(self._files[part.tensor.path], part.tensor.offset),
                part.offset,
                part.tensor.num_bytes,
            )
            for part in self._sources[storage].parts
        ]

    def in_place(self, storage: str) -> torch.Tensor:
        if self._pin_in_place:
            if storage not in self._pinned:
                self._pinned[storage] = self._read_pinned(storage)
            return self._pinned[storage]
        source = self._sources[storage]
        if len(source.parts) != 1:
            raise CheckpointError(
                f"{storage} lies in {len(source.parts)} pieces in the checkpoint and cannot be read in place; "
                f"prefetch it instead"
            )
        tensor = source.parts[0].tensor
        return torch.frombuffer(self._map(tensor.path), dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.offset)

    @property
    def host_bytes(self) -> int:
        return sum(blob.numel() for blob in self._pinned.values())

    @property
    def account(self) -> dict[str, int]:
        return {"file": sum(part.tensor.num_bytes for s in self._sources.values() for part in s.parts)}

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._maps.clear()
        self._pinned.clear()

    def _read_pinned(self, storage: str) -> torch.Tensor:
        """A copy of ``storage`` in pinned memory, read by several threads."""
        segments = self.segments(storage)
        blob = pinned_region(sum(segment.num_bytes for segment in segments))
        view = writable_view(blob)

        def read(segment: Segment, start: int, end: int) -> None:
            segment.source.read(start, view[segment.slot_offset + start : segment.slot_offset + end])

        with ThreadPoolExecutor(pin_threads()) as pool:
            reads = [
                pool.submit(read, segment, start, end)
                for segment in segments
                for start, end in pieces(segment.num_bytes, PINNED_PIECE_BYTES)
            ]
            for one in reads:
                one.result()
        return blob

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            # Copy-on-write, because torch has no read-only tensors: a stray write stays in this process.
            with path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            # Rows are looked up at random: read-ahead would only fill memory.
            mapping.madvise(mmap.MADV_RANDOM)
            self._maps[path] = mapping
        return self._maps[path]
