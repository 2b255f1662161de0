"""Sizes of the code ``exp4`` (:mod:`headrace.coding.exp4`), which plans need, too."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.memory.system import round_up

__all__ = ["NUM_EXPONENTS", "PIECE_BYTES", "coded_bytes", "cut_pieces", "offsets"]

NUM_EXPONENTS = 16
# Of weights, before they are coded: 24 MiB on the link, long enough for its full rate.
PIECE_BYTES = 32 << 20


def cut_pieces(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Start and length of each piece of a slab."""
    return ((start, min(PIECE_BYTES, num_bytes - start)) for start in range(0, num_bytes, PIECE_BYTES))


def offsets(num_weights: int, num_patches: int) -> tuple[int, int, int, int, int]:
    """Where in the code the indices, the table, the positions and the weights of patches begin, and the end."""
    table = num_weights + num_weights // 2
    positions = table + NUM_EXPONENTS
    weights = positions + round_up(4 * num_patches, 16)
    return num_weights, table, positions, weights, weights + round_up(2 * num_patches, 16)


def coded_bytes(num_bytes: int) -> int:
    """Length of the code of a slab, without patches."""
    return sum(offsets(size // 2, 0)[-1] for _, size in cut_pieces(num_bytes))
