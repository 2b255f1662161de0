"""Zero-copy, for engines that build models layer by layer: tensors are read where they rest."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config import UVA
from penstock.model.inventory import Inventory
from penstock.offloaders.layerwise import StackedOffloader
from penstock.plan.build import build_plan
from penstock.plan.plan import Plan
from penstock.runtime.under_construction import BuildTimeFilter

__all__ = ["UVAOffloader"]


class UVAOffloader(StackedOffloader):
    """Offloads up to ``cpu_offload_max_bytes``, in the order the layers are built."""

    def __init__(self, cpu_offload_max_bytes: int, cpu_offload_params: Sequence[str] | None = None) -> None:
        """See :class:`penstock.UVA` for the arguments."""
        self._policy = UVA(cpu_offload_max_bytes, tuple(cpu_offload_params or ()))
        super().__init__(BuildTimeFilter(self._policy))

    def _make_plan(self, inventory: Inventory) -> Plan:
        return build_plan(inventory, self._policy)
