"""Uses of offloaded weights outside of their module's forward: promoted, read from the store, or refused.

* An operator in eager code that is given a placeholder calls :meth:`Promoter.on_outside_access`, which makes the
  tensor resident. A write in place goes to the store, if that is memory of this process. Weights that compiled code
  uses are never placeholders (it relies on addresses), so nothing would notice such a use at run time: there
  :meth:`Promoter.check_trace` checks the graph that torch.compile traces.
* ``state_dict()`` must give the weights and not what a slot happens to hold: :class:`StateGuard` puts in their bytes.
  Those that no module reads there are read-only, since a write to them would not, or not at once, reach the model.
  Code that loads adapters reads names and shapes of it alone, and gets placeholders.
* ``load_state_dict()``, ``to()``, ``half()`` and all that goes through ``Module._apply`` would change what is in slots
  and be lost; :class:`StateGuard` refuses them before they have changed anything of the model.
* So is ``state_dict()``, and with it the loading of adapters, of what bitsandbytes has packed for a CPU, since it would
  unpack the weights in place.
* Copies and pickles of the model are refused (:class:`NotCopyable`).
"""

from __future__ import annotations

import logging
import operator
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from headrace.errors import ModelChangedError, OutsideAccessError, StateError, warn_user
from headrace.formatting import format_size
from headrace.model.live_tensors import (
    BoundStorage,
    BoundTensor,
    TemporaryCopy,
    TensorState,
    is_placeholder,
    own_storage,
    owner_of,
    resident_rule,
    written_in_place,
)
from headrace.model.torch_private import storage_id
from headrace.model.tracing import traced_graph
from headrace.plan.plan import Plan
from headrace.stores.store import Store, new_buffer

_log = logging.getLogger(__name__)

_MARK = "_headrace_offloaded"

# Functions of these packages that load adapters, several of them for each: the weights would be decoded, or read from
# files, every time.
_ADAPTER_PACKAGES = ("diffusers", "peft")
_READ_NO_VALUES = frozenset({
    "load_lora_adapter", "_maybe_expand_lora_state_dict", "_remap_adapter_state_dict_for_load",
    "_find_mismatched_keys", "hotswap_adapter_from_state_dict",
})  # fmt: skip

# By the path to an inner tensor; under () what is no subclass.
_Parts = dict[tuple[str, ...], tuple[BoundStorage, BoundTensor]]

_OUTSIDE = "outside of the forward that it is on the device for"

# They copy rows of a table, or add some up in their order, which comes to the same bits at any address.
_ROW_READS = (torch.ops.aten.embedding, torch.ops.aten._embedding_bag, torch.ops.aten._embedding_bag_forward_only)
_TRACED_ROW_READS = (F.embedding, F.embedding_bag)

