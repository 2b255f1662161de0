"""Loads the weights of an offload in one pass, from files and live tensors to the store and the device.

Several threads read, without a copy in between. Deliveries are cut into jobs of about :data:`PIECE_BYTES` (large
storages split, small neighbours together) and taken in order, with a bounded number of jobs under way. Finished
storages are reported in order, too. Bytes for a device pass through the few pinned buffers of a :class:`CudaUploader`,
so that host memory never holds a whole tensor on the way. Tensors that the files hold in another form are converted on
the way, one recipe at a time.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import ChainMap, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from headrace.config import pin_memory_disabled
from headrace.errors import TransferError
from headrace.memory.pages import map_pages, pack
from headrace.memory.pinned import MIN_ADOPTED_BYTES, CudaRegistrar, PinnedBuffer
from headrace.memory.system import cpus_near, touch_threads, trim_heap
from headrace.model.live_tensors import BoundStorage
from headrace.stats import ReadStats
from headrace.stores.file_reads import ALIGN_BYTES, DiskOptions, ReadCounter
from headrace.stores.sources import ByteRange, Copy, writable_view
from headrace.stores.store import Progress, Store, new_buffer, require_weights

if TYPE_CHECKING:
    from headrace.checkpoint.safetensors_header import FileFingerprint
    from headrace.checkpoint.weight_map import Conversion, TensorSource, WeightMap

PIECE_BYTES = 16 << 20
JOBS_PER_THREAD = 2
_MAX_RUN = 512

BUFFER_BYTES = 4 << 20
NUM_BUFFERS = 12
# Direct reads fill whole aligned pages around the bytes that are wanted.
_BUFFER_BYTES = BUFFER_BYTES + 4 * ALIGN_BYTES

# The bytes of a live tensor exist twice until its source is freed, so these jobs are small and few.
_LIVE_PIECE_BYTES = 2 << 20
_LIVE_EXTRA_JOBS = 4
_TRIM_BYTES = 32 << 20
# Copied from a GPU before the host waits: what is coded takes memory until then.
_DEVICE_RUN_BYTES = 1 << 30

# A disk needs several requests at once, and a reader makes none while it copies out what it has read: on two cores
# four readers reach twice the rate of two. From the page cache the rates are the same.
_MIN_FILE_READERS = 8

# Where bytes go on a device, and where they are in host memory.
_Upload = tuple[torch.Tensor, torch.Tensor]
_Wait = Callable[[], None]


@dataclass(eq=False)
class WeightLoader:
    """Fills ``destinations`` in the store, and ``residents`` where compute will read them.

    A storage that the model has in host memory is freed as soon as its bytes are in a pinned store; its tensors are
    views of the store from then on.

    Attributes:
        bound: all storages, by name.
        store: owns the memory of ``destinations``.
        destinations: by name, memory of the store that is still to be filled (uint8, 1-D, host).
        residents: by name, where the bytes go (uint8, 1-D).
        device: where compute runs.
        weights: the checkpoint, for tensors on ``meta``.
        disk: how its files are read.
        progress: called with (bytes loaded, bytes to load) over the whole pass.
        taken: copies of storages on ``meta`` that do not come from files.
    """

    bound: Mapping[str, BoundStorage]
    store: Store
    destinations: Mapping[str, torch.Tensor]
    residents: Mapping[str, torch.Tensor]
    device: torch.device
    weights: WeightMap | None = None
    disk: DiskOptions | None = None
    progress: Progress | None = None
    taken: Mapping[str, Sequence[Copy]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Not copied into one dict: to look a destination up may be to wait until its memory is made.
        self._places = ChainMap(dict(self.residents), cast("dict[str, torch.Tensor]", self.destinations))
        self._sources: dict[str, TensorSource] = {}
        self._recipes: dict[str, tuple[str, Conversion]] = {}
        for name in self._places:
            if self.bound[name].on_meta and name not in self.taken:
                files, storage = require_weights(self.weights), self.bound[name].info
                if (recipe := files.recipe(storage)) is not None:
                    self._recipes[name] = recipe
                else:
                    self._sources[name] = files.source(storage)
        self._total_bytes = sum(self.bound[name].info.num_bytes for name in self._places)
        self._done_bytes = 0
        self._freed_bytes = 0

    def run(self) -> ReadStats:
        """Load everything; return how the bytes that came from files were read.

        Raises:
            TransferError, CheckpointError: bytes that cannot be read.
        """
        counter = ReadCounter()
        if not self._places:
            return counter.stats
        self._on_progress(0)
        self._copy_from_devices()
        # Live tensors before files, and alone: the others can use the memory that they free.
        live = [name for name in self._places if self.bound[name].home.type == "cpu"]
        self._deliver([name for name in live if name in self.destinations], self._live_copies, in_small_pieces=True)
        self._deliver([name for name in live if name not in self.destinations], self._live_copies)
        self._deliver([name for name in self._places if name in self.taken], lambda name: self.taken[name])
        if self._sources or self._recipes:
            self._deliver_from_files(counter)
        if self._freed_bytes:
            trim_heap()
        return counter.stats

    def _deliver_from_files(self, counter: ReadCounter) -> None:
        from headrace.stores.checkpoint_files import DiskStore

        # direct=None: cached pages come from the page cache, the rest by O_DIRECT. Over whole cold loads, direct and
        # buffered reads and a trial of both were within 10 % of each other, so nothing is measured first.
        disk, readers = self.disk or DiskOptions(direct=None), touch_threads(_MIN_FILE_READERS)
        stamps = () if self.weights is None else self.weights.checkpoint.stamps
        # Front to back through each file, so that neighbouring tensors become one request.
        first = {name: source.parts[0].tensor for name, source in self._sources.items()}
        by_position = sorted(first, key=lambda name: (str(first[name].path), first[name].offset))
        with closing(DiskStore(self._sources, disk, stamps=stamps, counter=counter)) as files:
            self._deliver(by_position, files.copies, readers)
        # Conversions take memory of their own on the way, so they come last.
        cpus = cpus_near(self.device)
        converter = TensorConverter(self._recipes, disk, counter, num_threads=readers, stamps=stamps, cpus=cpus)
        with closing(converter):
            self._deliver(converter.order, converter.copies, in_small_pieces=True)

    def _live_copies(self, name: str) -> list[Copy]:
        return [Copy(ByteRange.of(self.bound[name].original_bytes()), 0)]

    def _deliver(
        self,
        names: Sequence[str],
        copies: Callable[[str], Sequence[Copy]],
        num_threads: int | None = None,
        *,
        in_small_pieces: bool = False,
    ) -> None:
        num_threads = num_threads or touch_threads()
        uploader = None
        if not all(self.residents[name].is_cpu for name in names if name in self.residents):
            uploader = CudaUploader(self.device, None if pin_memory_disabled() else CudaRegistrar(self.device))
        deliver(
            (Delivery(name, partial(copies, name), self._places[name]) for name in names),
            num_threads=num_threads,
            uploader=uploader,
            on_loaded=self._on_loaded,
            on_progress=self._on_progress,
            cpus=cpus_near(self.device),
            piece_bytes=_LIVE_PIECE_BYTES if in_small_pieces else PIECE_BYTES,
            max_jobs=num_threads + _LIVE_EXTRA_JOBS if in_small_pieces else None,
        )

    def _copy_from_devices(self) -> None:
        """Copy storages that are on a GPU into their destinations."""
        # Not through deliver(): the destinations are pinned, so one asynchronous copy each reaches the link's rate.
        names = [name for name in self._places if self.bound[name].home.type == "cuda"]
        for run in pack([self.bound[name].info.num_bytes for name in names], _DEVICE_RUN_BYTES):
            for name in names[run.start : run.stop]:
                self._places[name].copy_(self.bound[name].original_bytes(), non_blocking=True)
            for home in {self.bound[name].home for name in names[run.start : run.stop]}:
                torch.cuda.synchronize(home)  # the host reads these bytes next, and no event orders it
            for name in names[run.start : run.stop]:
                self._on_progress(self.bound[name].info.num_bytes)
                if name in self.destinations:
                    self.store.on_loaded(name)

    def _on_progress(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self.progress is not None:
            self.progress(self._done_bytes, self._total_bytes)

    def _on_loaded(self, name: str) -> None:
        if name in self._recipes:
            self._trim_after(self.bound[name].info.num_bytes)
        if name not in self.destinations:
            return
        bound = self.bound[name]
        if not bound.on_meta and self.store.takes_over(name):
            # Here and not after the pass, so that the model is never in memory twice.
            bound.point_at(self.destinations[name])
            bound.forget_original()
            self._trim_after(bound.info.num_bytes)
        self.store.on_loaded(name)

    def _trim_after(self, num_bytes: int) -> None:
        """Return freed heap memory to the system after every 32 MiB of it."""
        # glibc unmaps larger blocks itself; smaller freed ones stay with the heap until malloc_trim.
        if num_bytes >= MIN_ADOPTED_BYTES:
            return
        before = self._freed_bytes // _TRIM_BYTES
        self._freed_bytes += num_bytes
        if self._freed_bytes // _TRIM_BYTES > before:
            trim_heap()


@dataclass(eq=False)
class TensorConverter:
    """The bytes of storages that the files hold in another form (transposed, another dtype), one recipe at a time.

    At any time memory holds the inputs of one recipe, its intermediate tensors and its results, until these are in
    their destinations: a few times the largest of them, whatever the size of the model.

    Attributes:
        recipes: by storage name, the name of the tensor that covers it, and its recipe.
        disk: how the files are read.
        counter: counts the bytes read.
        num_threads: readers.
        stamps: fingerprints that the files must have at every read.
        cpus: the readers stay on these processors.
    """

    recipes: Mapping[str, tuple[str, Conversion]]
    disk: DiskOptions
    counter: ReadCounter
    num_threads: int
    stamps: Iterable[FileFingerprint] = ()
    cpus: Collection[int] | None = None

    def __post_init__(self) -> None:
        from headrace.checkpoint.weight_map import TensorSource
        from headrace.stores.checkpoint_files import DiskStore

        parts = {part.name: TensorSource.of(part) for _, recipe in self.recipes.values() for part in recipe.parts}
        self._files = DiskStore(parts, self.disk, stamps=self.stamps, counter=self.counter)
        self._ready: dict[str, torch.Tensor] = {}  # results of a recipe that were not asked for yet

    @property
    def order(self) -> list[str]:
        """The storages in the order in which to ask for them."""
        # The results of one recipe wait in memory until each is asked for, so they are asked for in a row.
        first = {recipe.names: number for number, (_, recipe) in reversed([*enumerate(self.recipes.values())])}
        return sorted(self.recipes, key=lambda storage: first[self.recipes[storage][1].names])

    def copies(self, storage: str) -> Sequence[Copy]:
        """The bytes of ``storage``, converted now; the returned copies alone keep them alive.

        Raises:
            TransferError: inputs that cannot be read.
        """
        if storage not in self._ready:
            recipe = self.recipes[storage][1]
            made = recipe.make(self._read(recipe))
            for other, (name, one) in self.recipes.items():
                if one is recipe:
                    self._ready[other] = made.pop(name).detach().reshape(-1).view(torch.uint8)
        return [Copy(ByteRange.of(self._ready.pop(storage)), 0)]

    def close(self) -> None:
        """Close the files and free the memory."""
        self._files.close()
        self._ready.clear()

    def _read(self, recipe: Conversion) -> dict[str, torch.Tensor]:
        buffers = {part.name: new_buffer(part.num_bytes) for part in recipe.parts}
        deliveries = (Delivery(name, partial(self._files.copies, name), buffer) for name, buffer in buffers.items())
        deliver(deliveries, num_threads=self.num_threads, cpus=self.cpus)
        return {part.name: buffers[part.name].view(part.dtype).reshape(part.shape) for part in recipe.parts}


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Delivery:
    """One storage and where its bytes go.

    Attributes:
        name: name of the storage.
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
        piece_bytes: bytes of one job; to a device, a job goes in several pieces, as large as the uploader takes them.
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
    # Residents of an offload within inference_mode are inference tensors, and a thread begins outside of it.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream), torch.inference_mode():
        for into, staged in copies:
            into.copy_(staged, non_blocking=True)
        done.record(stream)
    return partial(_wait_for, done)


def _wait_for(done: torch.cuda.Event) -> None:
    if not done.query():  # to synchronize gives up the lock even if there is nothing to wait for
        done.synchronize()


def _no_wait() -> None:
    """Wait for a buffer that no copy reads: return at once."""


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
