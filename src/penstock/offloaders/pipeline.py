"""Slots over a link: which unit is where, who reads it, and what is on its way.

The pipeline follows the slot schedule as long as modules run in the declared order, and stays right when they do not:
a unit whose slot holds another one is fetched on the spot (a *miss*), which is slower and shows in ``stats()``.

Two threads may call the model: a slot that one of them reads is not refilled before it lets go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from penstock.errors import SlotConflictError, StateError
from penstock.link.base import Link, Transfer
from penstock.offloaders.debug import Guard
from penstock.plan.model import Plan
from penstock.plan.schedule import first_units, next_in_chain, slot_of
from penstock.store.base import Segment, Store
from penstock.telemetry import Recorder, UnitStats

__all__ = ["SlotPipeline"]

# A forward that holds a slot for longer than this is taken to be stuck, not slow.
CONFLICT_TIMEOUT_S = 600.0


class _Slot:
    """One device buffer. ``unit`` is what it holds or, while ``transfer`` is set, what is on its way into it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.unit: int | None = None
        self.transfer: Transfer | None = None
        self.readers: list[int] = []  # idents of the threads that are running its unit


class SlotPipeline:
    """Keeps units flowing from ``store`` through ``link`` into slots."""

    def __init__(self, plan: Plan, store: Store, link: Link, recorder: Recorder, debug: bool = False) -> None:
        self._plan = plan
        self._link = link
        self._recorder = recorder
        self._segments: list[Sequence[Segment]] = [store.unit_segments(unit) for unit in plan.units]
        self._slots = [_Slot(link.allocate(num_bytes)) for num_bytes in plan.slot_bytes]
        self._free = threading.Condition(threading.RLock())
        self._started_ns: dict[tuple[int, int], int] = {}
        self._closed = False
        self._guard = Guard(plan, self._segments) if debug else None
        self.stats = [UnitStats(unit.anchor) for unit in plan.units]

    def slot_memory(self, unit: int) -> torch.Tensor:
        """The slot of ``unit``: uint8, 1-D, fixed for the life of the pipeline."""
        return self._slots[slot_of(unit, len(self._slots))].memory

    def prime(self) -> None:
        """Start the units that a forward needs first, unless they are there."""
        with self._free:
            for unit in first_units(len(self._plan.units), len(self._slots)):
                slot = self._slots[unit]
                if slot.unit != unit and not slot.readers and not self._closed:
                    self._start(unit, slot)

    def wait(self, unit: int) -> None:
        """Return when compute may read ``unit``; it stays in its slot until :meth:`release`.

        Raises:
            TransferError: its bytes did not arrive; the next call tries again.
            SlotConflictError: another thread has held the slot for ten minutes.
        """
        with self._free:
            self._require_open()
            slot = self._slots[slot_of(unit, len(self._slots))]
            if slot.unit != unit:
                self._await_readers(unit, slot)
                self.stats[unit].misses += 1
                self._start(unit, slot)
            self._land(unit, slot)
            slot.readers.append(threading.get_ident())
            self.stats[unit].runs += 1
            self._started_ns[threading.get_ident(), unit] = time.perf_counter_ns()

    def release(self, unit: int) -> None:
        """Compute has been given everything that reads ``unit``; its slot may be refilled behind it."""
        with self._free:
            slot = self._slots[slot_of(unit, len(self._slots))]
            me = threading.get_ident()
            started_ns = self._started_ns.pop((me, unit), None)
            if slot.unit != unit or me not in slot.readers:
                return  # the wait before it failed
            if started_ns is not None:
                self._recorder.compute(unit, started_ns)
            slot.readers.remove(me)
            if not slot.readers and not self._closed:
                self._refill(unit, slot)
                self._free.notify_all()

    def close(self) -> None:
        """Finish copies under way; slots are freed with the last view of them. Idempotent."""
        with self._free:
            self._closed = True
            self._link.close()

    def _refill(self, unit: int, slot: _Slot) -> None:
        if self._guard:
            self._guard.leaving(unit, slot.memory)
        following = next_in_chain(unit, len(self._plan.units), len(self._slots))
        if following != unit:
            self._start(following, slot)
        elif self._guard:
            self._start(unit, slot)  # poisoned, so it has to come again

    def _start(self, unit: int, slot: _Slot) -> None:
        # One copy at a time per slot: a late piece of an abandoned unit must not land on top of this one.
        if slot.transfer is not None:
            abandoned, slot.transfer, slot.unit = slot.transfer, None, None
            self._link.wait(abandoned)
        mark = self._link.fork()
        slot.transfer = self._link.copy(unit, self._segments[unit], slot.memory, mark)
        slot.unit = unit
        self.stats[unit].copies += 1
        self.stats[unit].bytes_moved += self._plan.units[unit].payload_bytes

    def _land(self, unit: int, slot: _Slot) -> None:
        transfer = slot.transfer
        if transfer is None:
            return
        begin = time.perf_counter_ns()
        try:
            stalled_s = self._link.wait(transfer)
        except BaseException:
            # Interrupted or failed: the slot holds nothing anybody may read.
            slot.unit = None
            if transfer.done:
                slot.transfer = None
            raise
        slot.transfer = None
        if stalled_s > 0.0:
            self.stats[unit].stalls += 1
            self.stats[unit].stall_s += stalled_s
            self._recorder.stall(unit, begin)
        if self._guard:
            self._guard.arrived(unit, slot.memory)

    def _await_readers(self, unit: int, slot: _Slot) -> None:
        me = threading.get_ident()
        # Anchors are never nested, so a reader that is this very thread is left over from an interrupted forward.
        slot.readers = [reader for reader in slot.readers if reader != me]
        if not self._free.wait_for(lambda: not slot.readers, CONFLICT_TIMEOUT_S):
            raise SlotConflictError(
                f"unit {unit} ({self._plan.units[unit].anchor}) needs the slot of unit {slot.unit}, which another "
                f"thread has been running for {CONFLICT_TIMEOUT_S:.0f} s; use one offloaded model per thread"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise StateError("this offload was removed while a forward was running; call the model again")
