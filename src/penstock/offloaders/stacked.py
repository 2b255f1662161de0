"""What the engines' offloaders share: stacks of layers collected lazily, and one attachment over all of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from torch import nn

from penstock.errors import StateError
from penstock.inventory import Inventory, take_inventory
from penstock.offloaders.attachment import Attachment
from penstock.offloaders.base import BaseOffloader
from penstock.offloaders.opening import compute_device
from penstock.offloaders.room import require_room
from penstock.plan.model import Plan
from penstock.telemetry import Stats

__all__ = ["StackedOffloader"]


class StackedOffloader(BaseOffloader):
    """Collects the layers; subclasses say which plan they get.

    Layers are known by stack and index (``0.17.mlp.up_proj.weight``), since an engine hands them over before they have
    a place in a model.
    """

    def __init__(self) -> None:
        self._stacks = nn.ModuleList()
        self._attachment: Attachment | None = None

    def wrap_modules(self, modules_generator: Iterable[nn.Module]) -> list[nn.Module]:
        if self._attachment is not None:
            raise StateError("wrap_modules was called after post_init; use a new offloader for another model")
        stack = nn.ModuleList()
        self._stacks.append(stack)
        for module in modules_generator:
            stack.append(module)
        return list(stack)

    def post_init(self) -> None:
        if self._attachment is not None:
            raise StateError("post_init was called twice; call remove() in between to take over new weights")
        inventory = take_inventory(self._stacks)
        plan = self._make_plan(inventory)
        first = next((layer for stack in self._stacks for layer in stack.children()), None)
        device = compute_device(self._stacks)
        require_room(self._stacks, plan, inventory, device)
        self._attachment = Attachment(self._stacks, plan, inventory, device=device, entry=first)

    def sync_prev_onload(self) -> None:
        if self._attachment is not None:
            self._attachment.join()

    def join_after_forward(self) -> None:
        if self._attachment is not None:
            self._attachment.join()

    def remove(self) -> None:
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None

    @property
    def plan(self) -> Plan:
        """The plan in force; after ``post_init``."""
        return self._require().plan

    def stats(self) -> Stats:
        """What has moved; after ``post_init``."""
        return self._require().stats()

    def _require(self) -> Attachment:
        if self._attachment is None:
            raise StateError("nothing is offloaded yet: call post_init() once the weights are loaded")
        return self._attachment

    def _layers(self) -> list[list[str]]:
        return [[f"{i}.{j}" for j in range(len(list(stack.children())))] for i, stack in enumerate(self._stacks)]

    @abstractmethod
    def _make_plan(self, inventory: Inventory) -> Plan:
        """The plan for the collected layers."""
