"""Page-locked host memory, whoever it is for: made, pinned where it lies, and seen by a device."""

from __future__ import annotations

import warnings

import torch

from penstock.config import format_gib
from penstock.env import pin_memory_disabled, reader_threads
from penstock.errors import OptionError, PenstockWarning
from penstock.memory.pages import map_pages, populate_parallel
from penstock.memory.pinned import CudaRegistrar, HostRegistrar, PinnedBuffer

__all__ = [
    "device_view",
    "fresh",
    "new_pinned",
    "pin_shared",
    "pin_threads",
    "pinned_region",
    "pinning_disabled",
    "warn_refused",
]

MAX_TOUCH_THREADS = 16


def pin_threads(at_least: int = 1) -> int:
    """Threads that touch or fill host memory, see :func:`reader_threads`; more than sixteen bring nothing."""
    return min(MAX_TOUCH_THREADS, reader_threads(at_least))


def pinning_disabled() -> bool:
    """Whether ``PENSTOCK_DISABLE_PIN_MEMORY=1``; warns of what that costs."""
    if pin_memory_disabled():
        warnings.warn(
            "PENSTOCK_DISABLE_PIN_MEMORY=1: copies from ordinary memory are about five times slower, block the host "
            "and cannot be captured",
            PenstockWarning,
            stacklevel=2,
        )
        return True
    return False


def pinned_region(num_bytes: int) -> torch.Tensor:
    """Page-locked host memory: uint8, 1-D, exactly ``num_bytes`` long.

    Falls back to torch's pinned allocator, with a warning, when the driver refuses to register; is ordinary memory,
    with a warning, under ``PENSTOCK_DISABLE_PIN_MEMORY=1``.

    Raises:
        StateError: a graph is being captured.
    """
    if num_bytes == 0 or pinning_disabled():
        return torch.empty(num_bytes, dtype=torch.uint8)
    registrar = CudaRegistrar()
    pinned, code = new_pinned(num_bytes, registrar)
    if code == 0:
        return pinned.blob
    warn_refused(num_bytes, code)
    return registrar.allocate(num_bytes)


def new_pinned(num_bytes: int, registrar: HostRegistrar) -> tuple[PinnedBuffer, int]:
    """Host memory of exactly ``num_bytes``, and the code with which the driver took (0) or refused to register it.

    Raises:
        BudgetError: the system has no memory for it.
        StateError: a graph is being captured.
    """
    memory = PinnedBuffer(fresh(num_bytes))
    populate_parallel(memory.blob, pin_threads())
    return memory, memory.register(registrar)


def pin_shared(memory: PinnedBuffer, registrar: HostRegistrar, mend: str) -> None:
    """Pin memory that other processes share, which therefore cannot be replaced by memory of torch's allocator.

    Raises:
        BudgetError: the system has no memory for it.
        OptionError: the driver refuses to register it; ``mend`` says what to do besides checking limits.
        StateError: a graph is being captured.
    """
    populate_parallel(memory.blob, pin_threads())  # pages may be there, but not yet in this process's tables
    code = memory.register(registrar)
    if code != 0:
        raise OptionError(
            f"the driver refused to register {memory.blob.numel()} bytes of shared memory (cudaHostRegister: error "
            f"{code}); check `ulimit -l`, or {mend}"
        )


def fresh(num_bytes: int) -> torch.Tensor:
    """Ordinary memory of exactly ``num_bytes``, untouched: uint8, 1-D, host."""
    return torch.frombuffer(map_pages(num_bytes), dtype=torch.uint8)


def warn_refused(num_bytes: int, code: int) -> None:
    """Of memory that the driver has not registered, and that comes from torch's allocator instead."""
    warnings.warn(
        f"the driver refused to register {format_gib(num_bytes)} of host memory (cudaHostRegister: error {code}); "
        f"torch's pinned allocator is used instead, which is slower and rounds sizes up. Check `ulimit -l`",
        PenstockWarning,
        stacklevel=3,
    )


class _ArrayInterface:
    """Carries a pointer to torch by the CUDA array interface (version 3), and keeps its memory alive."""

    def __init__(self, blob: torch.Tensor) -> None:
        self.blob = blob
        self.__cuda_array_interface__ = {
            "shape": (blob.numel(),),
            "typestr": "|u1",
            "data": (blob.data_ptr(), False),
            "version": 3,
        }


def device_view(blob: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pinned host memory as a tensor of ``device``: same bytes, same address, nothing is copied.

    Under unified addressing the address of pinned memory is valid on the device; its kernels read over the link.

    Raises:
        OptionError: the device cannot address host memory.
    """
    try:
        view = torch.as_tensor(_ArrayInterface(blob), device=device)
    except (RuntimeError, ValueError) as error:
        raise OptionError(
            f"{device} cannot read host memory in place ({error}); set PENSTOCK_DISABLE_UVA=1 to move these tensors on "
            f"demand, or prefetch them"
        ) from error
    if view.data_ptr() != blob.data_ptr():
        raise OptionError(
            f"{device} has no unified addressing: a view of pinned memory became a copy; set PENSTOCK_DISABLE_UVA=1"
        )
    return view
