"""The two ends of a module's use of its unit, in eager and in compiled code.

[Note: windows] A unit's tensors look into its slot while its module runs, from the first pre-hook to the last hook, and
rest otherwise (see :mod:`penstock.model.tensor_guards`). The module's ``forward`` is wrapped for two cases that hooks
do not see: a direct call of ``module.forward(x)``, which gets a window of its own, and a ``BaseException`` such as
``KeyboardInterrupt``, for which torch runs no ``always_call`` hooks.
"""

from __future__ import annotations

import functools
import gc
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from penstock.errors import OutsideAccessError, StateError
from penstock.model.live_tensors import BoundStorage, BoundTensor, Path, live_tensors
from penstock.ops import new_tag
from penstock.runtime.prefetcher import SlotPipeline, release_left

__all__ = ["ForwardHook", "NotCopyable", "UnitHook"]

# Compiled code reads its tags and the token from the modules: see penstock.ops.
_TAG, _FORWARD_TAG, _TOKEN = "_penstock_tag", "_penstock_forward_tag", "_penstock_token"


class NotCopyable:
    """Refuses ``copy.deepcopy`` and ``pickle`` of whatever holds it."""

    def __reduce_ex__(self, protocol: Any = None) -> Any:
        raise StateError(
            "an offloaded model cannot be copied or pickled: its weights rest elsewhere; use its state_dict(), or call "
            "handle.remove() first"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__reduce_ex__()


class _Window:
    """One run of an anchor in one thread.

    Attributes:
        thread: its ident.
        running: the anchor's forward is on the stack. Before and after it, between hooks, an interrupt can end the run
            without a trace; then the slot may be taken away, and the tensors rest.
        has_returned: the forward has, perhaps with ``None``.
    """

    def __init__(self, hook: UnitHook) -> None:
        self._hook = hook
        self.thread = threading.get_ident()
        self.running = False
        self.has_returned = False

    def runs(self) -> bool:
        return self.running

    def drop(self) -> None:
        """The pipeline takes the slot away from an interrupted run."""
        self._hook.forget(self)


class UnitHook(NotCopyable):
    """Waits before ``anchor`` runs and releases after it, on behalf of one unit.

    With ``pipeline=None`` it traces the same ops and moves nothing: the reference for equality under a compiler
    (contract 1). ``token``: of :mod:`penstock.ops`, one for all hooks of an offload. ``session``: what promotes
    tensors that are used elsewhere; ``None`` where tensors do not rest. ``siblings``: all hooks of the offload.
    """

    def __init__(
        self,
        anchor: nn.Module,
        unit: int,
        storages: Sequence[BoundStorage],
        pipeline: SlotPipeline | None,
        token: torch.Tensor,
        session: Session | None = None,
        siblings: Sequence[UnitHook] = (),
    ) -> None:
        self._unit = unit
        self._siblings = siblings
        self._pipeline = pipeline
        self._session = session
        self._storages = storages
        self._tensors = [tensor for storage in storages for tensor in storage.tensors]
        self._paths = tuple(_path_from(anchor, tensor) for tensor in self._tensors)
        self._anchor = anchor
        # Shared with promotion, which also decides where a tensor looks. Held for pointer swaps only, never for copies.
        self._lock = threading.RLock() if session is None else session.tensor_lock
        self._windows: list[_Window] = []
        self._token = token
        self._handles: list[RemovableHandle] = []
        # Code compiled before the hooks were there must not run without them. torch.compile does not guard on hooks,
        # but it does on whether a module has a forward of its own.
        self._wrapper = forward_wrapper(anchor, self._forward)

    def attach(self) -> None:
        """Put the hooks in place; an interrupt leaves what :meth:`remove` takes off."""
        for bound in self._tensors if self._session is None else ():
            bound.note_version()
        anchor = self._anchor
        anchor.__dict__[_TAG] = new_tag(self, self._tensors[0].tensor.device)
        anchor.__dict__[_TOKEN] = self._token
        # The wait goes before every other hook, since those may read weights; the release after every other hook.
        self._handles.append(anchor.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True))
        self._handles.append(anchor.register_forward_hook(self._after, always_call=True))
        anchor.__dict__["forward"] = self._wrapper

    def remove(self) -> None:
        """Take the hooks off. Compiled code that still holds them finds ops without effect."""
        self._pipeline = None
        for handle in self._handles:
            handle.remove()
        unwrap_forward(self._anchor, self._wrapper)
        _clear(self._anchor, _TAG, _TOKEN)

    @property
    def anchor(self) -> nn.Module:
        """The module that reads the unit."""
        return self._anchor

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is inside a forward of the anchor."""
        return self._my_window(running=True) is not None

    @property
    def first_path(self) -> Path:
        """From the anchor to one of the unit's tensors."""
        return self._paths[0]

    # -- compiled code ----------------------------------------------------------------------------------------------

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

    # Without kwargs when another thread calls the module while the hook is taken off.
    def _before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if torch.compiler.is_compiling():
            if self._session is not None:
                self.stay_in_slots()
            tensors = list(live_tensors(module, self._paths))
            # Autograd would take a write to a leaf amiss, and engines that hide weights from the compiler do not train.
            inputs = [] if torch.is_grad_enabled() else _floats_in((args, kwargs))
            torch.ops.penstock.wait(module._penstock_tag, module._penstock_token, tensors, inputs)
        elif self._pipeline is not None:
            _refuse_tracers(args, kwargs)
            self._open(self._pipeline)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            tensors = list(live_tensors(module, self._paths))
            outputs = _tensors_in(output)
            torch.ops.penstock.release(module._penstock_tag, module._penstock_token, tensors, outputs)
            if self._session is not None:
                self._session.check_trace()
            return None
        window = self._my_window(running=False)
        if self._pipeline is None or window is None:
            return None  # called because what came before the module has raised
        return self._close(self._pipeline, window, output)

    # -- eager code: see the note on windows ------------------------------------------------------------------------

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        pipeline, window = self._pipeline, self._my_window(running=False)
        if pipeline is None:
            return original(*args, **kwargs)
        called_directly = window is None
        if window is None:  # or what a hook of the module's ran has taken the slot
            _refuse_tracers(args, kwargs)
            window = self._open(pipeline)
        try:
            window.running = True
            output = self._run(original, args, kwargs)
            window.running, window.has_returned = False, True
        except BaseException as error:
            window.running = False
            if called_directly or not isinstance(error, Exception):
                self._close(pipeline, window, None)
            raise
        return self._close(pipeline, window, output) if called_directly else output

    def _run(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            return original(*args, **kwargs)

    def _pack(self, saved: torch.Tensor) -> Any:
        """Keep autograd from holding views of a slot: the bytes there change."""
        seen = next((bound for bound in self._tensors if bound.offset_in_slot(saved) is not None), None)
        return saved if seen is None else _NoBackward(seen.info.name)

    def _open(self, pipeline: SlotPipeline) -> _Window:
        window = _Window(self)
        try:
            pipeline.wait(self._unit, window)
            with self._lock:
                if not self._windows:
                    for bound in self._tensors:
                        bound.open()
                self._windows.append(window)
        except BaseException:
            self._close(pipeline, window, None)
            raise
        return window

    def _close(self, pipeline: SlotPipeline, window: _Window, output: Any) -> Any:
        """Let the tensors rest and the slot go.

        Returns:
            ``output``, with views of the slot replaced by the same views of promoted tensors.
        """
        try:
            with self._lock:
                was_open = window in self._windows
                if was_open:
                    self._windows.remove(window)
                if not self._windows:
                    self._rest()
                # Before another thread can open a window: what its operators look into is no view that was kept.
                has_returned = window.has_returned or output is not None
                if was_open and has_returned and self._session is not None:
                    output = self._without_views(output, self._session)
        finally:
            pipeline.release(self._unit, window)
        return output

    def _rest(self) -> None:
        if self._session is None:
            for bound in self._tensors:
                bound.check()
                bound.note_version()
        elif moved := [bound for bound in self._tensors if not bound.rest()]:
            raise moved[0].moved()

    def forget(self, window: _Window) -> None:
        """An interrupted run: its slot is gone."""
        with self._lock:
            if window in self._windows:
                self._windows.remove(window)
            if not self._windows:
                for bound in self._tensors:
                    bound.rest()

    def end_interrupted(self, pipeline: SlotPipeline) -> None:
        """An interrupt has ended the forward that the calling thread was in, and whatever ran inside it."""
        me = threading.get_ident()
        for window in [window for window in self._windows if window.thread == me]:
            self._close(pipeline, window, None)
        if not self._windows:
            for bound in self._tensors:
                bound.rest()

    # The compiler runs this while it traces the hooks, and keeps the (absent) result as a constant. The mark is what
    # torch.compiler.assume_constant_result sets; that function would import all of the compiler here.
    def stay_in_slots(self) -> None:
        """Compiled code relies on addresses: the tensors rest no more.

        Nor do those of anchors of the same class, which may share the code: its guards compare dispatch keys.
        """
        with self._lock:
            for hook in self._siblings:
                if type(hook.anchor) is type(self._anchor):
                    for bound in hook._tensors:
                        bound.stay_in_slot()

    stay_in_slots._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _my_window(self, running: bool) -> _Window | None:
        """The latest window of the calling thread, if its forward runs, or does not, as asked."""
        me = threading.get_ident()
        mine = next((window for window in reversed(self._windows) if window.thread == me), None)
        return mine if mine is not None and mine.running == running else None

    # -- what outlives a window -------------------------------------------------------------------------------------

    def _without_views(self, output: Any, session: Session) -> Any:
        """Find views of the slot that outlive the run: promote what ``output`` holds, refuse what is kept elsewhere."""
        is_open = bool(self._windows)  # in other threads
        if not any(bound.is_viewed(is_open) for bound in self._tensors):
            return output
        replaced: dict[int, torch.Tensor] = {}  # in the old output, which torch still holds
        for storage in self._storages:
            output, held = session.rebase(storage, output)
            replaced |= held
        for bound in self._tensors if not is_open else ():
            if bound.is_viewed(len(replaced)) and (gc.collect() or bound.is_viewed(len(replaced))):
                raise _kept_view(bound, self._anchor)
        return output


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
        session: Session | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._session = session
        self._hooks = hooks
        self._units = tuple((hook.anchor, (hook.first_path,)) for hook in hooks)
        # One per call; weak, so that no line at the end of a forward has to take it out, which an interrupt may skip.
        self._running: weakref.WeakSet[_Running] = weakref.WeakSet()
        self._ends = (entry, model)
        self._token = token
        self._handles: list[RemovableHandle] = []
        self._wrapper = forward_wrapper(model, self._forward)

    def attach(self) -> None:
        """Put the hooks in place; an interrupt leaves what :meth:`remove` takes off."""
        entry, model = self._ends
        tag = new_tag(self, self._token.device)
        for module in self._ends:
            module.__dict__[_FORWARD_TAG] = tag
            module.__dict__[_TOKEN] = self._token
        self._handles.append(entry.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True))
        self._handles.append(model.register_forward_hook(self._after, always_call=True))
        if self._session is not None:
            model.__dict__["forward"] = self._wrapper

    def remove(self) -> None:
        """Take the hooks off."""
        self._pipeline = None
        for handle in self._handles:
            handle.remove()
        unwrap_forward(self._ends[1], self._wrapper)
        for module in self._ends:
            _clear(module, _FORWARD_TAG, _TOKEN)

    def enter_compiled(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._pipeline is not None:
            self._pipeline.begin_forward()

    def leave_compiled(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._pipeline is not None:
            self._pipeline.finish_forward()

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is inside a forward of the model."""
        me = threading.get_ident()
        return any(running.thread == me for running in self._running)

    def _before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if torch.compiler.is_compiling():
            torch.ops.penstock.begin(module._penstock_forward_tag, module._penstock_token)
        elif (pipeline := self._pipeline) is not None:
            _refuse_tracers(args, kwargs)
            try:
                pipeline.begin_forward()
            except BaseException:
                self._end_interrupted(pipeline)
                raise

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            inputs = [tensor for anchor, paths in self._units for tensor in live_tensors(anchor, paths)]
            inputs += _tensors_in(output)
            torch.ops.penstock.join(module._penstock_forward_tag, module._penstock_token, inputs)
            if self._session is not None:
                self._session.check_trace()
        elif (pipeline := self._pipeline) is not None:
            try:
                pipeline.finish_forward(whole=output is not None)
            except BaseException:
                self._end_interrupted(pipeline)
                raise

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        running = _Running()  # ends with this frame
        pipeline = self._pipeline
        try:
            self._running.add(running)
            return original(*args, **kwargs)
        except BaseException as error:
            self._running.discard(running)  # a traceback may keep the frame
            # torch runs hooks with always_call for Exceptions only.
            if pipeline is not None and not isinstance(error, Exception):
                traceback.clear_frames(error.__traceback__)  # their locals may be views of slots
                self._end_interrupted(pipeline)
            raise

    def _end_interrupted(self, pipeline: SlotPipeline) -> None:
        """No hook will: an interrupt has ended the forward of the calling thread."""
        pipeline.abandon()
        if self._session is not None:
            release_left(self._session.tensor_lock)
        for hook in self._hooks:
            hook.end_interrupted(pipeline)
        pipeline.finish_forward(whole=False)


class _Running:
    """A forward of the model that the calling thread is in."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()


class Session(Protocol):
    """What hooks need of the offload that they belong to."""

    tensor_lock: threading.RLock

    def check_trace(self) -> None:
        """Raise ``OutsideAccessError`` if the graph that is being traced uses a slot outside of wait and release."""

    def rebase(self, storage: BoundStorage, output: Any) -> tuple[Any, dict[int, torch.Tensor]]:
        """``output`` with views of ``storage`` in its slot replaced, and the tensors that it held, by their ids."""


class _NoBackward:
    """What autograd gets in place of a view of a slot."""

    def __init__(self, name: str) -> None:
        self.name = name


def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, _NoBackward):
        raise StateError(
            f"a backward pass needs {saved.name}, whose bytes have left the device after its module ran: penstock is "
            f"for inference. Run the forward under torch.no_grad(), or keep the tensor resident "
            f"(rules=[({saved.name!r}, 'resident')])"
        )
    tensor: torch.Tensor = saved
    return tensor


def forward_wrapper(module: nn.Module, around: Callable[..., Any]) -> Callable[..., Any]:
    """What to hang on ``module`` as its ``forward``, so that ``around(original, ...)`` stands before it."""
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return around(original, *args, **kwargs)

    forward.__dict__["_penstock_original"] = vars(module).get("forward")
    return forward


def unwrap_forward(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """Take a wrapper off, unless another library has wrapped ``forward`` since: its wrapper stays."""
    if vars(module).get("forward") is not wrapper:
        return
    before = vars(wrapper)["_penstock_original"]
    if before is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = before


def _refuse_tracers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ``StateError`` under a tracer, which would record what slots hold at this moment."""
    tracer = None
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        tracer = "torch.jit.trace"
    elif torch._C._functorch.peek_interpreter_stack() is not None:
        tracer = "a transform of torch.func (vmap, grad, linearize, ...)"
    elif torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        tracer = "make_fx"
    elif any(isinstance(value, torch.fx.Proxy) for value in (*args, *(kwargs or {}).values())):
        tracer = "torch.fx.symbolic_trace"
    if tracer is not None:
        raise StateError(
            f"{tracer} would record what slots hold at this moment: call handle.remove() first, trace, then offload "
            f"again; torch.compile and torch.export need no removal"
        )


def _kept_view(bound: BoundTensor, anchor: nn.Module) -> OutsideAccessError:
    name = bound.info.name
    return OutsideAccessError(
        f"a view of {name} was kept beyond the forward of its {type(anchor).__name__}, where its bytes leave the "
        f"device: keep the tensor resident (rules=[({name!r}, 'resident')], --offload-rule {name}=resident), or let "
        f"the module keep a copy (.clone())"
    )


def _tensors_in(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _floats_in(given: Any) -> list[torch.Tensor]:
    """Hidden states, and not the ids and positions that every layer is given alike."""
    return [tensor for tensor in _tensors_in(given) if tensor.is_floating_point()]


def _path_from(anchor: nn.Module, tensor: BoundTensor) -> Path:
    module, place = tensor.places[0]
    name = next(name for name, child in anchor.named_modules() if child is module)
    return (*(name.split(".") if name else ()), place.attr, *place.inner)


def _clear(module: nn.Module, *attrs: str) -> None:
    for attr in attrs:
        module.__dict__.pop(attr, None)
