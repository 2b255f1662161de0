"""A registrar that pins nothing and remembers everything, for tests of the pinned store without a GPU."""

from __future__ import annotations

import pytest
import torch

from headrace.runtime.prepare import Prepared
from headrace.stores.open_store import OpenedStore
from headrace.stores.pinned_host import PinnedStore, open_pinned


class Ledger:
    """Counts like a driver: a page is registered once, and given back once.

    Attributes:
        held: bytes by address, of what is registered now.
        log: every call, in order.
        refusals: codes to answer the next registrations with, in order; 0 accepts.
    """

    def __init__(self, refusals: list[int] | None = None, capturing: bool = False) -> None:
        self.held: dict[int, int] = {}
        self.log: list[tuple[str, int, int]] = []
        self.refusals = refusals or []
        self.capturing = capturing

    def register(self, address: int, num_bytes: int) -> int:
        code = self.refusals.pop(0) if self.refusals else 0
        self.log.append(("refuse" if code else "register", address, num_bytes))
        if code:
            return code
        assert not any(a < address + num_bytes and address < a + n for a, n in self.held.items()), "overlap"
        self.held[address] = num_bytes
        return 0

    def unregister(self, address: int) -> None:
        assert not self.capturing
        self.log.append(("unregister", address, self.held.pop(address)))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.log.append(("allocate", 0, num_bytes))
        return torch.empty(num_bytes, dtype=torch.uint8)


def pin_by(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> list[PinnedStore]:
    """Offloads on the CPU use the store of a GPU; returns the stores made."""
    stores: list[PinnedStore] = []

    def opened(prepared: Prepared) -> OpenedStore:
        names = prepared.plan.offloaded_names
        store, destinations = open_pinned(prepared.plan, {name: prepared.bound[name] for name in names}, ledger)
        stores.append(store)
        return OpenedStore(store, destinations, {})

    monkeypatch.setattr("headrace.runtime.session.open_store", opened)
    return stores
