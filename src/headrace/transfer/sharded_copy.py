"""Links of sharded stores: they bring whole units of which every rank keeps a part.

``sharded_gpu`` (:class:`DeviceShardLink`): each rank reads the others' parts out of their device memory. The parts
never change, so ranks need not run in step: each reads at its own time, in graphs too, and goes on when another rank
has ended.

``sharded_cpu`` (:class:`HostShardLink`): every rank copies its part of each unit over its own link and passes it on to
the others. Ranks run in step: they bring the same units in the same order, each at its own time. That is checked with
every unit, and no rank waits for another longer than the timeout of the group. Slots are symmetric memory, and a rank's
copy engines write its part into the slots of all others, chunk by chunk after the copies from the host: no
multiprocessor is busy with it but for two barriers per unit. Four kinds of streams take part, all forked from compute
by its events and joined by the transfer's event:

* the copy stream: host to own slot. It needs nothing of the other ranks, so the next unit's chunks follow at once and
  the link never idles for a barrier;
* the pass stream: a barrier before the first pass (all slots are free) and one after the last (all parts are there);
* one lane per other rank: own slot to that rank's, each chunk as soon as it has come from the host.

[Note: no deadlock] Everything on a rank depends on work that was submitted earlier, there or, through a barrier, on a
rank that submits in the same order. So the earliest work that is not done can always run, whatever streams share a
hardware queue.

On a CPU both kinds of parts are host memory (:class:`GlooShardLink`), and one thread per process passes them on over
gloo, in order of submission.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from headrace.errors import TransferError
from headrace.memory.shared import SymmetricMemory
from headrace.ranks.group import GlooChannel, RankGroup
from headrace.stats import Recorder
from headrace.stores.sharded import DeviceShardedStore, PartLayout, ShardedStore
from headrace.stores.store import Load
from headrace.transfer.cuda_stream import StreamLink, StreamTransfer, wait_for_events
from headrace.transfer.link import ComputeEvent, Link, ThreadLink, ThreadTransfer


def open_link(store: ShardedStore, device: torch.device, recorder: Recorder, measure_stalls: bool) -> Link:
    """The link that brings whole units from the parts of all ranks. Collective."""
    if device.type != "cuda":
        return GlooShardLink(store.layout, GlooChannel(store.ranks, "units"), recorder=recorder)
    if isinstance(store, DeviceShardedStore):
        return DeviceShardLink(device, store, measure_stalls=measure_stalls)
    return HostShardLink(device, store.layout, store.ranks, measure_stalls=measure_stalls)


class GlooShardLink(ThreadLink):
    """Reads this rank's part by worker threads; one more thread exchanges the parts."""

    def __init__(
        self, layout: PartLayout, channel: GlooChannel, num_threads: int | None = None, recorder: Recorder | None = None
    ) -> None:
        """``channel``: for this link alone; closed with it."""
        super().__init__(num_threads, recorder)
        self._layout = layout
        self._channel = channel
        self._exchanger = ThreadPoolExecutor(1, "headrace-pass")
        self._failure: TransferError | None = None

    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> ThreadTransfer:
        own = super().copy(load, slot, after)
        # The next copy into this slot waits for all of the unit, and not for this rank's part alone.
        whole = self._latest[slot.data_ptr()] = ThreadTransfer(load.unit, 1)
        try:
            self._exchanger.submit(self._exchange, own, whole, slot)
        except BaseException as error:
            whole.finish(error=error)  # or the next copy into this slot would wait forever
            raise
        return whole

    def close(self) -> None:
        self._exchanger.shutdown()
        self._channel.close()
        super().close()

    def _exchange(self, own: ThreadTransfer, whole: ThreadTransfer, slot: torch.Tensor) -> None:
        """Exchange one unit once ``own`` is done, and then finish ``whole``."""
        error: BaseException | None = None
        try:
            if self._failure is not None:
                raise self._failure
            own.result()
            self._require_in_step(own.unit)
            for rank, stretch in self._layout.stripings[own.unit].in_order():
                self._channel.broadcast(slot[stretch.start : stretch.end], rank)
        except BaseException as caught:  # the thread must survive, and the caller must get the error
            own.join()  # nothing may be written to the slot after this
            error = self._fail(own.unit, caught)
        whole.finish(error=error)

    def _require_in_step(self, unit: int) -> None:
        units = self._channel.gather_numbers(unit)
        if set(units) != {unit}:
            found = ", ".join(f"rank {rank} unit {other}" for rank, other in enumerate(units))
            raise TransferError(
                f"ranks with a sharded store have to run the same modules in the same order, and here bring {found}; "
                f"give all ranks the same calls, or offload without group="
            )

    def _fail(self, unit: int, caught: BaseException) -> TransferError:
        """The first failure ends all exchanges, since their order is lost; the other ranks see the closed channel."""
        if self._failure is None:
            wrapped = TransferError(f"unit {unit} was not copied: {caught!r}")
            self._failure = caught if isinstance(caught, TransferError) else wrapped
            self._channel.close()
        return self._failure


