"""The process that reads files into a staging ring: nothing a device waits for lives beside objects of a device.

Python collects garbage in any thread, and a destructor that runs there may wait for a lock of the driver: its holder
may be waiting for the device, and the device for a reader. So the readers are a program of their own, without torch,
without a driver and with an interpreter lock of their own. It gets its task once and never waits for its parent:

* it inherits the descriptors of the ring, of its task (:class:`RingTask`) and of the files;
* a byte on its standard input lets it begin; the end of the input, or of the parent, ends it at once, even while it
  reads;
* counters and failures are words in the ring itself.

It is two processes: the one that was started stands by while its fork serves. If the fork is killed (out of memory, for
instance), the other answers every wait of the stream with poison. A thread of the parent does that only if both are
killed, because it may itself be held up by what the readers are kept away from.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

from headrace.errors import OptionError, TransferError
from headrace.memory.pages import map_file
from headrace.plan.staging_ring import RingLayout
from headrace.stores.file_reads import File
from headrace.stores.sources import Copy
from headrace.transfer.ring import Counter, RingMemory, RingServer

_STDERR_BYTES = 2000


@dataclass(frozen=True)
class RingTask:
    """A ring to serve.

    Attributes:
        layout: layout of the ring.
        reads: reads of every piece, by position; the sources are files.
        num_threads: readers.
        stuck_s: how long no read may end before the disk counts as dead.
        parent: process id of the owner of the ring; the process ends with it.
    """

    layout: RingLayout
    reads: Sequence[Sequence[Copy]]
    num_threads: int
    stuck_s: float
    parent: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        """Check the reads.

        Raises:
            OptionError: a range is none of a file.
        """
        for piece, reads in zip(self.layout.pieces, self.reads, strict=True):
            for read in reads:
                if not isinstance(read.src.source, File):
                    raise OptionError(
                        f"unit {piece.unit}: what comes to a GPU through the staging ring has to be in files, found "
                        f"{read.src.source!r}; use mode 'cpu' (--offload-mode cpu) for it"
                    )

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that the process has to inherit, under the same numbers, to use the files of the task."""
        sources = {read.src.source for reads in self.reads for read in reads}
        return sorted({fd for file in sources if isinstance(file, File) for fd in file.descriptors if fd is not None})


def main() -> None:
    """Serve the ring whose descriptor, and that of its task, are the last arguments of the command line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to answer, which may need the ring for it
    memory_fd, task_fd = map(int, sys.argv[-2:])
    with open(task_fd, "rb") as file:
        task: RingTask = pickle.load(file)  # only the parent can write to this descriptor
    memory = RingMemory(task.layout, map_file(memory_fd, 0, task.layout.num_bytes))
    os.close(memory_fd)
    watched = _process_fds(task.parent)
    if os.getppid() != task.parent:
        return  # it has ended, and another process may have its number
    gc.freeze()  # a large task is walked through once, and not at every collection
    own = os.getpid()
    if server := os.fork():  # before there are threads
        _stand_by(server, memory, watched)
    watched += _process_fds(own)
    if os.getppid() != own:
        os._exit(0)
    may_serve = threading.Event()
    threading.Thread(target=_watch, args=(watched, may_serve), daemon=True).start()
    may_serve.wait()
    RingServer(task.reads, memory, num_threads=task.num_threads, stuck_s=task.stuck_s).serve()
    os._exit(0)  # not held up by a reader that is stuck


def _process_fds(pid: int) -> list[int]:
    """Descriptors that become readable when a process ends (pidfd_open(2)).

    Empty on some kernels and in some sandboxes; then only the end of the input shows that the parent has ended, and a
    child that the parent has forked may keep the input open.
    """
    with suppress(OSError):
        return [os.pidfd_open(pid)]
    return []


def _stand_by(server: int, memory: RingMemory, watched: Sequence[int]) -> NoReturn:
    """Wait for the end of the server; if it was killed, answer the stream in its place."""
    code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])  # it ends with the parent, and with the input
    if code == 0 or not memory.counters[Counter.SERVING]:
        os._exit(0 if code == 0 else 1)
    threading.Thread(target=_watch, args=(watched, threading.Event()), daemon=True).start()
    poison(server, exit_description(code, 2), memory).serve()
    os._exit(0)


def poison(pid: int, how: str, memory: RingMemory) -> RingServer:
    """A server that answers every wait with poison, because process ``pid`` has ended."""
    server = RingServer((), memory, num_threads=0)
    server.fail(TransferError(f"the process that reads files for the GPU (pid {pid}) {how}"))
    return server


def _watch(watched: Sequence[int], may_serve: threading.Event) -> None:
    """Set ``may_serve`` at the first byte of the input; end this process when the input or a watched one ends."""
    try:
        poll = select.poll()
        for fd in (0, *watched):
            poll.register(fd, select.POLLIN)
        while all(fd == 0 for fd, _ in poll.poll()) and os.read(0, 1):
            may_serve.set()
    finally:
        os._exit(0)


def exit_description(code: int | None, errors_fd: int) -> str:
    """How a process ended (``code`` as subprocess has it), and the end of what it wrote to its error file."""
    if code is None:
        how = "has not ended"
    elif code < 0:
        how = f"was ended by signal {-code} ({signal.strsignal(-code)})"
    else:
        how = f"ended with exit status {code}"
    size = os.fstat(errors_fd).st_size
    text = os.pread(errors_fd, _STDERR_BYTES, max(0, size - _STDERR_BYTES)).decode(errors="replace").strip()
    return f"{how} and wrote: {text}" if text else how
