"""The store of cached experts that stay in the checkpoint's files: slots, and what fills them.

Kernels read the slots where they are: in host memory, or in that of a GPU. Each tensor has rows: those of its slots,
and overflow rows behind them for the experts of a step that have no slot. Overflow rows of all layers are the same
memory, mapped behind the slots of each. Files are read past the page cache: what is read again soon is in a slot, and
pages beside it would hold it twice.

Between a GPU and the files there is host memory: of each layer some experts that are in no slot, and rows through which
those of all layers pass on their way.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch

from headrace.errors import OptionError
from headrace.formatting import listed
from headrace.memory.pages import Bytes, drop_pages, map_again, map_pages
from headrace.memory.pinned import pinned_region
from headrace.model.live_tensors import resident_rule
from headrace.plan.cached_experts import CachedLayer, host_memory_bytes, overflow_memories, staging_rows
from headrace.stats import ReadStats
from headrace.stores.checkpoint_files import DiskStore, open_units
from headrace.stores.file_reads import DiskOptions, can_read_direct
from headrace.stores.sources import Copy, clip
from headrace.stores.store import Store, StoreRequest, new_buffer, require_weights

if TYPE_CHECKING:
    from headrace.memory.split_range import MappedMemory, SplitRange


class RowWriter(Protocol):
    """Threads or streams that write rows."""

    def close(self) -> None: ...


def open_experts(request: StoreRequest) -> ExpertFiles:
    """Open the store of the cached experts of a plan.

    Raises:
        CheckpointError, OptionError: no files, or files that cannot be used.
        BudgetError: no memory for the slots.
    """
    layers, weights = request.plan.cached, require_weights(request.weights)
    bound = {name: request.bound[name] for layer in layers for name in layer.storages}
    disk, notes = request.disk, list[str]()
    if request.ranks is not None and request.device.type == "cuda":
        raise OptionError(
            "experts in files are cached by one process for its GPU, and this is one of several ranks: leave group= "
            "out, or keep the experts in host memory (mode 'cpu')"
        )
    if disk is None:
        parts = [part for each in bound.values() for part in weights.source(each.info).parts]
        through = [path.name for path in sorted({part.tensor.path for part in parts}) if not can_read_direct(path)]
        # Pages are dropped as soon as they are read.
        disk = DiskOptions(direct=not through, drop_cache=bool(through))
        if through:
            notes.append(
                f"experts are read through the page cache, which keeps no page of them: {listed(through, 'file')} on "
                f"a file system without direct reads (O_DIRECT)"
            )
    files = open_units(replace(request, disk=disk), (), bound).store
    try:
        if adopted := [name for name in bound if files.adopts(name)]:  # a write there would not reach the slots
            raise OptionError(
                f"the memory of {adopted[0]} (of {len(adopted)} weights) has another user (an alias such as .detach() "
                f"or a state_dict()), and experts are to be cached from the files, so that a write there would be "
                f"lost: drop it first (del), use experts=prefetch, or keep it resident ({resident_rule(adopted[0])})"
            )
        return ExpertFiles(layers, cast(DiskStore, files), request.device, tuple(notes))
    except BaseException:
        files.close()
        raise


class RowMemory(Protocol):
    """Memory of the rows of all layers."""

    def whole(self, storage: str) -> torch.Tensor:
        """The range of ``storage``: uint8, 1-D; between slots and overflow rows a GPU has nothing mapped."""

    def free(self) -> None:
        """Give the memory of all slots back; addresses stay. Idempotent."""

    def take(self) -> None:
        """Take memory for the slots again. Idempotent."""


class HostRows:
    """Rows in host memory, whose pages are taken when they are first written."""

    def __init__(self, layers: Sequence[CachedLayer]) -> None:
        """Take addresses; raises ``BudgetError`` where the system has none left."""
        # Anonymous and shared: each lives on in its last mapping.
        overflow = {key: np.frombuffer(mmap.mmap(-1, key[1]), np.uint8) for key in overflow_memories(layers)}
        self._pages = {name: self._map(layer, name, overflow) for layer in layers for name in layer.storages}

    @staticmethod
    def _map(layer: CachedLayer, storage: str, overflow: Mapping[tuple[int, int], Bytes]) -> tuple[Bytes, Bytes]:
        """Pages of the slots, and with them those of the overflow rows."""
        memory = layer.overflow_memories.get(storage)
        if memory is None:
            pages = map_pages(layer.num_rows * layer.row_bytes(storage), forks=True)
            return pages, pages[:0]
        start = layer.overflow_start(storage)
        pages = map_pages(start + memory[1], forks=True)
        map_again(overflow[memory], pages[start:])
        return pages, pages[start:]

    def whole(self, storage: str) -> torch.Tensor:
        return torch.from_numpy(self._pages[storage][0])

    def free(self) -> None:
        for pages, shared in self._pages.values():
            drop_pages(pages[: len(pages) - len(shared)])
            drop_pages(shared, shared=True)

    def take(self) -> None:
        """Nothing: the system gives pages when rows are written."""


class DeviceRows:
    """Rows in the memory of a GPU. Tensors with small rows have theirs beside what is given back."""

    def __init__(self, layers: Sequence[CachedLayer], device: torch.device) -> None:
        """Take memory; raises as :class:`headrace.memory.split_range.MappedMemory` does."""
        from headrace.memory.split_range import MappedMemory

        torch.cuda.empty_cache()  # the driver cannot use what torch's allocator holds without need
        overflow = {key: MappedMemory(key[1], device, device) for key in overflow_memories(layers)}
        self._ranges: dict[str, SplitRange] = {}
        self._small: dict[str, torch.Tensor] = {}
        for layer in layers:
            for name in layer.storages:
                if layer.is_split(name):
                    self._ranges[name] = self._make(layer, name, device, overflow)
                else:
                    self._small[name] = torch.empty(layer.range_bytes(name), dtype=torch.uint8, device=device)

    @staticmethod
    def _make(
        layer: CachedLayer, storage: str, device: torch.device, overflow: Mapping[tuple[int, int], MappedMemory]
    ) -> SplitRange:
        from headrace.memory.split_range import SplitRange

        memory = layer.overflow_memories.get(storage)
        near, start, end = layer.slots_bytes(storage), layer.overflow_start(storage), layer.range_bytes(storage)
        if memory is None:
            return SplitRange(near, end, end, device)
        end = start + memory[1]
        return SplitRange(near, end, end, device, shared=(start, overflow[memory]))

    def whole(self, storage: str) -> torch.Tensor:
        return self._small[storage] if storage in self._small else self._ranges[storage].whole

    def free(self) -> None:
        for made in self._ranges.values():
            made.free_near()

    def take(self) -> None:
        for made in self._ranges.values():
            made.take_near()


class ExpertFiles(Store):
    """Rows of cached experts, and the ranges of the files that fill each.

    Attributes:
        destinations: nothing is loaded before a step asks for it.
        notes: how files are read, where that is not as usual.
        writers: closed before the memory of the rows, and the files.
        device: where kernels read the rows.
        staging: rows (uint8, 1-D, pinned) through which experts pass on their way to a GPU; none for a CPU.
    """

    destinations: Mapping[str, torch.Tensor] = {}

    def __init__(
        self, layers: Sequence[CachedLayer], files: DiskStore, device: torch.device, notes: tuple[str, ...] = ()
    ) -> None:
        """Take memory for the rows of all ``layers`` on ``device``, and what the plan has between it and the files.

        Args:
            files: where all storages of the layers are; closed with this.

        Raises:
            BudgetError: device or system have no memory, or no address space, for them.
            OptionError: the driver cannot map memory of the device so.
        """
        self._layer_of = {name: layer for layer in layers for name in layer.storages}
        self._files, self.notes, self.device = files, notes, device
        self.writers = list[RowWriter]()
        on_gpu = device.type == "cuda"
        new_memory = partial(pinned_region, near=device) if on_gpu else new_buffer
        with torch.inference_mode(False):  # copies write to it outside of the caller's mode
            self._memory: RowMemory = DeviceRows(layers, device) if on_gpu else HostRows(layers)
            count, row_bytes = staging_rows(layers, on_gpu)
            self.staging = list(new_memory(count * row_bytes).view(count, -1)) if count else []
            self._held = {layer.module_fqn: new_memory(layer.host_bytes) for layer in layers if layer.host_slots}
        self._host_bytes = host_memory_bytes(layers, on_gpu)
        self._account = {"host_pinned" if on_gpu else "host": self._host_bytes}

    def rows(self, storage: str) -> torch.Tensor:
        """All rows of ``storage``: uint8 [rows, bytes of a row]."""
        layer = self._layer_of[storage]
        row = layer.row_bytes(storage)
        return self._memory.whole(storage)[: layer.num_rows * row].view(-1, row)

    def host_rows(self, layer: CachedLayer) -> list[torch.Tensor]:
        """Rows of host memory above the files, by storage: uint8 [experts that it holds, bytes of a row]."""
        count, sizes = layer.host_slots or 0, [layer.row_bytes(name) for name in layer.storages]
        memory = self._held.get(layer.module_fqn, new_buffer(0))
        parts = memory.split([count * size for size in sizes])
        return [part.view(count, size) for part, size in zip(parts, sizes, strict=True)]

    @cached_property
    def parts(self) -> Mapping[str, Sequence[tuple[Copy, ...]]]:
        """Ranges of the files that fill a row, by storage and expert."""
        found = {}
        for name, layer in self._layer_of.items():
            copies, size = self.copies(name), layer.row_bytes(name)
            # Sorted by where they go: of an expert's own tensors few fill its row.
            first, parts = 0, list[tuple[Copy, ...]]()
            for expert in range(layer.num_experts):
                start, end = expert * size, (expert + 1) * size
                while copies[first].dst_end <= start:
                    first += 1
                last = first
                while last < len(copies) and copies[last].dst_offset < end:
                    last += 1
                parts.append(tuple(clip(copies[first:last], start, end)))
            found[name] = parts
        return found

    def free_slots(self) -> None:
        """Give the memory of all slots back; addresses stay, and what host memory holds. Idempotent."""
        self._memory.free()

    def take_slots(self) -> None:
        """Take memory for the slots again, at their addresses. Idempotent."""
        self._memory.take()

    @property
    def reads(self) -> ReadStats:
        """How the files were read."""
        return self._files.reads

    def copies(self, storage: str) -> list[Copy]:
        return self._files.copies(storage)

    def adopts(self, storage: str) -> bool:
        return self._files.adopts(storage)

    def in_place(self, storage: str) -> torch.Tensor:
        return self._files.in_place(storage)

    @property
    def host_bytes(self) -> int:
        return self._files.host_bytes + self._host_bytes

    @property
    def account(self) -> dict[str, int]:
        return dict(Counter(self._files.account) + Counter(self._account))

    def close(self) -> None:
        """Release the memory; it is freed with the last tensor that views it."""
        for each in self.writers:
            each.close()
        self._files.close()
        self._held.clear()
        self.staging.clear()
        vars(self).pop("_memory", None)
