"""The memory in which coded units are decoded, one at a time: what a copy has brought is readable there after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.plan.schedule import slot_of
from headrace.stores.store import Load
from headrace.transfer.link import ComputeEvent, Link


def slot_sizes(planned: Sequence[int], loads: Sequence[Load]) -> list[int]:
    """Bytes of each slot: as ``planned``, or more, for a code may be longer than the plan expects."""
    sizes = list(planned)
    for load in loads:
        if load.coded:
            slot = slot_of(load.unit, len(sizes))
            sizes[slot] = max(sizes[slot], sum(part.numel() for _, part in load.in_memory))
    return sizes


class DecodingMemory:
    """Holds a coded unit for as long as it is read; slots hold the codes of these.

    Attributes:
        memory: where compute reads each of them: uint8, 1-D.
    """

    def __init__(self, link: Link, num_bytes: int) -> None:
        self._link = link
        self.memory = link.allocate(num_bytes)
        self._uses: list[tuple[int | None, ComputeEvent]] = []  # the latest: their captures and ends

    def make_readable(self, load: Load, code: torch.Tensor, reads: list[ComputeEvent]) -> None:
        """Decode ``code``, whose copy was waited for; ``reads`` gets an event after which it may be overwritten."""
        capture = self._link.capture_id
        after = [event for captured, event in self._uses if captured == capture]
        self._link.decode(load, code, self.memory, after)
        if (event := self._link.record_compute()) is not None:
            reads.append(event)
            self._uses = [(capture, event)]  # it comes after those before

    def note_read(self) -> None:
        """Let the next decoding wait for all compute submitted so far, which may read this memory."""
        if (event := self._link.record_compute()) is not None:
            self._uses.append((self._link.capture_id, event))
