"""Weights of a model under construction: in pinned host memory from the moment their layer is built.

An engine builds a model layer by layer on the GPU, then loads the weights, then changes some of them into the form
that its kernels need. A model that is too large for the GPU has to leave it before all that, and again after that: what
quantised weights are repacked into is made on the GPU. :class:`BuildTimeFilter`
says which parameters leave, :class:`BuildTimePool` holds them: in host memory of exactly their size, while its tensors
stay tensors of the GPU, which writes and reads them over the link. Loaders, kernels that initialise or repack, and
random generators work as usual and give the same bits. When the weights are final they lie where a store keeps them,
and nothing is copied or pinned again.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from headrace.config import UVA, Budget, Prefetch, pin_memory_disabled, uva_disabled
from headrace.errors import BudgetError, OptionError, warn_user
from headrace.memory.pages import RawMemory
from headrace.memory.pinned import CudaRegistrar, PinnedBuffer, device_view, new_pinned, pinning_fix
from headrace.memory.split_range import MappedMemory
from headrace.memory.system import round_up
from headrace.model.inventory import take_inventory
from headrace.model.live_tensors import BoundStorage
from headrace.model.patterns import compile_pattern, is_segments
from headrace.plan.cached_experts import PIECE_BYTES
from headrace.plan.slabs import slab_bytes
from headrace.plan.units import TINY_BYTES
from headrace.stores.store import AlreadyPinned

# (name within the layer, bytes) -> whether the parameter leaves the GPU.
Leaves = Callable[[str, int], bool]

# vLLM asks for this attribute: parameters that replace one of these while weights are made final leave the GPU again,
# and since 0.33 kernels of experts read weights that have it once per expert, and all others once per expert and token.
_ENGINE_MARK = "_vllm_is_uva_offloaded"

# As plain words they mean modules of that name, and where there are none the group.
_GROUPS_OF_LAYERS = frozenset({"attention", "mlp", "experts", "shared_experts"})


class BuildTimeFilter:
    """Filter of the parameters that leave the device before there is a plan: those that ``policy`` may offload.

    Only the end of a name is known while a layer is built. Whole segments match there as they will later; for globs and
    regular expressions the usual beginning is assumed. A semantic group needs the whole model, so it stands for
    everything; a word that is the name of one does too, after the first layer, until a module has that name.
    """

    def __init__(self, policy: Prefetch | UVA | Budget) -> None:
        self._policy = policy
        self._left = policy.limit_bytes if isinstance(policy, UVA) else None
        self._matches = [compile_pattern(pattern) for pattern in policy.params if not pattern.startswith("@")]
        self._takes_all = not policy.params or len(self._matches) < len(policy.params)
        self._is_plain = all(map(is_segments, policy.params))
        self._words = {word: compile_pattern(word) for word in policy.params if word in _GROUPS_OF_LAYERS}
        self._first_index: int | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the plan will offload exactly what leaves; otherwise some of it may come back."""
        if not isinstance(self._policy, Prefetch):
            return False  # how much of a budget's candidates stays resident is not known yet
        return self._is_plain and not (self._words and self._first_index is not None)

    def __call__(self, index: int, name: str, num_bytes: int) -> bool:
        """Whether the parameter ``name`` of the layer at ``index`` of its stack leaves; asked in the order of building.

        Of a UVA policy, what leaves is counted against its limit.
        """
        policy = self._policy
        if isinstance(policy, Prefetch):
            first_of_group = policy.group_size - policy.num_in_group
            return index % policy.group_size >= first_of_group and self._is_named(index, name, num_bytes)
        return self._is_named(index, name, num_bytes) and self._counts(num_bytes)

    def takes_of_tower(self, tower: str, name: str, num_bytes: int) -> bool:
        """Whether the parameter ``name`` of the module ``tower``, which is outside of all layers, leaves."""
        groups = len(self._matches) < len(self._policy.params)  # each stands for everything until there is a plan
        everything = groups or (isinstance(self._policy, UVA) and not self._policy.params)
        if num_bytes < TINY_BYTES or not (everything or any(m(f"{tower}.{name}") for m in self._matches)):
            return False
        return self._counts(num_bytes)

    def _counts(self, num_bytes: int) -> bool:
        """Count ``num_bytes`` against the limit of a UVA policy; ``False``: they exceed what is left of it."""
        if self._left is None:
            return True
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True

    def _is_named(self, index: int, name: str, num_bytes: int) -> bool:
        # A word stands for its group only until a module has that name.
        self._words = {word: matches for word, matches in self._words.items() if not matches(name)}
        if self._first_index is None:
            self._first_index = index
        if num_bytes < TINY_BYTES:
            return False
        if self._takes_all or (self._words and index != self._first_index):
            return True
        return any(matches(name) or matches(f"model.layers.{index}.{name}") for matches in self._matches)


