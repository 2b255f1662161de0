"""How fast this machine reads the model's files when it does nothing else: the link's share of the floor."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from penstock.env import reader_threads
from penstock.memory.system import cpu_seconds

__all__ = ["measure_reading"]

_PIECE_BYTES = 2 << 20  # as the thread link cuts them
_PASSES = 3


def measure_reading(files: Sequence[Path], buffer_bytes: int) -> tuple[float, float]:
    """Read ``files`` whole, three times, with as many threads as the offloader uses.

    Args:
        files: should have been read just before, so that all passes come from the page cache.
        buffer_bytes: memory that the bytes land in, over and over; the size of the slots, since small buffers stay in
            the processor's caches and make reading look faster than it can be.

    Returns:
        bytes per second of the fastest pass, and its CPU seconds per byte.
    """
    buffer = memoryview(mmap.mmap(-1, max(buffer_bytes, _PIECE_BYTES)))
    with ExitStack() as stack:
        stretches = []
        for path in files:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            stretches += [(fd, start) for start in range(0, os.fstat(fd).st_size, _PIECE_BYTES)]
        pool = stack.enter_context(ThreadPoolExecutor(reader_threads()))
        passes = [_one_pass(pool, stretches, buffer) for _ in range(_PASSES)]
    seconds, cpu_s, num_bytes = min(passes)
    return num_bytes / seconds, cpu_s / num_bytes


def _one_pass(
    pool: ThreadPoolExecutor, stretches: list[tuple[int, int]], buffer: memoryview
) -> tuple[float, float, int]:
    places = len(buffer) // _PIECE_BYTES

    def read(index: int) -> int:
        fd, start = stretches[index]
        at = index % places * _PIECE_BYTES
        return os.preadv(fd, [buffer[at : at + _PIECE_BYTES]], start)

    begin, cpu_begin = time.perf_counter(), cpu_seconds()
    num_bytes = sum(pool.map(read, range(len(stretches))))
    return time.perf_counter() - begin, cpu_seconds() - cpu_begin, num_bytes
