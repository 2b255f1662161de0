"""The CUDA link: one copy stream, ordered with compute by events.

A copy engine runs beside the multiprocessors, and one stream saturates the bus (two are no faster), so an offload has
one copy stream. Links of sharded stores add one per rank, whose copies take other paths. ``record_compute`` records an
event on the current stream and the copy stream waits for it, so a slot is overwritten only after the last kernel that
reads it. ``wait`` lets the compute stream wait for the event after the copy. Neither blocks the host.

[Note: capture] Inside a capture both edges become edges of the graph, and copies become its memcpy nodes. An event
recorded outside, or in another capture, must not be waited on inside: what it stands for has happened before the graph
ever runs, because the bytes that a graph finds in the slots at its start are the same at every replay (see ``[Note: two
timelines]`` in runtime/replays.py). A capture that this project does not own may end while compute has not waited for a
copy, which is an error of CUDA (``cudaErrorStreamCaptureUnjoined``) that leaves the process without a GPU. So the copy
stream forgets each captured copy at once; the copy stays a node of the graph, whose replay ends after all its nodes.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.codec.exponents import Piece
from headrace.errors import StateError, TransferError
from headrace.plan.plan import Plan
from headrace.stats import Recorder
from headrace.stores.store import Load, Store
from headrace.transfer.link import ComputeEvent, Link, Transfer

# Streams of closed links, for the next ones. They are not destroyed: a finalizer would need a weak reference, and torch
# frees CUDA stream objects without clearing those, which crashes the garbage collector (torch 2.11, at exit).
_unused: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)

_SET_DEPENDENCIES = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES (cuda.h, CUstreamUpdateCaptureDependencies_flags)
_STREAM_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING (cuda.h, CUstream_flags): not ordered with the default stream


@dataclass(frozen=True)
class StreamTransfer:
    """A copy on the copy stream; ``event`` is recorded after it.

    Attributes:
        capture: graph of which the copy is a node, so that it happens at each replay and never by itself.
    """

    unit: int
    event: torch.cuda.Event
    capture: int | None

    @property
    def done(self) -> bool:
        return self.capture is None and bool(self.event.query())


def open_link(store: Store, device: torch.device, recorder: Recorder, measure_stalls: bool) -> Link:
    """The link for slabs and codes in pinned memory."""
    return StreamLink(device, measure_stalls=measure_stalls)


class StreamLink(Link):
    """Record / copy / wait with streams and events."""

    def __init__(self, device: torch.device, *, measure_stalls: bool = False) -> None:
        """``device``: a CUDA device. ``measure_stalls``: time every wait with a pair of events, in graphs too."""
        self._device = device
        self._own_streams: list[torch.cuda.Stream] = []
        self._stream = self._new_stream()
        self._captured: StreamTransfer | None = None  # the latest copy that is a node of a graph
        self._replay_events: dict[int, torch.cuda.Event] = {}  # external: recorded by a node of each graph
        self._copy_events: dict[int, torch.cuda.Event] = {}  # external: waited for by a node of each graph
        self._stalls: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] | None = {} if measure_stalls else None

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def prepare(self, plan: Plan, loads: Sequence[Load]) -> None:
        # Compiled now: a kernel cannot be loaded during a capture.
        if any(piece.is_coded for load in loads for piece in load.coded):
            code = self.allocate(4096).zero_()
            self._decode(Piece(0, 256, True, 0, 2048), code, torch.empty_like(code))

    def decode(self, load: Load, slot: torch.Tensor, into: torch.Tensor, after: Sequence[ComputeEvent]) -> None:
        wait_for_events(self._compute, after)
        for piece in load.coded:
            self._decode(piece, slot[piece.code_start : piece.code_start + piece.code_bytes], into)

    def _decode(self, piece: Piece, code: torch.Tensor, into: torch.Tensor) -> None:
        if not piece.is_coded:
            into[piece.start : piece.start + piece.num_bytes].copy_(code)
            return
        from headrace.codec.decode_kernels import decode_on_gpu  # needs Triton

        with torch.cuda.device(self._device):
            decode_on_gpu(piece, code, into)

    @property
    def capturing(self) -> bool:
        return is_capturing(self._device)

    @property
    def capture_id(self) -> int | None:
        return _capture_id(self._compute) if self.capturing else None

    @property
    def _compute(self) -> torch.cuda.Stream:
        """The stream of the caller's kernels."""
        # By a torch.device it takes torch as long to find a stream as to submit a copy.
        return torch.cuda.current_stream(self._device.index)

    def record_compute(self) -> ComputeEvent | None:
        event = torch.cuda.Event()
        event.record(self._compute)
        return event

    def leave_replay_event(self, slot: int) -> None:
        self._replay_events.setdefault(slot, torch.cuda.Event(external=True)).record(self._compute)

    def replay_event(self, slot: int) -> ComputeEvent | None:
        return self._replay_events.get(slot)

    def leave_copy_event(self, slot: int) -> None:
        self._copy_events.setdefault(slot, torch.cuda.Event(external=True)).record(self._stream)

    def copy_event(self, slot: int, unit: int) -> Transfer | None:
        event = self._copy_events.get(slot)
        return None if event is None else StreamTransfer(unit, event, self.capture_id)

    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> Transfer:
        # Ask for the compute stream's capture state before entering the side stream: inside, current_stream is ours.
        capture = self.capture_id
        self._require_copyable(load, capture is not None)
        with CurrentStream(self._stream):
            wait_for_events(self._stream, after)
            if capture is not None and self._captured is not None and self._captured.capture == capture:
                self._stream.wait_event(self._captured.event)  # one copy at a time, as on a stream that runs
            self._enqueue(load, slot)
            event = torch.cuda.Event()
            event.record(self._stream)
        transfer = StreamTransfer(load.unit, event, capture)
        if capture is not None:
            self._captured = transfer
            if not self.joined_by_caller:
                _forget_captured(self._stream)
        return transfer

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
        stream = self._compute
        timed = measure and self._stalls is not None
        if timed and self._stalls is not None:
            before, after = self._stalls.setdefault(transfer.unit, (_external_event(), _external_event()))
            before.record(stream)
        if transfer.capture == self.capture_id:
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
        give_streams(self._device, self._own_streams)

    def _new_stream(self) -> torch.cuda.Stream:
        """A stream that nothing else uses until this link is closed."""
        self._own_streams.append(take_stream(self._device))
        return self._own_streams[-1]


