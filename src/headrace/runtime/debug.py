"""``HEADRACE_DEBUG=1``: make every race visible.

A unit's checksum is taken from the store the first time it is needed. It is compared when the copy of the unit has
completed (it may be declared done too early, or write to the wrong place) and when its module has run (a slot that was
overwritten while it was read). Between uses a slot is filled with 0xFF, which is NaN in every floating dtype, so a read
at the wrong time cannot look right by luck.

Weights that share a slot share an address. A cache that is keyed by ``weight.data_ptr()`` gives the second what was
made of the first, which no checksum shows: :class:`AddressGuard` does.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from headrace.errors import OutsideAccessError, RaceError
from headrace.model.live_tensors import BoundTensor, TensorState, resident_rule
from headrace.plan.plan import Plan
from headrace.plan.slabs import SlabEntry
from headrace.runtime.outside_access import address_of
from headrace.stores.sources import Copy, fill
from headrace.stores.store import new_buffer

POISON = 0xFF


class Guard:
    """Checksums and poison for the slots of one prefetcher."""

    def __init__(self, plan: Plan, copies: Sequence[Sequence[Copy]], promoted: Collection[str] = ()) -> None:
        """``promoted``: storages that are read in slots no more, at any time; they may share the store's memory."""
        self._plan = plan
        self._promoted = promoted
        self._copies = copies
        # Filled on first use: a unit may be stored in a file, and reading all of them would take as long as a load.
        self._expected: dict[tuple[int, int], int] = {}  # by unit and number of entries that are not promoted

    def copied(self, unit: int, slot: torch.Tensor) -> None:
        """Raise ``RaceError`` unless ``slot`` holds ``unit``."""
        self._check(unit, slot, "after its copy: the copy was declared done before it was, or wrote elsewhere")

    def before_reuse(self, unit: int, slot: torch.Tensor) -> None:
        """Raise ``RaceError`` unless ``slot`` still holds ``unit``; then poison it."""
        self._check(unit, slot, "after its module ran: the slot was overwritten while it was read")
        slot.fill_(POISON)

    def forget(self, unit: int) -> None:
        """The store has other bytes for ``unit`` from now on."""
        self._expected = {key: checksum for key, checksum in self._expected.items() if key[0] != unit}

    def _check(self, unit: int, slot: torch.Tensor, when: str) -> None:
        entries = [entry for entry in self._plan.units[unit].entries if entry.storage not in self._promoted]
        key = unit, len(entries)
        if key not in self._expected:
            stored = new_buffer(self._plan.units[unit].num_bytes)
            fill(stored, self._copies[unit])
            self._expected[key] = self._checksum(entries, stored)
        found = self._checksum(entries, slot)
        if found != self._expected[key]:
            raise RaceError(
                f"unit {unit} ({self._plan.units[unit].module_fqn}): checksum {self._expected[key]:08x} in the store, "
                f"{found:08x} in its slot {when}"
            )

    def _checksum(self, entries: Sequence[SlabEntry], buffer: torch.Tensor) -> int:
        checksum = 0
        # By entry, because the gaps between entries are never written and differ between store and slot.
        for entry in entries:
            stretch = buffer[entry.offset : entry.offset + entry.num_bytes]
            # Waits for the device, unlike any path without the switch (contract 5).
            checksum = zlib.crc32(stretch.cpu().numpy().data, checksum)
        return checksum


class AddressGuard:
    """Has ``data_ptr()`` of each of ``tensors`` return an integer that is the key of one weight alone."""

    def __init__(self, tensors: Sequence[BoundTensor]) -> None:
        self._tensors = tensors
        self._names: dict[int, str] = {}  # of the weights whose addresses have been keys

    def attach(self) -> None:
        for bound in self._tensors:
            vars(bound.tensor)["data_ptr"] = partial(self._address, bound)

    def remove(self) -> None:
        for bound in self._tensors:
            vars(bound.tensor).pop("data_ptr", None)

    def _address(self, bound: BoundTensor) -> int:
        address = _Address(address_of(bound))
        address.check = partial(self._check, bound)
        return address

    def _check(self, bound: BoundTensor, address: int) -> None:
        is_resident = bound.state is TensorState.RESIDENT
        first = bound.name if is_resident else self._names.setdefault(address, bound.name)
        if first != bound.name:
            raise OutsideAccessError(
                f"data_ptr() of {bound.name} is used as a key, and has been one for {first}, which is in the same slot "
                f"at other times: a cache would give one what it keeps of the other. Use the name of the module as the "
                f"key, or keep both resident ({resident_rule(bound.name)})"
            )


class _Address(int):
    """An address that kernels take like any other; what hashes it is about to keep something by it."""

    check: Callable[[int], None]

    def __hash__(self) -> int:
        self.check(int(self))
        return super().__hash__()
