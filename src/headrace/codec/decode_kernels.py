"""The kernel that decodes ``exp3`` (:mod:`headrace.codec.exponents`) on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.codec.exponents import Piece
from headrace.codec.layout import BLOCK, WIDTH, parts_of


def decode_on_gpu(piece: Piece, code: torch.Tensor, into: torch.Tensor) -> None:
    """Decode ``code`` (that of ``piece``, on the device) ``into`` (uint8, 1-D, of its unit), on the current stream."""
    assert piece.is_coded
    out, count = into[piece.start : piece.start + piece.num_bytes].view(torch.int16), piece.num_bytes // 2
    parts = parts_of(count, 0)
    table, firsts = code[parts.table : parts.firsts].view(torch.int64), code[parts.firsts : parts.escapes]
    grid = (triton.cdiv(count, BLOCK),)
    escapes = code[parts.escapes :]
    _decode[grid](code, table, firsts.view(torch.int32), escapes, out, count, WIDTH, BLOCK, num_warps=2)


@triton.jit  # type: ignore[untyped-decorator]
def _decode(code_ptr, table_ptr, firsts_ptr, escapes_ptr, out_ptr, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    plane: tl.constexpr = BLOCK // 8
    block = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    planes = code_ptr + count + block * (plane * WIDTH) + k % plane
    index = tl.zeros((BLOCK,), tl.int32)
    for bit in tl.static_range(WIDTH):
        index |= ((tl.load(planes + bit * plane).to(tl.int32) >> (k // plane)) & 1) << bit
    # The table is in a register: a byte is shifted out of it faster than it is looked up in memory.
    exponent = ((tl.load(table_ptr) >> (index * 8).to(tl.int64)) & 0xFF).to(tl.int32)
    escaped = index == (1 << WIDTH) - 1
    number = tl.load(firsts_ptr + block) + tl.cumsum(escaped.to(tl.int32), 0) - 1
    exponent = tl.where(escaped, tl.load(escapes_ptr + number, escaped, other=0).to(tl.int32), exponent)
    mask = block * BLOCK + k < count
    other = tl.load(code_ptr + block * BLOCK + k, mask, other=0).to(tl.int32)
    weight = ((other & 0x80) << 8) | (exponent << 7) | (other & 0x7F)
    tl.store(out_ptr + block * BLOCK + k, weight.to(tl.int16), mask)
