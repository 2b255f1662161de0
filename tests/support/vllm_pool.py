"""vLLM's memory pool of weights on a CPU: what it unmaps without a copy holds NaN from then on, at the same address."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Allocation:
    size: int
    tag: str = "weights"
    is_asleep: bool = False
    cpu_backup: bytes | None = None


class Pool:
    """The parts of ``CuMemAllocator`` that are relied on.

    Attributes:
        saved_bytes: by the latest sleep, in new host memory.
        mixed: by the address of an allocation, that of another tensor in it.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        memories = {memory.data_ptr(): memory.nbytes() for each in tensors if (memory := each.untyped_storage())}
        self.pointer_to_data = {address: Allocation(size) for address, size in memories.items() if size}
        self.saved_bytes = 0
        self.mixed: dict[int, int] = {}

    def snapshot(self) -> list[dict[str, Any]]:
        """As ``torch.cuda.memory_snapshot``, with memory in it that is free again."""

        def blocks(address: int, size: int) -> list[dict[str, Any]]:
            used = [{"address": each, "state": "active_allocated"} for each in [address, *self._others(address)]]
            return [*used, {"address": address + size, "state": "inactive"}]

        return [{"address": a, "blocks": blocks(a, data.size)} for a, data in self.pointer_to_data.items()]

    def _others(self, address: int) -> list[int]:
        return [self.mixed[address]] if address in self.mixed else []

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        self.saved_bytes = 0
        for address, data in self.pointer_to_data.items():
            if data.tag in offload_tags:
                data.cpu_backup = ctypes.string_at(address, data.size)
                self.saved_bytes += data.size
            ctypes.memset(address, 0xFF, data.size)
            data.is_asleep = True

    def wake_up(self, tags: list[str] | None) -> None:
        for address, data in self.pointer_to_data.items():
            if data.is_asleep and (tags is None or data.tag in tags):
                data.is_asleep = False
                if data.cpu_backup is not None:
                    ctypes.memmove(address, data.cpu_backup, data.size)
                    data.cpu_backup = None


def pool_of(worker: Any) -> Pool:
    """All memory of the model of ``worker`` that vLLM would have allocated on a GPU, and that of headrace's slots."""
    model, offloader = worker.model_runner.get_model(), worker._offloader
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    slots: list[torch.Tensor] = []
    if offloader is not None:
        session = offloader._require_session()
        for name in session.plan.offloaded_names:
            for bound in session._bound[name].tensors:
                tensors.pop(id(bound.tensor), None)
        slots = [] if session.prefetcher is None else [slot.memory for slot in session.prefetcher.replays.live]
    return Pool([*(tensor.data for tensor in tensors.values()), *slots])
