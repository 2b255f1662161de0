"""The two ends of a module's use of its unit, in eager and in compiled code.

[Note: windows] A unit's tensors view its slot while its module runs, from the first pre-hook to the last hook, and
are placeholders otherwise (see :mod:`headrace.model.live_tensors`). The module's ``forward`` is wrapped for two cases
that hooks do not see: a direct call of ``module.forward(x)``, which gets a window of its own, and a ``BaseException``
such as ``KeyboardInterrupt``, for which torch runs no ``always_call`` hooks.

compile_ops.py has the ops that stand for the hooks in compiled code.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import sys
import threading
import time
import traceback
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from headrace.errors import ModelChangedError, OutsideAccessError, StateError
from headrace.model.live_tensors import BoundStorage, BoundTensor, Saved, live_tensors, own_forward, resident_rule
from headrace.model.torch_private import leave_to_python
from headrace.model.tracing import refuse_export, refuse_tracers, traced_graph
from headrace.runtime.compile_ops import (
    END_OF_GRADIENTS,
    HOOK_BY_TAG,
    leave_out_graph_inputs,
    mark_whole_forward,
    tensors_in,
)
from headrace.runtime.forwards import release_left
from headrace.runtime.outside_access import NotCopyable, Promoter, is_on_stack
from headrace.runtime.prefetcher import Prefetcher
from headrace.runtime.slot import Reader

# Compiled code reads its tags and the token from the modules: see the note on ordering edges.
_TAG, _FORWARD_TAG, _TOKEN, _END = "_headrace_tag", "_headrace_forward_tag", "_headrace_token", "_headrace_end"

VIEW_TIMEOUT_S = 0.5  # in which another thread is to drop its views of a weight in its slot


class _Window(Reader):
    """One run of a unit's module in one thread.

    Attributes:
        running: the module's forward is on the stack. Before and after it, between hooks, an interrupt can end the run
            without a trace; then the slot may be taken away, and the tensors become placeholders.
        has_returned: the forward has, perhaps with ``None``.
    """

    def __init__(self, hook: UnitHook) -> None:
        super().__init__()
        self._hook = hook
        self.running = False
        self.has_returned = False

    def goes_on(self, forward: int | None) -> bool:
        return self.running

    def drop(self) -> None:
        self._hook.forget(self)


class _ModuleHook(NotCopyable):
    """A hook before ``entry`` runs, one after ``module`` has run, and a wrapper around its ``forward``.

    With ``prefetcher=None`` it traces the same ops and moves nothing: the reference for equality under a compiler
    (contract 1).

    Args:
        tag_attr: the attribute of both modules at which compiled code finds the tag of this hook.
        token: see the note on ordering edges; one for all hooks of an offload.
        promoter: handles tensors that are used elsewhere; ``None`` where tensors are never placeholders.
        unhooked: the wrapper does all of it, see :func:`unhooked_modules`.
        traced_in_forward: the wrapper traces the ops, and not the hooks: for the module that is compiled as a whole.
    """

    def __init__(
        self,
        entry: nn.Module,
        module: nn.Module,
        tag_attr: str,
        prefetcher: Prefetcher | None,
        token: torch.Tensor,
        promoter: Promoter | None,
        unhooked: bool = False,
        traced_in_forward: bool = False,
    ) -> None:
        self._entry = entry
        self._module = module
        self._tag_attr = tag_attr
        self._prefetcher = prefetcher
        self._token = token
        self._promoter = promoter
        self._handles: list[RemovableHandle] = []
        self._own_forward = vars(module).get("forward")  # of the instance, perhaps another library's
        # Of those that share compiled code; not the class itself, which may be gone before them.
        self._kind: tuple[object, ...] = (type(module).__module__, type(module).__qualname__)
        self._unhooked = unhooked
        self._traced_in_forward = traced_in_forward
        ends = (self._trace_before, self._trace_after) if unhooked or traced_in_forward else None
        self._wrapper = _wrapped_forward(module, self._forward, self._kind, promoter, ends, self._ends_trace)

    # Where hooks of the root are traced by themselves, what it computes after its last unit is in the wrapper's graph.
    _ends_trace = False
    _hook_id: int

    # Methods of the subclasses: in compiled code, in eager code, and around the module's forward in eager code.
    _trace_before: Callable[..., Any]
    _trace_after: Callable[..., Any]
    _run_before: Callable[..., Any]
    _run_after: Callable[..., Any]
    _forward: Callable[..., Any]

    # Without kwargs when another thread calls the module while the hook is taken off.
    def _before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if not torch.compiler.is_compiling():
            if module is not self._entry and vars(module).get("forward") == self._wrapper:
                raise StateError(
                    f"a copy of a {type(module).__name__} that is offloaded was called, as nn.DataParallel makes them: "
                    f"it would run with the weights of the original. Call handle.remove() before the model is copied, "
                    f"or run it in one process for each device, which offloads a model of its own"
                )
            self._run_before(module, args, kwargs)
        elif not self._traced_in_forward:
            self._trace_before(module, args, kwargs)

    def _after(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        kwargs, output = rest if len(rest) == 2 else (None, *rest)
        if not torch.compiler.is_compiling():
            return self._run_after(module, args, output)
        return None if self._traced_in_forward else self._trace_after(module, args, kwargs, output)

    def attach(self) -> None:
        """Put the hooks in place; an interrupt leaves what :meth:`remove` takes off."""
        with torch.inference_mode(False):  # autograd saves it
            tag = torch.zeros(1, dtype=torch.int64, device=self._token.device)  # kept alive by the modules
        HOOK_BY_TAG[tag.data_ptr()] = self
        for module in (self._entry, self._module):
            vars(module).update({self._tag_attr: tag, _TOKEN: self._token, _END: END_OF_GRADIENTS})
        if self._unhooked:
            return
        # The wait goes before every other hook, since those may read weights; the release after every other hook.
        before, after = (_of_kind(method, self._kind) for method in (self._before, self._after))
        # Dynamo breaks a graph at an RNN, and would do so in the middle of hooks that look for its weights.
        if any(isinstance(each, nn.RNNBase) for each in self._module.modules()):
            before, after = map(leave_to_python, (before, after))
        self._handles.append(self._entry.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._register_after(after)

    def _register_after(self, hook: Callable[..., Any]) -> None:
        """``register_forward_hook`` with ``always_call``, by the same id in each module.

        Dynamo guards on ids of hooks that are always called, so that modules with other ids would be compiled again.
        """
        module = self._module
        flags = [module._forward_hooks_with_kwargs, module._forward_hooks_always_called]
        handle = RemovableHandle(module._forward_hooks, extra_dict=flags)
        if self._hook_id not in module._forward_hooks:  # by another offload
            handle.id = self._hook_id
        self._handles.append(handle)
        for flag in flags:
            flag[handle.id] = True
        module._forward_hooks[handle.id] = hook

    def remove(self) -> None:
        """Take the hooks off. Compiled code that still holds them finds ops without effect."""
        self._prefetcher = None  # another thread that calls a hook now has it, or finds none
        for handle in self._handles:
            handle.remove()
        _unwrap(self._module, self._wrapper, self._own_forward)
        for module in (self._entry, self._module):
            for name in (self._tag_attr, _TOKEN, _END):
                vars(module).pop(name, None)


class UnitHook(_ModuleHook):
    """Waits for a unit before ``module`` runs, and releases it afterwards.

    ``siblings``: all hooks of the offload. The other arguments are those of the base class.
    """

    _hook_id = RemovableHandle(OrderedDict()).id

    def __init__(
        self,
        module: nn.Module,
        unit: int,
        storages: Sequence[BoundStorage],
        prefetcher: Prefetcher | None,
        token: torch.Tensor,
        promoter: Promoter | None = None,
        siblings: Sequence[UnitHook] = (),
        unhooked: bool = False,
        traced_in_forward: bool = False,
    ) -> None:
        super().__init__(module, module, _TAG, prefetcher, token, promoter, unhooked, traced_in_forward)
        self._unit = unit
        self._siblings = siblings
        self._storages = storages
        self._tensors = [tensor for storage in storages for tensor in storage.tensors]
        names = {child: name for name, child in module.named_modules()}
        places = [tensor.places[0] for tensor in self._tensors]
        # From the module itself, whose name is empty, or from one below it.
        self._paths = tuple((*filter(None, names[at].split(".")), place.attr, *place.inner) for at, place in places)
        self._kind += self._paths  # which the code of the hooks goes along, and that of the wrapper does not
        # Shared with promotion, which also decides where a tensor looks. Held for pointer swaps only, never for copies.
        self._lock = threading.RLock() if promoter is None else promoter.tensor_lock
        self._windows: list[_Window] = []

    def attach(self) -> None:
        super().attach()
        # Code compiled before the hooks were there must not run without them. torch.compile does not guard on hooks,
        # but it does on whether a module has a forward of its own.
        self._module.__dict__["forward"] = self._wrapper

    def backward_error(self, name: str | None = None) -> StateError:
        """Error of a backward pass that needs the weight ``name``, or in compiled code any of this unit."""
        name = name or self._tensors[0].name
        return StateError(
            f"a backward pass needs {name}, whose bytes have left the device after its {type(self._module).__name__} "
            f"ran: expected forwards alone, since headrace is for inference. Run them under torch.inference_mode() or "
            f"torch.no_grad(), call remove() before training, or keep the tensor resident "
            f"(rules=[({name!r}, 'resident')])"
        )

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is inside a forward of the module."""
        return self._my_window(running=True) is not None

    # -- compiled code ----------------------------------------------------------------------------------------------

    def enter_compiled(self, tensors: Sequence[torch.Tensor]) -> None:
        if (prefetcher := self._prefetcher) is None:
            return
        given = [torch.Tensor.data_ptr(tensor) for tensor in tensors]
        for bound, path in zip(self._tensors, self._paths, strict=True):
            if prefetcher.replays.in_capture:
                bound.note_replays()
            bound.note_version(known=False)  # the ops count as writes, before (torch 2.11) or after they run
            bound.check()
            bound.refuse_copy(given, self._module, path)
        prefetcher.wait(self._unit)

    def leave_compiled(self, tensors: Sequence[torch.Tensor]) -> None:
        if (prefetcher := self._prefetcher) is None:
            return
        for bound in self._tensors:
            bound.invalidate_saved()
        prefetcher.release(self._unit)

    def _trace_before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        refuse_export()
        self.pin_to_slots()
        # All of them for guards, since code is shared by modules of which other tensors were promoted.
        tensors = list(live_tensors(module, self._paths)) and list(live_tensors(module, self._in_slots()))
        # Hidden states, and not the ids and positions that every layer is given alike. With gradients autograd
        # would refuse a write to a leaf, and engines that hide weights from the compiler do not train.
        given = [] if torch.is_grad_enabled() else tensors_in((args, kwargs))
        inputs = [tensor for tensor in given if tensor.is_floating_point()]
        with torch.no_grad():  # or the compiler would hand over copies of weights that require gradients
            torch.ops.headrace.wait(module._headrace_tag, module._headrace_token, tensors, inputs)
            leave_out_graph_inputs()

    def _trace_after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        tensors = list(live_tensors(module, self._paths)) and list(live_tensors(module, self._in_slots()))
        outputs = tensors_in(output)
        with torch.no_grad():
            torch.ops.headrace.release(module._headrace_tag, module._headrace_token, tensors, outputs)
            if self._promoter is not None:
                self._promoter.check_trace()  # before outputs are left out, which may be views of weights
            leave_out_graph_inputs()
        if not torch.is_grad_enabled():
            return None
        sources = [*tensors_in((args, kwargs)), *live_tensors(module, self._trained())]
        sources = [source for source in sources if source.requires_grad]
        return tree_map_only(torch.Tensor, functools.partial(_end_gradients, module, sources), output)

    @leave_to_python
    def _run_before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if (prefetcher := self._prefetcher) is not None:
            refuse_tracers(args, kwargs)
            self._open(prefetcher)

    @leave_to_python
    def _run_after(self, module: nn.Module, args: Any, output: Any) -> Any:
        prefetcher, window = self._prefetcher, self._my_window(running=False)
        if prefetcher is None or window is None:
            return None  # called because what came before the module has raised
        return self._close(prefetcher, window, output)

    # The compiler runs this while it traces the hooks, and keeps the (absent) result as a constant. The attribute is
    # what torch.compiler.assume_constant_result sets; that function would import all of the compiler here.
    def pin_to_slots(self) -> None:
        """Compiled code relies on addresses: from now on the tensors have those of their slots.

        So have those of modules of the same class, which may share the code: its guards compare dispatch keys.
        """
        if self._promoter is None:
            return
        traced_graph(self._promoter.inputs_outside)
        with self._lock:
            for hook in self._siblings:
                if type(hook._module) is type(self._module) and (prefetcher := hook._prefetcher) is not None:
                    for bound in hook._tensors:
                        bound.pin_to_slot(functools.partial(prefetcher.replays.is_read_here, hook._unit))

    pin_to_slots._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _in_slots(self) -> tuple[tuple[str, ...], ...]:
        """Paths of what was not promoted: no copy brings the rest, and a declared write would spoil views of it."""
        promoted = [] if self._promoter is None else self._promoter.promoted
        names = [storage.info.name for storage in self._storages for _ in storage.tensors]
        return tuple(path for name, path in zip(names, self._paths, strict=True) if name not in promoted)

    _in_slots._dynamo_marked_constant = True  # type: ignore[attr-defined] # see pin_to_slots

    def _trained(self) -> tuple[tuple[str, ...], ...]:
        """Paths of the parameters in the module that no unit brings and that want gradients, such as adapters."""
        offloaded = {id(bound.tensor) for hook in (self, *self._siblings) for bound in hook._tensors}
        parameters = self._module.named_parameters()
        return tuple(tuple(name.split(".")) for name, p in parameters if p.requires_grad and id(p) not in offloaded)

    _trained._dynamo_marked_constant = True  # type: ignore[attr-defined] # see pin_to_slots

    # -- eager code: see the note on windows ------------------------------------------------------------------------

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        prefetcher, window = self._prefetcher, self._my_window(running=False)
        if prefetcher is None:
            return original(*args, **kwargs)
        called_directly = window is None
        if window is None:  # or the model, called by a hook of the module, has taken the slot
            refuse_tracers(args, kwargs)
            window = self._open(prefetcher)
        try:
            window.running = True
            if torch.is_grad_enabled():
                with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                    output = original(*args, **kwargs)
            else:
                output = original(*args, **kwargs)
            window.running, window.has_returned = False, True
        except BaseException as error:
            window.running = False
            if called_directly or not isinstance(error, Exception):
                self._close(prefetcher, window, None)
            raise
        return self._close(prefetcher, window, output) if called_directly else output

    def _pack(self, saved: torch.Tensor) -> Saved | str:
        """Keep autograd from holding views of a slot, whose bytes change: it gets the name of the weight instead."""
        for bound in self._tensors:
            if bound.offset_in_slot(saved) is not None:
                return bound.name
        return Saved(saved)

    def _unpack(self, saved: Saved | str) -> torch.Tensor:
        if isinstance(saved, str):
            raise self.backward_error(saved)
        return saved.tensor()

    def _open(self, prefetcher: Prefetcher) -> _Window:
        window = _Window(self)
        try:
            prefetcher.wait(self._unit, window)
            with self._lock:
                if not self._windows:
                    for bound in self._tensors:
                        bound.open()
                self._windows.append(window)
        except BaseException:
            self._close(prefetcher, window, None)
            raise
        return window

    def _close(self, prefetcher: Prefetcher, window: _Window, output: Any) -> Any:
        """Make the tensors placeholders and release the slot.

        Returns:
            ``output``, with views of the slot replaced by the same views of promoted tensors.
        """
        try:
            with self._lock:
                was_open = window in self._windows
                if error := self.forget(window):
                    raise error
                # Before another thread can open a window: views that its operators make are not kept views.
                has_returned = window.has_returned or output is not None
                if was_open and has_returned and self._promoter is not None:
                    output = self._without_views(output, self._promoter)
        finally:
            prefetcher.release(self._unit, window)
        return output

    def forget(self, window: _Window) -> ModelChangedError | None:
        """Make the tensors placeholders if no other window is open; an interrupted run has lost its slot.

        Returns:
            what is wrong with one of the tensors.
        """
        with self._lock:
            if window in self._windows:
                self._windows.remove(window)
            return None if self._windows else self._to_placeholders()

    def _to_placeholders(self) -> ModelChangedError | None:
        errors = [bound.to_placeholder() for bound in self._tensors]  # all of them, also if one is wrong
        return next(filter(None, errors), None)

    def end_interrupted(self, prefetcher: Prefetcher) -> None:
        """An interrupt has ended the forward that the calling thread was in, and whatever ran inside it."""
        me = threading.get_ident()
        for window in [window for window in self._windows if window.thread == me]:
            self._close(prefetcher, window, None)
        if not self._windows:
            self._to_placeholders()

    def _my_window(self, running: bool) -> _Window | None:
        """The latest window of the calling thread, if its forward runs, or does not, as asked."""
        me = threading.get_ident()
        for window in reversed(self._windows):
            if window.thread == me:
                return window if window.running == running else None
        return None

    def _without_views(self, output: Any, promoter: Promoter) -> Any:
        """Find views of the slot that outlive the run: promote what ``output`` holds, refuse what is kept elsewhere."""
        is_open = bool(self._windows)  # in other threads
        if True not in [bound.is_viewed(is_open) for bound in self._tensors]:
            return output
        replaced: dict[int, torch.Tensor] = {}  # in the old output, which torch still holds
        for storage in self._storages:
            output, held = promoter.rebase(storage, output)
            replaced |= held
        for bound in self._tensors if not is_open else ():
            if bound.is_viewed(len(replaced)) and _stays_viewed(bound, len(replaced)):
                raise OutsideAccessError(
                    f"a view of {bound.name} was kept beyond the forward of its {type(self._module).__name__}, where "
                    f"its bytes leave the device: keep the tensor resident ({resident_rule(bound.name)}), or let the "
                    f"module keep a copy (.clone())"
                )
        return output


