"""Slots under CUDA graphs: what a capture records about them, and what graphs and eager forwards leave to each other.

[Note: two timelines] While a graph is captured nothing runs: copies become nodes of the graph, and the slots keep what
they had. So there are two records of what the slots hold. The *live* one follows what has been given to the device.
The *captured* one follows what will have happened at that point of a replay; it begins with the first units in the
slots, because that is what every forward, eager or replayed, leaves behind. In a capture, a slot's content is trusted
only if it is one of these or was copied by a node of the same capture; anything else is copied again in the graph.

[Note: the held-back slot] Compute has to wait for the last copy before a graph ends, so a slot refilled after the last
unit would add a whole copy with no compute beside it, while the link idles at the start of the next replay. Therefore,
once there are graphs, the slot of the last unit is refilled not at the end of a forward but at the beginning of the
next, where the first layers hide it. Between forwards that slot is HELD_BACK, on both timelines.

[Note: announced replays] An engine that calls ``wait_all`` before each replay allows more. A graph then begins with the
first units in the slots, the held-back one too, and refills none of them at its end; an event inside it says when each
can be refilled. Behind these events the copies for the next forward run outside of any graph, beside whatever the
engine does between two of them. A replay leaves unknown units in the slots, so they become EMPTY when it is announced.
They are filled again when the engine says that the replay is under way (``finish_forward``), or else at the next
announcement. An event says nothing about a graph that reads the slot and does not record it (it skips the last unit of
a chain): once there is such a graph, copies into this slot wait for the end of the replay.

[Note: inputs of the next forward] An engine copies them to the device between two forwards, and a copy engine takes one
copy after the other: behind a unit of 300 MB they are 5 ms late, and compute stands still. Where the link is what a
forward waits for, that costs nothing. Once there are graphs of whole forwards, it is the large batches that run without
one, so behind such a forward all slots are HELD_BACK: their copies start with the next forward, behind its inputs.
Where only pieces between units are graphs, small batches run like that too, and no slot is held back.

[Note: loose modules] Pieces of a model may be replayed one by one with offloaded modules run by hand between them. What
the live record says about the slots is then out of date, and no forward begins that would refill the held-back one. So
a module that runs outside a forward once graphs exist gets its unit copied again, behind all compute that has been
given, and then its slot is refilled with what replays expect there, and waited for at once: slow, and right.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.plan.slots import chain, slot_of
from penstock.runtime.slot import Slot, SlotState
from penstock.transfer.link import Link

__all__ = ["GraphRecord"]


class GraphRecord:
    """What is known about the graphs captured over the slots of one prefetcher.

    Attributes:
        announced: the engine calls ``wait_all`` before every capture and replay.
        exist: a graph was captured, and may be replayed from now on.
        of_whole_forwards: with ``announced``: one of them holds a whole forward.
        slots: the captured timeline; ``None``: compute runs, and the live slots count.
    """

    def __init__(self, num_units: int, num_slots: int, announced: bool) -> None:
        self.announced = announced
        self.exist = False
        self.of_whole_forwards = False
        self.slots: list[Slot] | None = None
        self._shared = {slot for slot in range(num_slots) if len(chain(slot, num_units, num_slots)) > 1}
        self._last_slot = slot_of(num_units - 1, num_slots)
        self._read: set[int] = set()  # slots that the present capture reads without recording an event behind it
        self._without_event: set[int] = set()  # the same for all graphs that have been captured

    @property
    def held_back(self) -> int | None:
        """Number of the slot that is empty between forwards; see the note of that name."""
        holds_back = self.exist and not self.announced and self._last_slot in self._shared
        return self._last_slot if holds_back else None

    def begin_capture(self, live: Sequence[Slot]) -> list[Slot]:
        """The captured timeline, as it is at the beginning of a graph."""
        is_first, self.exist = not self.exist, True
        captured = []
        for slot in live:
            # A module that ran outside of a forward before the first capture may have left another unit in its slot.
            is_trusted = self.announced or (slot.unit == slot.index and slot.index != self.held_back)
            captured.append(Slot(slot.index, slot.memory, slot.index if is_trusted else None))
            clear = Slot.to_held_back if slot.index == self.held_back else Slot.to_empty
            if not is_trusted:
                clear(captured[-1])
            if not is_trusted and is_first and slot.state is not SlotState.IN_USE:
                clear(slot)  # replays overwrite it
        self.slots = captured
        return captured

    def end_capture(self) -> None:
        """Compute runs again, or another graph begins."""
        self._without_event |= self._read
        self._read = set()
        self.slots = None

    def note_read(self, slot: Slot) -> None:
        """A module of the graph that is captured reads ``slot``."""
        self._read.add(slot.index)

    def try_hold_back(self, slot: Slot, is_loose: bool, link: Link) -> bool:
        """Hold ``slot`` back, whose last unit has run, if its first one is to come with the next forward or replay.

        Returns:
            whether it was; else the slot is refilled now.
        """
        in_capture = self.slots is not None
        if self.announced:
            is_due = in_capture or (self.of_whole_forwards and not is_loose)
        else:
            is_due = slot.index == self.held_back
        if not is_due:
            return False
        slot.to_held_back()
        if in_capture:
            slot.transfer, slot.events = None, []  # events of this capture mean nothing to the next
        if in_capture and self.announced:
            link.leave_replay_event(slot.index)
            self._read.discard(slot.index)
        return True

    def give_up(self, live: Sequence[Slot], link: Link) -> None:
        """A replay follows: the slots may hold any unit from now on, and can be refilled behind its events."""
        for slot in live:
            if slot.index in self._shared:
                slot.to_empty()
                slot.transfer = None
                event = None if slot.index in self._without_event else link.replay_event(slot.index)
                slot.events = [*slot.events, event] if event is not None else []
