"""Copies units into slots ahead of use: which unit is where, which code reads it, and what is copied next.

The prefetcher follows the slot schedule while modules run in the expected order. If they do not, results stay right: a
unit whose slot holds another one is copied on demand (a *miss*), which is slower and counted in ``stats()``. The
expected order is the plan's, until a forward has run every unit once in another order; then it is that order. Captured
graphs fix the order of their copies, so it does not change once there are any. A pipeline of several models
(``repeats``) runs some units several times and leaves others out: it is predicted to repeat the order of the previous
call, and a run of units that has begun again is taken for a loop that continues.

Two threads may call the model: a slot that one of them reads is not refilled before it is done.

slot.py says what graphs change.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from headrace.errors import SlotConflictError, StateError, TransferError
from headrace.plan.plan import Plan
from headrace.plan.schedule import Schedule, slot_of
from headrace.runtime.slot import BreakCapture, GraphRecord, Reader, Slot, SlotState
from headrace.stats import Recorder, UnitStats
from headrace.stores.store import Store
from headrace.transfer.link import ComputeEvent, Link

if TYPE_CHECKING:
    from headrace.runtime.debug import Guard
    from headrace.stores.sources import Copy

__all__ = ["Prefetcher", "release_left"]

# A forward that holds a slot for longer than this is taken to be stuck, not slow.
CONFLICT_TIMEOUT_S = 600.0

# How long remove() waits for forwards of other threads.
STOP_TIMEOUT_S = 30.0

# Runs of units in one call of a pipeline that are remembered: hours of them.
_MOST_RUNS = 1 << 20
# Runs that are expected of a call before it has shown its order, with all its loops.
_MOST_EXPECTED = 1 << 16


def _new_guard(plan: Plan, copies: Sequence[Sequence[Copy]], promoted: Collection[str]) -> Guard:
    from headrace.runtime.debug import Guard

    return Guard(plan, copies, promoted)


class Prefetcher:
    """Copies units from ``store`` through ``link`` into slots ahead of their use.

    Each forward calls :meth:`begin_forward`, then :meth:`wait` and :meth:`release` around every module that reads a
    unit, then :meth:`finish_forward`.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        link: Link,
        recorder: Recorder,
        debug: bool = False,
        replays_announced: bool = False,
        break_capture: BreakCapture | None = None,
        repeats: bool = False,
        promoted: Collection[str] = (),
    ) -> None:
        """``debug``: poison and check slots, but for storages that are ``promoted`` then. For the others see slot.py.

        ``replays_announced``: ``[Note: announced replays]``. ``break_capture``: ``[Note: breakable captures]``.
        ``repeats``: a forward may run a unit several times or not at all, and is not captured.
        """
        self._plan = plan
        self._link = link
        self._break_capture = break_capture
        self._recorder = recorder
        self._loads = [store.load(unit) for unit in plan.units]
        link.prepare(plan, self._loads)
        self._coded = frozenset(load.unit for load in self._loads if load.coded)
        self._copy_bytes = [
            unit.payload_bytes if load.coded_bytes is None else load.coded_bytes
            for unit, load in zip(plan.units, self._loads, strict=True)
        ]
        sizes = list(plan.slot_bytes)
        for unit in self._coded:  # whose code may be longer than the plan expects
            slot = slot_of(unit, len(sizes))
            sizes[slot] = max(sizes[slot], sum(part.numel() for _, part in self._loads[unit].in_memory))
        self.slots_bytes = sum(sizes) + plan.decoding_bytes
        self._live = [Slot(index, link.allocate(num_bytes)) for index, num_bytes in enumerate(sizes)]
        # Of one coded unit at a time, for as long as it is read; slots hold the code of these.
        self._decoded = link.allocate(plan.decoding_bytes) if self._coded else None
        self._uses: list[tuple[int | None, ComputeEvent]] = []  # the latest of that memory: their captures and ends
        self._num_units, self._num_slots = len(plan.units), len(self._live)
        self._schedule = Schedule(tuple(range(self._num_units)), self._num_slots)
        self._position = -1  # in the expected order, of the latest run
        self._repeats = repeats
        self._seen: list[int] = []  # units in the order in which the latest forward has run them, one more at most
        self._most_seen = _MOST_RUNS if repeats else self._num_units
        self._graphs = GraphRecord(self._schedule, replays_announced)
        self._forwards: dict[int, int] = {}  # idents of the threads inside a forward of the model -> its number
        self._forward_numbers = itertools.count()
        self.has_run = False
        # Held directly, for a Ctrl-C inside the condition's own Python code could leave it locked forever.
        self._lock = threading.RLock()
        self._free = threading.Condition(self._lock)
        self._closed = False
        self._stopping = False
        self._owns_graphs = self._captures_own = False  # see capturing()
        self._pid = os.getpid()
        decoded = [store.unit_copies(plan.units[load.unit]) if load.coded else load.copies for load in self._loads]
        self._guard = _new_guard(plan, decoded, promoted) if debug and plan.kind.has_bytes else None
        self.stats = [UnitStats(unit.module_fqn, unit.store) for unit in plan.units]

    def slot_memory(self, unit: int) -> Tensor:
        """Where compute reads ``unit``: uint8, 1-D, fixed for the life of the prefetcher."""
        if self._decoded is not None and unit in self._coded:
            return self._decoded
        return self._live[slot_of(unit, self._num_slots)].memory

    # -- a forward --------------------------------------------------------------------------------------------------

    def prefetch_first(self, held_back: bool = False) -> None:
        """Start the units that a forward needs first, where other units are in their slots, or none.

        ``held_back``: also those left to the beginning of the next forward.
        """
        with self._lock:
            slots = self._slots()
            for index, unit in self._schedule.first.items():
                slot = slots[index]
                if slot.unit == unit or slot.readers or self._closed:
                    continue
                if held_back or slot.state is not SlotState.HELD_BACK:
                    self._start(unit, slot)

    def begin_forward(self, in_segments: bool = False, whole: bool = True) -> None:
        """A forward begins: start what was left to it, after all compute submitted so far.

        ``in_segments``: it is the replay that was announced, and leaves the slots to this object. ``whole``: a graph
        that is being captured will hold all of it.
        """
        if self._break_capture is not None and self._break_capture(lambda: self.begin_forward(in_segments=True)):
            return
        self._require_own_process()
        with self._lock:
            if in_segments:
                self._graphs.replay_is_due = False
            self._require_open(begins=True)
            self.has_run = True
            self._forwards[threading.get_ident()] = next(self._forward_numbers)
            self._seen, self._position = [], -1
            self._link.check()
            self._graphs.end_capture()  # of a forward before, or of one that was aborted
            if (capture := self._link.capture_id) is not None and not self._repeats:
                whole = whole or self._link.joined_by_caller
                self._graphs.begin_capture(self._live, capture, whole, self._link if self._captures_own else None)
            # Only slots without a unit: a compiler that moved this call after the first units must do no harm.
            for slot in self._slots() if not self._graphs.in_part else ():
                first = self._schedule.first.get(slot.index)
                if first is not None and slot.state in (SlotState.EMPTY, SlotState.HELD_BACK):
                    self._start(first, slot, behind_compute=True)
                    if self._is_loose:  # a graph of a part that is replayed next waits for no copy outside of it
                        self._wait_for(slot)

    def finish_forward(self, whole: bool = True) -> None:
        """The model has returned: make the slots ready for the next forward, eager or replayed.

        ``whole``: it was not cut short by an exception.

        A graph has to wait for all copies that it starts. Once graphs exist an eager forward waits, too: a replay
        checks nothing, so what it finds in the slots has to be ordered before it.
        """
        if self._is_forked or (self._break_capture is not None and self._break_capture(self.finish_forward)):
            return
        with self._lock:
            self._forwards.pop(threading.get_ident(), None)
            self._free.notify_all()
            if self._closed:
                return
            slots, graphs = self._slots(), self._graphs
            for slot in slots:
                self._drop_stale_readers(slot)
            if whole and not graphs.exist and not self._forwards:
                self._adopt_order()
            if graphs.announced and self._capturing:
                graphs.of_whole_forwards = True
            else:
                if (index := graphs.held_back) is not None and not slots[index].readers:
                    self._wait_for(slots[index])  # of a forward that was cut short or skipped its last unit
                    slots[index].to_held_back()
                self.prefetch_first()
            if self._capturing or (graphs.exist and not graphs.announced):
                self._wait_for_copies(slots)
            if whole:
                self._link.check()

    def wait_all(self) -> None:
        """Order compute after every copy under way; no effect when there is none.

        This also announces a replay, where they are announced, except inside a forward, whose pieces may be graphs.
        """
        self._require_own_process()
        with self._lock:
            slots, graphs = self._slots(), self._graphs
            self._link.joined_by_caller |= not self._capturing and not self._owns_graphs
            if self._capturing or not graphs.announced:
                self._wait_for_copies(slots)
            elif threading.get_ident() not in self._forwards:
                for slot in slots:
                    self._drop_stale_readers(slot)
                self.prefetch_first(held_back=True)
                # What is under way to a slot that units share, graphs of our own wait for themselves.
                awaited = [slot for slot in slots if not (self._owns_graphs and graphs.waits_inside(slot, self._link))]
                self._wait_for_copies(awaited)
                graphs.replay_is_due = True

    def may_own_graphs(self) -> bool:
        """Whether this project may capture graphs of its own: no other code has captured any."""
        return self._owns_graphs or not self._graphs.exist

    @contextmanager
    def capturing(self) -> Iterator[list[int]]:
        """Within, a whole forward is captured that is replayed within :meth:`replaying` alone.

        From then on other code captures none: a replay that is not announced would find other units in the slots.

        Yields:
            empty; at the end the units that each replay copies.
        """
        with self._lock:
            assert self.may_own_graphs()
            self._owns_graphs = self._graphs.announced = self._captures_own = True
            before, copied = [stats.captured_copies for stats in self.stats], list[int]()
            for slot in self._live:  # so that every graph finds the events, and so waits for them
                self._link.leave_copy_event(slot.index)
        try:
            with self.replaying():  # a capture too begins with the first units in the slots
                yield copied
        finally:
            self._captures_own = False
            for unit, (stats, earlier) in enumerate(zip(self.stats, before, strict=True)):
                copied += [unit] * (stats.captured_copies - earlier)

    def disown_graphs(self) -> None:
        """Graphs of :meth:`capturing` are freed, and none of them runs any more: other code may capture."""
        with self._lock:
            if self._owns_graphs and not self._closed:
                self._slots()  # an announced replay that never came
                self._owns_graphs = False
                self._graphs = GraphRecord(self._schedule, announced=False)

    @contextmanager
    def replaying(self, copied: Sequence[int] = ()) -> Iterator[None]:
        """Within, a graph of :meth:`capturing`, which gave ``copied``, is replayed beside no other forward."""
        with self._lock:
            self._forwards.pop(threading.get_ident(), None)  # of compiled code that raised, which does not end it
            self._wait_until(lambda: not self._forwards, "a graph is replayed alone, beside no forward, and one")
            self.wait_all()
            try:
                yield
                for unit in copied:
                    self._count_copy(unit)
            finally:
                self.finish_forward(whole=False)

    def _adopt_order(self) -> None:
        """Expect the order of the forward that has just ended, if it has run every unit once or may do otherwise."""
        order = tuple(self._seen)
        is_order = 0 < len(order) <= _MOST_RUNS if self._repeats else sorted(order) == list(range(self._num_units))
        if is_order and order != self._schedule.order:
            self._schedule = Schedule(order, self._num_slots)
            self._graphs.follow(self._schedule)

    def _locate(self, unit: int, in_forward: bool) -> int:
        """The position of the run of ``unit`` that begins, in the expected order."""
        found = self._schedule.find(unit, self._position + 1)
        if found is None:
            return self._position  # expected nowhere, so the rest still is
        is_loop = self._repeats and in_forward and found <= self._position and unit in self._seen
        if is_loop and len(self._schedule.order) < _MOST_EXPECTED:  # what makes no sense as loops must not grow
            self._schedule = self._schedule.again(found, self._position)
            found = self._position + 1
        self._position = found
        return found

    # -- a unit -----------------------------------------------------------------------------------------------------

    def wait(self, unit: int, reader: Reader | None = None) -> None:
        """Return when compute may read ``unit``; it stays in its slot until :meth:`release`.

        ``reader``: this run of the unit; by default one that goes on as long as the forward that it is in.

        Raises:
            TransferError: its copy failed; the next call tries again.
            SlotConflictError: a unit that runs further out in this thread has the slot, or another thread has held it
                for ten minutes.
        """
        # Without the reader, which replays do not have.
        if self._break_capture is not None and self._break_capture(lambda: self.wait(unit)):
            return
        self._require_own_process()
        with self._lock:
            forward = self._forwards.get(threading.get_ident())
            self._require_open(begins=forward is None)
            index = slot_of(unit, self._num_slots)
            slot = self._slots()[index]
            if self._graphs.in_part:
                self._graphs.note_part()
            if slot.readers:
                self._drop_stale_readers(slot)
            if slot.readers or unit in self._coded:
                while (busy := self._held_by_others(unit, index)) is not None:
                    self._drop_stale_readers(busy)
                    self._await_readers(unit, busy)
                slot = self._slots()[index]  # while this one waited, another may have ended or begun a capture
            if self._is_loose and not slot.readers:
                slot.to_empty()
                self._record_read(slot)
            self._bring(unit, slot)
            reader = reader or Reader(forward)
            slot.to_in_use(reader)
            slot.position = self._locate(unit, forward is not None)
            if forward is not None and len(self._seen) <= self._most_seen:
                self._seen.append(unit)
            if self._capturing:
                self._graphs.note_read(slot)
            self.stats[unit].runs += 1
            reader.started_ns = time.perf_counter_ns()

    def release(self, unit: int, reader: Reader | None = None) -> None:
        """All compute that reads ``unit`` is submitted; its slot may be refilled after it.

        ``reader``: as given to :meth:`wait`; by default the latest of the calling thread.
        """
        if self._is_forked or (self._break_capture is not None and self._break_capture(lambda: self.release(unit))):
            return
        with self._lock:
            slot = self._slots()[slot_of(unit, self._num_slots)]
            if self._graphs.in_part:
                self._graphs.note_part()
            reader = reader or slot.latest_reader()
            if slot.unit != unit or reader not in slot.readers:
                if self._graphs.partial and not slot.readers and not self._closed:
                    slot.to_empty()  # another graph has waited for it, or the wait before it failed
                    self._refill(unit, slot)
                return
            if reader.started_ns:
                self._recorder.add("compute", unit, reader.started_ns)
            slot.readers.remove(reader)
            if self._guard and not slot.readers and not self._capturing:
                slot.to_empty()  # if the check raises, no later run may read these bytes
                self._guard.before_reuse(unit, self.slot_memory(unit))
            # In a slot that one unit has alone no copy follows; of one that takes turns the next loop may decide.
            follows = bool(self._guard) or self._repeats or self._following(slot, unit) != unit
            if follows or unit in self._coded:
                self._end_read(unit, slot)  # after the poison
            if not follows and unit in self._coded:
                slot.events.clear()
            if not slot.readers and not self._closed:
                self._refill(unit, slot)
                self._free.notify_all()

    def is_read_here(self, unit: int) -> bool:
        """Whether the calling thread runs a module that reads ``unit``, or an error ended it and ``unit`` is left."""
        # Without the lock: it runs beside others, and only this thread ends its own readers.
        graphs = self._graphs
        slots = self._live if graphs.slots is None or self._link.capture_id != graphs.capture else graphs.slots
        return any(slot.unit == unit and slot.latest_reader() is not None for slot in slots)

    def _drop_stale_readers(self, slot: Slot) -> None:
        """Take the slot from runs of this thread that an error or interrupt ended before they could release it."""
        stale = slot.stale_readers(self._forwards.get(threading.get_ident())) if slot.readers else []
        for reader in stale:
            slot.readers.remove(reader)
            reader.drop()
        if stale:
            if slot.unit is not None:
                self._end_read(slot.unit, slot)
            self._free.notify_all()

    def _held_by_others(self, unit: int, index: int) -> Slot | None:
        """A slot in which a module reads another unit where ``unit`` has to be: slot ``index``, or what is decoded."""
        for slot in self._slots():
            shares = slot.index == index or (unit in self._coded and slot.unit in self._coded)
            if shares and slot.readers and slot.unit != unit:
                return slot
        return None

    def _await_readers(self, unit: int, slot: Slot) -> None:
        """Return when no module reads another unit in ``slot``."""
        holder = slot.unit
        if not slot.readers or holder == unit:
            return
        name = self._plan.units[unit].module_fqn
        held = "another unit" if holder is None else f"{self._plan.units[holder].module_fqn} (unit {holder})"
        if slot.latest_reader() is not None:
            # In this thread, where no other slot would do for every nesting: the inner one must not be prefetched.
            place = "the memory in which one unit is decoded at a time" if {unit, holder} <= self._coded else "one slot"
            parts, around = name.split("."), "" if holder is None else self._plan.units[holder].module_fqn
            # All that is beside the outer one, of which its other parts, or other items of a list, would be next.
            differs = [mine != other for mine, other in zip(parts, around.split("."), strict=False)]
            beside = ".".join(parts[: [*differs, True].index(True) + 1])
            others = f"re:(?!{beside.replace('.', '[.]')}[.]).*"
            raise SlotConflictError(
                f"{name} (unit {unit}) runs inside {held}, and both need {place}: keep {beside} resident, by a first "
                f"rule of a budget or of Rules (rules=[('{beside}.*', 'resident')], --offload-rule "
                f"'{beside}.*=resident'), and with Prefetch by leaving it out (params=['{others}'], --offload-params "
                f"'{others}')"
            )
        self._wait_until(lambda: not slot.readers, f"{name} (unit {unit}) needs the slot of {held}, which")

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Let other threads go on until ``condition`` holds; ``what`` they run, for the error if it never does."""
        if not self._free.wait_for(condition, CONFLICT_TIMEOUT_S):
            raise SlotConflictError(
                f"{what} another thread has been running for {CONFLICT_TIMEOUT_S:.0f} s; use one offloaded model per "
                f"thread"
            )

    def _bring(self, unit: int, slot: Slot) -> None:
        """Let compute wait for ``unit``, which is copied now unless it was before."""
        if slot.unit == unit:
            try:
                return self._wait_measured(unit, slot)
            except TransferError:
                # A copy ahead of use failed, perhaps long ago and for a reason that is gone: once more, on demand.
                if slot.readers:
                    raise
        elif slot.state is not SlotState.HELD_BACK:
            self.stats[unit].misses += 1
        self._start(unit, slot)
        self._wait_measured(unit, slot)

    def _refill(self, unit: int, slot: Slot) -> None:
        """Start what ``slot`` has to hold next, now that ``unit`` has run."""
        following, first, is_loose = self._following(slot, unit), self._schedule.first.get(slot.index), self._is_loose
        if following == unit:
            if slot.unit is None:
                self._start(unit, slot)  # alone in its slot, and poisoned
            return
        if (is_loose or following == first) and self._graphs.try_hold_back(slot, is_loose, self._link):
            return
        if is_loose and first is not None:
            following = first
        if slot.unit != following:
            self._start(following, slot)
        if is_loose:
            self._wait_for(slot)

    def _following(self, slot: Slot, unit: int) -> int:
        """What ``slot`` has to hold after this run of ``unit``; ``unit`` itself if it has the slot alone."""
        following = self._schedule.following(slot.index, slot.position)
        return unit if following is None else following

    def _start(self, unit: int, slot: Slot, behind_compute: bool = False) -> None:
        """Issue the copy of ``unit``; ``behind_compute``: after all compute, not only what reads the slot."""
        was_waited_for = slot.state is SlotState.READY
        slot.to_empty()
        # One copy at a time per slot: a late piece of an abandoned unit must not land on top of this one. It stays on
        # record until it is done, since the wait may be interrupted.
        if slot.transfer is not None and not was_waited_for:
            with suppress(TransferError):
                self._link.wait(slot.transfer)
        slot.transfer = None
        capturing = self._capturing
        # A replay that was not announced records no event, and those from before it do not cover its reads.
        events_are_old = self._graphs.exist and not self._graphs.announced and not capturing
        if behind_compute or events_are_old or not slot.events:
            self._record_read(slot)
        events, slot.events = slot.events, []
        slot.to_copying(unit, self._link.copy(self._loads[unit], slot.memory, events))
        if capturing:
            self.stats[unit].captured_copies += 1
        else:
            if self._owns_graphs:
                self._link.leave_copy_event(slot.index)
            self._count_copy(unit)

    def _count_copy(self, unit: int) -> None:
        stats = self.stats[unit]
        stats.copies += 1
        stats.bytes_moved += self._copy_bytes[unit]

    def _wait_measured(self, unit: int, slot: Slot) -> None:
        """Let compute wait for ``unit``, which its module needs now."""
        begin = time.perf_counter_ns()
        try:
            stalled_s = self._wait_for(slot, measure=True)
            if unit in self._coded:
                self._decode(unit, slot)
            if self._guard and slot.transfer is not None and not self._capturing:
                self._guard.copied(unit, self.slot_memory(unit))
        except BaseException:
            if not slot.readers:
                slot.to_empty()
            if slot.transfer is not None and slot.transfer.done:
                slot.transfer = None
            raise
        if stalled_s > 0.0:
            self.stats[unit].stalls += 1
            self.stats[unit].stall_s += stalled_s
            self._recorder.add("stall", unit, begin)

    def _wait_for(self, slot: Slot, measure: bool = False) -> float:
        if slot.transfer is None:
            return 0.0
        stalled_s = self._link.wait(slot.transfer, measure)
        if slot.state is SlotState.COPYING:
            slot.to_ready()
        return stalled_s

    def _wait_for_copies(self, slots: list[Slot]) -> None:
        for slot in slots:
            self._wait_for(slot)
            if self._capturing:
                slot.transfer = None  # its event means nothing to the graph of the next piece

    def _decode(self, unit: int, slot: Slot) -> None:
        capture = self._link.capture_id
        after = [event for captured, event in self._uses if captured == capture]
        self._link.decode(self._loads[unit], slot.memory, self.slot_memory(unit), after)
        self._record_read(slot)  # the code is not read after this
        self._uses = [(capture, event) for event in slot.events[-1:]]  # it comes after those before

    def _end_read(self, unit: int, slot: Slot) -> None:
        """What is written next to where compute read ``unit`` waits for all compute submitted so far."""
        if unit not in self._coded:
            self._record_read(slot)
        elif (event := self._link.record_compute()) is not None:
            self._uses.append((self._link.capture_id, event))

    def _record_read(self, slot: Slot) -> None:
        """The next copy into ``slot`` waits for all compute submitted so far."""
        if (event := self._link.record_compute()) is not None:
            slot.events.append(event)

    def _slots(self) -> list[Slot]:
        """The slots of the timeline that compute is on now; asked first in every call, since it follows graphs."""
        if self._graphs.replay_is_due:
            self._graphs.give_up(self._live, self._link)
        graphs, capture = self._graphs, self._link.capture_id
        if capture is not None and self._repeats:
            raise StateError(
                "a CUDA graph was being captured of a part of an offloaded pipeline, whose components take turns "
                "in the slots, so that a replay would find other units there: compile without graphs "
                "(torch.compile's mode 'default' or 'max-autotune-no-cudagraphs')"
            )
        if capture is not None and self._owns_graphs and not self._captures_own:
            raise StateError(
                "a CUDA graph was being captured over an offload whose generate() has graphs of its own: turn those "
                "off (graphs=False) to capture the model yourself"
            )
        if graphs.slots is not None and capture == graphs.capture:
            return graphs.slots
        if graphs.slots is not None:
            self._require_finished(graphs)
            graphs.end_capture()
        if capture is None:
            return self._live
        return graphs.begin_capture(self._live, capture, self._link.joined_by_caller)

    def _require_finished(self, graphs: GraphRecord) -> None:
        """Raise ``StateError`` if a capture has ended inside the forward that it was to hold."""
        begun = self._forwards.get(threading.get_ident())
        if begun is None or graphs.in_part or graphs.announced or self._link.joined_by_caller:
            return
        del self._forwards[threading.get_ident()]
        raise StateError(
            "a CUDA graph ended inside a forward that it was to hold, so a replay would leave other units in the slots "
            "than the next one expects: compile without partitions (torch._inductor.config.graph_partition = False), "
            "or without graphs (torch.compile's mode 'default')"
        )

    @property
    def in_capture(self) -> bool:
        """Whether compute is being recorded into a graph."""
        return self._link.capturing

    @property
    def _capturing(self) -> bool:
        return self._graphs.slots is not None

    @property
    def _is_loose(self) -> bool:
        """Whether a module that runs now does so by itself, between replays or in a part of a forward.

        See ``[Note: loose modules]`` and ``[Note: partial graphs]`` in slot.py.
        """
        if self._capturing:
            return self._graphs.in_part
        return self._graphs.exist and (self._graphs.partial or threading.get_ident() not in self._forwards)

    @contextmanager
    def rewriting(self, unit: int) -> Iterator[None]:
        """Within, the bytes of ``unit`` in the store may change; no module or copy reads them, no slot keeps them."""
        with self._lock:
            slot = self._slots()[slot_of(unit, self._num_slots)]
            self._drop_stale_readers(slot)
            if slot.unit == unit and slot.latest_reader() is None:
                what = f"a weight of {self._plan.units[unit].module_fqn} (unit {unit}) is written, which"
                self._wait_until(lambda: slot.unit != unit or not slot.readers, what)
            self._wait_for(slot)
            yield
            if slot.unit == unit and not slot.readers:
                slot.to_empty()
            if self._guard is not None:
                self._guard.forget(unit)
            if self._graphs.exist and threading.get_ident() not in self._forwards:
                self.prefetch_first()  # which a replay finds in the slots
                self._wait_for_copies(self._slots())

    # -- the end ----------------------------------------------------------------------------------------------------

    def stop(self, graphs_released: bool) -> None:
        """Let no more forwards begin, and wait for those of other threads to end.

        Raises:
            StateError: one has not ended after ``STOP_TIMEOUT_S`` seconds; graphs were captured, and may be replayed.
        """
        self._require_own_process()
        with self._lock:
            if self._graphs.exist and not graphs_released and not self._owns_graphs:
                raise StateError(
                    "graphs were captured over this offload, and a replay after remove() would read memory that is "
                    "gone: delete the graphs, then call remove(graphs_released=True)"
                )
            self._stopping = True
            for slot in self._live:
                self._drop_stale_readers(slot)
            self._forwards.pop(threading.get_ident(), None)
            if not self._free.wait_for(self._is_idle, STOP_TIMEOUT_S):
                self._stopping = False
                raise StateError(
                    f"another thread has been inside a forward of the model for {STOP_TIMEOUT_S:.0f} s: let it end, "
                    f"then call remove() again. Where compiled code raised, nothing shows that it did: call the model "
                    f"once more in that thread, or end the thread"
                )

    def resume(self) -> None:
        """Forwards may begin again."""
        with self._lock:
            self._stopping = False

    def _is_idle(self) -> bool:
        alive = {thread.ident for thread in threading.enumerate()}
        busy = {reader.thread for slot in self._live for reader in slot.readers} | self._forwards.keys()
        return alive.isdisjoint(busy - {threading.get_ident()})

    def abandon(self) -> None:
        """An interrupt has ended what the calling thread did: hold up no other thread."""
        release_left(self._lock)

    def close(self) -> None:
        """Finish copies under way and release the store; slots are freed with the last view of them. Idempotent."""
        with self._lock:
            self._closed = True
            self._link.close()
            # Views of the store and slots: a handle kept after remove() must not keep them alive.
            self._loads.clear()
            self._live = []
            self._decoded = None
            self._uses.clear()
            self._graphs.end_capture()
            self._guard = None

    def snapshot(self) -> tuple[UnitStats, ...]:
        """The counters now, with the stall of each unit's latest run where the link measures it.

        Raises:
            TransferError: a copy failed, in a replay for instance, since the last call that raised.
        """
        with self._lock:
            self._link.check()
            return tuple(
                replace(stats, last_stall_s=self._link.last_stall_s(unit)) for unit, stats in enumerate(self.stats)
            )

    def _require_open(self, begins: bool) -> None:
        if self._closed:
            raise StateError("this offload was removed while a forward was running; call the model again")
        if not self._plan.kind.has_bytes:
            raise StateError(
                "mode 'meta' keeps no weights, so no forward can be right: it is for sizes and plans; offload with "
                "mode 'cpu' or 'disk' (--offload-mode) to run the model"
            )
        if self._stopping and begins:
            raise StateError(
                "this offload is being removed: call the model when remove() has returned; if remove() was "
                "interrupted, call it again first"
            )

    @property
    def _is_forked(self) -> bool:
        """Asked before the lock: a thread that holds it in the parent does not exist in a forked child."""
        return os.getpid() != self._pid

    def _require_own_process(self) -> None:
        if self._is_forked:
            raise StateError(
                "this process is a fork of the one that offloaded the model, and has none of the threads and streams "
                "that move its weights: offload in the child, or start it with the method 'spawn'"
            )


def release_left(lock: threading.RLock) -> None:
    """Give up what an interrupt at the very end of a ``with`` block has left to the calling thread."""
    while lock._is_owned():  # type: ignore[attr-defined]
        lock.release()
