"""Packed experts that triton_kernels keeps in objects: bytes that headrace can move, and tiles that find rows.

A ``Tensor`` of triton_kernels has a ``Storage``, whose ``data`` is in a layout that suits a kernel. Those of MXFP4 for
Hopper and before it permute bytes within an expert alone, so each expert has bytes of its own, side by side.
:func:`hold_in_parameter` makes them a parameter of their module.

``RoutingData`` lists the tiles of a step in the order of their experts' numbers. A kernel takes the number from the
tile, and finds weights, first token and count by it. :func:`route_by_rows` keeps tiles and tokens as they are, so sums
keep their order, and replaces the number by the expert's row.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import nn

from headrace.experts.kernels import tiles_of_rows_kernel
from headrace.experts.rows import RowMap

__all__ = ["at_rows", "hold_in_parameter", "is_held", "route_by_rows"]

_ALIGN, _BLOCK = 4, 1024  # int32 of 16 bytes, as triton_kernels aligns them: another alignment is another kernel


def hold_in_parameter(module: nn.Module, name: str, tensor: Any, num_experts: int) -> bool:
    """Make the bytes of ``tensor``, an object of triton_kernels, a parameter ``name`` of ``module``, [experts, ., .].

    From then on they are wherever that parameter has them.

    Returns:
        whether it did; not if its layout mixes experts, if it is no such object, or if it has been done.
    """
    storage: Any = getattr(tensor, "storage", None)
    data = None if is_held(tensor) else getattr(storage, "data", None)
    if not isinstance(data, torch.Tensor) or data.dim() != 3 or len(data) != num_experts or not data.mT.is_contiguous():
        return False
    module.register_parameter(name, nn.Parameter(data.mT, requires_grad=False))
    held: Any = object.__new__(_held_class(storage.__class__))
    vars(held).update({key: value for key, value in vars(storage).items() if key != "data"}, holder=module, name=name)
    tensor.storage = held
    return True


def is_held(tensor: Any) -> bool:
    """Whether the bytes of ``tensor`` are those of a parameter."""
    return hasattr(getattr(tensor, "storage", None), "holder")


def at_rows(tensor: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """``tensor``, which is held in a parameter, with all rows of a cache; ``tensors``: [rows, ., .] by parameter."""
    made = copy.copy(tensor)
    made.storage = copy.copy(tensor.storage)
    rows = tensors[made.storage.name]
    made.storage.holder = SimpleNamespace(**{made.storage.name: rows})
    made.shape = [len(rows), *tensor.shape[1:]]  # by which matmul_ogs chooses the width of offsets
    made.shape_max = list(made.shape)
    return made


def route_by_rows(routing: Any, cache: RowMap, num_rows: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Bring the experts of a step to the device.

    Args:
        routing: a ``RoutingData`` with the numbers of experts.
        cache: of their layer.
        num_rows: of its ranges, below 2**16.

    Returns:
        ``routing`` with rows for numbers, and the experts that were asked for with their rows.
    """
    data = routing.expt_data
    tiles_of = data.block_pid_map  # by the height of a tile; what is none is -1
    least = min(tiles_of)
    ids = tiles_of[least] & 0xFFFF
    rows = cache.admit(ids)
    count = ids.numel()
    tiles = ids.new_empty(len(tiles_of), triton.cdiv(count, _ALIGN) * _ALIGN)
    torch.stack(list(tiles_of.values()), out=tiles[:, :count])
    by_row = ids.new_empty(2, triton.cdiv(num_rows, _ALIGN) * _ALIGN)
    tiles_of_rows_kernel[(triton.cdiv(count, _BLOCK), len(tiles))](
        tiles, tiles.stride(0), count, rows, data.token_offs_pad[least], data.hist, data.token_offs_raw,
        by_row[0], by_row[1], BLOCK=_BLOCK,
    )  # fmt: skip
    made, routed = copy.copy(data), copy.copy(routing)
    made.hist, made.token_offs_raw = by_row
    made.block_pid_map = {height: each[:count] for height, each in zip(tiles_of, tiles, strict=True)}
    routed.expt_data = made
    return routed, ids, rows


@functools.cache
def _held_class(kind: Any) -> Any:
    # matmul_ogs assigns the same bytes as uint8, which they are.
    data = property(lambda storage: getattr(storage.holder, storage.name).mT, lambda storage, same: None)
    return type(f"Held{kind.__name__}", (kind,), {"data": data})
