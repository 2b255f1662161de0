"""Private names of torch that the core needs, each under a name that says what it does.

What forwards call for each tensor or module is torch's own function, without one of ours around it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

# -- dispatch keys -----------------------------------------------------------------------------------------------------

parse_key = torch._C._dispatch_key_parse
is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded  # in the calling thread
excluding = torch._C._ExcludeDispatchKeyGuard  # a context in which the thread's operators do without a set of keys


def key_set(*names: str) -> torch._C.DispatchKeySet:
    """The dispatch keys of these names."""
    return functools.reduce(operator.or_, (torch._C.DispatchKeySet(parse_key(name)) for name in names))


def has_key(tensor: torch.Tensor, *keys: torch._C.DispatchKey) -> bool:
    """Whether ``tensor`` has one of ``keys``."""
    found = torch._C._dispatch_keys(tensor)
    return True in [found.has(key) for key in keys]


class _Geometry(torch.Tensor):
    """Makes tensors with keys of our choice, nothing else: torch builds these for subclasses alone."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError("the tensors made from this one are plain")


def with_keys(tensor: torch.Tensor, *names: str) -> torch.Tensor:
    """A tensor like ``tensor`` with these keys, without memory; an inference tensor if inference mode is on."""
    lazy = ["Conjugate"] * tensor.is_conj() + ["Negative"] * tensor.is_neg()
    # The only function of torch that makes a tensor with given dispatch keys; it makes a subclass.
    layout: dict[str, Any] = {"strides": tensor.stride(), "dtype": tensor.dtype, "device": tensor.device}
    geometry = torch.Tensor._make_wrapper_subclass(
        _Geometry, tensor.shape, storage_size=0, _extra_dispatch_keys=key_set(*names, *lazy), **layout
    )
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    with torch._C._DisableTorchDispatch():
        # Sets keys, shape and storage; the Python class stays torch.Tensor, so no __torch_dispatch__ runs later.
        made.data = geometry
    return made


def aten_operators() -> Iterator[tuple[Any, str, bool]]:
    """Each operator of ``aten``: its schema, its name with that of its overload, and whether it consists of others."""
    for schema in torch._C._jit_get_all_schemas():
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        if name.startswith("aten::") and torch._C._dispatch_has_kernel(name):  # others are TorchScript's own
            is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
            yield schema, name.removeprefix("aten::"), is_composite


# -- tensors and storages ----------------------------------------------------------------------------------------------

use_count = torch._C._storage_Use_Count  # of a storage, by storage_id: how many tensors and Python objects hold it
refuse_pointer = torch._C._set_throw_on_mutable_data_ptr  # data_ptr() of the tensor raises, in place of giving null
copy_each = torch._foreach_copy_  # (into, sources, non_blocking), by one call
negative_view = torch._neg_view
make_subclass = torch.Tensor._make_subclass  # (class, data, requires_grad), without a call of its __init__


def storage_id(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage object, which all views of it share; its memory may change."""
    return int(tensor.untyped_storage()._cdata)


def weak_memory(data: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """A function that makes ``data`` again as long as another tensor keeps its memory alive."""
    # Weak, because the memory has to be freed unless a view outside of the model keeps it.
    weak = StorageWeakRef(data.untyped_storage())
    geometry = (data.storage_offset(), data.shape, data.stride())
    dtype, device, is_inference = data.dtype, data.device, data.is_inference()

    def memory() -> torch.Tensor | None:
        storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
        if storage is None:
            return None
        with torch.inference_mode(is_inference):
            return torch.empty(0, dtype=dtype, device=device).set_(storage, *geometry)

    return memory


# -- tracers -----------------------------------------------------------------------------------------------------------


def leave_to_python(function: Any) -> Any:
    """``function``, which Dynamo leaves alone with all it calls: ``torch.compiler.disable`` without a further call."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


transform = torch._C._functorch.peek_interpreter_stack  # of torch.func, that runs; None: none does
proxy_mode = functools.partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY)  # of make_fx
