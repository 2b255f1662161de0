"""The store ``exp3``: units in host memory in that code (:mod:`headrace.codec.exponents`).

A unit is read into memory of its own, and coded when all of it is there: on the GPU that computes, or where that has no
room on the CPU. Each piece is decoded again and compared with what it was made of. Memory of the code is of exactly its
size and pinned for a GPU; the bytes that it was made of are freed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from headrace.codec.exponents import Piece, decode, encode
from headrace.codec.layout import UNITS_AHEAD, UNITS_AT_ONCE, cut_pieces
from headrace.errors import OptionError, TransferError, warn_user
from headrace.formatting import format_size
from headrace.memory.pages import map_pages, populate_parallel
from headrace.memory.pinned import CudaRegistrar, PinnedBuffer, warn_refused
from headrace.memory.system import touch_threads, trim_heap
from headrace.model.live_tensors import BoundStorage
from headrace.plan.kinds import Unit
from headrace.plan.slabs import SlabEntry, slab_bytes
from headrace.stores.pinned_host import registrar_for
from headrace.stores.sources import ByteRange, Copy, MemorySource, Source, fill_in_threads
from headrace.stores.store import Code, Destinations, Load, Opened, Store, StoreRequest, kept_by_others, new_buffer

# Of a code, beyond what plans expect, without a warning.
_MOST_LONGER = 8 << 20
_CPU, _ONE_AT_A_TIME = torch.device("cpu"), threading.Lock()
_NO_MEMORY, _NO_HOST_MEMORY = (MemoryError, torch.OutOfMemoryError), "DefaultCPUAllocator"


def open_units(request: StoreRequest, units: Sequence[Unit], offloaded: Mapping[str, BoundStorage]) -> Opened:
    """The store of ``units``, which codes them as they are loaded.

    Raises:
        OptionError: something else views the memory that the code is to replace.
    """
    if kept := kept_by_others(request.bound, {n: b for n, b in offloaded.items() if b.home == request.device}):
        raise OptionError(
            f"the memory of {kept[0]} (of {len(kept)} weights) has another user (an alias such as .detach() or a "
            f"state_dict()), and its code is to replace it, so that a write there would be lost: drop it first (del), "
            f"or use codec='none' (--offload-codec none)"
        )
    store = CodedStore(units, request.device, registrar_for(request.device), request.codes)
    return Opened(store, store.destinations)


class CodedStore(Store):
    """Units of bf16 in host memory, coded.

    Attributes:
        destinations: by storage, where its bytes go to be coded: uint8, 1-D, host; made when it is looked up.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        device: torch.device,
        registrar: CudaRegistrar | None,
        codes: Mapping[tuple[SlabEntry, ...], Code] | None = None,
    ) -> None:
        """``device``: computes. ``registrar``: what pins; ``None`` leaves it unpinned. ``codes``: made before."""
        self._units = {unit.index: unit for unit in units}
        self._entries = {entry.storage: (unit.index, entry) for unit in units for entry in unit.entries}
        self._device, self._registrar = device, registrar
        self._missing = {unit.index: {entry.storage for entry in unit.entries} for unit in units}
        self._slabs: dict[int, torch.Tensor] = {}
        self._coded: dict[int, Code] = {u.index: codes[u.entries] for u in units if codes and u.entries in codes}
        self._pool = ThreadPoolExecutor(UNITS_AT_ONCE, "headrace-encode")
        self._jobs: deque[Future[None]] = deque()
        self._unmade_bytes = 0
        new = [name for name, (unit, _) in self._entries.items() if unit not in self._coded]
        self.destinations: Mapping[str, torch.Tensor] = Destinations(new, self._destination)

    # -- filling ------------------------------------------------------------------------------------------------------

    def _destination(self, storage: str) -> torch.Tensor:
        unit, entry = self._entries[storage]
        if unit not in self._slabs:
            self._slabs[unit] = torch.from_numpy(map_pages(self._units[unit].num_bytes))
        return self._slabs[unit][entry.offset : entry.offset + entry.num_bytes]

    def on_loaded(self, storage: str) -> None:
        unit = self._entries[storage][0]
        self._missing[unit].discard(storage)
        if not self._missing[unit]:
            self._jobs.append(self._pool.submit(self._encode, unit, self._slabs.pop(unit)))
        while len(self._jobs) > UNITS_AHEAD:
            self._jobs.popleft().result()

    def finish(self) -> None:
        while self._jobs:
            self._jobs.popleft().result()
        self._pool.shutdown()
        trim_heap()  # of what encoding took
        self.warn_of_length()

    def warn_of_length(self) -> None:
        """Warn of what has no code, and of codes that are longer than a plan expects."""
        if self._unmade_bytes:
            warn_user(
                f"no memory was left to code {format_size(self._unmade_bytes)} of weights: they are stored as they "
                "are; free device or host memory before the model is offloaded"
            )
        lengths = {unit: memory.num_bytes for unit, (memory, _) in self._coded.items()}
        more = max((size - self._units[unit].bytes_in_slot for unit, size in lengths.items()), default=0)
        if more > _MOST_LONGER:
            warn_user(
                f"weights have more exponents than a plan expects, and their code is longer: each slot takes up to "
                f"{format_size(more)} more than the plan says; leave the codec out (--offload-codec none)"
            )

    def _encode(self, unit: int, slab: torch.Tensor) -> None:
        self._coded[unit] = self.code_of(slab)

    def code(self, unit: int) -> Code:
        """The code of ``unit``, and what it consists of."""
        return self._coded[unit]

    def replace(self, unit: int, code: Code) -> None:
        """``unit`` has another code, one of :meth:`code_of`."""
        self._coded[unit] = code

    def code_of(self, slab: torch.Tensor) -> Code:
        """The code of a unit, ``slab`` (uint8, 1-D, any device), in memory of its own, and what it consists of."""
        pieces: list[Piece] = []
        parts: list[torch.Tensor] = []  # of the code: where they were made, or of the slab itself
        at = 0
        for start, size in cut_pieces(slab.numel()):
            weights = slab[start : start + size]
            code = self._code_of(weights)
            parts.append(weights if code is None else code)
            pieces.append(Piece(start, size, code is not None, at, parts[-1].numel()))
            at += slab_bytes([parts[-1].numel()])
        memory = PinnedBuffer(torch.from_numpy(map_pages(at, forks=self._registrar is None)))
        populate_parallel(memory.buffer, touch_threads())
        if self._registrar is not None and (error := memory.register(self._registrar)) != 0:
            warn_refused(memory.num_bytes, error)
            memory = PinnedBuffer(self._registrar.allocate(memory.num_bytes))
        for piece, part in zip(pieces, parts, strict=True):
            memory.buffer[piece.code_start : piece.code_start + piece.code_bytes].copy_(part)
        return memory, tuple(pieces)

    def _code_of(self, weights: torch.Tensor) -> torch.Tensor | None:
        """The code of ``weights`` where it was made: on the device, or if there is no room on the host."""
        for device in (self._device, _CPU):
            try:
                return _verified_code(weights.to(device))
            except (RuntimeError, MemoryError) as error:
                if not isinstance(error, _NO_MEMORY) and _NO_HOST_MEMORY not in str(error):
                    raise
        self._unmade_bytes += weights.numel()
        return None

    # -- reading ------------------------------------------------------------------------------------------------------

    def copies(self, storage: str) -> list[Copy]:
        unit, entry = self._entries[storage]
        return [Copy(ByteRange(CodedUnit(*self._code(unit)), entry.offset, entry.num_bytes), 0)]

    def in_place(self, storage: str) -> torch.Tensor:
        raise TransferError(f"{storage} is coded, so it cannot be read in place")

    def read(self, storage: str, into: torch.Tensor) -> None:
        """Decode ``storage`` ``into`` host memory, or that of the GPU that computes, on the current stream."""
        if self._device.type == "cuda":
            try:
                return self._read_by_gpu(storage, into)
            except torch.OutOfMemoryError:
                pass
        target = into if into.is_cpu else new_buffer(into.numel())
        fill_in_threads(target, self.copies(storage))  # which decode
        if target is not into:
            into.copy_(target)

    def _read_by_gpu(self, storage: str, into: torch.Tensor) -> None:
        from headrace.codec.decode_kernels import decode_on_gpu  # needs Triton

        unit, entry = self._entries[storage]
        code, pieces = self._code(unit)
        first, end = entry.offset, entry.offset + entry.num_bytes
        with _ONE_AT_A_TIME, torch.cuda.device(self._device):  # or each reader would take memory
            for piece, begin, stop in _overlaps(pieces, first, end):
                part = code[piece.code_start : piece.code_start + piece.code_bytes]
                if piece.is_coded:
                    decoded = torch.empty(piece.num_bytes, dtype=torch.uint8, device=self._device)
                    decode_on_gpu(replace(piece, start=0), part.to(self._device, non_blocking=True), decoded)
                    part = decoded
                into[begin - first : stop - first].copy_(part[begin - piece.start : stop - piece.start])

    def load(self, unit: Unit) -> Load:
        code, pieces = self._code(unit.index)
        copy = Copy(ByteRange(MemorySource(code), 0, code.numel()), 0)
        return Load(unit.index, (copy,), code, coded=pieces)

    def _code(self, unit: int) -> tuple[torch.Tensor, tuple[Piece, ...]]:
        """Empty, until the unit is coded."""
        memory, pieces = self._coded.get(unit, (None, ()))
        return torch.empty(0, dtype=torch.uint8, device="cpu") if memory is None else memory.buffer, pieces

    @property
    def host_bytes(self) -> int:
        return sum(memory.num_bytes for memory, _ in self._coded.values())

    @property
    def account(self) -> dict[str, int]:
        return {"host" if self._registrar is None else "host_pinned": self.host_bytes}

    def unpin(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for memory, _ in self._coded.values():
            memory.unregister()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._slabs.clear()
        self._coded.clear()


def _verified_code(weights: torch.Tensor) -> torch.Tensor | None:
    """The code of ``weights``, once it has been decoded on their device and compared."""
    if (code := encode(weights)) is None:
        return None
    piece, again = Piece(0, weights.numel(), True, 0, code.numel()), torch.empty_like(weights)
    if weights.is_cuda:
        from headrace.codec.decode_kernels import decode_on_gpu  # needs Triton

        with torch.cuda.device(weights.device):
            decode_on_gpu(piece, code, again)
    else:
        CodedUnit(code, (piece,)).read(0, again.numpy().data)
    if not torch.equal(again, weights):
        raise TransferError(
            "a coded unit was decoded as other bytes; this is a bug in headrace: please report it, "
            "and use codec='none' (--offload-codec none)"
        )
    return code


def _overlaps(pieces: Iterable[Piece], first: int, end: int) -> Iterator[tuple[Piece, int, int]]:
    """Pieces that have some of the bytes ``first`` to ``end`` of their slab, and where these begin and end in it."""
    for piece in pieces:
        begin, stop = max(first, piece.start), min(end, piece.start + piece.num_bytes)
        if begin < stop:
            yield piece, begin, stop


class CodedUnit(Source):
    """The bytes of a unit, decoded as they are read."""

    def __init__(self, code: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """``code``: of all pieces (uint8, 1-D, host)."""
        self._code, self._pieces = code.numpy(), pieces

    def read(self, offset: int, into: memoryview) -> None:
        view = np.frombuffer(into, np.uint8)
        for piece, begin, stop in _overlaps(self._pieces, offset, offset + len(into)):
            self._read_piece(piece, begin - piece.start, view[begin - offset : stop - offset])

    def _read_piece(self, piece: Piece, offset: int, into: np.ndarray) -> None:
        code = self._code[piece.code_start : piece.code_start + piece.code_bytes]
        if not piece.is_coded:
            np.copyto(into, code[offset : offset + len(into)])
            return
        first = offset // 2  # whole weights, of which the first and last may be read in part
        weights = np.empty((offset + len(into) + 1) // 2 - first, np.uint16)
        decode(code, piece.num_bytes // 2, first, weights)
        np.copyto(into, weights.view(np.uint8)[offset - 2 * first :][: len(into)])
