"""The cache of a GPU above experts in files: slots on the device, and host memory. The least recently used leave.

An expert is in one of the two at most (*exclusive*): what comes to a slot leaves host memory, and what leaves a slot is
copied there, so both hold as many experts as there are slots in all. An expert that finds no slot is read in an
overflow row, and stays in host memory.

Copies go both ways at once, on two streams beside the one that computes. In a step of a layer, in this order:

1. Threads start to read, into rows of the staging from which no copy is under way, or into places of host memory
   after all copies from and to them.
2. The stream *up* waits for the kernels and the copies of all steps before. It copies each expert that leaves a slot to
   an overflow row of its own, then experts from host memory to their rows, and then those that threads have read.
3. The stream *down* copies from the overflow rows to host memory, after the copies up from there. The step does not
   wait for it; the stream up does in the next step, before it writes to any row.
4. The stream that computes waits for the stream up.

After a step with all experts of a layer, as a prompt is, threads fill the staging with experts of the next layer while
this one computes (*ahead*). What the next step does not use of that is dropped.

An expert is noted as held only when the copies that bring it have been started, and is forgotten before its row or
place is given away. So whatever an interrupt leaves, what is noted has the right bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from headrace.experts.rows import CacheStreamOrder, MakesCache
from headrace.model.torch_private import copy_each
from headrace.plan.cached_experts import CachedLayer
from headrace.stores.expert_files import ExpertFiles
from headrace.stores.sources import Copy
from headrace.transfer.cuda_stream import CurrentStream, give_streams, take_stream
from headrace.transfer.expert_reads import ExpertReader, FileCache
from headrace.transfer.link import ThreadTransfer


def open_caches(store: ExpertFiles, turn: CacheStreamOrder) -> MakesCache[FileCache]:
    """A function that makes the cache of each layer; ``turn``: stream order of all of them.

    Raises:
        OptionError: the system starts no more threads.
    """
    reader, staging, streams = ExpertReader(), Staging(store.staging), Streams(store.device)
    store.writers += (reader, streams)
    latest: TieredCache | None = None

    def make(layer: CachedLayer, rows: Mapping[str, torch.Tensor], shift: int, check: Callable[[], None]) -> FileCache:
        nonlocal latest
        parts = [(rows[name], store.parts[name]) for name in layer.storages]
        if not store.staging:
            return FileCache(layer, parts, reader, turn, shift, check)
        cache = TieredCache(layer, parts, reader, turn, shift, check, store.host_rows(layer), staging, streams)
        if latest is not None:
            latest.next = cache
        latest = cache
        return cache

    return make


class Event(Protocol):
    """Methods of an event of CUDA that are used."""

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """Methods of a stream of CUDA that are used."""

    def record_event(self) -> Event: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


class NoStream:
    """A stream or event of a CPU, on which all work is done when its call returns."""

    def record_event(self) -> NoStream:
        return self

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def synchronize(self) -> None: ...


class Streams:
    """Streams of the copies of all layers.

    Attributes:
        up: to rows of the device.
        down: from rows of the device to host memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._own = device, list[torch.cuda.Stream]()
        if device.type == "cuda":
            self._own += (take_stream(device), take_stream(device))
        self.up: Stream
        self.down: Stream
        self.up, self.down = self._own or (NoStream(), NoStream())

    @property
    def compute(self) -> Stream:
        """The stream of the caller's kernels."""
        return torch.cuda.current_stream(self._device.index) if self._own else self.up

    def close(self) -> None:
        """Return when no copy is under way, and give the streams back. Idempotent."""
        if self._own:
            give_streams(self._device, self._own)


