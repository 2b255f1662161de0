"""Tensors that the files hold in another form (transposed, another dtype), converted one recipe at a time.

At any time memory holds the inputs of one recipe, its intermediate tensors and its results, until these are in their
destinations: a few times the largest of them, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

import torch

from penstock.checkpoint.safetensors_header import FileFingerprint
from penstock.checkpoint.weight_map import Conversion, TensorSource
from penstock.loading.read_pool import Delivery, deliver
from penstock.memory.byte_ranges import ByteRange, Copy
from penstock.stores.file_reader import DiskOptions, ReadCounter
from penstock.stores.store import DiskStore, new_blob

__all__ = ["TensorConverter"]


class TensorConverter:
    """Gives the bytes of such storages.

    Args:
        recipes: by storage name, the name of the tensor that covers it, and its recipe.
        disk: how the files are read.
        counter: of what is read.
        num_threads: readers.
        stamps: what the files have to be at every read.
        cpus: they stay on these processors.
    """

    def __init__(
        self,
        recipes: Mapping[str, tuple[str, Conversion]],
        disk: DiskOptions,
        counter: ReadCounter,
        *,
        num_threads: int,
        stamps: Iterable[FileFingerprint] = (),
        cpus: Collection[int] | None = None,
    ) -> None:
        self._recipes = recipes
        self._num_threads = num_threads
        self._cpus = cpus
        parts = {part.name: part for _, recipe in recipes.values() for part in recipe.parts}
        sources = {name: TensorSource.of(part) for name, part in parts.items()}
        self._files = DiskStore(sources, disk, stamps=stamps, counter=counter)
        self._ready: dict[str, torch.Tensor] = {}  # results of a recipe that were not asked for yet

    @property
    def order(self) -> list[str]:
        """The storages, those of one recipe next to each other; ask for them in this order."""
        first = {recipe.names: number for number, (_, recipe) in reversed([*enumerate(self._recipes.values())])}
        return sorted(self._recipes, key=lambda storage: first[self._recipes[storage][1].names])

    def copies(self, storage: str) -> Sequence[Copy]:
        """The bytes of ``storage``, converted now; the returned copies alone keep them alive.

        Raises:
            TransferError: inputs that cannot be read.
        """
        if storage not in self._ready:
            recipe = self._recipes[storage][1]
            made = recipe.make(self._read(recipe))
            for other, (name, one) in self._recipes.items():
                if one is recipe:
                    self._ready[other] = _bytes_of(made.pop(name))
        return [Copy(ByteRange.of(self._ready.pop(storage)), 0)]

    def close(self) -> None:
        """Give back files and memory."""
        self._files.close()
        self._ready.clear()

    def _read(self, recipe: Conversion) -> dict[str, torch.Tensor]:
        blobs = {part.name: new_blob(part.num_bytes) for part in recipe.parts}
        deliveries = (
            Delivery(part.name, part.num_bytes, partial(self._files.copies, part.name), blobs[part.name])
            for part in recipe.parts
        )
        deliver(deliveries, num_threads=self._num_threads, cpus=self._cpus)
        return {part.name: blobs[part.name].view(part.dtype).reshape(part.shape) for part in recipe.parts}


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of ``tensor``, contiguous: uint8, 1-D."""
    blob = torch.empty(0, dtype=torch.uint8)
    return blob.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize, (tensor.nbytes,), (1,))
