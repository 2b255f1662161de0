"""Kind ``exp3``: bf16 units in host memory in a code, decoded on the device (:mod:`headrace.codec`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from headrace.codec.layout import coded_bytes
from headrace.config import StoreName
from headrace.model.records import Inventory, StorageInfo
from headrace.plan.kinds import PlacedUnits, StoreKind, Unit
from headrace.plan.rates import Curve, Floats, Rates
from headrace.plan.slabs import slab_bytes

# The share of the rate of elementwise kernels at which decoding reads and writes (an H100 decodes 1.0 TB/s of weights:
# docs/benchmarks/2026-11-26-coded-h200.md).
_DECODING_SHARE = 0.55
_CPU_DECODES = 0.3e9  # bytes of weights per second, two cores of 2 GHz


class Coded(StoreKind):
    """Host memory that holds the code of a unit."""

    name: StoreName = "exp3"
    label = "host, coded"
    beside = ()
    is_coded = True
    state_is_store = False
    takes_writes = False
    store_module = "headrace.stores.coded_host"
    experts_module = None

    def link_bytes(self, unit: Unit) -> int:
        """The expected length of its code."""
        return coded_bytes(unit.num_bytes)

    def slot_bytes(self, unit: Unit) -> int:
        return slab_bytes([self.link_bytes(unit)])

    def rates(self, rates: Rates, num_ranks: int) -> Rates:
        """Rates by bytes of a unit, which crosses the link as code."""
        share = coded_bytes(1 << 20) / (1 << 20)
        decode_s = (1 + share) / (_DECODING_SHARE * rates.device_bytes_per_s)
        return replace(
            rates,
            copy_bytes_per_s=Curve(tuple((size / share, rate / share) for size, rate in rates.copy_bytes_per_s.points)),
            peer_bytes_per_s=rates.from_peer_bytes_per_s,  # as it is: what is on a peer is not coded
            coded_share=share,
            decode_s_per_byte=1 / _CPU_DECODES if rates.copies_take_cores else decode_s,
        )

    def copy_s(self, rates: Rates, num_bytes: Floats) -> Floats:
        return rates.copies_s(num_bytes)

    def decode_s(self, rates: Rates, num_bytes: Floats) -> Floats | float:
        return num_bytes * rates.decode_s_per_byte

    def pinned_bytes(self, plan: PlacedUnits, units: Sequence[Unit], in_place_bytes: int) -> int:
        return sum(unit.link_bytes for unit in units)

    def host_bytes(
        self, plan: PlacedUnits, units: Sequence[Unit], sizes: Mapping[str, int], on_meta: Collection[str]
    ) -> int:
        """The codes, beside what the model came with, which is freed when all of it is coded."""
        return sum(unit.link_bytes for unit in units)

    def can_hold(self, storage: StorageInfo) -> bool:
        return all(str(tensor.dtype) == "torch.bfloat16" for tensor in storage.tensors)

    def why_not(self, plan: PlacedUnits, unit: Unit, inventory: Inventory) -> str | None:
        plain = [e.storage for e in unit.entries if not self.can_hold(inventory.by_name[e.storage])]
        if plain:
            return f"coded in {self.name!r}, and {plain[0]} is not bf16"
        return f"coded in {self.name!r}, and other units are stored in files" if plan.staged_units else None


KINDS = {"exp3": Coded()}
