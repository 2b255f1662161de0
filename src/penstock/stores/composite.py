"""Two stores for one plan: units in host memory, and in the checkpoint's files what host memory has no room for."""

from __future__ import annotations

from collections.abc import Collection

import torch

from penstock.plan.plan import Unit
from penstock.stores.disk import DiskStore
from penstock.stores.store import Load, Segment, Store

__all__ = ["SpillStore"]


class SpillStore(Store):
    """Answers for each storage from where it rests.

    Attributes:
        host: the store of everything that is not in files.
        files: the store of the rest.
    """

    mode = "cpu"

    def __init__(self, host: Store, files: DiskStore, in_files: Collection[str]) -> None:
        """``in_files``: names of the storages that ``files`` holds."""
        self.host = host
        self.files = files
        self._in_files = frozenset(in_files)

    @property
    def takes_over(self) -> bool:  # type: ignore[override]
        return self.host.takes_over

    def adopts(self, storage: str) -> bool:
        return self._of(storage).adopts(storage)

    def on_loaded(self, storage: str) -> None:
        self._of(storage).on_loaded(storage)

    def finish(self) -> None:
        self.host.finish()

    def unpin(self) -> None:
        self.host.unpin()

    def segments(self, storage: str) -> list[Segment]:
        return self._of(storage).segments(storage)

    def load(self, unit: Unit) -> Load:
        # A unit of the host comes with its slab and one of files without: that is how a link tells them apart.
        return (self.files if unit.store == "disk" else self.host).load(unit)

    def in_place(self, storage: str) -> torch.Tensor:
        return self._of(storage).in_place(storage)

    @property
    def host_bytes(self) -> int:
        return self.host.host_bytes + self.files.host_bytes

    @property
    def account(self) -> dict[str, int]:
        return {**self.host.account, **self.files.account}

    def close(self) -> None:
        self.files.close()
        self.host.close()

    def _of(self, storage: str) -> Store:
        return self.files if storage in self._in_files else self.host
