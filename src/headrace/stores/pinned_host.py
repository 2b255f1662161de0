"""The ``cpu`` store of a GPU: units in slabs of pinned host memory of exactly their size.

torch's pinned allocator takes 0.3 s per GiB and rounds every size up to a power of two. Ordinary memory that several
threads touch and that is then registered with the driver takes a ninth of that, has exactly the size asked for, and
copies just as fast. The threads that fill a slab touch it by doing so, and a slab is registered as soon as it is full,
while the next ones are being filled.

A copy cannot cross from one registration into the next, so a slab holds whole units. A view of a slab keeps
the slab alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from headrace.memory.pages import map_pages, pack, populate_parallel
from headrace.memory.pinned import (
    CudaRegistrar,
    PinnedBuffer,
    can_pin_in_place,
    pinning_disabled,
    refuse_capture,
    warn_refused,
)
from headrace.memory.system import touch_threads
from headrace.model.live_tensors import BoundStorage
from headrace.plan.kinds import Unit
from headrace.plan.plan import Plan
from headrace.plan.slabs import SLAB_ALIGNMENT_BYTES, SlabEntry, slab_bytes
from headrace.stores.sources import ByteRange, Copy
from headrace.stores.store import AlreadyPinned, Load, Store

# One registration: large enough to cost nothing by itself, small enough that the last one is short.
SLAB_BYTES = 1 << 30


@dataclass(frozen=True)
class SlabRange:
    """A part of a slab: the slab's number, where the part begins in it, and how long it is."""

    slab: int
    start: int
    num_bytes: int


class _Block(NamedTuple):
    """Contiguous block: a unit, or a storage that is read in place."""

    entries: tuple[SlabEntry, ...]
    num_bytes: int


def _blocks(units: Sequence[Unit], in_place: Mapping[str, int]) -> list[_Block]:
    alone = [_Block((SlabEntry(name, 0, size),), slab_bytes([size])) for name, size in in_place.items()]
    return [_Block(unit.entries, unit.num_bytes) for unit in units] + alone


def slab_sizes(units: Sequence[Unit], in_place: Mapping[str, int], max_slab_bytes: int = SLAB_BYTES) -> list[int]:
    """Bytes of each slab of a :class:`PinnedStore` that adopts nothing."""
    sizes = [item.num_bytes for item in _blocks(units, in_place)]
    return [sum(sizes[run.start : run.stop]) for run in pack(sizes, max_slab_bytes)]


