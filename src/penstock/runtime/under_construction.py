"""Weights of a model under construction: in pinned host memory from the moment their layer is built.

An engine builds a model layer by layer on the GPU, then loads the weights, then changes some of them into the form
that its kernels like. A model that is too large for the GPU has to leave it before all that. What is held lies in host
memory of exactly its size, and its tensors stay tensors of the GPU, which writes and reads them over the link: loaders,
kernels that initialise or repack, and random generators do what they would do otherwise, with the same bits. When the
weights are final they are where a store wants them, and nothing is copied or pinned again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from penstock.env import pin_memory_disabled, uva_disabled
from penstock.errors import BudgetError, warn_user
from penstock.memory.pages import RawMemory
from penstock.memory.pinned import CudaRegistrar, HostRegistrar, PinnedBuffer, device_view, new_pinned
from penstock.model.inventory import take_inventory
from penstock.model.live_tensors import BoundStorage
from penstock.plan.plan import slab_bytes
from penstock.stores.pinned_host import Held

__all__ = ["Holding", "Wanted", "held_storages", "strayed_storages"]

# (name within the layer, bytes) -> whether it is held.
Wanted = Callable[[str, int], bool]

# vLLM asks for this attribute: parameters that replace one of these while weights are made final leave the GPU again.
_ENGINE_MARK = "_vllm_is_uva_offloaded"


class Holding:
    """Host memory in which parameters wait until the plan is made.

    Args:
        registrar: makes what pins memory for a device.
    """

    def __init__(self, registrar: Callable[[torch.device], HostRegistrar] = CudaRegistrar) -> None:
        self._make_registrar = registrar
        # By address. Weakly: a parameter that is replaced before the plan is made takes its memory with it.
        self._memory: list[tuple[int, Callable[[], PinnedBuffer | None]]] = []

    @property
    def num_bytes(self) -> int:
        """Host memory in use."""
        living = (find() for _, find in self._memory)
        return sum(memory.blob.numel() for memory in living if memory is not None)

    def hold(self, module: nn.Module, wanted: Wanted, *, apart: bool) -> int:
        """Take the parameters of ``module`` that are ``wanted`` off its GPU; those of a CPU are where they should be.

        What shares memory with another tensor of ``module`` stays until the plan moves the two together.

        Args:
            module: a layer that was just built.
            wanted: says which, by name within the layer and bytes.
            apart: each in memory of its own, so that some can be let go of; otherwise all of the layer side by side,
                so that they travel in one copy.

        Returns:
            bytes held.

        Raises:
            BudgetError: the host has no memory for them.
            StateError: a graph is being captured.
        """
        shared = {name for s in take_inventory(module).storages if len(s.tensors) > 1 for name in s.names}
        named = [(name, p) for name, p in module.named_parameters() if _is_plain(p) and name not in shared]
        chosen = [p for name, p in named if wanted(name, p.nbytes) and self.find(_bytes_in(p)) is None]
        if not chosen or not _can_hold():
            return 0
        for group in [[p] for p in chosen] if apart else [chosen]:
            self._move(group)
        return sum(p.nbytes for p in chosen)

    def _move(self, parameters: Sequence[nn.Parameter]) -> None:
        device = parameters[0].device
        memory = self._allocate(slab_bytes(p.nbytes for p in parameters), device)  # kept by the views below
        start = 0
        for parameter in parameters:
            num_bytes = parameter.nbytes
            view = device_view(memory.blob[start : start + num_bytes], device)
            data = view.view(parameter.dtype).view(parameter.shape)
            data.copy_(parameter.data)  # some begin as ones
            parameter.data = data
            setattr(parameter, _ENGINE_MARK, True)
            start += slab_bytes([num_bytes])

    def _allocate(self, num_bytes: int, device: torch.device) -> PinnedBuffer:
        memory, code = new_pinned(num_bytes, self._make_registrar(device))
        if code != 0:
            raise BudgetError(
                f"the driver refused to pin {num_bytes} bytes of host memory for weights that leave {device} "
                f"(cudaHostRegister: error {code}); raise `ulimit -l`, free host memory, or offload less",
                num_bytes,
            )
        self._memory.append((memory.blob.data_ptr(), memory.weakly()))
        self._memory = sorted((entry for entry in self._memory if entry[1]() is not None), key=lambda entry: entry[0])
        return memory

    def find(self, tensor: torch.Tensor) -> Held | None:
        """Where ``tensor`` (uint8, 1-D) is held; ``None`` if its bytes are anywhere else by now."""
        index = bisect_right(self._memory, tensor.data_ptr(), key=lambda entry: entry[0]) - 1
        memory = self._memory[index][1]() if index >= 0 else None
        if memory is None:
            return None
        start = tensor.data_ptr() - memory.blob.data_ptr()
        inside = start + tensor.numel() <= memory.blob.numel()
        return Held(memory, start, tensor.numel()) if inside else None


def held_storages(bound: Mapping[str, BoundStorage], holding: Holding | None) -> dict[str, Held]:
    """The storages of ``bound`` that still lie where ``holding`` put them."""
    if holding is None:
        return {}
    cuda = {name: storage for name, storage in bound.items() if storage.home.type == "cuda"}
    found = {name: holding.find(storage.original_bytes()) for name, storage in cuda.items()}
    return {name: stretch for name, stretch in found.items() if stretch is not None}


def strayed_storages(bound: Mapping[str, BoundStorage]) -> frozenset[str]:
    """Those of a GPU that the engine has moved to pinned memory of its own: by the mark that it leaves, and by address.

    It does so with what replaces a held parameter. The plan may want it on the device, and by its device it is there.
    """
    marked = {
        name: storage
        for name, storage in bound.items()
        if storage.home.type == "cuda" and any(getattr(t.original, _ENGINE_MARK, False) for t in storage.tensors)
    }
    return frozenset(name for name, storage in marked.items() if _is_pinned(storage.original_bytes()))


def _is_pinned(blob: torch.Tensor) -> bool:
    """Whether a tensor of a GPU (uint8, 1-D) lies in pinned host memory; the driver knows by the address."""
    return bool(torch.from_numpy(np.asarray(RawMemory(blob.data_ptr(), blob.numel()))).is_pinned())


def _is_plain(parameter: nn.Parameter) -> bool:
    """On a GPU, in memory of its own without gaps, and no tensor subclass: then its bytes, if any, can be anywhere."""
    data = parameter.data
    own = data.untyped_storage().nbytes() == data.nbytes if type(data) is torch.Tensor else False
    return data.is_cuda and own and data.numel() > 0 and data.dim() > 0 and data.is_contiguous()


def _bytes_in(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.data.view(torch.uint8).view(-1)


def _can_hold() -> bool:
    if not (uva_disabled() or pin_memory_disabled()):
        return True
    warn_user(
        "PENSTOCK_DISABLE_UVA or PENSTOCK_DISABLE_PIN_MEMORY is set: weights stay on the GPU until all of them are "
        "loaded, so the model has to fit there once"
    )
    return False
