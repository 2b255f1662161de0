"""Opening and filling a store of which every rank has a part, and the link that goes with it.

First the ranks compare their plans and weights; nothing is allocated before they agree. Then each takes its memory and
reads its own part, from the model's tensors or from the files, and no bytes of others'.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from penstock.checkpoint.weight_map import WeightMap
from penstock.env import debug_enabled
from penstock.errors import OptionError, TransferError, warn_user
from penstock.loading.loader import require_weights
from penstock.loading.read_pool import Delivery, deliver
from penstock.loading.upload import CudaUploader
from penstock.memory.byte_ranges import ByteRange, Copy
from penstock.memory.pinned import CudaRegistrar, pin_threads, pinned_region, pinning_disabled, refuse_capture
from penstock.memory.symmetric import SymmetricMemory
from penstock.memory.system import cpus_near
from penstock.model.live_tensors import BoundStorage
from penstock.plan.plan import CHUNK_BYTES, PartLayout, Plan
from penstock.ranks.digest import checksum, json_digest
from penstock.ranks.peers import Channel, Peers, PeerWatch
from penstock.stats import Recorder
from penstock.stores.disk import DiskOptions, DiskStore
from penstock.stores.sharded import HostParts, Parts, PartStore, SymmetricParts
from penstock.stores.store import new_blob
from penstock.transfer.link import Link
from penstock.transfer.pooled_copy import PooledStreamLink, PooledThreadLink
from penstock.transfer.sharded_copy import ShardedStreamLink

__all__ = ["FilledParts", "open_parts", "splits_units"]


def splits_units(plan: Plan, peers: Peers | None) -> bool:
    """Whether each rank keeps only its part of every unit of ``plan``.

    Raises:
        OptionError: a mode that pooled links have no use for.
    """
    if peers is None or not peers.pool_links:
        return plan.mode == "sharded_gpu"
    if plan.mode != "cpu":
        raise OptionError(
            f"pool_links brings units from host memory, mode 'cpu', and found mode {plan.mode!r}; use mode 'cpu' "
            f"(--offload-mode cpu), of which pooled ranks keep one copy in all, or leave pool_links out"
        )
    if plan.staged_units:
        raise OptionError(
            f"pool_links brings units from host memory, and {len(plan.staged_units)} of the plan's {len(plan.units)} "
            f"rest in files; make the plan with mode 'cpu' (--offload-mode cpu), or leave pool_links out"
        )
    return True


class FilledParts(PartStore):
    """A filled part of every unit, and what its link needs of the other ranks."""

    peers: Peers
    watch: PeerWatch

    def make_link(self, device: torch.device, recorder: Recorder, measure_stalls: bool) -> Link:
        """The link that brings whole units from the parts. Collective."""
        if device.type != "cuda":
            return PooledThreadLink(self.layout, Channel(self.peers), recorder=recorder)
        if isinstance(self.parts, SymmetricParts):
            return ShardedStreamLink(device, self.layout, self.parts, measure_stalls=measure_stalls)
        return PooledStreamLink(device, self.layout, self.peers, self.watch, measure_stalls=measure_stalls)

    def close(self) -> None:
        super().close()
        self.watch.close()


def open_parts(
    plan: Plan,
    offloaded: Mapping[str, BoundStorage],
    device: torch.device,
    weights: WeightMap | None,
    disk: DiskOptions | None,
    peers: Peers,
) -> FilledParts:
    """This rank's part of every unit, filled. Collective; the model is not touched.

    Raises:
        OptionError: ranks with different plans or weights, not on one host, or devices that cannot address one another;
            tensors to be read in place.
        TransferError: a rank that does not come, or could not fill its part.
        StateError: a graph is being captured.
    """
    if plan.uva:
        name = next(iter(plan.uva))
        raise OptionError(f"{name} is to be read in place, and no rank has all of it; prefetch it (mechanism prefetch)")
    if device.type == "cuda":
        refuse_capture(CudaRegistrar(device))
    if debug_enabled():
        warn_user("PENSTOCK_DEBUG=1 checks no units that are split over ranks: no rank has a whole one to compare with")
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # NCCL takes the current one
        return _open(plan, offloaded, device, weights, disk, peers)


def _open(
    plan: Plan,
    offloaded: Mapping[str, BoundStorage],
    device: torch.device,
    weights: WeightMap | None,
    disk: DiskOptions | None,
    peers: Peers,
) -> FilledParts:
    channel = Channel(peers)
    watch = None
    try:
        _require_agreement(channel, plan, offloaded, weights)
        watch = PeerWatch(channel)
        if not watch.on_one_host:
            raise OptionError("the ranks of group= are on several hosts; give each host a group of its own")
        layout = PartLayout(plan.units, peers.size, CHUNK_BYTES if peers.pool_links else None)
        store = FilledParts(plan.units, layout, _allocate(layout, device, peers, channel), peers.rank, plan.mode)
        store.peers, store.watch = peers, watch
        _fill_together(channel, store, offloaded, device, weights, disk)
    except BaseException:
        channel.close()
        if watch is not None:
            watch.close()
        raise
    if not isinstance(store.parts, HostParts):
        channel.close()
    return store


# -- agreement --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Intent:
    """What a rank is about to do; equal on all ranks."""

    plan: str
    files: str
    weights: dict[str, int]


def _require_agreement(
    channel: Channel, plan: Plan, offloaded: Mapping[str, BoundStorage], weights: WeightMap | None
) -> None:
    mine = _Intent(
        json_digest(replace(plan, made_for=None, model_name=None).to_json()),
        _files(weights) if any(bound.on_meta for bound in offloaded.values()) else "",
        {name: checksum(bound.original_bytes()) for name, bound in offloaded.items() if not bound.on_meta},
    )
    for rank, other in enumerate(channel.gather(mine)):
        what, mend = _difference(mine, other)
        if what:
            raise OptionError(
                f"rank {rank} of group= has {what} than rank {channel.rank}, and each keeps a part for all: {mend}"
            )


def _files(weights: WeightMap | None) -> str:
    stamps = require_weights(weights).checkpoint.stamps
    return repr([(stamp.path.name, stamp.num_bytes, stamp.modified_ns, stamp.inode) for stamp in stamps])


def _difference(mine: _Intent, other: _Intent) -> tuple[str, str]:
    if other.plan != mine.plan:
        return "another plan", "give all ranks the same model, policy and mode, or one plan file (penstock.Plan.load)"
    if other.files != mine.files:
        return "other checkpoint files", "give all ranks the same checkpoint folder"
    names = mine.weights.keys() | other.weights.keys()
    different = sorted(name for name in names if mine.weights.get(name) != other.weights.get(name))
    if different:
        return f"other weights ({different[0]}, {len(different)} in all)", "load the same weights on all ranks"
    return "", ""


# -- filling ----------------------------------------------------------------------------------------------------------


def _allocate(layout: PartLayout, device: torch.device, peers: Peers, channel: Channel) -> Parts:
    if device.type == "cuda" and not peers.pool_links:
        return SymmetricParts(SymmetricMemory(layout.num_bytes, device, peers))
    if device.type == "cuda" and not pinning_disabled():
        with _near(device):  # pages lie where the thread runs that touches them first
            return HostParts(pinned_region(layout.num_bytes), channel)
    return HostParts(new_blob(layout.num_bytes), channel)


@contextmanager
def _near(device: torch.device) -> Iterator[None]:
    """This thread, and those it starts, stay on the processors near ``device``."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus_near(device) or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _fill_together(
    channel: Channel,
    store: PartStore,
    offloaded: Mapping[str, BoundStorage],
    device: torch.device,
    weights: WeightMap | None,
    disk: DiskOptions | None,
) -> None:
    """Return when all ranks have filled their parts; a failure of one is a failure of all."""
    try:
        _fill(store, offloaded, device, weights, disk)
    except Exception as error:
        channel.gather(f"{type(error).__name__}: {error}")
        raise
    for rank, failure in enumerate(channel.gather("")):
        if failure:
            raise TransferError(f"rank {rank} could not load its part of the weights: {failure}")