class PinnedStore(Store):
    """Slabs of units, and storages that are read in place; made empty, then filled, then finished.

    Write each storage to its :meth:`destination` and report it with :meth:`on_loaded`; a slab whose storages are all
    loaded is registered in the background. :meth:`finish` waits for that. To fill from a device, call :meth:`pin_now`
    first.

    Attributes:
        registrar: what pins; ``None``: nothing is pinned.
        adopted: the storages that stay in the memory of the model.
        kept: the storages that stay in memory that was pinned before.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        in_place: Mapping[str, int],
        registrar: CudaRegistrar | None,
        *,
        adopt: Mapping[str, torch.Tensor] | None = None,
        held: Mapping[str, AlreadyPinned] | None = None,
        max_slab_bytes: int = SLAB_BYTES,
    ) -> None:
        """Map the memory; nothing is touched or registered yet, but for what is adopted.

        Args:
            units: each is contiguous.
            in_place: bytes of the storages that are read in place.
            registrar: what pins; ``None`` leaves the memory unpinned.
            adopt: tensors in host memory (uint8, 1-D) to use in place, by the storage that they hold; taken for
                units of one storage and for storages read in place, if the driver registers them.
            held: what is in registered memory already, by storage; taken for units that are held as a whole.
            max_slab_bytes: bytes of one registration, unless a unit alone is larger.

        Raises:
            StateError: a graph is being captured.
        """
        self.registrar = registrar
        self._slabs: list[PinnedBuffer] = []
        self._missing: list[set[str]] = []
        self._storages: dict[str, SlabRange] = {}
        self._pool = ThreadPoolExecutor(1, "headrace-pin")
        self._codes: dict[int, Future[int]] = {}
        self._sealed: set[int] = set()
        # Held before adopted: what is held is pinned already, and a second registration of it would be refused.
        new = [block for block in _blocks(units, in_place) if not self._keep(block, held or {})]
        self.kept = frozenset(self._storages)
        self._num_held = len(self._slabs)
        new = [block for block in new if not self._adopt(block, adopt or {})]
        self.adopted = frozenset(self._storages) - self.kept
        for run in pack([block.num_bytes for block in new], max_slab_bytes):
            self._open(new[run.start : run.stop])

    def _keep(self, block: _Block, held: Mapping[str, AlreadyPinned]) -> bool:
        """Whether all of ``block`` stays where it is held."""
        places: dict[str, tuple[PinnedBuffer, AlreadyPinned]] = {}
        for entry in block.entries:
            found = held.get(entry.storage)
            if found is None or not isinstance(found.memory, PinnedBuffer):  # mapped memory is for cached experts
                return False
            places[entry.storage] = found.memory, found
        for storage, (memory, found) in places.items():
            if memory not in self._slabs:
                self._add(memory, set())
            self._storages[storage] = SlabRange(self._slabs.index(memory), found.start, found.num_bytes)
        return True

    def _adopt(self, block: _Block, adopt: Mapping[str, torch.Tensor]) -> bool:
        """Whether the only storage of ``block`` stays where it is."""
        name = block.entries[0].storage
        # A unit of several storages is transferred in one copy, and tensors of a model do not lie side by side.
        if len(block.entries) > 1 or name not in adopt or self.registrar is None:
            return False
        slab = PinnedBuffer(adopt[name])
        if slab.register(self.registrar) != 0:
            return False  # its pages may be known to the driver already
        self._storages[name] = SlabRange(self._add(slab, set()), 0, slab.num_bytes)
        return True

    def _open(self, blocks: Sequence[_Block]) -> None:
        names = {entry.storage for block in blocks for entry in block.entries}
        slab = self._add(PinnedBuffer(self._allocate(sum(block.num_bytes for block in blocks))), names)
        start = 0
        for block in blocks:
            for entry in block.entries:
                self._storages[entry.storage] = SlabRange(slab, start + entry.offset, entry.num_bytes)
            start += block.num_bytes

    def _add(self, slab: PinnedBuffer, missing: set[str]) -> int:
        """The number of a new slab, in which ``missing`` are still to be filled."""
        self._slabs.append(slab)
        self._missing.append(missing)
        return len(self._slabs) - 1

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory of one slab, untouched: uint8, 1-D, host."""
        return torch.from_numpy(map_pages(num_bytes))

    # -- filling ------------------------------------------------------------------------------------------------------

    def destination(self, storage: str) -> torch.Tensor:
        """Host memory for the bytes of ``storage``: uint8, 1-D."""
        place = self._storages[storage]
        return self._slabs[place.slab].buffer[place.start : place.start + place.num_bytes]

    def pin_now(self) -> None:
        """Touch and register everything that is not full yet, so that a device can write there.

        Raises:
            BudgetError: the system has no memory for it.
            StateError: another thread is capturing a graph.
        """
        for index, missing in enumerate(self._missing):
            if missing:
                populate_parallel(self._slabs[index].buffer, touch_threads())
                self._register(index)
        self.finish()

    def takes_over(self, storage: str) -> bool:
        return True

    def adopts(self, storage: str) -> bool:
        return storage in self.adopted

    def on_loaded(self, storage: str) -> None:
        """``storage`` is in its destination; the last one of a slab starts its registration."""
        index = self._storages[storage].slab
        self._missing[index].discard(storage)
        if not self._missing[index]:
            self._register(index)

    def finish(self) -> None:
        """Wait for the registrations; what the driver refuses is moved to memory of torch's pinned allocator.

        Raises:
            StateError: another thread is capturing a graph.
        """
        self._pool.shutdown()
        # Called by pin_now and again by the session.
        for index in self._codes.keys() - self._sealed:
            code = self._codes[index].result()
            self._sealed.add(index)
            if code != 0:
                assert self.registrar is not None
                old = self._slabs[index].buffer
                warn_refused(old.numel(), code)
                self._slabs[index] = PinnedBuffer(self.registrar.allocate(old.numel()).copy_(old))

    def _register(self, index: int) -> None:
        # pin_now and the last on_loaded of a slab both come here.
        if self.registrar is not None and index not in self._codes:
            self._codes[index] = self._pool.submit(self._slabs[index].register, self.registrar)

    # -- reading ------------------------------------------------------------------------------------------------------

    def copies(self, storage: str) -> list[Copy]:
        return [Copy(ByteRange.of(self.destination(storage)), 0)]

    def load(self, unit: Unit) -> Load:
        copies = tuple(self.unit_copies(unit))
        places = [self._storages[entry.storage] for entry in unit.entries]
        starts = {(place.slab, place.start - entry.offset) for entry, place in zip(unit.entries, places, strict=True)}
        if len(starts) > 1:  # held, and not side by side
            pieces = tuple((entry.offset, self.destination(entry.storage)) for entry in unit.entries)
            return Load(unit.index, copies, pieces=pieces)
        ((slab, start),) = starts
        return Load(unit.index, copies, self._slabs[slab].buffer[start : start + unit.num_bytes])

    def in_place(self, storage: str) -> torch.Tensor:
        return self.destination(storage)

    def held(self, storage: str) -> AlreadyPinned:
        place = self._storages[storage]
        return AlreadyPinned(self._slabs[place.slab], place.start, place.num_bytes)

    @property
    def host_bytes(self) -> int:
        return sum(slab.num_bytes for slab in self._slabs)

    @property
    def account(self) -> dict[str, int]:
        adopted = sum(self._storages[name].num_bytes for name in self.adopted)
        kept = self.host_bytes - sum(self._slabs[self._storages[name].slab].num_bytes for name in self.adopted)
        return {"host" if self.registrar is None else "host_pinned": kept, "adopted": adopted}

    def unpin(self) -> None:
        """See :class:`Store`. What is held was pinned before, and tensors of a GPU view it: it stays pinned."""
        # A registration that has not begun must not pin what this unpins.
        self._pool.shutdown(cancel_futures=True)
        for slab in self._slabs[self._num_held :]:
            slab.unregister()

    def close(self) -> None:
        """Release the slabs; each is unregistered and freed with its last view."""
        self._pool.shutdown(cancel_futures=True)
        self._codes.clear()
        self._storages.clear()
        self._slabs.clear()


