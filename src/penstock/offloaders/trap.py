"""Resting tensors: what a weight looks at while its bytes are not on the device.

A resting tensor keeps shape, strides, dtype and device, and has no memory. It carries a dispatch key that PyTorch
reserves for code outside its tree (``DeferredInit``), so the dispatcher calls :func:`_on_access` before any operator
that takes it, its ``.data`` or its ``.detach()``: from any thread, module, model or library, whatever modes are active.
Tensors without the key never come here and cost nothing. Raw pointers are refused by torch ("Cannot access data
pointer"), since the storage has none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from penstock.errors import StateError

__all__ = ["GiveBack", "Owner", "is_resting", "resting_like", "storage_id"]

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


# Ends a loan of bytes: takes the output of the operator (None if it has failed), returns what its caller gets.
GiveBack = Callable[[Any], Any]


class Owner(Protocol):
    """What can bring the bytes of a resting tensor."""

    def wake(self, operator: str, is_written: bool) -> GiveBack | None:
        """Let the tensor look at its true bytes: for good (``None``), or until the result is called.

        ``is_written``: by the operator, in place.

        Raises:
            OutsideAccessError: the bytes cannot be on the device now.
        """

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor itself, of which a resting argument may be an alias."""


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
    loans: list[GiveBack] = []
    output = None
    try:
        for argument in tree_leaves((args, kwargs)):
            if isinstance(argument, torch.Tensor) and is_resting(argument):
                is_written = any(argument is target for target in _targets(operator, args, kwargs))
                loans += _wake(argument, str(operator), is_written)
        output = operator(*args, **kwargs)
    finally:
        for give_back in reversed(loans):
            output = give_back(output)
    return output


def _targets(operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What ``operator`` writes in place."""
    named = zip((argument.name for argument in operator._schema.arguments), args, strict=False)
    given = {**dict(named), **kwargs}
    written = (a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return tree_leaves([given.get(name) for name in written])


def _wake(argument: torch.Tensor, operator: str, is_written: bool) -> list[GiveBack]:
    owner = _owners.get(storage_id(argument))
    if owner is None:
        raise StateError(
            f"{operator} was given an alias (.data or .detach()) of a weight, taken while its model was offloaded; "
            f"the offload is gone: take the alias again"
        )
    give_back = owner.wake(operator, is_written) if is_resting(owner.tensor) else None
    loans = [] if give_back is None else [give_back]
    if argument is not owner.tensor:
        resting = argument.data
        with torch.no_grad():
            argument.data = owner.tensor.data
        if give_back is not None:
            loans.append(partial(_rest_again, argument, resting))
    return loans


def _rest_again(alias: torch.Tensor, resting: torch.Tensor, output: Any) -> Any:
    with torch.no_grad():
        alias.data = resting
    return output


_fallback = torch.library.Library("_", "IMPL")
_fallback.fallback(_on_access, _KEY_NAME)
_aten = torch.library.Library("aten", "IMPL")
for _name in _READS_NOTHING:
    _packet = getattr(torch.ops.aten, _name)
    for _overload in _packet.overloads():
        _qualified = _name if _overload == "default" else f"{_name}.{_overload}"
        _aten.impl(_qualified, torch.library.fallthrough_kernel, _KEY_NAME)
