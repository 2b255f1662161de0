"""The one pass of an offload: from files, and from the model's own tensors, to the store and to the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial

import torch

from penstock.checkpoint.weight_map import Conversion, TensorSource, WeightMap
from penstock.env import pin_memory_disabled
from penstock.errors import OptionError
from penstock.loading.convert import TensorConverter
from penstock.loading.read_pool import PIECE_BYTES, Delivery, Progress, deliver
from penstock.loading.upload import CudaUploader
from penstock.memory.byte_ranges import ByteRange, Copy
from penstock.memory.pinned import MIN_ADOPTED_BYTES, CudaRegistrar, pin_threads
from penstock.memory.system import cpus_near, trim_heap
from penstock.model.live_tensors import BoundStorage
from penstock.stats import ReadStats
from penstock.stores.file_reader import DiskOptions, ReadCounter
from penstock.stores.store import DiskStore, Store

__all__ = ["WeightLoader", "require_weights"]

# What comes from memory is in memory twice while it is copied, so it goes in small pieces.
_LIVE_PIECE_BYTES = 2 << 20
_LIVE_EXTRA_JOBS = 4
_TRIM_BYTES = 32 << 20

# A disk needs several requests at once, and a reader makes none while it copies out what it has read: on two cores
# four readers reach twice the rate of two. From the page cache the rates are the same.
_MIN_FILE_READERS = 8


class WeightLoader:
    """Fills ``destinations`` in the store, and ``residents`` where compute will read them.

    A storage that the model has in host memory is freed as soon as its bytes are in a pinned store: its tensors look
    into the store from then on, so that the model is never in memory twice.

    Args:
        bound: all storages, by name.
        store: owns the memory of ``destinations``.
        destinations: by name, memory of the store that is still to be filled (uint8, 1-D, host).
        residents: by name, where the bytes go (uint8, 1-D).
        device: where compute runs.
        weights: the checkpoint, for tensors on ``meta``.
        disk: how its files are read.
        progress: called with (bytes loaded, bytes to load) over the whole pass.
    """

    def __init__(
        self,
        bound: Mapping[str, BoundStorage],
        store: Store,
        destinations: Mapping[str, torch.Tensor],
        residents: Mapping[str, torch.Tensor],
        *,
        device: torch.device,
        weights: WeightMap | None = None,
        disk: DiskOptions | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._bound = bound
        self._store = store
        self._in_store = destinations
        self._destinations = {**destinations, **residents}
        self._device = device
        self._disk = disk or DiskOptions(direct=None)
        self._stamps = () if weights is None else weights.checkpoint.stamps
        self._counter = ReadCounter()
        self._progress = progress or (lambda done, total: None)
        self._sources: dict[str, TensorSource] = {}
        self._recipes: dict[str, tuple[str, Conversion]] = {}
        for name in self._destinations:
            if bound[name].on_meta:
                files = require_weights(weights)
                if (recipe := files.recipe(bound[name].info)) is not None:
                    self._recipes[name] = recipe
                else:
                    self._sources[name] = files.source(bound[name].info)
        self._total_bytes = sum(bound[name].info.num_bytes for name in self._destinations)
        self._done_bytes = 0
        self._freed_bytes = 0

    def run(self) -> None:
        """Bring everything.

        Raises:
            TransferError, CheckpointError: bytes that cannot be read.
        """
        if not self._destinations:
            return
        self._on_progress(0)
        self._copy_from_devices()
        # Live tensors before files, and alone: the rest can use the memory that they free.
        live = [name for name in self._destinations if self._bound[name].home.type == "cpu"]
        self._deliver([name for name in live if name in self._in_store], self._live_copies, in_small_pieces=True)
        self._deliver([name for name in live if name not in self._in_store], self._live_copies)
        self._copy_from_files()
        self._convert()  # takes memory of its own on the way, so it comes last
        if self._freed_bytes:
            trim_heap()

    @property
    def reads(self) -> ReadStats:
        """How the bytes that came from files were read."""
        return self._counter.stats

    def _live_copies(self, name: str) -> list[Copy]:
        return [Copy(ByteRange.of(self._bound[name].original_bytes()), 0)]

    def _copy_from_files(self) -> None:
        def position(name: str) -> tuple[str, int]:
            first = self._sources[name].parts[0].tensor
            return str(first.path), first.offset

        with closing(DiskStore(self._sources, self._disk, stamps=self._stamps, counter=self._counter)) as files:
            self._deliver(sorted(self._sources, key=position), files.copies, pin_threads(_MIN_FILE_READERS))

    def _convert(self) -> None:
        readers, cpus = pin_threads(_MIN_FILE_READERS), cpus_near(self._device)
        converter = TensorConverter(
            self._recipes, self._disk, self._counter, num_threads=readers, stamps=self._stamps, cpus=cpus
        )
        with closing(converter):
            self._deliver(converter.order, converter.copies, in_small_pieces=True)

    def _deliver(
        self,
        names: Sequence[str],
        copies: Callable[[str], Sequence[Copy]],
        num_threads: int | None = None,
        *,
        in_small_pieces: bool = False,
    ) -> None:
        num_threads = num_threads or pin_threads()
        uploads = not all(self._destinations[name].is_cpu for name in names)
        registrar = None if pin_memory_disabled() else CudaRegistrar(self._device)
        deliver(
            (
                Delivery(name, self._bound[name].info.num_bytes, partial(copies, name), self._destinations[name])
                for name in names
            ),
            num_threads=num_threads,
            uploader=CudaUploader(self._device, registrar) if uploads else None,
            on_loaded=self._on_loaded,
            on_progress=self._on_progress,
            cpus=cpus_near(self._device),
            piece_bytes=_LIVE_PIECE_BYTES if in_small_pieces else PIECE_BYTES,
            max_jobs=num_threads + _LIVE_EXTRA_JOBS if in_small_pieces else None,
        )

    def _copy_from_devices(self) -> None:
        """Storages on a GPU are copied at the rate of its link into memory that is pinned already."""
        names = [name for name in self._destinations if self._bound[name].home.type == "cuda"]
        for name in names:
            self._destinations[name].copy_(self._bound[name].original_bytes(), non_blocking=True)
        for home in {self._bound[name].home for name in names}:
            torch.cuda.synchronize(home)  # the host reads next, without waiting for an event
        for name in names:
            self._on_progress(self._bound[name].info.num_bytes)
            if name in self._in_store:
                self._store.on_loaded(name)

    def _on_progress(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self._progress(self._done_bytes, self._total_bytes)

    def _on_loaded(self, name: str) -> None:
        if name in self._recipes:
            self._trim_after(self._bound[name].info.num_bytes)
        if name not in self._in_store:
            return
        bound = self._bound[name]
        if not bound.on_meta and self._store.takes_over:
            bound.point_at(self._in_store[name])
            bound.forget_original()
            self._trim_after(bound.info.num_bytes)
        self._store.on_loaded(name)

    def _trim_after(self, num_bytes: int) -> None:
        """Freed blocks below glibc's mapping threshold stay with the heap until ``malloc_trim``."""
        if num_bytes >= MIN_ADOPTED_BYTES:
            return
        before = self._freed_bytes // _TRIM_BYTES
        self._freed_bytes += num_bytes
        if self._freed_bytes // _TRIM_BYTES > before:
            trim_heap()


def require_weights(weights: WeightMap | None) -> WeightMap:
    """``weights``, or an error that says where to get them."""
    if weights is None:
        raise OptionError(
            "this offload reads weights from safetensors files, and none were given: pass checkpoint=FOLDER to "
            "penstock.offload (model.save_pretrained(FOLDER) or safetensors.torch.save_model writes one)"
        )
    return weights
