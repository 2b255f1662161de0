"""A peer for tests without a GPU: ordinary memory stands in for that of another GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from headrace.plan.plan import Plan
from headrace.plan.rates import Curve
from spills import DISK

# Eight times as fast as the link of the same machine.
NEAR = replace(DISK, peer_bytes_per_s=Curve.of({2**20: 8 * DISK.copy_bytes_per_s(2**20)}))


@contextmanager
def stand_in() -> Iterator[None]:
    """Within, a CPU has a peer: itself."""
    with (
        patch("headrace.planning.checks.peer_of", torch.device),
        patch("headrace.planning.context.peer_of", torch.device),
        patch("headrace.runtime.prepare.peer_of", torch.device),
    ):
        yield


def on_peer(plan: Plan, *indices: int) -> Plan:
    """``plan`` with the units of these indices on a peer."""
    units = [replace(unit, store="peer") if unit.index in indices else unit for unit in plan.units]
    return replace(plan, units=tuple(units))
