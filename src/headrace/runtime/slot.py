"""Slots: their units, the modules that read them, the owner of their bytes, and what CUDA graphs change about these.

[Note: two timelines] While a graph is captured nothing runs: copies become nodes of the graph, and the slots keep what
they had. So there are two records of what the slots hold. The *live* one follows what has been submitted to the device.
The *captured* one follows what will have happened at that point of a replay; it begins with the first units in the
slots, because that is what every forward, eager or replayed, leaves behind. In a capture, a slot's content is trusted
only if it is one of these or was copied by a node of the same capture; anything else is copied again in the graph.

[Note: the held-back slot] Compute has to wait for the last copy before a graph ends, so a slot refilled after the last
unit would add a whole copy with no compute beside it, while the link idles at the start of the next replay. Therefore,
once there are graphs, the slot of the last unit is refilled not at the end of a forward but at the beginning of the
next, where the first layers hide it. Between forwards that slot is HELD_BACK, on both timelines.

[Note: announced replays] An engine that calls ``wait_all`` before each replay allows more. A graph then begins with the
first units in the slots, the held-back one too, and refills none of them at its end; an event inside it marks when each
can be refilled. Behind these events the copies for the next forward run outside of any graph, beside whatever the
engine does between two of them. A replay leaves unknown units in the slots, so after an announcement they are EMPTY.
They are filled again when the engine reports that the replay is under way (``finish_forward``), or else at the next
announcement. An event does not cover a graph that reads the slot and does not record it (it skips the last unit of a
chain): once there is such a graph, copies into this slot wait for the end of the replay.

[Note: inputs of the next forward] An engine copies them to the device between two forwards, and a copy engine takes one
copy after the other: behind a unit of 300 MB they are 5 ms late, and compute stands still. Where the link is what a
forward waits for, that costs nothing. Once there are graphs of whole forwards, it is the large batches that run without
one, so after such a forward all slots are HELD_BACK: their copies start with the next forward, after its inputs.
Where only pieces between units are graphs, small batches run like that too, and no slot is held back.

[Note: breakable captures] An engine may capture a forward in segments and replay them with host code in between, but
without the Python code of the model. Both ends of a unit, and of the forward, become such host code: they end the
segment, act as without graphs, and act again in every replay. So no copy is in a graph, and one may go on beside
several segments.

[Note: partial graphs] A capture whose owner does not call ``wait_all`` may hold a part of a forward (a graph break in
compiled code, a module captured by itself). It ends where no call of ours shows it, and another part may follow, as a
graph or not. So in such a capture each unit is copied where it is used, and the first unit is copied back into its slot
after it; both copies are joined at once. Every graph then finds the first units in the slots and leaves them there.
Outside of captures modules run like loose ones from then on, since a replay between two of them shows nowhere either.

[Note: loose modules] Pieces of a model may be replayed one by one with offloaded modules run by hand between them. The
live record of the slots is then out of date, and no forward begins that would refill the held-back one. So
a module that runs outside a forward once graphs exist gets its unit copied again, after all compute that has been
submitted, and then its slot is refilled with what replays expect there, and waited for at once: slow, and right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import Enum, auto

import torch

from headrace.errors import StateError, warn_user
from headrace.plan.schedule import Schedule, slot_of
from headrace.transfer.link import ComputeEvent, Link, Transfer

__all__ = ["BreakCapture", "GraphRecord", "Reader", "Slot", "SlotState"]

# Given an action during a capture in segments: end the segment, run the action, now and in every replay, begin the next
# segment, return True. At any other time: return False.
BreakCapture = Callable[[Callable[[], None]], bool]


class SlotState(Enum):
    """What a slot holds, and which side owns its bytes.

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
    """One device buffer on one timeline (see ``[Note: two timelines]``).

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
        """What the slot holds now."""
        return SlotState.IN_USE if self.readers else self._state

    def to_empty(self) -> None:
        """Its unit is given up."""
        self._require(not self.readers, SlotState.EMPTY)
        self.unit = None
        self._state = SlotState.EMPTY

    def to_held_back(self) -> None:
        """Its unit is given up, and the next one comes with the next forward or replay."""
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

    def stale_readers(self, forward: int | None) -> list[Reader]:
        """Readers of the calling thread, which is in ``forward``, that ended without a release."""
        thread = threading.get_ident()
        return [reader for reader in self.readers if reader.thread == thread and not reader.goes_on(forward)]

    def _require(self, is_legal: bool, target: SlotState) -> None:
        """Raise ``StateError`` unless the slot may become ``target`` now."""
        if not is_legal:
            raise StateError(
                f"slot {self.index} with unit {self.unit} cannot become {target.name}, because it is "
                f"{self.state.name}; this is a bug in headrace: please report it, and offload the model again"
            )


class GraphRecord:
    """What is known about the graphs captured over the slots of one prefetcher.

    Attributes:
        announced: the engine calls ``wait_all`` before every capture and replay.
        exist: a graph was captured, and may be replayed from now on.
        of_whole_forwards: with ``announced``: one of them holds a whole forward.
        partial: one holds a part of a forward: ``[Note: partial graphs]``. Never with ``announced``.
        capture: which capture ``slots`` belongs to (:attr:`Link.capture_id`).
        in_part: it is one of a part of a forward.
        replay_is_due: one was announced, and the live slots do not show yet what it leaves in them.
        slots: the captured timeline; ``None``: compute runs, and the live slots count.
    """

    def __init__(self, schedule: Schedule, announced: bool) -> None:
        self.announced = announced
        self.exist = False
        self.of_whole_forwards = False
        self.partial = False
        self.capture: int | None = None
        self.in_part = False
        self.replay_is_due = False
        self.slots: list[Slot] | None = None
        self.follow(schedule)
        self._read: set[int] = set()  # slots that the present capture reads without recording an event after it
        self._without_event: set[int] = set()  # the same for all graphs that have been captured

    def follow(self, schedule: Schedule) -> None:
        """Graphs, of which there are none yet, will be captured under ``schedule``."""
        self._first = schedule.first
        self._shared = {slot for slot, units in enumerate(schedule.chains) if len(units) > 1}
        self._last_slot = slot_of(schedule.order[-1], schedule.num_slots)

    @property
    def held_back(self) -> int | None:
        """Number of the slot that is empty between forwards: ``[Note: the held-back slot]``."""
        # A unit that has its slot alone stays there: to hold it back would copy it again in every forward.
        holds_back = self.exist and not self.announced and self._last_slot in self._shared
        return self._last_slot if holds_back else None

    def begin_capture(self, live: Sequence[Slot], capture: int, whole: bool, link: Link | None = None) -> list[Slot]:
        """The captured timeline, as it is at the beginning of a graph.

        ``whole``: it holds a forward, or is joined by its owner. ``link``: of a graph of our own, which waits inside
        for copies that go on when it is replayed.
        """
        self.capture, self.in_part = capture, not (whole or self.announced)
        is_first, self.exist = not self.exist, True
        captured = []
        for slot in live:
            # A module that ran outside of a forward before the first capture may have left another unit in its slot.
            first = self._first[slot.index]
            is_trusted = self.announced or (slot.unit == first and slot.index != self.held_back)
            captured.append(Slot(slot.index, slot.memory, first if is_trusted else None))
            if link is not None and (copy := self._copy_before_replays(slot, link)) is not None:
                captured[-1].to_empty()
                captured[-1].to_copying(first, copy)
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
        self.in_part = False

    def waits_inside(self, slot: Slot, link: Link) -> bool:
        """Whether graphs of our own wait for the copy of the first unit into ``slot`` where they read it."""
        return self._copy_before_replays(slot, link) is not None

    def _copy_before_replays(self, slot: Slot, link: Link) -> Transfer | None:
        # A unit that has its slot alone stays there, and is waited for once.
        return link.copy_event(slot.index, self._first[slot.index]) if slot.index in self._shared else None

    def note_part(self) -> None:
        """A unit is used in the present capture, which holds a part of a forward; warn once."""
        if not self.partial:
            self.partial = True
            warn_user(
                "a CUDA graph holds a part of a forward, so its units are copied where they are used, without overlap: "
                "compile the model without graph breaks (torch.compile(..., fullgraph=True) names them), or capture "
                "forwards of the whole model"
            )

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
        # The copies for the next forward run outside of graphs, so the end of the read has to be visible there.
        if in_capture and self.announced:
            link.leave_replay_event(slot.index)
            self._read.discard(slot.index)
        return True

    def give_up(self, live: Sequence[Slot], link: Link) -> None:
        """After a replay the slots may hold any unit, and can be refilled after its events."""
        self.replay_is_due = False
        for slot in live:
            if slot.index in self._shared:
                slot.to_empty()
                slot.transfer = None
                event = None if slot.index in self._without_event else link.replay_event(slot.index)
                # Without any event the next copy waits for all compute submitted until then, the replay included.
                slot.events = [*slot.events, event] if event is not None else []