def open_pinned(
    plan: Plan,
    offloaded: dict[str, BoundStorage],
    registrar: CudaRegistrar | None,
    held: Mapping[str, AlreadyPinned] | None = None,
) -> tuple[PinnedStore, dict[str, torch.Tensor]]:
    """A pinned store for ``plan``, and its destinations still to be filled.

    Large live tensors are pinned in place, and storages ``held`` in pinned memory stay there.
    """
    if registrar is not None:
        refuse_capture(registrar)
    live = {name: storage.original_bytes() for name, storage in offloaded.items() if storage.home.type == "cpu"}
    adopt = {
        name: buffer
        for name, buffer in live.items()
        if can_pin_in_place(buffer, SLAB_ALIGNMENT_BYTES if name in plan.uva else 1)
    }
    units = [unit for unit in plan.units if unit.store == plan.mode]
    store = PinnedStore(units, plan.uva, registrar, adopt=adopt, held=held)
    if registrar is not None and any(storage.home.type == "cuda" for storage in offloaded.values()):
        store.pin_now()
    return store, {name: store.destination(name) for name in offloaded if name not in store.adopted | store.kept}


def registrar_for(device: torch.device) -> CudaRegistrar | None:
    """Function that pins memory for ``device``; ``None`` where nothing does."""
    return CudaRegistrar(device) if device.type == "cuda" and not pinning_disabled() else None