def take_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nothing else uses until :func:`give_streams`; raises ``TransferError`` where there is none."""
    try:
        return _unused[device].pop()
    except IndexError:  # asked for, not looked up before: another thread may take the last one in between
        return _create_stream(device)


def give_streams(device: torch.device, streams: list[torch.cuda.Stream]) -> None:
    """Wait for ``device``, and empty ``streams``, which others may take then."""
    torch.cuda.synchronize(device)
    while streams:  # one by one: an interrupt may lose one, and gives none away twice
        _unused[device].append(streams.pop())


class CurrentStream:
    """``torch.cuda.stream`` without its two queries of the current device."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._index = stream, stream.device_index
        self._device = torch.cuda.device(self._index)  # to set a stream also makes its device the current one

    def __enter__(self) -> None:
        self._device.__enter__()
        self._before = torch.cuda.current_stream(self._index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self._before)
        self._device.__exit__(*error)


def is_capturing(device: torch.device) -> bool:
    """Whether what the caller gives ``device`` is recorded into a graph; torch tells it of the current device alone."""
    if torch.cuda.current_device() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _create_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that is not one of torch's.

    ``torch.cuda.Stream`` hands out 32 streams per device in turn, so the 33rd is the first one again. If the copy
    stream were also the stream of a capture or of other compute, copies and compute would run one after the other.

    Raises:
        TransferError: the driver creates no stream.
    """
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.mem_get_info()  # makes the device's context current in this thread, which the driver API asks for
        _call_driver("cuStreamCreate", ctypes.byref(handle), _STREAM_NON_BLOCKING)
    assert handle.value is not None
    return torch.cuda.ExternalStream(handle.value, device)


def _call_driver(function: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver that returns a CUresult."""
    code = getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments)
    if code != 0:
        raise TransferError(f"{function}: error {code} of the CUDA driver (CUresult)")


def _capture_id(stream: torch.cuda.Stream) -> int:
    """The unique number of the capture that ``stream`` is in (cuStreamGetCaptureInfo)."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    _call_driver(
        "cuStreamGetCaptureInfo_v2",
        ctypes.c_void_p(stream.cuda_stream),
        *map(ctypes.byref, (status, number)),
        None,
        None,
        None,
    )
    return number.value


def _forget_captured(stream: torch.cuda.Stream) -> None:
    """Take from ``stream`` what it has captured, so that no stream waits for it (cuStreamUpdateCaptureDependencies).

    Events recorded on it stay as they are.
    """
    _call_driver(
        "cuStreamUpdateCaptureDependencies",
        ctypes.c_void_p(stream.cuda_stream),
        None,
        ctypes.c_size_t(0),
        _SET_DEPENDENCIES,
    )


def wait_for_events(stream: torch.cuda.Stream, events: Sequence[ComputeEvent]) -> None:
    """Let ``stream`` wait for all of ``events``; never blocks the host."""
    for event in events:
        assert isinstance(event, torch.cuda.Event)
        stream.wait_event(event)


def _external_event() -> torch.cuda.Event:
    # External: recorded by a node of the graph at each replay, and readable outside it.
    return torch.cuda.Event(enable_timing=True, external=True)
