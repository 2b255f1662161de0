"""The two ends of a module's use of its unit, in eager and in compiled code."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from penstock.errors import StateError
from penstock.offloaders.binding import BoundStorage, BoundTensor, Path, live_tensors
from penstock.offloaders.pipeline import SlotPipeline
from penstock.ops import new_tag

__all__ = ["ForwardHook", "NotCopyable", "UnitHook"]

# Compiled code reads its tags and the token from the modules: see penstock.ops.
_TAG, _FORWARD_TAG, _TOKEN = "_penstock_tag", "_penstock_forward_tag", "_penstock_token"


class NotCopyable:
    """Refuses ``copy.deepcopy`` and ``pickle`` of whatever holds it."""

    def __reduce__(self) -> Any:
        raise StateError(
            "an offloaded model cannot be copied or pickled: its weights rest elsewhere; handle.remove() first"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__reduce__()


class UnitHook(NotCopyable):
    """Waits before ``anchor`` runs and releases after it, on behalf of one unit.

    With ``pipeline=None`` it traces the same ops and moves nothing: the reference for equality under a compiler
    (contract 1). ``token``: of :mod:`penstock.ops`, one for all hooks of an offload.
    """

    def __init__(
        self,
        anchor: nn.Module,
        unit: int,
        storages: Sequence[BoundStorage],
        pipeline: SlotPipeline | None,
        token: torch.Tensor,
    ) -> None:
        self._unit = unit
        self._pipeline = pipeline
        self._tensors = [tensor for storage in storages for tensor in storage.tensors]
        self._paths = tuple(_path_from(anchor, tensor) for tensor in self._tensors)
        self._anchor = anchor
        anchor.__dict__[_TAG] = new_tag(self, self._tensors[0].tensor.device)
        anchor.__dict__[_TOKEN] = token
        self._inside: set[int] = set()  # idents of the threads between the two ends, in eager code
        # The wait goes before every other hook, since those may read weights; the release after every other hook.
        self._handles = [
            anchor.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            anchor.register_forward_hook(self._after, always_call=True),
        ]
        # Code compiled before the hooks were there must not run without them. torch.compile does not guard on hooks,
        # but it does on whether a module has a forward of its own.
        self._marked = anchor if "forward" not in vars(anchor) else None
        if self._marked is not None:
            self._marked.__dict__["forward"] = self._marked.forward

    def remove(self) -> None:
        """Take the hooks off. Compiled code that still holds them finds ops without effect."""
        for handle in self._handles:
            handle.remove()
        if self._marked is not None:
            self._marked.__dict__.pop("forward", None)
        self._marked = self._pipeline = None
        _clear(self._anchor, _TAG, _TOKEN)

    @property
    def anchor(self) -> nn.Module:
        """The module that reads the unit."""
        return self._anchor

    @property
    def first_path(self) -> Path:
        """From the anchor to one of the unit's tensors."""
        return self._paths[0]

    def enter_compiled(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._pipeline is None:
            return
        given = {tensor.data_ptr() for tensor in tensors}
        for bound in self._tensors:
            bound.note_version(known=False)  # the ops count as writes, before (torch 2.11) or after they run
            bound.check()
            bound.refuse_copy(given)
        self._pipeline.wait(self._unit)

    def leave_compiled(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._pipeline is None:
            return
        for bound in self._tensors:
            bound.invalidate_saved()
        self._pipeline.release(self._unit)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            tensors = list(live_tensors(module, self._paths))
            # Autograd would take a write to a leaf amiss, and engines that hide weights from the compiler do not train.
            inputs = [] if torch.is_grad_enabled() else _floats_in((args, kwargs))
            torch.ops.penstock.wait(module._penstock_tag, module._penstock_token, tensors, inputs)
        elif self._pipeline is not None:
            self._enter(self._pipeline)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            tensors = list(live_tensors(module, self._paths))
            outputs = _tensors_in(output)
            torch.ops.penstock.release(module._penstock_tag, module._penstock_token, tensors, outputs)
        elif self._pipeline is not None:
            self._leave(self._pipeline)

    def _enter(self, pipeline: SlotPipeline) -> None:
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise StateError("torch.jit.trace would record what slots hold by chance; handle.remove() first")
        interrupted = threading.get_ident() in self._inside  # in the last run, perhaps between a write and its note
        for bound in self._tensors:
            if interrupted:
                bound.note_version(known=False)
            bound.check()
        pipeline.wait(self._unit, self._runs)
        for bound in self._tensors:
            bound.note_version()
        self._inside.add(threading.get_ident())

    def _runs(self) -> bool:
        """Whether the calling thread is inside a call of the anchor."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is self._anchor:
                return True
            frame = frame.f_back
        return False

    def _leave(self, pipeline: SlotPipeline) -> None:
        if threading.get_ident() not in self._inside:
            return  # called because what came before the module has raised
        try:
            for bound in self._tensors:
                bound.check()
                # What autograd has saved during this run is about to be overwritten.
                bound.invalidate_saved()
                bound.note_version()
            self._inside.discard(threading.get_ident())
        finally:
            pipeline.release(self._unit)


class ForwardHook(NotCopyable):
    """Begins and ends a forward: what was held back starts, slots are made ready for the next one, graphs are joined.

    ``entry`` is the module whose forward begins one; it is ``model`` unless an engine runs the layers itself.
    """

    def __init__(
        self,
        model: nn.Module,
        entry: nn.Module,
        hooks: Sequence[UnitHook],
        pipeline: SlotPipeline | None,
        token: torch.Tensor,
    ) -> None:
        self._pipeline = pipeline
        self._units = tuple((hook.anchor, (hook.first_path,)) for hook in hooks)
        self._ends = (entry, model)
        tag = new_tag(self, token.device)
        for module in self._ends:
            module.__dict__[_FORWARD_TAG] = tag
            module.__dict__[_TOKEN] = token
        self._handles = [
            entry.register_forward_pre_hook(self._before, prepend=True),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._pipeline = None
        for module in self._ends:
            _clear(module, _FORWARD_TAG, _TOKEN)

    def enter_compiled(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._pipeline is not None:
            self._pipeline.begin_forward()

    def leave_compiled(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._pipeline is not None:
            self._pipeline.finish_forward()

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            torch.ops.penstock.begin(module._penstock_forward_tag, module._penstock_token)
        elif self._pipeline is not None:
            self._pipeline.begin_forward()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            inputs = [tensor for anchor, paths in self._units for tensor in live_tensors(anchor, paths)]
            inputs += _tensors_in(output)
            torch.ops.penstock.join(module._penstock_forward_tag, module._penstock_token, inputs)
        elif self._pipeline is not None:
            self._pipeline.finish_forward(whole=output is not None)


def _tensors_in(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _floats_in(given: Any) -> list[torch.Tensor]:
    """Hidden states, and not the ids and positions that every layer is given alike."""
    return [tensor for tensor in _tensors_in(given) if tensor.is_floating_point()]


def _path_from(anchor: nn.Module, tensor: BoundTensor) -> Path:
    module, place = tensor.places[0]
    name = next(name for name, child in anchor.named_modules(remove_duplicate=False) if child is module)
    return (*(name.split(".") if name else ()), place.attr, *place.inner)


def _clear(module: nn.Module, *attrs: str) -> None:
    for attr in attrs:
        module.__dict__.pop(attr, None)
