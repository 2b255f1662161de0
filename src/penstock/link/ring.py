"""The staging ring: reader threads fill entries of pinned memory ahead of a stream that copies them into slots.

Nobody on the host takes part in a replay, so stream and readers keep time by words in the same memory: ``wanted``, and
a *tag* for each entry. For a piece at position ``p`` that passes through entry ``e`` the stream does

    wanted = p + 1;  wait until tag[e] == p + 1;  copy entry e to the slot;  wanted = 0;  tag[e] = 0

with constants that are the same at every replay, because both words are back at zero behind it. The readers' side is
one thread, the *server*, that looks at the words and hands reads to workers:

* A tag of zero means that the stream is done with the entry: the next piece of the expected order (the cycle of
  :mod:`penstock.plan.ring`) is read into it. The tag is set when the last part of a piece has arrived.
* The order is expected, not relied on: the tag says which piece lies in an entry, and the stream waits for its own.
  Where it wants a piece that is neither there nor on its way (a unit skipped or repeated, an aborted forward, another
  graph), the server takes back what was read ahead in vain and goes on from the wanted piece: slower, counted as a
  miss, never wrong, in eager code and in graphs alike.
* Taking back a full entry is safe only while the stream cannot be copying from it. It cannot: one stream carries out
  everything in order, and while it waits for a tag that only the server can set it does nothing else.

Failure: nobody may hang and no wrong bytes may pass for right ones. When a read fails, a file changes, or no part has
arrived for a while, the link has failed for good: from then on the server answers every wait with an entry of 0xFF,
which is NaN in every floating dtype, and every call of the host raises. A replay in flight runs to its end and gives
NaN where weights are floating-point numbers; what integer weights give is garbage until the next call of the host.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from penstock.errors import TransferError
from penstock.link.stream_memory import CopyStream
from penstock.plan.ring import WORD_BYTES, RingLayout
from penstock.store.base import Load, Source, writable_view
from penstock.store.registration import never_wait_for_devices
from penstock.telemetry import Recorder, StagingStats

__all__ = ["StagingRing"]

# One read: small enough that all workers help with the piece that is needed next.
PART_BYTES = 4 << 20
POISON = 0xFF
# How often the server looks at the words: entries hold some ten milliseconds of copies, so this is often enough.
ACTIVE_S, IDLE_S = 0.0005, 0.004
IDLE_AFTER_S = 0.1
# No read of a few MiB takes this long on a disk that is alive.
STUCK_S = 60.0
# After the last copy, once the owner is gone without having said so.
LINGER_S = 5.0
JOIN_S = 5.0

_WANTED = 0


class _Part(NamedTuple):
    """One read: where from, and where in the entry to."""

    source: Source
    start: int
    offset: int
    num_bytes: int


class _Fill:
    """A piece on its way into its entry; ``in_vain``: nobody wants it any more."""

    def __init__(self, position: int, num_parts: int) -> None:
        self.position = position
        self.left = num_parts
        self.in_vain = False


_Job = Callable[[], None]


class StagingRing:
    """Entries, words and the threads that serve them.

    Only the server and the workers take the lock: whoever gives copies to the stream takes none, and may be interrupted
    anywhere.

    Args:
        layout: of the ring.
        loads: of all units, by index.
        memory: pinned, uint8, 1-D, ``layout.num_bytes`` long.
        num_threads: workers.
        stuck_s: how long no part may arrive before the disk counts as dead.
        recorder: of the reads, for the timeline.
    """

    def __init__(
        self,
        layout: RingLayout,
        loads: Sequence[Load],
        memory: torch.Tensor,
        *,
        num_threads: int,
        stuck_s: float = STUCK_S,
        recorder: Recorder | None = None,
    ) -> None:
        self._layout = layout
        self._recorder = recorder or Recorder()
        self._stuck_s = stuck_s
        entries, words = memory[: self.words_at(layout)], memory[self.words_at(layout) :]
        self._entries = list(entries.split(layout.entry_bytes))
        self._words = words.numpy().view(np.uint32)[:: WORD_BYTES // 4]
        self._words[:] = 0
        self._parts = [list(_parts_of(loads[p.unit], p.start, p.num_bytes)) for p in layout.pieces]
        self._fills: list[_Fill | None] = [None] * layout.num_entries
        self._ahead: list[int] = []  # what _next has passed and the stream has not taken yet, in order
        self._next: int | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._failure: BaseException | None = None
        self._stopped = False
        self._retired = False
        self._held_since: float | None = None
        self._last_arrival = self._last_change = time.monotonic()
        self._bytes_read = self._stalls = self._misses = 0
        self._stall_s = 0.0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._server = threading.Thread(target=self._serve, name="penstock-ring", daemon=True)
        self._workers = [
            threading.Thread(target=_work, args=(self._jobs,), name=f"penstock-reader-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in (self._server, *self._workers):
            thread.start()

    @staticmethod
    def words_at(layout: RingLayout) -> int:
        """Where in the memory the words begin, in bytes."""
        return layout.num_entries * layout.entry_bytes

    # -- for whoever owns the stream ----------------------------------------------------------------------------------

    def enqueue(self, unit: int, slot: torch.Tensor, stream: CopyStream) -> None:
        """Give ``stream`` the copies of ``unit`` into ``slot`` (uint8, 1-D); in a capture they become nodes."""
        for position in self._layout.of_unit[unit]:
            piece = self._layout.pieces[position]
            tag = 1 + piece.entry
            stream.write(_WANTED, position + 1)
            stream.wait_equal(tag, position + 1)
            target = slot[piece.start : piece.start + piece.num_bytes]
            stream.copy(target, self._entries[piece.entry][: piece.num_bytes])
            # In this order: a tag of zero beside the same wish would look like a piece that is missing.
            stream.write(_WANTED, 0)
            stream.write(tag, 0)

    def check(self) -> None:
        """Raise ``TransferError`` once the ring has failed."""
        if self._failure is not None:
            raise TransferError(
                f"{self._failure}; what was computed since then is not to be used. Put the files right, then remove() "
                f"and offload the model again"
            ) from self._failure

    def stats(self) -> StagingStats:
        """Counters since the ring was made."""
        held_since = self._held_since
        waiting_s = 0.0 if held_since is None else max(0.0, time.monotonic() - held_since)
        return StagingStats(self._bytes_read, self._stalls, self._stall_s + waiting_s, self._misses)

    def retire(self) -> None:
        """Stop when the stream has been done for some seconds; blocks for a while only if it is not done now.

        For an owner that is collected, or an interpreter that ends, where the stream must not be waited for.
        """
        self._retired = True
        if self._words[_WANTED]:
            self._server.join(JOIN_S)

    def close(self) -> None:
        """Stop now: the stream has to be done. Idempotent."""
        self._stopped = True
        with self._lock:
            self._changed.notify_all()
        for thread in (self._server, *self._workers):
            thread.join(JOIN_S)  # a worker may be stuck in the kernel; it holds the memory it writes to

    # -- the server ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        never_wait_for_devices()
        try:
            while not self._stopped:
                with self._lock:
                    try:
                        self._turn(time.monotonic())
                    except BaseException as error:  # whatever it is, the stream must not wait for ever
                        self._fail(error)
                    self._changed.wait(self._pause())
        finally:
            for _ in self._workers:
                self._jobs.put(None)
            # The stream is done. Of a retired ring this thread is the last owner, and nobody may come to unregister it.
            never_wait_for_devices(False)

    def _turn(self, now: float) -> None:
        wanted = int(self._words[_WANTED])
        self._note_stall(wanted, now)
        if self._retired and (wanted or now - self._last_change > LINGER_S):
            self._stopped = not wanted
        if self._failure is not None:
            self._answer_with_poison(wanted)
            return
        if any(self._fills) and now - self._last_arrival > self._stuck_s:
            raise TransferError(
                f"no read has ended for {self._stuck_s:.0f} s: the disk, or the network to it, hangs (its readers: "
                f"{self._whereabouts()})"
            )
        if wanted and self._is_missing(wanted - 1):
            self._expect(wanted - 1)
        self._read_ahead(now)

    def _whereabouts(self) -> str:
        """The innermost functions of readers that are busy, for an error message."""
        frames = sys._current_frames()
        found = [frames[worker.ident] for worker in self._workers if worker.ident in frames]
        busy = {(frame.f_code, frame.f_lineno) for frame in found if frame.f_code is not _work.__code__}
        return ", ".join(f"{code.co_qualname} ({Path(code.co_filename).name}:{line})" for code, line in busy) or "none"

    def _pause(self) -> float:
        return ACTIVE_S if time.monotonic() - self._last_change < IDLE_AFTER_S else IDLE_S

    def _tag(self, entry: int) -> int:
        return int(self._words[1 + entry])

    def _set_tag(self, entry: int, value: int) -> None:
        self._words[1 + entry] = value

    def _note_stall(self, wanted: int, now: float) -> None:
        held = wanted != 0 and self._tag(self._layout.pieces[wanted - 1].entry) != wanted
        if held and self._held_since is None:
            self._held_since = now
            self._stalls += 1
        elif not held and self._held_since is not None:
            self._stall_s += now - self._held_since
            self._held_since = None

    def _is_missing(self, position: int) -> bool:
        """Whether the stream waits for a piece that is neither in its entry nor on its way."""
        entry = self._layout.pieces[position].entry
        fill = self._fills[entry]
        if fill is not None and fill.position == position and not fill.in_vain:
            return False
        # The wish is looked at once more behind the tag: the stream takes it back before it clears the tag.
        if self._tag(entry) == position + 1 or int(self._words[_WANTED]) != position + 1:
            return False
        return not self._is_next(position, entry)

    def _is_next(self, position: int, entry: int) -> bool:
        """Whether :meth:`_read_ahead` starts it anyway."""
        return self._next == position and self._tag(entry) == 0 and self._fills[entry] is None

    def _expect(self, position: int) -> None:
        """The stream waits for ``position`` and does nothing else: set the order anew from there."""
        window = self._window(position)
        if self._next is not None and position != self._next:
            self._misses += 1
        for entry, fill in enumerate(self._fills):
            if self._tag(entry) - 1 not in window:
                self._set_tag(entry, 0)
            if fill is not None and fill.position not in window:
                fill.in_vain = True  # for good: parts of it may be skipped from now on
        self._ahead.clear()
        self._next = position

    def _holds(self, position: int) -> bool:
        """Whether a piece is in its entry or on its way there."""
        entry = self._layout.pieces[position].entry
        fill = self._fills[entry]
        on_its_way = fill is not None and fill.position == position and not fill.in_vain
        return on_its_way or self._tag(entry) == position + 1

    def _window(self, position: int) -> set[int]:
        """The pieces from ``position`` on that can lie in the ring together."""
        window: set[int] = set()
        entries: set[int] = set()
        following: int | None = position
        while following is not None and self._layout.pieces[following].entry not in entries:
            window.add(following)
            entries.add(self._layout.pieces[following].entry)
            following = self._layout.following[following]
        return window

    def _read_ahead(self, now: float) -> None:
        self._forget_taken()
        while (position := self._next) is not None:
            entry = self._layout.pieces[position].entry
            if self._tag(entry) == 0 and self._fills[entry] is None:
                self._start(position, entry, now)
            elif position in self._ahead or not self._holds(position):
                return
            # else: there from before, because the order was set anew or the stream has left it out
            self._ahead.append(position)
            self._next = self._layout.following[position]

    def _forget_taken(self) -> None:
        """What the stream has taken, and what it has left out: it took something behind it."""
        taken = [index for index, position in enumerate(self._ahead) if not self._holds(position)]
        if taken:
            del self._ahead[: taken[-1] + 1]

    def _start(self, position: int, entry: int, now: float) -> None:
        parts = self._parts[position]
        fill = self._fills[entry] = _Fill(position, len(parts))
        if not any(other for other in self._fills if other is not fill):
            self._last_arrival = now  # the clock of the watchdog starts with the first of several reads
        self._last_change = now
        view = writable_view(self._entries[entry])
        for part in parts:
            self._jobs.put(self._job(fill, part, view[part.offset : part.offset + part.num_bytes]))
        if not parts:
            self._finish(fill)

    # -- the workers --------------------------------------------------------------------------------------------------

    def _job(self, fill: _Fill, part: _Part, into: memoryview) -> _Job:
        def job() -> None:
            begin = time.perf_counter_ns()
            error: BaseException | None = None
            try:
                if not fill.in_vain and self._failure is None and not self._stopped:
                    part.source.read(part.start, into)
                    self._recorder.copy(self._layout.pieces[fill.position].unit, part.num_bytes, begin)
            except BaseException as caught:  # a worker must survive, and the host must hear of it
                error = caught
            self._arrived(fill, part.num_bytes, error)

        return job

    def _arrived(self, fill: _Fill, num_bytes: int, error: BaseException | None) -> None:
        with self._lock:
            self._last_arrival = time.monotonic()
            fill.left -= 1
            if error is not None:
                self._fail(error)
            elif not fill.in_vain:
                self._bytes_read += num_bytes
            if fill.left == 0:
                self._finish(fill)
                self._changed.notify()

    def _finish(self, fill: _Fill) -> None:
        entry = self._layout.pieces[fill.position].entry
        self._fills[entry] = None
        self._last_change = time.monotonic()
        if self._failure is None and not fill.in_vain:
            self._set_tag(entry, fill.position + 1)

    # -- failure ------------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._changed.notify()

    def _answer_with_poison(self, wanted: int) -> None:
        if not wanted:
            return
        entry = self._layout.pieces[wanted - 1].entry
        if self._tag(entry) != wanted:
            self._entries[entry].numpy().fill(POISON)
            self._last_change = time.monotonic()
            self._set_tag(entry, wanted)


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    never_wait_for_devices()
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds the ring's memory, which must not outlive the offload


def _parts_of(load: Load, start: int, num_bytes: int) -> list[_Part]:
    """The reads that fill a piece; the gaps between tensors are not read."""
    parts = []
    for segment in load.segments:
        first = max(segment.slot_offset, start)
        end = min(segment.slot_offset + segment.num_bytes, start + num_bytes)
        for at in range(first, end, PART_BYTES):
            size = min(PART_BYTES, end - at)
            parts.append(_Part(segment.source, at - segment.slot_offset, at - start, size))
    return parts
