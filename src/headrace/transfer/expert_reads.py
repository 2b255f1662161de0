"""Cached experts in files: what a step misses is read into slots of host memory before the step uses it.

The cache of a CPU, which computes from the slots. Replacement is that of :mod:`headrace.experts.kernels`: the least
recently used leaves, per layer. Experts of a step that have no slot are read into overflow rows, so any step runs with
any number of slots, and reads an expert at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from headrace.config import debug_enabled
from headrace.experts.counts import CacheCounts, checked
from headrace.experts.rows import CacheStreamOrder, MakesCache
from headrace.memory.system import EXPERT_READERS, reader_threads
from headrace.plan.cached_experts import CachedLayer
from headrace.stores.expert_files import ExpertFiles
from headrace.stores.sources import Copy, fill
from headrace.stores.store import Load, new_buffer
from headrace.transfer.link import ThreadLink


def open_caches(store: ExpertFiles, turn: CacheStreamOrder) -> MakesCache[FileCache]:
    """A function that makes the cache of each layer; ``turn``: stream order of all of them.

    Raises:
        OptionError: the system starts no more threads.
    """
    store.readers = reader = ExpertReader()

    def make(layer: CachedLayer, rows: Mapping[str, torch.Tensor], shift: int, check: Callable[[], None]) -> FileCache:
        parts = [(rows[name], store.parts[name]) for name in layer.storages]
        return FileCache(layer, parts, reader, turn, shift, check)

    return make


class ExpertReader:
    """Threads that read experts of all layers."""

    def __init__(self) -> None:
        self._link = ThreadLink(reader_threads(at_least=EXPERT_READERS))
        self._is_idle = True
        self.close = self._link.close

    def read(self, jobs: Sequence[tuple[int, Sequence[Copy], torch.Tensor]]) -> None:
        """Carry out ``jobs``: (number for errors, copies, uint8 1-D that they fill); return when all are done.

        Raises:
            TransferError: a range cannot be read.
        """
        if not self._is_idle:  # after an error or an interrupt threads may still write
            self._link.join()
        self._is_idle = False
        transfers = [self._link.copy(Load(unit, tuple(copies)), into, ()) for unit, copies, into in jobs]
        for transfer in transfers:
            self._link.wait(transfer)
        self._is_idle = True


class FileCache:
    """The slots of one layer (:class:`headrace.experts.rows.RowMap`).

    Attributes:
        location: int64 [experts]: the row of each one that the latest step could read; -1: in files alone.
        num_slots: rows of slots.
        turn: stream order of all layers, whose overflow rows are one memory.
        counters: int64 [6]: :class:`CacheCounts`, and bytes that differ.
    """

    def __init__(
        self,
        layer: CachedLayer,
        parts: Sequence[tuple[torch.Tensor, Sequence[Sequence[Copy]]]],
        reader: ExpertReader,
        turn: CacheStreamOrder,
        shift: int,
        check: Callable[[], None],
    ) -> None:
        """``parts``: of each tensor its rows, and by expert what fills one; others: see :class:`MakesCache`."""
        self.num_slots, self._num_experts = layer.num_slots, layer.num_experts
        self._overflow = range(layer.first_overflow_row, layer.num_rows)
        self._parts, self._reader, self._shift, self._check = parts, reader, shift, check
        self.turn, self._debug = turn, debug_enabled()
        self.location = torch.full((layer.num_experts,), -1, dtype=torch.int64, device="cpu")
        self.counters = torch.zeros(6, dtype=torch.int64, device="cpu")
        self._slot_of: dict[int, int] = {}  # the experts in slots, the least recently used first

    def admit(self, ids: torch.Tensor, inputs: torch.Tensor | None = None) -> torch.Tensor:
        """Read the experts ``ids`` that are in no slot; returns the row of each, of the shape and dtype of ``ids``.

        Numbers that are no expert are unchanged, or moved so that they are no row either.

        Raises:
            TransferError: a file cannot be read, or was written to. The next step begins with what is in slots.
        """
        self._check()
        numbers = ids.reshape(-1).tolist()
        row_of = self._bring(sorted({each for each in numbers if 0 <= each < self._num_experts}))
        location = self.location.numpy()
        location[:] = -1
        location[list(row_of)] = list(row_of.values())
        rows = [row_of.get(each, each if each < 0 else each + self._shift) for each in numbers]
        return torch.tensor(rows, dtype=ids.dtype, device="cpu").view(ids.shape)

    def _bring(self, used: Sequence[int]) -> dict[int, int]:
        """The rows of the experts ``used``, in which they are when this returns."""
        slots, wanted = self._slot_of, set(used)
        hits = [expert for expert in used if expert in slots]
        for expert in hits:
            slots[expert] = slots.pop(expert)
        missing = [expert for expert in used if expert not in slots]
        free = sorted(set(range(self.num_slots)).difference(slots.values())) if missing else []
        oldest = [expert for expert in slots if expert not in wanted][: max(0, len(missing) - len(free))]
        # From here on no expert has these slots, whatever becomes of the reads.
        free += [slots.pop(expert) for expert in oldest]
        row_of = dict(zip(missing, [*free, *self._overflow], strict=False))
        self._reader.read(
            [(expert, copies[expert], rows[row]) for expert, row in row_of.items() for rows, copies in self._parts]
        )
        fetched = {expert: row for expert, row in row_of.items() if row < self.num_slots}
        slots.update(fetched)
        # By numpy: to a tensor that was made in inference mode torch refuses to write outside of it.
        self.counters.numpy()[:5] += 1, len(hits), len(fetched), len(missing) - len(fetched), len(oldest)
        return row_of | {expert: slots[expert] for expert in hits}

    def reset(self) -> None:
        """No expert is in a slot: the pages of the slots were given back."""
        self._slot_of.clear()

    def compare(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Compare the experts ``ids`` in ``rows`` with the files; only with ``HEADRACE_DEBUG=1``."""
        pairs = dict(zip(ids.reshape(-1).tolist(), rows.reshape(-1).tolist(), strict=True)) if self._debug else {}
        for expert, row in pairs.items():
            for memory, copies in self._parts if 0 <= expert < self._num_experts else ():
                buffer = new_buffer(memory.shape[1])
                fill(buffer, copies[expert])
                self.counters.numpy()[5] += int((buffer != memory[row]).sum())

    def counts(self) -> CacheCounts:
        """The counts so far; raises ``RaceError`` if bytes differed."""
        return checked(self.counters)
