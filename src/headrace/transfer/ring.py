"""The staging ring: readers fill entries of pinned memory ahead of a stream that copies them into slots.

No host code of the caller runs during a replay, so stream and readers synchronize through words in the same memory:
``wanted``, and a *tag* for each entry. For a piece at position ``p`` that passes through entry ``e`` the stream does

    wanted = p + 1;  wait until tag[e] == p + 1;  copy entry e to the slot;  wanted = 0;  tag[e] = 0

with constants that are the same at every replay, because both words are zero again afterwards. On the readers' side one
thread, the *server*, polls the words and hands reads to workers:

* A tag of zero means that the stream is done with the entry: the next piece of the expected order (the cycle of
  :mod:`headrace.plan.staging_ring`) is read into it. The tag is set when the last part of a piece has been read, by the
  worker that read it, which looks for such entries as well.
* The order is expected, not relied on: the tag names the piece in an entry, and the stream waits for its own.
  Where it requests a piece that is neither in the ring nor being read (a unit skipped or repeated, an aborted forward,
  another graph), the server discards what was read ahead and continues from the wanted piece: slower, counted as a
  miss, never wrong, in eager code and in graphs alike.
* Discarding a full entry is safe only while the stream cannot be copying from it. It cannot: one stream does everything
  in order, and it is waiting for a tag that only the readers' side can set.

The server runs in a process of its own (:mod:`headrace.transfer.ring_process`), because a device waits for it: it must
not wait for a lock of the device's driver, nor for a thread that holds the interpreter while the driver makes it wait.

Failure: the device must not hang, and wrong bytes must not pass for right ones. When a read fails, a file changes, or
no read ends for a while, the link has failed for good: from then on the server answers every wait with an entry of
0xFF, which is NaN in every floating dtype, and every call of the host raises. A replay in flight runs to its end and
gives NaN where weights are floating-point numbers; what integer weights give is garbage until the next call of the
host. An answer waits for reads into its entry that have not ended; only one that hangs in the system for longer than a
disk may, and then ends after all, can still overwrite it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from headrace.errors import TransferError
from headrace.memory.pages import Bytes
from headrace.plan.staging_ring import STATUS_BYTES, WORD_BYTES, RingLayout
from headrace.stats import StagingStats
from headrace.stores.sources import Copy

# Of every byte of an entry that could not be filled: NaN in every floating dtype.
POISON = 0xFF
# The word that names the piece that the stream requests; the tag of entry e is word 1 + e.
WANTED = 0
_MESSAGE_AT = 64
# One read at most: small enough that several workers help with the piece that is needed next.
READ_BYTES = 4 << 20
# A reader that has to wait for a core holds up the piece that all wait for, and the caller spins on one until the
# device is done. With one core in eight left to others a ring was fastest on 16 cores of an H200's host (14 readers,
# against 12, 13 and 16) and on 8 of them (7, against 6 and 8). On 32 cores, too, 16 readers and more were slower than
# 12, probably because they take turns with one interpreter's lock.
SPARE_ONE_CORE_IN, MAX_READERS = 8, 14
# How often the server polls the words: a full ring is some two milliseconds of copies, and a worker that has
# finished a piece looks too.
ACTIVE_S, IDLE_S = 0.0005, 0.002
IDLE_AFTER_S = 0.1
# No read of a few MiB takes this long on a disk that is alive.
STUCK_S = 60.0
# A server that has not looked for this long was itself held up, readers and all: stopped, or in a frozen container.
PAUSE_S = 1.0
# After the last copy, for an owner that is gone without closing the ring: a replay may compute long between two copies.
IDLE_EXIT_S = 30.0
JOIN_S = 5.0


class Counter(IntEnum):
    """Places of the status (int64, by number)."""

    BYTES_READ = 0
    STALLS = 1
    STALL_NS = 2
    MISSES = 3
    SERVING = 4  # 1: a server polls the words
    FAILURE_BYTES = 5  # length of the message; 0: nothing has failed
    CLOSE_WHEN_IDLE = 6  # 1: the owner is gone, and the server may end when the stream has been done for a while


class RingMemory:
    """The memory of a ring as both of its sides see it: entries, words, and a status that needs no lock.

    The sides may be two processes that share it. Each sends the other aligned words and counters, or a message: its
    bytes, and after them the word that gives their length.

    Attributes:
        layout: what lies where.
        entries: uint8, 1-D, ``layout.entry_bytes`` long, by number.
        words: uint32: what is wanted, then the tags.
        counters: int64, by :class:`Counter`.
    """

    def __init__(self, layout: RingLayout, memory: Bytes) -> None:
        """``memory``: 1-D, writable, ``layout.num_bytes`` long; zeros from its words on before a server starts."""
        self.layout = layout
        size = layout.entry_bytes
        self.entries = [memory[size * index : size * (index + 1)] for index in range(layout.num_entries)]
        self.words = memory[layout.words_at : layout.status_at].view(np.uint32)[:: WORD_BYTES // 4]
        status = memory[layout.status_at :]
        self.counters = status[:_MESSAGE_AT].view(np.int64)
        self._message = status[_MESSAGE_AT:STATUS_BYTES]

    @property
    def wanted(self) -> int:
        """One more than the position that the stream wants; 0: none."""
        return int(self.words[WANTED])

    def tag(self, entry: int) -> int:
        """One more than the position whose bytes lie in ``entry``; 0: none."""
        return int(self.words[1 + entry])

    def set_tag(self, entry: int, value: int) -> None:
        """Record what lies in ``entry``."""
        self.words[1 + entry] = value

    @property
    def failure(self) -> str | None:
        """Why the ring has failed for good; ``None``: it has not."""
        length = int(self.counters[Counter.FAILURE_BYTES])
        return self._message[:length].tobytes().decode(errors="ignore") if length else None

    def fail(self, message: str) -> None:
        """Record that the ring has failed; the first message stays."""
        if self.counters[Counter.FAILURE_BYTES]:
            return
        text = (message or "no reason given").encode(errors="replace")[: len(self._message)]
        self._message[: len(text)] = np.frombuffer(text, np.uint8)
        self.counters[Counter.FAILURE_BYTES] = len(text)

    @property
    def stats(self) -> StagingStats:
        """Counters since the ring was made."""
        read, stalls, stall_ns, misses = self.counters[: Counter.SERVING].tolist()
        return StagingStats(read, stalls, stall_ns / 1e9, misses)


@dataclass(slots=True, eq=False)
class _Fill:
    """A piece on its way into its entry.

    Attributes:
        left: gives how many reads are left after each; one worker alone gets 0, without a lock.
        cancelled: the piece is not needed any more; its remaining reads are skipped.
    """

    position: int
    left: Iterator[int]
    cancelled: bool = False


_Job = tuple[_Fill, Copy, memoryview]


class RingServer:
    """The readers' side of a ring.

    Only its own threads take the lock. The thread that gives copies to the stream takes none, so it may be interrupted
    anywhere.

    Args:
        reads: reads of every piece, by position, into its entry; gaps between them are not filled.
        memory: memory of the ring.
        num_threads: workers.
        stuck_s: how long no read may end before the disk counts as dead.
    """

    def __init__(
        self,
        reads: Sequence[Sequence[Copy]],
        memory: RingMemory,
        *,
        num_threads: int,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._memory, self._layout = memory, memory.layout
        self._reads = reads
        self._stuck_s = stuck_s
        self._fills: list[_Fill | None] = [None] * self._layout.num_entries
        self._ahead: list[int] = []  # what _next has passed and the stream has not taken yet, in order
        self._next: int | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._failed = self._stopped = self._held = False
        self._last_turn = self._last_arrival = self._last_change = time.monotonic()
        self._under_way: list[tuple[_Fill, Copy] | None] = [None] * num_threads  # by worker
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._workers = [
            threading.Thread(target=self._work, args=(index,), name=f"headrace-reader-{index}", daemon=True)
            for index in range(num_threads)
        ]

    def serve(self) -> None:
        """Serve in the calling thread, until it is closed, or the ring is retired and the stream done for a while."""
        for worker in self._workers:
            worker.start()
        self._memory.counters[Counter.SERVING] = 1
        try:
            while not self._stopped:
                with self._lock:
                    try:
                        self._turn(time.monotonic())
                    except BaseException as error:  # of any kind: the stream must not wait forever
                        self._fail(error)
                    idle = time.monotonic() - self._last_change > IDLE_AFTER_S
                    self._changed.wait(IDLE_S if idle else ACTIVE_S)
        finally:
            for _ in self._workers:
                self._jobs.put(None)

    def fail(self, error: BaseException) -> None:
        """From now on every wait is answered with poison."""
        with self._lock:
            self._fail(error)

    def close(self) -> None:
        """Stop now: the stream has to be done. Idempotent."""
        self._stopped = True
        with self._lock:
            self._changed.notify_all()
        for worker in self._workers:
            if worker.ident is not None:
                worker.join(JOIN_S)  # a worker may be stuck in the kernel; it holds the memory it writes to

    # -- the server ---------------------------------------------------------------------------------------------------

    def _turn(self, now: float) -> None:
        wanted = self._memory.wanted
        if self._held:
            self._memory.counters[Counter.STALL_NS] += int((now - self._last_turn) * 1e9)
        self._held = wanted != 0 and self._memory.tag(self._layout.pieces[wanted - 1].entry) != wanted
        if now - self._last_turn > PAUSE_S:
            self._last_arrival += now - self._last_turn
        self._last_turn = now
        if self._memory.counters[Counter.CLOSE_WHEN_IDLE] and not wanted and now - self._last_change > IDLE_EXIT_S:
            self._stopped = True
        if self._failed:
            self._answer_with_poison(wanted, now)
            return
        if any(self._fills) and now - self._last_arrival > self._stuck_s:
            raise TransferError(
                f"no read has ended for {self._stuck_s:.0f} s: the disk, or the network to it, hangs (under way: "
                f"{self._whereabouts()})"
            )
        if wanted and self._is_missing(wanted - 1):
            self._expect(wanted - 1)
        self._read_ahead(now)

    def _whereabouts(self) -> str:
        """The reads under way, for an error message."""
        reads = [read for _, read in filter(None, self._under_way)]
        found = [f"{read.num_bytes} bytes at {read.src.offset} of {read.src.source}" for read in reads]
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        return "; ".join(found[:4]) + more or "none"

    def _is_missing(self, position: int) -> bool:
        """Whether the stream waits for a piece that is neither in its entry nor on its way."""
        # ``wanted`` is read once more after the tag: the stream clears it before it clears the tag.
        if self._holds(position) or self._memory.wanted != position + 1:
            return False
        starts_anyway = self._next == position and self._is_free(self._layout.pieces[position].entry)  # by _read_ahead
        return not starts_anyway

    def _expect(self, position: int) -> None:
        """The stream waits for ``position``: restart the expected order there."""
        window = self._window(position)
        is_miss = self._next is not None and position != self._next
        for entry, fill in enumerate(self._fills):
            tag = self._memory.tag(entry)
            if tag and tag - 1 not in window:
                self._memory.set_tag(entry, 0)
                is_miss = True
            if fill is not None and not fill.cancelled and fill.position not in window:
                fill.cancelled = is_miss = True  # for good: parts of it may be skipped from now on
        self._memory.counters[Counter.MISSES] += is_miss
        self._ahead.clear()
        self._next = position

    def _holds(self, position: int) -> bool:
        """Whether a piece is in its entry or on its way there."""
        entry = self._layout.pieces[position].entry
        fill = self._fills[entry]
        on_its_way = fill is not None and fill.position == position and not fill.cancelled
        return on_its_way or self._memory.tag(entry) == position + 1

    def _is_free(self, entry: int) -> bool:
        return self._memory.tag(entry) == 0 and self._fills[entry] is None

    def _window(self, position: int) -> set[int]:
        """The pieces from ``position`` on that can lie in the ring together."""
        window: dict[int, int] = {}  # by entry
        following: int | None = position
        while following is not None and (entry := self._layout.pieces[following].entry) not in window:
            window[entry] = following
            following = self._layout.following[following]
        return set(window.values())

    def _read_ahead(self, now: float) -> None:
        # What the stream has taken, and what it has left out: it took something after it.
        taken = [index for index, position in enumerate(self._ahead) if not self._holds(position)]
        if taken:
            del self._ahead[: taken[-1] + 1]
        while (position := self._next) is not None:
            entry = self._layout.pieces[position].entry
            if self._is_free(entry):
                self._start(position, entry, now)
            elif position in self._ahead or not self._holds(position):
                return
            # else: it was read before, and the order was restarted or the stream has left it out
            self._ahead.append(position)
            self._next = self._layout.following[position]

    def _start(self, position: int, entry: int, now: float) -> None:
        reads = self._reads[position]
        fill = self._fills[entry] = _Fill(position, iter(range(len(reads) - 1, -1, -1)))
        if not any(other for other in self._fills if other is not fill):
            self._last_arrival = now  # the clock of the watchdog starts with the first of several reads
        self._last_change = now
        view = self._memory.entries[entry].data
        for read in reads:
            self._jobs.put((fill, read, view[read.dst_offset : read.dst_end]))
        if not reads:
            self._finish(fill)

    # -- the workers --------------------------------------------------------------------------------------------------

    # Ten thousand reads a second, and with each call of the system the interpreter's lock changes hands, for which a
    # thread has to be woken: on 16 cores that seems to be the limit. So a read through the page cache calls the system
    # once and takes no other lock; whether the file has changed is asked once for a piece.

    def _work(self, number: int) -> None:
        while (job := self._jobs.get()) is not None:
            fill, read, into = job
            self._under_way[number] = fill, read  # before _failed is read: see _answer_with_poison
            try:
                if not fill.cancelled and not self._failed and not self._stopped:
                    read.src.source.read(read.src.offset, into)
                self._last_arrival = time.monotonic()
                if next(fill.left) == 0:
                    self._landed(fill)
            except BaseException as error:  # a worker must survive, and the host must see the error
                self.fail(error)
            self._under_way[number] = None
            del job, fill, read, into  # they hold the ring's memory

    def _landed(self, fill: _Fill) -> None:
        """All of a piece was read: hand it over, and start at once what can be read next."""
        if not fill.cancelled:
            for source in {read.src.source for read in self._reads[fill.position]}:
                source.require_unchanged()
        with self._lock:
            self._finish(fill)
            if not self._failed:
                self._read_ahead(time.monotonic())

    def _finish(self, fill: _Fill) -> None:
        entry = self._layout.pieces[fill.position].entry
        self._fills[entry] = None
        self._last_change = time.monotonic()
        if not self._failed and not self._stopped and not fill.cancelled:
            self._memory.counters[Counter.BYTES_READ] += sum(read.num_bytes for read in self._reads[fill.position])
            self._hand_over(entry, fill.position)

    def _hand_over(self, entry: int, position: int) -> None:
        self._memory.counters[Counter.STALLS] += self._memory.wanted == position + 1
        self._memory.set_tag(entry, position + 1)

    # -- failure ------------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        if not self._failed:
            self._memory.fail(str(error) or repr(error))
            self._failed = True
        self._changed.notify()

    def _answer_with_poison(self, wanted: int, now: float) -> None:
        if not wanted:
            return
        entry = self._layout.pieces[wanted - 1].entry
        if self._memory.tag(entry) == wanted:
            return
        # A worker may still write there; those that begin later find that the ring has failed.
        is_read_into = any(
            self._layout.pieces[fill.position].entry == entry for fill, _ in filter(None, self._under_way)
        )
        if is_read_into and now - self._last_arrival < self._stuck_s:
            return
        self._memory.entries[entry].fill(POISON)
        self._last_change = time.monotonic()
        self._hand_over(entry, wanted - 1)
