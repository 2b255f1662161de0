"""A range of bytes that can be read, and where it goes: the one form in which bytes move between files and memory.

torch is not imported here: the process that fills a staging ring reads ranges of files without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import TransferError

if TYPE_CHECKING:
    import torch

__all__ = ["ByteRange", "Copy", "MemorySource", "Source", "clip", "fill", "writable_view"]


class Source(ABC):
    """Bytes at rest that any thread may read, any range at a time."""

    @abstractmethod
    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``offset`` on; raises ``TransferError`` if they cannot be read."""

    def scatter(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill ``views``, one behind the other, with the bytes from ``offset`` on; raises as :meth:`read`."""
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
        """Raise ``TransferError`` if these are no longer the bytes that were opened; to be asked after reading them."""


class MemorySource(Source):
    """Bytes in host memory."""

    def __init__(self, blob: torch.Tensor) -> None:
        """``blob``: uint8, 1-D, host."""
        self._bytes = blob.numpy()

    def read(self, offset: int, into: memoryview) -> None:
        """Copy with numpy, which drops the interpreter lock and, unlike torch, starts no threads of its own."""
        part = self._bytes[offset : offset + len(into)]
        if len(part) != len(into):
            raise TransferError(f"host memory: expected {len(into)} bytes at {offset}, found {len(part)}")
        np.copyto(np.frombuffer(into, dtype=np.uint8), part)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """``num_bytes`` of ``source`` from ``offset`` on."""

    source: Source
    offset: int
    num_bytes: int

    @classmethod
    def of(cls, blob: torch.Tensor) -> ByteRange:
        """All bytes of a tensor (uint8, 1-D, host)."""
        return cls(MemorySource(blob), 0, blob.numel())

    def part(self, start: int, num_bytes: int) -> ByteRange:
        """``num_bytes`` of this range from its byte ``start`` on."""
        return ByteRange(self.source, self.offset + start, num_bytes)

    def read(self, into: memoryview) -> None:
        """Fill ``into``, which is as long as the range; raises as :meth:`Source.read`, also for changed bytes."""
        self.source.read(self.offset, into)
        self.source.require_unchanged()


@dataclass(frozen=True, slots=True)
class Copy:
    """The bytes of ``src``, which go to ``dst_offset`` of some destination."""

    src: ByteRange
    dst_offset: int

    @property
    def num_bytes(self) -> int:
        """Of the range."""
        return self.src.num_bytes

    @property
    def dst_end(self) -> int:
        """Where it ends in the destination."""
        return self.dst_offset + self.src.num_bytes

    def moved(self, num_bytes: int) -> Copy:
        """The same bytes, ``num_bytes`` further on in the destination."""
        return Copy(self.src, self.dst_offset + num_bytes)

    def pieces(self, most: int) -> Iterator[Copy]:
        """The same bytes in consecutive copies of at most ``most``."""
        for start in range(0, self.src.num_bytes, most):
            size = min(most, self.src.num_bytes - start)
            yield Copy(self.src.part(start, size), self.dst_offset + start)

    def within(self, start: int, end: int) -> Copy | None:
        """What goes to the destination's bytes from ``start`` to ``end``, with offsets relative to ``start``."""
        first, last = max(start, self.dst_offset), min(end, self.dst_end)
        if first >= last:
            return None
        return Copy(self.src.part(first - self.dst_offset, last - first), first - start)


def clip(copies: Iterable[Copy], start: int, end: int) -> list[Copy]:
    """The parts of ``copies`` between ``start`` and ``end`` of the destination, with offsets relative to ``start``."""
    return [part for copy in copies if (part := copy.within(start, end)) is not None]


def writable_view(blob: torch.Tensor) -> memoryview:
    """The memory of a uint8 CPU tensor as a buffer that ``preadv`` can fill."""
    return blob.numpy().data


def fill(destination: torch.Tensor, copies: Iterable[Copy]) -> None:
    """Carry out ``copies`` into ``destination`` (uint8, 1-D, host), in the calling thread."""
    view = writable_view(destination)
    for copy in copies:
        copy.src.read(view[copy.dst_offset : copy.dst_end])