_TRACED_WRITES = {getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
_TRACED_WRITES |= {operator.iand, operator.ior, operator.ixor, operator.setitem}


class NotCopyable:
    """Refuses ``copy.copy``, ``copy.deepcopy`` and ``pickle``, which all call ``__reduce_ex__``, of what holds it."""

    def __reduce_ex__(self, protocol: Any = None) -> Any:
        raise StateError(
            "an offloaded model cannot be copied or pickled, nor can a module in it whose weights are offloaded: they "
            "are stored elsewhere. Use its state_dict(), keep what is copied resident, or call handle.remove() first"
        )


class Promoter(NotCopyable):
    """Decides, for one offload, what happens to a weight that is needed while its unit is not in use.

    Args:
        plan: in force; :attr:`plan` is this one with promoted tensors as residents. :attr:`store` has the bytes of
            placeholders, and :attr:`rewriting` makes the context in which those of a storage may change there; both
            set before the first tensor becomes a placeholder.
        bound: the live tensors, by storage name.
        device: where compute runs.
        refusal: why nothing may be promoted; ``None``: it may.
    """

    def __init__(
        self,
        plan: Plan,
        bound: Mapping[str, BoundStorage],
        device: torch.device,
        refusal: str | None = None,
    ) -> None:
        self.plan = plan
        self.tensor_lock = threading.RLock()
        self.promoted: list[str] = []
        self.copied: list[str] = []  # not promoted, because the budget has no room
        self._bound = bound
        self._device = device
        self._refusal = refusal
        self._storage_of = {id(tensor): storage for storage in bound.values() for tensor in storage.tensors}
        self.store: Store | None = None
        self.rewriting: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()

    def close(self) -> None:
        """Release the store and the tensors."""
        self.store = None
        self.rewriting = lambda name: nullcontext()  # holds the prefetcher
        self._bound, self._storage_of = {}, {}

    def on_outside_access(self, tensor: BoundTensor, operator: OpOverload, is_written: bool) -> TemporaryCopy | None:
        """An ``operator`` used a placeholder outside its module: make it resident, or give it a temporary copy.

        What is written is such a copy, which goes back to the store, where it can.
        """
        if (storage := self._storage_of.get(id(tensor))) is None:  # another thread's resize() or remove() was first
            latest = owner_of(tensor.tensor)
            return latest.on_access(latest, operator, is_written) if latest and latest.on_access else None
        name, how = storage.info.name, f"{tensor.info.name} was given to {operator}"
        self._require_allowed(tensor, how)
        # Operators such as t_ write the geometry of a tensor, which goes with the copy; ours only declare to write.
        writes_bytes = operator.namespace == "aten" and torch.Tag.inplace_view not in operator.tags
        # Views that the model keeps elsewhere see a write to the memory that it came with, and none to another.
        to_store = is_written and writes_bytes and self._is_offloaded_here(name) and not storage.is_kept_elsewhere
        if not to_store and self._promote(storage, tensor, how):
            return None
        if is_written and not to_store:
            kind = self.plan.placements[name].kind
            in_files = kind is not None and kind.in_files
            other = ", or offload in mode 'cpu', where host memory takes the write" if in_files else ""
            raise OutsideAccessError(
                f"{how} {_OUTSIDE}, which writes it in place, and {self._why_copied(storage)}: {_fix(tensor)}{other}"
            )
        if not to_store:
            self._warn_of_copy(storage, tensor, how)
        buffer = self._on_device(storage)
        if not to_store:
            return tensor.copy_of(buffer), None

        def release_copy() -> None:
            if self.store is not None:
                with self.rewriting(name):
                    self.store.in_place(name).copy_(buffer)
                    if self._device.type == "cuda":  # a copy out of a peer's memory is ordered by nothing else
                        torch.cuda.current_stream(self._device).synchronize()

        with torch.inference_mode(tensor.original.is_inference()):
            return tensor.view_of(buffer), release_copy

    def on_table_access(self, tensor: BoundTensor, operator: OpOverload, is_written: bool) -> TemporaryCopy | None:
        """:meth:`on_outside_access` for a table that is read in place where products would round differently."""
        if is_written or operator.overloadpacket not in _ROW_READS or self.store is None:
            return self.on_outside_access(tensor, operator, is_written)
        return tensor.copy_of(self.store.in_place(self._storage_of[id(tensor)].info.name)), None

    def _is_offloaded_here(self, name: str) -> bool:
        """Whether a unit brings the storage ``name``, from memory of this process alone."""
        kind = self.plan.placements[name].kind
        return self.plan.mechanism_of(name) == "prefetch" and kind is not None and kind.takes_writes

    def rebase(self, storage: BoundStorage, output: Any) -> tuple[Any, dict[int, torch.Tensor]]:
        """``output`` of a module, in which views of ``storage`` in its slot become views of it as a resident.

        Without room for a resident they become views of a copy, which lives as long as they do.

        Returns:
            the new output, and what it held before: the views that were replaced and those that autograd says they
            were made of, by their ids.
        """
        seen: dict[int, BoundTensor] = {}
        held: dict[int, torch.Tensor] = {}
        for leaf in tree_leaves(output):
            for bound in storage.tensors:
                offset = bound.offset_in_slot(leaf) if isinstance(leaf, torch.Tensor) else None
                # By another dtype only memory without gaps can be viewed; else it counts as kept.
                if offset is not None and (leaf.dtype == bound.info.dtype or bound.info.is_contiguous):
                    seen[id(leaf)] = bound
                    held[id(leaf)] = leaf
                    if leaf._base is not None and bound.offset_in_slot(leaf._base) is not None:
                        held[id(leaf._base)] = leaf._base
        if not seen:
            return output, {}
        tensor = next(iter(seen.values()))
        how = f"{tensor.info.name} was returned by its module, whole or as a view"
        if self._promote(storage, tensor, how):
            bases = {id(bound): bound.tensor for bound in storage.tensors}
        else:
            self._warn_of_copy(storage, tensor, how)
            buffer = self._on_device(storage)
            bases = {id(bound): bound.copy_of(buffer) for bound in storage.tensors}

        def moved(leaf: torch.Tensor) -> torch.Tensor:
            bound = seen.get(id(leaf))
            return leaf if bound is None else bound.like(leaf, bases[id(bound)])

        return tree_map_only(torch.Tensor, moved, output), held

    def check_trace(self) -> None:
        """Check what Dynamo has traced so far; no effect under another tracer.

        Raises:
            OutsideAccessError: an operator takes a tensor in a slot, or a view of it, before its unit's wait or after
                its release, or its module returns or keeps a view of it.
        """
        if (graph := traced_graph(self._check_end)) is not None:
            self._check(graph)

    def _check(self, graph: fx.Graph) -> dict[int, BoundTensor]:
        by_storage = self._in_slots(graph)
        tables = {storage for storage, bound in by_storage.items() if bound.on_access == self.on_table_access}
        _check_graph(graph, by_storage, tables)
        return by_storage

    def _check_end(self, graph: fx.Graph) -> list[int]:
        _check_outputs(graph, self._check(graph))  # and what follows the last hook
        return self.inputs_outside(graph)

    def inputs_outside(self, graph: fx.Graph) -> list[int]:
        """Positions of the inputs of ``graph`` that view slots, and that it reads without a wait for their units.

        Their windows may have begun in another graph: around a module that is compiled alone, before a graph break.
        """
        by_storage = self._in_slots(graph)
        waited = _storages(node.args[2] for node in graph.nodes if _calls(node, torch.ops.headrace.wait))

        def is_outside(node: fx.Node) -> bool:
            storage = _storage_of(node)
            if storage is None or storage in waited or (bound := by_storage.get(storage)) is None:
                return False
            is_table = bound.on_access == self.on_table_access
            return not all(_is_our_own(user) or (is_table and user.target in _TRACED_ROW_READS) for user in node.users)

        return [position for position, node in enumerate(graph.find_nodes(op="placeholder")) if is_outside(node)]

    def check_writes(self) -> None:
        """Check for writes what Dynamo has traced so far: a module that is compiled alone has a graph without hooks.

        Raises:
            ModelChangedError: an operator writes a tensor in a slot in place.
        """
        if (graph := traced_graph(self.inputs_outside)) is not None:
            by_storage = self._in_slots(graph)
            for node in graph.nodes:
                _refuse_writes(node, by_storage)

    # See UnitHook.pin_to_slots.
    check_trace._dynamo_marked_constant = check_writes._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _in_slots(self, graph: fx.Graph) -> dict[int, BoundTensor]:
        """The tensors in slots that ``graph`` takes, by their storages in it."""
        bounds = [tensor for storage in self._bound.values() for tensor in storage.tensors]
        out = [bound for bound in bounds if bound.state is not TensorState.RESIDENT]
        # Views of them share their storages.
        in_slot = {key: bound for bound in out for key in (storage_id(bound.tensor), storage_id(bound.in_slot))}
        found: dict[int, BoundTensor] = {}
        for node in graph.find_nodes(op="placeholder"):
            live = getattr(node.meta.get("grapharg"), "example", None)  # the tensor behind this graph input
            bound = in_slot.get(storage_id(live)) if isinstance(live, torch.Tensor) else None
            if (storage := _storage_of(node)) is not None and bound is not None:
                found[storage] = bound
        return found

    def _promote(self, storage: BoundStorage, tensor: BoundTensor, how: str) -> bool:
        """Make ``storage`` resident; ``False``: it cannot be, see :meth:`_why_copied`.

        Raises:
            OutsideAccessError: nothing may be promoted here and now.
        """
        name = storage.info.name
        with self.tensor_lock:
            if name in self.plan.resident:
                return True  # another thread was first
            self._require_allowed(tensor, how)
            needed = self.plan.device_bytes + storage.info.num_bytes
            is_over = self.plan.budget_bytes is not None and needed > self.plan.budget_bytes
            if is_over or self.plan.mechanism_of(name) == "cache" or tensor.state is TensorState.PINNED:
                return False
            # In the memory that the model came with, if that still exists: views kept elsewhere share it.
            if storage.home != self._device or not storage.return_to_original():
                storage.point_at(self._on_device(storage))
                storage.forget_original()
            units = tuple(
                replace(unit, entries=tuple(entry for entry in unit.entries if entry.storage != name))
                for unit in self.plan.units
            )
            resident = {**self.plan.resident, name: storage.info.num_bytes}
            uva = {other: num_bytes for other, num_bytes in self.plan.uva.items() if other != name}
            self.plan = replace(self.plan, units=units, resident=resident, uva=uva)
            self.promoted.append(name)
        _log.info("promoted to resident (%s): %s %s", format_size(storage.info.num_bytes), how, _OUTSIDE)
        if len(self.promoted) == 1:
            warn_user(
                f"{how} {_OUTSIDE}. It is resident from now on ({storage.info.num_bytes} bytes more on "
                f"{self._device}); stats().notes lists all such tensors. To plan for it: {_fix(tensor)}"
            )
        return True

    def _why_copied(self, storage: BoundStorage) -> str:
        """Why it is not made resident, as a clause."""
        if self.plan.mechanism_of(storage.info.name) == "cache":
            return "its module reads its experts through a cache (headrace.expert_rows)"
        if storage.tensors[0].state is TensorState.PINNED:
            return "compiled code reads it at the address of its slot"
        return f"making it resident would exceed the budget of {self.plan.budget_bytes} bytes, which can be raised"

    def _require_allowed(self, tensor: BoundTensor, how: str) -> None:
        """Raise ``OutsideAccessError`` if nothing may be brought to the device here and now."""
        reason = self._refusal
        if reason is None and self._device.type == "cuda":
            from headrace.transfer.cuda_stream import is_capturing

            reason = "nothing can be loaded while a graph is captured" if is_capturing(self._device) else None
        if reason is not None:
            raise OutsideAccessError(f"{how} {_OUTSIDE}, and {reason}: {_fix(tensor)}")

    def _warn_of_copy(self, storage: BoundStorage, tensor: BoundTensor, how: str) -> None:
        if not self.copied:
            warn_user(
                f"{how} {_OUTSIDE}, and {self._why_copied(storage)}: its bytes are copied for every such use, which is "
                f"slow and takes memory of its size; stats().notes lists all such tensors. To avoid it: {_fix(tensor)}"
            )
        if tensor.info.name not in self.copied:
            self.copied.append(tensor.info.name)

    def _on_device(self, storage: BoundStorage) -> torch.Tensor:
        assert self.store is not None
        buffer = new_buffer(storage.info.num_bytes)
        self.store.read(storage.info.name, buffer)
        try:
            return buffer.to(self._device)
        except torch.OutOfMemoryError as error:
            raise OutsideAccessError(
                f"{storage.info.name} is used {_OUTSIDE}, and {self._device} has no memory for it: leave more to it, "
                f"or {_fix(storage.tensors[0])}"
            ) from error


def _check_graph(graph: fx.Graph, by_storage: Mapping[int, BoundTensor], tables: set[int]) -> None:
    wait, release = torch.ops.headrace.wait, torch.ops.headrace.release
    waited, released = (_storages(node.args[2] for node in graph.nodes if _calls(node, op)) for op in (wait, release))
    # A window that began in the graph before this one (a graph break inside a layer) is open from the start.
    open_now = released - waited
    for node in graph.nodes:
        outside, how = set(), f"is used by {node.target}"
        if _calls(node, wait):
            open_now |= _storages([node.args[2]])
        elif _calls(node, release):
            open_now -= _storages([node.args[2]])
            outside, how = _storages([node.args[3]]), "is returned by its module, whole or as a view"
        elif _is_our_own(node):
            continue  # which reads no bytes
        elif node.op in ("call_function", "call_method", "call_module"):
            outside = _storages([node.all_input_nodes]) - open_now
            if node.target in _TRACED_ROW_READS:
                outside -= tables
            _refuse_writes(node, {storage: by_storage[storage] for storage in by_storage.keys() - outside})
        for storage in outside & by_storage.keys():
            bound = by_storage[storage]
            raise OutsideAccessError(f"{bound.name} {how} {_OUTSIDE}, in code that torch.compile traces: {_fix(bound)}")


def _check_outputs(graph: fx.Graph, by_storage: Mapping[int, BoundTensor]) -> None:
    """Refuse views that leave ``graph`` after the release; before it they may go on to the rest of the forward."""
    released: set[int] = set()
    for node in graph.nodes:
        if _calls(node, torch.ops.headrace.wait):
            released -= _storages([node.args[2]])
        elif _calls(node, torch.ops.headrace.release):
            released |= _storages([node.args[2]])
    views = [node for node in graph.output_node().all_input_nodes if node.op != "placeholder"]
    for storage in _storages([views]) & released & by_storage.keys():
        raise OutsideAccessError(
            f"a view of {by_storage[storage].name} was kept beyond the forward of its module, where its bytes leave "
            f"the device, in code that torch.compile traces: {_fix(by_storage[storage])}, or keep a copy (.clone())"
        )


def _refuse_writes(node: fx.Node, by_storage: Mapping[int, BoundTensor]) -> None:
    if node.op not in ("call_function", "call_method", "call_module") or _is_our_own(node):
        return
    for storage in _storages([_written_by(node)]) & by_storage.keys():
        raise ModelChangedError(
            f"{by_storage[storage].name} is written in place by {node.target} while offloaded, in code that "
            f"torch.compile traces, and the write would be lost with the next copy: {_fix(by_storage[storage])}"
        )


def _is_our_own(node: fx.Node) -> bool:
    names = ("begin", "wait", "release", "join", "end_gradients")
    return any(_calls(node, getattr(torch.ops.headrace, name)) for name in names)


def _written_by(node: fx.Node) -> list[Any]:
    """Arguments that ``node`` writes in place; Dynamo's graphs call functions and methods as the model does."""
    function = getattr(node.target, "default", node.target)  # of an operator by its name
    if isinstance(function, OpOverload):
        return tree_leaves(written_in_place(function, node.args, node.kwargs))
    name = getattr(node.target, "__name__", str(node.target))
    by_name = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    is_operator = getattr(node.target, "__module__", "") == "_operator"  # such as and_
    written = [node.kwargs.get("out")]
    if node.target in _TRACED_WRITES or node.kwargs.get("inplace") or (by_name and not is_operator):
        written += node.args[:1]
    if node.target is F.batch_norm:  # its fourth and fifth arguments are weight and bias
        is_training = node.args[5] if len(node.args) > 5 else node.kwargs.get("training")
        written += [*node.args[1:3], *map(node.kwargs.get, ("running_mean", "running_var"))] if is_training else []
    if node.target in _TRACED_ROW_READS:  # which scale rows that are longer than max_norm, their fourth argument
        max_norm = node.args[3] if len(node.args) > 3 else node.kwargs.get("max_norm")
        written += [] if max_norm is None else [*node.args[1:2], node.kwargs.get("weight")]
    return tree_leaves(written)


def _calls(node: fx.Node, packet: Any) -> bool:
    return node.target in (packet, packet.default)


def _storages(groups: Iterable[Any]) -> set[int]:
    nodes = (node for group in groups for node in group if isinstance(node, fx.Node))
    return {storage for node in nodes if (storage := _storage_of(node)) is not None}


def _storage_of(node: fx.Node) -> int | None:
    """The storage of the fake tensor that stands for ``node``; views share it."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or hasattr(value, "__tensor_flatten__"):
        return None
    return storage_id(value)


def _fix(tensor: BoundTensor) -> str:
    return f"keep it resident ({resident_rule(tensor.name)})"


# -- the state of the model --------------------------------------------------------------------------------------------


class TableGuard(NotCopyable):
    """Makes placeholders of ``tables``, which are read in place where products with them would round differently.

    Compiled code relies on addresses: for it they have those of their memory, and :meth:`Promoter.check_trace` finds
    the products.

    Args:
        model: the root.
        tables: bound storages.
        promoter: handles uses of them.
    """

    def __init__(self, model: nn.Module, tables: Sequence[BoundStorage], promoter: Promoter) -> None:
        self._model, self._promoter = model, promoter
        self._tensors = [tensor for table in tables for tensor in table.tensors]
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Put the hooks in place; an interrupt leaves what :meth:`remove` takes off."""
        readers = {module for tensor in self._tensors for module, _ in tensor.places}
        for module in {self._model, *readers}:
            self._handles.append(module.register_forward_pre_hook(self._before, prepend=True))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():
            self.stay()

    def stay(self) -> None:
        """From now on the tensors have the addresses of their memory."""
        with self._promoter.tensor_lock:
            for tensor in self._tensors:
                tensor.pin_to_slot()

    stay._dynamo_marked_constant = True  # type: ignore[attr-defined] # see UnitHook.pin_to_slots


class StateGuard(NotCopyable):
    """Guards the state of every module that holds one of ``storages``.

    Args:
        model: the root.
        storages: what is offloaded.
        read: the bytes of a storage, by name (uint8, 1-D); ``None``: its tensors are as a resident's.
    """

    def __init__(
        self, model: nn.Module, storages: Sequence[BoundStorage], read: Callable[[str], torch.Tensor | None]
    ) -> None:
        self._read = read
        self._parts: dict[nn.Module, dict[str, _Parts]] = {}
        for storage in storages:
            for tensor in storage.tensors:
                for module, place in tensor.places:
                    parts = self._parts.setdefault(module, {}).setdefault(place.attr, {})
                    parts[place.inner] = (storage, tensor)
        self._state: weakref.ref[object] | None = None
        self._contents: dict[str, torch.Tensor] = {}
        self._around = [m for m in model.modules() if not self._parts.keys().isdisjoint(m.modules())]
        self._bound = [tensor for storage in storages for tensor in storage.tensors]
        self._tensors = [bound.tensor for bound in self._bound]
        self._model = model
        self._modules = set(model.modules())
        self._handles: list[RemovableHandle] = []
        self._attributes: list[tuple[dict[str, Any], str]] = []  # what remove() deletes

    def attach(self) -> None:
        """Put everything in place; an interrupt leaves what :meth:`remove` takes off."""
        owner = f"a {type(self._model).__name__}"
        names = {module: name for name, module in self._model.named_modules()}
        for module in self._parts:
            # A partial, because torch sets an attribute on the hook, which a bound method cannot have.
            self._handles.append(module.register_state_dict_post_hook(partial(self._put_true_tensors)))
            self._set(module, _MARK, f"{names[module]!r} of {owner}" if names.get(module) else owner)
        unpacks = any(map(_is_unpacked_when_saved, self._parts))
        # On every module around the owners too: loading goes from the outside in, and must not stop half-way.
        for module in self._around:
            self._handles.append(module.register_load_state_dict_pre_hook(self._refuse_load))
            if unpacks:
                self._handles.append(module.register_state_dict_pre_hook(self._refuse_unpacking))
            self._set(module, "_apply", partial(self._apply, module))
            self._set(module, "__getstate__", self.__reduce_ex__)  # of pickle and deepcopy, before they reach a tensor
        # On residents too, or what casts layer by layer would stop half-way. A method, which a copy has as its own.
        for module in self._modules - {*self._around}:
            self._set(module, "_apply", MethodType(_apply_of(weakref.ref(self)), module))
        # One Parameter may belong to two models: the mark is found when the other one is offloaded.
        for tensor in self._tensors:
            self._set(tensor, _MARK, owner)
            self._set(tensor, "__reduce_ex__", self.__reduce_ex__)
            self._set(tensor, "__dlpack__", partial(_dlpack, tensor))
        for bound in self._bound:
            if "data_ptr" not in vars(bound.tensor):  # of debug mode, which asks for the address here, too
                self._set(bound.tensor, "data_ptr", partial(address_of, bound))

    def _set(self, owner: nn.Module | torch.Tensor, name: str, value: Any) -> None:
        self._attributes.append((vars(owner), name))
        vars(owner)[name] = value

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        for attributes, name in self._attributes:
            attributes.pop(name, None)

    def _refuse_load(self, module: nn.Module, state: Mapping[str, object], prefix: str, *_: object) -> None:
        """Refuse to load ``state`` if it has an offloaded tensor of ``module``; adapters beside them may be loaded."""
        named = module.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False)
        offloaded = {f"{name}.{attr}".removeprefix(".") for name, part in named for attr in self._parts.get(part, ())}
        for key in state:
            # Some formats have more than one key for a tensor: "weight", "weight.absmax".
            if any(owner in offloaded for owner in accumulate(key.split("."), "{}.{}".format)):
                raise ModelChangedError(
                    f"load_state_dict would write {key}, which is offloaded, and the next copy would undo it; call "
                    f"handle.remove() first, load, then offload again"
                )

    def _refuse_unpacking(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        for name, part in module.named_modules(prefix=prefix.removesuffix(".")):
            if part in self._parts and _is_unpacked_when_saved(part):
                raise ModelChangedError(
                    f"state_dict(), which load_lora_weights() calls, too, would unpack {name}.weight in place, which "
                    f"is offloaded and which bitsandbytes has packed for this CPU: call handle.remove() first, or load "
                    f"adapters before the first forward and the offload"
                )

    def _apply(self, module: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        """``module._apply(fn)``, unless ``fn`` would change an offloaded tensor in it, or the dtype of a resident.

        ``fn`` is asked with a small tensor of the same dtype, device and number of dimensions. A module may cast its
        residents in its forward, since nothing moves those.
        """
        inside = set(module.modules())
        for bound in self._bound:
            if inside.isdisjoint(owner for owner, _ in bound.places):
                continue
            tensor = bound.tensor
            probe = torch.empty([min(2, size) for size in tensor.shape], dtype=tensor.dtype, device=tensor.device)
            if fn(probe) is not probe:
                raise ModelChangedError(
                    f"to(), half(), to_empty() and the like would change offloaded weights, which are stored elsewhere "
                    f"({bound.name}, {tensor.dtype}): call handle.remove() first, move or cast the model, then offload "
                    f"again; if the model does it in its forward, {_fix(bound)}"
                )
        held = () if torch.compiler.is_compiling() else (*module.parameters(recurse), *module.buffers(recurse))
        for dtype, ndim in {(tensor.dtype, tensor.ndim) for tensor in held}:
            if fn(torch.empty([1] * ndim, dtype=dtype)).dtype != dtype and not self._casts_itself(module):
                raise ModelChangedError(
                    f"to(), half() and the like would change {dtype} of a {type(module).__name__} in a model that is "
                    f"offloaded, of which parts cannot be cast: call handle.remove() first, cast, then offload again"
                )
        apply: Any = type(module)._apply
        return cast(nn.Module, apply(module, lambda tensor: tensor if place_of(tensor) else fn(tensor), recurse))

    def _casts_itself(self, module: nn.Module) -> bool:
        """Whether ``module`` is being cast by a forward of its own, of a module around it, or of its parent the root.

        Callbacks run in the root's forward, too, and what casts there layer by layer would stop half-way.
        """
        is_child = any(module is child for child in self._model.children())
        around = [
            m for m in self._modules if (m is not self._model or m is module or is_child) and module in m.modules()
        ]
        return is_on_stack(nn.Module._call_impl, around)

    def _put_true_tensors(
        self, module: nn.Module, state: dict[str, torch.Tensor], prefix: str, local_metadata: object
    ) -> None:
        if _reads_no_values():
            return  # a placeholder that is read nevertheless has the true bytes
        for attr, parts in self._parts[module].items():
            current = {path: part for path, part in parts.items() if part[1].is_held_by(module, attr, path)}
            if current and prefix + attr in state:
                state[prefix + attr] = self._true(state[prefix + attr], current, state)

    def _true(self, tensor: torch.Tensor, parts: _Parts, state: object, path: tuple[str, ...] = ()) -> torch.Tensor:
        """``tensor`` with the bytes from the store; a subclass is made anew from its inner tensors."""
        if path in parts:
            storage, bound = parts[path]
            buffer = None if bound.has_other_data else self._bytes(storage, state)
            if buffer is None:
                return tensor.detach()
            found = bound.view_of(buffer) if bound.reads(buffer) else bound.copy_of(buffer)
            return found if type(tensor) in (torch.Tensor, nn.Parameter) else self._in_class_of(tensor, found)
        if (flatten := getattr(tensor, "__tensor_flatten__", None)) is None:
            return tensor
        names, context = flatten()
        inner = {name: self._true(getattr(tensor, name), parts, state, (*path, name)) for name in names}
        return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined, no-any-return]

    def _in_class_of(self, tensor: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """``found`` as ``tensor``, a subclass such as GGUF's, with the format of its bytes, and without hooks."""
        ours = {name for attributes, name in self._attributes if attributes is vars(tensor)}
        vars(found).update({name: each for name, each in vars(tensor).items() if name not in ours})
        found.__class__ = type(tensor)
        return found

    def _bytes(self, storage: BoundStorage, state: object) -> torch.Tensor | None:
        """Read once per ``state_dict()``, so that tied tensors share their memory in it as they do in the model."""
        if self._state is None or self._state() is not state:
            contents: dict[str, torch.Tensor] = {}
            self._contents = contents
            try:
                self._state = weakref.ref(state, lambda _: contents.clear())
            except TypeError:  # a plain dict as destination
                self._state = None
        name = storage.info.name
        if name not in self._contents:
            if (found := self._read(name)) is None:
                return None
            # What moves the storage of a state to shared memory (share_memory_, a queue) must not move the store's.
            self._contents[name] = found if storage.tensors[0].reads(found) else own_storage(found)
        return self._contents[name]


def _is_unpacked_when_saved(module: nn.Module) -> bool:
    """Whether ``state_dict()`` of ``module`` writes its weight, in bitsandbytes' 4 bits."""
    state = getattr(module._parameters.get("weight"), "quant_state", None)
    return bool(getattr(state, "packing_format_for_cpu", False))


def _apply_of(guard: weakref.ref[StateGuard]) -> Callable[..., nn.Module]:
    def _apply(module: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        guarding = None if torch.compiler.is_compiling() else guard()
        is_copy = guarding is None or module not in guarding._modules  # which may outlive the offload
        return cast(nn.Module, (type(module) if is_copy else cast(Any, guarding))._apply(module, fn, recurse))

    return _apply


def _dlpack(tensor: torch.Tensor, **options: Any) -> Any:
    """``tensor.__dlpack__()``, behind an operator: it asks for the pointer alone."""
    return torch.Tensor.__dlpack__(tensor.to(tensor.dtype), **options)


def address_of(bound: BoundTensor) -> int:
    """``data_ptr()`` of an offloaded tensor; it bypasses the dispatcher, and torch's own error would name no tensor."""
    if is_placeholder(bound.tensor) and not bound.is_read_here:
        raise OutsideAccessError(
            f"data_ptr() of {bound.name} was called {_OUTSIDE}, where it has no address: {_fix(bound)}"
        )
    return torch.Tensor.data_ptr(bound.tensor)


def is_on_stack(function: Callable[..., Any], owners: Container[object]) -> bool:
    """Whether the calling thread is inside a call of the method ``function`` of one of ``owners``."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()) if frame.f_code is function.__code__)
    return any(frame.f_locals.get("self") in owners for frame in frames)


def _reads_no_values() -> bool:
    """Whether the code that called ``state_dict()`` of the outermost module reads names and shapes of it alone."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
    code, inside = nn.Module.state_dict.__code__, False
    for frame in frames:
        if inside and frame.f_code is not code:
            package = str(frame.f_globals.get("__name__")).partition(".")[0]  # other functions may have such a name
            return frame.f_code.co_name in _READ_NO_VALUES and package in _ADAPTER_PACKAGES
        inside |= frame.f_code is code
    return False


def place_of(thing: nn.Module | torch.Tensor) -> str | None:
    """The name of the model with which a tensor, or a module that holds one, is offloaded; ``None``: it is not."""
    return vars(thing).get(_MARK)
