"""One range of addresses over two memories: the first bytes are a device's, the last ones the host's or another
device's.

A kernel takes one base pointer per tensor. With CUDA's virtual memory management (CUDA driver API, "Virtual Memory
Management") device memory and host memory are mapped side by side, so rows of both are reached from the same pointer,
in any mixture. The host memory comes from ``cuMemCreate`` on a NUMA node; memory that was registered cannot be mapped
there, because the driver places registered memory itself. Memory of another device is addressed over NVLink or PCIe.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np
import torch

from headrace.errors import BudgetError, OptionError
from headrace.memory.pages import RawMemory, give_back

# Memory of the device before that of another place: torch asks the driver whose memory the first byte of a range is,
# and would copy the tensor if it were not the device's.
_HEAD_BYTES = 2 << 20


class MappedMemory(RawMemory):
    """Memory of the host, or of a peer, that a device addresses; its views keep it alive.

    Attributes:
        num_bytes: bytes of the memory.
        address: where it begins.
    """

    def __init__(self, num_bytes: int, device: torch.device, peer: torch.device | None = None) -> None:
        """
        Args:
            num_bytes: a multiple of 2 MiB.
            device: a GPU.
            peer: whose memory it is, ``device`` itself or one that it can address; ``None``: the host's.

        Raises:
            BudgetError: there is no room.
            OptionError: the driver cannot map it so.
        """
        mapped = _Mapped(_HEAD_BYTES, _HEAD_BYTES, _HEAD_BYTES + num_bytes, device, peer)
        super().__init__(mapped.address, _HEAD_BYTES + num_bytes, keeps=mapped)
        self.address, self.num_bytes, self._device = mapped.address + _HEAD_BYTES, num_bytes, device

    @classmethod
    def of(cls, mapped: _Mapped, start: int, num_bytes: int, device: torch.device) -> MappedMemory:
        """Memory that ``mapped`` has from ``start`` on, to be mapped a second time."""
        made = cls.__new__(cls)
        super(MappedMemory, made).__init__(mapped.address + start, num_bytes, keeps=mapped)
        made.address, made.num_bytes, made._device = mapped.address + start, num_bytes, device
        return made

    @property
    def buffer(self) -> torch.Tensor:
        """Memory as the host sees it (uint8, 1-D); not where it is a peer's."""
        return torch.from_numpy(np.asarray(self)[-self.num_bytes :])

    @property
    def on_device(self) -> torch.Tensor:
        """Memory as the device sees it (uint8, 1-D)."""
        return torch.as_tensor(self, device=self._device)[-self.num_bytes :]


class SplitRange:
    """Uninitialised memory of a device and of the host; freed with the last tensor that views it.

    Attributes:
        whole: every address (uint8, 1-D, on the device). Between the two memories nothing is mapped, and a kernel that
            reads there fails with an illegal access.
        host: the bytes from ``host_start`` on, as the host sees them (uint8, 1-D).
        far: that memory, for another range to map; ``None`` on a CPU.
    """

    def __init__(
        self,
        device_bytes: int,
        host_start: int,
        num_bytes: int,
        device: torch.device,
        host: MappedMemory | None = None,
        shared: tuple[int, MappedMemory] | None = None,
    ) -> None:
        """
        Args:
            device_bytes: device memory at the beginning, at least 2 MiB.
            host_start: where host memory begins; at least ``device_bytes``.
            num_bytes: bytes of the range. All three are multiples of 2 MiB.
            device: a CPU has one memory: there all bytes are ordinary memory.
            host: the host memory, where it is there already and is mapped a second time; ``None``: it is made.
            shared: where memory of the device begins that other ranges map as well, between the two memories; and it.

        Raises:
            BudgetError, OptionError: as :class:`MappedMemory`.
        """
        self._mapped: _Mapped | None = None
        self._near_bytes = device_bytes
        self.far: MappedMemory | None = None
        if device.type == "cpu":
            self.whole = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            self.host = self.whole[host_start:]
            return
        mapped = self._mapped = _Mapped(device_bytes, host_start, num_bytes, device, host, shared)
        self.whole = torch.as_tensor(RawMemory(mapped.address, num_bytes, keeps=mapped), device=device)
        far = RawMemory(mapped.address + host_start, num_bytes - host_start, keeps=mapped)
        self.host = torch.from_numpy(np.asarray(far))
        self.far = MappedMemory.of(mapped, host_start, num_bytes - host_start, device)

    def free_near(self) -> None:
        """Give up the memory of the device at the beginning; no kernel may read there. A CPU's is overwritten."""
        if self._mapped is None:
            self.whole[: self._near_bytes].fill_(0xFF)
        else:
            self._mapped.unmap_near()

    def take_near(self) -> None:
        """Take that memory again, uninitialised and at its addresses; raises as this class does."""
        if self._mapped is not None:
            self._mapped.map_near()


# Memory behind a device's own: new of that device, some that is mapped elsewhere already, or new of the host.
_Far = torch.device | MappedMemory | None


