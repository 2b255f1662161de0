"""The process that reads files into a staging ring: nothing a device waits for lives beside objects of a device.

Python collects garbage in any thread, and what ends there may wait for a lock of the driver: its holder may be waiting
for the device, and the device for a reader. So the readers are a program of their own, without torch, without a driver
and with an interpreter lock of their own. It is told what to do once and never waits for the process that started it:

* it inherits the descriptors of the ring, of its task (:class:`RingTask`) and of the files;
* on its standard input a byte lets it begin, and the end of it, or of the parent, ends it at once, whatever its readers
  are doing;
* on its standard output it says what was read, as far as somebody listens: what the pipe has no room for is dropped;
* counters and failures are words in the ring itself.

It is two processes: the one that was started stands by while its fork serves. If that one ends without having been told
to (somebody kills it, or it is out of memory), the other says so and answers every wait with poison in its place.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from penstock.checkpoint.safetensors_header import FileFingerprint
from penstock.errors import TransferError
from penstock.memory.pages import map_file
from penstock.plan.schedule import Piece, RingLayout
from penstock.stores.file_reader import DiskOptions, File
from penstock.transfer.ring import Counter, Part, RingMemory, RingServer

__all__ = ["ReadReport", "RingTask", "failed_server", "fate", "main", "unpack_reports"]

_REPORT = struct.Struct("=IIQqq")
_STDERR_BYTES = 2000
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
        parent: process id of whom the ring is for.
    """

    layout: RingLayout
    parts: Sequence[Sequence[Part]]
    num_threads: int
    stuck_s: float
    parent: int

    def verify(self, position: int) -> None:
        """Raise ``TransferError`` if a file with bytes of this piece is no longer what it was stamped as."""
        for source in {part.source for part in self.parts[position]}:
            source.require_unchanged()

    @property
    def files(self) -> list[File]:
        """Those that are read, each once."""
        found = dict.fromkeys(part.source for parts in self.parts for part in parts)
        return [file for file in found if isinstance(file, File)]

    @property
    def descriptors(self) -> list[int]:
        """What the process has to inherit."""
        return sorted({fd for file in self.files for fd in file.descriptors if fd is not None})

    def dump(self) -> str:
        """For :meth:`load` in a process that has inherited :attr:`descriptors` under the same numbers."""
        numbers = {file: number for number, file in enumerate(self.files)}
        layout = self.layout
        return json.dumps(
            {
                "entry_bytes": layout.entry_bytes,
                "num_entries": layout.num_entries,
                "pieces": [(p.unit, p.start, p.num_bytes, p.entry) for p in layout.pieces],
                "following": layout.following,
                "parts": [[(numbers[p.source], *p[1:]) for p in parts] for parts in self.parts],  # type: ignore[index]
                "files": [_describe(file) for file in numbers],
                "num_threads": self.num_threads,
                "stuck_s": self.stuck_s,
                "parent": self.parent,
            }
        )

    @classmethod
    def load(cls, text: str) -> RingTask:
        """The task, with files that this process now owns; they are compared with their stamps by :meth:`verify`."""
        told = json.loads(text)
        files = [_inherited(file) for file in told["files"]]
        pieces = tuple(Piece(*piece) for piece in told["pieces"])
        # Who gives the copies needs to know the positions of a unit, and who serves them does not.
        layout = RingLayout(told["entry_bytes"], told["num_entries"], pieces, {}, tuple(told["following"]))
        parts = [[Part(files[number], *rest) for number, *rest in row] for row in told["parts"]]
        return cls(layout, parts, told["num_threads"], told["stuck_s"], told["parent"])


def _describe(file: File) -> dict[str, Any]:
    stamp = file.stamp
    return {
        "path": str(file.path),
        "descriptors": file.descriptors,
        "stamp": None if stamp is None else (stamp.num_bytes, stamp.modified_ns, stamp.inode),
        "direct": file.options.direct,
        "drop_cache": file.options.drop_cache,
    }


def _inherited(told: dict[str, Any]) -> File:
    fd, direct_fd = told["descriptors"]
    path, options = Path(told["path"]), DiskOptions(told["direct"], told["drop_cache"])
    stamp = None if told["stamp"] is None else FileFingerprint(path, *told["stamp"])
    return File(path, options, stamp, opened=(fd, direct_fd))


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


def fate(code: int | None, errors_fd: int) -> str:
    """How a process ended (``code`` as subprocess has it), and the end of what it wrote to its error file."""
    if code is None:
        how = "has not ended"
    elif code < 0:
        how = f"was ended by signal {-code} ({signal.strsignal(-code)})"
    else:
        how = f"ended with exit status {code}"
    size = os.fstat(errors_fd).st_size
    said = os.pread(errors_fd, _STDERR_BYTES, max(0, size - _STDERR_BYTES)).decode(errors="replace").strip()
    return f"{how} and wrote: {said}" if said else how


def main() -> None:
    """Serve the ring whose descriptor, and that of its task, are the last arguments of the command line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to answer, which may need the ring for it
    memory_fd, task_fd = map(int, sys.argv[-2:])
    with open(task_fd, encoding="utf-8") as file:
        task = RingTask.load(file.read())
    memory = RingMemory(task.layout, map_file(memory_fd, 0, task.layout.num_bytes))
    os.close(memory_fd)
    os.set_blocking(1, False)
    parent_fd = _watchable(task.parent)
    if os.getppid() != task.parent:
        return  # it has ended, and the number may be another's
    gc.freeze()  # a large task is walked through once, and not at every collection
    server = os.fork()  # there is one thread yet
    if server == 0:
        _serve(task, memory, parent_fd)
    _stand_by(memory, parent_fd, server)


def _watchable(pid: int) -> int | None:
    """What becomes readable when a process ends (pidfd_open(2)); ``None``: the kernel or a sandbox has none."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None  # then only the end of the input tells, which a copy that the parent has forked may keep open


def _serve(task: RingTask, memory: RingMemory, parent_fd: int | None) -> NoReturn:
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


def _stand_by(memory: RingMemory, parent_fd: int | None, server: int) -> NoReturn:
    os.close(1)  # its end is the server's
    # At the end of the parent, or of the input, the server ends too.
    code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    if code == 0 or not memory.counters[Counter.SERVING]:
        os._exit(0 if code == 0 else 1)
    threading.Thread(target=_watch, args=(parent_fd, threading.Event()), daemon=True).start()
    failed_server(server, fate(code, 2), memory).serve()
    os._exit(0)


def failed_server(pid: int, how: str, memory: RingMemory) -> RingServer:
    """To serve in place of process ``pid``, which has ended: it says so, and answers every wait with poison."""
    server = RingServer((), memory, num_threads=0)
    server.fail(TransferError(f"the process that reads files for the GPU (pid {pid}) {how}"))
    return server


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
