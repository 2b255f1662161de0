"""The link of units in files to a GPU: files -> staging ring -> slot, on one copy stream.

To the prefetcher it is a :class:`~headrace.transfer.cuda_stream.StreamLink`: the same events, in captures too. Between
them there is, instead of one copy from a slab, a handshake and a copy for each piece of the unit
(:mod:`headrace.transfer.ring`). Only this stream waits for the readers; other streams of the device run on.

Units with a slab in host memory are copied from it, on the same stream and in order; they do not pass through the ring,
whose readers read ahead during these copies.

The ring is shared memory: its readers are a process of their own (:mod:`headrace.transfer.ring_process`). Nothing on
this side of it takes a lock or waits for a reader.

The stream writes words in host memory and waits for them: CUDA calls that stream memory operations (CUDA Driver API,
"Stream Memory Operations"). ``cuStreamWaitValue32`` holds a stream until a 32-bit word has a value,
``cuStreamWriteValue32`` writes one after everything the stream did before, with a fence for the whole system. Both
become nodes when the stream is captured. torch has no binding for them, so they are called in the driver's own library.
A host function (``cudaLaunchHostFunc``) would need the interpreter lock in the middle of a replay.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from headrace.config import pin_memory_disabled
from headrace.errors import OptionError, StateError, TransferError
from headrace.memory.pages import collapse_parallel
from headrace.memory.pinned import CudaRegistrar, PinnedBuffer, pin_shared, refuse_capture
from headrace.memory.shared import SharedMemory
from headrace.memory.system import reader_threads, touch_threads
from headrace.plan.plan import Plan
from headrace.plan.staging_ring import ENTRY_BYTES, MAX_ENTRIES, WORD_BYTES, RingLayout, cut
from headrace.stats import Recorder, StagingStats
from headrace.stores.sources import Copy, clip
from headrace.stores.store import Load, Store
from headrace.transfer.cuda_stream import StreamLink
from headrace.transfer.link import ComputeEvent, Link, Transfer
from headrace.transfer.ring import MAX_READERS, READ_BYTES, SPARE_ONE_CORE_IN, STUCK_S, WANTED, RingMemory
from headrace.transfer.ring_process import RingTask
from headrace.transfer.ring_readers import ReaderProcess

_WAIT_VALUE_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ (cuda.h, CUstreamWaitValue_flags)
_WRITE_VALUE_DEFAULT = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: fenced
_TRIAL_S = 10.0
_FIX = "use mode 'cpu', which holds the weights in pinned host memory (--offload-mode cpu)"


def open_link(store: Store, device: torch.device, recorder: Recorder, measure_stalls: bool) -> Link:
    """The link for a plan with units in files."""
    return RingLink(device, measure_stalls=measure_stalls)


class RingLink(StreamLink):
    """Record / copy / wait with streams and events, over a ring that a process of readers fills."""

    def __init__(
        self,
        device: torch.device,
        *,
        measure_stalls: bool = False,
        entry_bytes: int = ENTRY_BYTES,
        max_entries: int = MAX_ENTRIES,
        num_threads: int | None = None,
        stuck_s: float = STUCK_S,
    ) -> None:
        """``device``: a CUDA device; nothing is taken before :meth:`start`, or pinned before :meth:`prepare`.

        ``entry_bytes``, ``max_entries``: of the ring; limits and reports assume the defaults. ``num_threads``: readers;
        default ``HEADRACE_READERS``, or one per core less ``SPARE_ONE_CORE_IN``, at most ``MAX_READERS``. ``stuck_s``:
        how long no read may end before the disk counts as dead.
        """
        super().__init__(device, measure_stalls=measure_stalls)
        self._entry_bytes, self._max_entries = entry_bytes, max_entries
        self._num_threads = num_threads or reader_threads(at_most=MAX_READERS, spare_one_in=SPARE_ONE_CORE_IN)
        self._stuck_s = stuck_s
        self._memory: PinnedBuffer | None = None
        self._ring: StagingRing | None = None
        self._readers: ReaderProcess | None = None
        self._copies: CudaCopyStream | None = None
        self._last_stats = StagingStats()
        self._close_when_idle: weakref.finalize[..., RingLink] | None = None

    def start(self, plan: Plan, loads: Sequence[Load]) -> None:
        """Start the readers' process, whose interpreter takes some tenths of a second; it does not serve yet.

        At least one unit is stored in files.

        Raises:
            OptionError: the readers' process cannot be started, pinned memory is forbidden, or a unit that passes
                through the ring is not in files.
            StateError: a graph is being captured.
        """
        if pin_memory_disabled():
            raise OptionError(
                "units in files are copied to a GPU through pinned memory, which HEADRACE_DISABLE_PIN_MEMORY=1 "
                "forbids; unset it, or use mode 'cpu' (--offload-mode cpu)"
            )
        refuse_capture(CudaRegistrar(self._device))
        layout = plan.lay_out_ring(entry_bytes=self._entry_bytes, max_entries=self._max_entries)
        task = RingTask(layout, reads_of(layout, loads), self._num_threads, self._stuck_s)
        shared = SharedMemory.create(layout.num_bytes)
        try:
            self._memory = PinnedBuffer(shared.map(0, layout.num_bytes))
            self._ring = StagingRing(layout, self._memory.buffer)
            self._readers = ReaderProcess(task, self._ring.memory, shared.fileno())
        finally:
            shared.close()  # mappings live on without it
        self._close_when_idle = weakref.finalize(self, self._readers.close_when_idle)

    def prepare(self, plan: Plan, loads: Sequence[Load]) -> None:
        """Pin the ring and let its readers serve; nothing is read before the first copy asks for it.

        Raises:
            OptionError: as of :meth:`start`; memory cannot be pinned, there are no stream memory operations, or the
                readers' process does not serve.
            StateError: a graph is being captured.
        """
        try:
            if self._readers is None:
                self.start(plan, loads)
            assert self._readers is not None
            assert self._ring is not None
            assert self._memory is not None
            buffer = self._memory.buffer
            collapse_parallel(buffer, touch_threads())
            pin_shared(self._memory, CudaRegistrar(self._device), "use mode 'cpu'")
            self._copies = CudaCopyStream(self._stream, buffer[self._ring.memory.layout.words_at :].data_ptr())
            self._copies.try_out()  # before the readers poll the words
            self._readers.serve()
        except BaseException:
            self._end_readers()
            raise

    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> Transfer:
        self.check()
        return super().copy(load, slot, after)

    def wait(self, transfer: Transfer, measure: bool = False) -> float:
        self.check()
        return super().wait(transfer, measure)

    def check(self) -> None:
        if self._ring is not None:
            self._ring.check()

    def staging_stats(self) -> StagingStats | None:
        if self._ring is not None:
            self._last_stats = self._ring.memory.stats
        return self._last_stats

    def close(self) -> None:
        try:
            super().close()  # the readers serve what is under way
        finally:
            self._end_readers()

    def _end_readers(self) -> None:
        if self._ring is not None and self._readers is not None:
            self._last_stats = self._ring.memory.stats
            self._readers.close()
        if self._close_when_idle is not None:
            self._close_when_idle.detach()
        self._ring = self._readers = self._memory = None  # and with them the pinned memory

    def _require_copyable(self, load: Load, captured: bool) -> None:
        if self._ring is None:
            raise StateError("this link is closed; offload the model again")
        if load.in_memory:
            super()._require_copyable(load, captured)

    def _enqueue(self, load: Load, slot: torch.Tensor) -> None:
        if load.in_memory:
            super()._enqueue(load, slot)
            return
        assert self._ring is not None
        assert self._copies is not None
        self._ring.enqueue(load.unit, slot, self._copies)


class StagingRing:
    """The stream's half of the handshake (:mod:`headrace.transfer.ring`), and the errors of the readers' half.

    Attributes:
        memory: memory of the ring, which the server shares.
    """

    def __init__(self, layout: RingLayout, memory: torch.Tensor) -> None:
        """``memory``: uint8, 1-D, host, ``layout.num_bytes`` long."""
        self._layout = layout
        self._entries = memory[: layout.words_at].split(layout.entry_bytes)
        self.memory = RingMemory(layout, memory.numpy())

    def enqueue(self, unit: int, slot: torch.Tensor, stream: CudaCopyStream) -> None:
        """Give ``stream`` the copies of ``unit`` into ``slot`` (uint8, 1-D); in a capture they become nodes."""
        for position in self._layout.of_unit[unit]:
            piece = self._layout.pieces[position]
            tag = 1 + piece.entry
            stream.write(WANTED, position + 1)
            stream.wait_equal(tag, position + 1)
            target = slot[piece.start : piece.start + piece.num_bytes]
            stream.copy(target, self._entries[piece.entry][: piece.num_bytes])
            # In this order: a tag of zero beside the same ``wanted`` would look like a missing piece.
            stream.write(WANTED, 0)
            stream.write(tag, 0)

    def check(self) -> None:
        """Raise ``TransferError`` once the ring has failed."""
        failure = self.memory.failure
        if failure is not None:
            raise TransferError(
                f"{failure}; what was computed since then is not to be used. Once the files are right, remove() and "
                f"offload the model again"
            )


def reads_of(layout: RingLayout, loads: Sequence[Load], read_bytes: int = READ_BYTES) -> list[list[Copy]]:
    """The reads that fill each piece, of ``read_bytes`` at most; ``loads``: of all units, by index."""
    return [
        [
            Copy(copy.src.part(start, size), copy.dst_offset + start)
            for copy in clip(loads[piece.unit].copies, piece.start, piece.start + piece.num_bytes)
            for start, size in cut(copy.num_bytes, read_bytes)
        ]
        for piece in layout.pieces
    ]


class CudaCopyStream:
    """A CUDA stream over words at ``address``, one every 64 bytes, in pinned host memory.

    Operations run in order of submission; nothing but :meth:`try_out` blocks the caller.
    """

    def __init__(self, stream: torch.cuda.Stream, address: int) -> None:
        """Nothing is submitted to ``stream`` yet.

        Raises:
            OptionError: the driver has no stream memory operations.
        """
        self._stream = stream
        # Under unified addressing the device's address of registered host memory is the host's.
        self._address = address
        self._write, self._wait = _driver_function("cuStreamWriteValue32"), _driver_function("cuStreamWaitValue32")

    def write(self, word: int, value: int) -> None:
        """Set a word, visible after everything submitted before is done."""
        self._call(self._write, word, value, _WRITE_VALUE_DEFAULT)

    def wait_equal(self, word: int, value: int) -> None:
        """Go on only when a word has this value."""
        self._call(self._wait, word, value, _WAIT_VALUE_EQUAL)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between uint8 tensors of one size."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def try_out(self) -> None:
        """Write word 0, wait for it and clear it again.

        Raises:
            OptionError: the device does not do that.
        """
        try:
            self.write(0, 1)
            self.wait_equal(0, 1)
            self.write(0, 0)
        except TransferError as error:
            raise OptionError(
                f"mode 'disk' needs stream memory operations, which fail here ({error}); {_FIX}"
            ) from error
        done = torch.cuda.Event()
        done.record(self._stream)
        deadline = time.monotonic() + _TRIAL_S
        while not done.query():
            if time.monotonic() > deadline:
                raise OptionError(
                    f"mode 'disk' needs stream memory operations, and one was not done after {_TRIAL_S:.0f} s; {_FIX}"
                )
            time.sleep(1e-4)

    def _call(self, function: Any, word: int, value: int, flags: int) -> None:
        code = function(self._stream.cuda_stream, self._address + word * WORD_BYTES, value, flags)
        if code != 0:
            raise TransferError(f"{function.__name__}: error {code} of the CUDA driver (CUresult)")


def _driver_function(name: str) -> Any:
    """A function ``(CUstream, CUdeviceptr, cuuint32_t, unsigned int) -> CUresult`` of the driver.

    The second version of these needs no switch of the kernel module; it came with CUDA 11.7.
    """
    try:
        function = getattr(ctypes.CDLL("libcuda.so.1"), f"{name}_v2")
    except (OSError, AttributeError) as error:
        raise OptionError(
            f"mode 'disk' on a GPU needs {name} of a CUDA driver 11.7 or later ({error}); {_FIX}"
        ) from error
    function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function
