"""One slot on one timeline, as the pipeline keeps it (see ``[Note: two timelines]`` there)."""

from __future__ import annotations

import threading

import torch

from penstock.runtime.readers import Reader
from penstock.transfer.link import ComputeEvent, Transfer

__all__ = ["Slot"]


class Slot:
    """One device buffer on one timeline.

    Attributes:
        unit: what it holds or, until ``transfer`` is done, what is on its way into it.
        transfer: the copy that brought ``unit``. Kept after it has landed, because each stream that reads the slot has
            to be ordered behind it; ``None`` once that is settled for all streams.
        readers: who is running its unit.
        marks: where the readers that have let go already were in their streams.
        unmarked: of a captured slot: it was read, and no mark for replays was left behind that.
    """

    def __init__(self, memory: torch.Tensor, unit: int | None = None) -> None:
        self.memory = memory
        self.unit = unit
        self.transfer: Transfer | None = None
        self.readers: list[Reader] = []
        self.marks: list[ComputeEvent] = []
        self.unmarked = False

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread is one of its readers."""
        return any(reader.thread == threading.get_ident() for reader in self.readers)

    def let_go(self, reader: Reader | None = None) -> None:
        """``reader`` ends, by default the latest one of the calling thread."""
        if reader is not None:
            self.readers.remove(reader)
            return
        for index in reversed(range(len(self.readers))):
            if self.readers[index].thread == threading.get_ident():
                del self.readers[index]
                return

    def drop_stale(self) -> bool:
        """Drop readers of the calling thread that were interrupted, and say whether there were any."""
        me = threading.get_ident()
        stale = [reader for reader in self.readers if reader.thread == me and not reader.runs()]
        for reader in stale:
            self.readers.remove(reader)
            reader.drop()
        return bool(stale)
