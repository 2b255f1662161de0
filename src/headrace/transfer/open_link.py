"""Opens the link that copies the units of a store to the device."""

from __future__ import annotations

import torch

from headrace.plan.plan import Plan
from headrace.stats import Recorder
from headrace.stores.sharded import ShardedStore
from headrace.stores.store import Store
from headrace.transfer.cuda_stream import StreamLink
from headrace.transfer.link import Link, ThreadLink
from headrace.transfer.ring_streams import RingLink
from headrace.transfer.sharded_copy import sharded_link

__all__ = ["open_link"]


def open_link(store: Store, plan: Plan, device: torch.device, recorder: Recorder, measure_stalls: bool) -> Link:
    """The link for ``store`` and ``device``; collective where each rank stores a part of every unit."""
    if isinstance(store, ShardedStore):
        return sharded_link(store, device, recorder, measure_stalls)
    if device.type == "cpu":
        return ThreadLink(recorder=recorder)
    if plan.staged_units:
        return RingLink(device, measure_stalls=measure_stalls)
    return StreamLink(device, measure_stalls=measure_stalls)
