"""Slots: their units, the modules that read them, and the owner of their bytes.

replays.py says what CUDA graphs change about these.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from enum import Enum, auto

import torch

from headrace.errors import StateError
from headrace.transfer.link import ComputeEvent, Link, Transfer


class SlotState(Enum):
    """Contents of a slot, and the side that owns its bytes.

    - EMPTY: No unit. The bytes are free, except that the link may still write them while ``transfer``, a copy that
      failed or was abandoned, has not ended.
    - HELD_BACK: No unit, either. The copy of the first unit is left to the beginning of the next forward or replay.
    - COPYING: The copy of ``unit`` was issued. The link owns the bytes; compute may read them after ``transfer``.
    - READY: ``unit`` is there for every stream that has waited for ``transfer``. The prefetcher owns the bytes and may
      overwrite them after ``events``.
    - IN_USE: Modules run on ``unit``. Its ``readers`` own the bytes: no copy may be issued.
    """

    EMPTY = auto()
    HELD_BACK = auto()
    COPYING = auto()
    READY = auto()
    IN_USE = auto()


class Reader:
    """One run of a unit's module in the thread that creates this.

    Attributes:
        thread: its ident.
        forward: number of the forward of the model that the thread is in; ``None`` outside of one.
        started_ns: when compute was first allowed to read the unit.
    """

    def __init__(self, forward: int | None = None) -> None:
        self.thread = threading.get_ident()
        self.forward = forward
        self.started_ns = 0

    def goes_on(self, forward: int | None) -> bool:
        """Whether the module still runs, asked in its thread, which is in ``forward`` now.

        Compiled code that raises does not release its slot, so its runs are taken to end with their forward.
        """
        return forward is not None and self.forward == forward

    def drop(self) -> None:
        """The slot was taken from this reader, whose run an error or interrupt has ended."""


class Slot:
    """One device buffer on one timeline (see ``[Note: two timelines]`` in replays.py).

    The state follows from ``readers`` while there are any, so an interrupt between two lines leaves no contradiction.

    Attributes:
        index: its number.
        memory: uint8, 1-D, at a fixed address.
        unit: what it holds or, while COPYING, will hold; ``None`` if EMPTY or HELD_BACK.
        transfer: the latest copy into it. Kept when it was waited for, because every stream that reads the slot has to
            wait for it; ``None`` once all streams are ordered after it.
        readers: the runs that read ``unit`` now.
        events: recorded after earlier readers; the next copy into the slot waits for them.
        position: in the expected order, of the latest run of a unit in it.
    """

    def __init__(self, index: int, memory: torch.Tensor, unit: int | None = None) -> None:
        self.index = index
        self.memory = memory
        self.unit = unit
        self.transfer: Transfer | None = None
        self.readers: list[Reader] = []
        self.events: list[ComputeEvent] = []
        self.position = -1
        self._state = SlotState.EMPTY if unit is None else SlotState.READY

    @property
    def state(self) -> SlotState:
        """State of the slot now."""
        return SlotState.IN_USE if self.readers else self._state

    def to_empty(self) -> None:
        """Give up the unit in the slot."""
        self._require(not self.readers, SlotState.EMPTY)
        self.unit = None
        self._state = SlotState.EMPTY

    def to_held_back(self) -> None:
        """Give up the unit in the slot; the next one comes with the next forward or replay."""
        self._require(not self.readers, SlotState.HELD_BACK)
        self.unit = None
        self._state = SlotState.HELD_BACK

    def to_copying(self, unit: int, transfer: Transfer) -> None:
        """A copy of ``unit`` was issued."""
        self.transfer = transfer  # even if the check fails, the copy must stay on record
        self._require(self.state in (SlotState.EMPTY, SlotState.HELD_BACK), SlotState.COPYING)
        self._state = SlotState.COPYING
        self.unit = unit

    def to_ready(self) -> None:
        """A stream has waited for the copy."""
        self._require(self.state is SlotState.COPYING, SlotState.READY)
        self._state = SlotState.READY

    def wait_for_copy(self, link: Link, measure: bool = False) -> float:
        """Let compute wait for the latest copy; seconds the caller was held (:meth:`Link.wait`)."""
        if self.transfer is None:
            return 0.0
        stalled_s = link.wait(self.transfer, measure)
        if self.state is SlotState.COPYING:
            self.to_ready()
        return stalled_s

    def record_read(self, link: Link) -> None:
        """The next copy waits for all compute submitted so far."""
        if (event := link.record_compute()) is not None:
            self.events.append(event)

    def to_in_use(self, reader: Reader) -> None:
        """``reader`` begins; others may be reading the same unit."""
        self._require(self.state in (SlotState.READY, SlotState.IN_USE), SlotState.IN_USE)
        self.readers.append(reader)

    def latest_reader(self) -> Reader | None:
        """The one of the calling thread that began last."""
        thread = threading.get_ident()
        return next((reader for reader in reversed(self.readers) if reader.thread == thread), None)

    def stale_readers(self, forward: int | None, alive: Collection[int] | None = None) -> list[Reader]:
        """Readers of the calling thread, which is in ``forward``, that ended without a release.

        ``alive``: idents of threads, to find those of threads that have ended, too.
        """
        mine = threading.get_ident()
        return [
            reader
            for reader in self.readers
            if (
                not reader.goes_on(forward)
                if reader.thread == mine
                else alive is not None and reader.thread not in alive
            )
        ]

    def _require(self, is_legal: bool, target: SlotState) -> None:
        """Raise ``StateError`` unless the slot may become ``target`` now."""
        if not is_legal:
            raise StateError(
                f"slot {self.index} with unit {self.unit} cannot become {target.name}, because it is "
                f"{self.state.name}; this is a bug in headrace: please report it, and offload the model again"
            )
