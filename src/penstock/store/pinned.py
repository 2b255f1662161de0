"""Pinned host memory of exact size, and the ``cpu`` store of a GPU that is made of it.

torch's pinned allocator takes 0.3 s per GiB and rounds every size up to a power of two. Ordinary memory that is mapped,
touched by several threads and then registered with the driver takes a ninth of that, has exactly the size asked for,
and copies just as fast. One region holds all slabs of an offload; whoever holds a view of it holds the region.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch

from penstock.config import format_gib, pin_memory_disabled
from penstock.errors import OptionError, PenstockWarning
from penstock.plan.model import SLAB_ALIGNMENT_BYTES, Unit
from penstock.store.base import Load, Segment, Store
from penstock.store.cpu import MemorySource
from penstock.store.pages import map_pages, populate_parallel

__all__ = ["PinnedStore", "device_view", "pinned_region"]


class _RegisteredMap(mmap.mmap):
    """An anonymous mapping known to the driver; tensors made from it keep it alive, its end unregisters it."""

    address: int = 0

    def __del__(self) -> None:
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)
            self.address = 0


def pinned_region(num_bytes: int) -> torch.Tensor:
    """Page-locked host memory: uint8, 1-D, exactly ``num_bytes`` long.

    Falls back to torch's pinned allocator, with a warning, when the driver refuses to register; is ordinary memory,
    with a warning, under ``PENSTOCK_DISABLE_PIN_MEMORY=1``.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if pin_memory_disabled():
        warnings.warn(
            "PENSTOCK_DISABLE_PIN_MEMORY=1: copies from ordinary memory are about five times slower, block the host "
            "and cannot be captured",
            PenstockWarning,
            stacklevel=2,
        )
        return torch.empty(num_bytes, dtype=torch.uint8)
    mapping = map_pages(num_bytes, kind=_RegisteredMap)
    region = torch.frombuffer(mapping, dtype=torch.uint8)
    populate_parallel(region, min(16, len(os.sched_getaffinity(0))))
    code = int(torch.cuda.cudart().cudaHostRegister(region.data_ptr(), num_bytes, 0))
    if code == 0:
        mapping.address = region.data_ptr()
        return region
    warnings.warn(
        f"the driver refused to register {format_gib(num_bytes)} of host memory (cudaHostRegister: error {code}); "
        f"torch's pinned allocator is used instead, which is slower and rounds sizes up. Check `ulimit -l`",
        PenstockWarning,
        stacklevel=2,
    )
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class PinnedStore(Store):
    """Slabs of units, and storages that are read in place, side by side in one pinned region.

    ``fill(storage, into)`` is called once per storage, in order, to write its bytes (``into``: uint8, 1-D, host).
    """

    mode = "cpu"

    def __init__(
        self, units: Sequence[Unit], in_place: Mapping[str, int], fill: Callable[[str, torch.Tensor], None]
    ) -> None:
        starts, places, end = [], {}, 0
        for unit in units:
            starts.append(end)
            places.update({entry.storage: (end + entry.offset, entry.num_bytes) for entry in unit.entries})
            end += unit.num_bytes
        for name, num_bytes in in_place.items():
            places[name] = (end, num_bytes)
            end += -(-num_bytes // SLAB_ALIGNMENT_BYTES) * SLAB_ALIGNMENT_BYTES
        self._region = pinned_region(end)
        self._slabs = [self._region[s : s + unit.num_bytes] for s, unit in zip(starts, units, strict=True)]
        self._blobs = {name: self._region[start : start + size] for name, (start, size) in places.items()}
        for name, blob in self._blobs.items():
            fill(name, blob)

    def segments(self, storage: str) -> list[Segment]:
        blob = self._blobs[storage]
        return [Segment(MemorySource(blob), 0, blob.numel())]

    def load(self, unit: Unit) -> Load:
        return Load(unit.index, tuple(self.unit_segments(unit)), self._slabs[unit.index])

    def in_place(self, storage: str) -> torch.Tensor:
        return self._blobs[storage]

    @property
    def host_bytes(self) -> int:
        return self._region.numel()

    def close(self) -> None:
        """Let go of the region; the last view of it unregisters the memory."""
        self._slabs.clear()
        self._blobs.clear()
        self._region = torch.empty(0, dtype=torch.uint8)


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