def _stays_viewed(bound: BoundTensor, num_known: int) -> bool:
    """Whether views of ``bound`` in its slot stay: garbage goes, and so do those of a product in another thread."""
    gc.collect()
    deadline = time.monotonic() + VIEW_TIMEOUT_S
    while bound.is_viewed(num_known):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.001)
    return False


class ForwardHook(_ModuleHook):
    """Begins and ends a forward of ``model``: its first units are copied, and slots are made ready for the next one.

    ``entry`` is the module whose forward begins one; it is ``model`` unless an engine runs the layers itself.
    """

    _ends_trace = True
    _hook_id = RemovableHandle(OrderedDict()).id

    def __init__(
        self,
        model: nn.Module,
        entry: nn.Module,
        hooks: Sequence[UnitHook],
        prefetcher: Prefetcher | None,
        token: torch.Tensor,
        promoter: Promoter | None = None,
        unhooked: bool = False,
        traced_in_forward: bool = False,
    ) -> None:
        super().__init__(entry, model, _FORWARD_TAG, prefetcher, token, promoter, unhooked, traced_in_forward)
        self._hooks = hooks
        # Eager forwards take turns. Outside of its module's run a weight has to be a placeholder, so that reads are
        # noticed; while another thread's run has it in its slot, it is none.
        self._turn = threading.RLock()
        self._units = tuple((hook._module, hook._paths[:1]) for hook in hooks)
        self.before: Callable[[], None] = lambda: None  # what else a forward begins with

    def attach(self) -> None:
        super().attach()
        if self._promoter is not None or self._traced_in_forward:
            self._module.__dict__["forward"] = self._wrapper

    def begin_compiled(self, whole: bool) -> None:
        if (prefetcher := self._prefetcher) is not None:
            self.before()
            prefetcher.begin_forward(whole=whole)

    def join_compiled(self) -> None:
        if (prefetcher := self._prefetcher) is not None:
            prefetcher.finish_forward()

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is inside a forward of the model."""
        # From the stack: a list of running forwards would need a line at their end, which an interrupt may skip.
        return is_on_stack(ForwardHook._forward, [self])

    def _trace_before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        refuse_export()
        torch.ops.headrace.begin(module._headrace_forward_tag, module._headrace_token, False)

    def _trace_after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        units = [self._units[index] for index in self._in_slots()]
        inputs = [tensor for unit_module, paths in units for tensor in live_tensors(unit_module, paths)]
        inputs += tensors_in(output)
        torch.ops.headrace.join(module._headrace_forward_tag, module._headrace_token, inputs)
        mark_whole_forward()
        if self._promoter is not None:
            self._promoter.check_trace()

    @leave_to_python
    def _run_before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if (prefetcher := self._prefetcher) is not None:
            refuse_tracers(args, kwargs)
            try:
                self.before()
                prefetcher.begin_forward()
            except BaseException:
                self._end_interrupted(prefetcher)
                raise

    @leave_to_python
    def _run_after(self, module: nn.Module, args: Any, output: Any) -> None:
        if (prefetcher := self._prefetcher) is not None:
            try:
                prefetcher.finish_forward(whole=output is not None)
            except BaseException:
                self._end_interrupted(prefetcher)
                raise

    def _in_slots(self) -> tuple[int, ...]:
        """The units whose tensors stay in slots, so all that compiled code runs: no kernel takes a placeholder."""
        placeholders = [any(storage.is_placeholder for storage in hook._storages) for hook in self._hooks]
        return tuple(index for index, is_out in enumerate(placeholders) if not is_out)

    _in_slots._dynamo_marked_constant = True  # type: ignore[attr-defined] # see UnitHook.pin_to_slots

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        prefetcher = self._prefetcher
        try:
            with self._turn:
                return original(*args, **kwargs)
        except BaseException as error:
            # torch runs hooks with always_call for Exceptions only.
            if prefetcher is not None and not isinstance(error, Exception):
                traceback.clear_frames(error.__traceback__)  # their locals may be views of slots
                self._end_interrupted(prefetcher)
            raise

    def _end_interrupted(self, prefetcher: Prefetcher) -> None:
        """An interrupt has ended the forward of the calling thread: no hook will."""
        prefetcher.abandon()
        release_left(self._turn)
        if self._promoter is not None:
            release_left(self._promoter.tensor_lock)
        for hook in self._hooks:
            hook.end_interrupted(prefetcher)
        prefetcher.finish_forward(whole=False)


class CalledForwardHook(ForwardHook):
    """Wraps ``module.forward`` alone: for an engine that calls it past the module's hooks, and with ``unhooked``."""

    def attach(self) -> None:
        self._module.__dict__["forward"] = self._wrapper

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._run_before(self._module, args, kwargs)
        output = None
        try:
            output = super()._forward(original, *args, **kwargs)
        finally:
            self._run_after(self._module, args, output)
        return output


