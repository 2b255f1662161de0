"""The store of cached experts: every tensor in a range of rows that begins with its slots on the device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from headrace.memory.split_range import SplitRange
from headrace.plan.cached_experts import CachedLayer
from headrace.stores.sources import ByteRange, Copy
from headrace.stores.store import Store, new_buffer

__all__ = ["ExpertRanges"]

# The driver makes host memory at 4.3 GB/s in one thread, at 5.9 in four, at 6.0 in sixteen (H200).
_THREADS = 4


class ExpertRanges(Store):
    """Made empty; write each storage to its :meth:`destination`, then :meth:`finish`."""

    def __init__(self, layers: Sequence[CachedLayer], device: torch.device) -> None:
        """Take the memory of all ``layers``.

        Raises:
            BudgetError: the device or the host has no room.
            OptionError: the driver cannot map both memories into one range.
        """
        self._layer_of = {name: layer for layer in layers for name in layer.storages}
        self._device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the driver cannot use what torch's allocator holds without need
        split = [name for name, layer in self._layer_of.items() if layer.is_split(name)]
        with ThreadPoolExecutor(_THREADS) as pool:
            self._ranges = dict(zip(split, pool.map(self._make, split), strict=True))
        small = self._layer_of.keys() - self._ranges.keys()
        self._small = {name: new_buffer(self._layer_of[name].storages[name]) for name in small}
        self._small_rows = {
            name: torch.empty(self._layer_of[name].range_bytes(name), dtype=torch.uint8, device=device)
            for name in small
        }

    def _make(self, storage: str) -> SplitRange:
        layer = self._layer_of[storage]
        start, end = layer.host_start(storage), layer.range_bytes(storage)
        return SplitRange(layer.slots_bytes(storage), start, end, self._device)

    def destination(self, storage: str) -> torch.Tensor:
        """Where the bytes of ``storage`` go: uint8, 1-D, host."""
        if storage in self._small:
            return self._small[storage]
        layer = self._layer_of[storage]
        start = layer.first_row * layer.row_bytes(storage) - layer.host_start(storage)
        return self._ranges[storage].host[start : start + layer.storages[storage]]

    def finish(self) -> None:
        for name, rows in self._small_rows.items():
            rows[-self._small[name].numel() :].copy_(self._small[name])

    def rows(self, storage: str) -> torch.Tensor:
        """All rows of ``storage``: uint8 [rows, bytes of a row], on the device."""
        layer = self._layer_of[storage]
        memory = self._small_rows[storage] if storage in self._small else self._ranges[storage].whole
        row = layer.row_bytes(storage)
        return memory[: layer.num_rows * row].view(layer.num_rows, row)

    def copies(self, storage: str) -> list[Copy]:
        return [Copy(ByteRange.of(self.destination(storage)), 0)]

    def in_place(self, storage: str) -> torch.Tensor:
        return self.destination(storage)

    @property
    def host_bytes(self) -> int:
        return sum(layer.host_bytes for layer in {id(layer): layer for layer in self._layer_of.values()}.values())

    @property
    def account(self) -> dict[str, int]:
        return {"host" if self._device.type == "cpu" else "host_pinned": self.host_bytes}

    def close(self) -> None:
        """Let go of the memory; the last tensor that views a range gives it back."""
        self._ranges.clear()
        self._small.clear()
        self._small_rows.clear()
