"""Tensors of a plan pointed at their memory, and the hooks that go on their modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from headrace.config import debug_enabled
from headrace.model.live_tensors import BoundStorage, OnAccess
from headrace.plan.cached_experts import CachedLayer
from headrace.plan.plan import Plan
from headrace.runtime.hooks import CalledForwardHook, ForwardHook, UnitHook, unhooked_modules
from headrace.runtime.outside_access import Promoter
from headrace.runtime.prefetcher import Prefetcher

if TYPE_CHECKING:
    from headrace.experts.cache import ExpertCache
    from headrace.experts.rows import CacheStreamOrder, ExpertHook, ReadsRows
    from headrace.stores.expert_ranges import ExpertRanges

__all__ = ["cached_hook", "forward_hook", "unit_hooks"]


def unit_hooks(
    model: nn.Module,
    plan: Plan,
    bound: Mapping[str, BoundStorage],
    prefetcher: Prefetcher,
    token: torch.Tensor,
    promoter: Promoter | None,
) -> Iterator[UnitHook]:
    """Point the tensors of each unit at its slot; its hook, which is put in place before the next is asked for."""
    hooks: list[UnitHook] = []  # each hook knows all
    unhooked = unhooked_modules(model)
    for unit in plan.units:
        memory = prefetcher.slot_memory(unit.index)
        storages = [bound[part.storage] for part in unit.entries]
        for part, storage in zip(unit.entries, storages, strict=True):
            slot = memory[part.offset : part.offset + part.num_bytes]
            storage.point_at_slot(slot, None if promoter is None else promoter.on_outside_access)
        module = model.get_submodule(unit.module_fqn)
        in_forward = promoter is not None and module is model
        hooks.append(
            UnitHook(module, unit.index, storages, prefetcher, token, promoter, hooks, module in unhooked, in_forward)
        )
        yield hooks[-1]


def forward_hook(
    model: nn.Module,
    entry: nn.Module,
    called: nn.Module | None,
    units: Sequence[UnitHook],
    prefetcher: Prefetcher,
    token: torch.Tensor,
    promoter: Promoter | None,
) -> ForwardHook:
    """What begins and ends a forward of ``model``; ``entry`` and ``called`` as in :class:`SessionOptions`."""
    if called is not None:
        return CalledForwardHook(called, called, units, prefetcher, token, promoter)
    if model in unhooked_modules(model):
        return CalledForwardHook(model, model, units, prefetcher, token, promoter, unhooked=True)
    in_forward = promoter is not None and entry is model
    return ForwardHook(model, entry, units, prefetcher, token, promoter, traced_in_forward=in_forward)


def cached_hook(
    model: nn.Module,
    layer: CachedLayer,
    bound: Mapping[str, BoundStorage],
    ranges: ExpertRanges,
    turn: CacheStreamOrder,
    factory: ReadsRows | None,
    on_outside_access: OnAccess | None,
) -> tuple[ExpertHook, ExpertCache]:
    """Have the module of ``layer`` read its experts by rows; its own tensors become placeholders.

    ``factory``: as in :class:`SessionOptions`.
    """
    from headrace.experts.cache import ExpertCache
    from headrace.experts.packed import read_by_rows

    rows = {name: ranges.rows(name) for name in layer.storages}
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
