"""Weights that are used outside of their module's forward: moved to the device for good, or refused.

In eager code an operator that is given a resting tensor comes to :meth:`Promoter.wake`. Weights that compiled code uses
do not rest (it relies on addresses), so nothing would notice such a use at run time: there
:meth:`Promoter.check_trace` checks the graph that torch.compile traces.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only

from penstock.errors import OutsideAccessError, warn_user
from penstock.model.live_tensors import BoundStorage, BoundTensor, GiveBack, resident_rule, storage_id
from penstock.plan.plan import Plan
from penstock.runtime.state_dict import NotCopyable
from penstock.stores.store import Store, new_blob

__all__ = ["Promoter"]


class Promoter(NotCopyable):
    """Decides, for one offload, what happens to a weight that is needed while its unit is not in use.

    Args:
        plan: in force; :attr:`plan` is this one with promoted tensors as residents.
        bound: the live tensors, by storage name.
        device: where compute runs.
        budget_bytes: device memory that weights may take; ``None``: what the device has.
        refusal: why nothing may be promoted; ``None``: it may.
    """

    def __init__(
        self,
        plan: Plan,
        bound: Mapping[str, BoundStorage],
        device: torch.device,
        budget_bytes: int | None = None,
        refusal: str | None = None,
    ) -> None:
        self.plan = plan
        self.tensor_lock = threading.RLock()
        self.promoted: list[str] = []
        self.lent: list[str] = []  # not promoted, because the budget has no room: copied for every use
        self._bound = bound
        self._device = device
        self.budget_bytes = budget_bytes
        self._refusal = refusal
        self._storage_of = {id(tensor): storage for storage in bound.values() for tensor in storage.tensors}
        self._store: Store | None = None

    def serve(self, store: Store) -> None:
        """Read the bytes of resting tensors from ``store``."""
        self._store = store

    def close(self) -> None:
        """Let go of the store and the tensors."""
        self._store = None
        self._bound, self._storage_of = {}, {}

    def wake(self, tensor: BoundTensor, operator: str, is_written: bool) -> GiveBack | None:
        """A resting ``tensor`` was given to ``operator``: promote its storage, or lend it a copy of its bytes."""
        storage = self._storage_of[id(tensor)]
        how = f"{tensor.info.name} was given to {operator}"
        if self._promote(storage, tensor, how):
            return None
        if is_written:
            raise OutsideAccessError(
                f"{how} {_OUTSIDE}, which writes it in place, and the budget of {self.budget_bytes} bytes has no room "
                f"to keep it: {_fix(tensor)}, or raise the budget"
            )
        self._warn_no_room(tensor, how)
        self.tensor_lock.acquire()  # until the operator has run: the tensor looks at one place
        try:
            tensor.lend(self._on_device(storage))
        except BaseException:
            self.tensor_lock.release()
            raise

        def end_loan(output: Any) -> Any:
            tensor.end_loan()
            self.tensor_lock.release()
            return output

        return end_loan

    def rebase(self, storage: BoundStorage, output: Any) -> tuple[Any, dict[int, torch.Tensor]]:
        """``output`` of a module, in which views of ``storage`` in its slot become views of it as a resident.

        Without room for a resident they become views of a copy, which lives as long as they do.

        Returns:
            the new output, and what it held before: the views that were replaced and those that autograd says they
            were made of, by their ids.
        """
        seen: dict[int, tuple[BoundTensor, int]] = {}
        held: dict[int, torch.Tensor] = {}
        for leaf in tree_leaves(output):
            for bound in storage.tensors:
                offset = bound.offset_in_slot(leaf) if isinstance(leaf, torch.Tensor) else None
                # By another dtype only memory without gaps can be viewed; else it counts as kept.
                if offset is not None and (leaf.dtype == bound.info.dtype or bound.info.is_contiguous):
                    seen[id(leaf)] = (bound, offset)
                    held[id(leaf)] = leaf
                    if leaf._base is not None and bound.offset_in_slot(leaf._base) is not None:
                        held[id(leaf._base)] = leaf._base
        if not seen:
            return output, {}
        tensor = next(iter(seen.values()))[0]
        how = f"{tensor.info.name} was returned by its module, whole or as a view"
        if self._promote(storage, tensor, how):
            bases = {id(bound): bound.tensor for bound in storage.tensors}
        else:
            self._warn_no_room(tensor, how)
            buffer = self._on_device(storage)
            bases = {id(bound): bound.copy_of(buffer) for bound in storage.tensors}

        def moved(leaf: torch.Tensor) -> torch.Tensor:
            if id(leaf) not in seen:
                return leaf
            bound, offset = seen[id(leaf)]
            base = bases[id(bound)]
            if leaf.dtype != base.dtype:  # made by view(dtype)
                base = base.detach().view(-1).view(leaf.dtype)
            return base.as_strided(leaf.shape, leaf.stride(), base.storage_offset() + offset // leaf.itemsize)

        return tree_map_only(torch.Tensor, moved, output), held

    def check_trace(self) -> None:
        """Check what Dynamo has traced so far; no effect under another tracer.

        Raises:
            OutsideAccessError: an operator takes a tensor in a slot, or a view of it, before its unit's wait or after
                its release, or its module returns a view of it.
        """
        from torch._dynamo.symbolic_convert import InstructionTranslator

        try:
            graph: fx.Graph = InstructionTranslator.current_tx().output.graph
        except AttributeError:  # torch.export without Dynamo
            return
        tensors = [tensor for storage in self._bound.values() for tensor in storage.tensors]
        in_slot = {id(tensor.tensor): tensor for tensor in tensors if tensor.in_slot is not None}
        by_storage: dict[int, BoundTensor] = {}
        for node in graph.find_nodes(op="placeholder"):
            live = getattr(node.meta.get("grapharg"), "example", None)  # the tensor behind this graph input
            storage = _storage_of(node)
            if id(live) in in_slot and storage is not None:
                by_storage[storage] = in_slot[id(live)]
        _check_graph(graph, by_storage)

    check_trace._dynamo_marked_constant = True  # type: ignore[attr-defined] # see UnitHook.stay_in_slots

    def _promote(self, storage: BoundStorage, tensor: BoundTensor, how: str) -> bool:
        """Make ``storage`` resident; ``False``: the budget has no room for it.

        Raises:
            OutsideAccessError: nothing may be promoted here and now.
        """
        name = storage.info.name
        with self.tensor_lock:
            if name in self.plan.resident:
                return True  # by another thread, meanwhile
            reason = self._refusal
            if reason is None and self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                reason = "nothing can be loaded while a graph is captured"
            if reason is not None:
                raise OutsideAccessError(f"{how} {_OUTSIDE}, and {reason}: {_fix(tensor)}")
            needed = self.plan.device_bytes + storage.info.num_bytes
            if self.budget_bytes is not None and needed > self.budget_bytes:
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
            self.plan = replace(self.plan, units=units, resident=resident)
            self.promoted.append(name)
        if len(self.promoted) == 1:
            warn_user(
                f"{how} {_OUTSIDE}. It is resident from now on ({storage.info.num_bytes} bytes more on "
                f"{self._device}); stats().notes lists all such tensors. To plan for it: {_fix(tensor)}"
            )
        return True

    def _warn_no_room(self, tensor: BoundTensor, how: str) -> None:
        if not self.lent:
            warn_user(
                f"{how} {_OUTSIDE}, and the budget of {self.budget_bytes} bytes has no room for it beside the plan: "
                f"its bytes are copied for every such use, which is slow and takes memory of its size meanwhile; "
                f"stats().notes lists all such tensors. Give it room: {_fix(tensor)}, or raise the budget"
            )
        if tensor.info.name not in self.lent:
            self.lent.append(tensor.info.name)

    def _on_device(self, storage: BoundStorage) -> torch.Tensor:
        assert self._store is not None
        buffer = new_blob(storage.info.num_bytes)
        self._store.read(storage.info.name, buffer)
        try:
            return buffer.to(self._device)
        except torch.OutOfMemoryError as error:
            raise OutsideAccessError(
                f"{storage.info.name} is used {_OUTSIDE}, and {self._device} has no memory for it: leave more to it, "
                f"or {_fix(storage.tensors[0])}"
            ) from error


def _check_graph(graph: fx.Graph, by_storage: Mapping[int, BoundTensor]) -> None:
    wait, release, join = (getattr(torch.ops.penstock, name) for name in ("wait", "release", "join"))
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
        elif node.op in ("call_function", "call_method", "call_module") and not _calls(node, join):
            outside = _storages([node.all_input_nodes]) - open_now
        for storage in outside & by_storage.keys():
            bound = by_storage[storage]
            raise OutsideAccessError(f"{bound.name} {how} {_OUTSIDE}, in code that torch.compile traces: {_fix(bound)}")


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


_OUTSIDE = "outside of the forward that it is on the device for"


def _fix(tensor: BoundTensor) -> str:
    return f"keep it resident ({resident_rule(tensor.name)})"
