"""Page-locked (pinned) host memory: registered with the driver, unregistered, and addressed by a device.

Registration pins pages that exist already: about 30 GB/s, against 3 for an allocation by the driver. It must not
overlap the capture of a graph, which it would invalidate: registering is refused then, and memory that ends during a
capture is unregistered later. Garbage is collected in any thread, and to unregister is to wait for the device: so no
device may wait for a thread of this process.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from headrace.config import pin_memory_disabled
from headrace.errors import OptionError, StateError, warn_user
from headrace.formatting import format_size
from headrace.memory.pages import RawMemory, give_back, map_pages, populate_parallel
from headrace.memory.system import cpus_near, is_wsl, touch_threads

# glibc never raises its threshold for mappings above this (DEFAULT_MMAP_THRESHOLD_MAX, mallopt(3)), so a larger tensor
# shares no page with anything else that may be pinned one day.
MIN_ADOPTED_BYTES = 32 << 20
# cudaErrorStreamCaptureUnsupported to cudaErrorStreamCaptureWrongThread (CUDA runtime API, cudaError).
_CAPTURE_ERRORS = range(900, 909)
_MAPS_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+)")


class CudaRegistrar:
    """Pins memory by the CUDA runtime, on behalf of one device; it is pinned for all devices (unified addressing)."""

    def __init__(self, device: torch.device | None = None) -> None:
        """``device``: its context is used; default the current one."""
        self._device = device

    @property
    def capturing(self) -> bool:
        """Whether a graph is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def register(self, address: int, num_bytes: int) -> int:
        """Pin ``num_bytes`` at ``address``; 0, or the driver's error code."""
        # A thread starts on device 0, where it would make a context.
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
            if code != 0 and not self.capturing:
                # The runtime keeps the error of a refused call, and the next kernel launch would report it as its own.
                with suppress(RuntimeError):
                    torch.empty(1, device="cuda").fill_(0)
        return code

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # a kernel may still read the memory in place, and its pages are about to go
            torch.cuda.cudart().cudaHostUnregister(address)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Pinned memory of the slow kind (uint8, 1-D, host), for when the driver refuses to register."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")


def refuse_capture(registrar: CudaRegistrar) -> None:
    """Raise ``StateError`` while a graph is being captured."""
    if registrar.capturing:
        raise StateError(
            "an offload cannot begin or end while a CUDA graph is being captured: pinning host memory would invalidate "
            "the capture. Call headrace.offload before the capture begins, and remove() after it has ended"
        )


class PinnedBuffer(RawMemory):
    """A range of host memory and its registration; a view of ``buffer`` keeps both alive, and their end unregisters."""

    def __init__(self, memory: torch.Tensor) -> None:
        """``memory``: uint8, 1-D, contiguous, on the CPU, at least one byte. It is kept alive, and not pinned yet."""
        super().__init__(memory.data_ptr(), memory.numel(), keeps=memory)
        self._address, self.num_bytes = memory.data_ptr(), memory.numel()
        self._registrar: CudaRegistrar | None = None

    @property
    def buffer(self) -> torch.Tensor:
        """The memory: uint8, 1-D, host."""
        return torch.from_numpy(np.asarray(self))

    def register(self, registrar: CudaRegistrar) -> int:
        """Pin it; 0, or the error code with which the driver refused.

        Raises:
            StateError: a graph is being captured, in this thread or another.
        """
        refuse_capture(registrar)
        give_back(_ended, PinnedBuffer.unregister)
        code = registrar.register(self._address, self.num_bytes)
        if code == 0:
            self._registrar = registrar
        if code in _CAPTURE_ERRORS:
            raise StateError(
                f"pinning host memory failed because another thread is capturing a CUDA graph (error {code}); offload "
                f"before captures begin"
            )
        return code

    def unregister(self) -> None:
        """Unpin it now, for memory that lives on as ordinary memory; no effect when it is not pinned."""
        registrar, self._registrar = self._registrar, None
        if registrar is None:
            return
        try:
            registrar.unregister(self._address)
        except Exception:  # another thread is capturing, so the device cannot be waited for
            self._registrar = registrar
            raise

    def __del__(self) -> None:
        if self._registrar is None:
            return
        with suppress(Exception):  # the interpreter may be going down
            _ended.append(self)
            if not self._registrar.capturing:
                give_back(_ended, PinnedBuffer.unregister)


_ended: list[PinnedBuffer] = []  # and still registered: to unregister it is to wait for the device


# -- making ------------------------------------------------------------------------------------------------------------


def pinning_disabled() -> bool:
    """Whether ``HEADRACE_DISABLE_PIN_MEMORY=1``; warns of what that costs."""
    if pin_memory_disabled():
        warn_user(
            "HEADRACE_DISABLE_PIN_MEMORY=1: copies from ordinary memory are about five times slower, block the host "
            "and cannot be captured"
        )
        return True
    return False


