"""One pass that brings bytes to where they will rest or be read: several threads, no copy in between.

What is to be brought is a row of deliveries. They are cut into jobs of about :data:`PIECE_BYTES` (large storages split,
small neighbours together) and taken up in order, with a bounded number of jobs under way: what has arrived is reported
in order, too, so a source can be let go of before the next ones are read. Destinations on a device go through an
:class:`Uploader`.
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
from penstock.memory.pages import pack
from penstock.stores.file_reader import File, FileStretch
from penstock.stores.store import Segment, Source, writable_view

__all__ = ["PIECE_BYTES", "Delivery", "Part", "Progress", "Uploader", "deliver"]

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
        segments: gives its stretches, offsets relative to its first byte; called when its turn comes.
        into: where it goes (uint8, 1-D), on the host or on the device of the uploader.
    """

    name: str
    num_bytes: int
    segments: Callable[[], Sequence[Segment]]
    into: torch.Tensor


@dataclass(frozen=True)
class Part:
    """The bytes of ``source`` from ``start`` on that fill ``into``."""

    source: Source
    start: int
    into: torch.Tensor


class Uploader(Protocol):
    """Takes bytes from any source to a device."""

    piece_bytes: int

    def upload(self, parts: Sequence[Part]) -> None:
        """Read ``parts``, at most ``piece_bytes`` together, and have them copied; called by several threads.

        The copies may be started by another thread that is in here.
        """

    def finish(self) -> None:
        """Return when every copy is done; every :meth:`upload` has returned."""


@dataclass
class _Job:
    uploads: bool
    parts: list[Part] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    num_bytes: int = 0


def deliver(
    deliveries: Iterable[Delivery],
    *,
    num_threads: int,
    uploader: Uploader | None = None,
    landed: Callable[[str], None] = lambda name: None,
    moved: Callable[[int], None] = lambda num_bytes: None,
    cpus: Collection[int] | None = None,
    piece_bytes: int = PIECE_BYTES,
    max_jobs: int | None = None,
) -> None:
    """Bring every delivery, in order.

    Args:
        deliveries: taken one by one, as their turn comes.
        num_threads: readers.
        uploader: for destinations on a device.
        landed: called in this thread with the name of each storage that is complete (on a device: on its way).
        moved: called in this thread with the bytes of each job that is done.
        cpus: the readers stay on these processors, whose memory the pages they touch then are.
        piece_bytes: of one job; to a device, a job goes in several pieces, as large as the uploader takes them.
        max_jobs: under way or waiting to be reported; default twice the readers.

    Raises:
        TransferError: bytes that cannot be had; nothing is under way any more. The same for whatever ``landed``,
            ``moved`` or the caller's interrupt raise.
    """
    pool = ThreadPoolExecutor(num_threads, "penstock-load", initializer=_stay_on, initargs=(cpus,))
    under_way: deque[tuple[_Job, Future[None]]] = deque()
    at_most = max_jobs or JOBS_PER_THREAD * num_threads
    device_bytes = min(piece_bytes, uploader.piece_bytes) if uploader else piece_bytes

    def settle() -> None:
        job, future = under_way.popleft()
        future.result()
        moved(job.num_bytes)
        finished = job.finished
        del job, future  # they hold the sources, which landed() may let go of
        for name in finished:
            landed(name)

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
        if job.uploads != uploads and job.parts:
            yield job
            job = _Job(uploads)
        job.uploads = uploads
        for part in _parts(delivery, device_bytes if uploads else piece_bytes):
            if job.parts and job.num_bytes + part.into.numel() > piece_bytes:
                yield job
                job = _Job(uploads)
            job.parts.append(part)
            job.num_bytes += part.into.numel()
            del part
        job.finished.append(delivery.name)
        del delivery
    if job.parts or job.finished:
        yield job


def _parts(delivery: Delivery, limit: int) -> Iterator[Part]:
    covered = 0
    for segment in delivery.segments():
        covered += segment.num_bytes
        for start in range(0, segment.num_bytes, limit):
            size = min(limit, segment.num_bytes - start)
            yield Part(segment.source, start, delivery.into[segment.slot_offset + start :][:size])
    if covered != delivery.num_bytes:
        raise TransferError(
            f"{delivery.name}: expected sources of {delivery.num_bytes} bytes, found {covered}; the checkpoint has "
            f"changed, offload again"
        )


def _run(job: _Job, uploader: Uploader | None, device_bytes: int) -> None:
    if not job.uploads:
        _read(job.parts)
        return
    assert uploader is not None
    for run in pack([part.into.numel() for part in job.parts], device_bytes):
        uploader.upload(job.parts[run.start : run.stop])


def _read(parts: Sequence[Part]) -> None:
    """Fill host memory; what lies side by side in a file is read in one go, whatever rooms it goes to."""
    for first, views in _runs(parts):
        if isinstance(first.source, FileStretch):
            first.source.file.scatter(first.source.offset + first.start, views)
        else:
            first.source.read(first.start, views[0])


def _runs(parts: Sequence[Part]) -> Iterator[tuple[Part, list[memoryview]]]:
    """The first part of each run of neighbours in a file, and where they all go; other parts one by one."""
    run: list[memoryview] = []
    first: Part | None = None
    end: tuple[File, int] | None = None  # the file of the run, and the offset that follows it
    for part in parts:
        here = _place(part)
        if first is not None and (here is None or here != end or len(run) == _MAX_RUN):
            yield first, run
            run, first = [], None
        first = first or part
        run.append(writable_view(part.into))
        end = None if here is None else (here[0], here[1] + part.into.numel())
    if first is not None:
        yield first, run


def _place(part: Part) -> tuple[File, int] | None:
    source = part.source
    return (source.file, source.offset + part.start) if isinstance(source, FileStretch) else None


def _stay_on(cpus: Collection[int] | None) -> None:
    """Bind the calling thread; 0 means itself."""
    if cpus:
        with suppress(OSError):  # processors taken away since
            os.sched_setaffinity(0, cpus)
