"""Packed experts that triton_kernels keeps in objects: bytes that headrace can move, and tiles that find rows.

A ``Tensor`` of triton_kernels has a ``Storage``, whose ``data`` is in a layout that suits a kernel. Those of MXFP4 for
Hopper and before it permute bytes within an expert alone, so each expert has bytes of its own, side by side.
:func:`hold_packed` makes them parameters of their module.

``RoutingData`` lists the tiles of a step in the order of their experts' numbers. A kernel takes the number from the
tile, and finds weights, first token and count by it. :func:`route_by_rows` keeps tiles and tokens as they are, so sums
keep their order, and replaces the number by the expert's row.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import nn

from headrace.experts.kernels import tiles_of_rows_kernel
from headrace.experts.rows import CachedExperts, RowMap

# Of transformers' experts in MXFP4: weights, and what has their scales.
PROJECTIONS = {name: f"{name}_precision_config" for name in ("gate_up_proj", "down_proj")}

_ALIGN, _BLOCK = 4, 1024  # int32 of 16 bytes, as triton_kernels aligns them: another alignment is another kernel


def hold_packed(module: nn.Module, name: str, weight: Any, config: Any, num_experts: int) -> dict[str, str]:
    """Make parameters [experts, ., .] of ``module`` of the bytes of ``weight`` and of its scales, which ``config`` has.

    From then on the objects have their bytes wherever these parameters have them.

    Returns:
        the names of these parameters, each with the name whose place it takes; none if a layout mixes experts.
    """
    tensors = {name: weight, f"{name}_scale": config.weight_scale}
    for data in (tensor.storage.data for tensor in tensors.values()):
        if data.dim() != 3 or len(data) != num_experts or not data.mT.is_contiguous():
            return {}
    for key, tensor in tensors.items():
        if not hasattr(tensor.storage, "holder"):
            module.register_parameter(f"{key}_bytes", nn.Parameter(tensor.storage.data.mT, requires_grad=False))
            tensor.storage = _held(tensor.storage, module._parameters, f"{key}_bytes")  # the module would be a cycle
    return {f"{key}_bytes": key for key in tensors}


def at_rows(weight: Any, config: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    """``weight`` and ``config``, which are held, with all rows of a cache; ``tensors``: [rows, ., .] by parameter."""
    made, config = copy.copy(weight), copy.copy(config)
    config.weight_scale = copy.copy(config.weight_scale)
    for each in (made, config.weight_scale):
        each.storage = _held(each.storage, tensors, each.storage.name)
        each.shape = [len(tensors[each.storage.name]), *each.shape[1:]]  # by it matmul_ogs chooses how wide offsets are
        each.shape_max = list(each.shape)
    return made, config


def route_by_rows(routing: Any, cache: RowMap, num_rows: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Bring the experts of a step to the device.

    Args:
        routing: a ``RoutingData`` with the numbers of experts.
        cache: cache of their layer.
        num_rows: rows of its ranges, below 2**16.

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
    with torch.cuda.device_of(tiles):  # as in ExpertCache.admit
        tiles_of_rows_kernel[(triton.cdiv(count, _BLOCK), len(tiles))](
            tiles, tiles.stride(0), count, rows, data.token_offs_pad[least], data.hist, data.token_offs_raw,
            by_row[0], by_row[1], BLOCK=_BLOCK,
        )  # fmt: skip
    made, routed = copy.copy(data), copy.copy(routing)
    made.hist, made.token_offs_raw = by_row
    made.block_pid_map = {height: each[:count] for height, each in zip(tiles_of, tiles, strict=True)}
    routed.expt_data = made
    return routed, ids, rows


class PackedExperts(CachedExperts):
    """Experts of transformers in MXFP4, which are given the tiles of a step."""

    entry = "forward_routed"

    def __init__(self, module: Any, tensors: Mapping[str, torch.Tensor], cache: RowMap) -> None:
        """See :class:`CachedExperts`; :func:`hold_packed` has been called."""
        super().__init__(module, tensors, cache)
        self._num_rows = len(next(iter(tensors.values())))
        self._objects: dict[str, Any] = {}
        for name, config in PROJECTIONS.items():
            self._objects[name], self._objects[config] = at_rows(
                getattr(module, name), getattr(module, config), tensors
            )

    _forward = torch.compiler.disable(CachedExperts._forward)  # a compiler knows neither tiles nor objects

    def _run(self, hidden_states: torch.Tensor, routing: Any, *others: Any) -> Any:
        vars(self.twin).update(self._objects)
        routed, *admitted = route_by_rows(routing, self.cache, self._num_rows)
        output = getattr(type(self._module), self.entry)(self.twin, hidden_states, routed, *others)
        self.cache.compare(*admitted)
        return output


def _held(storage: Any, holder: Mapping[str, Any], name: str) -> Any:
    """``storage`` with the bytes of ``holder[name]``, whatever that is at the time."""
    kind = storage.__class__
    if not hasattr(storage, "holder"):
        # matmul_ogs assigns the same bytes as uint8, which they are.
        data = property(lambda held: held.holder[held.name].mT, lambda held, same: None)
        kind = type(f"Held{kind.__name__}", (kind,), {"data": data})
    made = object.__new__(kind)
    vars(made).update({key: value for key, value in vars(storage).items() if key != "data"}, holder=holder, name=name)
    return made
