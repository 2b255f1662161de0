"""Files to a GPU by threads: readers fill pinned buffers, and one thread gives their copies to the copy stream.

A unit is cut into pieces of its slab. Readers take pieces in the order of submission, each with a buffer; one thread,
the *copier*, takes them in the same order, waits until each is read, and starts its copy. So no device ever waits for a
thread: ``wait`` holds the host until the last copy of the unit has been started, and then the compute stream until it
is done. That is why a graph over units in files cannot be captured: a replay has no host to hold.

Beside :mod:`penstock.transfer.ring_streams`, which does the same without holding the host, to be compared with it.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from penstock.env import reader_threads
from penstock.errors import StateError
from penstock.loading.upload import Upload, Wait, no_wait, start_copies
from penstock.memory.byte_ranges import Copy, clip, writable_view
from penstock.memory.pages import pieces
from penstock.memory.pinned import CudaRegistrar, pinned_region, refuse_capture
from penstock.plan.plan import Plan
from penstock.stats import Recorder, StagingStats
from penstock.stores.file_reader import ALIGN_BYTES
from penstock.stores.store import Load
from penstock.transfer.cuda_stream import StreamLink, StreamTransfer, wait_for_events
from penstock.transfer.link import ComputeEvent, ThreadTransfer, Transfer, close_at_exit, end_threads

__all__ = ["DiskToCudaLink", "StagedReads"]

# Small enough that several readers help with the unit that is needed next, long enough for the rate of the link.
PIECE_BYTES = 4 << 20
# Together 128 MiB, as much as the staging ring has.
NUM_BUFFERS = 32
# A direct read fills the whole pages around the bytes that are wanted.
_BUFFER_BYTES = PIECE_BYTES + 2 * ALIGN_BYTES
MAX_READERS = 14


class DiskTransfer(ThreadTransfer):
    """A unit on its way from files, counted by pieces whose copies were started.

    Attributes:
        after: the copier lets its stream wait for these events before the first copy.
        event: recorded behind the last copy when that has been started.
    """

    def __init__(self, load: Load, after: Sequence[ComputeEvent]) -> None:
        super().__init__(load.unit, -(-load.num_bytes // PIECE_BYTES))
        self.after = after
        self.event: torch.cuda.Event | None = None

    @property
    def done(self) -> bool:
        return super().done and (self.event is None or bool(self.event.query()))

    @property
    def is_started(self) -> bool:
        """Whether every copy was started, or failed: ``wait`` no longer holds the host."""
        return super().done


@dataclass(eq=False)
class _Piece:
    """A part of a unit on its way into its slot.

    Attributes:
        transfer: of the unit.
        into: the part of the slot.
        reads: what it is made of, with offsets relative to ``into``; gaps between them are not filled.
        is_first, is_last: of the unit.
        is_read: a gate that the reader opens; from then on only the copier uses the piece.
    """

    transfer: DiskTransfer
    into: torch.Tensor
    reads: list[Copy]
    is_first: bool
    is_last: bool
    is_read: threading.Lock = field(default_factory=threading.Lock)
    buffer: torch.Tensor | None = None
    uploads: list[Upload] = field(default_factory=list)
    error: BaseException | None = None

    def read(self, buffer: torch.Tensor) -> None:
        """Fill ``buffer``, and say what is to be copied from it."""
        view = writable_view(buffer)
        if len(self.reads) == 1:  # where in the buffer the bytes begin does not matter
            (read,) = self.reads
            start = read.src.source.read_around(read.src.offset, read.num_bytes, view)
            read.src.source.require_unchanged()
            self.uploads = [(self.into[read.dst_offset : read.dst_end], buffer[start : start + read.num_bytes])]
            return
        for read in self.reads:
            read.src.read(view[read.dst_offset : read.dst_end])
        self.uploads = [(self.into, buffer[: self.into.numel()])]


class _Queues:
    """What the threads share; they know nothing else, so that the link can be collected while they wait for work."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self.submitted: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self.taken: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()  # in the order of submission
        self.free: queue.SimpleQueue[tuple[torch.Tensor, Wait]] = queue.SimpleQueue()
        self.taking = threading.Lock()
        self.num_bytes_read = 0
        for buffer in buffers:
            self.free.put((buffer, no_wait))


class StagedReads:
    """Reader threads and a copier over a few buffers.

    Args:
        buffers: uint8, 1-D, host, page-aligned, of ``PIECE_BYTES`` and two pages each.
        stream: gets the copies.
        num_threads: readers.
        recorder: gets the reads.
    """

    def __init__(
        self, buffers: Sequence[torch.Tensor], stream: torch.cuda.Stream, num_threads: int, recorder: Recorder
    ) -> None:
        self._queues = queues = _Queues(buffers)
        self._threads = [
            threading.Thread(target=_read, args=(queues, recorder), name=f"penstock-reader-{i}", daemon=True)
            for i in range(num_threads)
        ]
        copier = threading.Thread(target=_copy, args=(queues, stream), name="penstock-copier", daemon=True)
        self._threads.append(copier)
        self._end = weakref.finalize(self, end_threads, queues.submitted, num_threads)
        for thread in self._threads:
            thread.start()

    @property
    def num_bytes_read(self) -> int:
        """By all readers so far."""
        return self._queues.num_bytes_read

    def submit(self, transfer: DiskTransfer, load: Load, slot: torch.Tensor) -> None:
        """Bring a unit into ``slot``. Never blocks."""
        ranges = list(pieces(load.num_bytes, PIECE_BYTES))
        sent = 0
        try:
            for start, end in ranges:
                reads = clip(load.copies, start, end)
                piece = _Piece(transfer, slot[start:end], reads, start == 0, end == load.num_bytes)
                piece.is_read.acquire()
                self._queues.submitted.put(piece)
                sent += 1
        except BaseException as error:
            transfer.finish(len(ranges) - sent, error)
            raise

    def close(self) -> None:
        """Finish what was submitted, and end the threads. Idempotent."""
        self._end()
        end_threads(
            self._queues.submitted, len(self._threads)
        )  # once more: an interrupt may have cut the first time short
        for thread in self._threads:
            thread.join()


