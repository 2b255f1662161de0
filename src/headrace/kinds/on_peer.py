"""Kind ``peer``: units in the memory of another GPU of this process, which is used before host memory."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.config import StoreName
from headrace.plan.kinds import PlacedUnits, StoreKind, Unit
from headrace.plan.rates import Floats, Rates


class OnPeer(StoreKind):
    """The memory of another GPU."""

    name: StoreName = "peer"
    label = "peer GPU"
    beside = ()
    on_host = False
    state_is_store = False
    store_module = "headrace.stores.peer"
    experts_module = None

    def copy_s(self, rates: Rates, num_bytes: Floats) -> Floats:
        return num_bytes / rates.from_peer_bytes_per_s.over(num_bytes)

    def pinned_bytes(self, plan: PlacedUnits, units: Sequence[Unit], in_place_bytes: int) -> int:
        return 0


KINDS = {"peer": OnPeer()}
