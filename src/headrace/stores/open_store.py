"""Opens the store of a plan: one for each kind that its units are in, and one of cached experts."""

from __future__ import annotations

from collections import ChainMap
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, cast

import torch

from headrace.stores.store import Opened, StoreRequest, Stores

if TYPE_CHECKING:
    from headrace.stores.expert_files import ExpertFiles
    from headrace.stores.expert_ranges import ExpertRanges


@dataclass(frozen=True)
class OpenedStore(Opened):
    """The store of everything that a plan offloads, before it is filled.

    Attributes:
        ranges: rows of cached experts.
    """

    ranges: ExpertRanges | ExpertFiles | None = None


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
        from headrace.memory.pinned import CudaRegistrar, refuse_capture

        refuse_capture(CudaRegistrar(device))
    for stamp in request.weights.checkpoint.stamps if request.weights is not None else ():
        stamp.check()  # offsets come from headers read earlier
    if ranks is not None:
        from headrace.stores.rank_stores import compare_ranks

        request = replace(request, hosts=compare_ranks(request, ranks))
    names = {
        kind: [entry.storage for unit in units for entry in unit.entries] for kind, units in plan.units_by_kind.items()
    }
    names[plan.kind] += plan.uva
    stores, on_host, on_device = Stores(), list[dict[str, torch.Tensor]](), dict[str, torch.Tensor]()
    with ExitStack() as undo:
        undo.callback(stores.close)
        # Files first: if they cannot be used, no other memory is taken.
        for kind, units in sorted(plan.units_by_kind.items(), key=lambda item: not item[0].in_files):
            opener = import_module(kind.store_module)
            opened: Opened = opener.open_units(request, units, {name: request.bound[name] for name in names[kind]})
            stores.add(opened.store, names[kind])
            # Not copied into one dict: to look a destination up may be to wait until its memory is made.
            on_host.append(cast("dict[str, torch.Tensor]", opened.on_host))
            on_device |= opened.on_device
        ranges = None
        if plan.cached:
            ranges = import_module(plan.kind.experts_module or "").open_experts(request)
            stores.add(ranges, [name for layer in plan.cached for name in layer.storages])
            on_host.append(cast("dict[str, torch.Tensor]", ranges.destinations))
        undo.pop_all()
    return OpenedStore(stores.single or stores, ChainMap(*on_host), on_device, ranges)
