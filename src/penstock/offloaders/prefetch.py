"""Prefetch by the group rule, for engines that build models layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config import Mode, Prefetch
from penstock.model.inventory import Inventory
from penstock.offloaders.layerwise import StackedOffloader
from penstock.plan.build import plan_group_rule
from penstock.plan.plan import Plan
from penstock.runtime.under_construction import BuildTimeFilter

__all__ = ["PrefetchOffloader"]


class PrefetchOffloader(StackedOffloader):
    """Of every ``group_size`` layers the last ``num_in_group`` live in the store and are copied ahead of use."""

    def __init__(
        self,
        group_size: int,
        num_in_group: int,
        prefetch_step: int,
        offload_params: Sequence[str] | None = None,
        mode: Mode = "cpu",
    ) -> None:
        """See :class:`penstock.Prefetch` for the arguments; ``offload_params`` is its ``params``."""
        self._policy = Prefetch(group_size, num_in_group, prefetch_step, tuple(offload_params or ()), mode)
        super().__init__(BuildTimeFilter(self._policy))

    def _make_plan(self, inventory: Inventory) -> Plan:
        return plan_group_rule(inventory, self._policy, self._layers())
