"""A layer of experts pointed at its rows, and the hook that has its module read these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn

from headrace.experts.rows import CachedExperts, ExpertHook, MakesCache, ReadsRows, RowMap
from headrace.model.live_tensors import BoundStorage, OnAccess
from headrace.model.memory_profile import is_routed
from headrace.plan.cached_experts import CachedLayer

_Cache = TypeVar("_Cache", bound=RowMap)


def cached_hook(
    model: nn.Module,
    layer: CachedLayer,
    bound: Mapping[str, BoundStorage],
    rows: Mapping[str, torch.Tensor],
    make_cache: MakesCache[_Cache],
    factory: ReadsRows | None,
    on_outside_access: OnAccess | None,
) -> tuple[ExpertHook, _Cache]:
    """Have the module of ``layer`` read its experts by rows; its own tensors become placeholders.

    Args:
        rows: rows of each storage: those on the device and those that are stored.
        make_cache: makes the cache of the layer.
        factory: makes the hook; default that of transformers' experts.
    """
    # Kernels of engines take what is no expert for padding.
    num_rows = layer.num_experts if factory else len(next(iter(rows.values())))
    # Engines keep tensors of their own.
    tensors_in_place = [] if factory else [bound[name].tensors[0] for name in layer.storages]

    def check() -> None:
        for tensor in tensors_in_place:
            tensor.require_in_place()

    cache = make_cache(layer, rows, num_rows - layer.num_experts, check)
    tensors = {}
    for name, row in rows.items():
        (tensor,) = bound[name].tensors
        bound[name].point_at_slot(row.view(-1)[: layer.storages[name]], on_outside_access)
        tensors[tensor.info.locations[0].attr] = row.view(tensor.info.dtype).view(-1, *tensor.info.shape[1:])
    return (factory or read_by_rows)(model.get_submodule(layer.module_fqn), tensors, cache), cache


def read_by_rows(module: nn.Module, tensors: Mapping[str, torch.Tensor], cache: RowMap) -> CachedExperts:
    """Run experts of transformers by rows; see :data:`headrace.experts.rows.ReadsRows`."""
    if not is_routed(module):
        return CachedExperts(module, tensors, cache)
    from headrace.experts.packed import PackedExperts  # imports Triton

    return PackedExperts(module, tensors, cache)