def _copy(stream: Stream, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Start copies: of each pair, the second tensor to the first."""
    into, sources = [each for each, _ in pairs], [source for _, source in pairs]
    with CurrentStream(stream) if isinstance(stream, torch.cuda.Stream) else nullcontext():
        copy_each(into, sources, non_blocking=True)  # one by one, launches take Python 10 us each


class Staging:
    """Rows of host memory through which experts of all layers pass on their way from files to a device.

    Attributes:
        idle: numbers of the rows that no thread writes; from the first ones a copy may still be under way.
        ahead: reads of the layer that is expected next, in a list of its own.
    """

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        """``rows``: uint8, 1-D, each as long as the largest expert."""
        self._rows = rows
        self.idle, self._copied = deque[int](), dict[int, Event]()
        self.ahead = deque[_Read]()

    def begin(self, ahead: deque[_Read]) -> deque[_Read]:
        """Reads that were started ``ahead`` for the layer of which a step begins; no thread writes another row.

        No copy from a row is under way.
        """
        if self.ahead is not ahead:  # another layer comes first
            for transfer in (transfer for read in self.ahead for transfer in read.transfers):
                transfer.join()
            self.ahead.clear()
        reads = deque(ahead)
        ahead.clear()
        self.idle = deque(number for number in range(len(self._rows)) if all(number != r.number for r in reads))
        self._copied.clear()
        return reads

    def take(self, sizes: Sequence[int]) -> tuple[int, tuple[torch.Tensor, ...]]:
        """The number of an idle row, from which no copy is under way, and parts of it."""
        number = self.idle.popleft()
        if (copied := self._copied.pop(number, None)) is not None:
            copied.synchronize()
        return number, self._rows[number][: sum(sizes)].split(list(sizes))

    def give(self, number: int, copied: Event) -> None:
        """A row is idle after ``copied``."""
        self._copied[number] = copied
        self.idle.append(number)


class _Read(NamedTuple):
    """An expert that threads read, into parts of a row of the staging, or of host memory at ``place``."""

    expert: int
    parts: Sequence[torch.Tensor]
    transfers: Sequence[ThreadTransfer]
    number: int | None
    place: int | None


class TieredCache(FileCache):
    """The slots of one layer, and its rows of host memory.

    Attributes:
        next: the cache of the layer that follows.
    """

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
        streams: Streams,
    ) -> None:
        """``held``: of each tensor its rows of host memory; others: see :class:`FileCache`."""
        super().__init__(layer, parts, reader, turn, shift, check)
        self._host_slots, self._held = layer.host_slots or 0, held
        self._staging, self._streams = staging, streams
        self._place_of: dict[int, int] = {}  # the experts in host memory, the least recently used first
        self._ahead = deque[_Read]()
        self.next: TieredCache | None = None

    def _bring(self, used: Sequence[int]) -> dict[int, int]:
        row_of = super()._bring(used)
        if self.next is not None and len(used) == self._num_experts:
            self.next.read_ahead()
        return row_of

    def read_ahead(self) -> None:
        """Start to read experts that are in neither memory, as many as the staging has rows."""
        if self._staging.ahead:
            return
        waiting = deque(sorted({*range(self._num_experts)}.difference(self._slot_of, self._place_of)))
        self._staging.ahead = self._ahead
        with self._reader.reading(), torch.inference_mode():
            self._start(waiting, {}, self._ahead)

    def _fill(self, row_of: Mapping[int, int], leaving: Mapping[int, int]) -> int:
        up, places = self._streams.up, self._place_of
        up.synchronize()  # threads write to rows of the staging, from which it still copies after an interrupt
        reads = self._staging.begin(self._ahead)
        free = deque(sorted(set(range(self._host_slots)).difference(places.values())))
        ahead = [read.expert for read in reads]
        waiting = deque(expert for expert in row_of if expert not in places and expert not in ahead)
        num_read = len(waiting) + len(ahead)
        # Before a copy to any place starts: threads write there.
        without_slot = [expert for expert in waiting if row_of[expert] >= self.num_slots]
        found = ((expert, self._free_place(free, row_of)) for expert in without_slot)
        staying = {expert: place for expert, place in found if place is not None}
        if staying:
            self._streams.down.synchronize()  # it may still copy to those places what the steps before gave up
        with torch.inference_mode():  # the offload may have begun there, and torch refuses to write to it elsewhere
            self._start(waiting, staying, reads)
            up.wait_stream(self._streams.compute)  # kernels of the steps before read rows
            up.wait_stream(self._streams.down)  # which reads overflow rows, and writes what is copied up next
            self._exchange(row_of, leaving if self._host_slots else {}, free)
            while reads:
                self._land(reads.popleft(), row_of)
                self._start(waiting, staying, reads)
            self._keep({e: row_of[e] for e in ahead if row_of.get(e, -1) >= self.num_slots}, free, row_of)
            self._streams.compute.wait_stream(up)
        for expert in [expert for expert in row_of if expert in places]:
            places[expert] = places.pop(expert)
        return num_read

    def _free_place(self, free: deque[int], used: Collection[int]) -> int | None:
        """A place in host memory, of ``free`` or of the oldest expert that is not ``used``; ``None``: there is none."""
        if free:
            return free.popleft()
        oldest = next((expert for expert in self._place_of if expert not in used), None)
        return None if oldest is None else self._place_of.pop(oldest)

    def _exchange(self, row_of: Mapping[int, int], leaving: Mapping[int, int], free: deque[int]) -> None:
        """Copy experts in host memory to their rows, and there what leaves a slot, in place of those or of the oldest.

        No expert is looked for in either while its bytes are under way: an interrupt may come between two lines.
        """
        up, places = self._streams.up, self._place_of
        # If any leave, all slots are full, so with those that have no slot they are at most as many as overflow rows.
        saved = dict(zip(leaving, reversed(self._overflow), strict=False))
        if saved:
            _copy(up, [(rows[row], rows[slot]) for slot, row in saved.items() for rows, _ in self._parts])
        if hits := [each for each in row_of if each in places]:
            self._copy_up({places[each]: row_of[each] for each in hits})
        free += [places.pop(each) for each in hits if row_of[each] < self.num_slots]
        self._keep({expert: saved[slot] for slot, expert in leaving.items()}, free, row_of)

    def _keep(self, row_at: Mapping[int, int], free: deque[int], used: Collection[int]) -> None:
        """Start to copy experts to host memory, as many as find a place; ``row_at``: by expert, its overflow row."""
        found = {expert: self._free_place(free, used) for expert in reversed([*row_at])}  # if few, for the newest
        if kept := {expert: place for expert in row_at if (place := found[expert]) is not None}:
            self._streams.down.wait_event(self._streams.up.record_event())
            self._copy_down({row_at[expert]: place for expert, place in kept.items()})
            self._place_of.update(kept)

    def _copy_up(self, row_at: Mapping[int, int]) -> None:
        """Start to copy experts from host memory; ``row_at``: by place, the row."""
        pairs = list(zip(self._parts, self._held, strict=True))
        _copy(self._streams.up, [(rows[r], held[p]) for p, r in row_at.items() for (rows, _), held in pairs])

    def _copy_down(self, place_of: Mapping[int, int]) -> None:
        """Start to copy experts to host memory; ``place_of``: by row, the place."""
        pairs = list(zip(self._parts, self._held, strict=True))
        _copy(self._streams.down, [(held[p], rows[r]) for r, p in place_of.items() for (rows, _), held in pairs])

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
        """Copy what was read to its row, each tensor when it has been; or drop it, if it is unused."""
        row, up = row_of.get(read.expert), self._streams.up
        for (rows, _), part, transfer in zip(self._parts, read.parts, read.transfers, strict=True):
            if row is None:
                transfer.join()
                continue
            self._reader.wait([transfer])
            _copy(up, [(rows[row], part)])
        if read.number is not None:
            self._staging.give(read.number, up.record_event())
        if read.place is not None:
            self._place_of[read.expert] = read.place