def _read(queues: _Queues, recorder: Recorder) -> None:
    while True:
        # Both under one lock: a piece that got its buffer behind a later one could wait for it for ever.
        with queues.taking:
            piece = queues.submitted.get()
            buffer, wait = queues.free.get() if piece is not None else (None, no_wait)
            queues.taken.put(piece)
        if piece is None or buffer is None:
            return
        piece.buffer = buffer
        begin = time.perf_counter_ns()
        try:
            wait()
            if not piece.transfer.failed:
                piece.read(buffer)
                recorder.add("copy", piece.transfer.unit, begin, sum(read.num_bytes for read in piece.reads))
        except BaseException as error:  # a reader must survive, and the caller must hear of it
            piece.error = error
        piece.is_read.release()
        del piece, buffer, wait  # they hold the slot's memory, which must not outlive the offload


def _copy(queues: _Queues, stream: torch.cuda.Stream) -> None:
    while (piece := queues.taken.get()) is not None:
        piece.is_read.acquire()
        wait, error = no_wait, piece.error
        try:
            if error is None and not piece.transfer.failed:
                if piece.is_first:
                    wait_for_events(stream, piece.transfer.after)
                # Many readers may wait for a buffer at once, and must leave the cores to those that read: no spinning.
                wait = start_copies(stream, piece.uploads, blocking=True)
                if piece.is_last:
                    event = torch.cuda.Event()
                    with torch.cuda.device(stream.device):  # a thread begins on device 0
                        event.record(stream)
                    piece.transfer.event = event
                queues.num_bytes_read += sum(read.num_bytes for read in piece.reads)
        except BaseException as caught:
            error = caught
        assert piece.buffer is not None
        queues.free.put((piece.buffer, wait))
        piece.transfer.finish(error=error)
        del piece, wait


class DiskToCudaLink(StreamLink):
    """Record / copy / wait with a stream and events, over buffers that threads fill; eager only."""

    def __init__(
        self,
        device: torch.device,
        *,
        measure_stalls: bool = False,
        recorder: Recorder | None = None,
        num_threads: int | None = None,
    ) -> None:
        """``device``: a CUDA device; nothing is pinned or started before :meth:`prepare`.

        ``num_threads``: readers; default ``PENSTOCK_READERS``, or one per core but one in eight, at most fourteen.
        """
        super().__init__(device, measure_stalls=measure_stalls)
        self._recorder = recorder or Recorder()
        self._num_threads = num_threads or reader_threads(at_most=MAX_READERS, spare_one_in=8)
        self._reads: StagedReads | None = None
        self._latest: dict[int, DiskTransfer] = {}  # by the address of the slot
        self._stats = StagingStats()

    def prepare(self, plan: Plan, loads: Sequence[Load]) -> None:
        """Pin the buffers and start the threads.

        Raises:
            StateError: a graph is being captured.
        """
        refuse_capture(CudaRegistrar(self._device))
        num_pieces = sum(-(-load.num_bytes // PIECE_BYTES) for load in loads if not load.in_memory)
        buffers = pinned_region(min(NUM_BUFFERS, num_pieces) * _BUFFER_BYTES).split(_BUFFER_BYTES)
        self._reads = StagedReads(buffers, self._stream, self._num_threads, self._recorder)
        close_at_exit(self)

    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> Transfer:
        if self._reads is None:
            raise StateError("this link is closed; offload the model again")
        # What was started for this slot before goes first, also where an interrupted caller has lost sight of it.
        if (previous := self._latest.get(slot.data_ptr())) is not None:
            previous.settle()
        if load.in_memory:
            return super().copy(load, slot, after)
        if self.capturing:
            raise StateError(
                f"unit {load.unit} rests in files, and a CUDA graph cannot be captured over such units: at a replay "
                f"there is no host to wait until they are read. Run the model without graphs, or keep its weights in "
                f"host memory: mode 'cpu' (--offload-mode cpu)"
            )
        transfer = DiskTransfer(load, after)
        self._latest[slot.data_ptr()] = transfer  # from here on an error has to end it
        self._reads.submit(transfer, load, slot)
        return transfer

    def wait(self, transfer: Transfer, measure: bool = False) -> float:
        if isinstance(transfer, StreamTransfer):
            return super().wait(transfer, measure)
        assert isinstance(transfer, DiskTransfer)
        stream = torch.cuda.current_stream(self._device)
        held_s = 0.0
        # The first event before the host is held: what the device waits for in the meantime counts.
        with self._timing(transfer.unit, stream, measure):
            if not transfer.is_started:
                begin = time.perf_counter()
                transfer.settle()
                held_s = time.perf_counter() - begin
            transfer.result()
            if transfer.event is not None and not self.capturing:
                stream.wait_event(transfer.event)
        self._stats = StagingStats(0, self._stats.stalls + (held_s > 0), self._stats.stall_s + held_s, 0)
        return held_s

    def staging_stats(self) -> StagingStats:
        """Bytes read; how often and how long the host was held, which is no stall where the device has work left."""
        num_bytes = self._reads.num_bytes_read if self._reads is not None else self._stats.bytes_read
        return StagingStats(num_bytes, self._stats.stalls, self._stats.stall_s, 0)

    def close(self) -> None:
        try:
            if self._reads is not None:
                self._stats = self.staging_stats()
                self._reads.close()
        finally:
            super().close()
            self._reads = None  # and with it the buffers