class AroundForward(NotCopyable):
    """Calls ``check`` in eager code before and after the ``forward`` of one of :func:`unhooked_modules`."""

    def __init__(self, module: nn.Module, check: Callable[[], None]) -> None:
        self._module, self._check, self._own_forward = module, check, vars(module).get("forward")
        self._wrapper = _wrapped_forward(module, self._forward, (type(module).__module__, type(module).__qualname__))
        module.__dict__["forward"] = self._wrapper

    def remove(self) -> None:
        """Give ``module`` its forward back."""
        _unwrap(self._module, self._wrapper, self._own_forward)

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._check()
        output = original(*args, **kwargs)
        self._check()
        return output


def new_token(device: torch.device) -> torch.Tensor:
    """Tensor that all ops of one offload declare as mutated: int64, shape ``[1]``, on ``device``."""
    return torch.zeros(1, dtype=torch.int64, device=device)


def unhooked_modules(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """torch's encoder layers and what is in them, with the layer: for hooks there torch leaves its fast path.

    That calls nothing in the layer, and rounds otherwise: on a GPU its GELU is the approximate one
    (``aten::_addmm_activation``), and under autocast of a CPU it has another dtype.
    """
    layers = (module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer))
    return {module: layer for layer in layers for module in layer.modules()}