def pinned_region(num_bytes: int, near: torch.device | None = None) -> torch.Tensor:
    """Page-locked host memory: uint8, 1-D, exactly ``num_bytes`` long, and of the host's node at ``near``.

    Falls back to torch's pinned allocator, with a warning, when the driver refuses to register; is ordinary memory,
    with a warning, under ``HEADRACE_DISABLE_PIN_MEMORY=1``.

    Raises:
        StateError: a graph is being captured.
    """
    if num_bytes == 0 or pinning_disabled():
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    registrar = CudaRegistrar()
    # Pages lie where the thread runs that touches them first, or one that it starts.
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, (cpus_near(near) if near is not None else None) or before)
    try:
        pinned, code = new_pinned(num_bytes, registrar)
    finally:
        os.sched_setaffinity(0, before)
    if code == 0:
        return pinned.buffer
    warn_refused(num_bytes, code)
    return registrar.allocate(num_bytes)


def new_pinned(num_bytes: int, registrar: CudaRegistrar) -> tuple[PinnedBuffer, int]:
    """Host memory of exactly ``num_bytes``, and the code with which the driver took (0) or refused to register it.

    Raises:
        BudgetError: the system has no memory for it.
        StateError: a graph is being captured.
    """
    memory = PinnedBuffer(torch.from_numpy(map_pages(num_bytes)))
    populate_parallel(memory.buffer, touch_threads())
    return memory, memory.register(registrar)


def pin_shared(memory: PinnedBuffer, registrar: CudaRegistrar, fix: str) -> None:
    """Pin memory that other processes share, which therefore cannot be replaced by memory of torch's allocator.

    Raises:
        BudgetError: the system has no memory for it.
        OptionError: the driver refuses to register it; ``fix``: what to do besides checking limits.
        StateError: a graph is being captured.
    """
    populate_parallel(memory.buffer, touch_threads())  # pages may exist, but not yet in this process's tables
    code = memory.register(registrar)
    if code != 0:
        raise OptionError(
            f"the driver refused to register {memory.num_bytes} bytes of shared memory (cudaHostRegister: error "
            f"{code}); {pinning_fix()}, or {fix}"
        )


def warn_refused(num_bytes: int, code: int) -> None:
    """Warn that the driver refused to register memory, and that torch's allocator is used instead."""
    warn_user(
        f"the driver refused to register {format_size(num_bytes)} of host memory (cudaHostRegister: error {code}); "
        f"torch's pinned allocator is used instead, which is slower and rounds sizes up; {pinning_fix()}"
    )


def pinning_fix() -> str:
    """Advice where the driver refuses to pin memory."""
    return "Windows limits what WSL may pin: raise memory= in .wslconfig" if is_wsl() else "check `ulimit -l`"


def device_view(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pinned host memory as a tensor of ``device``: same bytes, same address, nothing is copied.

    Under unified addressing the address of pinned memory is valid on the device; its kernels read over the link.

    Raises:
        OptionError: the device cannot address host memory.
    """
    try:
        view = torch.as_tensor(RawMemory(buffer.data_ptr(), buffer.numel(), keeps=buffer), device=device)
    except (RuntimeError, ValueError) as error:
        raise OptionError(
            f"{device} cannot read host memory in place ({error}); set HEADRACE_DISABLE_UVA=1 to move these tensors on "
            f"demand, or prefetch them"
        ) from error
    if view.data_ptr() != buffer.data_ptr():
        raise OptionError(
            f"{device} has no unified addressing: a view of pinned memory became a copy; set HEADRACE_DISABLE_UVA=1"
        )
    return view


# -- pinning memory that exists ---------------------------------------------------------------------------------------


def can_pin_in_place(buffer: torch.Tensor, alignment: int = 1) -> bool:
    """Whether ``buffer`` (uint8, 1-D, host) may be pinned in place, instead of being copied into a slab.

    Args:
        buffer: at least 99 % of its storage, since all of the storage is kept.
        alignment: of its address; kernels that read it in place need that of a slab for the same bits, copies do not.
    """
    if not buffer.is_cpu or buffer.numel() < MIN_ADOPTED_BYTES or buffer.is_pinned():
        return False
    if buffer.untyped_storage().nbytes() > 1.01 * buffer.numel():
        return False
    if buffer.data_ptr() % alignment:
        return False
    maps = Path("/proc/self/maps").read_text()
    return is_anonymous(maps, buffer.data_ptr(), buffer.data_ptr() + buffer.numel())


def is_anonymous(maps: str, start: int, end: int) -> bool:
    """Whether the addresses from ``start`` to ``end`` are private, writable and no file's (proc_pid_maps(5)).

    Pinning pages of a mapped file would copy each of them, one by one.
    """
    for line in maps.splitlines():
        found = _MAPS_LINE.match(line)
        if found is None:
            continue
        first, last = int(found[1], 16), int(found[2], 16)
        if first <= start < last:
            if not found[3].startswith("rw") or found[3][3] != "p" or found[4] != "0":
                return False
            start = last
        if start >= end:
            return True
    return False
