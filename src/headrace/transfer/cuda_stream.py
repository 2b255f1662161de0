"""The CUDA link: one copy stream, ordered with compute by events.

A copy engine runs beside the multiprocessors, and one stream saturates the bus (two are no faster), so an offload has
one copy stream. Links of sharded stores add one per rank, whose copies take other paths. ``record_compute`` records an
event on the current stream and the copy stream waits for it, so a slot is overwritten only after the last kernel that
reads it. ``wait`` lets the compute stream wait for the event after the copy. Neither blocks the host.

[Note: capture] Inside a capture both edges become edges of the graph, and copies become its memcpy nodes. Two rules
follow. Compute has to wait for every copy started inside before the capture ends. And an event recorded outside must
not be waited on inside: what it stands for has happened before the graph ever runs, because the bytes that a graph
finds in the slots at its start are the same at every replay (see ``[Note: two timelines]`` in runtime/slot.py).
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.errors import StateError, TransferError
from headrace.stores.store import Load
from headrace.transfer.link import ComputeEvent, Link, Transfer

__all__ = ["StreamLink", "StreamTransfer", "wait_for_events"]

# Streams of closed links, for the next ones. They are not destroyed: a finalizer would need a weak reference, and torch
# frees CUDA stream objects without clearing those, which crashes the garbage collector (torch 2.11, at exit).
_unused: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)

_STREAM_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING (cuda.h, CUstream_flags): not ordered with the default stream


@dataclass(frozen=True)
class StreamTransfer:
    """A copy on the copy stream; ``event`` is recorded after it.

    Attributes:
        captured: the copy is a node of a graph: it happens at each replay and never by itself.
    """

    unit: int
    event: torch.cuda.Event
    captured: bool

    @property
    def done(self) -> bool:
        return not self.captured and bool(self.event.query())


class StreamLink(Link):
    """Record / copy / wait with streams and events."""

    def __init__(self, device: torch.device, *, measure_stalls: bool = False) -> None:
        """``device``: a CUDA device. ``measure_stalls``: time every wait with a pair of events, in graphs too."""
        self._device = device
        self._own_streams: list[torch.cuda.Stream] = []
        self._stream = self._new_stream()
        self._replay_events: dict[int, torch.cuda.Event] = {}  # external: recorded by a node of each graph
        self._stalls: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] | None = {} if measure_stalls else None

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def record_compute(self) -> ComputeEvent | None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def leave_replay_event(self, slot: int) -> None:
        self._replay_events.setdefault(slot, torch.cuda.Event(external=True)).record(
            torch.cuda.current_stream(self._device)
        )

    def replay_event(self, slot: int) -> ComputeEvent | None:
        return self._replay_events.get(slot)

    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> Transfer:
        captured = self.capturing
        self._require_copyable(load, captured)
        # Ask for the compute stream's capture state before entering the side stream: inside, current_stream is ours.
        with torch.cuda.stream(self._stream):
            wait_for_events(self._stream, after)
            self._enqueue(load, slot)
            event = torch.cuda.Event()
            event.record(self._stream)
        return StreamTransfer(load.unit, event, captured)

    def _require_copyable(self, load: Load, captured: bool) -> None:
        if not load.in_memory:
            raise TransferError(f"unit {load.unit} has no pinned host slab; a GPU cannot copy from this store")
        if captured and not all(piece.is_cuda or piece.is_pinned() for _, piece in load.in_memory):
            raise StateError(
                "a copy from memory that is not pinned cannot be captured; unset HEADRACE_DISABLE_PIN_MEMORY"
            )

    def _enqueue(self, load: Load, slot: torch.Tensor) -> None:
        """Submit the copies of one unit to the copy stream, which is current."""
        for start, piece in load.in_memory:
            slot[start : start + piece.numel()].copy_(piece, non_blocking=True)

    def wait(self, transfer: Transfer, measure: bool = False) -> float:
        assert isinstance(transfer, StreamTransfer)
        stream = torch.cuda.current_stream(self._device)
        timed = measure and self._stalls is not None
        if timed and self._stalls is not None:
            before, after = self._stalls.setdefault(transfer.unit, (_external_event(), _external_event()))
            before.record(stream)
        if transfer.captured == self.capturing:
            stream.wait_event(transfer.event)
        if timed:
            after.record(stream)
        return 0.0

    def last_stall_s(self, unit: int) -> float | None:
        if self._stalls is None or unit not in self._stalls:
            return None
        before, after = self._stalls[unit]
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    def close(self) -> None:
        # Slots go back to the allocator, which does not order their next use after the copy stream.
        torch.cuda.synchronize(self._device)
        _unused[self._device] += self._own_streams
        self._own_streams = []

    def _new_stream(self) -> torch.cuda.Stream:
        """A stream that nothing else uses until this link is closed."""
        try:
            stream = _unused[self._device].pop()
        except IndexError:  # asked for, not looked up before: another thread may take the last one in between
            stream = _create_stream(self._device)
        self._own_streams.append(stream)
        return stream


def _create_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that is not one of torch's.

    ``torch.cuda.Stream`` hands out 32 streams per device in turn, so the 33rd is the first one again. If the copy
    stream were also the stream of a capture or of other compute, copies and compute would run one after the other.

    Raises:
        TransferError: the driver creates no stream.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.mem_get_info()  # makes the device's context current in this thread, which the driver API asks for
        code = driver.cuStreamCreate(ctypes.byref(handle), _STREAM_NON_BLOCKING)
    if code != 0 or handle.value is None:
        raise TransferError(f"cuStreamCreate on {device}: error {code} of the CUDA driver (CUresult)")
    return torch.cuda.ExternalStream(handle.value, device)


def wait_for_events(stream: torch.cuda.Stream, events: Sequence[ComputeEvent]) -> None:
    """Let ``stream`` wait for all of ``events``; never blocks the host."""
    for event in events:
        assert isinstance(event, torch.cuda.Event)
        stream.wait_event(event)


def _external_event() -> torch.cuda.Event:
    # External: recorded by a node of the graph at each replay, and readable outside it.
    return torch.cuda.Event(enable_timing=True, external=True)
