"""Whether this CPU's products have the same bits with a weight that lies at another address, by trying them."""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F

from headrace.model.live_tensors import BoundStorage
from headrace.stores.sources import TENSOR_ALIGN_BYTES

_TRIED_ROWS = (1, 4, 64)
_TRIED_BYTES = 16 << 20


def rounds_in_place(bound: BoundStorage, buffer: torch.Tensor) -> bool:
    """Whether products with a tensor that is read in place in ``buffer`` may be summed in another order."""
    info, offset = bound.info.tensors[0], buffer.data_ptr() % TENSOR_ALIGN_BYTES
    is_exact = not info.shape or (len(info.shape) == 1 and not info.dtype.is_floating_point)
    return offset > 0 and not is_exact and not same_bits_at(offset, info.shape, info.dtype)


@cache
@torch.no_grad()
def same_bits_at(offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether this CPU's products with a weight ``offset`` bytes past a multiple of 64 have the bits of one at it.

    Tried on random values with few rows and with many, as vectors of the weight's rows and of its columns, and for
    [experts, ., .] in a batch and in groups. Kernels go by shape, dtype and address, not by values. ``False`` also for
    what was not tried: more than three dimensions (convolutions), and dtypes that are no plain floating point.
    """
    if len(shape) > 3 or not dtype.is_floating_point or dtype.itemsize < 2:
        return False
    *experts, out, size = (1, *shape)[-max(2, len(shape)) :]
    out = min(out, max(1, _TRIED_BYTES // (size * dtype.itemsize)))
    # As many of them as start at different bytes, and for a batch two.
    apart = TENSOR_ALIGN_BYTES // math.gcd(TENSOR_ALIGN_BYTES, out * size * dtype.itemsize) if experts else 1
    count = min(experts[0], max(2, apart)) if experts else 1
    made = torch.Generator("cpu").manual_seed(0)
    weight = torch.randn(count, out, size, generator=made, device="cpu").to(dtype)
    memory = torch.empty(weight.nbytes + offset, dtype=torch.uint8, device="cpu")  # torch aligns it to 64 bytes
    found: list[list[torch.Tensor]] = []
    for start in (0, offset):
        place = memory[start : start + weight.nbytes].view(dtype).view(weight.shape)
        found.append(_tried_products(place.copy_(weight), apart))
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def _tried_products(weight: torch.Tensor, apart: int) -> list[torch.Tensor]:
    """Products with each of the first ``apart`` experts of ``weight`` [experts, out, in], and with all of them."""
    made = torch.Generator("cpu").manual_seed(1)
    count, out, size = weight.shape
    products = []
    for rows in _TRIED_ROWS:
        x = torch.randn(count, rows, size, generator=made, device="cpu").to(weight.dtype)
        y = torch.randn(count, rows, out, generator=made, device="cpu").to(weight.dtype)
        for each, mine, others in list(zip(weight, x, y, strict=True))[:apart]:
            products += [F.linear(mine, each), others @ each]
            if out == 1:  # a vector has products of its own
                products += [mine @ each[0], each[0] @ mine.mT, torch.dot(mine[0], each[0])]
        if count > 1:
            products += [x @ weight.mT, y @ weight, weight @ x[:, 0, :, None]]
        # What grouped products ask for.
        if count > 1 and weight.dtype.itemsize <= 4 and weight.dtype.itemsize * math.gcd(out, size) % 16 == 0:
            ends = torch.arange(rows, count * rows + 1, rows, dtype=torch.int32, device="cpu")
            products += [F.grouped_mm(x.flatten(0, 1), weight.mT, offs=ends)]
    return products
