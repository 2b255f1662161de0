"""A link to the device that is slower: others copy on it, or it has fewer reads under way.

*Held.* What the link leaves to one kernel while another one reads, too.

Cached experts are fetched by a kernel that reads pinned memory, so another such kernel holds the link: how they share
it follows from how many programs of each have reads under way, and a copy engine's share is fixed. A launch takes about
25 ms and a thread keeps three ahead, so that Python's lock, which ``generate`` holds for 5 ms at a time, leaves no gap.

Streams share queues of the GPU, and one then waits for what another has ahead: with ``CUDA_DEVICE_MAX_CONNECTIONS=32``
hardly any do, and calibration takes another stream where the first one makes copies wait. The kernel takes the GPU and
its queue of commands from the model as well.

*Throttled.* The kernel that fetches experts has fewer programs, or smaller blocks, and nothing else runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

from harness import Timing, event_times, time_host
from headrace.experts import cache
from headrace.experts.kernels import fetch_kernel

# Beyond the L2 cache (50 MB), so that all reads cross the link: of the kernel, and of what measures.
_SOURCE, _PROBE, _ROW = 256 << 20, 128 << 20, 1 << 20
_AHEAD, _LOOK_S, _PATIENCE_S = 3, 10e-3, 20.0
_MOST_PROGRAMS, _PIECES_OF_A_PROGRAM, _MOST_PIECES = 256, 512, 1 << 15
_MOST_STREAMS, _MOST_LATENCY_MS = 8, 2.0  # behind three launches of one program it is 10 ms
_BLOCK = cache._BLOCK
_WORDS_OF_TARGET = 64 * _BLOCK


@triton.jit(do_not_specialize=["number", "end"])
def hold_kernel(
    source, target, taken, seen, number, end, PIECES: tl.constexpr, TARGETS: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy pieces of BLOCK words of 8 bytes until ``end`` are ``taken``, then write ``number`` to ``seen``; any grid.

    PIECES, TARGETS: in ``source`` and in ``target``. What programs take too many of, the next launch has fewer.
    """
    word = tl.arange(0, BLOCK)
    piece = tl.atomic_add(taken, 1)
    while piece < end:
        read = tl.multiple_of(source + piece % PIECES * BLOCK, 16) + word
        tl.store(target + piece % TARGETS * BLOCK + word, tl.load(read))
        piece = tl.atomic_add(taken, 1)
    tl.store(seen, tl.zeros([], tl.int64) + number)


