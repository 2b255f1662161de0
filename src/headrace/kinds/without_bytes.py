"""Kind ``meta``: no bytes at all, for sizes and schedules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from headrace.config import StoreName
from headrace.plan.kinds import PlacedUnits, StoreKind, Unit


class WithoutBytes(StoreKind):
    """No memory, and no weights."""

    name: StoreName = "meta"
    label = "nowhere"
    beside = ()
    on_host = False
    has_bytes = False
    reads_in_place = False
    state_is_store = False
    takes_writes = False
    remark = "Mode meta has sizes and no bytes: this plan cannot be carried out."
    store_module = "headrace.stores.no_bytes"
    experts_module = None

    def pinned_bytes(self, plan: PlacedUnits, units: Sequence[Unit], in_place_bytes: int) -> int:
        return 0

    def host_bytes(
        self, plan: PlacedUnits, units: Sequence[Unit], sizes: Mapping[str, int], on_meta: Collection[str]
    ) -> int:
        return 0


KINDS = {"meta": WithoutBytes()}
