"""The store of cached experts that stay in the checkpoint's files: slots in host memory, and what fills them.

A CPU's kernels read the slots where they are. Each tensor has rows: those of its slots, and overflow rows behind them
for the experts of a step that have no slot. Overflow rows of all layers are the same memory, mapped behind the slots of
each. Files are read past the page cache: what is read again soon is in a slot, and pages beside it would hold it twice.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol, cast

import numpy as np
import torch

from headrace.errors import OptionError
from headrace.formatting import listed
from headrace.memory.pages import Bytes, drop_pages, map_again, map_pages
from headrace.model.live_tensors import resident_rule
from headrace.plan.cached_experts import CachedLayer, overflow_memories
from headrace.stats import ReadStats
from headrace.stores.checkpoint_files import DiskStore, open_units
from headrace.stores.file_reads import DiskOptions, can_read_direct
from headrace.stores.sources import Copy, clip
from headrace.stores.store import Store, StoreRequest, require_weights


class Readers(Protocol):
    """Threads that read into the rows."""

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
        return ExpertFiles(layers, cast(DiskStore, files), tuple(notes))
    except BaseException:
        files.close()
        raise


class ExpertFiles(Store):
    """Rows of cached experts, and the ranges of the files that fill each.

    Attributes:
        destinations: nothing is loaded before a step asks for it.
        notes: how the files are read, where that is not past the page cache.
        readers: closed before the files.
    """

    destinations: Mapping[str, torch.Tensor] = {}

    def __init__(self, layers: Sequence[CachedLayer], files: DiskStore, notes: tuple[str, ...] = ()) -> None:
        """Take addresses for the rows of all ``layers``; their pages are taken when they are first written.

        Args:
            files: where all storages of the layers are; closed with this.

        Raises:
            BudgetError: the system has no memory, or no address space, for them.
        """
        self._layer_of = {name: layer for layer in layers for name in layer.storages}
        self._files, self.notes = files, notes
        self.readers: Readers | None = None
        # Anonymous and shared: each lives on in its last mapping.
        overflow = {key: np.frombuffer(mmap.mmap(-1, key[1]), np.uint8) for key in overflow_memories(layers)}
        self._pages = {name: self._map(layer, name, overflow) for name, layer in self._layer_of.items()}

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

    def rows(self, storage: str) -> torch.Tensor:
        """All rows of ``storage``: uint8 [rows, bytes of a row]."""
        layer = self._layer_of[storage]
        row = layer.row_bytes(storage)
        return torch.from_numpy(self._pages[storage][0])[: layer.num_rows * row].view(-1, row)

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
        """Give the memory of all rows back; addresses stay. Idempotent."""
        for pages, shared in self._pages.values():
            drop_pages(pages[: len(pages) - len(shared)])
            drop_pages(shared, shared=True)

    def take_slots(self) -> None:
        """Nothing: the system gives pages when rows are written."""

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
        return self._files.host_bytes

    @property
    def account(self) -> dict[str, int]:
        return self._files.account

    def close(self) -> None:
        """Release the memory; it is freed with the last tensor that views it."""
        if self.readers is not None:
            self.readers.close()
        self._files.close()
        self._pages.clear()
