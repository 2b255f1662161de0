"""A stand-in for CUDA's driver: notes what it is asked for, and maps nothing."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

_CALLS = (
    "AddressReserve", "AddressFree", "Create", "Map", "Release", "RetainAllocationHandle", "SetAccess", "Unmap",
)  # fmt: skip


class Driver(SimpleNamespace):
    """What ``cuda.bindings.driver`` is asked for; ``codes``: of calls that fail, by name."""

    def __init__(self, **codes: str) -> None:
        kinds = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device", CU_MEM_LOCATION_TYPE_HOST_NUMA="host")
        super().__init__(
            calls=[],
            codes=codes,
            CUmemLocationType=kinds,
            CUmemLocation=SimpleNamespace,
            CUmemAllocationProp=SimpleNamespace,
            CUmemAccessDesc=SimpleNamespace,
            CUmemAllocationType=SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned"),
            CUmemAccess_flags=SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="read and write"),
            CUdevice_attribute=SimpleNamespace(CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID="node"),
            CUresult=SimpleNamespace(
                CUDA_SUCCESS=SimpleNamespace(name="done"),
                CUDA_ERROR_OUT_OF_MEMORY=SimpleNamespace(name="full"),
                CUDA_ERROR_NOT_SUPPORTED=SimpleNamespace(name="not supported"),
            ),
        )
        for name in ("DeviceGetAttribute", *(f"Mem{each}" for each in _CALLS)):
            setattr(self, f"cu{name}", partial(self.call, f"cu{name}"))

    def call(self, name: str, *arguments: Any) -> tuple[Any, Any]:
        self.calls.append((name, arguments))
        return getattr(self.CUresult, self.codes.get(name, "CUDA_SUCCESS")), 1 << 40
