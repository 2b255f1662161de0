"""The store of cached experts: every tensor in a range of rows that begins with its slots on the device.

The driver makes memory as slowly as files are read, so threads make one range after another while those before are
filled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from headrace.memory.split_range import MappedMemory, SplitRange
from headrace.plan.cached_experts import CachedLayer, overflow_memories
from headrace.stores.sources import ByteRange, Copy
from headrace.stores.store import AlreadyPinned, Destinations, Store, StoreRequest, new_buffer

# The driver makes host memory at 4.3 GB/s in one thread, at 5.9 in four, at 6.0 in sixteen (H200).
_THREADS = 4


def open_experts(request: StoreRequest) -> ExpertRanges:
    """The store of the cached experts of a plan; raises as :class:`ExpertRanges` does."""
    return ExpertRanges(request.plan.cached, request.device, request.pooled)


class ExpertRanges(Store):
    """Made empty; write each storage to its place in :attr:`destinations`, then :meth:`finish`.

    Attributes:
        destinations: by storage, where its bytes go (uint8, 1-D, host); asking for one waits until its range is made.
            What is in its range already has none.
    """

    def __init__(
        self, layers: Sequence[CachedLayer], device: torch.device, held: Mapping[str, AlreadyPinned] | None = None
    ) -> None:
        """Begin to take the memory of all ``layers``; of storages ``held`` in memory that can be mapped, that one.

        What asks for a range raises, where one of its memories has no room, BudgetError, and where the driver cannot
        map both into one range, OptionError.
        """
        self._layer_of = {name: layer for layer in layers for name in layer.storages}
        self._device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the driver cannot use what torch's allocator holds without need
        split = [name for name, layer in self._layer_of.items() if layer.is_split(name)]
        self._mapped = {
            name: memory for name in split if (memory := mappable(self._layer_of[name], name, held or {})) is not None
        }
        shared = overflow_memories(layers) if device.type == "cuda" else ()
        self._overflow = {(index, size): MappedMemory(size, device, device) for index, size in shared}
        self._pool = ThreadPoolExecutor(_THREADS, "headrace-ranges")
        if device.type == "cuda":  # or the first token would wait for Triton; what fails here is raised at the launch
            self._pool.submit(_compile_kernels, layers, device)
        self._ranges: dict[str, Future[SplitRange]] = {name: self._pool.submit(self._make, name) for name in split}
        filled = [name for name in self._layer_of if name not in self._mapped]
        self.destinations: Mapping[str, torch.Tensor] = Destinations(filled, self._host)
        small = self._layer_of.keys() - self._ranges.keys()
        self._small = {name: new_buffer(self._layer_of[name].storages[name]) for name in small}
        self._small_rows = {
            name: torch.empty(self._layer_of[name].range_bytes(name), dtype=torch.uint8, device=device)
            for name in small
        }

    def _make(self, storage: str) -> SplitRange:
        layer = self._layer_of[storage]
        start, end = layer.host_start(storage), layer.range_bytes(storage)
        memory = self._overflow.get(layer.overflow_memories.get(storage, (0, 0)))
        shared = None if memory is None else (layer.overflow_start(storage), memory)
        return SplitRange(layer.slots_bytes(storage), start, end, self._device, self._mapped.get(storage), shared)

    def _host(self, storage: str) -> torch.Tensor:
        if storage in self._small:
            return self._small[storage]
        layer = self._layer_of[storage]
        start = layer.first_row * layer.row_bytes(storage) - layer.host_start(storage)
        return self._ranges[storage].result().host[start : start + layer.storages[storage]]

    def finish(self) -> None:
        for made in self._ranges.values():
            made.result()
        self._mapped.clear()  # mapped a second time now
        self._overflow.clear()
        self._pool.shutdown()
        for name, rows in self._small_rows.items():
            rows[-self._small[name].numel() :].copy_(self._small[name])

    def free_slots(self) -> None:
        """Give up the device memory of the slots; addresses stay reserved. Idempotent."""
        for made in self._ranges.values():
            made.result().free_near()

    def take_slots(self) -> None:
        """Take memory for the slots again, at their addresses. Idempotent."""
        for made in self._ranges.values():
            made.result().take_near()

    def rows(self, storage: str) -> torch.Tensor:
        """All rows of ``storage``: uint8 [rows, bytes of a row], on the device."""
        layer = self._layer_of[storage]
        memory = self._small_rows[storage] if storage in self._small else self._ranges[storage].result().whole
        row = layer.row_bytes(storage)
        return memory[: layer.num_rows * row].view(layer.num_rows, row)

    def copies(self, storage: str) -> list[Copy]:
        return [Copy(ByteRange.of(self._host(storage)), 0)]

    def in_place(self, storage: str) -> torch.Tensor:
        return self._host(storage)

    def held(self, storage: str) -> AlreadyPinned | None:
        layer, made = self._layer_of[storage], self._ranges.get(storage)
        far = None if made is None else made.result().far
        begins_a_piece = layer.host_start(storage) == layer.first_row * layer.row_bytes(storage)
        return AlreadyPinned(far, 0, layer.storages[storage]) if far is not None and begins_a_piece else None

    @property
    def host_bytes(self) -> int:
        return sum(layer.host_bytes for layer in {id(layer): layer for layer in self._layer_of.values()}.values())

    @property
    def account(self) -> dict[str, int]:
        return {"host" if self._device.type == "cpu" else "host_pinned": self.host_bytes}

    def close(self) -> None:
        """Release the memory; it is freed with the last tensor that views it."""
        self._pool.shutdown(cancel_futures=True)
        self._ranges.clear()
        self._mapped.clear()
        self._overflow.clear()
        self._small.clear()
        self._small_rows.clear()


def _compile_kernels(layers: Sequence[CachedLayer], device: torch.device) -> None:
    from headrace.experts.cache import compile_kernels  # imports Triton

    compile_kernels(layers, device)


def mappable(layer: CachedLayer, storage: str, held: Mapping[str, AlreadyPinned]) -> MappedMemory | None:
    """The memory of ``storage``, if it can be the host part of its range as it is."""
    found = held.get(storage)
    if found is None or not isinstance(found.memory, MappedMemory):
        return None
    begins_a_piece = layer.host_start(storage) == layer.first_row * layer.row_bytes(storage)
    fits = found.memory.num_bytes == layer.range_bytes(storage) - layer.host_start(storage)
    return found.memory if begins_a_piece and fits and found.start == 0 else None
