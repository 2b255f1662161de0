"""The process that reads files into a staging ring: nothing a device waits for lives beside objects of a device.

Python collects garbage in any thread, and what ends there may wait for a lock of the driver: its holder may be waiting
for the device, and the device for a reader. So the readers are a program of their own, without torch, without a driver
and with an interpreter lock of their own. It is told what to do once and never waits for the process that started it:

* it inherits the descriptors of the ring, of its task (:class:`RingTask`) and of the files;
* on its standard input a byte lets it begin, and the end of it, or of the parent, ends it at once, whatever its readers
  are doing;
* on its standard output it says what was read, as far as somebody listens: what the pipe has no room for is dropped;
* counters and failures are words in the ring itself.

If it ends while it serves (it is killed, or out of memory), the parent answers every wait with poison in its place.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.errors import OptionError
from penstock.memory.pages import map_file
from penstock.plan.schedule import RingLayout
from penstock.stores.file_reader import File
from penstock.transfer.ring import Part, RingMemory, RingServer

__all__ = ["ReadReport", "RingTask", "main", "unpack_reports"]

_REPORT = struct.Struct("=IIQqq")
# So many reports at a time that a write goes into the pipe as a whole or not at all (PIPE_BUF, pipe(7)).
_REPORTS_AT_ONCE = select.PIPE_BUF // _REPORT.size
# Between two writes: each wakes the parent, and a reader that had to do that would come back late to its reading.
_REPORT_EVERY_S = 0.02
_MAX_REPORTS = 1 << 16


@dataclass(frozen=True)
class RingTask:
    """A ring to serve.

    Attributes:
        layout: of the ring.
        parts: the reads of every piece, by position; the sources are files.
        num_threads: readers.
        stuck_s: how long no read may end before the disk counts as dead.
        parent: process id of the owner of the ring; the process ends with it.
    """

    layout: RingLayout
    parts: Sequence[Sequence[Part]]
    num_threads: int
    stuck_s: float
    parent: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        """Check the reads.

        Raises:
            OptionError: a range is none of a file.
        """
        for piece, parts in zip(self.layout.pieces, self.parts, strict=True):
            for part in parts:
                if not isinstance(part.source, File):
                    raise OptionError(
                        f"unit {piece.unit}: what comes to a GPU through the staging ring has to be in files, found "
                        f"{part.source!r}; use mode 'cpu' (--offload-mode cpu) for it"
                    )

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that the process has to inherit, under the same numbers, to use the files of the task."""
        sources = {part.source for parts in self.parts for part in parts}
        return sorted({fd for file in sources if isinstance(file, File) for fd in file.descriptors if fd is not None})

    def verify(self, position: int) -> None:
        """Raise ``TransferError`` if a file with bytes of this piece is no longer what it was stamped as."""
        for source in {part.source for part in self.parts[position]}:
            source.require_unchanged()


class ReadReport(NamedTuple):
    """A read that has ended; times in ns of CLOCK_MONOTONIC (``time.perf_counter_ns``), which all processes share."""

    reader: int
    unit: int
    num_bytes: int
    start_ns: int
    duration_ns: int


def unpack_reports(data: bytes) -> tuple[list[ReadReport], bytes]:
    """The reports at the beginning of ``data``, and what is left of it: the beginning of another one."""
    end = len(data) - len(data) % _REPORT.size
    return [ReadReport(*row) for row in _REPORT.iter_unpack(data[:end])], data[end:]


def main() -> None:
    """Serve the ring whose descriptor, and that of its task, are the last arguments of the command line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to answer, which may need the ring for it
    memory_fd, task_fd = map(int, sys.argv[-2:])
    with open(task_fd, "rb") as file:
        task: RingTask = pickle.load(file)  # only the parent can write to this descriptor
    memory = RingMemory(task.layout, map_file(memory_fd, 0, task.layout.num_bytes))
    os.close(memory_fd)
    os.set_blocking(1, False)
    parent_fd = None
    # Readable when the parent ends (pidfd_open(2)). Without it, on some kernels and in some sandboxes, only the end of
    # the input shows that, which a child that the parent has forked may keep open.
    with suppress(OSError):
        parent_fd = os.pidfd_open(task.parent)
    if os.getppid() != task.parent:
        return  # it has ended, and another process may have its number
    gc.freeze()  # a large task is walked through once, and not at every collection
    reports = _Reports()
    server = RingServer(
        task.parts,
        memory,
        num_threads=task.num_threads,
        stuck_s=task.stuck_s,
        verify=task.verify,
        on_read=reports.add,
    )
    may_serve = threading.Event()
    threading.Thread(target=_watch, args=(parent_fd, may_serve), daemon=True).start()
    may_serve.wait()
    server.serve()
    reports.write()
    os._exit(0)  # not held up by a reader that is stuck


class _Reports:
    """Says on standard output what was read, in a thread of its own."""

    def __init__(self) -> None:
        self._packed: deque[bytes] = deque(maxlen=_MAX_REPORTS)
        self._writing = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, reader: int, unit: int, num_bytes: int, start_ns: int) -> None:
        """For a reader, of a read that has just ended."""
        self._packed.append(_REPORT.pack(reader, unit, num_bytes, start_ns, time.perf_counter_ns() - start_ns))

    def _run(self) -> None:
        while True:
            time.sleep(_REPORT_EVERY_S)
            self.write()

    def write(self) -> None:
        """What has been added; without what the pipe has no room for, or all of it where nobody listens."""
        with self._writing:
            while self._packed:
                some = [self._packed.popleft() for _ in range(min(len(self._packed), _REPORTS_AT_ONCE))]
                with suppress(OSError):
                    os.write(1, b"".join(some))


def _watch(parent_fd: int | None, may_serve: threading.Event) -> None:
    """Until there is nobody to serve."""
    try:
        poll = select.poll()
        poll.register(0, select.POLLIN)
        if parent_fd is not None:
            poll.register(parent_fd, select.POLLIN)
        while all(fd == 0 for fd, _ in poll.poll()) and os.read(0, 1):
            may_serve.set()
    finally:
        os._exit(0)
