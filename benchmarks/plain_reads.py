"""The limit of a disk, or of the page cache: one thread per core reads files front to back, into touched memory.

headrace's own reading is not used, so that it can be compared with this.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from headrace.memory.pages import map_pages, populate_parallel
from headrace.memory.system import num_cores


def forget(files: Sequence[Path]) -> None:
    """Drop the files' pages from the page cache; they were written back before."""
    for file in files:
        with file.open("rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(files: Sequence[Path], direct: bool, block_bytes: int) -> float:
    """Seconds to read all of ``files``, ``block_bytes`` at a time.

    Raises:
        OSError: no direct reads on this file system.
    """
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    descriptors = [os.open(file, flags) for file in files]
    sizes = [file.stat().st_size for file in files]
    left = iter([(fd, at) for fd, size in zip(descriptors, sizes, strict=True) for at in range(0, size, block_bytes)])
    buffers = [mmap.mmap(-1, block_bytes) for _ in range(num_cores())]
    for buffer in buffers:
        buffer[:: mmap.PAGESIZE] = bytes(len(buffer) // mmap.PAGESIZE)
    lock = threading.Lock()

    def read(buffer: mmap.mmap) -> int:
        num_bytes = 0
        while True:
            with lock:
                piece = next(left, None)
            if piece is None:
                return num_bytes
            num_bytes += os.preadv(piece[0], [buffer], piece[1])  # Linux reads a local file to the end of the request

    begin = time.perf_counter()
    with ThreadPoolExecutor(len(buffers)) as pool:
        found = sum(pool.map(read, buffers))
    seconds = time.perf_counter() - begin
    for descriptor in descriptors:
        os.close(descriptor)
    if found != sum(sizes):
        raise OSError(f"expected {sum(sizes)} bytes in {len(files)} files, read {found}")
    return seconds


def touch_fresh(num_bytes: int) -> float:
    """Seconds until one thread per core has touched ``num_bytes`` of memory for the first time.

    A load into new memory waits for this too, and a virtual machine may have to ask its host for the pages.
    """
    memory = torch.from_numpy(map_pages(num_bytes))
    begin = time.perf_counter()
    populate_parallel(memory, num_cores())
    return time.perf_counter() - begin
