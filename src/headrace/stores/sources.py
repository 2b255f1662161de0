"""Stored bytes: sources of them, ranges of these, and where they go.

A :class:`Copy` is the one form in which bytes move between files and memory. torch is not imported here: the process
that fills a staging ring reads files (:mod:`headrace.stores.file_reads`) without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import TransferError
from headrace.memory.system import each_in_threads, touch_threads

if TYPE_CHECKING:
    import torch

_PIECE_BYTES = 8 << 20  # that one of several threads fills at a time
# Vectors of AVX-512; torch allocates, and libraries of kernels expect, memory that starts at a multiple of it.
TENSOR_ALIGN_BYTES = 64


class Source(ABC):
    """Stored bytes that any thread may read, any range at a time."""

    @abstractmethod
    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``offset`` on; raises ``TransferError`` if they cannot be read."""

    def scatter(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill ``views``, one after the other, with the bytes from ``offset`` on; raises as :meth:`read`."""
        for view in views:
            self.read(offset, view)
            offset += len(view)

    def read_around(self, offset: int, num_bytes: int, buffer: memoryview) -> int:
        """Read into ``buffer`` (at least ``num_bytes``) and return where in it the bytes begin; raises as :meth:`read`.

        A source that reads whole pages may need no other buffer this way.
        """
        self.read(offset, buffer[:num_bytes])
        return 0

    def require_unchanged(self) -> None:
        """Raise ``TransferError`` if these are no longer the bytes that were opened; call it after reading them."""


class MemorySource(Source):
    """Bytes in host memory."""

    def __init__(self, buffer: torch.Tensor) -> None:
        """``buffer``: uint8, 1-D, host."""
        self._buffer = buffer  # not its numpy(): its storage may move to shared memory (share_memory_, a queue)

    def read(self, offset: int, into: memoryview) -> None:
        """Copy with numpy, which drops the interpreter lock and, unlike torch, starts no threads of its own."""
        part = self._buffer.numpy()[offset : offset + len(into)]
        if len(part) != len(into):  # a slice beyond the end is short, without an error
            raise TransferError(f"host memory: expected {len(into)} bytes at {offset}, found {len(part)}")
        np.copyto(np.frombuffer(into, dtype=np.uint8), part)


def pieces(num_bytes: int, most: int) -> Iterator[tuple[int, int]]:
    """Start and end of consecutive pieces of at most ``most`` bytes."""
    return ((start, min(start + most, num_bytes)) for start in range(0, num_bytes, most))


@dataclass(frozen=True, slots=True)
class ByteRange:
    """``num_bytes`` of ``source`` from ``offset`` on."""

    source: Source
    offset: int
    num_bytes: int

    @classmethod
    def of(cls, buffer: torch.Tensor) -> ByteRange:
        """All bytes of a tensor (uint8, 1-D, host)."""
        return cls(MemorySource(buffer), 0, buffer.numel())

    def part(self, start: int, num_bytes: int) -> ByteRange:
        """``num_bytes`` of this range from its byte ``start`` on."""
        return ByteRange(self.source, self.offset + start, num_bytes)

    def read(self, into: memoryview) -> None:
        """Fill ``into``, which is as long as the range; raises as :meth:`Source.read`, also for changed bytes."""
        self.source.read(self.offset, into)
        self.source.require_unchanged()  # after it: a write during the read counts too


@dataclass(frozen=True, slots=True)
class Copy:
    """The bytes of ``src``, which go to ``dst_offset`` of some destination."""

    src: ByteRange
    dst_offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the range."""
        return self.src.num_bytes

    @property
    def dst_end(self) -> int:
        """End of the range in the destination."""
        return self.dst_offset + self.src.num_bytes

    def moved(self, num_bytes: int) -> Copy:
        """The range, ``num_bytes`` further on in the destination."""
        return Copy(self.src, self.dst_offset + num_bytes)

    def pieces(self, most: int) -> Iterator[Copy]:
        """The range in consecutive copies of at most ``most`` bytes."""
        for start, end in pieces(self.num_bytes, most):
            yield Copy(self.src.part(start, end - start), self.dst_offset + start)


def clip(copies: Iterable[Copy], start: int, end: int) -> list[Copy]:
    """The parts of ``copies`` between ``start`` and ``end`` of the destination, with offsets relative to ``start``."""
    found = []
    for copy in copies:
        first, last = max(start, copy.dst_offset), min(end, copy.dst_end)
        if first < last:
            found.append(Copy(copy.src.part(first - copy.dst_offset, last - first), first - start))
    return found


def writable_view(buffer: torch.Tensor) -> memoryview:
    """The memory of a uint8 CPU tensor as a buffer that ``preadv`` can fill."""
    return buffer.numpy().data


def fill(destination: torch.Tensor, copies: Iterable[Copy]) -> None:
    """Carry out ``copies`` into ``destination`` (uint8, 1-D, host), in the calling thread."""
    view = writable_view(destination)
    for copy in copies:
        copy.src.read(view[copy.dst_offset : copy.dst_end])


def fill_in_threads(destination: torch.Tensor, copies: Iterable[Copy]) -> None:
    """:func:`fill` in several threads, a piece each."""
    view = writable_view(destination)
    parts = (part for copy in copies for part in copy.pieces(_PIECE_BYTES))
    each_in_threads(lambda part: part.src.read(view[part.dst_offset : part.dst_end]), parts, touch_threads())
