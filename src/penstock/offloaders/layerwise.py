"""What the engines' offloaders share: layers taken off the device as they are built, and one attachment over all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from penstock.errors import StateError
from penstock.model.inventory import Inventory, take_inventory
from penstock.offloaders.base import BaseOffloader
from penstock.plan.plan import Plan
from penstock.ranks.group import RankGroup
from penstock.runtime.prepare import Prepared, compute_device, prepare
from penstock.runtime.session import OffloadSession, SessionOptions
from penstock.runtime.under_construction import BuildTimeFilter, BuildTimePool
from penstock.stats import Stats

__all__ = ["StackedOffloader"]


class StackedOffloader(BaseOffloader):
    """Collects the layers; subclasses say which plan is made in the end.

    Layers are known by stack and index (``0.17.mlp.up_proj.weight``), since an engine hands them over before they have
    a place in a model.
    """

    def __init__(
        self, leaves: BuildTimeFilter, *, ranks: RankGroup | None = None, measure_stalls: bool = False
    ) -> None:
        """``leaves``: which parameters leave the device as soon as their layer is built.

        ``ranks``: for stores that span processes. ``measure_stalls``: time every wait, for :meth:`stats`.
        """
        self._leaves = leaves
        self._ranks = ranks
        self._measure_stalls = measure_stalls
        self._stacks = nn.ModuleList()
        self._pool = BuildTimePool()
        self._session: OffloadSession | None = None

    def wrap_modules(self, modules_generator: Iterable[nn.Module]) -> list[nn.Module]:
        if self._session is not None:
            raise StateError("wrap_modules was called after post_init; use a new offloader for another model")
        stack = nn.ModuleList()
        self._stacks.append(stack)
        for index, module in enumerate(modules_generator):
            stack.append(module)
            self._pool.take(module, partial(self._leaves, index), apart=not self._leaves.is_exact)
        return list(stack)

    def post_init(self) -> None:
        if self._session is not None:
            raise StateError("post_init was called twice; call remove() in between to take over new weights")
        prepared = self._prepare(allocates=True)
        options = SessionOptions(
            entry=self._entry(prepared.model, prepared.plan),
            measure_stalls=self._measure_stalls,
            replays_announced=self._announces_replays(prepared.model),
            keeps_addresses=self._keeps_addresses,
            never_promotes="an engine that has counted its memory has no room for more",
        )
        session = OffloadSession(prepared, options)
        session.attach()
        self._session = session

    def _prepare(self, allocates: bool) -> Prepared:
        model = self._model()
        inventory = self._take_inventory(model)
        prepared = prepare(
            model,
            self._make_plan(inventory),
            inventory=inventory,
            device=self._device(model),
            ranks=self._ranks,
            pool=self._pool,
            allocates=allocates,
        )
        self._check_plan(prepared.plan, inventory)
        return prepared

    def sync_prev_onload(self) -> None:
        if self._session is not None:
            self._session.join()

    def join_after_forward(self) -> None:
        if self._session is not None:
            self._session.join()

    def remove(self) -> None:
        if self._session is not None:
            self._session.remove(graphs_released=True)  # an engine ends its offload with its graphs
            self._session = None

    @property
    def plan(self) -> Plan:
        """The plan in force; after ``post_init``."""
        return self._require().plan

    def stats(self) -> Stats:
        """What has moved; after ``post_init``."""
        return self._require().stats()

    def _require(self) -> OffloadSession:
        if self._session is None:
            raise StateError("nothing is offloaded yet: call post_init() once the weights are loaded")
        return self._session

    def _model(self) -> nn.Module:
        """What is offloaded: by default the stacks alone."""
        return self._stacks

    def _device(self, model: nn.Module) -> torch.device:
        """Where compute runs."""
        return compute_device(model)

    def _take_inventory(self, model: nn.Module) -> Inventory:
        return take_inventory(model)

    def _layers(self) -> list[list[str]]:
        """Names within :meth:`_model` of the layers, by stack; a layer that is called several times counts once."""
        names = {id(module): name for name, module in self._model().named_modules()}
        stacks = [[names.get(id(layer), "") for layer in stack.children()] for stack in self._stacks]
        return [found for stack in stacks if (found := [name for name in stack if name])]

    def _entry(self, model: nn.Module, plan: Plan) -> nn.Module | None:
        """The module whose forward begins one; ``None``: the model's."""
        return next((layer for stack in self._stacks for layer in stack.children()), None)

    def _announces_replays(self, model: nn.Module) -> bool:
        """Whether the engine calls :meth:`sync_prev_onload` before every replay."""
        return False

    @property
    def _keeps_addresses(self) -> bool:
        """Whether the engine compiles or captures layers without a word, and so relies on where weights are."""
        return False

    def _check_plan(self, plan: Plan, inventory: Inventory) -> None:
        """Raise ``OptionError`` for a plan that the engine cannot run, though ``penstock.offload`` could."""

    @abstractmethod
    def _make_plan(self, inventory: Inventory) -> Plan:
        """The plan for the collected layers."""
