"""Cached experts in files: what a step misses is read before the step uses it.

The cache of a CPU, which computes from the slots; that of a GPU is :mod:`headrace.transfer.expert_tiers`. Replacement
is that of :mod:`headrace.experts.kernels`: the least recently used leaves, per layer. Experts of a step that have no
slot are read into overflow rows, so any step runs with any number of slots, and reads an expert at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from headrace.config import debug_enabled
from headrace.errors import StateError
from headrace.experts.counts import CacheCounts, checked
from headrace.experts.rows import CUT, CacheStreamOrder
from headrace.memory.system import EXPERT_READERS, reader_threads
from headrace.plan.cached_experts import CachedLayer
from headrace.stores.sources import Copy, fill
from headrace.stores.store import Load, new_buffer
from headrace.transfer.link import ThreadLink, ThreadTransfer


class ExpertReader:
    """Threads that read experts of all layers."""

    def __init__(self) -> None:
        self._link = ThreadLink(reader_threads(at_least=EXPERT_READERS))
        self._is_idle = True
        self.close = self._link.close

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within, reads are started; no thread writes for a caller that an error or interrupt has ended."""
        if not self._is_idle:  # after an error or an interrupt threads may still write
            self._link.join()
        self._is_idle = False
        yield
        self._is_idle = True

    def start(self, expert: int, copies: Sequence[Copy], into: torch.Tensor) -> ThreadTransfer:
        """Start to carry out ``copies`` into a row of host memory (uint8, 1-D); ``expert``: number for errors."""
        return self._link.copy(Load(expert, tuple(copies)), into, ())

    def wait(self, transfers: Iterable[ThreadTransfer]) -> None:
        """Return when all are done.

        Raises:
            TransferError: a range cannot be read.
        """
        for transfer in transfers:
            self._link.wait(transfer)


class FileCache:
    """The slots of one layer (:class:`headrace.experts.rows.RowMap`).

    Attributes:
        location: int64 [experts], -1: what compiled code knows this cache by; only the host knows rows.
        num_slots: rows of slots.
        turn: stream order of all layers, whose overflow rows are one memory.
        counters: int64 [7]: :class:`CacheCounts`, and bytes that differ.
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
        self.location = torch.full((layer.num_experts,), -1, dtype=torch.int64, device=parts[0][0].device)
        self.counters = torch.zeros(7, dtype=torch.int64, device="cpu")
        self._slot_of: dict[int, int] = {}  # the experts in slots, the least recently used first

    def admit(self, ids: torch.Tensor, inputs: torch.Tensor | None = None) -> torch.Tensor:
        """Read the experts ``ids`` that are in no slot; returns the row of each, of the shape and dtype of ``ids``.

        Numbers that are no expert are unchanged, or moved so that they are no row either.

        Raises:
            TransferError: a file cannot be read, or was written to. The next step begins with what is in slots.
            StateError: a CUDA graph is being captured, which the host does not make in parts (:data:`CUT`).
        """
        self._check()
        if (cut := CUT.get()) is not None:
            return cut(self, ids)
        if ids.is_cuda and torch.cuda.is_current_stream_capturing():
            raise StateError(
                "a CUDA graph is being captured, and experts in files are read by the host, which a replay does not "
                "run: let generate capture it (decode_in_graphs), or keep its experts in host memory (mode 'cpu')"
            )
        numbers = ids.reshape(-1).tolist()
        row_of = self._bring(sorted({each for each in numbers if 0 <= each < self._num_experts}))
        rows = [row_of.get(each, each if each < 0 else each + self._shift) for each in numbers]
        # CUDA has copied memory that is not pinned when the call returns, and the host goes on.
        return torch.tensor(rows, dtype=ids.dtype, device="cpu").view(ids.shape).to(ids.device, non_blocking=True)

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
        leaving = {slots.pop(expert): expert for expert in oldest}
        row_of = dict(zip(missing, [*free, *leaving, *self._overflow], strict=False))
        num_read = 0
        if row_of:
            with self._reader.reading():
                num_read = self._fill(row_of, leaving)
        fetched = {expert: row for expert, row in row_of.items() if row < self.num_slots}
        slots.update(fetched)
        # By numpy: to a tensor that was made in inference mode torch refuses to write outside of it.
        counts = 1, len(hits), len(fetched), len(missing) - len(fetched), len(oldest), num_read
        self.counters.numpy()[:-1] += counts
        return row_of | {expert: slots[expert] for expert in hits}

    def _fill(self, row_of: Mapping[int, int], leaving: Mapping[int, int]) -> int:
        """Have the bytes of experts in their rows; returns how many were read from files.

        ``leaving``: by slot, the expert that was there.
        """
        started = [
            self._reader.start(expert, copies[expert], rows[row])
            for expert, row in row_of.items()
            for rows, copies in self._parts
        ]
        self._reader.wait(started)
        return len(row_of)

    def reset(self) -> None:
        """No expert is in a slot: the memory of the slots was given back."""
        self._slot_of.clear()

    def compare(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Compare the experts ``ids`` in ``rows`` with the files; only with ``HEADRACE_DEBUG=1``, and in no capture."""
        if not self._debug or CUT.get() is not None:
            return
        pairs = dict(zip(ids.reshape(-1).tolist(), rows.reshape(-1).tolist(), strict=True))
        for expert, row in pairs.items():
            for memory, copies in self._parts if 0 <= expert < self._num_experts else ():
                buffer = new_buffer(memory.shape[1])
                fill(buffer, copies[expert])
                self.counters.numpy()[-1] += int((buffer != memory[row].cpu()).sum())

    def counts(self) -> CacheCounts:
        """The counts so far; raises ``RaceError`` if bytes differed."""
        return checked(self.counters)