class BuildTimePool:
    """Pinned host memory in which parameters wait until the plan is made.

    Experts that a rule caches are in memory that is mapped, and not registered, which a range of the cache can take;
    those that the planner caches are moved there (:meth:`map_experts`).

    Args:
        registrar: makes what pins memory for a device.
        mapped: makes memory that is mapped: of so many bytes, for a device.

    Attributes:
        hold_packed: see :class:`headrace.experts.rows.ExpertKernels`; ``None``: an engine has none.
    """

    hold_packed: Callable[[nn.Module], Mapping[str, str]] | None = None

    def __init__(
        self,
        registrar: Callable[[torch.device], CudaRegistrar] = CudaRegistrar,
        mapped: Callable[[int, torch.device], MappedMemory] = MappedMemory,
    ) -> None:
        self._make_registrar = registrar
        self._make_mapped = mapped
        # By address. Weakly: a parameter that is replaced before the plan is made takes its memory with it.
        self._memory: list[tuple[int, Callable[[], PinnedBuffer | MappedMemory | None]]] = []
        self._experts: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that will be cached
        self._side_by_side: list[weakref.ref[nn.Module]] = []
        # Of each module that parameters left: the names of those that stayed.
        self._stayed: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()
        self._watched: list[Any] = []

    @property
    def num_bytes(self) -> int:
        """Host memory in use."""
        living = (find() for _, find in self._memory)
        return sum(memory.buffer.numel() for memory in living if memory is not None)

    def take(self, module: nn.Module, leaves: Leaves, *, apart: bool, cached: Iterable[str] = ()) -> int:
        """Move the parameters of ``module`` that leave its GPU into the pool; those of a CPU stay.

        What shares memory with another tensor of ``module`` stays until the plan moves the two together. What an
        engine's ``quant_method.process_weights_after_loading`` makes of a parameter that left, leaves as well.

        Args:
            module: a layer that was just built.
            leaves: which of its parameters do.
            apart: each in memory of its own, so that single ones can be released; otherwise all of the layer side by
                side, so that they are transferred in one copy.
            cached: names of modules within ``module`` whose experts will be cached; with ``apart``.

        Returns:
            bytes moved.

        Raises:
            BudgetError: the host has no memory for them.
            StateError: a graph is being captured.
        """
        shared = _sharing_memory(module)
        # On meta: an engine that quantises while it loads makes them later.
        named = [(n, p) for n, p in module.named_parameters() if (_is_plain(p) or p.is_meta) and n not in shared]
        leaving = {name: p for name, p in named if leaves(name, p.nbytes)}
        chosen = [p for p in leaving.values() if not p.is_meta and self.find(p.data) is None]
        if not leaving:
            return 0
        if uva_disabled() or pin_memory_disabled():
            warn_user(
                "HEADRACE_DISABLE_UVA or HEADRACE_DISABLE_PIN_MEMORY is set: weights stay on the GPU until all of them "
                "are loaded, so the model has to fit there once"
            )
            return 0
        self._experts.update(map(module.get_submodule, cached))
        experts = {id(p) for part in self._experts for p in part.parameters(recurse=False)}
        for group in [[p] for p in chosen] if apart or not chosen else [chosen]:
            self._move(group, mapped=id(group[0]) in experts)
        if not apart:
            self._side_by_side.append(weakref.ref(module))
        self._watch(module, set(leaving))
        return sum(p.nbytes for p in chosen)

    def _watch(self, module: nn.Module, leaving: Collection[str]) -> None:
        """Have parameters that are made in place of ``leaving`` leave, too."""
        for prefix, part in module.named_modules():
            method: Any = getattr(part, "quant_method", None)
            names = {name: f"{prefix}.{name}" if prefix else name for name, _ in part.named_parameters(recurse=False)}
            stayed = frozenset(name for name, full in names.items() if full not in leaving)
            if len(stayed) == len(names) or not hasattr(method, "process_weights_after_loading"):
                continue
            # vLLM's name for its kernels of gpt-oss, known before any weight is loaded.
            if self.hold_packed is None and "TRITON" in getattr(getattr(method, "mxfp4_backend", None), "name", ""):
                raise _no_tensor(part, ", ".join(sorted(set(names) - stayed)), "an object of triton_kernels")
            self._stayed[part] = stayed
            if "process_weights_after_loading" not in vars(method):  # one may serve several modules
                method.process_weights_after_loading = partial(self._process, method.process_weights_after_loading)
                self._watched.append(method)

    def _process(self, process: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """``process`` the weights of ``module``; what it makes on the device leaves."""
        before = set(module._parameters)
        process(module, *args, **kwargs)
        if (stayed := self._stayed.get(module)) is None:
            return
        held = self.hold_packed(module) if self.hold_packed is not None else {}
        for name in before - stayed - set(held.values()):
            made = getattr(module, name, None)
            if not isinstance(made, torch.Tensor | None):
                raise _no_tensor(module, name, f"a {type(made).__module__}.{type(made).__name__}")
        keeps = stayed | _sharing_memory(module)
        for name, parameter in module.named_parameters(recurse=False):
            name = held.get(name, name)
            large = parameter.nbytes >= TINY_BYTES and name not in keeps
            if large and _is_plain(parameter) and self.find(parameter.data) is None:
                self._move([parameter], mapped=module in self._experts)

    def compact(self) -> None:
        """Weights are final: put those side by side again that are copied together, and stop watching.

        A parameter that was not replaced would keep the memory of all that once lay beside it.
        """
        for method in self._watched:
            del method.process_weights_after_loading  # the method of the class is in force again
        self._watched.clear()
        for module in filter(None, (reference() for reference in self._side_by_side)):
            shared = _sharing_memory(module)
            places = {
                name: (parameter, held.memory)
                for name, parameter in module.named_parameters()
                if name not in shared and _is_plain(parameter) and (held := self.find(parameter.data)) is not None
            }
            memories = {id(memory): memory.num_bytes for _, memory in places.values()}
            if sum(memories.values()) > slab_bytes(p.nbytes for p, _ in places.values()) or len(memories) > 1:
                parameters = [parameter for parameter, _ in places.values()]
                del places
                self._move(parameters)

    def map_experts(self, parameters: Iterable[nn.Parameter]) -> None:
        """Move those of ``parameters`` that are in registered memory, one by one, to memory that a cache can map."""
        for parameter in parameters:
            held = self.find(parameter.data)
            if held is not None and isinstance(held.memory, PinnedBuffer):
                del held  # it is freed when its parameter has left
                self._move([parameter], mapped=True)

    def _move(self, parameters: Sequence[nn.Parameter], *, mapped: bool = False) -> None:
        device = parameters[0].device
        memory = self._allocate(slab_bytes(p.nbytes for p in parameters), device, mapped)  # the views keep it alive
        start = 0
        for parameter in parameters:
            end = start + parameter.nbytes
            if isinstance(memory, MappedMemory):
                view = memory.on_device[start:end]
            else:
                view = device_view(memory.buffer[start:end], device)
            data = view.view(parameter.dtype).as_strided(parameter.shape, parameter.stride())
            data.copy_(parameter.data)  # some begin as ones
            parameter.data = data
            setattr(parameter, _ENGINE_MARK, True)
            start += slab_bytes([parameter.nbytes])

    def _allocate(self, num_bytes: int, device: torch.device, mapped: bool) -> PinnedBuffer | MappedMemory:
        memory: PinnedBuffer | MappedMemory
        if mapped:
            memory = self._make_mapped(round_up(num_bytes, PIECE_BYTES), device)
        else:
            memory, code = new_pinned(num_bytes, self._make_registrar(device))
            if code != 0:
                raise BudgetError(
                    f"the driver refused to pin {num_bytes} bytes of host memory for weights that leave {device} "
                    f"(cudaHostRegister: error {code}); {pinning_fix()}, free host memory, or offload less",
                    num_bytes,
                )
        self._memory.append((memory.buffer.data_ptr(), weakref.ref(memory)))
        self._memory = sorted((entry for entry in self._memory if entry[1]() is not None), key=lambda entry: entry[0])
        return memory

    def find(self, tensor: torch.Tensor) -> AlreadyPinned | None:
        """Place of the bytes of ``tensor`` in the pool; ``None`` if they are anywhere else by now."""
        index = bisect_right(self._memory, tensor.data_ptr(), key=lambda entry: entry[0]) - 1
        memory = self._memory[index][1]() if index >= 0 else None
        if memory is None:
            return None
        start = tensor.data_ptr() - memory.buffer.data_ptr()
        return AlreadyPinned(memory, start, tensor.nbytes) if start + tensor.nbytes <= memory.buffer.numel() else None

    def find_storages(self, bound: Mapping[str, BoundStorage]) -> dict[str, AlreadyPinned]:
        """The storages of ``bound`` that still lie in the pool, by name."""
        on_gpu = {name: storage for name, storage in bound.items() if storage.home.type == "cuda"}
        found = {name: self.find(storage.original_bytes()) for name, storage in on_gpu.items()}
        return {name: place for name, place in found.items() if place is not None}

    def find_in_engine_memory(self, bound: Mapping[str, BoundStorage]) -> frozenset[str]:
        """Storages of a GPU that the engine keeps in pinned memory of its own: by its mark, and by address.

        vLLM re-pins a parameter that replaces one of ours. Its ``.device`` is a GPU although the bytes are in host
        memory, so a resident must still be copied.
        """
        marked = {
            name: storage
            for name, storage in bound.items()
            if storage.home.type == "cuda" and any(getattr(t.original, _ENGINE_MARK, False) for t in storage.tensors)
        }
        found = {name: storage.original_bytes() for name, storage in marked.items()}
        at_address = {
            name: torch.from_numpy(np.asarray(RawMemory(b.data_ptr(), b.numel()))) for name, b in found.items()
        }
        return frozenset(name for name, buffer in at_address.items() if buffer.is_pinned())  # asks the driver


def mark_read_in_place(bound: Mapping[str, BoundStorage], in_place: Collection[str]) -> None:
    """Set the engine's mark on the tensors of the storages ``in_place``, and take it from all others of ``bound``."""
    for name, storage in bound.items():
        for tensor in storage.tensors:
            mark_host_resident(tensor.tensor, name in in_place)


def mark_host_resident(tensor: torch.Tensor, is_on_host: bool) -> None:
    """Set the engine's mark on ``tensor``, or take it away."""
    if is_on_host:
        setattr(tensor, _ENGINE_MARK, True)
    else:
        vars(tensor).pop(_ENGINE_MARK, None)


def _no_tensor(module: nn.Module, names: str, made: str) -> OptionError:
    return OptionError(
        f"{type(module).__name__}: {names} would be offloaded, and the engine's kernel has {made} in its place, whose "
        f"memory headrace cannot move: choose another kernel (in vLLM --moe-backend marlin), or leave the names out of "
        f"what is offloaded"
    )


def _sharing_memory(module: nn.Module) -> frozenset[str]:
    """Names of tensors of ``module`` that share memory with another one."""
    return frozenset(name for s in take_inventory(module).storages if len(s.tensors) > 1 for name in s.names)


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether the tensor is on a GPU, without gaps in its own memory, and of no subclass: its bytes can be anywhere."""
    data = parameter.data
    own = data.untyped_storage().nbytes() == data.nbytes if type(data) is torch.Tensor else False
    if not (data.is_cuda and own and data.numel() > 0 and data.dim() > 0):
        return False
    # Kernels may want other strides; torch keeps them for a tensor like this one if they leave no gaps.
    return data.is_contiguous() or torch.empty_like(data, device="meta").stride() == data.stride()
