"""The contract every link keeps, and the link of a CPU.

* ``record_compute()`` records an event after all compute submitted so far. A copy that is given this event starts only
  after it, so the last kernel that reads a slot is done before the slot is overwritten.
* ``copy()`` starts moving a unit and returns a :class:`Transfer` at once.
* ``wait()`` holds compute (not necessarily the caller) until a transfer is done.

On a CPU compute is synchronous, so there is no event and waiting blocks the caller. On a GPU transfers end in events,
and waiting orders streams without blocking the host (:mod:`headrace.transfer.cuda_stream`).
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from headrace.errors import MORE_THREADS, OptionError, StateError, TransferError
from headrace.forks import OwnProcess
from headrace.memory.system import reader_threads
from headrace.plan.plan import Plan
from headrace.stats import Recorder, StagingStats
from headrace.stores.sources import ByteRange, writable_view
from headrace.stores.store import Load, new_buffer

# Workers share a unit in pieces of this size, BLOCK_BYTES of file_reads.py, so that each is one direct read.
PIECE_BYTES = 2 << 20


class ComputeEvent(Protocol):
    """A point in compute, made by :meth:`Link.record_compute`."""


class Transfer(Protocol):
    """A copy under way."""

    @property
    def unit(self) -> int:
        """Index of the unit that is moved."""

    @property
    def done(self) -> bool:
        """Whether the copy has completed or failed; never blocks."""


class Link(ABC):
    """Moves units from a store into slots.

    Attributes:
        joined_by_caller: code that captures graphs calls ``wait_all`` at their ends, so a copy that compute has not
            waited for is its error.
    """

    joined_by_caller = False

    @abstractmethod
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory for one slot: uint8, 1-D, on the link's device, fixed address."""

    def start(self, plan: Plan, loads: Sequence[Load]) -> None:
        """Begin what can go on while weights are loaded; called at most once, with the arguments of :meth:`prepare`.

        Raises:
            StateError, OptionError: this link cannot be set up here and now.
        """

    def prepare(self, plan: Plan, loads: Sequence[Load]) -> None:
        """Called once, before anything is moved, with what will be moved, by unit; for links that read ahead.

        Raises:
            StateError, OptionError: this link cannot be set up here and now.
        """

    def decode(self, load: Load, slot: torch.Tensor, into: torch.Tensor, after: Sequence[ComputeEvent]) -> None:
        """Decode a coded unit from ``slot`` as a part of compute, after all of ``after``; it has been waited for."""
        from headrace.stores.coded_host import CodedUnit

        CodedUnit(slot, load.coded).read(0, writable_view(into[: sum(piece.num_bytes for piece in load.coded)]))

    @property
    def capturing(self) -> bool:
        """Whether compute is being recorded into a graph instead of run."""
        return False

    @property
    def capture_id(self) -> int | None:
        """The capture that compute is being recorded into, by a number of its own; ``None``: compute runs."""
        return 0 if self.capturing else None

    @abstractmethod
    def record_compute(self) -> ComputeEvent | None:
        """Record an event after all compute submitted so far; ``None`` where compute is synchronous."""

    def leave_replay_event(self, slot: int) -> None:
        """Record an event, in a capture, after all compute submitted so far, at every replay of the graph.

        There is one event per slot, which all graphs share.
        """

    def replay_event(self, slot: int) -> ComputeEvent | None:
        """The event that the latest replay has recorded or will record; ``None`` where no graph does."""
        return None

    def leave_copy_event(self, slot: int) -> None:
        """Outside of captures: record an event after all copies submitted so far; one per slot."""

    def copy_event(self, slot: int, unit: int) -> Transfer | None:
        """Event, in a capture, of the copy of ``unit`` before the last :meth:`leave_copy_event` of ``slot``.

        ``None``: a replay cannot wait for it, so it has to be waited for before.
        """
        return None

    @abstractmethod
    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> Transfer:
        """Start moving a unit into ``slot`` once all of ``after`` is reached. Copies complete in this order."""

    @abstractmethod
    def wait(self, transfer: Transfer, measure: bool = False) -> float:
        """Hold compute until ``transfer`` is done.

        ``measure``: this is the wait of a module for its unit; :meth:`last_stall_s` returns its duration.

        Returns:
            seconds the caller was held; 0.0 when the bytes were there already.

        Raises:
            TransferError: the copy failed.
        """

    def check(self) -> None:
        """Raise ``TransferError`` if a copy failed while no caller waited for it, as in a replay."""

    def staging_stats(self) -> StagingStats | None:
        """Counters of the staging between store and copies; ``None`` for a link without any."""
        return None

    def last_stall_s(self, unit: int) -> float | None:
        """Seconds compute was held at the latest wait for ``unit``; ``None`` if this link does not measure it.

        May block until the device has passed that point.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Finish copies under way and release threads and streams; idempotent."""


# Closed at the end of the program: a worker inside a copy would be torn out of it, which aborts the process.
_open_links: weakref.WeakSet[ThreadLink] = weakref.WeakSet()


