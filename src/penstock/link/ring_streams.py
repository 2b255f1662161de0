"""The link of units in files to a GPU: files -> staging ring -> slot, on one copy stream.

To the pipeline it is a :class:`~penstock.link.streams.StreamLink`: the same events, in captures too. Only what lies
between them differs: instead of one copy from a slab at rest, a handshake and a copy for each piece of the unit
(:mod:`penstock.link.ring`). The stream waits where a slab would be ready, and nothing else of the device does.

Units that have a slab in host memory beside those in files are copied from it, on the same stream and in their turn;
the ring knows nothing of them, and its readers work ahead meanwhile.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch

from penstock.config import pin_memory_disabled, reader_threads
from penstock.errors import OptionError, StateError
from penstock.link.base import Mark, Transfer
from penstock.link.ring import STUCK_S, StagingRing
from penstock.link.stream_memory import CudaCopyStream
from penstock.link.streams import StreamLink, StreamTransfer
from penstock.plan.model import Plan
from penstock.plan.ring import ENTRY_BYTES, MAX_ENTRIES, lay_out_ring_of
from penstock.store.base import Load
from penstock.store.pinned import pinned_region
from penstock.telemetry import Recorder, StagingStats

__all__ = ["RingLink"]


class RingLink(StreamLink):
    """Fork / copy / done / wait with streams and events, over a ring that reader threads fill."""

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
        """``device``: a CUDA device; no memory is taken before :meth:`prepare`.

        ``recorder``: gets the reads. ``entry_bytes``, ``max_entries``: of the ring; other than the defaults they are
        not what limits and reports count with. ``num_threads``: readers; default ``PENSTOCK_READERS`` or one per core.
        ``stuck_s``: how long no read may end before the disk counts as dead.
        """
        super().__init__(device, measure_stalls=measure_stalls)
        self._recorder = recorder
        self._entry_bytes, self._max_entries = entry_bytes, max_entries
        self._num_threads, self._stuck_s = num_threads or reader_threads(), stuck_s
        self._ring: StagingRing | None = None
        self._copies: CudaCopyStream | None = None
        self._last_stats = StagingStats()
        self._retire: weakref.finalize[..., RingLink] | None = None

    def prepare(self, plan: Plan, loads: Sequence[Load]) -> None:
        """Pin the ring and start its threads; nothing is read before the first copy asks for it.

        At least one unit rests in files.

        Raises:
            OptionError: pinned memory or stream memory operations are not to be had.
            StateError: a graph is being captured.
        """
        if pin_memory_disabled():
            raise OptionError(
                "what rests in files comes to a GPU through pinned memory, which PENSTOCK_DISABLE_PIN_MEMORY=1 "
                "forbids; unset it, or use mode 'cpu' (--offload-mode cpu)"
            )
        gc.collect()  # here and not in a reader, where it would wait for a device that waits for the reader
        layout = lay_out_ring_of(plan, self._entry_bytes, self._max_entries)
        with torch.cuda.device(self._device):
            memory = pinned_region(layout.num_bytes)
        words = memory[StagingRing.words_at(layout) :]
        words.zero_()
        self._copies = CudaCopyStream(self._stream, words.data_ptr())
        self._copies.try_out()
        self._ring = StagingRing(
            layout, loads, memory, num_threads=self._num_threads, stuck_s=self._stuck_s, recorder=self._recorder
        )
        self._retire = weakref.finalize(self, self._ring.retire)

    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[Mark]) -> StreamTransfer:
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
            if self._ring is not None and self._retire is not None:
                self._last_stats = self._ring.stats()
                self._ring.close()
                self._retire.detach()
                self._ring = None  # and with it the pinned memory

    def _require_copyable(self, load: Load, captured: bool) -> None:
        if self._ring is None:
            raise StateError("this link is closed; offload the model again")
        if load.stretches:
            super()._require_copyable(load, captured)

    def _enqueue(self, load: Load, slot: torch.Tensor) -> None:
        if load.stretches:
            super()._enqueue(load, slot)
            return
        assert self._ring is not None
        assert self._copies is not None
        self._ring.enqueue(load.unit, slot, self._copies)
