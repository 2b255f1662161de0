"""A layer with some of its experts in slots on the device: kernels fetch the missing experts of each step.

Kernels that index weights by the number of an expert get rows in place of numbers; see docs/notes/expert-cache.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from headrace.config import debug_enabled
from headrace.experts.counts import CacheCounts, checked
from headrace.experts.kernels import admit_kernel, compare_kernel, fetch_kernel
from headrace.experts.rows import CacheStreamOrder, MakesCache
from headrace.plan.cached_experts import CachedLayer

if TYPE_CHECKING:
    from headrace.experts.cpu.share import LayerShare

# Programs that copy, and words of 8 bytes that one copies at a time: on an H200 32 programs of 8 warps fill the link.
_PROGRAMS, _BLOCK = 32, 4096
_WORDS = {8: tl.int64, 1: tl.uint8}
_IDS, _OTHERS = 1024, 32  # of a prompt there are thousands of ids


def compile_kernels(layers: Sequence[CachedLayer], device: torch.device) -> None:
    """Compile what :meth:`ExpertCache.admit` launches for ids of int64, or find it compiled; launches nothing.

    For that Triton is imported, and reads all of its own files for the key of its cache: 0.5 to 1 s in each process.
    """
    i32, i64 = torch.int32, torch.int64
    with torch.cuda.device(device):
        for layer in layers:
            tensors = (i64, i64, i32, i64, i32, i64, i64, i32)
            sizes = layer.num_slots, layer.overflow_rows, layer.first_overflow_row
            constants = _constants(layer.num_experts, layer.num_slots)
            for overflows in {False, layer.overflow_rows > 0}:
                arguments = (i64, i64, 1, 0, *tensors, *sizes)
                admit_kernel.warmup(*arguments, **constants, HAS_OVERFLOW=overflows, grid=(1,))
            for word, count in Counter(1 if layer.row_bytes(name) % 16 else 8 for name in layer.storages).items():
                constants = {"NUM_TENSORS": count, "WORD": _WORDS[word], "BLOCK": _BLOCK}
                fetch_kernel.warmup(i32, i32, i64, i64, **constants, num_warps=8, grid=(1,))


def _constants(num_experts: int, num_slots: int) -> dict[str, int]:
    """Constants of :func:`admit_kernel` for a layer."""
    return {
        "NUM_EXPERTS": num_experts,
        "BLOCK_EXPERTS": triton.next_power_of_2(num_experts),
        "BLOCK_SLOTS": triton.next_power_of_2(num_slots),
        "BLOCK_IDS": _IDS,
        "BLOCK_OTHERS": _OTHERS,
    }


def open_caches(store: object, turn: CacheStreamOrder) -> MakesCache[ExpertCache]:
    """A function that makes the cache of each layer; ``turn``: stream order of all of them."""

    def make(
        layer: CachedLayer, rows: Mapping[str, torch.Tensor], shift: int, check: Callable[[], None]
    ) -> ExpertCache:
        memory, first = list(rows.values()), layer.first_overflow_row
        home = layer.first_row + torch.arange(layer.num_experts, device=memory[0].device)
        overflow_rows = range(first, first + layer.overflow_rows)
        return ExpertCache(memory, home, layer.num_slots, overflow_rows, turn, shift, debug_enabled(), check)

    return make


class ExpertCache:
    """The slots of one layer. Only kernels change its tensors; no call waits for the host or allocates.

    Attributes:
        location: [E]: the row of every expert now; -1: of another rank.
        num_slots: rows of slots; at most as many as there are experts here.
        turn: stream order of all layers that share memory with this one.
        share: the CPU's part in what is missing; ``None``: it has none.
        counters: int64 [6]: :class:`CacheCounts`, and words that differ.
    """

    def __init__(
        self,
        rows: Sequence[torch.Tensor],
        home: torch.Tensor,
        num_slots: int,
        overflow_rows: range = range(0),
        turn: CacheStreamOrder | None = None,
        shift: int = 0,
        debug: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            rows: the tensors of the layer, each [rows, bytes of a row], uint8, contiguous: first ``num_slots`` slots,
                and from some row on all experts. Their memory has to stay where it is.
            home: int32 or int64 [E] on the device: the row of each expert that is not in a slot; -1: another rank has
                it. ``location`` has the same dtype.
            num_slots: at least 1.
            overflow_rows: rows after the slots, in memory that other layers may share.
            turn: stream order of the layers that share it; ``None``: there are none.
            shift: see :meth:`admit`.
            debug: :meth:`compare` compares.
            check: called before each admission; it raises where the model no longer has the tensors of the rows.
        """
        device = home.device
        self._debug, self._check = debug, check
        self.num_slots = num_slots
        self.turn = turn or CacheStreamOrder(device)
        self._overflow_rows = overflow_rows
        self._num_experts, self._shift = home.numel(), shift
        self._constants = _constants(home.numel(), num_slots)
        self.share: LayerShare | None = None
        self._rows = tuple(rows)
        self._home = home
        self.location = home.clone()
        self._expert_in = torch.full((max(num_slots, overflow_rows.stop),), -1, dtype=torch.int32, device=device)
        self._last_used = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._fetched = torch.zeros(1 + num_slots + len(overflow_rows), dtype=torch.int32, device=device)
        self.counters = torch.zeros(6, dtype=torch.int64, device=device)
        self._chosen = torch.zeros(home.numel(), dtype=torch.int64, device=device)
        self._missing = torch.zeros(home.numel(), dtype=torch.int32, device=device)
        # By the bytes of a word: only small rows do not begin at multiples of 16 bytes; they are copied byte by byte.
        tables: dict[int, list[tuple[int, int]]] = {8: [], 1: []}
        for tensor in rows:
            word = 1 if tensor.data_ptr() % 16 or tensor.shape[1] % 16 else 8
            tables[word].append((tensor.data_ptr(), tensor.shape[1] // word))
        self._tables = [
            (_WORDS[word], torch.tensor(table, dtype=torch.int64, device=device))
            for word, table in tables.items()
            if table
        ]

    def admit(self, ids: torch.Tensor, inputs: torch.Tensor | None = None) -> torch.Tensor:
        """Fetch the experts ``ids`` into slots, as far as there are any, and update :attr:`location`.

        Of more ids than slots, those without a slot are copied into overflow rows, which are valid until the next call
        for a layer that shares them: kernels may read an expert several times, and some read host memory slowly.

        Args:
            ids: int32 or int64 on the device, any shape, contiguous; numbers that are no expert of this rank are
                ignored.
            inputs: [tokens, inputs of an expert], for kernels that take :data:`ELSEWHERE` for a row: some of the
                experts may be computed by the CPU.

        Returns:
            the row of each, of the shape and dtype of ``ids``; numbers that are no expert are unchanged, or moved by
            ``shift`` so that they are no row either: a kernel that reads them then fails, as without the cache.
        """
        self._check()
        rows = torch.empty_like(ids)
        share = self.share if inputs is not None else None
        if share is not None:
            share.check(ids.numel())
        try:
            self._launch(ids, rows, inputs, share)
        except BaseException:  # an interrupt between the admission of experts and their copy
            self.reset()
            raise
        return rows

    def _launch(
        self, ids: torch.Tensor, rows: torch.Tensor, inputs: torch.Tensor | None, share: LayerShare | None
    ) -> None:
        overflow_rows = self._overflow_rows
        with torch.cuda.device_of(self._home):  # Triton launches on the current device, whatever the tensors' one is
            admit_kernel[(1,)](
                ids,
                rows,
                ids.numel(),
                self._shift,
                self._home,
                self.location,
                self._expert_in,
                self._last_used,
                self._fetched,
                self.counters,
                self._chosen,
                self._missing,
                self.num_slots,
                len(overflow_rows),
                overflow_rows.start,
                **self._constants,
                HAS_OVERFLOW=len(overflow_rows) > 0 and ids.numel() > self.num_slots,
                shares=None if share is None else share.shares,
                uses=None if share is None else share.uses,
            )
            if share is not None and inputs is not None:
                share.ring(ids, rows, inputs, self._fetched)
            for word, table in self._tables:
                fetch_kernel[(_PROGRAMS,)](
                    self._fetched,
                    self._expert_in,
                    self._home,
                    table,
                    NUM_TENSORS=len(table),
                    WORD=word,
                    BLOCK=_BLOCK,
                    num_warps=8,
                )

    def reset(self) -> None:
        """No expert is in a slot: memory of the slots is new, or the store has other bytes."""
        with torch.inference_mode():  # the offload may have begun there, and torch refuses to write to it elsewhere
            self.location.copy_(self._home)
            self._expert_in.fill_(-1)
            self._last_used.zero_()

    def compare(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Compare the experts ``ids`` in ``rows``, which a kernel has read, with host memory; only with ``debug``.

        Bytes that differ are an error of the next :meth:`counts`, also where a graph contains the comparison. So the
        kernel has read what the store holds, whether or not its own result repeats (contract 1).

        Args:
            ids, rows: of one shape; numbers that are no expert are ignored.
        """
        if not self._debug:
            return
        is_expert = (ids >= 0) & (ids < self._num_experts)
        row_of = torch.full((self._num_experts + 1,), -1, dtype=torch.int64, device=ids.device)
        row_of[torch.where(is_expert, ids, self._num_experts).long()] = rows.long()
        with torch.cuda.device_of(self._home):
            for word, table in self._tables:
                compare_kernel[(_PROGRAMS,)](
                    row_of,
                    self._home,
                    table,
                    self.counters[5:],
                    NUM_EXPERTS=self._num_experts,
                    NUM_TENSORS=len(table),
                    WORD=word,
                    BLOCK=_BLOCK,
                    num_warps=8,
                )

    def counts(self) -> CacheCounts:
        """The counts so far; waits for the device.

        Raises:
            RaceError: see :meth:`compare`.
        """
        return checked(self.counters)
