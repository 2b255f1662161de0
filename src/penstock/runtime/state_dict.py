"""``state_dict()``, ``load_state_dict()`` and ``to()`` of an offloaded model.

The first must give the weights and not what a slot happens to hold. The others, with ``half()``, ``cuda()`` and all
that goes through ``Module._apply``, would change what is in slots and be lost; they are refused before they have
changed anything anywhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from penstock.errors import ModelChangedError, StateError
from penstock.model.live_tensors import BoundStorage, BoundTensor

__all__ = ["NotCopyable", "StateGuard", "place_of"]

_MARK = "_penstock_offloaded"

# By the path to an inner tensor; under () what is no subclass.
_Parts = dict[tuple[str, ...], tuple[BoundStorage, BoundTensor]]


class NotCopyable:
    """Refuses ``copy.copy``, ``copy.deepcopy`` and ``pickle``, which all call ``__reduce_ex__``, of what holds it."""

    def __reduce_ex__(self, protocol: Any = None) -> Any:
        raise StateError(
            "an offloaded model cannot be copied or pickled: its weights rest elsewhere; use its state_dict(), or call "
            "handle.remove() first"
        )


class StateGuard(NotCopyable):
    """Stands before the state of every module that holds one of ``storages``.

    Args:
        model: the root.
        storages: what is offloaded.
        read: the bytes of a storage, by name (uint8, 1-D).
    """

    def __init__(self, model: nn.Module, storages: Sequence[BoundStorage], read: Callable[[str], torch.Tensor]) -> None:
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
        self._tensors = [tensor.tensor for storage in storages for tensor in storage.tensors]
        self._model = model
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
        # On every module around the owners too: loading goes from the outside in, and must not stop half-way.
        for module in self._around:
            self._handles.append(module.register_load_state_dict_pre_hook(_refuse_load))
            self._set(module, "_apply", partial(self._apply_to_residents, module))
            self._set(module, "__getstate__", self.__reduce_ex__)  # of pickle and deepcopy, before they reach a tensor
        # One Parameter may hang in two models, of which the other knows nothing of this one.
        for tensor in self._tensors:
            self._set(tensor, _MARK, owner)
            self._set(tensor, "__reduce_ex__", self.__reduce_ex__)

    def _set(self, owner: nn.Module | torch.Tensor, name: str, value: Any) -> None:
        attributes = vars(owner)
        self._attributes.append((attributes, name))
        attributes[name] = value

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        for attributes, name in self._attributes:
            attributes.pop(name, None)

    def _apply_to_residents(self, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
        """``module._apply(fn)``, unless ``fn`` would change an offloaded tensor.

        ``fn`` is asked with a small tensor of the same dtype, device and number of dimensions.
        """
        for tensor in self._tensors:
            probe = torch.empty([min(2, size) for size in tensor.shape], dtype=tensor.dtype, device=tensor.device)
            if fn(probe) is not probe:
                raise ModelChangedError(
                    "to(), half(), cuda() and the like would change offloaded weights, which rest elsewhere: call "
                    "handle.remove() first, move or cast the model, then offload again"
                )
        applied: nn.Module = type(module)._apply(module, lambda tensor: tensor if place_of(tensor) else fn(tensor))
        return applied

    def _put_true_tensors(
        self, module: nn.Module, state: dict[str, torch.Tensor], prefix: str, local_metadata: object
    ) -> None:
        for attr, parts in self._parts[module].items():
            current = {path: part for path, part in parts.items() if part[1].is_held_by(module, attr, path)}
            if current and prefix + attr in state:
                state[prefix + attr] = self._true(state[prefix + attr], current, state)

    def _true(self, tensor: torch.Tensor, parts: _Parts, state: object, path: tuple[str, ...] = ()) -> torch.Tensor:
        """``tensor`` with the bytes from the store; a subclass is made anew from its inner tensors."""
        if path in parts:
            storage, bound = parts[path]
            if bound.has_other_data:
                return tensor.detach()
            return bound.view_of(self._bytes(storage, state))
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None:
            return tensor
        names, context = flatten()
        inner = {name: self._true(getattr(tensor, name), parts, state, (*path, name)) for name in names}
        return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined, no-any-return]

    def _bytes(self, storage: BoundStorage, state: object) -> torch.Tensor:
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
            self._contents[name] = self._read(name)
        return self._contents[name]


def place_of(thing: nn.Module | torch.Tensor) -> str | None:
    """Which model a module or tensor is offloaded with, for people; a module if it holds an offloaded tensor itself."""
    return vars(thing).get(_MARK)


def _refuse_load(module: nn.Module, *args: object) -> None:
    raise ModelChangedError(
        "load_state_dict on an offloaded model would write into slots and be lost; call handle.remove() first, load, "
        "then offload again"
    )
