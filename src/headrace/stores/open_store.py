"""Opens the store of a plan: one kind for each mode; beside it those of cached experts, of a peer's, of coded units."""

from __future__ import annotations

import gc
import logging
import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F

from headrace.config import CODES, RANK_MODES, Mode
from headrace.errors import CheckpointError, OptionError
from headrace.formatting import format_size
from headrace.memory.pinned import CudaRegistrar, pinning_disabled, refuse_capture
from headrace.model.live_tensors import BoundStorage, resident_rule, used_elsewhere
from headrace.plan.plan import Plan, Unit
from headrace.stores.coded_host import CodedStore
from headrace.stores.expert_ranges import ExpertRanges
from headrace.stores.peer import PeerStore, peer_memory
from headrace.stores.pinned_host import open_pinned
from headrace.stores.rank_stores import compare_ranks, open_sharded, open_shared
from headrace.stores.sources import TENSOR_ALIGN_BYTES
from headrace.stores.store import (
    AlreadyPinned,
    CpuStore,
    DiskStore,
    MetaStore,
    Store,
    StoreRequest,
    Stores,
    new_buffer,
    require_weights,
)

__all__ = ["OpenedStore", "open_store", "rounds_in_place", "same_bits_at"]

_log = logging.getLogger(__name__)

_TRIED_ROWS = (1, 4, 64)
_TRIED_BYTES = 16 << 20

_Host = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class OpenedStore:
    """The store of a plan, before it is filled.

    Attributes:
        store: of everything that the plan offloads.
        on_host: by storage name, the memory of the store that is still to be filled (uint8, 1-D, host).
        on_peer: the same in the memory of a peer, as seen from the device that computes.
        ranges: of cached experts.
    """

    store: Store
    on_host: _Host
    on_peer: Mapping[str, torch.Tensor]
    ranges: ExpertRanges | None = None


def open_store(request: StoreRequest) -> OpenedStore:
    """Open the store of ``request.plan``. The model is not touched.

    Raises:
        CheckpointError, OptionError: files or a mode that cannot be used; ranks that differ.
        BudgetError: no memory for it on the peer.
        PeerError: another rank failed, ended or did not come in time.
        StateError: a graph is being captured.
    """
    plan, device, ranks = request.plan, request.device, request.ranks
    if device.type == "cuda":
        refuse_capture(CudaRegistrar(device))
    for stamp in request.weights.checkpoint.stamps if request.weights is not None else ():
        stamp.check()  # offsets come from headers read earlier
    hosts = [] if ranks is None else compare_ranks(request, ranks)
    with ExitStack() as undo:
        stores, on_host = _OPENERS[plan.mode](request, hosts)
        undo.callback(stores.close)
        made: list[Mapping[str, torch.Tensor]] = [on_host]
        ranges, on_peer = None, dict[str, torch.Tensor]()
        if plan.cached:
            ranges = ExpertRanges(plan.cached, device, request.pooled)
            stores.add(ranges, [name for layer in plan.cached for name in layer.storages])
            made.append(ranges.destinations)
        if request.peer is not None:
            memory = peer_memory(plan.peer_bytes, device, request.peer)
            peer = PeerStore([unit for unit in plan.units if unit.store == "peer"], memory)
            on_peer = dict(peer.places)
            stores.add(peer, on_peer)
            _log.info("%s stores %s of units", request.peer, format_size(plan.peer_bytes))
        if plan.coded_units:
            coded = _coded_store(request, plan.coded_units)
            stores.add(coded, coded.destinations)
            made.append(coded.destinations)
        undo.pop_all()
    # Not copied into one dict: to look a destination up may be to wait until its memory is made.
    return OpenedStore(stores.single or stores, ChainMap(*cast("list[dict[str, torch.Tensor]]", made)), on_peer, ranges)


# -- by mode ----------------------------------------------------------------------------------------------------------


def _apart(request: StoreRequest) -> dict[str, BoundStorage]:
    """What is offloaded, but for cached experts and units on a peer or coded, which have stores of their own."""
    placements = request.plan.placements
    return {
        name: bound
        for name, bound in request.offloaded.items()
        if placements[name].mechanism != "cache" and placements[name].store not in ("peer", *CODES)
    }


def _open_cpu(request: StoreRequest, hosts: Sequence[Sequence[str]]) -> tuple[Stores, _Host]:
    plan = request.plan
    staged = {entry.storage for unit in plan.staged_units for entry in unit.entries}
    offloaded = _apart(request)
    in_files = {name: bound for name, bound in offloaded.items() if name in staged}
    # Files first: if they cannot be used, no host memory is taken.
    files = _disk_store(request, in_files) if in_files else None
    on_host = {name: bound for name, bound in offloaded.items() if name not in staged}
    try:
        host, destinations = _host_store(plan, on_host, request.device, request.pooled)
    except BaseException:
        if files is not None:
            files.close()
        raise
    stores = Stores(host)
    if files is not None:
        stores.add(files, in_files)
    return stores, destinations


