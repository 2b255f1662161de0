"""Effects of CUDA graphs on slots: graphs of engines, of other code, and of our own.

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

from collections.abc import Callable, Sequence

from headrace.errors import StateError, warn_user
from headrace.plan.schedule import Schedule, slot_of
from headrace.runtime.forwards import Forwards
from headrace.runtime.slot import Slot
from headrace.transfer.link import Link, Transfer

# Given an action during a capture in segments: end the segment, run the action, now and in every replay, begin the next
# segment, return True. At any other time: return False.
BreakCapture = Callable[[Callable[[], None]], bool]


class Replays:
    """State of the graphs captured over the slots of one prefetcher, and what they ask of these.

    Called with the lock of ``forwards``.

    Attributes:
        live: the slots as the device was told to fill them: ``[Note: two timelines]``.
        captured: the slots at this point of the present capture; ``None``: compute runs, and the live slots count.
        announced: ``wait_all`` is called before every capture and replay: ``[Note: announced replays]``.
        exist: a graph was captured, and may be replayed from now on.
        partial: one holds a part of a forward: ``[Note: partial graphs]``. Never with ``announced``.
        in_part: the present capture is one of a part of a forward.
        is_due: a replay was announced, and the live slots do not show yet what it leaves in them.
        are_own: this project has captured them (own_graphs.py). Then other code captures none: a replay that is
            not announced would find other units in the slots.
    """

    def __init__(
        self, live: list[Slot], link: Link, forwards: Forwards, schedule: Schedule, announced: bool, refused: bool
    ) -> None:
        """``refused``: a forward may run a unit several times or not at all, and is not captured."""
        self.live = live
        self._link = link
        self._forwards = forwards
        self._refused = refused
        self._captures_own = False
        self._forget(schedule, announced)

    def _forget(self, schedule: Schedule, announced: bool) -> None:
        """There are no graphs."""
        self.captured: list[Slot] | None = None
        self.announced = announced
        self.exist = self.partial = self.in_part = self.is_due = self.are_own = False
        self._of_whole_forwards = False  # with announced: one of them holds a whole forward
        self._capture: int | None = None  # which one ``captured`` belongs to (:attr:`Link.capture_id`)
        self._read: set[int] = set()  # slots that the present capture reads without recording an event after it
        self._without_event: set[int] = set()  # the same for all graphs that have been captured
        self.follow(schedule)

    def follow(self, schedule: Schedule) -> None:
        """Graphs, of which there are none yet, will be captured under ``schedule``."""
        self._schedule = schedule
        self._first = schedule.first
        self._shared = {slot for slot, units in enumerate(schedule.chains) if len(units) > 1}
        self._last_slot = slot_of(schedule.order[-1], schedule.num_slots)

    @property
    def held_back(self) -> int | None:
        """Number of the slot that is empty between forwards: ``[Note: the held-back slot]``."""
        # A unit that has its slot alone stays there: to hold it back would copy it again in every forward.
        holds_back = self.exist and not self.announced and self._last_slot in self._shared
        return self._last_slot if holds_back else None

    # -- the slots that count ---------------------------------------------------------------------------------------

    def slots(self) -> list[Slot]:
        """Slots of the timeline that compute is on now; asked first in every call, since it follows graphs."""
        if self.is_due:
            self._give_up()
        capture = self._link.capture_id
        if capture is not None:
            self._require_allowed()
        if self.captured is not None:
            if capture == self._capture:
                return self.captured
            self._require_finished()
            self._end_capture()
        if capture is None:
            return self.live
        return self._begin_capture(capture, self._link.joined_by_caller)

    def _require_allowed(self) -> None:
        """Raise ``StateError`` if nothing is to be captured now."""
        if self._refused:
            raise StateError(
                "a CUDA graph was being captured of a part of an offloaded pipeline, whose components take turns "
                "in the slots, so that a replay would find other units there: compile without graphs "
                "(torch.compile's mode 'default' or 'max-autotune-no-cudagraphs')"
            )
        if self.are_own and not self._captures_own:
            raise StateError(
                "a CUDA graph was being captured over an offload whose generate() has graphs of its own: turn those "
                "off (graphs=False) to capture the model yourself"
            )

    def _require_finished(self) -> None:
        """Raise ``StateError`` if a capture has ended inside the forward that it was to hold."""
        if self.in_part or self.announced or self._link.joined_by_caller or not self._forwards.end():
            return
        raise StateError(
            "a CUDA graph ended inside a forward that it was to hold, so a replay would leave other units in the slots "
            "than the next one expects: compile without partitions (torch._inductor.config.graph_partition = False), "
            "or without graphs (torch.compile's mode 'default')"
        )

    def is_read_here(self, unit: int) -> bool:
        """Whether the calling thread runs a module that reads ``unit``, or an error ended it and ``unit`` is left."""
        # Without the lock: it runs beside others, and only this thread ends its own readers.
        captured = self.captured
        slots = self.live if captured is None or self._link.capture_id != self._capture else captured
        return any(slot.unit == unit and slot.latest_reader() is not None for slot in slots)

    @property
    def in_capture(self) -> bool:
        """Whether compute is being recorded into a graph."""
        return self._link.capturing

    def is_loose(self, in_forward: bool) -> bool:
        """Whether a module that runs now does so by itself, between replays or in a part of a forward.

        See ``[Note: loose modules]`` and ``[Note: partial graphs]``.
        """
        if self.captured is not None:
            return self.in_part
        return self.exist and (self.partial or not in_forward)

    def _begin_capture(self, capture: int, whole: bool) -> list[Slot]:
        """The captured timeline, as it is at the beginning of a graph.

        ``whole``: it holds a forward, or is joined by its owner.
        """
        self._capture, self.in_part = capture, not (whole or self.announced)
        is_first, self.exist = not self.exist, True
        captured = []
        for slot in self.live:
            # A module that ran outside of a forward before the first capture may have left another unit in its slot.
            first = self._first[slot.index]
            is_trusted = self.announced or (slot.unit == first and slot.index != self.held_back)
            captured.append(Slot(slot.index, slot.memory, first if is_trusted else None))
            # A graph of our own waits inside for copies that go on when it is replayed.
            if self._captures_own and (copy := self._copy_before_replays(slot)) is not None:
                captured[-1].to_empty()
                captured[-1].to_copying(first, copy)
            clear = Slot.to_held_back if slot.index == self.held_back else Slot.to_empty
            if not is_trusted:
                clear(captured[-1])
            if not is_trusted and is_first and not slot.readers:
                clear(slot)  # replays overwrite it
        self.captured = captured
        return captured

    def _end_capture(self) -> None:
        """Compute runs again, or another graph begins."""
        self._without_event |= self._read
        self._read = set()
        self.captured = None
        self.in_part = False

    def _copy_before_replays(self, slot: Slot) -> Transfer | None:
        """Copy the first unit into ``slot``, where graphs of our own wait for it where they read it."""
        # A unit that has its slot alone stays there, and is waited for once.
        return self._link.copy_event(slot.index, self._first[slot.index]) if slot.index in self._shared else None

    def _give_up(self) -> None:
        """After a replay the slots may hold any unit, and can be refilled after its events."""
        self.is_due = False
        for slot in self.live:
            if slot.index in self._shared:
                slot.to_empty()
                slot.transfer = None
                event = None if slot.index in self._without_event else self._link.replay_event(slot.index)
                # Without any event the next copy waits for all compute submitted until then, the replay included.
                slot.events = [*slot.events, event] if event is not None else []

    # -- a forward --------------------------------------------------------------------------------------------------

    def begin_forward(self, whole: bool) -> list[Slot]:
        """The slots; none where a graph of a part copies each unit where it is used.

        ``whole``: a graph that is being captured will hold all of the forward.
        """
        self._end_capture()  # of a forward before, or of one that was aborted
        if (capture := self._link.capture_id) is not None and not self._refused:
            self._begin_capture(capture, whole or self._link.joined_by_caller)
        return [] if self.in_part else self.slots()

    def end_forward(self, slots: Sequence[Slot]) -> bool:
        """A forward has ended: whether its first units are to be copied now, but for what is held back."""
        if self.announced and self.captured is not None:
            self._of_whole_forwards = True
            return False
        if (index := self.held_back) is not None and not slots[index].readers:
            slots[index].wait_for_copy(self._link)  # of a forward that was cut short or skipped its last unit
            slots[index].to_held_back()
        return True

    def join(self, slots: Sequence[Slot]) -> None:
        """Let compute wait for all copies at the end of a forward, if a graph ends there or a replay may follow.

        A graph has to wait for all copies that it starts. Once graphs exist an eager forward waits, too: a replay
        checks nothing, so what it finds in the slots has to be ordered before it.
        """
        if self.captured is not None or (self.exist and not self.announced):
            self.wait_for_copies(slots)

    def wait_for_copies(self, slots: Sequence[Slot]) -> None:
        """Let compute wait for the copies into ``slots``."""
        for slot in slots:
            slot.wait_for_copy(self._link)
            if self.captured is not None:
                slot.transfer = None  # its event means nothing to the graph of the next piece

    def announce(self, slots: Sequence[Slot]) -> None:
        """A replay follows, and its first units are in ``slots`` or on the way."""
        # What is under way to a slot that units share, graphs of our own wait for themselves.
        self.wait_for_copies([s for s in slots if not (self.are_own and self._copy_before_replays(s) is not None)])
        self.is_due = True

    def note_caller(self) -> None:
        """Some code calls ``wait_all``, and so at the ends of its captures."""
        self._link.joined_by_caller |= self.captured is None and not self.are_own

    # -- a unit -----------------------------------------------------------------------------------------------------

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

    def try_hold_back(self, slot: Slot, is_loose: bool) -> bool:
        """Hold ``slot`` back, whose last unit has run, if its first one is to come with the next forward or replay.

        Returns:
            whether it was; else the slot is refilled now.
        """
        in_capture = self.captured is not None
        if self.announced:
            is_due = in_capture or (self._of_whole_forwards and not is_loose)
        else:
            is_due = slot.index == self.held_back
        if not is_due:
            return False
        slot.to_held_back()
        if in_capture:
            slot.transfer, slot.events = None, []  # events of this capture mean nothing to the next
        # The copies for the next forward run outside of graphs, so the end of the read has to be visible there.
        if in_capture and self.announced:
            self._link.leave_replay_event(slot.index)
            self._read.discard(slot.index)
        return True

    @property
    def events_are_old(self) -> bool:
        """Whether events of slots do not cover all reads: a replay that was not announced records none."""
        return self.exist and not self.announced and self.captured is None

    # -- graphs of our own ------------------------------------------------------------------------------------------

    def can_capture(self) -> bool:
        """Whether this project may capture graphs of its own: no other code has captured any."""
        return self.are_own or not self.exist

    def own(self) -> None:
        """From here to :meth:`end_own` a graph of our own is captured (own_graphs.py)."""
        assert self.can_capture()
        self.are_own = self.announced = self._captures_own = True
        for slot in self.live:  # so that every graph finds the events, and so waits for them
            self._link.leave_copy_event(slot.index)

    def end_own(self) -> None:
        """The capture has ended."""
        self._captures_own = False

    def note_copy(self, slot: Slot) -> None:
        """Outside of captures: a copy into ``slot`` was issued."""
        if self.are_own:
            self._link.leave_copy_event(slot.index)

    def release_graphs(self, of_others: bool = False) -> None:
        """Our own graphs are freed, or those ``of_others``, and none of them runs any more: other code may capture."""
        with self._forwards.lock:
            if (self.are_own or of_others) and not self._forwards.closed:
                self.slots()  # an announced replay that never came
                self._forget(self._schedule, announced=False)

    # -- the end ----------------------------------------------------------------------------------------------------

    def require_released(self, graphs_released: bool) -> None:
        """Raise ``StateError`` if graphs may still be replayed."""
        if self.exist and not graphs_released and not self.are_own:
            raise StateError(
                "graphs were captured over this offload, and a replay after remove() or park() would read memory that "
                "is gone: delete the graphs, then call it with graphs_released=True"
            )

    def close(self) -> None:
        """Free the slots."""
        self.live = []
        self._end_capture()
