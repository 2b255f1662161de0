"""Pooled links: every rank brings a part of each unit over its own link and passes it on to the others.

Ranks run in lockstep: they bring the same units in the same order, each at its own time. That is checked with every
unit, and no rank waits for another longer than the timeout of the group.

On a CPU (:class:`PooledThreadLink`) one thread per process passes parts on over gloo, in order of submission.

On GPUs (:class:`PooledStreamLink`) slots are symmetric memory, and a rank's copy engines write its part into the slots
of all others, chunk by chunk behind the copies from the host: no multiprocessor is busy with it but for two barriers
per unit. Four kinds of streams take part, all forked from compute by the marks and joined by the transfer's event:

* the copy stream: host to own slot. It needs nothing of the peers, so the next unit's chunks follow at once and the
  link never idles for a barrier;
* the pass stream: a barrier before the first pass (all slots are free) and one behind the last (all parts are there);
* one lane per peer: own slot to the peer's, each chunk as soon as it has come from the host.

[Note: no deadlock] Everything on a rank depends on work that was submitted earlier, there or, through a barrier, on a
peer that submits in the same order. So the earliest work that is not done can always run, whatever streams share a
hardware queue.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from penstock.errors import StateError, TransferError
from penstock.memory.symmetric import SymmetricMemory
from penstock.plan.plan import PartLayout, Striping
from penstock.ranks.channel import GlooChannel
from penstock.ranks.group import RankGroup
from penstock.stats import Recorder
from penstock.stores.store import Load
from penstock.transfer.cpu_threads import ThreadLink, ThreadTransfer
from penstock.transfer.cuda_stream import StreamLink, StreamTransfer
from penstock.transfer.link import ComputeEvent

__all__ = ["PooledStreamLink", "PooledThreadLink"]

_Job = Callable[[], None]


class PooledThreadLink(ThreadLink):
    """Reads this rank's part by worker threads; one more thread exchanges the parts."""

    def __init__(
        self, layout: PartLayout, channel: GlooChannel, num_threads: int | None = None, recorder: Recorder | None = None
    ) -> None:
        """``channel``: for this link alone; closed with it."""
        super().__init__(num_threads, recorder)
        self._layout = layout
        self._passing = _Passing(channel)
        self._slots: dict[int, ThreadTransfer] = {}

    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> ThreadTransfer:
        # As in the base: a caller that was interrupted may have lost sight of its last copy into this slot.
        if (previous := self._slots.get(slot.data_ptr())) is not None:
            previous.settle()
        own = super().copy(load, slot, after)
        whole = ThreadTransfer(load.unit, 1)
        self._slots[slot.data_ptr()] = whole
        self._passing.submit(own, whole, slot, self._layout.stripings[load.unit])
        return whole

    def close(self) -> None:
        self._passing.finish()
        super().close()


class _Passing:
    """The thread that exchanges parts, in order of submission; the first failure ends it for good."""

    def __init__(self, channel: GlooChannel) -> None:
        self._channel = channel
        self._failure: TransferError | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name="penstock-pass", daemon=True)
        self._thread.start()
        self._send_home = weakref.finalize(self, self._jobs.put, None)

    def submit(self, own: ThreadTransfer, whole: ThreadTransfer, slot: torch.Tensor, striping: Striping) -> None:
        """Exchange one unit once ``own`` is done, and then finish ``whole``."""
        self._jobs.put(lambda: self._run(own, whole, slot, striping))

    def finish(self) -> None:
        """Return when the exchanges under way are done or have failed; idempotent."""
        self._send_home()
        self._thread.join()
        self._channel.close()

    def _run(self, own: ThreadTransfer, whole: ThreadTransfer, slot: torch.Tensor, striping: Striping) -> None:
        error: BaseException | None = None
        try:
            if self._failure is not None:
                raise self._failure
            own.result()
            self._require_lockstep(own.unit)
            for rank, stretch in striping.in_order():
                self._channel.broadcast(slot[stretch.start : stretch.end], rank)
        except BaseException as caught:  # the thread must survive, and the caller must hear of it
            own.settle()  # nothing may land in the slot after this
            error = self._break(own.unit, caught)
        whole.finish(error=error)

    def _require_lockstep(self, unit: int) -> None:
        units = self._channel.gather_numbers(unit)
        if set(units) != {unit}:
            raise TransferError(out_of_step(units))

    def _break(self, unit: int, caught: BaseException) -> TransferError:
        """The order of what is under way is lost with a failure. Leaving tells the others, who would wait."""
        if self._failure is None:
            self._failure = (
                caught
                if isinstance(caught, TransferError)
                else TransferError(f"unit {unit} did not arrive: {caught!r}")
            )
            self._channel.close()
        return self._failure


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds the slot's memory, which must not outlive the offload


