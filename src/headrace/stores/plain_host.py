"""The ``cpu`` store: host memory that is pinned for a GPU, and for a CPU that in which the model came."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from headrace.model.live_tensors import BoundStorage
from headrace.plan.kinds import Unit
from headrace.stores.pinned_host import open_pinned, registrar_for
from headrace.stores.sources import ByteRange, Copy
from headrace.stores.store import Opened, Store, StoreRequest, new_buffer


def open_units(request: StoreRequest, units: Sequence[Unit], offloaded: Mapping[str, BoundStorage]) -> Opened:
    """The store of ``offloaded``, in ``units`` or read in place."""
    if request.device.type == "cuda":
        return Opened(*open_pinned(request.plan, dict(offloaded), registrar_for(request.device), request.pooled))
    made = {name: new_buffer(bound.info.num_bytes) for name, bound in offloaded.items() if bound.on_meta}
    adopted = {name: bound.original_bytes() for name, bound in offloaded.items() if name not in made}
    ours = [name for name, bound in offloaded.items() if name in made or not bound.keeps_original]
    return Opened(CpuStore({**adopted, **made}, ours), made)


class CpuStore(Store):
    """``cpu`` for compute on the CPU: keeps the given tensors alive and reads from them; copies nothing."""

    def __init__(self, buffers: Mapping[str, torch.Tensor], made: Collection[str] = ()) -> None:
        """``buffers``: per storage name its bytes (uint8, 1-D, CPU). ``made``: those allocated for this store."""
        self._buffers = dict(buffers)
        self._made = frozenset(made)

    def adopts(self, storage: str) -> bool:
        return storage not in self._made

    def copies(self, storage: str) -> list[Copy]:
        return [Copy(ByteRange.of(self._buffers[storage]), 0)]

    def in_place(self, storage: str) -> torch.Tensor:
        return self._buffers[storage]

    @property
    def host_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers.values())

    @property
    def account(self) -> dict[str, int]:
        made = sum(self._buffers[name].numel() for name in self._made & self._buffers.keys())
        return {"host": made, "adopted": self.host_bytes - made}

    def close(self) -> None:
        self._buffers.clear()
