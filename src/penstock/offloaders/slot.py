"""One slot on one timeline, as the pipeline keeps it (see ``[Note: two timelines]`` there)."""

from __future__ import annotations

import torch

from penstock.link.base import Mark, Transfer

__all__ = ["Slot"]


class Slot:
    """One device buffer on one timeline.

    Attributes:
        unit: what it holds or, until ``transfer`` is done, what is on its way into it.
        transfer: the copy that brought ``unit``. Kept after it has landed, because each stream that reads the slot has
            to be ordered behind it; ``None`` once that is settled for all streams.
        readers: idents of the threads that are running its unit.
        marks: where the readers that have let go already were in their streams.
        unmarked: of a captured slot: it was read, and no mark for replays was left behind that.
    """

    def __init__(self, memory: torch.Tensor, unit: int | None = None) -> None:
        self.memory = memory
        self.unit = unit
        self.transfer: Transfer | None = None
        self.readers: list[int] = []
        self.marks: list[Mark] = []
        self.unmarked = False
