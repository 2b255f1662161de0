"""Bytes to a device through a small ring of pinned buffers: no whole tensor is ever in host memory for it."""

from __future__ import annotations

import queue
from collections.abc import Sequence

import torch

from penstock.store.base import writable_view
from penstock.store.files import ALIGN_BYTES, read_around
from penstock.store.loading import Part
from penstock.store.pages import map_pages
from penstock.store.registration import PinnedBytes, Registrar

__all__ = ["CudaUploader", "read_staged"]

BUFFER_BYTES = 4 << 20
NUM_BUFFERS = 12
# Direct reads fill whole aligned pages around the bytes that are wanted.
_ROOM_BYTES = BUFFER_BYTES + 4 * ALIGN_BYTES


class CudaUploader:
    """Reads into a pinned buffer, copies on a stream of its own, and reuses the buffer behind the copy."""

    # With the rest of its first and last page, a piece is a request of BUFFER_BYTES, which no disk need split.
    piece_bytes = BUFFER_BYTES - ALIGN_BYTES

    def __init__(self, device: torch.device, registrar: Registrar | None) -> None:
        """``registrar``: what pins the buffers; ``None``, or its refusal, leaves them unpinned, which is slower."""
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # The allocator may hand out memory that kernels given to the current stream still read.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        ring = torch.frombuffer(map_pages(NUM_BUFFERS * _ROOM_BYTES), dtype=torch.uint8)
        self._pinned = PinnedBytes(ring)
        if registrar is not None:
            self._pinned.register(registrar)
        self._free: queue.SimpleQueue[tuple[torch.Tensor, torch.cuda.Event]] = queue.SimpleQueue()
        for buffer in self._pinned.blob.split(_ROOM_BYTES):
            self._free.put((buffer, torch.cuda.Event()))  # an event not recorded yet counts as done

    def upload(self, parts: Sequence[Part]) -> None:
        """See :class:`~penstock.store.loading.Uploader`."""
        buffer, event = self._free.get()
        try:
            event.synchronize()
            free = buffer
            left = sum(part.into.numel() for part in parts)
            for part in parts:
                left -= part.into.numel()
                staged, free = read_staged(part, free, left)
                with torch.cuda.stream(self._stream):
                    part.into.copy_(staged, non_blocking=True)
        finally:
            event.record(self._stream)
            self._free.put((buffer, event))

    def finish(self) -> None:
        """Return when every copy is done."""
        self._stream.synchronize()


def read_staged(part: Part, free: torch.Tensor, reserved_bytes: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of ``part``, read to somewhere in ``free`` (uint8, 1-D, host), and what is free behind them.

    ``reserved_bytes`` of ``free`` are left for the parts that follow, however many of them there are.
    """
    num_bytes = part.into.numel()
    # At a page's start, if that leaves enough: then what comes from a disk needs no other buffer.
    gap = -free.data_ptr() % ALIGN_BYTES
    end = free.numel() - reserved_bytes
    begin = gap if gap + num_bytes <= end else 0
    start = begin + read_around(part.source, part.start, num_bytes, writable_view(free[begin:end]))
    return free[start : start + num_bytes], free[start + num_bytes :]