def _open_for_ranks(request: StoreRequest, hosts: list[list[str]]) -> tuple[Stores, _Host]:
    plan, ranks = request.plan, request.ranks
    if ranks is None:
        raise OptionError(
            f"mode {plan.mode!r} spans processes and no process group was given: pass "
            f"group=torch.distributed.group.WORLD (after torch.distributed.init_process_group) to headrace.offload"
        )
    if plan.mode == "shm_cpu":
        store, destinations = open_shared(plan, _registrar(request.device), ranks, hosts)
        return Stores(store), destinations
    return Stores(open_sharded(request, ranks, hosts)), {}


_OPENERS: dict[Mode, Callable[[StoreRequest, list[list[str]]], tuple[Stores, _Host]]] = {
    "cpu": _open_cpu,
    "disk": lambda request, hosts: (Stores(_disk_store(request, _apart(request))), {}),
    "meta": lambda request, hosts: (Stores(MetaStore({n: b.info.num_bytes for n, b in _apart(request).items()})), {}),
    **dict.fromkeys(RANK_MODES, _open_for_ranks),
}


def _coded_store(request: StoreRequest, units: Sequence[Unit]) -> CodedStore:
    offloaded = {entry.storage: request.bound[entry.storage] for unit in units for entry in unit.entries}
    if kept := _kept_by_others(request.bound, {n: b for n, b in offloaded.items() if b.home == request.device}):
        raise OptionError(
            f"the memory of {kept[0]} (of {len(kept)} weights) has another user (an alias such as .detach() or a "
            f"state_dict()), and its code is to replace it, so that a write there would be lost: drop it first (del), "
            f"or use codec='none' (--offload-codec none)"
        )
    return CodedStore(units, request.device, _registrar(request.device))


def _registrar(device: torch.device) -> CudaRegistrar | None:
    """What pins memory for ``device``; ``None`` where nothing does."""
    return CudaRegistrar(device) if device.type == "cuda" and not pinning_disabled() else None


def _host_store(
    plan: Plan, offloaded: dict[str, BoundStorage], device: torch.device, held: Mapping[str, AlreadyPinned] | None
) -> tuple[Store, dict[str, torch.Tensor]]:
    if device.type == "cuda":
        return open_pinned(plan, offloaded, _registrar(device), held)
    made = {name: new_buffer(bound.info.num_bytes) for name, bound in offloaded.items() if bound.on_meta}
    adopted = {name: bound.original_bytes() for name, bound in offloaded.items() if name not in made}
    return CpuStore({**adopted, **made}, made), made


def _disk_store(request: StoreRequest, offloaded: dict[str, BoundStorage]) -> DiskStore:
    plan, weights = request.plan, request.weights
    if weights is None and plan.spilled_bytes:
        raise OptionError(
            f"{len(plan.staged_units)} of the plan's {len(plan.units)} units ({format_size(plan.spilled_bytes)}) are "
            f"in safetensors files, and none were given: pass checkpoint=FOLDER to headrace.offload, or make a plan "
            f"with all of them in host memory: mode 'cpu' (--offload-mode cpu)"
        )
    if not offloaded:
        return DiskStore({}, request.disk)
    weights = require_weights(weights)
    on_gpu = request.device.type == "cuda"
    sources = {name: weights.source(bound.info) for name, bound in offloaded.items()}
    lookups = {name for name, bound in offloaded.items() if bound.info.is_lookup}
    stamps = weights.checkpoint.stamps
    # A model that is moved to another device leaves its aliases behind, offloaded or not.
    stays = {name: bound for name, bound in offloaded.items() if bound.home == request.device}
    kept = _kept_by_others(request.bound, stays)
    if kept and on_gpu:
        raise OptionError(
            f"the memory of {kept[0]} (of {len(kept)} weights) has another user (an alias such as .detach() or a "
            f"state_dict(), an array of .numpy(), a list of views), and files are to replace it, so that a write there "
            f"would be lost: drop it first (del), use mode 'cpu', or keep it resident ({resident_rule(kept[0])})"
        )
    # Their memory stays in any case; what is written there is read from it.
    adopted = {name: offloaded[name].original_bytes() for name in kept}
    store = DiskStore(sources, request.disk, stamps=stamps, pin_in_place=on_gpu, lookups=lookups, adopted=adopted)
    for name in () if on_gpu or plan.mode != "disk" else plan.uva:
        _refuse_other_bits(offloaded[name], store.in_place(name))
    for bound in offloaded.values():
        _compare_with_files(bound, store)
    return store


