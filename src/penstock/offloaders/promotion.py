"""Weights that are used outside of their module's forward: moved to the device for good, or refused."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from penstock.errors import OutsideAccessError, PenstockWarning
from penstock.offloaders.binding import BoundStorage, BoundTensor
from penstock.offloaders.hooks import NotCopyable
from penstock.offloaders.tracing import check_trace
from penstock.plan.model import Plan
from penstock.store.base import Store, new_blob

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
        self._bound = bound
        self._device = device
        self._budget_bytes = budget_bytes
        self._refusal = refusal
        self._storage_of = {id(tensor): storage for storage in bound.values() for tensor in storage.tensors}
        self._store: Store | None = None

    def serve(self, store: Store) -> None:
        """``store``: where true bytes are read."""
        self._store = store

    def close(self) -> None:
        """Let go of the store and the tensors."""
        self._store = None
        self._bound, self._storage_of = {}, {}

    def wake(self, tensor: BoundTensor, operator: str) -> None:
        """A resting ``tensor`` was given to ``operator``: promote its storage."""
        self._promote(self._storage_of[id(tensor)], tensor, f"was given to {operator}")

    def rebase(self, storage: BoundStorage, output: Any) -> Any:
        """``output`` of a module, in which views of ``storage`` in its slot become views of it as a resident."""
        seen: dict[int, tuple[BoundTensor, int]] = {}
        for leaf in tree_leaves(output):
            for bound in storage.tensors:
                if isinstance(leaf, torch.Tensor) and bound.in_slot is not None and bound.is_seen_through(leaf):
                    seen[id(leaf)] = (bound, int(leaf.storage_offset() - bound.in_slot.storage_offset()))
        if not seen:
            return output
        self._promote(storage, next(iter(seen.values()))[0], "was returned by its module, whole or as a view")

        def as_resident(leaf: torch.Tensor) -> torch.Tensor:
            if id(leaf) not in seen:
                return leaf
            bound, offset = seen[id(leaf)]
            return bound.tensor.as_strided(leaf.shape, leaf.stride(), bound.tensor.storage_offset() + offset)

        return tree_map_only(torch.Tensor, as_resident, output)

    def check_trace(self) -> None:
        """Raise ``OutsideAccessError`` if the graph that is being traced uses a slot outside of wait and release."""
        check_trace(
            [tensor for storage in self._bound.values() for tensor in storage.tensors if tensor.in_slot is not None]
        )

    check_trace._dynamo_marked_constant = True  # type: ignore[attr-defined] # see UnitHook.stay_in_slot

    def _promote(self, storage: BoundStorage, tensor: BoundTensor, how: str) -> None:
        name = storage.info.name
        with self.tensor_lock:
            if name in self.plan.resident:
                return  # by another thread, meanwhile
            if reason := self._reason_against(storage):
                raise OutsideAccessError(
                    f"{tensor.info.name} {how} outside of the forward that it is on the device for, and {reason}: "
                    f"keep it resident (rules=[({tensor.info.name!r}, 'resident')], --offload-rule "
                    f"{tensor.info.name}=resident)"
                )
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
            warnings.warn(
                f"{tensor.info.name} {how} outside of the forward that it is on the device for. It is resident from "
                f"now on ({storage.info.num_bytes} bytes more on {self._device}); stats().notes lists all such "
                f"tensors. Plan for it: rules=[({tensor.info.name!r}, 'resident')] (--offload-rule "
                f"{tensor.info.name}=resident)",
                PenstockWarning,
                stacklevel=4,
            )

    def _reason_against(self, storage: BoundStorage) -> str | None:
        if self._refusal is not None:
            return self._refusal
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "nothing can be loaded while a graph is captured"
        needed = self.plan.device_bytes + storage.info.num_bytes
        if self._budget_bytes is not None and needed > self._budget_bytes:
            return f"the budget has no room for it ({self._budget_bytes} bytes, {needed} would be needed)"
        return None

    def _on_device(self, storage: BoundStorage) -> torch.Tensor:
        assert self._store is not None
        blob = new_blob(storage.info.num_bytes)
        self._store.read(storage.info.name, blob)
        try:
            return blob.to(self._device)
        except torch.OutOfMemoryError as error:
            raise OutsideAccessError(
                f"{storage.info.name} is used outside of the forward that it is on the device for, and {self._device} "
                f"has no room for it: leave more memory to it, or keep it resident from the start"
            ) from error