class DeviceShardLink(StreamLink):
    """Gathers a unit from the memory of all ranks' devices by their copy engines.

    One stream per rank, so that several NVLinks and engines work at once, all forked from the copy stream and joined to
    it.
    """

    def __init__(self, device: torch.device, store: DeviceShardedStore, *, measure_stalls: bool = False) -> None:
        super().__init__(device, measure_stalls=measure_stalls)
        self._store = store
        # Beginning with the neighbour, so that the ranks do not all read from the same one at once.
        order = [(store.ranks.rank + step) % store.ranks.size for step in range(1, store.ranks.size + 1)]
        self._lanes = {rank: self._new_stream() for rank in order}

    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> StreamTransfer:
        if load.slab is None:
            raise TransferError(f"unit {load.unit} has no part on this rank's device")
        capture = self.capture_id
        wait_for_events(self._stream, after)
        begin = self._stream.record_event()
        for rank, lane in self._lanes.items():
            lane.wait_event(begin)
            with torch.cuda.stream(lane):
                self._gather(load.unit, slot, rank)
            self._stream.wait_event(lane.record_event())
        return StreamTransfer(load.unit, self._stream.record_event(), capture)

    def _gather(self, unit: int, slot: torch.Tensor, rank: int) -> None:
        layout = self._store.layout
        memory = self._store.views[rank][layout.offsets[unit] :]
        for stretch in layout.stripings[unit].stretches(rank):
            part = memory[stretch.offset : stretch.offset + stretch.num_bytes]
            slot[stretch.start : stretch.end].copy_(part, non_blocking=True)


class HostShardLink(StreamLink):
    """See the module. Events and streams only, so the copies can be captured like those of one link."""

    def __init__(
        self, device: torch.device, layout: PartLayout, ranks: RankGroup, *, measure_stalls: bool = False
    ) -> None:
        """Collective.

        Raises:
            OptionError: devices that cannot address one another.
        """
        super().__init__(device, measure_stalls=measure_stalls)
        self._layout = layout
        self._ranks = ranks
        self._pass = self._new_stream()
        # Beginning with the neighbour, so that the ranks do not all write to the same one at once.
        others = [(ranks.rank + step) % ranks.size for step in range(1, ranks.size)]
        self._lanes = {rank: self._new_stream() for rank in others}
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
        capture = self.capture_id
        self._require_copyable(load, capture is not None)
        if ended := self._ranks.watch.ended:
            raise TransferError(
                f"rank {', '.join(map(str, sorted(ended)))} has ended, and with it the part of each unit that it "
                f"brought; restart all ranks together"
            )
        last = self._last.get(slot.data_ptr())
        # The last exchange of this slot counts too: on one stream it would come first by itself.
        events = [*after, last.event] if last is not None and last.capture == capture else after
        begin = self._step_in(load.unit, events)
        for lane in self._lanes.values():
            lane.wait_event(begin)
        self._bring_and_pass(load.unit, load.slab, slot)
        transfer = StreamTransfer(load.unit, self._step_out(), capture)
        self._last[slot.data_ptr()] = transfer
        return transfer

    def close(self) -> None:
        super().close()
        self._slots.clear()
        self._last.clear()

    def _step_in(self, unit: int, events: Sequence[ComputeEvent]) -> torch.cuda.Event:
        """An event after which the slot is free on all ranks, and all of them bring ``unit``."""
        for stream in (self._stream, self._pass):
            wait_for_events(stream, events)
        with torch.cuda.stream(self._pass):
            self._word.local.view(torch.int64).fill_(unit)
            self._word.barrier()
            torch.cat([view.view(torch.int64) for view in self._word.views], out=self._units)
            torch.all(torch.eq(self._units, unit, out=self._equal), out=self._in_step)
            torch._assert_async(self._in_step, "ranks with a sharded store bring different units")
            free: torch.cuda.Event = self._pass.record_event()
        return free

    def _bring_and_pass(self, unit: int, part: torch.Tensor, slot: torch.Tensor) -> None:
        views = self._slots[slot.data_ptr()].views
        for stretch in self._layout.stripings[unit].stretches(self._ranks.rank):
            own = slot[stretch.start : stretch.end]
            with torch.cuda.stream(self._stream):
                own.copy_(part[stretch.offset : stretch.offset + stretch.num_bytes], non_blocking=True)
                copied = self._stream.record_event()
            for rank, lane in self._lanes.items():
                lane.wait_event(copied)
                with torch.cuda.stream(lane):
                    views[rank][stretch.start : stretch.end].copy_(own, non_blocking=True)

    def _step_out(self) -> torch.cuda.Event:
        """An event after which all parts are in the slot."""
        for stream in (self._stream, *self._lanes.values()):
            self._pass.wait_event(stream.record_event())
        with torch.cuda.stream(self._pass):
            self._word.barrier()
            complete: torch.cuda.Event = self._pass.record_event()
        return complete
