"""Stores that all ranks of a group open together.

First the ranks compare what they are about to do, once and in one way; nothing is allocated before they agree. Then
either the ranks of a host share one copy of the weights (``shm_cpu``), or each rank keeps its part of every unit. Each
rank reads an equal share of the bytes, from the model's tensors or from the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import cache, partial

import torch

from headrace.checkpoint.weight_map import WeightMap
from headrace.config import debug_enabled
from headrace.errors import OptionError, PeerError, warn_user
from headrace.kinds.across_ranks import CHUNK_BYTES
from headrace.memory.pinned import CudaRegistrar, pinned_region, pinning_disabled
from headrace.memory.shared import SharedMemory, SymmetricMemory
from headrace.memory.system import cpus_near, touch_threads
from headrace.model.live_tensors import BoundStorage
from headrace.model.records import StorageInfo
from headrace.plan.kinds import Unit
from headrace.plan.plan import Plan
from headrace.ranks.group import GlooChannel, RankGroup, json_digest, this_host
from headrace.stores.checkpoint_files import DiskStore
from headrace.stores.loader import CudaUploader, Delivery, deliver
from headrace.stores.pinned_host import registrar_for
from headrace.stores.sharded import DeviceShardedStore, HostShardedStore, PartLayout, ShardedStore
from headrace.stores.shared_host import SharedStore, shared_bytes
from headrace.stores.sources import ByteRange, Copy, clip
from headrace.stores.store import Opened, StoreRequest, new_buffer, require_weights

_SHOWN_DIFFERENCES = 3

# Of checksums: 8-byte words per block, and the prime that the blocks are combined by.
_WORDS = 1 << 20
_PRIME = (1 << 61) - 1


def open_units(request: StoreRequest, units: Sequence[Unit], offloaded: Mapping[str, BoundStorage]) -> Opened:
    """The store of the plan of ``request``, which spans ranks that have been compared.

    Raises:
        OptionError: no process group.
        PeerError: see :func:`open_shared` and :func:`open_sharded`.
    """
    plan, ranks, hosts = request.plan, request.ranks, request.hosts
    if ranks is None:
        raise OptionError(
            f"mode {plan.mode!r} spans processes and no process group was given: pass "
            f"group=torch.distributed.group.WORLD (after torch.distributed.init_process_group) to headrace.offload"
        )
    if plan.kind.is_split:
        return Opened(open_sharded(request, ranks, hosts))
    return Opened(*open_shared(plan, registrar_for(request.device), ranks, hosts))


# -- what ranks compare ------------------------------------------------------------------------------------------------


def compare_ranks(request: StoreRequest, ranks: RankGroup) -> list[list[str]]:
    """Exchange what every rank is about to do, and require the same of all; returns the hosts, by rank.

    Where no rank uses a store that spans ranks, nothing is required.

    Raises:
        OptionError: ranks with different plans, files or weights.
        CheckpointError: tensors on ``meta`` and no files for them.
        PeerError: another rank failed, ended or did not come in time.
    """
    kind = request.plan.kind
    mine = {"mode": kind.name, "spans ranks": kind.needs_ranks, **(_summary(request) if kind.needs_ranks else {})}
    everything = ranks.exchange("plan", {"host": this_host(), "plan": mine})
    hosts: list[list[str]] = [other["host"] for other in everything]
    if any(other["plan"]["spans ranks"] for other in everything):
        for rank, other in enumerate(everything):
            _require_same(mine, other["plan"], ranks.rank, rank, hosts[ranks.rank] == hosts[rank])
    return hosts


def _summary(request: StoreRequest) -> dict[str, object]:
    plan, offloaded, weights = request.plan, request.offloaded, request.weights
    on_meta = {name: bound.info for name, bound in offloaded.items() if bound.on_meta}
    sources = {name: _origin(require_weights(weights), storage) for name, storage in on_meta.items()}
    files = weights.checkpoint.stamps if weights is not None and on_meta else ()
    return {
        "slots": plan.num_slots,
        "units": _short([asdict(unit) for unit in plan.units], len(plan.units), plan.prefetched_bytes),
        "tensors read in place": _short(plan.uva, len(plan.uva), plan.uva_bytes),
        "resident tensors": _short(plan.resident, len(plan.resident), plan.resident_bytes),
        "tensors read from files": _short(sources, len(sources)),
        "checkpoint files": _short([[f.path.name, f.num_bytes, f.modified_ns, f.inode] for f in files], len(files)),
        **{f"weights of {name}": f"{value:x}" for name, value in _checksums(offloaded).items()},
    }


def _checksums(offloaded: Mapping[str, BoundStorage]) -> dict[str, int]:
    """Checksums of every storage that has bytes, by name."""
    live = {name: bound.original_bytes() for name, bound in offloaded.items() if not bound.on_meta}
    # torchrun leaves torch one thread per rank. On a device the caller's stream counts, which is this thread's.
    with ThreadPoolExecutor(touch_threads(), "headrace-checksum") as pool:
        on_host = {name: pool.submit(checksum, data) for name, data in live.items() if data.is_cpu}
        return {name: on_host[name].result() if name in on_host else checksum(live[name]) for name in live}


def checksum(buffer: torch.Tensor) -> int:
    """Checksum of ``buffer`` (uint8, 1-D): equal for equal bytes on any device, and for other bytes only by chance.

    Each block is a sum of words times fixed odd random numbers modulo 2^64, so that every bit and every place counts
    (multilinear hashing: Lemire and Kaser, "Strongly universal string hashing is fast", 2014); the blocks are the
    coefficients of a polynomial modulo 2^61 - 1.
    """
    factors = _factors().to(buffer.device)
    sums = [(_words(part) * factors[: -(-part.numel() // 8)]).sum() for part in buffer.split(8 * _WORDS)]
    total = buffer.numel()  # or zeros at the end would not count: the last word is padded with them
    for value in torch.stack(sums).tolist() if sums else ():
        total = (total * 0x9E3779B97F4A7C15 + value) % _PRIME
    return total


@cache
def _factors() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (_WORDS,), dtype=torch.int64, generator=generator) | 1


def _words(part: torch.Tensor) -> torch.Tensor:
    if part.numel() % 8 or part.storage_offset() % 8 or part.data_ptr() % 8:
        whole = torch.zeros(-(-part.numel() // 8) * 8, dtype=torch.uint8, device=part.device)
        whole[: part.numel()] = part
        part = whole
    return part.view(torch.int64)


def _origin(weights: WeightMap, storage: StorageInfo) -> list[list[str | int]]:
    """Tensors of the files that make ``storage``, with their bytes and where they go."""
    recipe = weights.recipe(storage)
    if recipe is not None:
        return [[part.name, part.num_bytes, "made"] for part in recipe[1].parts]
    return [[part.tensor.name, part.tensor.num_bytes, part.offset] for part in weights.source(storage).parts]


def _short(value: object, count: int, num_bytes: int | None = None) -> str:
    size = "" if num_bytes is None else f" of {num_bytes} bytes"
    return f"{count}{size} ({json_digest(value)[:12]})"


def _require_same(
    mine: Mapping[str, object], theirs: Mapping[str, object], rank: int, other: int, same_host: bool
) -> None:
    # Each host has its own copy of the files, with other times and inodes; names and sizes are in their tensors.
    compared = [what for what in {**mine, **theirs} if same_host or what != "checkpoint files"]
    differences = [
        f"{what}: {mine.get(what, 'none')} here, {theirs.get(what, 'none')} there"
        for what in compared
        if mine.get(what) != theirs.get(what)
    ]
    if differences:
        shown = "; ".join(differences[:_SHOWN_DIFFERENCES])
        further = len(differences) - _SHOWN_DIFFERENCES
        raise OptionError(
            f"rank {rank} and rank {other} differ and cannot share a store: {shown}"
            f"{f'; and {further} more' if further > 0 else ''}. Give every rank of the group the same model, weights, "
            f"policy and checkpoint folder, or the same plan file, and let only ranks that hold the same weights be in "
            f"the group; or give each its own copy with mode 'cpu'"
        )


# -- one copy for all ranks of a host ----------------------------------------------------------------------------------


def open_shared(
    plan: Plan, registrar: CudaRegistrar | None, ranks: RankGroup, hosts: Sequence[Sequence[str]]
) -> tuple[SharedStore, dict[str, torch.Tensor]]:
    """The store of all ranks of this host, and the buffers in it that this rank has to fill.

    Args:
        plan, registrar: as for the pinned store; the same plan in all ranks.
        ranks: which have been compared.
        hosts: hosts of all ranks (:func:`compare_ranks`).

    Raises:
        PeerError: another rank failed, ended or did not come in time; memory that cannot be opened from here.
    """
    here = [rank for rank, host in enumerate(hosts) if host == hosts[ranks.rank]]
    parts_of_host = {tuple(host) for host in hosts if host[0] == hosts[ranks.rank][0]}
    if len(parts_of_host) > 1:
        warn_user(
            f"the ranks of this host run in {len(parts_of_host)} PID namespaces or as several users, which cannot open "
            f"each other's memory, so the host keeps {len(parts_of_host)} copies of the offloaded weights; start its "
            f"ranks in one container and as one user"
        )
    store = SharedStore(plan.units, plan.uva, registrar, _join_memory(plan, ranks, here[0]), ranks, here)
    try:
        store.touch()
    except BaseException:
        store.close()
        raise
    return store, {name: store.destination(name) for name in store.mine}


def _join_memory(plan: Plan, ranks: RankGroup, leader: int) -> SharedMemory:
    """Shared memory made by the first rank of each host, and opened by the others."""
    if ranks.rank == leader:
        memory = SharedMemory.create(shared_bytes(plan.units, plan.uva))
        try:
            ranks.exchange("memory", memory.describe())
        except BaseException:
            memory.close()
            raise
        return memory
    address = ranks.exchange("memory")[leader]
    try:
        return SharedMemory.open(address)
    except PeerError:
        ranks.look_for_cause()  # the end of that rank is a better reason than its missing file
        raise


# -- a part of every unit in each rank ---------------------------------------------------------------------------------


def open_sharded(request: StoreRequest, ranks: RankGroup, hosts: Sequence[Sequence[str]]) -> ShardedStore:
    """Store of this rank's part of every unit, filled. Collective; the model is not touched.

    Args:
        request: in all ranks with the same plan.
        ranks: which have been compared.
        hosts: hosts of all ranks (:func:`compare_ranks`).

    Raises:
        OptionError: ranks on several hosts; devices that cannot address one another.
        PeerError: another rank failed, ended or did not come in time.
    """
    if len({host[0] for host in hosts}) > 1:
        raise OptionError("the ranks of group= are on several hosts; give each host a group of its own")
    if debug_enabled():
        warn_user("HEADRACE_DEBUG=1 checks no units that are split over ranks: no rank has a whole one to compare with")
    device = request.device
    # Symmetric memory is taken from the current device.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        store = _allocate(request.plan, device, ranks)
        try:
            _fill(store, request)
            ranks.exchange("loaded")
        except BaseException:
            store.close()
            raise
    return store


def _allocate(plan: Plan, device: torch.device, ranks: RankGroup) -> ShardedStore:
    # One run per unit and rank, or chunks of which each is passed on while the next one comes from the host.
    layout = PartLayout(plan.units, ranks.size, CHUNK_BYTES if plan.kind.on_host else None)
    if device.type == "cuda" and not plan.kind.on_host:
        return DeviceShardedStore(plan.units, layout, ranks, SymmetricMemory(layout.num_bytes, device, ranks))
    if device.type == "cuda" and not pinning_disabled():
        memory = pinned_region(layout.num_bytes, near=device)
    else:
        memory = new_buffer(layout.num_bytes)
    return HostShardedStore(plan.units, layout, ranks, memory, GlooChannel(ranks, "parts"))


def _fill(store: ShardedStore, request: StoreRequest) -> None:
    offloaded, device, weights, disk = request.offloaded, request.device, request.weights, request.disk
    on_device = {name: bound for name, bound in offloaded.items() if bound.home.type == "cuda"}
    for name, bound in on_device.items():
        for start, into in store.own_runs(name):
            into.copy_(bound.original_bytes()[start : start + into.numel()], non_blocking=True)
    for home in {bound.home for bound in on_device.values()}:
        torch.cuda.synchronize(home)  # other ranks read next, and no event of this process reaches them
    sources = {name: require_weights(weights).source(b.info) for name, b in offloaded.items() if b.on_meta}
    with closing(DiskStore(sources, disk, stamps=() if weights is None else weights.checkpoint.stamps)) as files:
        deliveries = (
            Delivery(
                f"{name}[{start}:{start + into.numel()}]",
                partial(_clipped, bound, files, start, start + into.numel()),
                into,
            )
            for name, bound in offloaded.items()
            if name not in on_device
            for start, into in store.own_runs(name)
        )
        deliver(
            deliveries,
            num_threads=touch_threads(),
            uploader=None if store.local.is_cpu else CudaUploader(device, CudaRegistrar(device)),
            cpus=cpus_near(device),
        )


def _clipped(bound: BoundStorage, files: DiskStore, start: int, end: int) -> list[Copy]:
    """The bytes of a storage from ``start`` to ``end``, with offsets relative to ``start``."""
    if not bound.on_meta:
        return [Copy(ByteRange.of(bound.original_bytes()[start:end]), 0)]
    return clip(files.copies(bound.info.name), start, end)
