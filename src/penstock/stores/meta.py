"""Store ``meta``: no bytes at all. Schedules, hooks and memory can be sized without weights; outputs mean nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.stores.store import Segment, Store, new_blob

__all__ = ["MetaStore"]


class _Nothing:
    def read(self, start: int, into: memoryview) -> None:
        """Leave the destination as it is."""


class MetaStore(Store):
    """Knows sizes only."""

    mode = "meta"

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """``sizes``: bytes per storage name."""
        self._sizes = dict(sizes)

    def segments(self, storage: str) -> list[Segment]:
        return [Segment(_Nothing(), 0, self._sizes[storage])]

    def in_place(self, storage: str) -> torch.Tensor:
        return new_blob(self._sizes[storage])

    @property
    def host_bytes(self) -> int:
        return 0

    @property
    def account(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing to give back."""