def rounds_in_place(bound: BoundStorage, buffer: torch.Tensor) -> bool:
    """Whether products with a tensor that is read in place in ``buffer`` may be summed in another order."""
    info, offset = bound.info.tensors[0], buffer.data_ptr() % TENSOR_ALIGN_BYTES
    is_exact = not info.shape or (len(info.shape) == 1 and not info.dtype.is_floating_point)
    return offset > 0 and not is_exact and not same_bits_at(offset, info.shape, info.dtype)


def _refuse_other_bits(bound: BoundStorage, buffer: torch.Tensor) -> None:
    info, offset = bound.info, buffer.data_ptr() % TENSOR_ALIGN_BYTES
    if info.is_lookup or not rounds_in_place(bound, buffer):  # rows of a table are the same at any address
        return
    raise OptionError(
        f"{info.name} starts {offset} bytes after a multiple of {TENSOR_ALIGN_BYTES} in its file, and products that "
        f"read it in place there may round differently; prefetch it instead (--offload-rule '{info.name}=prefetch'), "
        f"or rewrite the checkpoint aligned"
    )


def _kept_by_others(bound: Mapping[str, BoundStorage], in_files: Mapping[str, BoundStorage]) -> list[str]:
    """Storages of ``in_files`` whose live memory something else views, and may write to."""
    names: list[str] = []
    for _ in range(2):
        names = [storage.info.name for storage in used_elsewhere(bound.values()) if storage.info.name in in_files]
        if not names or not gc.collect():
            break
    return names


def _compare_with_files(bound: BoundStorage, store: DiskStore) -> None:
    """Require that the files hold the weights of a live model, which are dropped because the files replace them."""
    if bound.on_meta:
        return
    buffer = new_buffer(bound.info.num_bytes)
    store.read(bound.info.name, buffer)
    if not torch.equal(buffer, bound.original_bytes().cpu()):
        raise CheckpointError(
            f"{bound.info.name}: the model's values differ from the checkpoint's; save the model first "
            f"(save_pretrained), or use mode 'cpu'"
        )


# -- bits of a CPU's products ------------------------------------------------------------------------------------------


@cache
@torch.no_grad()
def same_bits_at(offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether this CPU's products with a weight ``offset`` bytes past a multiple of 64 have the bits of one at it.

    Tried on random values with few rows and with many, as vectors of the weight's rows and of its columns, and for
    [experts, ., .] in a batch and in groups. Kernels go by shape, dtype and address, not by values. ``False`` also for
    what was not tried: more than three dimensions (convolutions), and dtypes that are no plain floating point.
    """
    if len(shape) > 3 or not dtype.is_floating_point or dtype.itemsize < 2:
        return False
    *experts, out, size = (1, *shape)[-max(2, len(shape)) :]
    out = min(out, max(1, _TRIED_BYTES // (size * dtype.itemsize)))
    # As many of them as start at different bytes, and for a batch two.
    apart = TENSOR_ALIGN_BYTES // math.gcd(TENSOR_ALIGN_BYTES, out * size * dtype.itemsize) if experts else 1
    count = min(experts[0], max(2, apart)) if experts else 1
    made = torch.Generator("cpu").manual_seed(0)
    weight = torch.randn(count, out, size, generator=made, device="cpu").to(dtype)
    memory = torch.empty(weight.nbytes + offset, dtype=torch.uint8, device="cpu")  # torch aligns it to 64 bytes
    found: list[list[torch.Tensor]] = []
    for start in (0, offset):
        place = memory[start : start + weight.nbytes].view(dtype).view(weight.shape)
        found.append(_tried_products(place.copy_(weight), apart))
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def _tried_products(weight: torch.Tensor, apart: int) -> list[torch.Tensor]:
    """Products with each of the first ``apart`` experts of ``weight`` [experts, out, in], and with all of them."""
    made = torch.Generator("cpu").manual_seed(1)
    count, out, size = weight.shape
    products = []
    for rows in _TRIED_ROWS:
        x = torch.randn(count, rows, size, generator=made, device="cpu").to(weight.dtype)
        y = torch.randn(count, rows, out, generator=made, device="cpu").to(weight.dtype)
        for each, mine, others in list(zip(weight, x, y, strict=True))[:apart]:
            products += [F.linear(mine, each), others @ each]
            if out == 1:  # a vector has products of its own
                products += [mine @ each[0], each[0] @ mine.mT, torch.dot(mine[0], each[0])]
        if count > 1:
            products += [x @ weight.mT, y @ weight, weight @ x[:, 0, :, None]]
        # What grouped products ask for.
        if count > 1 and weight.dtype.itemsize <= 4 and weight.dtype.itemsize * math.gcd(out, size) % 16 == 0:
            ends = torch.arange(rows, count * rows + 1, rows, dtype=torch.int32, device="cpu")
            products += [F.grouped_mm(x.flatten(0, 1), weight.mT, offs=ends)]
    return products
