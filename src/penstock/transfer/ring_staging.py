"""The staging ring for whoever gives copies to the stream: nothing here takes a lock or waits for anybody."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from penstock.errors import OptionError, TransferError
from penstock.plan.ring_layout import RingLayout, cut
from penstock.stats import StagingStats
from penstock.stores.file_reader import File
from penstock.stores.store import Load
from penstock.transfer.ring import READ_BYTES, Part
from penstock.transfer.ring_memory import WANTED, RingMemory
from penstock.transfer.stream_memory import CopyStream

__all__ = ["StagingRing", "parts_in_files", "parts_of"]


class StagingRing:
    """Gives the stream its half of the handshake (:mod:`penstock.transfer.ring`), and tells what the other half has
    said.

    Attributes:
        memory: of the ring, as the server sees it too.
    """

    def __init__(self, layout: RingLayout, memory: torch.Tensor) -> None:
        """``memory``: uint8, 1-D, host, ``layout.num_bytes`` long."""
        self._layout = layout
        self._entries = memory[: layout.words_at].split(layout.entry_bytes)
        self.memory = RingMemory(layout, memory.numpy())

    def enqueue(self, unit: int, slot: torch.Tensor, stream: CopyStream) -> None:
        """Give ``stream`` the copies of ``unit`` into ``slot`` (uint8, 1-D); in a capture they become nodes."""
        for position in self._layout.of_unit[unit]:
            piece = self._layout.pieces[position]
            tag = 1 + piece.entry
            stream.write(WANTED, position + 1)
            stream.wait_equal(tag, position + 1)
            target = slot[piece.start : piece.start + piece.num_bytes]
            stream.copy(target, self._entries[piece.entry][: piece.num_bytes])
            # In this order: a tag of zero beside the same wish would look like a piece that is missing.
            stream.write(WANTED, 0)
            stream.write(tag, 0)

    def check(self) -> None:
        """Raise ``TransferError`` once the ring has failed."""
        failure = self.memory.failure
        if failure is not None:
            raise TransferError(
                f"{failure}; what was computed since then is not to be used. Once the files are right, remove() and "
                f"offload the model again"
            )

    def stats(self) -> StagingStats:
        """Counters since the ring was made."""
        return self.memory.stats(time.monotonic_ns())


def parts_of(layout: RingLayout, loads: Sequence[Load], read_bytes: int = READ_BYTES) -> list[list[Part]]:
    """The reads that fill each piece, of ``read_bytes`` at most; ``loads``: of all units, by index."""
    return [list(_reads(loads[piece.unit], piece.start, piece.num_bytes, read_bytes)) for piece in layout.pieces]


def _reads(load: Load, start: int, num_bytes: int, read_bytes: int) -> Iterator[Part]:
    for copy in load.copies:
        found = copy.within(start, start + num_bytes)
        if found is not None:
            for at, size in cut(found.num_bytes, read_bytes):
                yield Part(found.src.source, found.src.offset + at, found.dst_offset + at, size)


def parts_in_files(layout: RingLayout, loads: Sequence[Load], read_bytes: int = READ_BYTES) -> list[list[Part]]:
    """:func:`parts_of` units in files, which another process can read.

    Raises:
        OptionError: a range is none of a file.
    """
    parts = parts_of(layout, loads, read_bytes)
    for piece, reads in zip(layout.pieces, parts, strict=True):
        for read in reads:
            if not isinstance(read.source, File):
                raise OptionError(
                    f"unit {piece.unit}: what comes to a GPU through the staging ring has to be in files, found "
                    f"{read.source!r}; use mode 'cpu' (--offload-mode cpu) for it"
                )
    return parts
