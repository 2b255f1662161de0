"""One pass that reads bytes into their destinations, in host memory or on a device.

Several threads read, without a copy in between. Deliveries are cut into jobs of about :data:`PIECE_BYTES` (large
storages split, small neighbours together) and taken in order, with a bounded number of jobs under way. Finished
storages are reported in order, too.

Bytes for a device pass through the few pinned buffers of a :class:`CudaUploader`: no whole tensor is in host memory on
the way.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from headrace.errors import TransferError
from headrace.memory.pages import map_pages, pack
from headrace.memory.pinned import CudaRegistrar, PinnedBuffer
from headrace.stores.sources import ALIGN_BYTES, ByteRange, Copy, writable_view

__all__ = ["PIECE_BYTES", "CudaUploader", "Delivery", "Progress", "Read", "UploadRing", "deliver", "read_staged"]

PIECE_BYTES = 16 << 20
JOBS_PER_THREAD = 2
_MAX_RUN = 512

BUFFER_BYTES = 4 << 20
NUM_BUFFERS = 12
# Direct reads fill whole aligned pages around the bytes that are wanted.
_BUFFER_BYTES = BUFFER_BYTES + 4 * ALIGN_BYTES

Progress = Callable[[int, int], None]
# Where bytes go on a device, and where they are in host memory.
_Upload = tuple[torch.Tensor, torch.Tensor]
_Wait = Callable[[], None]


@dataclass(frozen=True)
class Delivery:
    """One storage and where its bytes go.

    Attributes:
        name: of the storage.
        copies: returns the ranges that make it up, with offsets relative to its first byte; called when its turn comes.
        into: its destination, of its size (uint8, 1-D), on the host or on the device of the uploader.
    """

    name: str
    copies: Callable[[], Sequence[Copy]]
    into: torch.Tensor


@dataclass(frozen=True)
class Read:
    """The bytes of ``src``, which fill ``into`` (uint8, 1-D)."""

    src: ByteRange
    into: torch.Tensor


@dataclass
class _Job:
    uploads: bool
    reads: list[Read] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    num_bytes: int = 0


def deliver(
    deliveries: Iterable[Delivery],
    *,
    num_threads: int,
    uploader: CudaUploader | None = None,
    on_loaded: Callable[[str], None] = lambda name: None,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
    cpus: Collection[int] | None = None,
    piece_bytes: int = PIECE_BYTES,
    max_jobs: int | None = None,
) -> None:
    """Read every delivery into its destination, in order.

    Args:
        deliveries: taken one by one, as their turn comes.
        num_threads: readers.
        uploader: for destinations on a device.
        on_loaded: called in this thread with the name of each storage that is complete (on a device: whose copies are
            started).
        on_progress: called in this thread with the bytes of each job that is done.
        cpus: the readers stay on these processors, so that pages they touch first are in the memory near these.
        piece_bytes: of one job; to a device, a job goes in several pieces, as large as the uploader takes them.
        max_jobs: under way or waiting to be reported; default twice the readers.

    Raises:
        TransferError: bytes that cannot be read; nothing is under way any more. The same holds for errors of
            ``on_loaded`` and ``on_progress``, and for an interrupt.
    """
    pool = ThreadPoolExecutor(num_threads, "headrace-load", initializer=_stay_on, initargs=(cpus,))
    under_way: deque[tuple[_Job, Future[None]]] = deque()
    at_most = max_jobs or JOBS_PER_THREAD * num_threads
    device_bytes = min(piece_bytes, uploader.piece_bytes) if uploader else piece_bytes

    def finish_oldest() -> None:
        # In order, not as they complete: a source is then freed before the next ones are read.
        job, future = under_way.popleft()
        future.result()
        on_progress(job.num_bytes)
        finished = job.finished
        del job, future  # they hold the sources, which on_loaded() may free
        for name in finished:
            on_loaded(name)

    try:
        for job in _jobs(deliveries, piece_bytes, device_bytes):
            under_way.append((job, pool.submit(_run, job, uploader, device_bytes)))
            del job
            if len(under_way) >= at_most:
                finish_oldest()
        while under_way:
            finish_oldest()
    finally:
        pool.shutdown(cancel_futures=True)
        if uploader is not None:
            # After an error, too: copies under way still read the pinned buffers, which are freed next.
            uploader.finish()


def _jobs(deliveries: Iterable[Delivery], piece_bytes: int, device_bytes: int) -> Iterator[_Job]:
    job = _Job(False)
    for delivery in deliveries:
        uploads = not delivery.into.is_cpu
        if job.uploads != uploads and job.reads:
            yield job
            job = _Job(uploads)
        job.uploads = uploads
        for read in _reads(delivery, device_bytes if uploads else piece_bytes):
            if job.reads and job.num_bytes + read.into.numel() > piece_bytes:
                yield job
                job = _Job(uploads)
            job.reads.append(read)
            job.num_bytes += read.into.numel()
            del read
        job.finished.append(delivery.name)
        del delivery
    if job.reads or job.finished:
        yield job


def _reads(delivery: Delivery, limit: int) -> Iterator[Read]:
    covered = 0
    for copy in delivery.copies():
        covered += copy.num_bytes
        for piece in copy.pieces(limit):
            yield Read(piece.src, delivery.into[piece.dst_offset : piece.dst_end])
    if covered != delivery.into.numel():
        raise TransferError(
            f"{delivery.name}: expected sources of {delivery.into.numel()} bytes, found {covered}; the checkpoint has "
            f"changed, offload again"
        )


def _run(job: _Job, uploader: CudaUploader | None, device_bytes: int) -> None:
    if uploader is None or not job.uploads:
        _fill(job.reads)
    else:
        for run in pack([read.into.numel() for read in job.reads], device_bytes):
            uploader.upload(job.reads[run.start : run.stop])
    # After the reads, so that a write to a file during them is seen.
    for source in {read.src.source for read in job.reads}:
        source.require_unchanged()


def _fill(reads: Sequence[Read]) -> None:
    """Fill host memory; neighbouring ranges of a file are one request, whatever their destinations."""
    start = 0
    while start < len(reads):
        first = reads[start].src
        end, stop = first.offset, start
        while stop < min(len(reads), start + _MAX_RUN):
            following = reads[stop].src
            if following.source is not first.source or following.offset != end:
                break
            end, stop = end + following.num_bytes, stop + 1
        first.source.scatter(first.offset, [writable_view(read.into) for read in reads[start:stop]])
        start = stop


def _stay_on(cpus: Collection[int] | None) -> None:
    """Bind the calling thread; 0 means itself."""
    if cpus:
        with suppress(OSError):  # the processors may have been taken from this process since
            os.sched_setaffinity(0, cpus)


# -- to a device -------------------------------------------------------------------------------------------------------


class UploadRing:
    """Buffers that readers fill, and whose copies one of them starts.

    Args:
        buffers: uint8, 1-D, host.
        start: starts copies, returns a function that waits for them; called by one thread at a time.
    """

    def __init__(self, buffers: Iterable[torch.Tensor], start: Callable[[Sequence[_Upload]], _Wait]) -> None:
        self._start = start
        self._free: queue.SimpleQueue[tuple[torch.Tensor, _Wait]] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put((buffer, _no_wait))
        self._filled: deque[tuple[torch.Tensor, list[_Upload]]] = deque()
        self._starting = threading.Lock()

    def upload(self, reads: Sequence[Read]) -> None:
        """Read ``reads`` into one buffer; this thread, or another one in this method, starts their copies."""
        # Readers fill thousands of buffers a second, and a thread that releases the interpreter lock for a call into
        # CUDA waits behind all others to get it again. Therefore one thread at a time starts the copies of all full
        # buffers, with one event after them, while the others read on.
        buffer, wait = self._free.get()
        try:
            wait()
            self._filled.append((buffer, _read_all(reads, buffer)))
        except BaseException:
            self._free.put((buffer, wait))
            raise
        # Again after the lock is released: a reader that found it taken has left its buffer to this thread.
        while self._filled and self._starting.acquire(blocking=False):
            try:
                self._start_filled()
            finally:
                self._starting.release()

    def _start_filled(self) -> None:
        filled = [self._filled.popleft() for _ in range(len(self._filled))]
        if not filled:  # another thread was faster
            return
        wait: _Wait = _no_wait
        try:
            wait = self._start([copy for _, copies in filled for copy in copies])
        finally:
            for buffer, _ in filled:
                self._free.put((buffer, wait))


class CudaUploader(UploadRing):
    """Pinned buffers, and copies on a stream of its own."""

    # With the rest of its first and last page, a piece is a request of BUFFER_BYTES, which no disk need split.
    piece_bytes = BUFFER_BYTES - ALIGN_BYTES

    def __init__(self, device: torch.device, registrar: CudaRegistrar | None) -> None:
        """``registrar``: pins the buffers; with ``None``, or if it refuses, they stay unpinned, which is slower."""
        self._stream = torch.cuda.Stream(device)
        # The allocator may hand out memory that kernels on the current stream still read.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._pinned = PinnedBuffer(torch.from_numpy(map_pages(NUM_BUFFERS * _BUFFER_BYTES)))
        if registrar is not None:
            self._pinned.register(registrar)
        # No method of this starts the copies: the buffers of a cycle would stay until garbage is collected.
        super().__init__(self._pinned.buffer.split(_BUFFER_BYTES), partial(_start_copies, self._stream))

    def finish(self) -> None:
        """Return when every copy is done."""
        self._stream.synchronize()


def _start_copies(stream: torch.cuda.Stream, copies: Sequence[_Upload]) -> _Wait:
    """Start ``copies`` on ``stream``; returns a function that waits until they are done."""
    done = torch.cuda.Event()
    # A thread begins on device 0, and to return to that device's stream would make a context there.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        for into, staged in copies:
            into.copy_(staged, non_blocking=True)
        done.record(stream)
    return partial(_wait_for, done)


def _wait_for(done: torch.cuda.Event) -> None:
    if not done.query():  # to synchronize gives up the lock even if there is nothing to wait for
        done.synchronize()


def _no_wait() -> None:
    """For a buffer that no copy reads."""


def _read_all(reads: Sequence[Read], buffer: torch.Tensor) -> list[_Upload]:
    copies: list[_Upload] = []
    left = sum(read.into.numel() for read in reads)
    for read in reads:
        left -= read.into.numel()
        staged, buffer = read_staged(read.src, buffer, left)
        copies.append((read.into, staged))
    return copies


def read_staged(src: ByteRange, free: torch.Tensor, reserved_bytes: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Read ``src`` into ``free`` (uint8, 1-D, host); returns its bytes there, and the free memory after them.

    ``reserved_bytes`` of ``free`` are left for the reads that follow, however many of them there are.
    """
    # At a page's start, if that leaves enough: then what comes from a disk needs no other buffer.
    gap = -free.data_ptr() % ALIGN_BYTES
    end = free.numel() - reserved_bytes
    begin = gap if gap + src.num_bytes <= end else 0
    start = begin + src.source.read_around(src.offset, src.num_bytes, writable_view(free[begin:end]))
    return free[start : start + src.num_bytes], free[start + src.num_bytes :]