def out_of_step(units: Sequence[int]) -> str:
    """What to say of ranks that bring different units."""
    found = ", ".join(f"rank {rank} unit {unit}" for rank, unit in enumerate(units))
    return (
        f"ranks with pooled links or shared parts have to run the same modules in the same order, and here bring "
        f"{found}; give all ranks the same calls, or offload without group="
    )


class PooledStreamLink(StreamLink):
    """See the module. Events and streams only, so the copies can be captured like those of one link."""

    def __init__(
        self,
        device: torch.device,
        layout: PartLayout,
        ranks: RankGroup,
        *,
        measure_stalls: bool = False,
    ) -> None:
        """Collective.

        Raises:
            OptionError: devices that cannot address one another.
        """
        super().__init__(device, measure_stalls=measure_stalls)
        self._layout = layout
        self._ranks = ranks
        self._rank = ranks.rank
        self._pass = torch.cuda.Stream(device)
        # Beginning with the neighbour, so that the ranks do not all write to the same one at once.
        others = [(ranks.rank + step) % ranks.size for step in range(1, ranks.size)]
        self._lanes = {rank: torch.cuda.Stream(device) for rank in others}
        self._slots: dict[int, SymmetricMemory] = {}
        self._last: dict[int, StreamTransfer] = {}
        self._word = SymmetricMemory(8, device, ranks)
        self._units = torch.empty(ranks.size, dtype=torch.int64, device=device)
        self._equal = torch.empty(ranks.size, dtype=torch.bool, device=device)
        self._in_step = torch.empty((), dtype=torch.bool, device=device)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Collective: every rank asks for the same slots in the same order."""
        memory = SymmetricMemory(num_bytes, self._device, self._ranks)
        self._slots[memory.local.data_ptr()] = memory
        return memory.local

    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> StreamTransfer:
        if load.slab is None:
            raise TransferError(f"unit {load.unit} has no part in pinned host memory on this rank")
        captured = self.capturing
        if captured and not load.slab.is_pinned():
            raise StateError(
                "a copy from memory that is not pinned cannot be captured; unset PENSTOCK_DISABLE_PIN_MEMORY"
            )
        if ended := self._ranks.watch.ended:
            raise TransferError(
                f"rank {', '.join(map(str, sorted(ended)))} has ended, and with it the part of each unit that it "
                f"brought; restart all ranks together"
            )
        marks = [*self._events(after), *self._behind(slot, captured)]
        begin = self._step_in(load.unit, marks)
        for mark in marks:
            self._stream.wait_event(mark)
        for lane in self._lanes.values():
            lane.wait_event(begin)
        self._bring_and_pass(load, slot)
        transfer = StreamTransfer(load.unit, self._step_out(), captured)
        self._last[slot.data_ptr()] = transfer
        return transfer

    def close(self) -> None:
        super().close()
        self._slots.clear()
        self._last.clear()

    def _events(self, marks: Sequence[ComputeEvent]) -> Iterator[torch.cuda.Event]:
        for mark in marks:
            assert isinstance(mark, torch.cuda.Event)
            yield mark

    def _behind(self, slot: torch.Tensor, captured: bool) -> list[torch.cuda.Event]:
        """The last exchange of this slot: on one stream it would come first by itself."""
        last = self._last.get(slot.data_ptr())
        return [last.event] if last is not None and last.captured == captured else []

    def _step_in(self, unit: int, marks: Sequence[torch.cuda.Event]) -> torch.cuda.Event:
        """Behind it, the slot is free on all ranks and all of them bring ``unit``."""
        with torch.cuda.stream(self._pass):
            for mark in marks:
                self._pass.wait_event(mark)
            self._word.local.view(torch.int64).fill_(unit)
            self._word.barrier()
            torch.cat([view.view(torch.int64) for view in self._word.views], out=self._units)
            torch.all(torch.eq(self._units, unit, out=self._equal), out=self._in_step)
            torch._assert_async(self._in_step, "ranks with pooled links bring different units")
            free: torch.cuda.Event = self._pass.record_event()
        return free

    def _bring_and_pass(self, load: Load, slot: torch.Tensor) -> None:
        assert load.slab is not None
        views = self._slots[slot.data_ptr()].views
        for stretch in self._layout.stripings[load.unit].stretches(self._rank):
            own = slot[stretch.start : stretch.end]
            with torch.cuda.stream(self._stream):
                own.copy_(load.slab[stretch.offset : stretch.offset + stretch.num_bytes], non_blocking=True)
                arrived = self._stream.record_event()
            for rank, lane in self._lanes.items():
                lane.wait_event(arrived)
                with torch.cuda.stream(lane):
                    views[rank][stretch.start : stretch.end].copy_(own, non_blocking=True)

    def _step_out(self) -> torch.cuda.Event:
        """Behind it, all parts are there."""
        for stream in (self._stream, *self._lanes.values()):
            self._pass.wait_event(stream.record_event())
        with torch.cuda.stream(self._pass):
            self._word.barrier()
        complete: torch.cuda.Event = self._pass.record_event()
        return complete
