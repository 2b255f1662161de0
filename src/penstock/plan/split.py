"""The copy rates of units that are split over ranks: what comes over the own link, and what from the peers.

Each of N ranks keeps 1/N of a unit of b bytes (:mod:`penstock.plan.plan`), so (N - 1) / N of it come from peers:

* ``sharded_gpu``: out of their device memory, all peers at once, beside a copy of the rank's own part on the device;
* pooled links: b / N come over the own link, chunk by chunk, and each chunk is passed on while the next one comes.

The slower of the two says how long a unit takes: :class:`penstock.plan.cost_model.Rates` with another
``copy_bytes_per_s``. The start of a pipeline, its barriers and its last chunk are not counted: behind them the next
unit is on its way.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.config import Mode
from penstock.plan.cost_model import Curve, Rates
from penstock.plan.plan import CHUNK_BYTES

__all__ = ["split_rates"]

# How many times as fast as the own link peers are at least, if they have links of their own. Over PCIe it is once, but
# for what measurements differ by; a bridge of NVLink between workstation cards has twice the rate of PCIe 4.0.
_OWN_LINKS = 1.25


def split_rates(rates: Rates, mode: Mode, num_ranks: int) -> Rates:
    """``rates`` whose ``copy_bytes_per_s`` is that of units split over ``num_ranks`` ranks, by bytes of the whole unit.

    Args:
        rates: of one rank alone.
        mode: ``sharded_gpu``, or else pooled links.
        num_ranks: 1: nothing is split.

    Without a measured ``peer_bytes_per_s`` the rates stay those of one rank's own link: less than either way has, since
    nothing says how fast peers are. Peers that are hardly faster than the own link are taken to come over it (PCIe, not
    NVLink): what pooled ranks bring and what they are passed then come one after the other.
    """
    if num_ranks < 2 or rates.peer_bytes_per_s is None:
        return rates
    seconds = _sharded_s if mode == "sharded_gpu" else _pooled_s
    sizes = _sizes(rates.copy_bytes_per_s, rates.peer_bytes_per_s, num_ranks)
    points = tuple((size, size / seconds(rates, rates.peer_bytes_per_s, size, num_ranks)) for size in sizes)
    return replace(rates, copy_bytes_per_s=Curve(points))


def _sizes(link: Curve, peer: Curve, num_ranks: int) -> list[float]:
    """Bytes of units of which some copy has a size that was measured."""
    own = {num_ranks * size for size, _ in link.points} | {float(num_ranks * CHUNK_BYTES)}
    return sorted(own | {size * num_ranks / (num_ranks - 1) for size, _ in peer.points})


def _sharded_s(rates: Rates, peer: Curve, num_bytes: float, num_ranks: int) -> float:
    part = num_bytes / num_ranks
    own_s = 2 * part / rates.device_bytes_per_s  # read and written
    return max(own_s, _from_peers_s(rates, peer, part, part, num_ranks))


def _pooled_s(rates: Rates, peer: Curve, num_bytes: float, num_ranks: int) -> float:
    part = num_bytes / num_ranks
    chunk = min(part, CHUNK_BYTES)
    own_s = part / rates.copy_bytes_per_s(chunk)
    peers_s = _from_peers_s(rates, peer, part, chunk, num_ranks)
    return own_s + peers_s if _share_a_link(rates.copy_bytes_per_s, peer) else max(own_s, peers_s)


def _share_a_link(link: Curve, peer: Curve) -> bool:
    return peer.points[-1][1] < _OWN_LINKS * link.points[-1][1]


def _from_peers_s(rates: Rates, peer: Curve, part: float, chunk: float, num_ranks: int) -> float:
    """Seconds in which all other ranks' parts arrive, in chunks, while every rank gets its own from all the others.

    The peers' copies run side by side, so they take as long to start as a single one of all their bytes.
    """
    rate = peer((num_ranks - 1) * chunk)
    if rates.gather_bytes_per_s is not None:
        rate *= rates.gather_bytes_per_s(num_ranks) / peer.points[-1][1]
    return (num_ranks - 1) * part / rate
