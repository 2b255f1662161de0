"""The CUDA link of coded units: code is copied into memory beside the slot, and a kernel decodes it into the slot.

Each slot has two buffers for pieces of code, so that one is copied while the other is decoded. Decoding has a stream of
its own, where it runs beside compute. The copy of a unit ends with its last kernel there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.coding.exponents import Piece
from headrace.coding.layout import code_buffers
from headrace.plan.plan import Plan
from headrace.plan.schedule import slot_of
from headrace.stores.store import Load
from headrace.transfer.cuda_stream import StreamLink, wait_for_events
from headrace.transfer.link import ComputeEvent

__all__ = ["DecodingLink"]


class DecodingLink(StreamLink):
    """A :class:`StreamLink` for plans some of whose units are coded."""

    def __init__(self, device: torch.device, *, measure_stalls: bool = False) -> None:
        super().__init__(device, measure_stalls=measure_stalls)
        # Before compute: a product that fills the GPU would hold up the unit that the next one needs.
        self._last_stream = self._new_stream(priority=-1)
        self._code: list[tuple[torch.Tensor, ...]] = []  # by slot: two buffers
        self._latest: dict[int, tuple[int | None, torch.cuda.Event]] = {}  # by slot: capture and end of a copy

    def prepare(self, plan: Plan, loads: Sequence[Load]) -> None:
        from headrace.coding.decode_kernels import decode_on_gpu  # needs Triton

        sizes = [(0, 0)] * plan.num_slots
        for load in loads:
            slot, needed = (
                slot_of(load.unit, plan.num_slots),
                code_buffers([piece.data.numel() for piece in load.coded]),
            )
            sizes[slot] = (max(sizes[slot][0], needed[0]), max(sizes[slot][1], needed[1]))
        self._code = [(self.allocate(one), self.allocate(other)) for one, other in sizes]
        self._decode = decode_on_gpu
        # Compiled now: a kernel cannot be loaded during a capture.
        code = torch.zeros(2048, dtype=torch.uint8, device=self._device)
        with torch.cuda.device(self._device):
            for width in {piece.width for load in loads for piece in load.coded if piece.width is not None}:
                decode_on_gpu(Piece(0, 256, width, code), code, torch.empty_like(code))

    def _copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> torch.cuda.Event:
        index, capture = slot_of(load.unit, len(self._code)), self.capture_id
        earlier, end = self._latest.get(index, (None, None))
        if end is not None and earlier == capture:
            after = [*after, end]  # of a unit that was given up, whose code may still be read
        wait_for_events(self._stream, after)
        if not load.coded:
            with torch.cuda.stream(self._stream):
                self._enqueue(load, slot)
        ends: list[torch.cuda.Event] = []
        for number, piece in enumerate(load.coded):
            if number > 1:
                self._stream.wait_event(ends[number - 2])  # whose memory this piece takes
            self._copy_piece(piece, self._code[index][number % 2], slot)
            ends.append(_record(self._last_stream))
        self._last_stream.wait_event(_record(self._stream))
        end = _record(self._last_stream)
        self._latest[index] = capture, end
        return end

    def _copy_piece(self, piece: Piece, code: torch.Tensor, slot: torch.Tensor) -> None:
        size = piece.data.numel()
        with torch.cuda.stream(self._stream):
            target = slot[piece.start :] if piece.width is None else code
            target[:size].copy_(piece.data, non_blocking=True)
        self._last_stream.wait_event(_record(self._stream))
        if piece.width is not None:
            with torch.cuda.device(self._device), torch.cuda.stream(self._last_stream):
                self._decode(piece, code, slot)


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event
