"""The code ``exp3`` of bf16 weights: sign and mantissa as they are, 3 bits for the exponent.

It is lossless. The 7 commonest exponents of a piece form a table, of which each weight has an index. The highest index
is an *escape*: the exponent is in a list (of 1 in 47 normally distributed weights).
Indices are stored in blocks of 1024 weights. For n weights::

    signs and mantissas     n bytes: sign in bit 7, mantissa in bits 0 to 6
    planes                  128 bytes for each bit of the indices of a block: of weight k in bit k / 128 of byte k % 128
    table                   16 bytes: the exponents, and zeros
    firsts                  int32, by block: how many escapes the blocks before it have
    escapes                 1 byte each: exponents, in the order of the weights

Parts begin at multiples of 16 bytes. :func:`encode` runs on any device, with torch. :func:`decode` runs on the host,
with numpy; :mod:`headrace.codec.decode_kernels` does the same on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.codec.layout import BLOCK, WIDTH, parts_of

_PLANE = BLOCK // 8  # bytes
_ESCAPE = (1 << WIDTH) - 1
# Weights that are decoded at once on the host, whose caches they fit.
_CHUNK = 64 * BLOCK
# A piece whose code would take more than this share of it stays as it is.
_MOST_SHARE = 0.9


@dataclass(frozen=True)
class Piece:
    """A part of a coded unit.

    Attributes:
        start: where in the slab of the unit it begins, in bytes.
        num_bytes: bytes of the slab.
        is_coded: or else as it is.
        code_start: where in the code of the unit it begins, in bytes.
        code_bytes: bytes of the code.
    """

    start: int
    num_bytes: int
    is_coded: bool
    code_start: int
    code_bytes: int


def encode(weights: torch.Tensor) -> torch.Tensor | None:
    """The code of ``weights`` (uint8, 1-D, on any device; bytes of bf16), on the same device.

    ``None``: they have too many exponents for the code to be shorter by much.
    """
    bits, device = weights.view(torch.int16), weights.device
    exponents = bits.bitwise_right_shift(7).bitwise_and_(0xFF).to(torch.uint8)
    table = torch.bincount(exponents, minlength=256).topk(_ESCAPE).indices.to(torch.uint8)
    index_of = torch.full((256,), _ESCAPE, dtype=torch.uint8, device=device)
    index_of[table.int()] = torch.arange(_ESCAPE, dtype=torch.uint8, device=device)
    padding = -len(bits) % BLOCK
    indices = torch.nn.functional.pad(index_of.index_select(0, exponents.int()), (0, padding)).view(-1, 8, _PLANE)
    escapes = exponents[indices.view(-1)[: len(bits)] == _ESCAPE]
    parts = parts_of(len(bits), len(escapes))
    if parts.end > _MOST_SHARE * len(weights):
        return None
    code = torch.zeros(parts.end, dtype=torch.uint8, device=device)
    code[: parts.planes] = (bits.bitwise_right_shift(8) & 0x80).bitwise_or_(bits & 0x7F).to(torch.uint8)
    planes = code[parts.planes : parts.table].view(-1, WIDTH, _PLANE)
    row = torch.arange(8, dtype=torch.uint8, device=device)[:, None]
    for bit in range(WIDTH):
        planes[:, bit] = ((indices >> bit).bitwise_and_(1) << row).sum(1, dtype=torch.uint8)
    code[parts.table : parts.table + _ESCAPE] = table
    counts = (indices == _ESCAPE).sum((1, 2))
    firsts = code[parts.firsts : parts.firsts + 4 * len(counts)].view(torch.int32)
    firsts.copy_(counts.cumsum(0) - counts)
    code[parts.escapes : parts.escapes + len(escapes)] = escapes
    return code


def decode(code: np.ndarray, num_weights: int, first: int, into: np.ndarray) -> None:
    """Write the weights from ``first`` on into ``into`` (uint16, 1-D), as many as there is room for."""
    parts, end = parts_of(num_weights, 0), first + len(into)
    planes = code[parts.planes : parts.table].reshape(-1, WIDTH, _PLANE)
    table, firsts = code[parts.table : parts.firsts], code[parts.firsts : parts.escapes].view(np.int32)
    for chunk in range(first - first % _CHUNK, end, _CHUNK):
        begin, stop = max(first, chunk), min(end, chunk + _CHUNK)
        block = begin // BLOCK
        rows = np.unpackbits(planes[block : -(-stop // BLOCK)], axis=1, bitorder="little")
        rows = rows.reshape(-1, WIDTH, 8, _PLANE)
        indices = np.bitwise_or.reduce([rows[:, bit] << bit for bit in range(WIDTH)]).reshape(-1)
        exponents = table.take(indices)
        escaped = np.flatnonzero(indices == _ESCAPE)
        at = parts.escapes + int(firsts[block])
        exponents[escaped] = code[at : at + len(escaped)]
        exponents = exponents[begin - block * BLOCK :][: stop - begin].astype(np.uint16)
        others = code[begin:stop].astype(np.uint16)
        into[begin - first : stop - first] = (others & 0x80) << 8 | exponents << 7 | others & 0x7F
