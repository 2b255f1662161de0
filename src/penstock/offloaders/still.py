"""The boundaries of an offload without the offload: the reference of its compiled code, bit for bit (contract 1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from penstock.config import Policy, as_policy
from penstock.errors import StateError
from penstock.inventory import Inventory, take_inventory
from penstock.offloaders.binding import bind
from penstock.offloaders.engine import EngineOffloader
from penstock.offloaders.hooks import ForwardHook, UnitHook
from penstock.offloaders.opening import compute_device
from penstock.offloaders.planning import planner_for
from penstock.ops import new_token
from penstock.plan import Plan
from penstock.telemetry import Stats, UnitStats

__all__ = ["StillOffloader", "boundaries"]


@contextmanager
def boundaries(
    model: nn.Module, policy: Policy | Plan | str | int, inventory: Inventory | None = None
) -> Iterator[Plan]:
    """Give a resident model the boundaries of an offload: the same ops are traced, nothing moves.

    Under ``torch.compile`` this is the reference of contract 1. A compiler may fuse across what would be a boundary and
    then round differently; such a difference is the compiler's, and comparing with this context leaves it out.

    Args:
        model: resident, on any device.
        policy: as for :func:`penstock.offload`.
        inventory: what a plan was made from, if that is a part of the model.

    Yields:
        the plan whose units set the boundaries.
    """
    inventory = inventory or take_inventory(model)
    planner = planner_for(model, inventory, compute_device(model))
    plan = policy if isinstance(policy, Plan) else planner.plan(as_policy(policy))
    plan.check(inventory)
    bound = bind(model, inventory.storages)
    token = new_token(compute_device(model))
    hooks: list[UnitHook | ForwardHook] = []
    try:
        units = []
        for unit in plan.units:
            storages = [bound[entry.storage] for entry in unit.entries]
            units.append(UnitHook(model.get_submodule(unit.anchor), unit.index, storages, None, token))
            hooks.append(units[-1])
        hooks.append(ForwardHook(model, model, units, None, token))
        yield plan
    finally:
        for hook in hooks:
            hook.remove()


class StillOffloader(EngineOffloader):
    """What an :class:`~penstock.offloaders.engine.EngineOffloader` would do, but nothing leaves the device.

    The model has to fit. Its compiled code has the same boundaries, so this is what an engine's outputs are compared
    with, bit for bit.
    """

    _boundaries: AbstractContextManager[Plan] | None = None

    def wrap_modules(self, modules_generator: Iterable[nn.Module]) -> list[nn.Module]:
        layers = list(modules_generator)
        self._stacks.append(nn.ModuleList(layers))
        return layers

    def post_init(self) -> None:
        if self._boundaries is None:
            model = self._model()
            inventory = self._take_inventory(model)
            self._still_plan = self._make_plan(inventory)
            self._boundaries = boundaries(model, self._still_plan, inventory)
            self._boundaries.__enter__()

    def remove(self) -> None:
        if self._boundaries is not None:
            self._boundaries.__exit__(None, None, None)
            self._boundaries = None

    @property
    def plan(self) -> Plan:
        """The plan whose units set the boundaries; after ``post_init``."""
        if self._boundaries is None:
            raise StateError("nothing is traced yet: call post_init() once the weights are loaded")
        return self._still_plan

    def stats(self) -> Stats:
        """Nothing has moved."""
        return Stats(tuple(UnitStats(unit.anchor, unit.store) for unit in self.plan.units), {})
