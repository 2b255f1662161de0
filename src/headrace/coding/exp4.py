"""The code ``exp4`` of bf16 weights: their sign and mantissa as they are, and 4 bits for the exponent. Lossless.

The 16 commonest exponents of a piece form a table, of which each weight has an index. Weights with another exponent
(about 1 in 13,000 of normally distributed ones) are *patches*, kept whole in a list. A piece of n weights, n a multiple
of 128 as slabs are, is coded in 1.5 n bytes and 6 for each patch::

    signs and mantissas     n bytes: sign in bit 7, mantissa in bits 0 to 6
    indices                 n / 2 bytes: of weight k in the low, of weight k + n / 2 in the high half of byte k
    table                   16 bytes: the exponents
    positions, weights      of the patches, ascending: int32, then bf16; each list ends at a multiple of 16 bytes

:func:`encode` runs on any device, with torch. :func:`decode` runs on the host, with numpy;
:mod:`headrace.coding.decode_kernels` does the same on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.coding.layout import NUM_EXPONENTS, offsets

__all__ = ["Piece", "decode", "encode"]

# More patches than one in so many weights, and a piece stays as it is.
_LEAST_WEIGHTS_PER_PATCH = 64


@dataclass(frozen=True)
class Piece:
    """A part of a unit as it crosses the link.

    Attributes:
        start: where in the slab of the unit it begins, in bytes.
        num_bytes: of the slab.
        num_patches: of the code; ``None``: the piece is not coded.
        data: uint8, 1-D: the code, or the bytes themselves.
    """

    start: int
    num_bytes: int
    num_patches: int | None
    data: torch.Tensor


def encode(weights: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """The code of ``weights`` (uint8, 1-D, on any device; bytes of bf16), on the same device, and its patches.

    ``None``: they have too many exponents for the code to be shorter by much.
    """
    bits = weights.view(torch.int16)
    count, half = bits.numel(), bits.numel() // 2
    exponents = bits.bitwise_right_shift(7).bitwise_and_(0xFF).to(torch.uint8)
    table = torch.bincount(exponents, minlength=256).topk(NUM_EXPONENTS).indices
    place = torch.full((256,), NUM_EXPONENTS, dtype=torch.uint8, device=weights.device)
    place[table] = torch.arange(NUM_EXPONENTS, dtype=torch.uint8, device=weights.device)
    places = place[exponents.int()]
    positions = (places == NUM_EXPONENTS).nonzero().view(-1)
    num_patches = positions.numel()
    if num_patches * _LEAST_WEIGHTS_PER_PATCH > count:
        return None
    at, table_at, positions_at, weights_at, end = offsets(count, num_patches)
    code = torch.zeros(end, dtype=torch.uint8, device=weights.device)
    places.bitwise_and_(NUM_EXPONENTS - 1)
    code[:at] = (bits.bitwise_right_shift(8) & 0x80).bitwise_or_(bits & 0x7F).to(torch.uint8)
    code[at:table_at] = places[:half] | places[half:].bitwise_left_shift(4)
    code[table_at:positions_at] = table.to(torch.uint8)
    code[positions_at : positions_at + 4 * num_patches].view(torch.int32).copy_(positions)
    code[weights_at : weights_at + 2 * num_patches].view(torch.int16).copy_(bits[positions])
    return code, num_patches


def decode(code: np.ndarray, num_weights: int, num_patches: int, first: int, into: np.ndarray) -> None:
    """Write the weights from ``first`` on into ``into`` (uint16, 1-D), as many as there is room for."""
    at, table_at, positions_at, weights_at, _ = offsets(num_weights, num_patches)
    exponents = code[table_at:positions_at].astype(np.uint16) << 7
    half, end = num_weights // 2, first + len(into)
    for begin, stop, shift in ((first, min(end, half), 0), (max(first, half), end, 4)):
        if begin >= stop:
            continue
        start = begin - half if shift else begin
        indices = code[at + start : at + start + stop - begin] >> shift & (NUM_EXPONENTS - 1)
        others = code[begin:stop].astype(np.uint16)
        into[begin - first : stop - first] = exponents[indices] | (others & 0x80) << 8 | others & 0x7F
    positions = code[positions_at : positions_at + 4 * num_patches].view(np.int32)
    weights = code[weights_at : weights_at + 2 * num_patches].view(np.uint16)
    inside = slice(*np.searchsorted(positions, (first, end)))
    into[positions[inside] - first] = weights[inside]
