"""The boundaries of an offload without the offload: the reference of its compiled code, bit for bit (contract 1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from headrace.config import Policy
from headrace.errors import StateError
from headrace.experts.rows import CachedExperts, ExpertHook, NoCache, ReadsRows, Turn
from headrace.offloaders.layerwise import EngineOffloader
from headrace.plan.plan import Plan
from headrace.runtime.hooks import CalledForwardHook, ForwardHook, UnitHook, new_token, unhooked_modules
from headrace.runtime.prepare import Prepared, prepare
from headrace.runtime.this_machine import PlanRequest
from headrace.runtime.under_construction import mark_read_in_place, unmark
from headrace.stats import Stats, UnitStats

__all__ = ["NoCopyOffloader", "boundaries"]


@contextmanager
def boundaries(model: nn.Module, policy: Policy | Plan | str | int) -> Iterator[Plan]:
    """Give a resident model the boundaries of an offload: the same ops are traced, nothing moves.

    Under ``torch.compile`` this is the reference of contract 1. A compiler may fuse across what would be a boundary and
    then round differently; such a difference is the compiler's, and comparing with this context leaves it out.

    Args:
        model: resident, on any device.
        policy: as for :func:`headrace.offload`.

    Yields:
        the plan whose units set the boundaries.
    """
    # Without limits: the model is resident already, and nothing is added.
    prepared = prepare(PlanRequest(model, policy), allocates=False)
    with _boundaries_of(prepared, model, traced_in_forward=True):
        yield prepared.plan


@contextmanager
def _boundaries_of(
    prepared: Prepared, entry: nn.Module, reads_rows: ReadsRows = CachedExperts, traced_in_forward: bool = False
) -> Iterator[None]:
    """``entry``: the module whose forward begins one; ``reads_rows``: see ``SessionOptions``.

    ``traced_in_forward``: where an offload of the whole model traces its ops, see :mod:`headrace.runtime.hooks`.
    """
    model, token = prepared.model, new_token(prepared.device)
    hooks: list[UnitHook | ForwardHook | ExpertHook] = []
    try:
        units, unhooked = [], unhooked_modules(model)
        for unit in prepared.plan.units:
            storages = [prepared.bound[entry.storage] for entry in unit.entries]
            module = model.get_submodule(unit.module_fqn)
            is_root = traced_in_forward and module is model
            units.append(
                UnitHook(
                    module, unit.index, storages, None, token, unhooked=module in unhooked, traced_in_forward=is_root
                )
            )
            hooks.append(units[-1])
        kind = CalledForwardHook if model in unhooked else ForwardHook
        is_unhooked = model in unhooked
        hooks.append(kind(model, entry, units, None, token, unhooked=is_unhooked, traced_in_forward=traced_in_forward))
        turn = Turn(prepared.device)
        for layer in prepared.plan.cached:
            module = model.get_submodule(layer.module_fqn)
            bound = [tensor for name in layer.storages for tensor in prepared.bound[name].tensors]
            tensors = {tensor.places[0][1].attr: tensor.tensor.detach() for tensor in bound}
            hooks.append(reads_rows(module, tensors, NoCache(layer.num_experts, turn)))
        for hook in hooks:
            hook.attach()
        yield
    finally:
        for hook in hooks:
            hook.remove()


class NoCopyOffloader(EngineOffloader):
    """What an :class:`~headrace.offloaders.layerwise.EngineOffloader` would do, but nothing leaves the device.

    The model has to fit. Its compiled code has the same boundaries, so this is what an engine's outputs are compared
    with, bit for bit.
    """

    _boundaries: AbstractContextManager[None] | None = None

    def wrap_modules(self, modules_generator: Iterable[nn.Module], prefix: str = "") -> list[nn.Module]:
        modules = list(modules_generator)  # all of them stay on the device, so none has to leave before the next
        if prefix:
            self._towers += modules
        else:
            self._stacks.append(nn.ModuleList(modules))
        return modules

    def post_init(self) -> None:
        if self._boundaries is None:
            self._require_layers()
            prepared = self._prepare(allocates=False)
            mark_read_in_place(prepared.bound, prepared.plan.uva)  # kernels that ask for it take the same path
            self._traced_plan = prepared.plan
            options = self._options(prepared)
            self._boundaries = _boundaries_of(prepared, options.entry or prepared.model, options.reads_rows)
            self._boundaries.__enter__()  # remove() leaves it: an engine has no block around its forwards

    def remove(self) -> None:
        if self._boundaries is not None:
            self._boundaries.__exit__(None, None, None)
            self._boundaries = None
            for parameter in self._model().parameters():
                unmark(parameter)

    @property
    def plan(self) -> Plan:
        """The plan whose units set the boundaries; after ``post_init``."""
        if self._boundaries is None:
            raise StateError("nothing is traced yet: call post_init() once the weights are loaded")
        return self._traced_plan

    def stats(self) -> Stats:
        """Nothing has moved."""
        return Stats(tuple(UnitStats(unit.module_fqn, unit.store) for unit in self.plan.units), {})
