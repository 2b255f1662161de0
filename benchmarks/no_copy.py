"""What offloaded results are compared with inside an engine: its code has the boundaries of an offload, nothing moves.

``no_copy.Worker`` is a worker class for vLLM, with the options of headrace's.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from headrace.errors import StateError
from headrace.offloaders.build_time import mark_host_resident, mark_read_in_place
from headrace.offloaders.layerwise import EngineOffloader
from headrace.plan.plan import Plan
from headrace.stats import Stats, UnitStats
from headrace.testing import boundaries_of


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
            self._boundaries = boundaries_of(prepared, options.entry or prepared.model, options.expert_kernel_factory)
            self._boundaries.__enter__()  # remove() leaves it: an engine has no block around its forwards

    def remove(self) -> None:
        if self._boundaries is not None:
            self._boundaries.__exit__(None, None, None)
            self._boundaries = None
            for parameter in self._model().parameters():
                mark_host_resident(parameter, False)

    has_run = False  # of what is offloaded

    def require_all_ran(self) -> None:
        """Nothing waits for a copy."""

    @property
    def plan(self) -> Plan:
        """The plan whose units set the boundaries; after ``post_init``."""
        if self._boundaries is None:
            raise StateError("nothing is traced yet: call post_init() once the weights are loaded")
        return self._traced_plan

    def stats(self) -> Stats:
        """Nothing has moved."""
        return Stats(tuple(UnitStats(unit.module_fqn, unit.store) for unit in self.plan.units), {})


def moves_nothing(worker: type) -> Any:
    """headrace's worker class with this offloader."""
    return type(f"NoCopy{worker.__name__}", (worker,), {"offloader_class": NoCopyOffloader})


def __getattr__(name: str) -> Any:
    """``no_copy.Worker``, as vLLM asks for it by its name."""
    if name != "Worker":
        raise AttributeError(name)
    return moves_nothing(importlib.import_module("headrace.adapters.vllm").Worker)
