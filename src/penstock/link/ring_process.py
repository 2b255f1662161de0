"""The process that reads files into a staging ring: nothing a device waits for lives beside objects of a device.

Python collects garbage in any thread, and what ends there may wait for a lock of the driver: its holder may be waiting
for the device, and the device for a reader. So the readers are a program of their own, without torch, without a driver
and with an interpreter lock of their own. It is told what to do once and never waits for the process that started it:

* it inherits the descriptors of the ring, of its task (:mod:`penstock.link.ring_task`) and of the files;
* on its standard input each byte is a command, and the end of it, or of the parent, ends the process at once, whatever
  its readers are doing;
* on its standard output it says what was read, as far as somebody listens: what the pipe has no room for is dropped;
* counters and failures are words in the ring itself.
"""

from __future__ import annotations

import gc
import mmap
import os
import select
import signal
import struct
import sys
import threading
import time
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from penstock.link.ring import RingServer
from penstock.link.ring_memory import RingMemory
from penstock.link.ring_task import RingTask

__all__ = ["RETIRE", "SERVE", "ReadReport", "main", "unpack_reports"]

SERVE, RETIRE = b"s", b"r"
_REPORT = struct.Struct("=IIQqq")


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
    with open(task_fd, encoding="utf-8") as file:
        task = RingTask.load(file.read())
    memory = RingMemory(task.layout, np.frombuffer(mmap.mmap(memory_fd, task.layout.num_bytes), np.uint8))
    os.close(memory_fd)
    os.set_blocking(sys.stdout.fileno(), False)
    server = RingServer(task.parts, memory, num_threads=task.num_threads, stuck_s=task.stuck_s, on_read=_report_read)
    may_serve = threading.Event()
    threading.Thread(target=_obey, args=(task.parent, server, may_serve), daemon=True).start()
    gc.freeze()  # a large task is walked through once, and not at every collection
    may_serve.wait()
    server.serve()
    os._exit(0)  # not held up by a reader that is stuck


def _report_read(unit: int, num_bytes: int, start_ns: int) -> None:
    reader = int(threading.current_thread().name.rpartition("-")[2])
    report = ReadReport(reader, unit, num_bytes, start_ns, time.perf_counter_ns() - start_ns)
    with suppress(OSError):  # no room, or nobody there: smaller than PIPE_BUF, so it goes as a whole or not at all
        os.write(1, _REPORT.pack(*report))


def _obey(parent: int, server: RingServer, may_serve: threading.Event) -> None:
    """Carry out commands, until there is nobody to give them."""
    try:
        poll = select.poll()
        poll.register(0, select.POLLIN)
        # The input may stay open in a copy that the parent has forked, so the parent itself is watched too.
        with suppress(OSError):  # an older kernel, or a sandbox
            poll.register(os.pidfd_open(parent), select.POLLIN)
        while os.getppid() == parent and all(fd == 0 for fd, _ in poll.poll()) and (commands := os.read(0, 64)):
            if RETIRE in commands:
                server.retire()
            may_serve.set()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
