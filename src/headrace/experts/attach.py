"""A layer of experts pointed at its rows, and the hook that has its module read these."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from headrace.config import debug_enabled
from headrace.experts.cache import ExpertCache
from headrace.experts.packed import read_by_rows
from headrace.experts.rows import CacheStreamOrder, ExpertHook, ReadsRows
from headrace.model.live_tensors import BoundStorage, OnAccess
from headrace.plan.cached_experts import CachedLayer


def cached_hook(
    model: nn.Module,
    layer: CachedLayer,
    bound: Mapping[str, BoundStorage],
    rows: Mapping[str, torch.Tensor],
    turn: CacheStreamOrder,
    factory: ReadsRows | None,
    on_outside_access: OnAccess | None,
) -> tuple[ExpertHook, ExpertCache]:
    """Have the module of ``layer`` read its experts by rows; its own tensors become placeholders.

    Args:
        rows: rows of each storage: those on the device and those that are stored.
        turn: stream order of all layers of the model.
        factory: makes the hook; default that of transformers' experts.
    """
    memory, first = list(rows.values()), layer.first_overflow_row
    home = layer.first_row + torch.arange(layer.num_experts, device=memory[0].device)
    overflow_rows = range(first, first + layer.overflow_rows)
    # Kernels of engines take what is no expert for padding.
    num_rows = layer.num_experts if factory else len(memory[0])
    shift = num_rows - layer.num_experts
    # Engines keep tensors of their own.
    tensors_in_place = [] if factory else [bound[name].tensors[0] for name in layer.storages]

    def check() -> None:
        for tensor in tensors_in_place:
            tensor.require_in_place()

    cache = ExpertCache(memory, home, layer.num_slots, overflow_rows, turn, shift, debug_enabled(), check)
    tensors = {}
    for name, row in rows.items():
        (tensor,) = bound[name].tensors
        bound[name].point_at_slot(row.view(-1)[: layer.storages[name]], on_outside_access)
        tensors[tensor.info.locations[0].attr] = row.view(tensor.info.dtype).view(-1, *tensor.info.shape[1:])
    return (factory or read_by_rows)(model.get_submodule(layer.module_fqn), tensors, cache), cache
