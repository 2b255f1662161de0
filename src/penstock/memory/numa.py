"""Which processors are near a GPU, as the kernel says (Documentation/ABI/testing/sysfs-bus-pci, sysfs-devices-node)."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

__all__ = ["cpus_near", "local_cpus", "parse_cpu_list", "pci_address"]

_SYSFS = Path("/sys")


def parse_cpu_list(text: str) -> frozenset[int]:
    """The processors of a kernel list such as ``"0-3,8,10-11"``; an empty one has none.

    Raises:
        ValueError: not of that form.
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def local_cpus(address: str, allowed: Collection[int], sysfs: Path = _SYSFS) -> frozenset[int] | None:
    """Those of ``allowed`` that share a memory node with the PCI device at ``address`` (``"0000:1b:00.0"``).

    ``None`` where there is nothing to choose: one node, a device without a node, or none of its processors allowed.
    """
    if len(list((sysfs / "devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    folder = sysfs / "bus/pci/devices" / address
    try:
        if int((folder / "numa_node").read_text()) < 0:
            return None
        near = parse_cpu_list((folder / "local_cpulist").read_text()) & frozenset(allowed)
    except (OSError, ValueError):  # a container without the device's folder
        return None
    return near if near and near != frozenset(allowed) else None


def pci_address(device: torch.device) -> str:
    """Where a CUDA device sits on the bus, as sysfs writes it."""
    found: Any = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def cpus_near(device: torch.device) -> frozenset[int] | None:
    """The processors of this process near ``device``; ``None`` for a CPU or where there is nothing to choose."""
    if device.type != "cuda":
        return None
    return local_cpus(pci_address(device), os.sched_getaffinity(0))
