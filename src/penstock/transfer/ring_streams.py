"""The link of units in files to a GPU: files -> staging ring -> slot, on one copy stream.

To the pipeline it is a :class:`~penstock.transfer.cuda_stream.StreamLink`: the same events, in captures too. Only what
lies between them differs: instead of one copy from a slab at rest, a handshake and a copy for each piece of the unit
(:mod:`penstock.transfer.ring`). The stream waits where a slab would be ready, and nothing else of the device does.

Units that have a slab in host memory beside those in files are copied from it, on the same stream and in their turn;
the ring knows nothing of them, and its readers work ahead meanwhile.

The ring is shared memory: its readers are a process of their own (:mod:`penstock.transfer.ring_process`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

import torch

from penstock.env import pin_memory_disabled, reader_threads
from penstock.errors import OptionError, StateError
from penstock.memory.memfd import SharedMemory
from penstock.memory.pages import collapse_parallel
from penstock.memory.pinned import CudaRegistrar, PinnedBuffer, pin_shared, pin_threads, refuse_capture
from penstock.plan.plan import Plan
from penstock.plan.ring_layout import ENTRY_BYTES, MAX_ENTRIES, lay_out_ring_of
from penstock.stats import Recorder, StagingStats
from penstock.stores.store import Load
from penstock.transfer.cuda_stream import StreamLink
from penstock.transfer.link import ComputeEvent, Transfer
from penstock.transfer.ring import MAX_READERS, SPARE_ONE_CORE_IN, STUCK_S
from penstock.transfer.ring_readers import ReaderProcess
from penstock.transfer.ring_staging import StagingRing, parts_in_files
from penstock.transfer.ring_task import RingTask
from penstock.transfer.stream_memory import CudaCopyStream

__all__ = ["RingLink"]


class RingLink(StreamLink):
    """Fork / copy / done / wait with streams and events, over a ring that a process of readers fills."""

    def __init__(
        self,
        device: torch.device,
        *,
        measure_stalls: bool = False,
        recorder: Recorder | None = None,
        entry_bytes: int = ENTRY_BYTES,
        max_entries: int = MAX_ENTRIES,
        num_threads: int | None = None,
        stuck_s: float = STUCK_S,
    ) -> None:
        """``device``: a CUDA device; nothing is taken before :meth:`start`, or pinned before :meth:`prepare`.

        ``recorder``: gets the reads. ``entry_bytes``, ``max_entries``: of the ring; other than the defaults they are
        not what limits and reports count with. ``num_threads``: readers; default ``PENSTOCK_READERS``, or as many
        as :mod:`~penstock.transfer.ring` says. ``stuck_s``: how long no read may end before the disk counts as dead.
        """
        super().__init__(device, measure_stalls=measure_stalls)
        self._recorder = recorder
        self._entry_bytes, self._max_entries = entry_bytes, max_entries
        self._num_threads = num_threads or reader_threads(at_most=MAX_READERS, spare_one_in=SPARE_ONE_CORE_IN)
        self._stuck_s = stuck_s
        self._memory: PinnedBuffer | None = None
        self._ring: StagingRing | None = None
        self._readers: ReaderProcess | None = None
        self._copies: CudaCopyStream | None = None
        self._last_stats = StagingStats()
        self._retire: weakref.finalize[..., RingLink] | None = None

    def start(self, plan: Plan, loads: Sequence[Load]) -> None:
        """Start the readers, whose interpreter takes some tenths of a second to come up; they look at nothing yet.

        At least one unit rests in files.

        Raises:
            OptionError: a process for the readers is not to be had, pinned memory is forbidden, or what passes through
                the ring is not in files.
            StateError: a graph is being captured.
        """
        if pin_memory_disabled():
            raise OptionError(
                "what rests in files comes to a GPU through pinned memory, which PENSTOCK_DISABLE_PIN_MEMORY=1 "
                "forbids; unset it, or use mode 'cpu' (--offload-mode cpu)"
            )
        refuse_capture(CudaRegistrar(self._device))
        layout = lay_out_ring_of(plan, self._entry_bytes, self._max_entries)
        task = RingTask(layout, parts_in_files(layout, loads), self._num_threads, self._stuck_s, os.getpid())
        shared = SharedMemory.create(layout.num_bytes)
        try:
            self._memory = PinnedBuffer(shared.map(0, layout.num_bytes))
            self._ring = StagingRing(layout, self._memory.blob)
            self._readers = ReaderProcess(task, self._ring.memory, shared.fileno(), self._recorder)
        finally:
            shared.close()  # mappings live on without it
        self._retire = weakref.finalize(self, self._readers.retire)

    def prepare(self, plan: Plan, loads: Sequence[Load]) -> None:
        """Pin the ring and let its readers serve; nothing is read before the first copy asks for it.

        Raises:
            OptionError: as of :meth:`start`; memory cannot be pinned, there are no stream memory operations, or the
                readers' process does not serve.
            StateError: a graph is being captured.
        """
        try:
            if self._readers is None:
                self.start(plan, loads)
            self._serve()
        except BaseException:
            self._end_readers()
            raise

    def _serve(self) -> None:
        assert self._readers is not None
        assert self._ring is not None
        assert self._memory is not None
        blob = self._memory.blob
        collapse_parallel(blob, pin_threads())
        pin_shared(self._memory, CudaRegistrar(self._device), "use mode 'cpu'")
        self._copies = CudaCopyStream(self._stream, blob[self._ring.memory.layout.words_at :].data_ptr())
        self._copies.try_out()  # before the readers look at the words
        self._readers.serve()

    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> Transfer:
        self.check()
        return super().copy(load, slot, after)

    def wait(self, transfer: Transfer, measure: bool = False) -> float:
        self.check()
        return super().wait(transfer, measure)

    def check(self) -> None:
        if self._ring is not None:
            self._ring.check()

    def staging_stats(self) -> StagingStats | None:
        if self._ring is not None:
            self._last_stats = self._ring.stats()
        return self._last_stats

    def close(self) -> None:
        try:
            super().close()  # the readers serve what is under way
        finally:
            self._end_readers()

    def _end_readers(self) -> None:
        if self._ring is not None and self._readers is not None:
            self._last_stats = self._ring.stats()
            self._readers.close()
        if self._retire is not None:
            self._retire.detach()
        self._ring = self._readers = self._memory = None  # and with them the pinned memory

    def _require_copyable(self, load: Load, captured: bool) -> None:
        if self._ring is None:
            raise StateError("this link is closed; offload the model again")
        if load.in_memory:
            super()._require_copyable(load, captured)

    def _enqueue(self, load: Load, slot: torch.Tensor) -> None:
        if load.in_memory:
            super()._enqueue(load, slot)
            return
        assert self._ring is not None
        assert self._copies is not None
        self._ring.enqueue(load.unit, slot, self._copies)
