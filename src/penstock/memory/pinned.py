"""Host memory made known to the driver, and taken back from it when nobody looks into it any more.

Registration pins pages that are there already: about 30 GB/s, against 3 for an allocation by the driver. It must not
overlap the capture of a graph, which it would invalidate: registering is refused then, and what ends during a capture
is unregistered later. Garbage is collected in any thread, and to unregister is to wait for the device: so no device may
wait for a thread of this process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch

from penstock.errors import StateError

__all__ = ["CudaRegistrar", "HostRegistrar", "PinnedBuffer", "refuse_capture"]

# cudaErrorStreamCaptureUnsupported to cudaErrorStreamCaptureWrongThread (CUDA runtime API, cudaError).
_CAPTURE_ERRORS = range(900, 909)


class HostRegistrar(Protocol):
    """What pins memory; a test counts its calls."""

    @property
    def capturing(self) -> bool:
        """Whether a graph is being captured."""

    def register(self, address: int, num_bytes: int) -> int:
        """Pin ``num_bytes`` at ``address``; 0, or the driver's error code."""

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Pinned memory of the slow kind (uint8, 1-D, host), for when the driver refuses to register."""


class CudaRegistrar:
    """The CUDA runtime, on behalf of one device; memory is pinned for all devices (unified addressing)."""

    def __init__(self, device: torch.device | None = None) -> None:
        """``device``: whose context does it; default the current one."""
        self._device = device

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def register(self, address: int, num_bytes: int) -> int:
        # A thread starts on device 0, where it would make a context.
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
            if code != 0:
                _forget_last_error()
        return code

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # a kernel may still read the memory in place, and its pages are about to go
            torch.cuda.cudart().cudaHostUnregister(address)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _forget_last_error() -> None:
    """The runtime keeps the error of a refused call, and the next kernel launch would report it as its own."""
    if not torch.cuda.is_current_stream_capturing():
        with suppress(RuntimeError):
            torch.empty(1, device="cuda").fill_(0)


def refuse_capture(registrar: HostRegistrar) -> None:
    """Raise ``StateError`` while a graph is being captured."""
    if registrar.capturing:
        raise StateError(
            "an offload cannot begin or end while a CUDA graph is being captured: pinning host memory would invalidate "
            "the capture. Call penstock.offload before the capture begins, and remove() after it has ended"
        )


class _Owner:
    """Carries memory to numpy by the array interface (version 3); its end unregisters, then frees."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._registrar: HostRegistrar | None = None
        self.__array_interface__: dict[str, Any] = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }

    def register(self, registrar: HostRegistrar) -> int:
        code = registrar.register(self._memory.data_ptr(), self._memory.numel())
        if code == 0:
            self._registrar = registrar
        return code

    def unregister(self) -> None:
        registrar, self._registrar = self._registrar, None
        if registrar is not None:
            registrar.unregister(self._memory.data_ptr())

    def __del__(self) -> None:
        if self._registrar is None:
            return
        with suppress(Exception):  # the interpreter may be going down
            if self._registrar.capturing:
                _late.append(self)
            else:
                self.unregister()
                _unregister_late()


_late: list[_Owner] = []  # ended where they could not be unregistered


def _unregister_late() -> None:
    with suppress(IndexError):
        while True:
            _late.pop().unregister()


class PinnedBuffer:
    """A stretch of host memory and its registration; whoever holds a view of ``blob`` holds both.

    Attributes:
        blob: uint8, 1-D, host; the same memory as the tensor given, and not pinned before :meth:`register`.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        """``memory``: uint8, 1-D, contiguous, on the CPU, at least one byte. It is kept alive."""
        self._around(_Owner(memory))

    def _around(self, owner: _Owner) -> PinnedBuffer:
        self._owner = owner
        self.blob = torch.from_numpy(np.asarray(owner))
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PinnedBuffer) and self._owner is other._owner

    def __hash__(self) -> int:
        return hash(id(self._owner))

    def weakly(self) -> Callable[[], PinnedBuffer | None]:
        """What finds it again for as long as anybody holds a view of it, and holds nothing itself."""
        owner = weakref.ref(self._owner)

        def again() -> PinnedBuffer | None:
            found = owner()
            return None if found is None else PinnedBuffer.__new__(PinnedBuffer)._around(found)

        return again

    def register(self, registrar: HostRegistrar) -> int:
        """Pin it; 0, or the error code with which the driver refused.

        Raises:
            StateError: a graph is being captured, in this thread or another.
        """
        refuse_capture(registrar)
        _unregister_late()
        code = self._owner.register(registrar)
        if code in _CAPTURE_ERRORS:
            raise StateError(
                f"pinning host memory failed because another thread is capturing a CUDA graph (error {code}); offload "
                f"before captures begin"
            )
        return code

    def unregister(self) -> None:
        """Unpin it now, for memory that lives on as ordinary memory; no effect when it is not pinned."""
        self._owner.unregister()
        _unregister_late()
