"""Slots over a link: which unit is where, who reads it, and what is on its way.

The pipeline follows the slot schedule as long as modules run in the declared order, and stays right when they do not:
a unit whose slot holds another one is fetched on the spot (a *miss*), which is slower and shows in ``stats()``.

Two threads may call the model: a slot that one of them reads is not refilled before it lets go.

[Note: two timelines] While a graph is captured nothing runs: copies become nodes of the graph, and the slots keep what
they had. So there are two records of what the slots hold. The *live* one follows what has been given to the device.
The *captured* one follows what will have happened at that point of a replay; it begins with the first units in the
slots, because that is what every forward, eager or replayed, leaves behind. In a capture, a slot's content is trusted
only if it is one of these or was copied by a node of the same capture; anything else is copied again in the graph.

[Note: the held-back slot] A graph ends when its last copy is joined, so a slot refilled after the last unit would add a
whole copy with no compute beside it, while the link idles at the start of the next replay. Therefore, once there are
graphs, the slot of the last unit is refilled not at the end of a forward but at the beginning of the next, where the
first layers hide it. Between forwards that slot holds nothing, on either timeline.

[Note: announced replays] An engine that says before each replay that one is coming (``join``) allows more. A graph then
begins with the first units in the slots, the held-back one too, and refills none of them at its end; an event inside it
says when each can be. Behind that the copies for the next forward run outside of any graph, beside whatever the engine
does between two of them. What the slots hold after a replay is what nobody may rely on, so they are given up when it is
announced and filled again when the engine says that it is under way (``prime``), or else at the next announcement.
An event says nothing of a graph that reads the slot and leaves none there (it skips the last unit of a chain): once
there is such a graph, copies into this slot wait for the end of the replay.

[Note: inputs of the next forward] An engine copies them to the device between two forwards, and a copy engine takes one
copy after the other: behind a unit of 300 MB they are 5 ms late, and compute stands still. Where the link is what a
forward waits for, that costs nothing. Once there are graphs of whole forwards, it is the large batches that run without
one, so behind such a forward the copies for the next one are left to its beginning, which stands behind its inputs.
Where only pieces between units are graphs, small batches run like that too, and nothing is left.

[Note: loose modules] Pieces of a model may be replayed one by one with offloaded modules run by hand between them. What
the live record says of the slots is then out of date, and no forward begins that would refill the held-back one. So a
module that runs outside a forward once graphs exist gets its unit copied anew, behind whatever compute has been given,
and its slot gets back, joined at once, what replays expect to find there: slow, and right.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import replace

import torch

from penstock.errors import StateError, TransferError
from penstock.plan.plan import Plan
from penstock.plan.slots import chain, first_units, next_in_chain, slot_of
from penstock.runtime.debug import Guard
from penstock.runtime.readers import Forwards, Reader, nested_units, stuck_thread
from penstock.runtime.slot import Slot
from penstock.stats import Recorder, StagingStats, UnitStats
from penstock.stores.store import Store
from penstock.transfer.link import Link

__all__ = ["SlotPipeline", "release_left"]

# A forward that holds a slot for longer than this is taken to be stuck, not slow.
CONFLICT_TIMEOUT_S = 600.0

# How long remove() waits for forwards of other threads.
STOP_TIMEOUT_S = 30.0


class SlotPipeline:
    """Keeps units flowing from ``store`` through ``link`` into slots."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        link: Link,
        recorder: Recorder,
        debug: bool = False,
        replays_announced: bool = False,
    ) -> None:
        """``debug``: poison and check slots. ``replays_announced``: see the note of that name."""
        self._announced = replays_announced
        self._plan = plan
        self._link = link
        self._recorder = recorder
        self._loads = [store.load(unit) for unit in plan.units]
        link.prepare(plan, self._loads)
        self._live = [Slot(link.allocate(num_bytes)) for num_bytes in plan.slot_bytes]
        self._captured: list[Slot] | None = None
        self._unmarked: set[int] = set()  # slots that some graph reads without leaving a mark for replays
        self._has_graphs = False
        self._inputs_first = False  # see the note on inputs
        self._gave_up_slots = False  # to a replay, since they were last filled
        self._forwards = Forwards()
        num_units, num_slots = len(plan.units), len(self._live)
        holds_back = num_units > num_slots and not replays_announced
        self._held_back = slot_of(num_units - 1, num_slots) if holds_back else None
        # Held directly, for a Ctrl-C inside the condition's own Python code could leave it taken for ever.
        self._lock = threading.RLock()
        self._free = threading.Condition(self._lock)
        self._started_ns: dict[tuple[int, int], int] = {}
        self._closed = False
        self._stopping = False
        self._pid = os.getpid()
        has_bytes = plan.mode != "meta"
        self._guard = Guard(plan, [load.segments for load in self._loads]) if debug and has_bytes else None
        self.stats = [UnitStats(unit.anchor, unit.store) for unit in plan.units]

    def slot_memory(self, unit: int) -> torch.Tensor:
        """The slot of ``unit``: uint8, 1-D, fixed for the life of the pipeline."""
        return self._live[slot_of(unit, len(self._live))].memory

    def prime(self, behind_compute: bool = False) -> None:
        """Start the units that a forward needs first, unless they are there or are held back for its beginning.

        ``behind_compute``: each behind all that compute has been given, and not only behind what reads its slot.
        """
        with self._lock:
            self._gave_up_slots = False
            slots = self._slots()
            for unit in first_units(len(self._plan.units), len(slots)):
                if not (self._has_graphs and unit == self._held_back):
                    self._start_if_free(unit, slots, behind_compute)

    def begin_forward(self) -> None:
        """A forward begins: start what was held back for it."""
        self._require_own_process()
        with self._lock:
            self._require_open(begins=True)
            self._forwards.begin()
            self._link.check()
            if self._link.capturing:
                self._end_capture()  # whatever an aborted one has left
            slots = self._slots()
            if self._announced and not self._link.capturing:
                self.prime(behind_compute=self._inputs_first)
            # Only an empty slot: a compiler that moved this call behind the first units must do no harm.
            if self._held_back is not None and slots[self._held_back].unit is None:
                self._start_if_free(self._held_back, slots)

    def finish_forward(self, whole: bool = True) -> None:
        """The model has returned: make the slots ready for the next forward, however it will run.

        ``whole``: it was not cut short by an exception.

        In a capture all copies are joined, as the graph demands. Once graphs exist an eager forward joins too: a replay
        asks nobody, so what it finds in the slots has to be ordered before it.
        """
        if self._is_forked:
            return
        with self._lock:
            self._forwards.end()
            self._free.notify_all()
            if self._closed:
                return
            for slot in self._slots():
                self._drop_stale_readers(slot)  # compiled code that raises does not release
            if self._announced and self._link.capturing:
                self._inputs_first = True
                self._join_captured()
            elif self._gave_up_slots or not self._inputs_first:
                self.prime()
            if self._has_graphs and not self._announced:
                self.join()
                self._empty_held_back()
            if whole:
                self._link.check()

    def join(self) -> None:
        """Order compute behind every copy under way; no effect when there is none.

        Where replays are announced this is how, except inside a forward, whose pieces may be graphs of their own.
        """
        self._require_own_process()
        with self._lock:
            if self._link.capturing:
                self._join_captured()
            elif not self._announced:
                self._join_live()
            elif not self._forwards.inside:
                self.prime()
                self._join_live()
                self._give_up_slots()

    def _join_live(self) -> None:
        for slot in self._live:
            if slot.transfer is not None:
                self._link.wait(slot.transfer)

    def _join_captured(self) -> None:
        # Engines do this between the pieces of a forward whose capture goes on: the record of it must last.
        for slot in self._slots():
            if slot.transfer is not None:
                self._link.wait(slot.transfer)
                slot.transfer = None

    def _give_up_slots(self) -> None:
        """To a replay that follows; what it leaves in them can be overwritten behind its marks."""
        self._gave_up_slots = True
        for index, slot in enumerate(self._live):
            if len(chain(index, len(self._plan.units), len(self._live))) > 1:
                slot.unit = slot.transfer = None
                mark = None if index in self._unmarked else self._link.replay_event(index)
                slot.marks = [*slot.marks, mark] if mark is not None else []

    def wait(self, unit: int, reader: Reader | None = None) -> None:
        """Return when compute may read ``unit``; it stays in its slot until :meth:`release`.

        ``reader``: this run of the unit; by default it goes on as long as the forward that it is in.

        Raises:
            TransferError: its bytes did not arrive; the next call tries again.
            SlotConflictError: a unit that runs further out in this thread has the slot, or another thread has held it
                for ten minutes.
        """
        self._require_own_process()
        with self._lock:
            self._require_open(begins=not self._forwards.inside)
            slots = self._slots()
            slot = slots[slot_of(unit, len(slots))]
            self._drop_stale_readers(slot)
            if slot.unit != unit:
                self._await_readers(unit, slot)
            if self._loose and not slot.readers:
                slot.unit = None
                self._mark(slot)
            self._bring(unit, slot)
            slot.readers.append(reader or self._forwards.this_one())
            slot.unmarked = True
            self.stats[unit].runs += 1
            self._started_ns[threading.get_ident(), unit] = time.perf_counter_ns()

    def release(self, unit: int, reader: Reader | None = None) -> None:
        """Compute has been given everything that reads ``unit``; its slot may be refilled behind it.

        ``reader``: as given to :meth:`wait`; by default the latest of the calling thread.
        """
        if self._is_forked:
            return
        with self._lock:
            slots = self._slots()
            slot = slots[slot_of(unit, len(slots))]
            me = threading.get_ident()
            started_ns = self._started_ns.pop((me, unit), None)
            if slot.unit != unit or not slot.is_mine or (reader is not None and reader not in slot.readers):
                return  # the wait before it failed
            if started_ns is not None:
                self._recorder.compute(unit, started_ns)
            slot.let_go(reader)
            if self._guard and not slot.readers and not self._link.capturing:
                self._check_out(unit, slot)  # before the fork: the refill must come after the poison
            if self._guard or next_in_chain(unit, len(self._plan.units), len(slots)) != unit:  # or nothing comes behind
                self._mark(slot)
            if not slot.readers and not self._closed:
                self._refill(unit, slot)
                if self._loose and slot.transfer is not None:
                    self._link.wait(slot.transfer)
                self._free.notify_all()

    def stop(self, graphs_released: bool) -> None:
        """Let no more forwards begin, and wait for those of other threads to end.

        Raises:
            StateError: one has not ended after ``STOP_TIMEOUT_S`` seconds; graphs were captured, and may be replayed.
        """
        self._require_own_process()
        with self._lock:
            if self._has_graphs and not graphs_released:
                raise StateError(
                    "graphs were captured over this offload, and a replay after remove() would read memory that is "
                    "gone: delete the graphs, then call remove(graphs_released=True)"
                )
            self._stopping = True
            for slot in self._live:
                self._drop_stale_readers(slot)
            self._forwards.end()
            if not self._free.wait_for(self._is_idle, STOP_TIMEOUT_S):
                self._stopping = False
                raise StateError(
                    f"another thread has been inside a forward of the model for {STOP_TIMEOUT_S:.0f} s: let it end, "
                    f"then call remove() again"
                )

    def resume(self) -> None:
        """Forwards may begin again."""
        with self._lock:
            self._stopping = False

    def _is_idle(self) -> bool:
        alive = {thread.ident for thread in threading.enumerate()}
        readers = {reader.thread for slot in self._live for reader in slot.readers}
        return alive.isdisjoint((readers | self._forwards.threads) - {threading.get_ident()})

    def abandon(self) -> None:
        """An interrupt has ended what the calling thread did: hold up no other thread."""
        release_left(self._lock)

    def close(self) -> None:
        """Finish copies under way and let go of the store; slots are freed with the last view of them. Idempotent."""
        with self._lock:
            self._closed = True
            self._link.close()
            # Views of the store and slots: a handle kept after remove() must not keep them alive.
            self._loads.clear()
            self._live, self._captured = [], None
            self._guard = None

    def snapshot(self) -> tuple[UnitStats, ...]:
        """The counters now, with the stall of each unit's latest run where the link can tell.

        Raises:
            TransferError: bytes failed to arrive, in a replay for instance, since anybody was told.
        """
        with self._lock:
            self._link.check()
            return tuple(
                replace(stats, last_stall_s=self._link.last_stall_s(unit)) for unit, stats in enumerate(self.stats)
            )

    def staging(self) -> StagingStats | None:
        """Counters of the link's ring, if it has one."""
        return self._link.staging_stats()

    def _slots(self) -> list[Slot]:
        """The slots of the timeline that compute is on now."""
        if not self._link.capturing:
            self._end_capture()
            return self._live
        if self._captured is None:
            # Who ran a module by hand before there were graphs has left another unit in its slot than a forward does.
            there = [self._announced or (u == slot.unit and u != self._held_back) for u, slot in enumerate(self._live)]
            self._captured = [Slot(slot.memory, u if there[u] else None) for u, slot in enumerate(self._live)]
            for slot in (slot for u, slot in enumerate(self._live) if not there[u] and not self._has_graphs):
                slot.unit = None
            self._has_graphs = True
        return self._captured

    def _end_capture(self) -> None:
        self._unmarked.update(index for index, slot in enumerate(self._captured or ()) if slot.unmarked)
        self._captured = None

    @property
    def _loose(self) -> bool:
        """Whether a module that runs now does so by itself, between replays."""
        return self._has_graphs and not self._link.capturing and not self._forwards.inside

    def _empty_held_back(self) -> None:
        """A forward that was cut short or skipped its last unit leaves something there, which a replay will replace."""
        if self._held_back is not None and not self._link.capturing:
            slot = self._live[self._held_back]
            if not slot.readers:
                slot.unit = None

    def _start_if_free(self, unit: int, slots: list[Slot], behind_compute: bool = False) -> None:
        if slots[unit].unit != unit and not slots[unit].readers and not self._closed:
            if behind_compute:
                self._mark(slots[unit])
            self._start(unit, slots[unit])

    def _refill(self, unit: int, slot: Slot) -> None:
        last, first = len(self._plan.units) - 1, slot_of(unit, len(self._live))
        if self._has_graphs and first == self._held_back and (unit == last or self._loose):
            slot.unit = None
            if self._link.capturing:
                slot.transfer, slot.marks = None, []  # events of this capture mean nothing to the next
            return
        following = first if self._loose else next_in_chain(unit, len(self._plan.units), len(self._live))
        if self._announced and self._link.capturing and following < unit:
            slot.unit, slot.transfer, slot.marks, slot.unmarked = None, None, [], False
            self._link.leave_replay_event(following)  # a first unit has the number of its slot
        elif self._inputs_first and following < unit and not self._loose:
            slot.unit = None  # see the note on inputs
        elif following != unit:
            self._start(following, slot)
        elif self._guard and not self._link.capturing:
            self._start(unit, slot)  # poisoned, so it has to come again

    def _bring(self, unit: int, slot: Slot) -> None:
        if slot.unit == unit:
            try:
                return self._land(unit, slot)
            except TransferError:
                pass  # a copy ahead of use failed, perhaps long ago and for a reason that is gone: once more, on demand
        elif not (self._has_graphs and unit == self._held_back):
            self.stats[unit].misses += 1
        self._start(unit, slot)
        self._land(unit, slot)

    def _start(self, unit: int, slot: Slot) -> None:
        slot.unit = None
        # One copy at a time per slot: a late piece of an abandoned unit must not land on top of this one. It stays on
        # record until it is done, since the wait may be interrupted.
        if slot.transfer is not None:
            with suppress(TransferError):
                self._link.wait(slot.transfer)
            slot.transfer = None
        # A replay that was not announced leaves no marks, and those made before it do not say when it has read a slot.
        is_stale = self._has_graphs and not self._announced and not self._link.capturing
        if (is_stale or not slot.marks) and (mark := self._link.record_compute()) is not None:
            slot.marks.append(mark)
        marks, slot.marks = slot.marks, []
        slot.transfer = self._link.copy(self._loads[unit], slot.memory, marks)
        slot.unit = unit
        if self._link.capturing:
            self.stats[unit].captured_copies += 1
        else:
            self.stats[unit].copies += 1
            self.stats[unit].bytes_moved += self._plan.units[unit].payload_bytes

    def _land(self, unit: int, slot: Slot) -> None:
        transfer = slot.transfer
        if transfer is None:
            return
        begin = time.perf_counter_ns()
        try:
            stalled_s = self._link.wait(transfer, measure=True)
            if self._guard and not self._link.capturing:
                self._guard.arrived(unit, slot.memory)
        except BaseException:
            # Interrupted or failed: the slot holds nothing anybody may read.
            slot.unit = None
            if transfer.done:
                slot.transfer = None
            raise
        if stalled_s > 0.0:
            self.stats[unit].stalls += 1
            self.stats[unit].stall_s += stalled_s
            self._recorder.stall(unit, begin)

    def _check_out(self, unit: int, slot: Slot) -> None:
        assert self._guard is not None
        slot.unit = None  # if this raises, nobody may read what is there
        self._guard.leaving(unit, slot.memory)
        slot.unit = unit

    def _drop_stale_readers(self, slot: Slot) -> None:
        if slot.drop_stale():
            self._mark(slot)
            self._free.notify_all()

    def _mark(self, slot: Slot) -> None:
        if (mark := self._link.record_compute()) is not None:
            slot.marks.append(mark)

    def _await_readers(self, unit: int, slot: Slot) -> None:
        if slot.is_mine:
            raise nested_units(self._plan, unit, slot.unit)
        if not self._free.wait_for(lambda: not slot.readers, CONFLICT_TIMEOUT_S):
            raise stuck_thread(self._plan, unit, slot.unit, CONFLICT_TIMEOUT_S)

    def _require_open(self, begins: bool) -> None:
        if self._closed:
            raise StateError("this offload was removed while a forward was running; call the model again")
        if self._plan.mode == "meta":
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
