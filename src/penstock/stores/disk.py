"""Store ``disk``: the unmodified safetensors files, read by position straight into the slot (see ``file_reader``)."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from penstock.checkpoint.fingerprint import FileFingerprint
from penstock.checkpoint.weight_map import TensorSource
from penstock.errors import CheckpointError
from penstock.memory.byte_ranges import ByteRange, Copy, writable_view
from penstock.memory.pinned import pin_threads, pinned_region
from penstock.stores.file_reader import DiskOptions, File, ReadCounter
from penstock.stores.store import Store

__all__ = ["DiskOptions", "DiskStore", "File"]

PINNED_PIECE_BYTES = 8 << 20


class DiskStore(Store):
    """Reads storages from the checkpoint files they came in."""

    def __init__(
        self,
        sources: Mapping[str, TensorSource],
        options: DiskOptions | None = None,
        *,
        stamps: Iterable[FileFingerprint] = (),
        pin_in_place: bool = False,
        counter: ReadCounter | None = None,
    ) -> None:
        """Open the files; nothing is read.

        Args:
            sources: per storage name where its bytes are.
            options: how files are read.
            stamps: what files have to be; those without may change.
            pin_in_place: what is read in place is copied into pinned memory first, because a GPU cannot address a
                mapped file.
            counter: of what is read; default one of its own.
        """
        self._sources = dict(sources)
        options = options or DiskOptions()
        paths = {part.tensor.path for source in self._sources.values() for part in source.parts}
        expected = {stamp.path: stamp for stamp in stamps}
        counter = counter or ReadCounter()
        self._files = {path: File(path, options, expected.get(path), counter) for path in sorted(paths)}
        self._maps: dict[Path, mmap.mmap] = {}
        self._pin_in_place = pin_in_place
        self._pinned: dict[str, torch.Tensor] = {}

    def copies(self, storage: str) -> list[Copy]:
        return [
            Copy(ByteRange(self._files[part.tensor.path], part.tensor.offset, part.tensor.num_bytes), part.offset)
            for part in self._sources[storage].parts
        ]

    def in_place(self, storage: str) -> torch.Tensor:
        if self._pin_in_place:
            if storage not in self._pinned:
                self._pinned[storage] = self._read_pinned(storage)
            return self._pinned[storage]
        source = self._sources[storage]
        if len(source.parts) != 1:
            raise CheckpointError(
                f"{storage} lies in {len(source.parts)} pieces in the checkpoint and cannot be read in place; "
                f"prefetch it instead"
            )
        tensor = source.parts[0].tensor
        if tensor.path not in self._maps:
            # Copy-on-write, because torch has no read-only tensors: a stray write stays in this process.
            mapping = mmap.mmap(self._files[tensor.path].fd, 0, access=mmap.ACCESS_COPY)
            # Rows are looked up at random: read-ahead would only fill memory.
            mapping.madvise(mmap.MADV_RANDOM)
            self._maps[tensor.path] = mapping
        mapped = self._maps[tensor.path]
        return torch.frombuffer(mapped, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.offset)

    def require_mapped_unchanged(self) -> None:
        for path in self._maps:
            self._files[path].require_unchanged()

    @property
    def host_bytes(self) -> int:
        return sum(blob.numel() for blob in self._pinned.values())

    @property
    def account(self) -> dict[str, int]:
        return {"file": sum(part.tensor.num_bytes for source in self._sources.values() for part in source.parts)}

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._maps.clear()
        self._pinned.clear()

    def _read_pinned(self, storage: str) -> torch.Tensor:
        """A copy of ``storage`` in pinned memory, read by several threads."""
        copies = self.copies(storage)
        blob = pinned_region(sum(copy.num_bytes for copy in copies))
        view = writable_view(blob)
        pieces = (piece for copy in copies for piece in copy.pieces(PINNED_PIECE_BYTES))
        with ThreadPoolExecutor(pin_threads()) as pool:
            list(pool.map(lambda piece: piece.src.read(view[piece.dst_offset : piece.dst_end]), pieces))
        return blob