class _Mapped:
    """The addresses and what is mapped there; gives both back."""

    def __init__(
        self,
        device_bytes: int,
        far_start: int,
        num_bytes: int,
        device: torch.device,
        far: _Far,
        shared: tuple[int, MappedMemory] | None = None,
    ) -> None:
        give_back(_ended, _Mapped._unmap)
        # One of torch's own requirements where it is built for CUDA; by name, since it is nowhere else.
        self._driver: Any = import_module("cuda.bindings.driver")
        self._device, self._peer = device, far if isinstance(far, torch.device) and far != device else None
        self._num_bytes = num_bytes
        self._parts: list[tuple[int, int]] = []
        kinds = self._driver.CUmemLocationType
        node = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
        on_device = self._location(kinds.CU_MEM_LOCATION_TYPE_DEVICE, device.index)
        with torch.cuda.device(device):
            if not isinstance(far, torch.device):
                near = self._call("cuDeviceGetAttribute", node, device.index)
                place = self._location(kinds.CU_MEM_LOCATION_TYPE_HOST_NUMA, max(0, near))
                readers = [on_device, place]
            else:
                place, readers = self._location(kinds.CU_MEM_LOCATION_TYPE_DEVICE, far.index), [on_device]
            self.address = int(self._call("cuMemAddressReserve", num_bytes, 0, 0, 0))
            self._near = device_bytes, on_device
            self.map_near()
            if shared is not None:
                start, memory = shared
                self._map(start, memory.num_bytes, on_device, [on_device], memory)
            made = far if isinstance(far, MappedMemory) else None
            self._map(far_start, num_bytes - far_start, place, readers, made)

    def map_near(self) -> None:
        """Map new memory of the device at the beginning, if there is none."""
        num_bytes, place = self._near
        if (self.address, num_bytes) not in self._parts:
            with torch.cuda.device(self._device):
                self._map(0, num_bytes, place, [place])

    def unmap_near(self) -> None:
        """Give that memory back; waits for the device."""
        part = self.address, self._near[0]
        if part in self._parts:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                self._call("cuMemUnmap", *part)
                self._parts.remove(part)

    def _location(self, kind: Any, number: int) -> Any:
        location = self._driver.CUmemLocation()
        location.type, location.id = kind, number
        return location

    def _map(
        self, start: int, num_bytes: int, place: Any, readers: list[Any], made: MappedMemory | None = None
    ) -> None:
        """Map memory, ``made`` or new in ``place``, ``start`` bytes into the range; ``readers`` read and write it."""
        if num_bytes == 0:
            return
        if made is None:
            properties = self._driver.CUmemAllocationProp()
            properties.type = self._driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            properties.location = place
            handle = self._call("cuMemCreate", num_bytes, properties, 0)
        else:
            handle = self._call("cuMemRetainAllocationHandle", made.address)
        try:
            self._call("cuMemMap", self.address + start, num_bytes, 0, handle, 0)
        finally:
            self._call("cuMemRelease", handle)  # the mapping keeps the memory
        self._parts.append((self.address + start, num_bytes))
        accesses = []
        for reader in readers:
            access = self._driver.CUmemAccessDesc()
            access.location = reader
            access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            accesses.append(access)
        self._call("cuMemSetAccess", self.address + start, num_bytes, accesses, len(accesses))

    def _call(self, name: str, *arguments: Any) -> Any:
        """The result of a function of the driver API, if it has one."""
        code, *results = getattr(self._driver, name)(*arguments)
        if name == "cuMemCreate" and code == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            torch.cuda.empty_cache()  # what torch keeps for its next tensors counts as free
            code, *results = self._driver.cuMemCreate(*arguments)
        if code == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            what = "experts" if self._peer is None else f"units on {self._peer}"
            raise BudgetError(
                f"{self._device}: no room for {self._num_bytes} bytes of {what} ({name})", self._num_bytes
            )
        if code != self._driver.CUresult.CUDA_SUCCESS:
            need = "a cache of experts needs device and host memory in one range of addresses; read experts in place "
            need += "instead (--offload-rule experts=uva)"
            if self._peer is not None:
                need = f"{self._device} has to address memory of {self._peer}; leave --peer-memory out"
            raise OptionError(f"{self._device}: {name} failed ({code.name}), and {need}")
        return results[0] if results else None

    def __del__(self) -> None:
        if not hasattr(self, "address"):
            return
        with suppress(Exception):  # at the end of the process the driver may be gone already
            _ended.append(self)
            if not torch.cuda.is_current_stream_capturing():
                give_back(_ended, _Mapped._unmap)

    def _unmap(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # a kernel may still read there
            while self._parts:
                self._call("cuMemUnmap", *self._parts[0])
                del self._parts[0]
            self._call("cuMemAddressFree", self.address, self._num_bytes)


_ended: list[_Mapped] = []  # and still mapped: to unmap it is to wait for the device
