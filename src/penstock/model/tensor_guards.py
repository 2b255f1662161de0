"""What a weight looks at while it is offloaded, so that no access to it goes unnoticed.

Two dispatch keys that no kernel of PyTorch uses mark such tensors. The dispatcher looks at the keys of all arguments
before it looks for a kernel, so it calls us first: from any thread, module, model or library, whatever modes are
active. Tensors without these keys never come here and cost nothing.

*Resting* tensors (``DeferredInit``, reserved for code outside of PyTorch's tree) have shape, strides, dtype and device,
and no memory. Any operator that takes one, its ``.data`` or its ``.detach()`` comes to :func:`_on_access`. Raw pointers
are refused by torch ("Cannot access data pointer"), since the storage has none.

*Guarded* tensors (``TESTING_ONLY_GenericWrapper``) look at bytes that are there for a while: a slot, a copy. Operators
that read them run at full speed, because the key falls through to their kernels; one that writes them in place, through
any view, comes to :func:`_on_write` and is refused, since the write would be lost.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from penstock.errors import ModelChangedError, StateError

__all__ = ["GiveBack", "Owner", "guarded", "is_resting", "resident_rule", "resting_like", "storage_id"]

_RESTING, _GUARDED = "DeferredInit", "TESTING_ONLY_GenericWrapper"
_RESTING_KEY, _GUARDED_KEY = (torch._C._dispatch_key_parse(name) for name in (_RESTING, _GUARDED))
_GUARDED_KEYS = torch._C.DispatchKeySet(_GUARDED_KEY)

# These neither read nor write bytes: bookkeeping, aliases, and factories that only ask for shape, dtype and device.
_TOUCHES_NOTHING = {
    "set_data", "_has_compatible_shallow_copy_type", "detach", "alias", "requires_grad_", "retain_grad",
    "record_stream", "is_pinned", "is_same_size",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
    "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full",
}  # fmt: skip

# Ends a loan of bytes: takes the output of the operator (None if it has failed), returns what its caller gets.
GiveBack = Callable[[Any], Any]


class Owner(Protocol):
    """What knows the true bytes of a tensor."""

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor itself, of which an argument may be an alias."""

    @property
    def name(self) -> str:
        """Its name in the model."""

    def wake(self, operator: str, is_written: bool) -> GiveBack | None:
        """Let the tensor look at its true bytes: for good (``None``), or until the result is called.

        ``is_written``: by the operator, in place.

        Raises:
            OutsideAccessError: the bytes cannot be on the device now.
        """


_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()


class _Geometry(torch.Tensor):
    """Makes tensors with keys of our choice, nothing else: torch builds these for subclasses alone."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError("the tensors made from this one are plain")


def resting_like(tensor: torch.Tensor, owner: Owner) -> torch.Tensor:
    """A resting tensor of the shape, strides, dtype and device of ``tensor``, which ``owner`` answers for."""
    resting = _marked(tensor, _RESTING_KEY)
    torch._C._set_throw_on_mutable_data_ptr(resting)
    _owners[storage_id(resting)] = owner
    return resting


def guarded(tensor: torch.Tensor, owner: Owner) -> torch.Tensor:
    """``tensor`` over the same storage, read-only for everything that the dispatcher sees."""
    view = _marked(tensor, _GUARDED_KEY)
    with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(_GUARDED_KEYS):
        view.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    _owners[storage_id(view)] = owner
    return view


def _marked(tensor: torch.Tensor, key: Any) -> torch.Tensor:
    """Without memory; inference or not as the mode says."""
    _register()
    keys = torch._C.DispatchKeySet(key)
    for is_lazy, bit in ((tensor.is_conj(), "Conjugate"), (tensor.is_neg(), "Negative")):
        keys = keys | torch._C.DispatchKeySet(torch._C._dispatch_key_parse(bit)) if is_lazy else keys
    geometry = torch.Tensor._make_wrapper_subclass(
        _Geometry,
        tensor.shape,
        strides=tensor.stride(),
        dtype=tensor.dtype,
        device=tensor.device,
        storage_size=0,
        _extra_dispatch_keys=keys,
    )
    marked = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    with torch._C._DisableTorchDispatch():
        marked.data = geometry  # all of it but the subclass
    return marked


def storage_id(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage object, which all views of it share; its memory may change."""
    return int(tensor.untyped_storage()._cdata)


def is_resting(tensor: torch.Tensor) -> bool:
    """Whether the bytes of ``tensor`` are elsewhere."""
    return bool(torch._C._dispatch_keys(tensor).has(_RESTING_KEY))


def resident_rule(name: str) -> str:
    """How to keep the tensor ``name`` on the device, for messages: in Python and on a command line."""
    return f"rules=[({name!r}, 'resident')], --offload-rule {name}=resident"


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


def _on_write(operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Refuse ``operator`` if it writes a guarded tensor; others may be among its arguments."""
    for target in _targets(operator, args, kwargs):
        if isinstance(target, torch.Tensor) and torch._C._dispatch_keys(target).has(_GUARDED_KEY):
            owner = _owners.get(storage_id(target))
            name = "a weight" if owner is None else owner.name
            raise ModelChangedError(
                f"{name} was written in place by {operator} while offloaded, where the write would be lost with the "
                f"next copy: call handle.remove() first, or keep it resident ({resident_rule(name)})"
            )
    with torch._C._ExcludeDispatchKeyGuard(_GUARDED_KEYS):
        return operator(*args, **kwargs)


def _targets(operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that ``operator`` writes in place."""
    targets: list[Any] = []
    for position, name in _written(operator):
        target = args[position] if position < len(args) else kwargs.get(name)
        targets += target if isinstance(target, list | tuple) else [target]
    return targets


@functools.cache
def _written(operator: torch._ops.OpOverload) -> list[tuple[int, str]]:
    """Position and name of each argument that the schema of ``operator`` says it writes."""
    arguments = enumerate(operator._schema.arguments)
    return [(position, a.name) for position, a in arguments if a.alias_info is not None and a.alias_info.is_write]


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
            loans.append(functools.partial(_rest_again, argument, resting))
    return loans


def _rest_again(alias: torch.Tensor, resting: torch.Tensor, output: Any) -> Any:
    with torch.no_grad():
        alias.data = resting
    return output


@functools.cache
def _register() -> tuple[torch.library.Library, ...]:
    """Tell the dispatcher, once, what the two keys mean."""
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(_on_access, _RESTING)
    everything.fallback(torch.library.fallthrough_kernel, _GUARDED)
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        qualified = f"{name}.{schema.overload_name}".rstrip(".")
        if namespace != "aten" or not torch._C._dispatch_has_kernel(f"aten::{qualified}"):
            continue  # another library's, or one of TorchScript's own
        if name in _TOUCHES_NOTHING:
            aten.impl(qualified, torch.library.fallthrough_kernel, _RESTING)
        elif any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
            operator = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default")
            aten.impl(qualified, functools.partial(_on_write, operator), _GUARDED)
    return everything, aten
