"""Kind ``disk``: units in the checkpoint's safetensors files; on the way to a GPU they pass through pinned memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from headrace.config import StoreName
from headrace.plan.kinds import PlacedUnits, StoreKind, Unit
from headrace.plan.rates import Floats, Rates


class InFiles(StoreKind):
    """The files of a checkpoint."""

    name: StoreName = "disk"
    label = "file"
    beside = ()
    on_host = False
    in_files = True
    state_is_store = False
    takes_writes = False
    store_module = "headrace.stores.checkpoint_files"
    link_module = "headrace.transfer.ring_streams"
    experts_module = "headrace.stores.expert_files"
    caches_module = "headrace.transfer.expert_tiers"
    host_slots = 0

    def read_s(self, rates: Rates, num_bytes: Floats) -> Floats | float:
        return num_bytes * rates.file_s_per_byte

    def pinned_bytes(self, plan: PlacedUnits, units: Sequence[Unit], in_place_bytes: int) -> int:
        """The staging ring, and what is read in place, since a GPU cannot address a mapped file."""
        return plan.ring_bytes + in_place_bytes

    def host_bytes(
        self, plan: PlacedUnits, units: Sequence[Unit], sizes: Mapping[str, int], on_meta: Collection[str]
    ) -> int:
        """Nothing: pages of files are the page cache's."""
        return 0


KINDS = {"disk": InFiles()}
