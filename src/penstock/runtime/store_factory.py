"""Which store and link a plan needs on a device, and what is still to be loaded into the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from penstock.checkpoint.weight_map import WeightMap
from penstock.config import SHARDED_MODES, format_gib
from penstock.errors import CheckpointError, OptionError
from penstock.loading.loader import require_weights
from penstock.memory.pinned import CudaRegistrar, HostRegistrar, can_pin_in_place, pinning_disabled, refuse_capture
from penstock.model.live_tensors import BoundStorage
from penstock.plan.plan import SLAB_ALIGNMENT_BYTES, Plan
from penstock.ranks.group import RankGroup, require_ranks
from penstock.runtime.rank_stores import compare_ranks, open_sharded, open_shared
from penstock.stats import Recorder
from penstock.stores.file_reader import DiskOptions
from penstock.stores.pinned_host import Held, PinnedStore
from penstock.stores.store import CpuStore, DiskStore, MetaStore, SpillStore, Store, new_blob
from penstock.transfer.cuda_stream import StreamLink
from penstock.transfer.link import Link, ThreadLink
from penstock.transfer.sharded_copy import sharded_link

__all__ = ["OpenedStore", "open_pinned", "open_store"]

# From the device of compute, the recorder of reads, and whether waits are to be timed.
MakeLink = Callable[[torch.device, Recorder, bool], Link]


def make_link(device: torch.device, recorder: Recorder, measure_stalls: bool) -> Link:
    """The link of a store whose units this process holds as a whole."""
    if device.type == "cuda":
        return StreamLink(device, measure_stalls=measure_stalls)
    return ThreadLink(recorder=recorder)


class OpenedStore(NamedTuple):
    """A store, and what is to be done with it.

    Attributes:
        store: takes what ``destinations`` are filled with.
        destinations: by storage name, memory of the store that is still to be filled (uint8, 1-D, host).
        make_link: the link that brings the store's units; called when the store is filled.
    """

    store: Store
    destinations: dict[str, torch.Tensor]
    make_link: MakeLink = make_link


def open_store(
    plan: Plan,
    bound: dict[str, BoundStorage],
    device: torch.device,
    weights: WeightMap | None,
    disk: DiskOptions | None,
    ranks: RankGroup | None = None,
    held: Mapping[str, Held] | None = None,
) -> OpenedStore:
    """The store of ``plan``, not filled yet. The model is not touched.

    Raises:
        CheckpointError, OptionError: files or a mode that will not do; ranks that differ.
        PeerError: another rank failed, ended or did not come in time.
        StateError: a graph is being captured.
    """
    if device.type == "cuda":
        refuse_capture(CudaRegistrar(device))
    for stamp in weights.checkpoint.stamps if weights is not None else ():
        stamp.check()  # offsets come from headers read earlier
    offloaded = {name: bound[name] for name in plan.offloaded_names}
    hosts = [] if ranks is None else compare_ranks(plan, offloaded, weights, ranks)
    if plan.mode == "meta":
        return OpenedStore(_meta_store(offloaded), {})
    if plan.mode in SHARDED_MODES:
        present = require_ranks(ranks, f"mode {plan.mode!r}")
        store = open_sharded(plan, offloaded, device, weights, disk, present, hosts)
        return OpenedStore(store, {}, partial(sharded_link, store))
    if plan.mode == "shm_cpu":
        registrar = CudaRegistrar(device) if device.type == "cuda" and not pinning_disabled() else None
        return OpenedStore(*open_shared(plan, registrar, require_ranks(ranks, f"mode {plan.mode!r}"), hosts))
    staged = {entry.storage for unit in plan.staged_units for entry in unit.entries}
    in_files = {name: bound for name, bound in offloaded.items() if plan.mode == "disk" or name in staged}
    # Files first: if they will not do, no host memory is taken.
    files = _disk_store(plan, in_files, device, weights, disk) if in_files else None
    if files is not None and plan.mode == "disk":
        return OpenedStore(files, {})
    try:
        host, destinations = _host_store(plan, {n: b for n, b in offloaded.items() if n not in in_files}, device, held)
    except BaseException:
        if files is not None:
            files.close()
        raise
    return OpenedStore(host if files is None else SpillStore(host, files, in_files), destinations)


def _host_store(
    plan: Plan, offloaded: dict[str, BoundStorage], device: torch.device, held: Mapping[str, Held] | None
) -> tuple[Store, dict[str, torch.Tensor]]:
    if device.type == "cuda":
        return open_pinned(plan, offloaded, None if pinning_disabled() else CudaRegistrar(device), held)
    made = {name: new_blob(bound.info.num_bytes) for name, bound in offloaded.items() if bound.on_meta}
    adopted = {name: bound.original_bytes() for name, bound in offloaded.items() if name not in made}
    return CpuStore({**adopted, **made}, made), made


def open_pinned(
    plan: Plan,
    offloaded: dict[str, BoundStorage],
    registrar: HostRegistrar | None,
    held: Mapping[str, Held] | None = None,
) -> tuple[PinnedStore, dict[str, torch.Tensor]]:
    """A pinned store for ``plan``, and its destinations still to be filled.

    Large live tensors are pinned in place, and storages ``held`` in pinned memory stay there.
    """
    if registrar is not None:
        refuse_capture(registrar)
    live = {name: storage.original_bytes() for name, storage in offloaded.items() if storage.home.type == "cpu"}
    adopt = {
        name: blob
        for name, blob in live.items()
        if can_pin_in_place(blob, SLAB_ALIGNMENT_BYTES if name in plan.uva else 1)
    }
    units = [unit for unit in plan.units if unit.store == plan.mode]
    store = PinnedStore(units, plan.uva, registrar, adopt=adopt, held=held)
    if registrar is not None and any(storage.home.type == "cuda" for storage in offloaded.values()):
        store.pin_now()
    return store, {name: store.destination(name) for name in offloaded if name not in store.adopted | store.kept}


def _meta_store(offloaded: dict[str, BoundStorage]) -> MetaStore:
    for name, bound in offloaded.items():
        if not bound.on_meta:
            raise OptionError(
                f"mode 'meta' keeps no bytes, and {name} has some; build the model under torch.device('meta'), or use "
                f"mode 'cpu' or 'disk'"
            )
    return MetaStore({name: bound.info.num_bytes for name, bound in offloaded.items()})


def _disk_store(
    plan: Plan,
    offloaded: dict[str, BoundStorage],
    device: torch.device,
    weights: WeightMap | None,
    disk: DiskOptions | None,
) -> DiskStore:
    if weights is None and plan.spilled_bytes:
        raise OptionError(
            f"{len(plan.staged_units)} of the plan's {len(plan.units)} units ({format_gib(plan.spilled_bytes)}) rest "
            f"in safetensors files, and none were given: pass checkpoint=FOLDER to penstock.offload, or make a plan "
            f"with all of them in host memory: mode 'cpu' (--offload-mode cpu)"
        )
    weights = require_weights(weights)
    on_gpu = device.type == "cuda"
    sources = {name: weights.source(bound.info) for name, bound in offloaded.items()}
    store = DiskStore(sources, disk, stamps=weights.checkpoint.stamps, pin_in_place=on_gpu)
    for name in () if on_gpu or plan.mode != "disk" else plan.uva:
        _refuse_misaligned(offloaded[name], store)
    for bound in offloaded.values():
        _compare_with_files(bound, store)
    return store


def _refuse_misaligned(bound: BoundStorage, store: DiskStore) -> None:
    """Rows copied out of a table are the same at any address; a matrix kernel may sum in another order."""
    address = store.in_place(bound.info.name).data_ptr()
    itemsize = bound.info.tensors[0].dtype.itemsize
    if address % (itemsize if bound.info.is_lookup else 64):
        raise OptionError(
            f"{bound.info.name} starts at an address of its file that is not a multiple of 64 bytes, so a matrix "
            f"product that reads it in place may round differently; prefetch it instead, or rewrite the checkpoint "
            f"aligned"
        )


def _compare_with_files(bound: BoundStorage, store: DiskStore) -> None:
    """A live model's weights are about to be dropped in favour of the files': they must be the same."""
    if bound.on_meta:
        return
    blob = new_blob(bound.info.num_bytes)
    store.read(bound.info.name, blob)
    if not torch.equal(blob, bound.original_bytes().cpu()):
        raise CheckpointError(
            f"{bound.info.name}: the model's values differ from the checkpoint's; save the model first "
            f"(save_pretrained), or use mode 'cpu'"
        )