class HeldLink:
    """The link of ``device``, a GPU, on which a kernel of another stream copies while :meth:`held`.

    Attributes:
        programs: of that kernel; :meth:`calibrate` chooses them.
    """

    def __init__(self, device: torch.device) -> None:
        self.programs = cache._PROGRAMS
        self._device, self._stream = device, torch.cuda.Stream(device)
        host = torch.zeros(_SOURCE + _PROBE + _ROW, dtype=torch.uint8, device="cpu", pin_memory=True)
        rows = torch.zeros(_PROBE + _ROW, dtype=torch.uint8, device=device)
        self._kept, self._source = (host, rows), host[:_SOURCE].view(torch.int64)
        self._target = torch.zeros(_WORDS_OF_TARGET, dtype=torch.int64, device=device)
        self._taken = torch.zeros(1, dtype=torch.int64, device=device)
        self._seen, self._end = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True), 0
        # For fetch_kernel rows of host and device are of one range, that begins on the device.
        count, first = _PROBE // _ROW, -(-rows.data_ptr() // _ROW)
        home = -(-(host.data_ptr() + _SOURCE) // _ROW) - first
        each = torch.arange(count, dtype=torch.int32, device=device)
        self._probe = (
            torch.cat([torch.full_like(each[:1], count), each]), each, home + each.long(),
            torch.tensor([[first * _ROW, _ROW // 8]], dtype=torch.int64, device=device),
        )  # fmt: skip
        torch.cuda.synchronize(device)

    def left_bytes_per_s(self) -> float:
        """Bytes per second of a copy as cached experts are fetched, on the current stream; waits for it."""

        def fetch() -> None:
            grid, block = (cache._PROGRAMS,), cache._BLOCK
            fetch_kernel[grid](*self._probe, NUM_TENSORS=1, WORD=tl.int64, BLOCK=block, num_warps=8)

        return _PROBE / Timing(tuple(event_times(fetch, 8)[1:])).ms * 1e3

    def latency_ms(self) -> float:
        """Median time of an op on the current stream that does next to nothing, waited for."""

        def step() -> None:
            self._target[:1].zero_()
            torch.cuda.current_stream(self._device).synchronize()

        return Timing(tuple(time_host(step, 20))).ms

    def calibrate(self, bytes_per_s: float) -> float:
        """Choose :attr:`programs` that leave ``bytes_per_s`` of the link, and a stream; returns what they leave.

        Raises:
            RuntimeError: the kernel does not run.
        """
        for _ in range(_MOST_STREAMS):
            with self.held(1):
                if self.latency_ms() < _MOST_LATENCY_MS:
                    break
            self._stream = torch.cuda.Stream(self._device)
        found: dict[int, float] = {}
        fewest, most = 1, _MOST_PROGRAMS
        while fewest <= most:
            programs = (fewest + most) // 2
            with self.held(programs):
                found[programs] = self.left_bytes_per_s()
            fewest, most = (programs + 1, most) if found[programs] > bytes_per_s else (fewest, programs - 1)
        self.programs = min(found, key=lambda programs: abs(found[programs] - bytes_per_s))
        return found[self.programs]

    @contextmanager
    def held(self, programs: int | None = None) -> Iterator[None]:
        """Within, the kernel copies, by ``programs`` or as calibrated; at most three launches end after it.

        Raises:
            RuntimeError: the kernel does not run.
        """
        ended, before = threading.Event(), int(self._seen)
        with ThreadPoolExecutor(1) as pool:
            copies = pool.submit(self._copy, programs or self.programs, ended)
            try:
                self._await_first(copies, before)
                yield
            finally:
                ended.set()
                copies.result()

    def _copy(self, programs: int, ended: threading.Event) -> None:
        launched, pieces = int(self._seen), self._source.numel() // _BLOCK
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            while not ended.is_set():
                if launched - int(self._seen) >= _AHEAD:
                    ended.wait(_LOOK_S)
                    continue
                launched += 1
                self._end += min(programs * _PIECES_OF_A_PROGRAM, _MOST_PIECES)
                hold_kernel[(programs,)](
                    self._source, self._target, self._taken, self._seen, launched, self._end, PIECES=pieces,
                    TARGETS=_WORDS_OF_TARGET // _BLOCK, BLOCK=_BLOCK, num_warps=8,
                )  # fmt: skip
            self._stream.synchronize()

    def _await_first(self, copies: Future[None], before: int) -> None:
        """Wait until a launch has ended, the kernel's compilation included."""
        deadline = time.monotonic() + _PATIENCE_S
        while int(self._seen) == before:
            if copies.done() or time.monotonic() > deadline:
                raise RuntimeError(f"held link: expected copies to run within {_PATIENCE_S:.0f} s, found none")
            time.sleep(1e-3)


class ThrottledLink(HeldLink):
    """The link with fewer reads of cached experts under way while :meth:`held`, which captured graphs keep.

    Attributes:
        block: words of 8 bytes that a program reads at once.
    """

    block = _BLOCK

    def calibrate(self, bytes_per_s: float) -> float:
        """Choose programs and a block with which experts are fetched at ``bytes_per_s``; returns what they reach."""
        found: dict[tuple[int, int], float] = {}
        for block in (_BLOCK // 8, _BLOCK // 4, _BLOCK // 2, _BLOCK):
            for self.programs in range(1, cache._PROGRAMS):
                self.block = block
                with self.held():
                    found[self.programs, block] = self.left_bytes_per_s()
                if found[self.programs, block] > bytes_per_s:
                    break
        self.programs, self.block = min(found, key=lambda each: abs(found[each] - bytes_per_s))
        return found[self.programs, self.block]

    @contextmanager
    def held(self, programs: int | None = None) -> Iterator[None]:
        before = cache._PROGRAMS, cache._BLOCK
        cache._PROGRAMS, cache._BLOCK = programs or self.programs, self.block
        try:
            yield
        finally:
            cache._PROGRAMS, cache._BLOCK = before
