"""Plans of two stores, for tests: host memory, and files for the units that it has no room for."""

from __future__ import annotations

from dataclasses import replace

from headrace.plan.candidates import Spill
from headrace.plan.plan import Plan
from plans import SMALL

KIB, MIB, GIB = 2**10, 2**20, 2**30
DISK = replace(SMALL, file_bytes_per_s=0.4e9)
SPILL = Spill(ring_bytes=0)


def staged(plan: Plan, *indices: int) -> Plan:
    """``plan`` with the units of these indices in files."""
    units = [replace(unit, store="disk") if unit.index in indices else unit for unit in plan.units]
    return replace(plan, units=tuple(units))
