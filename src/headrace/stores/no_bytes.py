"""The ``meta`` store, of no bytes at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from headrace.model.live_tensors import BoundStorage
from headrace.plan.kinds import Unit
from headrace.stores.sources import ByteRange, Copy, Source
from headrace.stores.store import Opened, Store, StoreRequest, new_buffer


def open_units(request: StoreRequest, units: Sequence[Unit], offloaded: Mapping[str, BoundStorage]) -> Opened:
    """The store of ``offloaded``."""
    return Opened(MetaStore({name: bound.info.num_bytes for name, bound in offloaded.items()}))


class _Nothing(Source):
    def read(self, offset: int, into: memoryview) -> None:
        """Leave the destination unchanged."""


class MetaStore(Store):
    """``meta``, no bytes at all: schedules, hooks and memory can be sized without weights; outputs mean nothing."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """``sizes``: bytes per storage name."""
        self._sizes = dict(sizes)

    def copies(self, storage: str) -> list[Copy]:
        return [Copy(ByteRange(_Nothing(), 0, self._sizes[storage]), 0)]

    def in_place(self, storage: str) -> torch.Tensor:
        return new_buffer(self._sizes[storage])  # never touched, so a large one takes no memory

    @property
    def host_bytes(self) -> int:
        return 0

    @property
    def account(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing to free."""
