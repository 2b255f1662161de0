"""Kernels that decode ``exp4`` (:mod:`headrace.coding.exp4`) on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.coding.exp4 import Piece
from headrace.coding.layout import offsets

__all__ = ["decode_on_gpu"]

_BLOCK = 512
_BLOCK_OF_PATCHES = 1024


def decode_on_gpu(piece: Piece, code: torch.Tensor, into: torch.Tensor) -> None:
    """Decode ``code`` (that of ``piece``, on the device) ``into`` (uint8, 1-D, its slot), on the current stream."""
    assert piece.num_patches is not None
    out, count = into[piece.start : piece.start + piece.num_bytes].view(torch.int16), piece.num_bytes // 2
    half = count // 2
    _decode[(triton.cdiv(half, _BLOCK),)](code, out, half, BLOCK=_BLOCK, num_warps=2)
    if piece.num_patches:
        _, _, positions_at, weights_at, _ = offsets(count, piece.num_patches)
        positions = code[positions_at:weights_at].view(torch.int32)
        grid = (triton.cdiv(piece.num_patches, _BLOCK_OF_PATCHES),)
        _patch[grid](positions, code[weights_at:].view(torch.int16), out, piece.num_patches, BLOCK=_BLOCK_OF_PATCHES)


@triton.jit  # type: ignore[untyped-decorator]
def _decode(code_ptr, out_ptr, half, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = k < half
    indices = tl.load(code_ptr + 2 * half + k, mask, other=0).to(tl.int32)
    table = code_ptr + 3 * half
    for high in tl.static_range(2):
        exponent = tl.load(table + ((indices >> 4 * high) & 15)).to(tl.int32)
        other = tl.load(code_ptr + high * half + k, mask, other=0).to(tl.int32)
        weight = ((other & 0x80) << 8) | (exponent << 7) | (other & 0x7F)
        tl.store(out_ptr + high * half + k, weight.to(tl.int16), mask)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _patch(positions_ptr, weights_ptr, out_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = k < count
    tl.store(out_ptr + tl.load(positions_ptr + k, mask, other=0), tl.load(weights_ptr + k, mask), mask)
