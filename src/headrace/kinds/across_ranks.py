"""Kinds that span the ranks of a group: ``shm_cpu`` shares a copy, ``sharded_cpu`` and ``sharded_gpu`` split units."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from headrace.config import StoreName
from headrace.plan.kinds import PlacedUnits, StoreKind, Unit
from headrace.plan.rates import OWN_LINKS, Curve, Rates
from headrace.plan.slabs import equal_chunk_bytes

# Of ``sharded_cpu``: bytes that a rank copies from the host before it sends them on. Nothing runs beside the sending of
# the last chunk, so few; each costs some microseconds of launches per peer, so not too few. 8 MiB: 150 us on PCIe 5.
CHUNK_BYTES = 8 << 20


def _remark(mode: str) -> str:
    """The sentence below a plan of a mode that spans processes."""
    start = "pass group= to headrace.offload in each, or start headrace generate with torchrun"
    return f"Mode {mode} spans several processes: {start}."


class Shared(StoreKind):
    """One copy in host memory for all ranks of a host."""

    name: StoreName = "shm_cpu"
    label = "host, shared"
    beside = ()
    needs_ranks = True
    takes_writes = False
    remark = _remark("shm_cpu")
    store_module = "headrace.stores.rank_stores"
    experts_module = None

    def host_bytes(
        self, plan: PlacedUnits, units: Sequence[Unit], sizes: Mapping[str, int], on_meta: Collection[str]
    ) -> int:
        """All of it: the memory that a model came with is not that of other ranks."""
        return sum(sizes.values())


class Split(StoreKind):
    """A part of every unit in each rank.

    Of a unit of b bytes, (N - 1) / N come from peers:

    * ``sharded_gpu``: out of their device memory, all peers at once, beside a copy of the rank's own part;
    * ``sharded_cpu``: b / N are copied over the own link, chunk by chunk, and each chunk is sent on while the next one
      is copied.

    A unit takes as long as the slower of the two. The start of a pipeline, its barriers and its last chunk are not
    counted: the next unit is copied during them.
    """

    beside = ()
    is_split = True
    needs_ranks = True
    reads_in_place = False
    state_is_store = False
    takes_writes = False
    store_module = "headrace.stores.rank_stores"
    experts_module = None
    link_module = "headrace.transfer.sharded_copy"

    def __init__(self, name: StoreName, label: str, on_host: bool) -> None:
        self.name, self.label, self.on_host, self.remark = name, label, on_host, _remark(name)

    def rates(self, rates: Rates, num_ranks: int) -> Rates:
        """Rates of units split over ``num_ranks`` ranks, by bytes of a unit.

        Without a measured ``peer_bytes_per_s`` the rates are those of one rank's own link, less than either way has.
        Peers that are hardly faster than the own link are taken to share it (PCIe, not NVLink): copies from host memory
        and from peers then run one after the other.
        """
        if num_ranks < 2 or rates.peer_bytes_per_s is None:
            return rates
        link, peer = rates.copy_bytes_per_s, rates.peer_bytes_per_s
        # Units of which some copy has a measured size.
        sizes = {num_ranks * size for size, _ in link.points} | {float(num_ranks * CHUNK_BYTES)}
        sizes |= {size * num_ranks / (num_ranks - 1) for size, _ in peer.points}
        seconds = {size: self._unit_s(rates, peer, size / num_ranks, num_ranks) for size in sorted(sizes)}
        return replace(rates, copy_bytes_per_s=Curve(tuple((size, size / unit_s) for size, unit_s in seconds.items())))

    def _unit_s(self, rates: Rates, peer: Curve, part: float, num_ranks: int) -> float:
        """Seconds of a unit of which each rank stores ``part`` bytes."""
        link = rates.copy_bytes_per_s
        chunk = min(part, CHUNK_BYTES) if self.on_host else part
        # Every rank copies from all others at the same time. The copies run side by side, so they take as long to start
        # as a single one of all their bytes.
        rate = peer((num_ranks - 1) * chunk)
        if rates.gather_bytes_per_s is not None:
            rate *= rates.gather_bytes_per_s(num_ranks) / peer.points[-1][1]
        peers_s = (num_ranks - 1) * part / rate
        if not self.on_host:
            return max(2 * part / rates.device_bytes_per_s, peers_s)  # the own part is read and written
        shares_link = peer.points[-1][1] < OWN_LINKS * link.points[-1][1]
        own_s = part / link(chunk)
        return own_s + peers_s if shares_link else max(own_s, peers_s)

    def part_bytes(self, plan: PlacedUnits, units: Sequence[Unit]) -> int:
        """Bytes of all units that one rank stores: as :class:`headrace.stores.sharded.Striping` splits them."""
        return sum(min(equal_chunk_bytes(unit.num_bytes, plan.num_ranks), unit.num_bytes) for unit in units)

    def device_bytes(self, plan: PlacedUnits, units: Sequence[Unit]) -> int:
        return 0 if self.on_host else self.part_bytes(plan, units)

    def pinned_bytes(self, plan: PlacedUnits, units: Sequence[Unit], in_place_bytes: int) -> int:
        return self.part_bytes(plan, units) if self.on_host else 0

    def host_bytes(
        self, plan: PlacedUnits, units: Sequence[Unit], sizes: Mapping[str, int], on_meta: Collection[str]
    ) -> int:
        """The rank's part, which is copied wherever the tensors lie."""
        return self.part_bytes(plan, units)


KINDS = {
    "shm_cpu": Shared(),
    "sharded_cpu": Split("sharded_cpu", "host, sharded", on_host=True),
    "sharded_gpu": Split("sharded_gpu", "peers", on_host=False),
}
