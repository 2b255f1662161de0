"""The process that reads files into a staging ring: nothing a device waits for lives beside objects of a device.

Python collects garbage in any thread, and a destructor that runs there may wait for a lock of the driver: its holder
may be waiting for the device, and the device for a reader. So the readers are a program of their own, without torch,
without a driver and with an interpreter lock of their own. It gets its task once and never waits for its parent:

* it inherits the descriptors of the ring, of its task (:class:`RingTask`) and of the files;
* a byte on its standard input lets it begin; the end of the input, or of the parent, ends it at once, even while it
  reads;
* counters and failures are words in the ring itself.

If it ends while it serves (it is killed, or out of memory), the parent answers every wait with poison in its place.
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

from penstock.errors import OptionError
from penstock.memory.pages import map_file
from penstock.plan.schedule import RingLayout
from penstock.stores.sources import Copy, File
from penstock.transfer.ring import RingMemory, RingServer

__all__ = ["RingTask", "main"]


@dataclass(frozen=True)
class RingTask:
    """A ring to serve.

    Attributes:
        layout: of the ring.
        reads: of every piece, by position; the sources are files.
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
    parent_fd = None
    # Readable when the parent ends (pidfd_open(2)). Without it, on some kernels and in some sandboxes, only the end of
    # the input shows that, which a child that the parent has forked may keep open.
    with suppress(OSError):
        parent_fd = os.pidfd_open(task.parent)
    if os.getppid() != task.parent:
        return  # it has ended, and another process may have its number
    gc.freeze()  # a large task is walked through once, and not at every collection
    server = RingServer(task.reads, memory, num_threads=task.num_threads, stuck_s=task.stuck_s)
    may_serve = threading.Event()
    threading.Thread(target=_watch, args=(parent_fd, may_serve), daemon=True).start()
    may_serve.wait()
    server.serve()
    os._exit(0)  # not held up by a reader that is stuck


def _watch(parent_fd: int | None, may_serve: threading.Event) -> None:
    """Set ``may_serve`` at the first byte of the input; end this process when the input or the parent ends."""
    try:
        poll = select.poll()
        poll.register(0, select.POLLIN)
        if parent_fd is not None:
            poll.register(parent_fd, select.POLLIN)
        while all(fd == 0 for fd, _ in poll.poll()) and os.read(0, 1):
            may_serve.set()
    finally:
        os._exit(0)
