"""Bytes to a device through a few pinned buffers: no whole tensor is in host memory on the way.

A dozen reader threads fill thousands of buffers a second, and a thread that releases the interpreter lock for a call
waits behind all others to get it again. So one reader at a time starts the copies of all buffers that are full, with
one event behind them, while the others go on reading.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import torch

from penstock.loading.read_pool import Read
from penstock.memory.byte_ranges import ByteRange, writable_view
from penstock.memory.pages import map_pages
from penstock.memory.pinned import HostRegistrar, PinnedBuffer
from penstock.stores.file_reader import ALIGN_BYTES

__all__ = ["CudaUploader", "Upload", "UploadRing", "Wait", "no_wait", "read_staged", "start_copies"]

BUFFER_BYTES = 4 << 20
NUM_BUFFERS = 12
# Direct reads fill whole aligned pages around the bytes that are wanted.
_BUFFER_BYTES = BUFFER_BYTES + 4 * ALIGN_BYTES

# Where bytes go on a device, and where they are in host memory.
Upload = tuple[torch.Tensor, torch.Tensor]
Wait = Callable[[], None]


class UploadRing:
    """Buffers that readers fill, and whose copies one of them starts.

    Args:
        buffers: uint8, 1-D, host.
        start: starts copies and returns what waits until they are done; called by one thread at a time.
    """

    def __init__(self, buffers: Iterable[torch.Tensor], start: Callable[[Sequence[Upload]], Wait]) -> None:
        self._start = start
        self._free: queue.SimpleQueue[tuple[torch.Tensor, Wait]] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put((buffer, no_wait))
        self._filled: deque[tuple[torch.Tensor, list[Upload]]] = deque()
        self._starting = threading.Lock()

    def upload(self, reads: Sequence[Read]) -> None:
        """Read ``reads`` into one buffer; this thread, or another one in this method, starts their copies."""
        buffer, wait = self._free.get()
        try:
            wait()
            self._filled.append((buffer, _read(reads, buffer)))
        except BaseException:
            self._free.put((buffer, wait))
            raise
        # Again after the lock is released: a reader that found it taken has left its buffer to this thread.
        while self._filled and self._starting.acquire(blocking=False):
            try:
                self._start_filled()
            finally:
                self._starting.release()

    def _start_filled(self) -> None:
        filled: list[tuple[torch.Tensor, list[Upload]]] = []
        with suppress(IndexError):
            while True:
                filled.append(self._filled.popleft())
        if not filled:  # another thread was faster
            return
        wait: Wait = no_wait
        try:
            wait = self._start([copy for _, copies in filled for copy in copies])
        finally:
            for buffer, _ in filled:
                self._free.put((buffer, wait))


class CudaUploader(UploadRing):
    """Pinned buffers, and copies on a stream of its own."""

    # With the rest of its first and last page, a piece is a request of BUFFER_BYTES, which no disk need split.
    piece_bytes = BUFFER_BYTES - ALIGN_BYTES

    def __init__(self, device: torch.device, registrar: HostRegistrar | None) -> None:
        """``registrar``: what pins the buffers; ``None``, or its refusal, leaves them unpinned, which is slower."""
        self._stream = torch.cuda.Stream(device)
        # The allocator may hand out memory that kernels given to the current stream still read.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._pinned = PinnedBuffer(torch.from_numpy(map_pages(NUM_BUFFERS * _BUFFER_BYTES)))
        if registrar is not None:
            self._pinned.register(registrar)
        # No method of this starts the copies: the buffers of a cycle would stay until garbage is collected.
        super().__init__(self._pinned.blob.split(_BUFFER_BYTES), partial(start_copies, self._stream))

    def finish(self) -> None:
        """Return when every copy is done."""
        self._stream.synchronize()


def start_copies(stream: torch.cuda.Stream, copies: Sequence[Upload]) -> Wait:
    """Give ``copies`` to ``stream``; returns what waits until they are done."""
    done = torch.cuda.Event()
    # A thread begins on device 0, and to return to that device's stream would make a context there.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        for into, staged in copies:
            into.copy_(staged, non_blocking=True)
        done.record(stream)
    return partial(_wait_for, done)


def _wait_for(done: torch.cuda.Event) -> None:
    if not done.query():  # to synchronize gives up the lock even if there is nothing to wait for
        done.synchronize()


def no_wait() -> None:
    """For a buffer that no copy reads."""


def _read(reads: Sequence[Read], buffer: torch.Tensor) -> list[Upload]:
    copies: list[Upload] = []
    left = sum(read.into.numel() for read in reads)
    for read in reads:
        left -= read.into.numel()
        staged, buffer = read_staged(read.src, buffer, left)
        copies.append((read.into, staged))
    return copies


def read_staged(src: ByteRange, free: torch.Tensor, reserved_bytes: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of ``src``, read to somewhere in ``free`` (uint8, 1-D, host), and what is free behind them.

    ``reserved_bytes`` of ``free`` are left for the reads that follow, however many of them there are.
    """
    # At a page's start, if that leaves enough: then what comes from a disk needs no other buffer.
    gap = -free.data_ptr() % ALIGN_BYTES
    end = free.numel() - reserved_bytes
    begin = gap if gap + src.num_bytes <= end else 0
    start = begin + src.source.read_around(src.offset, src.num_bytes, writable_view(free[begin:end]))
    return free[start : start + src.num_bytes], free[start + src.num_bytes :]
