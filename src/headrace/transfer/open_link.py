"""Opens the link that copies the units of a store to the device."""

from __future__ import annotations

from importlib import import_module

import torch

from headrace.plan.plan import Plan
from headrace.stats import Recorder
from headrace.stores.store import Store
from headrace.transfer.link import Link, ThreadLink

__all__ = ["open_link"]


def open_link(store: Store, plan: Plan, device: torch.device, recorder: Recorder, measure_stalls: bool) -> Link:
    """The link for ``store`` and ``device``; collective where each rank stores a part of every unit."""
    if device.type == "cpu" and not plan.kind.is_split:
        return ThreadLink(recorder=recorder)
    modules = (kind.link_module for kind, units in plan.units_by_kind.items() if units)
    module = import_module(next(filter(None, modules), "headrace.transfer.cuda_stream"))
    link: Link = module.open_link(store, device, recorder, measure_stalls)
    return link
