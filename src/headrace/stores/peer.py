"""Units in the memory of a peer: another GPU of this process, idle, which holds them before host memory does."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from headrace.formatting import format_size
from headrace.memory.split_range import MappedMemory
from headrace.memory.system import round_up
from headrace.model.live_tensors import BoundStorage
from headrace.plan.cached_experts import PIECE_BYTES
from headrace.plan.kinds import Unit
from headrace.stores.sources import ByteRange, Copy, Source
from headrace.stores.store import Load, Opened, Store, StoreRequest

_log = logging.getLogger(__name__)


def open_units(request: StoreRequest, units: Sequence[Unit], offloaded: Mapping[str, BoundStorage]) -> Opened:
    """The store of ``units``, in the memory of ``request.peer``.

    Raises:
        BudgetError: it has no room.
    """
    assert request.peer is not None
    num_bytes = sum(unit.num_bytes for unit in units)
    store = PeerStore(units, peer_memory(num_bytes, request.device, request.peer))
    _log.info("%s stores %s of units", request.peer, format_size(num_bytes))
    return Opened(store, on_device=dict(store.places))


def peer_memory(num_bytes: int, device: torch.device, peer: torch.device) -> torch.Tensor:
    """Uninitialised memory of ``peer`` as a tensor on ``device`` (uint8, 1-D).

    To torch a copy from it to a slot is one within ``device``: it needs no stream of ``peer``, and graphs capture it.

    Raises:
        BudgetError: ``peer`` has no room.
        OptionError: ``device`` cannot address it.
    """
    if device.type == "cpu":  # which has one memory
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    torch.cuda.empty_cache()  # the driver cannot use what torch's allocator holds without need, on either GPU
    return MappedMemory(round_up(num_bytes, PIECE_BYTES), device, peer).on_device[:num_bytes]


class PeerStore(Store):
    """Slabs of units, one after the other; made empty.

    Attributes:
        places: by storage, where its bytes go (uint8, 1-D, on the device that computes).
    """

    def __init__(self, units: Sequence[Unit], memory: torch.Tensor) -> None:
        """``memory``: uint8, 1-D, as large as all ``units`` together."""
        starts = accumulate((unit.num_bytes for unit in units), initial=0)
        self._slabs = {
            unit.index: memory[start : start + unit.num_bytes] for unit, start in zip(units, starts, strict=False)
        }
        self.places = {
            entry.storage: self._slabs[unit.index][entry.offset : entry.offset + entry.num_bytes]
            for unit in units
            for entry in unit.entries
        }

    def copies(self, storage: str) -> list[Copy]:
        place = self.places[storage]
        return [Copy(ByteRange(_DeviceMemory(place), 0, place.numel()), 0)]

    def load(self, unit: Unit) -> Load:
        return Load(unit.index, tuple(self.unit_copies(unit)), self._slabs[unit.index])

    def in_place(self, storage: str) -> torch.Tensor:
        return self.places[storage]

    @property
    def host_bytes(self) -> int:
        return 0

    @property
    def account(self) -> dict[str, int]:
        return {"peer": sum(slab.numel() for slab in self._slabs.values())}

    def close(self) -> None:
        """Release the memory; it is freed with the last tensor that views it."""
        self._slabs.clear()
        self.places.clear()


class _DeviceMemory(Source):
    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    def read(self, offset: int, into: memoryview) -> None:
        """Read by way of the device that computes: a copy from a peer to the host need not be possible."""
        here = self._memory[offset : offset + len(into)].clone()
        torch.frombuffer(into, dtype=torch.uint8).copy_(here)
