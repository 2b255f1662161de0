"""Plans of two stores, for tests: host memory, and files for the units that it has no room for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import headrace
from checks import require_forwards
from headrace.plan.candidates import Spill
from headrace.plan.plan import Plan
from models import rows
from plans import SMALL

KIB, MIB, GIB = 2**10, 2**20, 2**30
DISK = replace(SMALL, file_bytes_per_s=0.4e9)
SPILL = Spill(ring_bytes=0)


def staged(plan: Plan, *indices: int) -> Plan:
    """``plan`` with the units of these indices in files."""
    units = [replace(unit, store="disk") if unit.index in indices else unit for unit in plan.units]
    return replace(plan, units=tuple(units))


# Slots, and the units of six that are stored elsewhere.
PLACES = pytest.mark.parametrize(
    ("slots", "indices"), [(1, (0, 3)), (2, (1, 4)), (3, (5,)), (2, (0, 1, 2, 3, 4, 5)), (6, (2,))]
)


def require_bytes_of_each_store(handle: headrace.Handle, expected: torch.Tensor, slots: int) -> None:
    """Two forwards of six layers have the bits of ``expected``, and each unit was copied from the store of the plan."""
    before, units = handle.stats().moved_by_store, handle.plan.units
    require_forwards(handle, rows(), expected, 2)
    after = handle.stats().moved_by_store
    moving = [unit for unit in units if unit.index + slots < 6 or unit.index >= slots]
    for store in {unit.store for unit in units}:
        wanted = 2 * sum(unit.payload_bytes for unit in moving if unit.store == store)
        assert after[store] - before[store] == wanted, store
