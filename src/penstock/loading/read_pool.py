"""One pass that reads bytes into their destinations: several threads, no copy in between.

Deliveries are cut into jobs of about :data:`PIECE_BYTES` (large storages split, small neighbours together) and taken in
order, with a bounded number of jobs under way. Finished storages are reported in order, too, so a source can be freed
before the next ones are read. Destinations on a device go through an :class:`Uploader`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch

from penstock.errors import TransferError
from penstock.memory.byte_ranges import ByteRange, Copy, writable_view
from penstock.memory.pages import pack

__all__ = ["PIECE_BYTES", "Delivery", "Progress", "Read", "Uploader", "deliver"]

PIECE_BYTES = 16 << 20
JOBS_PER_THREAD = 2
_MAX_RUN = 512

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Delivery:
    """One storage on its way.

    Attributes:
        name: of the storage.
        num_bytes: of it.
        copies: gives what makes it up, with offsets relative to its first byte; called when its turn comes.
        into: where it goes (uint8, 1-D), on the host or on the device of the uploader.
    """

    name: str
    num_bytes: int
    copies: Callable[[], Sequence[Copy]]
    into: torch.Tensor


@dataclass(frozen=True)
class Read:
    """The bytes of ``src``, which fill ``into`` (uint8, 1-D)."""

    src: ByteRange
    into: torch.Tensor


class Uploader(Protocol):
    """Takes bytes from any source to a device."""

    piece_bytes: int

    def upload(self, reads: Sequence[Read]) -> None:
        """Read ``reads``, at most ``piece_bytes`` together, and have them copied; called by several threads.

        The copies may be started by another thread in this method.
        """

    def finish(self) -> None:
        """Return when every copy is done; every :meth:`upload` has returned."""


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
    uploader: Uploader | None = None,
    on_loaded: Callable[[str], None] = lambda name: None,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
    cpus: Collection[int] | None = None,
    piece_bytes: int = PIECE_BYTES,
    max_jobs: int | None = None,
) -> None:
    """Bring every delivery, in order.

    Args:
        deliveries: taken one by one, as their turn comes.
        num_threads: readers.
        uploader: for destinations on a device.
        on_loaded: called in this thread with the name of each storage that is complete (on a device: on its way).
        on_progress: called in this thread with the bytes of each job that is done.
        cpus: the readers stay on these processors, whose memory the pages they touch then are.
        piece_bytes: of one job; to a device, a job goes in several pieces, as large as the uploader takes them.
        max_jobs: under way or waiting to be reported; default twice the readers.

    Raises:
        TransferError: bytes that cannot be read; nothing is under way any more. The same for whatever ``on_loaded``,
            ``on_progress`` or the caller's interrupt raise.
    """
    pool = ThreadPoolExecutor(num_threads, "penstock-load", initializer=_stay_on, initargs=(cpus,))
    under_way: deque[tuple[_Job, Future[None]]] = deque()
    at_most = max_jobs or JOBS_PER_THREAD * num_threads
    device_bytes = min(piece_bytes, uploader.piece_bytes) if uploader else piece_bytes

    def settle() -> None:
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
                settle()
        while under_way:
            settle()
    finally:
        pool.shutdown(cancel_futures=True)
        if uploader is not None:
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
    if covered != delivery.num_bytes:
        raise TransferError(
            f"{delivery.name}: expected sources of {delivery.num_bytes} bytes, found {covered}; the checkpoint has "
            f"changed, offload again"
        )


def _run(job: _Job, uploader: Uploader | None, device_bytes: int) -> None:
    if uploader is None or not job.uploads:
        _fill(job.reads)
    else:
        for run in pack([read.into.numel() for read in job.reads], device_bytes):
            uploader.upload(job.reads[run.start : run.stop])
    for source in {read.src.source for read in job.reads}:
        source.require_unchanged()


def _fill(reads: Sequence[Read]) -> None:
    """Fill host memory; what is side by side in a file is read in one go, whatever destinations it goes to."""
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
        with suppress(OSError):  # processors taken away since
            os.sched_setaffinity(0, cpus)