def _unwrap(module: nn.Module, wrapper: types.MethodType, own: Any) -> None:
    """Give ``module`` its ``own`` forward back, or that of its class."""
    # A wrapper that another library has put around ours since stays. It may have bound ours anew, hence no `is`.
    if vars(module).get("forward") == wrapper:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


def _wrapped_forward(
    module: nn.Module,
    around: Callable[..., Any],
    kind: tuple[object, ...],
    promoter: Promoter | None = None,
    ends: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    ends_trace: bool = False,
) -> types.MethodType:
    """A ``forward`` for ``module`` that calls ``around(original, ...)`` in eager code and ``original`` in compiled.

    In compiled code ``ends`` are called before and after, in place of hooks; ``promoter`` checks the trace at the end,
    for writes alone unless it ``ends_trace``. ``kind``: see :func:`_of_kind`.
    """
    own = own_forward(module)

    # Dynamo takes a class that is allowed in graphs, as blocks of diffusers are, for a function without attributes.
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    traced = own or (module.forward if rules is not None and rules.is_callable_allowed(type(module)) else None)

    cls = type(module)

    @functools.wraps(module.forward)
    def forward(_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        nonlocal cls
        if not torch.compiler.is_compiling():
            if type(module) is not cls:
                if vars(module).get("forward") != wrapper:  # what wraps this may stand for the forward of either class
                    raise ModelChangedError(
                        f"{type(module).__name__} was a {cls.__name__} when its forward was wrapped while offloaded: "
                        f"call handle.remove() first, change the class and wrap forward, then offload again"
                    )
                cls = type(module)
            return around(own or functools.partial(type(module).forward, module), *args, **kwargs)
        # Dynamo of torch 2.11 cannot tell whether a method is true.
        original = functools.partial(type(module).forward, module) if traced is None else traced
        # Another library may have wrapped this and so keep it after remove(), which takes token and tags off.
        traced_ends = ends if hasattr(module, _TOKEN) else None
        if traced_ends is not None:
            traced_ends[0](module, args, kwargs)
        output = original(*args, **kwargs)
        if traced_ends is not None and (replaced := traced_ends[1](module, args, kwargs, output)) is not None:
            output = replaced
        if promoter is not None and ends_trace:
            promoter.check_trace()  # by its name: torch 2.11 cannot trace the bound method itself
        elif promoter is not None:
            promoter.check_writes()
        return output

    # A method, which libraries take apart and bind again. They would unwrap it to a forward without headrace.
    vars(forward).pop("__wrapped__")
    if (within := getattr(own, "__wrapped__", None)) is not None:
        forward.__wrapped__ = within
    with contextlib.suppress(TypeError, ValueError):  # of what has no signature
        given = inspect.signature(module.forward)
        bound_to = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = given.replace(parameters=[bound_to, *given.parameters.values()])  # type: ignore[attr-defined]
    wrapper = types.MethodType(_of_kind(forward, kind), module)
    return wrapper


def _of_kind(function: Any, kind: tuple[object, ...]) -> Any:
    """``function`` or method with a code object that only those of the same ``kind`` share.

    torch.compile keeps ``torch._dynamo.config.recompile_limit`` versions of a code object, 8, and where layers are
    compiled one by one hooks and wrappers are compiled by themselves: those of all kinds of layers would be too many.
    """
    plain = getattr(function, "__func__", function)
    copy = types.FunctionType(
        _code_of_kind(plain.__code__, kind), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    functools.update_wrapper(copy, plain)
    copy.__dict__ = dict(vars(plain))  # without what it is a copy of
    return copy if plain is function else types.MethodType(copy, function.__self__)


@functools.cache
def _code_of_kind(code: types.CodeType, kind: tuple[object, ...]) -> types.CodeType:
    return code.replace()


def _end_gradients(module: nn.Module, sources: list[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """``output``, from which a backward pass goes to our own error, and to no weight that has left the device."""
    if not output.requires_grad:
        return output
    # Autograd would find no fault with a slot that holds another unit: it saves a weight after the ops have run.
    tag, end = module._headrace_tag, module._headrace_end
    ended: torch.Tensor = torch.ops.headrace.end_gradients(tag, end, output.detach(), sources)
    return ended
