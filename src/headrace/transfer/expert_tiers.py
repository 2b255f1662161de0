"""The cache of a GPU above experts in files: slots on the device, and host memory. The least recently used leave.

An expert is in one of the two at most (*exclusive*): what comes to a slot leaves host memory, and what leaves a slot is
copied there, so both hold as many experts as there are slots in all. An expert that finds no slot is read in an
overflow row, and stays in host memory.

All copies are on the stream that computes. So no row of the device is overwritten while a kernel reads it, and a copy
to a row of host memory comes after those from it. What threads read goes to rows from which no copy is under way: a
step begins when the copies of the steps before have ended, and within it a row for reads is used again after its copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from headrace.experts.rows import CacheStreamOrder, MakesCache
from headrace.plan.cached_experts import CachedLayer
from headrace.stores.expert_files import ExpertFiles
from headrace.stores.sources import Copy
from headrace.transfer.expert_reads import ExpertReader, FileCache
from headrace.transfer.link import Transfer


def open_caches(store: ExpertFiles, turn: CacheStreamOrder) -> MakesCache[FileCache]:
    """A function that makes the cache of each layer; ``turn``: stream order of all of them.

    Raises:
        OptionError: the system starts no more threads.
    """
    store.readers = reader = ExpertReader()
    staging = Staging(store.staging)

    def make(layer: CachedLayer, rows: Mapping[str, torch.Tensor], shift: int, check: Callable[[], None]) -> FileCache:
        parts = [(rows[name], store.parts[name]) for name in layer.storages]
        if not store.staging:
            return FileCache(layer, parts, reader, turn, shift, check)
        return TieredCache(layer, parts, reader, turn, shift, check, store.host_rows(layer), staging)

    return make


class Staging:
    """Rows of host memory through which experts of all layers pass on their way from files to a device.

    Attributes:
        idle: numbers of the rows that no thread writes; from the first ones a copy may still be under way.
    """

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        """``rows``: uint8, 1-D, each as long as the largest expert."""
        self._rows = rows
        self.idle, self._copied = deque[int](), dict[int, torch.cuda.Event]()

    def begin(self) -> None:
        """No thread writes a row, and no copy from one is under way."""
        self.idle = deque(range(len(self._rows)))
        self._copied.clear()

    def take(self, sizes: Sequence[int]) -> tuple[int, tuple[torch.Tensor, ...]]:
        """The number of an idle row, from which no copy is under way, and parts of it."""
        number = self.idle.popleft()
        if (copied := self._copied.pop(number, None)) is not None:
            copied.synchronize()
        return number, self._rows[number][: sum(sizes)].split(list(sizes))

    def give(self, number: int, device: torch.device) -> None:
        """A row is idle after the copies that were started."""
        if device.type == "cuda":
            self._copied[number] = torch.cuda.Event()
            self._copied[number].record(torch.cuda.current_stream(device))
        self.idle.append(number)


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    """Start a copy on the current stream."""
    into.copy_(source, non_blocking=True)


class _Read(NamedTuple):
    """An expert that threads read, into parts of a row of the staging, or of host memory at ``place``."""

    expert: int
    parts: Sequence[torch.Tensor]
    transfers: Sequence[Transfer]
    number: int | None
    place: int | None


class TieredCache(FileCache):
    """The slots of one layer, and its rows of host memory."""

    def __init__(
        self,
        layer: CachedLayer,
        parts: Sequence[tuple[torch.Tensor, Sequence[Sequence[Copy]]]],
        reader: ExpertReader,
        turn: CacheStreamOrder,
        shift: int,
        check: Callable[[], None],
        held: Sequence[torch.Tensor],
        staging: Staging,
    ) -> None:
        """``held``: of each tensor its rows of host memory; others: see :class:`FileCache`."""
        super().__init__(layer, parts, reader, turn, shift, check)
        self._device = parts[0][0].device
        self._host_slots, self._held, self._staging = layer.host_slots or 0, held, staging
        self._place_of: dict[int, int] = {}  # the experts in host memory, the least recently used first

    def _fill(self, row_of: Mapping[int, int], leaving: Mapping[int, int]) -> None:
        self._synchronize()
        self._staging.begin()
        places = self._place_of
        free = sorted(set(range(self._host_slots)).difference(places.values()))
        waiting = deque(expert for expert in row_of if expert not in places)
        # Before a copy to any place starts: threads write there.
        without_slot = [expert for expert in waiting if row_of[expert] >= self.num_slots]
        found = ((expert, self._free_place(free, row_of)) for expert in without_slot)
        staying = {expert: place for expert, place in found if place is not None}
        reads = deque[_Read]()
        with torch.inference_mode():  # the offload may have begun there, and torch refuses to write to it elsewhere
            self._start(waiting, staying, reads)
            self._exchange(row_of, leaving, free)
            while reads:
                self._land(reads.popleft(), row_of)
                self._start(waiting, staying, reads)
        for expert in [expert for expert in row_of if expert in places]:
            places[expert] = places.pop(expert)

    def _synchronize(self) -> None:
        """Return when no copy is under way."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _free_place(self, free: list[int], used: Collection[int]) -> int | None:
        """A place in host memory, of ``free`` or of the oldest expert that is not ``used``; ``None``: there is none."""
        if free:
            return free.pop()
        oldest = next((expert for expert in self._place_of if expert not in used), None)
        return None if oldest is None else self._place_of.pop(oldest)

    def _exchange(self, row_of: Mapping[int, int], leaving: Mapping[int, int], free: list[int]) -> None:
        """Copy experts in host memory to their rows, and there what leaves a slot, in place of those or of the oldest.

        No expert is looked for in either while its bytes are under way: an interrupt may come between two lines.
        """
        places, takers = self._place_of, {row: expert for expert, row in row_of.items()}
        for expert in [each for each, row in row_of.items() if each in places and row not in leaving]:
            self._copy_up(places[expert], row_of[expert])
            if row_of[expert] < self.num_slots:
                free.append(places.pop(expert))
        for slot, expert in leaving.items():
            if (place := places.pop(takers[slot], None)) is not None:
                # All slots are full, so at most as many experts as there are overflow rows are missing, and this one
                # has a slot: the last overflow row is free.
                spare = self._overflow[-1]
                self._copy_up(place, spare)
                self._copy_down(slot, place)
                for rows, _ in self._parts:
                    _copy(rows[slot], rows[spare])
            elif (place := self._free_place(free, row_of)) is not None:
                self._copy_down(slot, place)
            if place is not None:
                places[expert] = place

    def _copy_up(self, place: int, row: int) -> None:
        for (rows, _), held in zip(self._parts, self._held, strict=True):
            _copy(rows[row], held[place])

    def _copy_down(self, row: int, place: int) -> None:
        for (rows, _), held in zip(self._parts, self._held, strict=True):
            _copy(held[place], rows[row])

    def _start(self, waiting: deque[int], staying: Mapping[int, int], reads: deque[_Read]) -> None:
        """Start reads of the first of ``waiting``, as far as there are rows for them."""
        sizes = [rows.shape[1] for rows, _ in self._parts]
        while waiting and (waiting[0] in staying or self._staging.idle):
            expert, number = waiting.popleft(), None
            if (place := staying.get(expert)) is None:
                number, parts = self._staging.take(sizes)
            else:
                parts = tuple(held[place] for held in self._held)
            pairs = zip(self._parts, parts, strict=True)
            transfers = [self._reader.start(expert, copies[expert], part) for (_, copies), part in pairs]
            reads.append(_Read(expert, parts, transfers, number, place))

    def _land(self, read: _Read, row_of: Mapping[int, int]) -> None:
        """Copy what was read to its row, when it has been."""
        self._reader.wait(read.transfers)
        for (rows, _), part in zip(self._parts, read.parts, strict=True):
            _copy(rows[row_of[read.expert]], part)
        if read.number is not None:
            self._staging.give(read.number, self._device)
        if read.place is not None:
            self._place_of[read.expert] = read.place
