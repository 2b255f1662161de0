"""Layerwise casting of diffusers: weights that are stored in 8 bits, and cast where their module runs.

diffusers casts a module's parameters before its forward and back behind it, in place. Offloaded ones stay as they are
stored, in their slots, and the forward runs on casts of them: the same values in the same kernels.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headrace.errors import OptionError, OptionTypeError

if TYPE_CHECKING:
    from headrace.runtime.session import OffloadSession

__all__ = ["CastsAtUse", "casting_of", "store_in", "why_not_cast"]

_HOOK = "layerwise_casting"  # of diffusers.hooks
_NEW = object()


def casting_of(module: nn.Module) -> Any:
    """diffusers' hook that casts the weights of ``module`` (``storage_dtype``, ``compute_dtype``), or ``None``."""
    registry: Any = getattr(module, "_diffusers_hook", None)
    return None if registry is None else registry.hooks.get(_HOOK)


def why_not_cast(module: nn.Module) -> str | None:
    """Why the weights of ``module``, which diffusers casts, cannot be cast while they are offloaded, as a clause."""
    hook = casting_of(module)
    forward = hook.fn_ref.forward
    if others := {weight.dtype for weight in _floats(module)} - {hook.storage_dtype}:
        return f"has weights in {others.pop()} that diffusers' layerwise casting stores in {hook.storage_dtype}"
    if next(module.children(), None) is not None:
        return "diffusers casts together with the modules inside it"
    if getattr(forward, "__self__", None) is not module or not isinstance(forward, types.MethodType):
        return "had its forward wrapped before diffusers' layerwise casting was enabled"
    return _why_rounded(hook.storage_dtype, hook.compute_dtype)


def _why_rounded(storage_dtype: torch.dtype, compute_dtype: torch.dtype) -> str | None:
    stored, computed = torch.finfo(storage_dtype), torch.finfo(compute_dtype)
    if computed.eps > stored.eps or computed.max < stored.max or computed.tiny > stored.tiny:
        return f"diffusers rounds in each forward, from {stored.dtype} to {computed.dtype} and back"
    return None


def _floats(module: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in module.parameters(recurse=False) if weight.is_floating_point()]


def store_again(model: nn.Module) -> None:
    """Cast weights that have left the dtype of their storage, as by ``to(dtype)``, back where none loses a bit."""
    for module in model.modules():
        if (hook := casting_of(module)) is None:
            continue
        others = [weight for weight in _floats(module) if weight.dtype != hook.storage_dtype]
        if others and all(torch.equal(w.to(hook.storage_dtype).to(w.dtype), w) for w in others):
            module.to(hook.storage_dtype)


class CastsAtUse:
    """Casts, beside the stored weights, in the modules of an offloaded model that layerwise casting was enabled on."""

    counts = None
    notes: tuple[str, ...] = ()

    def __init__(self, model: nn.Module) -> None:
        self._hooks = [(module, hook) for module in model.modules() if (hook := casting_of(module)) is not None]
        self._changed: list[tuple[Any, dict[str, Any]]] = []

    def attach(self, session: OffloadSession) -> None:
        """Put the casts in place of diffusers', if there are any; an interrupt leaves what ``session`` takes off."""
        if self._hooks:
            session.attachments.append(self)
        for module, hook in self._hooks:
            reference = hook.fn_ref
            self._changed.append((reference, dict(vars(reference))))
            reference.forward = _cast_forward(module, hook.compute_dtype, reference.forward.__func__)
            reference.pre_forward, reference.post_forward = _unchanged_arguments, _unchanged_output

    def check(self) -> None:
        """Have nothing that a step may invalidate."""

    def remove(self) -> None:
        """Give diffusers' hooks back."""
        for reference, attributes in self._changed:
            vars(reference).update(attributes)


