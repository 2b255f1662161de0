"""Resting tensors: what a weight looks at while its bytes are not on the device.

A resting tensor keeps shape, strides, dtype and device, and has no memory. It carries a dispatch key that PyTorch
reserves for code outside its tree (``DeferredInit``), so the dispatcher calls :func:`_on_access` before any operator
that takes it, its ``.data`` or its ``.detach()``: from any thread, module, model or library, whatever modes are active.
Tensors without the key never come here and cost nothing. Raw pointers are refused by torch ("Cannot access data
pointer"), since the storage has none.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from penstock.errors import StateError

__all__ = ["Owner", "is_resting", "resting_like", "storage_id"]

_KEY_NAME = "DeferredInit"
_KEY = torch._C._dispatch_key_parse(_KEY_NAME)
_KEYS = torch._C.DispatchKeySet(_KEY)

# These read no bytes: aliases that rest as well, bookkeeping, and factories that only ask for shape, dtype and device.
_READS_NOTHING = (
    "set_data",
    "_has_compatible_shallow_copy_type",
    "detach",
    "alias",
    "requires_grad_",
    "retain_grad",
    "is_pinned",
    "is_same_size",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "new_empty",
    "new_empty_strided",
    "new_zeros",
    "new_ones",
    "new_full",
)


class Owner(Protocol):
    """What can bring the bytes of a resting tensor."""

    def resident_data(self, operator: str) -> torch.Tensor:
        """The tensor over its true bytes, at rest no more.

        Raises:
            OutsideAccessError: the bytes cannot be on the device now.
        """


_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()


class _Geometry(torch.Tensor):
    """Makes tensors without memory, nothing else: torch builds these for subclasses alone."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError("a resting tensor is a plain one")


def resting_like(tensor: torch.Tensor, owner: Owner) -> torch.Tensor:
    """A resting tensor of the shape, strides, dtype and device of ``tensor``, which ``owner`` answers for."""
    keys = _KEYS
    for is_lazy, key in ((tensor.is_conj(), "Conjugate"), (tensor.is_neg(), "Negative")):
        keys = keys | torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key)) if is_lazy else keys
    geometry = torch.Tensor._make_wrapper_subclass(
        _Geometry,
        tensor.shape,
        strides=tensor.stride(),
        dtype=tensor.dtype,
        device=tensor.device,
        storage_size=0,
        _extra_dispatch_keys=keys,
    )
    resting = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    with torch._C._DisableTorchDispatch():
        resting.data = geometry  # all of it but the subclass
    torch._C._set_throw_on_mutable_data_ptr(resting)
    _owners[storage_id(resting)] = owner
    return resting


def storage_id(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage object, which all views of it share; its memory may change."""
    return int(tensor.untyped_storage()._cdata)


def is_resting(tensor: torch.Tensor) -> bool:
    """Whether the bytes of ``tensor`` are elsewhere."""
    return bool(torch._C._dispatch_keys(tensor).has(_KEY))


def _on_access(operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Give every resting argument its bytes, then run ``operator`` as if nothing had been offloaded."""
    for argument in tree_leaves((args, kwargs)):
        if isinstance(argument, torch.Tensor) and is_resting(argument):
            _wake(argument, str(operator))
    return operator(*args, **kwargs)


def _wake(argument: torch.Tensor, operator: str) -> None:
    owner = _owners.get(storage_id(argument))
    if owner is None:
        raise StateError(
            f"{operator} was given an alias (.data or .detach()) of a weight, taken while its model was offloaded; "
            f"the offload is gone: take the alias again"
        )
    data = owner.resident_data(operator)
    if is_resting(argument):  # an alias, and not the weight itself
        with torch.no_grad():
            argument.data = data


_fallback = torch.library.Library("_", "IMPL")
_fallback.fallback(_on_access, _KEY_NAME)
_aten = torch.library.Library("aten", "IMPL")
for _name in _READS_NOTHING:
    _packet = getattr(torch.ops.aten, _name)
    for _overload in _packet.overloads():
        _qualified = _name if _overload == "default" else f"{_name}.{_overload}"
        _aten.impl(_qualified, torch.library.fallthrough_kernel, _KEY_NAME)
