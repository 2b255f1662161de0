"""Layout of a slab: the storages of a unit, one after the other, each aligned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from headrace.json_files import Positive
from headrace.memory.system import round_up

# Large enough for every vector load and for tensor-map descriptors; matrix kernels may pick another summation order
# for a less aligned operand, so alignment is part of the promise of equal bits.
SLAB_ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class SlabEntry:
    """One storage inside a unit's slab: its name, its offset from the start of the slab, its size."""

    storage: str
    offset: int
    num_bytes: Positive


def slab_bytes(sizes: Iterable[int]) -> int:
    """Size of a slab that holds storages of these sizes, each aligned."""
    return sum(round_up(size, SLAB_ALIGNMENT_BYTES) for size in sizes)


def lay_out_slab(sizes: Mapping[str, int]) -> tuple[tuple[SlabEntry, ...], int]:
    """Entries for the storages of these sizes (by name), in their order, and the size of the slab."""
    *offsets, end = accumulate((slab_bytes([size]) for size in sizes.values()), initial=0)
    return tuple(SlabEntry(name, at, size) for (name, size), at in zip(sizes.items(), offsets, strict=True)), end


def equal_chunk_bytes(num_bytes: int, num_chunks: int) -> int:
    """Length of each of ``num_chunks`` equal chunks of a slab, aligned; the last ones may be shorter."""
    return slab_bytes([-(-num_bytes // num_chunks)])
