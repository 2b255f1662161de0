"""The stores ``exp3`` and ``exp4``: units in host memory in such a code (:mod:`headrace.coding.exponents`).

A unit is read into memory of its own, and coded when all of it is there: on the GPU that computes, or where that has no
room on the CPU. Each piece is decoded again and compared with what it was made of. Memory of the code is of exactly its
size and pinned for a GPU; the bytes that it was made of are freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from headrace.coding.exponents import Piece, decode, encode
from headrace.coding.layout import WIDTHS, cut_pieces
from headrace.errors import TransferError, warn_user
from headrace.formatting import format_size
from headrace.memory.pages import map_pages, populate_parallel
from headrace.memory.pinned import CudaRegistrar, PinnedBuffer, warn_refused
from headrace.memory.system import touch_threads
from headrace.plan.plan import Unit, slab_bytes
from headrace.stores.sources import ByteRange, Copy, Source
from headrace.stores.store import Destinations, Load, Store

__all__ = ["CodedStore"]

# Units that are coded at once, on the device beside nothing but residents, and that are read ahead of them: each takes
# its own size of memory meanwhile.
_AT_ONCE, _UNITS_AHEAD = 2, 3
_NO_MEMORY, _NO_HOST_MEMORY = (MemoryError, torch.OutOfMemoryError), "DefaultCPUAllocator"


class CodedStore(Store):
    """Units of bf16 in host memory, coded.

    Attributes:
        destinations: by storage, where its bytes go to be coded: uint8, 1-D, host; made when it is looked up.
    """

    def __init__(self, units: Sequence[Unit], device: torch.device, registrar: CudaRegistrar | None) -> None:
        """``device``: computes. ``registrar``: what pins; ``None`` leaves the memory unpinned."""
        self._units = {unit.index: unit for unit in units}
        self._entries = {entry.storage: (unit.index, entry) for unit in units for entry in unit.entries}
        self._device, self._registrar = device, registrar
        self._missing = {unit.index: {entry.storage for entry in unit.entries} for unit in units}
        self._slabs: dict[int, torch.Tensor] = {}
        self._coded: dict[int, tuple[Piece, ...]] = {}
        self._memory: list[PinnedBuffer] = []
        self._pool = ThreadPoolExecutor(_AT_ONCE, "headrace-encode")
        self._jobs: deque[Future[None]] = deque()
        self._unmade_bytes = 0
        self.destinations: Mapping[str, torch.Tensor] = Destinations(self._entries, self._destination)

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
        while len(self._jobs) > _UNITS_AHEAD:
            self._jobs.popleft().result()

    def finish(self) -> None:
        while self._jobs:
            self._jobs.popleft().result()
        self._pool.shutdown()
        if self._unmade_bytes:
            warn_user(
                f"no memory was left to code {format_size(self._unmade_bytes)} of weights: they are stored as they "
                "are; free device or host memory before the model is offloaded"
            )

    def _encode(self, unit: int, slab: torch.Tensor) -> None:
        width = WIDTHS[self._units[unit].store]
        cut = cut_pieces(slab.numel())
        pieces = [self._encode_piece(start, slab[start : start + size], width) for start, size in cut]
        sizes = [slab_bytes([piece.data.numel()]) for piece in pieces]
        memory = PinnedBuffer(torch.from_numpy(map_pages(sum(sizes))))
        populate_parallel(memory.buffer, touch_threads())
        if self._registrar is not None and (code := memory.register(self._registrar)) != 0:
            warn_refused(memory.num_bytes, code)
            memory = PinnedBuffer(self._registrar.allocate(memory.num_bytes))
        found = []
        for piece, part in zip(pieces, memory.buffer.split(sizes), strict=True):
            found.append(replace(piece, data=part[: piece.data.numel()].copy_(piece.data)))
        self._memory.append(memory)
        self._coded[unit] = tuple(found)

    def _encode_piece(self, start: int, weights: torch.Tensor, width: int) -> Piece:
        """The piece with its code where that was made: on the device, or if there is no room on the host."""
        for device in (self._device, torch.device("cpu")):
            try:
                code = _code_of(weights.to(device), width)
            except (RuntimeError, MemoryError) as error:
                if not isinstance(error, _NO_MEMORY) and _NO_HOST_MEMORY not in str(error):
                    raise
                continue
            return Piece(start, weights.numel(), *((None, weights) if code is None else (width, code)))
        self._unmade_bytes += weights.numel()
        return Piece(start, weights.numel(), None, weights)

    # -- reading ------------------------------------------------------------------------------------------------------

    def copies(self, storage: str) -> list[Copy]:
        unit, entry = self._entries[storage]
        return [Copy(ByteRange(_Coded(self._coded.get(unit, ())), entry.offset, entry.num_bytes), 0)]

    def in_place(self, storage: str) -> torch.Tensor:
        raise TransferError(f"{storage} is coded, so it cannot be read in place")

    def load(self, unit: Unit) -> Load:
        return Load(unit.index, tuple(self.unit_copies(unit)), coded=self._coded.get(unit.index, ()))

    @property
    def host_bytes(self) -> int:
        return sum(memory.num_bytes for memory in self._memory)

    @property
    def account(self) -> dict[str, int]:
        return {"host" if self._registrar is None else "host_pinned": self.host_bytes}

    def unpin(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for memory in self._memory:
            memory.unregister()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._slabs.clear()
        self._coded.clear()
        self._memory.clear()


def _code_of(weights: torch.Tensor, width: int) -> torch.Tensor | None:
    """The code of ``weights``, once it has been decoded on their device and compared."""
    if (code := encode(weights, width)) is None:
        return None
    piece, again = Piece(0, weights.numel(), width, code), torch.empty_like(weights)
    if weights.is_cuda:
        from headrace.coding.decode_kernels import decode_on_gpu  # needs Triton

        with torch.cuda.device(weights.device):
            decode_on_gpu(piece, code, again)
    else:
        _Coded((piece,)).read(0, again.numpy().data)
    if not torch.equal(again, weights):
        raise TransferError(
            "a coded unit was decoded as other bytes; this is a bug in headrace: please report it, "
            "and use codec='none' (--offload-codec none)"
        )
    return code


class _Coded(Source):
    """The bytes of a unit, decoded as they are read."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    def read(self, offset: int, into: memoryview) -> None:
        end = offset + len(into)
        for piece in self._pieces:
            begin, stop = max(offset, piece.start), min(end, piece.start + piece.num_bytes)
            if begin < stop:
                _read_piece(piece, begin - piece.start, into[begin - offset : stop - offset])


def _read_piece(piece: Piece, offset: int, into: memoryview) -> None:
    code, view = piece.data.numpy(), np.frombuffer(into, np.uint8)
    if piece.width is None:
        np.copyto(view, code[offset : offset + len(view)])
        return
    first = offset // 2  # whole weights, of which the first and last may be read in part
    weights = np.empty((offset + len(view) + 1) // 2 - first, np.uint16)
    decode(code, piece.num_bytes // 2, piece.width, first, weights)
    np.copyto(view, weights.view(np.uint8)[offset - 2 * first :][: len(view)])
