"""Store ``cpu``: tensors that already lie in host memory are adopted where they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch

from penstock.errors import TransferError
from penstock.stores.store import Segment, Store

__all__ = ["CpuStore", "MemorySource"]


class MemorySource:
    """Bytes in host memory."""

    def __init__(self, blob: torch.Tensor) -> None:
        self._bytes = blob.numpy()

    def read(self, start: int, into: memoryview) -> None:
        """Copy with numpy, which drops the interpreter lock and, unlike torch, starts no threads of its own."""
        part = self._bytes[start : start + len(into)]
        if len(part) != len(into):
            raise TransferError(f"host memory: expected {len(into)} bytes at {start}, found {len(part)}")
        np.copyto(np.frombuffer(into, dtype=np.uint8), part)


class CpuStore(Store):
    """Keeps the given byte tensors alive and reads from them; copies nothing."""

    mode = "cpu"

    def __init__(self, blobs: Mapping[str, torch.Tensor], made: Collection[str] = ()) -> None:
        """``blobs``: per storage name its bytes (uint8, 1-D, CPU). ``made``: those allocated for this store."""
        self._blobs = dict(blobs)
        self._made = frozenset(made)

    def segments(self, storage: str) -> list[Segment]:
        blob = self._blobs[storage]
        return [Segment(MemorySource(blob), 0, blob.numel())]

    def in_place(self, storage: str) -> torch.Tensor:
        return self._blobs[storage]

    def adopts(self, storage: str) -> bool:
        return storage not in self._made

    @property
    def host_bytes(self) -> int:
        return sum(blob.numel() for blob in self._blobs.values())

    @property
    def account(self) -> dict[str, int]:
        made = sum(self._blobs[name].numel() for name in self._made & self._blobs.keys())
        return {"host": made, "adopted": self.host_bytes - made}

    def close(self) -> None:
        self._blobs.clear()
