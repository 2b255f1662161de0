"""The ``disk`` store: the unmodified safetensors files of the checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from headrace.checkpoint.safetensors_header import FileFingerprint, FileTensor
from headrace.checkpoint.weight_map import TensorSource
from headrace.errors import CheckpointError, OptionError
from headrace.formatting import format_size
from headrace.memory.pages import map_parts
from headrace.memory.pinned import pinned_region
from headrace.model.live_tensors import BoundStorage, resident_rule
from headrace.plan.kinds import Unit
from headrace.stats import ReadStats
from headrace.stores.file_reads import ConvertedFile, DiskOptions, File, ReadCounter
from headrace.stores.product_bits import rounds_in_place
from headrace.stores.sources import TENSOR_ALIGN_BYTES, ByteRange, Copy, fill_in_threads
from headrace.stores.store import Opened, Store, StoreRequest, kept_by_others, new_buffer, require_weights


def open_units(request: StoreRequest, units: Sequence[Unit], offloaded: Mapping[str, BoundStorage]) -> Opened:
    """The store of ``offloaded``, compared with the files where the model has bytes.

    Raises:
        CheckpointError, OptionError: no files, or files that cannot be used.
    """
    plan, weights = request.plan, request.weights
    if weights is None and plan.spilled_bytes:
        raise OptionError(
            f"{len(plan.staged_units)} of the plan's {len(plan.units)} units ({format_size(plan.spilled_bytes)}) are "
            f"in safetensors files, and none were given: pass checkpoint=FOLDER to headrace.offload, or make a plan "
            f"with all of them in host memory: mode 'cpu' (--offload-mode cpu)"
        )
    if not offloaded:
        return Opened(DiskStore({}, request.disk))
    weights = require_weights(weights)
    on_gpu = request.device.type == "cuda"
    sources = {name: weights.source(bound.info) for name, bound in offloaded.items()}
    lookups = {name for name, bound in offloaded.items() if bound.info.is_lookup}
    stamps = weights.checkpoint.stamps
    # A model that is moved to another device leaves its aliases behind, offloaded or not.
    stays = {name: bound for name, bound in offloaded.items() if bound.home == request.device}
    kept = kept_by_others(request.bound, stays)
    if kept and on_gpu:
        raise OptionError(
            f"the memory of {kept[0]} (of {len(kept)} weights) has another user (an alias such as .detach() or a "
            f"state_dict(), an array of .numpy(), a list of views), and files are to replace it, so that a write there "
            f"would be lost: drop it first (del), use mode 'cpu', or keep it resident ({resident_rule(kept[0])})"
        )
    # Their memory stays in any case; what is written there is read from it.
    adopted = {name: offloaded[name].original_bytes() for name in kept}
    store = DiskStore(sources, request.disk, stamps=stamps, pin_in_place=on_gpu, lookups=lookups, adopted=adopted)
    for name in () if on_gpu else plan.uva.keys() & offloaded.keys():
        _refuse_other_bits(offloaded[name], store.in_place(name))
    for bound in offloaded.values():
        _compare_with_files(bound, store)
    return Opened(store)


def _refuse_other_bits(bound: BoundStorage, buffer: torch.Tensor) -> None:
    info, offset = bound.info, buffer.data_ptr() % TENSOR_ALIGN_BYTES
    if info.is_lookup or not rounds_in_place(bound, buffer):  # rows of a table are the same at any address
        return
    raise OptionError(
        f"{info.name} starts {offset} bytes after a multiple of {TENSOR_ALIGN_BYTES} in its file, and products that "
        f"read it in place there may round differently; prefetch it instead (--offload-rule '{info.name}=prefetch'), "
        f"or rewrite the checkpoint aligned"
    )


def _compare_with_files(bound: BoundStorage, store: DiskStore) -> None:
    """Require that the files hold the weights of a live model, which are dropped because the files replace them."""
    if bound.on_meta:
        return
    buffer = new_buffer(bound.info.num_bytes)
    store.read(bound.info.name, buffer)
    if not torch.equal(buffer, bound.original_bytes().cpu()):
        raise CheckpointError(
            f"{bound.info.name}: the model's values differ from the checkpoint's; save the model first "
            f"(save_pretrained), or use mode 'cpu'"
        )


class DiskStore(Store):
    """``disk``: the unmodified safetensors files that the storages came in, read by position straight into the slot.

    What the files hold in another dtype is converted by the thread that reads it.
    """

    def __init__(
        self,
        sources: Mapping[str, TensorSource],
        options: DiskOptions | None = None,
        *,
        stamps: Iterable[FileFingerprint] = (),
        pin_in_place: bool = False,
        lookups: Collection[str] = (),
        adopted: Mapping[str, torch.Tensor] | None = None,
        counter: ReadCounter | None = None,
    ) -> None:
        """Open the files; nothing is read.

        Args:
            sources: per storage name where its bytes are.
            options: how files are read.
            stamps: what files have to be; those without may change.
            pin_in_place: what is read in place is copied into pinned memory first, because a GPU cannot address a
                mapped file.
            lookups: tables that are read in place, of which single rows are looked up.
            adopted: storages whose bytes are read from the memory that they came in (uint8, 1-D, CPU).
            counter: counter of what is read; default one of its own.
        """
        self._sources = dict(sources)
        options = options or DiskOptions()
        paths = {part.tensor.path for source in self._sources.values() for part in source.parts}
        # Of the files that the plan was made from: offsets of their headers are not valid in others.
        expected = {stamp.path: stamp for stamp in stamps}
        self._counter = counter = counter or ReadCounter()
        self._files = {path: File(path, options, expected.get(path), counter) for path in sorted(paths)}
        self._lookups = frozenset(lookups)
        self._adopted = dict(adopted or {})
        self._mapped: dict[str, torch.Tensor] = {}
        self._mapped_paths: dict[str, set[Path]] = {}
        self._pin_in_place = pin_in_place
        self._pinned: dict[str, torch.Tensor] = {}

    @property
    def reads(self) -> ReadStats:
        """Counts of what was read."""
        return self._counter.stats

    def adopts(self, storage: str) -> bool:
        return storage in self._adopted

    def copies(self, storage: str) -> list[Copy]:
        if storage in self._adopted:
            return [Copy(ByteRange.of(self._adopted[storage]), 0)]
        source = self._sources[storage]
        return [Copy(self._range(part.tensor, source.dtype), part.offset) for part in source.parts]

    def _range(self, tensor: FileTensor, dtype: torch.dtype) -> ByteRange:
        """The bytes of a file tensor as elements of ``dtype``."""
        file = self._files[tensor.path]
        if tensor.dtype == dtype:
            return ByteRange(file, tensor.offset, tensor.num_bytes)
        converted = ConvertedFile(file, tensor.offset, tensor.dtype, dtype)
        return ByteRange(converted, 0, tensor.num_bytes // tensor.dtype.itemsize * dtype.itemsize)

    def in_place(self, storage: str) -> torch.Tensor:
        if storage in self._adopted:
            return self._adopted[storage]
        if self._pin_in_place:
            if storage not in self._pinned:
                self._pinned[storage] = self._read_pinned(storage)
            return self._pinned[storage]
        source = self._sources[storage]
        if why := source.why_not_mappable:
            raise CheckpointError(f"{storage} {why} and cannot be read in place; prefetch it instead")
        if storage not in self._mapped:
            parts = [(self._files[p.tensor.path].fd, p.tensor.offset, p.tensor.num_bytes) for p in source.parts]
            self._mapped[storage] = torch.from_numpy(map_parts(parts, at_random=storage in self._lookups))
            self._mapped_paths[storage] = {part.tensor.path for part in source.parts}
        return self._mapped[storage]

    def require_mapped_unchanged(self, storage: str | None = None) -> None:
        names = self._mapped_paths if storage is None else [storage]
        for path in set().union(*(self._mapped_paths.get(name, ()) for name in names)):
            self._files[path].require_unchanged()

    @property
    def host_bytes(self) -> int:
        joined = sum(self._sources[name].joined_bytes for name in self._mapped)
        return joined + sum(buffer.numel() for buffer in self._pinned.values())

    @property
    def account(self) -> dict[str, int]:
        joined = sum(self._sources[name].joined_bytes for name in self._mapped)
        in_files = sum(source.file_bytes for source in self._sources.values())
        adopted = sum(buffer.numel() for buffer in self._adopted.values())
        return {"file": in_files - adopted} | {
            name: size for name, size in (("host", joined), ("adopted", adopted)) if size
        }

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._mapped.clear()  # tensors may view a mapping, which ends with the last of them
        self._adopted.clear()
        self._pinned.clear()

    def _read_pinned(self, storage: str) -> torch.Tensor:
        """A copy of ``storage`` in pinned memory, read by several threads."""
        copies = self.copies(storage)
        buffer = pinned_region(sum(copy.num_bytes for copy in copies))
        fill_in_threads(buffer, copies)
        return buffer