def _unchanged_arguments(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


def _unchanged_output(module: nn.Module, output: Any) -> Any:
    return output


def _cast_forward(module: nn.Module, dtype: torch.dtype, original: Callable[..., Any]) -> Callable[..., Any]:
    def cast_one(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.to(dtype)
        # Without gradients, too: matmul takes another kernel for several dimensions if its weight requires none.
        return made.requires_grad_() if tensor.requires_grad else made

    def cast(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        return {
            name: cast_one(tensor) if tensor is not None and tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }

    def forward(*args: Any, **kwargs: Any) -> Any:
        # A stand-in, because other threads and our own hooks look into the module meanwhile. Dynamo traces it.
        stand_in = object.__new__(type(module))
        before = dict(vars(module))
        stand_in.__dict__ = {**before, "_parameters": cast(module._parameters), "_buffers": cast(module._buffers)}
        if torch.compiler.is_compiling():
            return original(stand_in, *args, **kwargs)
        try:
            return original(stand_in, *args, **kwargs)
        finally:
            left = ((name, value) for name, value in vars(stand_in).items() if name not in ("_parameters", "_buffers"))
            vars(module).update((name, value) for name, value in left if before.get(name, _NEW) is not value)

    return forward


def store_in(pipe: Any, storage_dtype: torch.dtype | Mapping[str, torch.dtype], step_models: tuple[str, ...]) -> None:
    """Enable layerwise casting on components of ``pipe``, as diffusers does, in the dtype that each computes in.

    Args:
        storage_dtype: a dtype for the models that every step runs, or one for each of the components that it names.
        step_models: names of the components that every step runs.

    Raises:
        OptionError, OptionTypeError: with nothing changed.
    """
    if isinstance(storage_dtype, torch.dtype):
        storage_dtype = dict.fromkeys(step_models, storage_dtype)
    elif not isinstance(storage_dtype, Mapping):
        raise OptionTypeError(
            f"storage_dtype: expected a dtype, such as torch.float8_e4m3fn, or dtypes by names of components, found "
            f"{type(storage_dtype).__name__} {storage_dtype!r}"
        )
    if not storage_dtype:
        raise OptionError("storage_dtype: expected a component to store in it, found none; leave it out")
    casts = [each for name, dtype in storage_dtype.items() if (each := _to_cast(pipe, name, dtype)) is not None]
    for part, dtype, compute_dtype in {id(each[0]): each for each in casts}.values():  # one may have two names
        try:
            part.enable_layerwise_casting(storage_dtype=dtype, compute_dtype=compute_dtype)
        except BaseException as error:
            error.add_note(f"headrace: the weights of {type(part).__name__} are cast in part: build or load it anew")
            raise


def _to_cast(pipe: Any, name: str, dtype: torch.dtype) -> tuple[Any, torch.dtype, torch.dtype] | None:
    """The component ``name``, its dtype to store and to compute in; ``None``: it is stored so already."""
    own = {key: getattr(part, "_orig_mod", part) for key, part in pipe.components.items()}
    own = {key: part for key, part in own.items() if hasattr(part, "enable_layerwise_casting")}
    if (part := own.get(name)) is None:
        # Pipelines take the dtype of embeddings from models of transformers, which give the one of storage.
        raise OptionError(f"storage_dtype: expected components of diffusers' own ({', '.join(own)}), found {name!r}")
    if active := {hook.storage_dtype for module in part.modules() if (hook := casting_of(module)) is not None}:
        if active == {dtype}:
            _require_all_cast(part, name, dtype)
            return None
        raise OptionError(
            f"storage_dtype: diffusers' layerwise casting stores {name} in {', '.join(map(str, active))} already: "
            f"expected that dtype, found {dtype}; build or load it anew to store it otherwise"
        )
    if getattr(part, "hf_quantizer", None) is not None or getattr(part, "is_quantized", False):
        raise OptionError(f"storage_dtype: {name} is quantised: expected weights in one dtype; leave it out for {name}")
    compute_dtype = part.dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize >= compute_dtype.itemsize:
        raise OptionError(
            f"storage_dtype: expected a floating dtype smaller than {compute_dtype}, in which {name} computes, such as "
            f"torch.float8_e4m3fn, found {dtype}"
        )
    if why := _why_not_stored(dtype, compute_dtype):
        raise OptionError(f"storage_dtype: {name} cannot be stored in {dtype}: {why}; use torch.float8_e4m3fn")
    return part, dtype, compute_dtype


def _why_not_stored(dtype: torch.dtype, compute_dtype: torch.dtype) -> str | None:
    try:
        torch.ones(1, dtype=compute_dtype).to(dtype)
    except (RuntimeError, NotImplementedError) as error:  # of packed numbers
        return f"torch casts nothing to it ({error})"
    return _why_rounded(dtype, compute_dtype)


def _require_all_cast(part: Any, name: str, dtype: torch.dtype) -> None:
    """Raise OptionError if layerwise casting is enabled on a part of a component only, as after an interrupt."""
    with torch.device("meta"):
        twin = type(part).from_config(part.config, trust_remote_code=False)
    twin.enable_layerwise_casting(storage_dtype=dtype)
    # PEFT wraps layers in layers with adapters.
    found = {at.removesuffix(".base_layer") for at, each in part.named_modules() if casting_of(each) is not None}
    missing = [at for at, each in twin.named_modules() if casting_of(each) is not None and at not in found]
    if missing:
        raise OptionError(
            f"storage_dtype: diffusers' layerwise casting stores a part of {name} in {dtype}, and not "
            f"{name}.{missing[0]} (of {len(missing)}): expected all or nothing of it; build or load it anew, or leave "
            f"storage_dtype out to keep it so"
        )