def _fill(
    store: PartStore,
    offloaded: Mapping[str, BoundStorage],
    device: torch.device,
    weights: WeightMap | None,
    disk: DiskOptions | None,
) -> None:
    on_device = {name: bound for name, bound in offloaded.items() if bound.home.type == "cuda"}
    for name, bound in on_device.items():
        for start, into in store.own_stretches(name):
            into.copy_(bound.original_bytes()[start : start + into.numel()], non_blocking=True)
    for home in {bound.home for bound in on_device.values()}:
        torch.cuda.synchronize(home)  # other ranks read next, and they are told of no event
    sources = {name: require_weights(weights).source(b.info) for name, b in offloaded.items() if b.on_meta}
    files = DiskStore(sources, disk, stamps=() if weights is None else weights.checkpoint.stamps)
    local = store.parts.local
    try:
        deliver(
            _deliveries(store, {name: b for name, b in offloaded.items() if name not in on_device}, files),
            num_threads=pin_threads(),
            uploader=None if local.is_cpu else CudaUploader(device, CudaRegistrar(device)),
            cpus=cpus_near(device),
        )
    finally:
        files.close()


def _deliveries(store: PartStore, storages: Mapping[str, BoundStorage], files: DiskStore) -> Iterator[Delivery]:
    for name, bound in storages.items():
        for start, into in store.own_stretches(name):
            end = start + into.numel()
            yield Delivery(f"{name}[{start}:{end}]", into.numel(), partial(_clipped, bound, files, start, end), into)


def _clipped(bound: BoundStorage, files: DiskStore, start: int, end: int) -> list[Copy]:
    """The bytes of a storage from ``start`` to ``end``, with offsets relative to ``start``."""
    if not bound.on_meta:
        return [Copy(ByteRange.of(bound.original_bytes()[start:end]), 0)]
    found = (copy.within(start, end) for copy in files.copies(bound.info.name))
    return [copy for copy in found if copy is not None]
