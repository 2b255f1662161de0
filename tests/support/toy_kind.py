"""A kind of store that headrace does not have: host memory in which every bit is inverted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headrace.kinds.on_peer import OnPeer
from headrace.plan.kinds import Unit
from headrace.plan.rates import Floats, Rates
from headrace.stores.sources import ByteRange, Copy, MemorySource
from headrace.stores.store import Opened, Store


class Inverted(OnPeer):
    name = label = "inverted"
    on_host = True
    takes_writes = False
    store_module = "toy_kind"

    def copy_s(self, rates: Rates, num_bytes: Floats) -> Floats:
        return 3 * rates.copies_s(num_bytes)


class InvertedStore(Store):
    def __init__(self, buffers: Mapping[str, torch.Tensor]) -> None:
        self._buffers = dict(buffers)

    def copies(self, storage: str) -> list[Copy]:
        return [Copy(ByteRange(_Inverting(self._buffers[storage]), 0, self._buffers[storage].numel()), 0)]

    def in_place(self, storage: str) -> torch.Tensor:
        raise AssertionError("not asked for")

    @property
    def host_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers.values())

    def close(self) -> None:
        self._buffers.clear()


class _Inverting(MemorySource):
    def read(self, offset: int, into: memoryview) -> None:
        super().read(offset, into)
        torch.frombuffer(into, dtype=torch.uint8).bitwise_not_()


def open_units(request: Any, units: Sequence[Unit], offloaded: Mapping[str, Any]) -> Opened:
    return Opened(InvertedStore({name: ~bound.original_bytes() for name, bound in offloaded.items()}))


KINDS = {"inverted": Inverted()}
