"""Copies units into slots ahead of use: which unit is where, which code reads it, and what is copied next.

The prefetcher follows the slot schedule while modules run in the expected order (:class:`ExpectedOrder`). If they do
not, results stay right: a unit whose slot holds another one is copied on demand (a *miss*), which is slower and counted
in ``stats()``.

Two threads may call the model: a slot that one of them reads is not refilled before it is done.

replays.py says what graphs change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from headrace.errors import SlotConflictError, TransferError
from headrace.plan.plan import Plan
from headrace.plan.schedule import ExpectedOrder, slot_of
from headrace.runtime.forwards import Forwards, release_left
from headrace.runtime.replays import BreakCapture, Replays
from headrace.runtime.slot import Reader, Slot, SlotState
from headrace.stats import Recorder, UnitStats
from headrace.stores.store import Load, Store
from headrace.transfer.link import Link

if TYPE_CHECKING:
    from headrace.runtime.debug import Guard
    from headrace.transfer.decoded_units import DecodingMemory


def new_guard(plan: Plan, store: Store, loads: Sequence[Load], promoted: Collection[str]) -> Guard:
    """The comparison of units in slots with ``store``, but for ``promoted`` storages; for ``HEADRACE_DEBUG``."""
    from headrace.runtime.debug import Guard

    decoded = [store.unit_copies(plan.units[load.unit]) if load.coded else load.copies for load in loads]
    return Guard(plan, decoded, promoted)


class Prefetcher:
    """Copies units from ``store`` through ``link`` into slots ahead of their use.

    Each forward calls :meth:`begin_forward`, then :meth:`wait` and :meth:`release` around every module that reads a
    unit, then :meth:`finish_forward`.

    Attributes:
        forwards: forwards of the model, by thread.
        replays: what graphs change about the slots.
        slots_bytes: memory of the slots and of what is decoded.
        has_run: a forward has begun.
        stats: counters by unit.
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
        """``debug``: poison and check slots, but for storages that are ``promoted`` then.

        In replays.py: ``replays_announced``: ``[Note: announced replays]``; ``break_capture``: ``[Note: breakable
        captures]``.
        ``repeats``: a forward may run a unit several times or not at all, and is not captured.
        """
        self._plan = plan
        self._link = link
        self._break_capture = break_capture
        self._recorder = recorder
        self._loads = [store.load(unit) for unit in plan.units]
        link.prepare(plan, self._loads)
        self._copy_bytes = [load.link_bytes(unit) for load, unit in zip(self._loads, plan.units, strict=True)]
        self._coded = frozenset(load.unit for load in self._loads if load.coded)
        self._decoding: DecodingMemory | None = None
        sizes: Sequence[int] = plan.slot_bytes
        if self._coded:
            from headrace.transfer.decoded_units import DecodingMemory, slot_sizes

            self._decoding, sizes = DecodingMemory(link, plan.decoding_bytes), slot_sizes(sizes, self._loads)
        self.slots_bytes = sum(sizes) + plan.decoding_bytes
        live = [Slot(index, link.allocate(num_bytes)) for index, num_bytes in enumerate(sizes)]
        self._slot_of = [slot_of(unit, len(live)) for unit in range(len(plan.units))]
        self._order = ExpectedOrder(len(plan.units), len(live), repeats)
        self._repeats = repeats
        self.forwards = Forwards(plan.kind.has_bytes)
        self._lock = self.forwards.lock
        self.replays = Replays(live, link, self.forwards, self._order.schedule, replays_announced, refused=repeats)
        self.has_run = False
        self._guard = new_guard(plan, store, self._loads, promoted) if debug and plan.kind.has_bytes else None
        self.stats = [UnitStats(unit.module_fqn, unit.store) for unit in plan.units]

    def slot_memory(self, unit: int) -> Tensor:
        """Memory in which compute reads ``unit``: uint8, 1-D, fixed for the life of the prefetcher."""
        if self._decoding is not None and unit in self._coded:
            return self._decoding.memory
        return self.replays.live[self._slot_of[unit]].memory

    # -- a forward --------------------------------------------------------------------------------------------------

    def prefetch_first(self, held_back: bool = False) -> None:
        """Start the units that a forward needs first, where other units are in their slots, or none.

        ``held_back``: also those left to the beginning of the next forward.
        """
        with self._lock:
            slots = self.replays.slots()
            for index, unit in self._order.schedule.first.items():
                slot = slots[index]
                if slot.unit == unit or slot.readers or self.forwards.closed or self.forwards.parked:
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
        self.forwards.require_own_process()
        with self._lock:
            if in_segments:
                self.replays.is_due = False
            self.forwards.require_open(begins=True)
            self.has_run = True
            self.forwards.begin()
            self._order.begin()
            self._link.check()
            # Only slots without a unit: a compiler that moved this call after the first units must do no harm.
            for slot in self.replays.begin_forward(whole):
                first = self._order.schedule.first.get(slot.index)
                if first is not None and slot.state in (SlotState.EMPTY, SlotState.HELD_BACK):
                    self._start(first, slot, behind_compute=True)
                    if self.replays.is_loose(in_forward=True):
                        slot.wait_for_copy(self._link)  # a graph of a part replayed next waits for none outside of it

    def finish_forward(self, whole: bool = True) -> None:
        """The model has returned: make the slots ready for the next forward, eager or replayed.

        ``whole``: it was not cut short by an exception.
        """
        forwards, replays = self.forwards, self.replays
        if forwards.is_forked or (self._break_capture is not None and self._break_capture(self.finish_forward)):
            return
        with self._lock:
            forwards.end()
            forwards.notify()
            if forwards.closed:
                return
            slots = replays.slots()
            for slot in slots:
                self._drop_stale_readers(slot)
            if whole and not replays.exist and not forwards.numbers and self._order.adopt():
                replays.follow(self._order.schedule)
            if replays.end_forward(slots):
                self.prefetch_first()
            replays.join(slots)
            if whole:
                self._link.check()

    def wait_all(self) -> None:
        """Order compute after every copy under way; no effect when there is none.

        This also announces a replay, where they are announced, except inside a forward, whose pieces may be graphs.
        """
        self.forwards.require_own_process()
        with self._lock:
            replays, slots = self.replays, self.replays.slots()
            replays.note_caller()
            if replays.captured is not None or not replays.announced:
                replays.wait_for_copies(slots)
            elif threading.get_ident() not in self.forwards.numbers:
                for slot in slots:
                    self._drop_stale_readers(slot)
                self.prefetch_first(held_back=True)
                replays.announce(slots)

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
        self.forwards.require_own_process()
        with self._lock:
            replays, forward = self.replays, self.forwards.numbers.get(threading.get_ident())
            self.forwards.require_open(begins=forward is None)
            index = self._slot_of[unit]
            slot = replays.slots()[index]
            if replays.in_part:
                replays.note_part()
            if slot.readers:
                self._drop_stale_readers(slot)
            if slot.readers or unit in self._coded:
                while (busy := self._held_by_others(unit, index)) is not None:
                    self._drop_stale_readers(busy)
                    self._await_readers(unit, busy)
                slot = replays.slots()[index]  # while this one waited, another may have ended or begun a capture
            if replays.exist and not slot.readers and replays.is_loose(forward is not None):
                slot.to_empty()
                slot.record_read(self._link)
            self._bring(unit, slot)
            reader = reader or Reader(forward)
            slot.to_in_use(reader)
            slot.position = self._order.run(unit, forward is not None)
            if replays.captured is not None:
                replays.note_read(slot)
            self.stats[unit].runs += 1
            reader.started_ns = time.perf_counter_ns()

    def release(self, unit: int, reader: Reader | None = None) -> None:
        """All compute that reads ``unit`` is submitted; its slot may be refilled after it.

        ``reader``: as given to :meth:`wait`; by default the latest of the calling thread.
        """
        replays, forwards = self.replays, self.forwards
        if forwards.is_forked or (self._break_capture is not None and self._break_capture(lambda: self.release(unit))):
            return
        with self._lock:
            if forwards.closed:  # while this forward began: its slots are gone
                return
            slot = replays.slots()[self._slot_of[unit]]
            if replays.in_part:
                replays.note_part()
            reader = reader or slot.latest_reader()
            following = self._order.following(slot.index, slot.position, unit)
            if slot.unit != unit or reader not in slot.readers:
                if replays.partial and not slot.readers:
                    slot.to_empty()  # another graph has waited for it, or the wait before it failed
                    self._refill(unit, slot, following)
                return
            if reader.started_ns:
                self._recorder.add("compute", unit, reader.started_ns)
            slot.readers.remove(reader)
            if self._guard and not slot.readers and replays.captured is None:
                slot.to_empty()  # if the check raises, no later run may read these bytes
                self._guard.before_reuse(unit, self.slot_memory(unit))
            # In a slot that one unit has alone no copy follows; of one that takes turns the next loop may decide.
            follows = bool(self._guard) or self._repeats or following != unit
            if follows or unit in self._coded:
                self._end_read(unit, slot)  # after the poison
            if not follows and unit in self._coded:
                slot.events.clear()
            if not slot.readers:
                self._refill(unit, slot, following)
                forwards.notify()

    def _drop_stale_readers(self, slot: Slot, alive: Collection[int] | None = None) -> None:
        """Take the slot from runs of this thread that an error or interrupt ended before they could release it.

        ``alive``: idents of threads; also from runs of others, which have ended.
        """
        stale = slot.stale_readers(self.forwards.numbers.get(threading.get_ident()), alive) if slot.readers else []
        for reader in stale:
            slot.readers.remove(reader)
            reader.drop()
        if stale:
            if slot.unit is not None:
                self._end_read(slot.unit, slot)
            self.forwards.notify()

    def _held_by_others(self, unit: int, index: int) -> Slot | None:
        """A slot in which a module reads another unit where ``unit`` has to be: slot ``index``, or what is decoded."""
        for slot in self.replays.slots():
            shares = slot.index == index or (unit in self._coded and slot.unit in self._coded)
            if shares and slot.readers and slot.unit != unit:
                return slot
        return None

    def _await_readers(self, unit: int, slot: Slot) -> None:
        """Return when no module reads another unit in ``slot``."""
        holder = slot.unit
        if not slot.readers or holder == unit:
            return
        name, around = self._plan.units[unit].module_fqn, "" if holder is None else self._plan.units[holder].module_fqn
        held = "another unit" if holder is None else f"{around} (unit {holder})"
        what = f"{name} (unit {unit})"
        if slot.latest_reader() is not None:
            # In this thread, where no other slot would do for every nesting: the inner one must not be prefetched.
            place = "the memory in which one unit is decoded at a time" if {unit, holder} <= self._coded else "one slot"
            raise SlotConflictError(f"{what} runs inside {held}, and both need {place}: {_keep_resident(name, around)}")

        def is_free() -> bool:
            # Compiled code that raises releases nothing, and its thread may have ended behind that.
            self._drop_stale_readers(slot, {thread.ident for thread in threading.enumerate() if thread.ident})
            return not slot.readers

        self.forwards.wait_until(is_free, f"{what} needs the slot of {held}, which")

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

    def _refill(self, unit: int, slot: Slot, following: int) -> None:
        """Start what ``slot`` has to hold next, now that ``unit`` has run: ``following``, or what graphs ask for."""
        replays, first = self.replays, self._order.schedule.first.get(slot.index)
        is_loose = replays.exist and replays.is_loose(threading.get_ident() in self.forwards.numbers)
        if following == unit:
            if slot.unit is None:
                self._start(unit, slot)  # alone in its slot, and poisoned
            return
        if (is_loose or following == first) and replays.try_hold_back(slot, is_loose):
            return
        if is_loose and first is not None:
            following = first
        if slot.unit != following:
            self._start(following, slot)
        if is_loose:
            slot.wait_for_copy(self._link)

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
        if behind_compute or self.replays.events_are_old or not slot.events:
            slot.record_read(self._link)
        events, slot.events = slot.events, []
        slot.to_copying(unit, self._link.copy(self._loads[unit], slot.memory, events))
        if self.replays.captured is not None:
            self.stats[unit].captured_copies += 1
        else:
            self.replays.note_copy(slot)
            self.count_copy(unit)

    def count_copy(self, unit: int) -> None:
        """A copy of ``unit`` was issued."""
        stats = self.stats[unit]
        stats.copies += 1
        stats.bytes_moved += self._copy_bytes[unit]

    def _wait_measured(self, unit: int, slot: Slot) -> None:
        """Let compute wait for ``unit``, which its module needs now."""
        begin = time.perf_counter_ns()
        try:
            stalled_s = slot.wait_for_copy(self._link, measure=True)
            if self._decoding is not None and unit in self._coded:
                self._decoding.make_readable(self._loads[unit], slot.memory, slot.events)
            if self._guard and slot.transfer is not None and self.replays.captured is None:
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

    def _end_read(self, unit: int, slot: Slot) -> None:
        """Let the next write to where compute read ``unit`` wait for all compute submitted so far."""
        if self._decoding is None or unit not in self._coded:
            slot.record_read(self._link)
        else:
            self._decoding.note_read()

    @contextmanager
    def rewriting(self, unit: int) -> Iterator[None]:
        """Within, the bytes of ``unit`` in the store may change; no module or copy reads them, no slot keeps them."""
        with self._lock:
            slot = self.replays.slots()[self._slot_of[unit]]
            self._drop_stale_readers(slot)
            if slot.unit == unit and slot.latest_reader() is None:
                what = f"a weight of {self._plan.units[unit].module_fqn} (unit {unit}) is written, which"
                self.forwards.wait_until(lambda: slot.unit != unit or not slot.readers, what)
            slot.wait_for_copy(self._link)
            yield
            if slot.unit == unit and not slot.readers:
                slot.to_empty()
            if self._guard is not None:
                self._guard.forget(unit)
            if self.replays.exist and threading.get_ident() not in self.forwards.numbers:
                self.prefetch_first()  # which a replay finds in the slots
                self.replays.wait_for_copies(self.replays.slots())

    # -- the end ----------------------------------------------------------------------------------------------------

    def stop(self, graphs_released: bool) -> None:
        """Let no more forwards begin, and wait for those of other threads to end.

        Raises:
            StateError: one does not end (:meth:`Forwards.stop`); graphs were captured, and may be replayed.
        """
        self.forwards.require_own_process()
        with self._lock:
            self.replays.require_released(graphs_released)
            slots = self.replays.live
            for slot in slots:
                self._drop_stale_readers(slot)
            self.forwards.stop(lambda: {reader.thread for slot in slots for reader in slot.readers})

    def abandon(self) -> None:
        """An interrupt has ended what the calling thread did: hold up no other thread."""
        release_left(self._lock)

    def close(self) -> None:
        """Finish copies under way and release the store; slots are freed with the last view of them. Idempotent."""
        with self._lock:
            self.forwards.closed = True
            self._link.close()
            # Views of the store and slots: a handle kept after remove() must not keep them alive.
            self._loads.clear()
            self.replays.close()
            self._decoding = None
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


def _keep_resident(name: str, around: str) -> str:
    """How a user keeps the module ``name``, which runs inside ``around``, out of slots."""
    # All that is beside the outer one, of which its other parts, or other items of a list, would be next.
    parts = name.split(".")
    differs = [mine != other for mine, other in zip(parts, around.split("."), strict=False)]
    beside = ".".join(parts[: [*differs, True].index(True) + 1])
    others = f"re:(?!{beside.replace('.', '[.]')}[.]).*"
    return (
        f"keep {beside} resident, by a first rule of a budget or of Rules (rules=[('{beside}.*', 'resident')], "
        f"--offload-rule '{beside}.*=resident'), and with Prefetch by leaving it out (params=['{others}'], "
        f"--offload-params '{others}')"
    )
