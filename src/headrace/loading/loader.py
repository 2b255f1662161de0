"""Loads the weights of an offload in one pass, from files and live tensors to the store and the device.

Tensors that the files hold in another form are converted on the way, one recipe at a time.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from headrace.checkpoint.safetensors_header import FileFingerprint
from headrace.checkpoint.weight_map import Conversion, TensorSource, WeightMap
from headrace.config import pin_memory_disabled
from headrace.errors import OptionError
from headrace.loading.read_pool import PIECE_BYTES, CudaUploader, Delivery, Progress, deliver
from headrace.memory.pinned import MIN_ADOPTED_BYTES, CudaRegistrar, pin_threads
from headrace.memory.system import cpus_near, trim_heap
from headrace.model.live_tensors import BoundStorage
from headrace.stats import ReadStats
from headrace.stores.sources import ByteRange, Copy, DiskOptions, ReadCounter
from headrace.stores.store import DiskStore, Store, new_buffer

__all__ = ["TensorConverter", "WeightLoader", "require_weights"]

# The bytes of a live tensor exist twice until its source is freed, so these jobs are small and few.
_LIVE_PIECE_BYTES = 2 << 20
_LIVE_EXTRA_JOBS = 4
_TRIM_BYTES = 32 << 20

# A disk needs several requests at once, and a reader makes none while it copies out what it has read: on two cores
# four readers reach twice the rate of two. From the page cache the rates are the same.
_MIN_FILE_READERS = 8


@dataclass(eq=False)
class WeightLoader:
    """Fills ``destinations`` in the store, and ``residents`` where compute will read them.

    A storage that the model has in host memory is freed as soon as its bytes are in a pinned store; its tensors are
    views of the store from then on.

    Attributes:
        bound: all storages, by name.
        store: owns the memory of ``destinations``.
        destinations: by name, memory of the store that is still to be filled (uint8, 1-D, host).
        residents: by name, where the bytes go (uint8, 1-D).
        device: where compute runs.
        weights: the checkpoint, for tensors on ``meta``.
        disk: how its files are read.
        progress: called with (bytes loaded, bytes to load) over the whole pass.
    """

    bound: Mapping[str, BoundStorage]
    store: Store
    destinations: Mapping[str, torch.Tensor]
    residents: Mapping[str, torch.Tensor]
    device: torch.device
    weights: WeightMap | None = None
    disk: DiskOptions | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        # Not copied into one dict: to look a destination up may be to wait until its memory is made.
        self._places = ChainMap(dict(self.residents), cast("dict[str, torch.Tensor]", self.destinations))
        self._sources: dict[str, TensorSource] = {}
        self._recipes: dict[str, tuple[str, Conversion]] = {}
        for name in self._places:
            if self.bound[name].on_meta:
                files, storage = require_weights(self.weights), self.bound[name].info
                if (recipe := files.recipe(storage)) is not None:
                    self._recipes[name] = recipe
                else:
                    self._sources[name] = files.source(storage)
        self._total_bytes = sum(self.bound[name].info.num_bytes for name in self._places)
        self._done_bytes = 0
        self._freed_bytes = 0

    def run(self) -> ReadStats:
        """Load everything; return how the bytes that came from files were read.

        Raises:
            TransferError, CheckpointError: bytes that cannot be read.
        """
        counter = ReadCounter()
        if not self._places:
            return counter.stats
        self._on_progress(0)
        self._copy_from_devices()
        # Live tensors before files, and alone: the rest can use the memory that they free.
        live = [name for name in self._places if self.bound[name].home.type == "cpu"]
        self._deliver([name for name in live if name in self.destinations], self._live_copies, in_small_pieces=True)
        self._deliver([name for name in live if name not in self.destinations], self._live_copies)
        # direct=None: cached pages come from the page cache, the rest by O_DIRECT. Over whole cold loads, direct and
        # buffered reads and a trial of both were within 10 % of each other, so nothing is measured first.
        disk, readers = self.disk or DiskOptions(direct=None), pin_threads(_MIN_FILE_READERS)
        stamps = () if self.weights is None else self.weights.checkpoint.stamps
        # Front to back through each file, so that neighbouring tensors become one request.
        first = {name: source.parts[0].tensor for name, source in self._sources.items()}
        by_position = sorted(first, key=lambda name: (str(first[name].path), first[name].offset))
        with closing(DiskStore(self._sources, disk, stamps=stamps, counter=counter)) as files:
            self._deliver(by_position, files.copies, readers)
        # Conversions take memory of their own on the way, so they come last.
        cpus = cpus_near(self.device)
        converter = TensorConverter(self._recipes, disk, counter, num_threads=readers, stamps=stamps, cpus=cpus)
        with closing(converter):
            self._deliver(converter.order, converter.copies, in_small_pieces=True)
        if self._freed_bytes:
            trim_heap()
        return counter.stats

    def _live_copies(self, name: str) -> list[Copy]:
        return [Copy(ByteRange.of(self.bound[name].original_bytes()), 0)]

    def _deliver(
        self,
        names: Sequence[str],
        copies: Callable[[str], Sequence[Copy]],
        num_threads: int | None = None,
        *,
        in_small_pieces: bool = False,
    ) -> None:
        num_threads = num_threads or pin_threads()
        uploads = not all(self.residents[name].is_cpu for name in names if name in self.residents)
        registrar = None if pin_memory_disabled() else CudaRegistrar(self.device)
        deliver(
            (Delivery(name, partial(copies, name), self._places[name]) for name in names),
            num_threads=num_threads,
            uploader=CudaUploader(self.device, registrar) if uploads else None,
            on_loaded=self._on_loaded,
            on_progress=self._on_progress,
            cpus=cpus_near(self.device),
            piece_bytes=_LIVE_PIECE_BYTES if in_small_pieces else PIECE_BYTES,
            max_jobs=num_threads + _LIVE_EXTRA_JOBS if in_small_pieces else None,
        )

    def _copy_from_devices(self) -> None:
        """Copy storages that are on a GPU into their destinations."""
        # Not through deliver(): the destinations are pinned, so one asynchronous copy each reaches the link's rate.
        names = [name for name in self._places if self.bound[name].home.type == "cuda"]
        for name in names:
            self._places[name].copy_(self.bound[name].original_bytes(), non_blocking=True)
        for home in {self.bound[name].home for name in names}:
            torch.cuda.synchronize(home)  # the host reads these bytes next, and no event orders it
        for name in names:
            self._on_progress(self.bound[name].info.num_bytes)
            if name in self.destinations:
                self.store.on_loaded(name)

    def _on_progress(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self.progress is not None:
            self.progress(self._done_bytes, self._total_bytes)

    def _on_loaded(self, name: str) -> None:
        if name in self._recipes:
            self._trim_after(self.bound[name].info.num_bytes)
        if name not in self.destinations:
            return
        bound = self.bound[name]
        if not bound.on_meta and self.store.takes_over:
            # Here and not after the pass, so that the model is never in memory twice.
            bound.point_at(self.destinations[name])
            bound.forget_original()
            self._trim_after(bound.info.num_bytes)
        self.store.on_loaded(name)

    def _trim_after(self, num_bytes: int) -> None:
        """Return freed heap memory to the system after every 32 MiB of it."""
        # glibc unmaps larger blocks itself; smaller freed ones stay with the heap until malloc_trim.
        if num_bytes >= MIN_ADOPTED_BYTES:
            return
        before = self._freed_bytes // _TRIM_BYTES
        self._freed_bytes += num_bytes
        if self._freed_bytes // _TRIM_BYTES > before:
            trim_heap()


@dataclass(eq=False)
class TensorConverter:
    """The bytes of storages that the files hold in another form (transposed, another dtype), one recipe at a time.

    At any time memory holds the inputs of one recipe, its intermediate tensors and its results, until these are in
    their destinations: a few times the largest of them, whatever the size of the model.

    Attributes:
        recipes: by storage name, the name of the tensor that covers it, and its recipe.
        disk: how the files are read.
        counter: counts the bytes read.
        num_threads: readers.
        stamps: fingerprints that the files must have at every read.
        cpus: the readers stay on these processors.
    """

    recipes: Mapping[str, tuple[str, Conversion]]
    disk: DiskOptions
    counter: ReadCounter
    num_threads: int
    stamps: Iterable[FileFingerprint] = ()
    cpus: Collection[int] | None = None

    def __post_init__(self) -> None:
        parts = {part.name: TensorSource.of(part) for _, recipe in self.recipes.values() for part in recipe.parts}
        self._files = DiskStore(parts, self.disk, stamps=self.stamps, counter=self.counter)
        self._ready: dict[str, torch.Tensor] = {}  # results of a recipe that were not asked for yet

    @property
    def order(self) -> list[str]:
        """The storages in the order in which to ask for them."""
        # The results of one recipe wait in memory until each is asked for, so they are asked for in a row.
        first = {recipe.names: number for number, (_, recipe) in reversed([*enumerate(self.recipes.values())])}
        return sorted(self.recipes, key=lambda storage: first[self.recipes[storage][1].names])

    def copies(self, storage: str) -> Sequence[Copy]:
        """The bytes of ``storage``, converted now; the returned copies alone keep them alive.

        Raises:
            TransferError: inputs that cannot be read.
        """
        if storage not in self._ready:
            recipe = self.recipes[storage][1]
            made = recipe.make(self._read(recipe))
            for other, (name, one) in self.recipes.items():
                if one is recipe:
                    self._ready[other] = made.pop(name).detach().reshape(-1).view(torch.uint8)
        return [Copy(ByteRange.of(self._ready.pop(storage)), 0)]

    def close(self) -> None:
        """Give back files and memory."""
        self._files.close()
        self._ready.clear()

    def _read(self, recipe: Conversion) -> dict[str, torch.Tensor]:
        buffers = {part.name: new_buffer(part.num_bytes) for part in recipe.parts}
        deliveries = (Delivery(name, partial(self._files.copies, name), buffer) for name, buffer in buffers.items())
        deliver(deliveries, num_threads=self.num_threads, cpus=self.cpus)
        return {part.name: buffers[part.name].view(part.dtype).reshape(part.shape) for part in recipe.parts}


def require_weights(weights: WeightMap | None) -> WeightMap:
    """Return ``weights``; OptionError if there are none."""
    if weights is None:
        raise OptionError(
            "this offload reads weights from safetensors files, and none were given: pass checkpoint=FOLDER to "
            "headrace.offload (model.save_pretrained(FOLDER) or safetensors.torch.save_model writes one)"
        )
    return weights
