"""The link of ``sharded_gpu``: a unit is gathered from the memory of all ranks' devices by their copy engines.

One stream per rank, so that several NVLinks and engines work at once, all forked from the copy stream and joined to it.
The parts never change, so ranks need not run in step: each reads at its own time, in graphs too, and goes on when
another rank has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.errors import TransferError
from penstock.plan.plan import PartLayout
from penstock.ranks.channel import GlooChannel
from penstock.stats import Recorder
from penstock.stores.sharded import PartStore, SymmetricParts
from penstock.stores.store import Load
from penstock.transfer.cuda_stream import StreamLink, StreamTransfer
from penstock.transfer.link import ComputeEvent, Link
from penstock.transfer.pooled_copy import PooledStreamLink, PooledThreadLink

__all__ = ["ShardedStreamLink", "link_of_parts"]


def link_of_parts(store: PartStore, device: torch.device, recorder: Recorder, measure_stalls: bool) -> Link:
    """The link that brings whole units from the parts of all ranks. Collective."""
    if device.type != "cuda":
        return PooledThreadLink(store.layout, GlooChannel(store.ranks, "units"), recorder=recorder)
    if isinstance(store.parts, SymmetricParts):
        return ShardedStreamLink(device, store.layout, store.parts, measure_stalls=measure_stalls)
    return PooledStreamLink(device, store.layout, store.ranks, measure_stalls=measure_stalls)


class ShardedStreamLink(StreamLink):
    """Fork / copy / done / wait, with N copies side by side for each unit."""

    def __init__(
        self, device: torch.device, layout: PartLayout, parts: SymmetricParts, *, measure_stalls: bool = False
    ) -> None:
        super().__init__(device, measure_stalls=measure_stalls)
        self._layout = layout
        self._parts = parts
        # Beginning with the neighbour, so that the ranks do not all read from the same one at once.
        order = [(parts.rank + step) % layout.num_ranks for step in range(1, layout.num_ranks + 1)]
        self._lanes = {rank: torch.cuda.Stream(device) for rank in order}

    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> StreamTransfer:
        if load.slab is None:
            raise TransferError(f"unit {load.unit} has no part on this rank's device")
        captured = self.capturing
        for mark in after:
            assert isinstance(mark, torch.cuda.Event)
            self._stream.wait_event(mark)
        begin = self._stream.record_event()
        for rank, lane in self._lanes.items():
            lane.wait_event(begin)
            with torch.cuda.stream(lane):
                self._gather(load.unit, slot, rank)
            self._stream.wait_event(lane.record_event())
        return StreamTransfer(load.unit, self._stream.record_event(), captured)

    def _gather(self, unit: int, slot: torch.Tensor, rank: int) -> None:
        memory = self._parts.views[rank][self._layout.offsets[unit] :]
        for stretch in self._layout.stripings[unit].stretches(rank):
            part = memory[stretch.offset : stretch.offset + stretch.num_bytes]
            slot[stretch.start : stretch.end].copy_(part, non_blocking=True)