class ThreadTransfer:
    """Counts the pieces still missing; the last one opens the gate.

    The gate is a plain lock and no ``threading.Event``: a Ctrl-C inside an event's own Python code can leave its lock
    taken forever, and then the worker that sets it blocks.
    """

    def __init__(self, unit: int, num_pieces: int) -> None:
        self.unit = unit
        self._left = num_pieces
        self._lock = threading.Lock()
        self._gate = threading.Lock()
        self.done = num_pieces == 0
        self._error: BaseException | None = None
        if not self.done:
            self._gate.acquire()

    @property
    def failed(self) -> bool:
        """Whether a piece could not be read; the remaining ones are skipped."""
        return self._error is not None

    def finish(self, num_pieces: int = 1, error: BaseException | None = None) -> None:
        """Called by a worker when its piece is in the slot, or cannot be."""
        with self._lock:
            self._error = self._error or error
            self._left -= num_pieces
            if self._left <= 0 and not self.done:
                self.done = True
                self._gate.release()

    def join(self) -> None:
        """Block until no piece is under way."""
        if not self.done:
            with self._gate:
                pass

    def result(self) -> None:
        """Block until all pieces are in; raise the error of the copy."""
        self.join()
        if self._error is None:
            return
        if isinstance(self._error, TransferError):
            raise TransferError(str(self._error)) from self._error
        raise TransferError(f"unit {self.unit} was not copied: {self._error!r}") from self._error


# A piece of a unit: the bytes to read, and the part of the slot that they fill.
_Job = tuple[ThreadTransfer, ByteRange, memoryview]


class ThreadLink(Link):
    """The link of a CPU: worker threads that read from the store straight into slots in RAM.

    A unit is cut into pieces that all workers share, in order of submission: the unit needed next gets all of the
    machine's read bandwidth. Reads drop the interpreter lock, so they run beside compute.

    The workers hold no reference to the link, only to the queue and the recorder. The link can therefore be collected
    while they wait for work, and its finaliser ends them.
    """

    def __init__(self, num_threads: int | None = None, recorder: Recorder | None = None) -> None:
        """``num_threads``: workers; default ``HEADRACE_READERS`` or one per core.

        Raises:
            OptionError: the system starts no more threads.
        """
        self._process = OwnProcess()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        count = num_threads or reader_threads()
        recorder = recorder or Recorder()
        self._workers = [
            threading.Thread(target=_work, args=(self._jobs, recorder), name=f"headrace-reader-{i}", daemon=True)
            for i in range(count)
        ]
        self._stalls_s: dict[int, float] = {}
        self._latest: dict[int, ThreadTransfer] = {}
        self._finish = weakref.finalize(self, end_threads, self._jobs, count)
        try:
            for worker in self._workers:
                worker.start()
            _open_links.add(self)
        except BaseException as error:
            self._finish()
            if isinstance(error, RuntimeError):
                raise OptionError(
                    f"the system starts no {count} threads to read with ({error}); {MORE_THREADS}, or set "
                    f"HEADRACE_READERS to fewer"
                ) from error
            raise

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return new_buffer(num_bytes)

    def record_compute(self) -> ComputeEvent | None:
        return None

    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> ThreadTransfer:
        if not self._finish.alive:
            raise StateError("this link is closed; offload the model again")
        self._process.require_own_process()
        pieces = [piece for copy in load.copies for piece in copy.pieces(PIECE_BYTES)]
        transfer = ThreadTransfer(load.unit, len(pieces))
        view = writable_view(slot)
        # A caller that was interrupted may have lost sight of its last copy into this slot.
        if (previous := self._latest.get(slot.data_ptr())) is not None:
            previous.join()
        sent = 0
        try:
            self._latest[slot.data_ptr()] = transfer  # from here on an error has to end it
            for piece in pieces:
                self._jobs.put((transfer, piece.src, view[piece.dst_offset : piece.dst_end]))
                sent += 1
        except BaseException as error:
            transfer.finish(len(pieces) - sent, error)
            raise
        return transfer

    def wait(self, transfer: Transfer, measure: bool = False) -> float:
        assert isinstance(transfer, ThreadTransfer)
        stall_s = 0.0
        if not transfer.done:
            self._process.require_own_process()
            start = time.perf_counter()
            transfer.result()
            stall_s = time.perf_counter() - start
        transfer.result()
        if measure:
            self._stalls_s[transfer.unit] = stall_s
        return stall_s

    def last_stall_s(self, unit: int) -> float | None:
        return self._stalls_s.get(unit)

    def join(self) -> None:
        """Block until no copy is under way, also none that an interrupted caller has lost sight of."""
        for transfer in [*self._latest.values()]:
            transfer.join()

    def close(self) -> None:
        self._finish()
        end_threads(self._jobs, len(self._workers))  # once more: an interrupt may have cut the first time short
        for worker in self._workers:
            worker.join()


def _work(jobs: queue.SimpleQueue[_Job | None], recorder: Recorder) -> None:
    while (job := jobs.get()) is not None:
        transfer, src, into = job
        error: BaseException | None = None
        begin = time.perf_counter_ns()
        try:
            if not transfer.failed:
                src.read(into)
        except BaseException as caught:  # a worker must survive, and the caller must get the error
            error = caught
        recorder.add("copy", transfer.unit, begin, len(into))
        transfer.finish(error=error)
        del job, transfer, src, into, error  # they hold the slot's memory, which must not outlive the offload


def end_threads(jobs: queue.SimpleQueue[Any], count: int) -> None:
    """Send ``None``, which ends a thread, ``count`` times."""
    for _ in range(count):
        jobs.put(None)


@atexit.register
def _close_links() -> None:
    for link in list(_open_links):
        if not link._process.is_forked:  # those of the process that has forked this one are in use there
            link.close()
