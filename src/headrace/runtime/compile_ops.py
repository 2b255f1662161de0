"""The ops that stand for hooks in compiled code: ``headrace::wait``, ``release``, ``begin`` and ``join``.

[Note: ordering edges] In compiled code the hooks are traced as ops: ``headrace::wait`` and ``release`` around a module,
``begin`` and ``join`` around a forward. A compiler may move any operation whose inputs are ready in its graph. Weights
are inputs of the graph, so without an edge ``(w - zero) * scale`` is ready from the start and would be hoisted above
the wait. An edge on the hidden state does not help, since this arithmetic reads no hidden state. So two ops around the
module declare the unit's own tensors, but none that was promoted, as *mutated*:

* ``wait(tag, token!, tensors!, inputs!)`` is declared to write them, so every read of the weight stays after it. It is
  declared to write what the module is given, too: a custom op of an engine may find its weights by the name of its
  layer and not among its arguments, and then the hidden states are all that holds it after the wait;
* ``release(tag, token!, tensors!, outputs!)`` writes them again, so it stays after every read of the weight, and
  writes what the module returned. Reading that would not be enough: an output that is cheap to compute (a row of an
  embedding) is inlined into whatever uses it later, and would be computed there from a slot that holds another unit.

Neither op computes anything; functionalisation sees an in-place operator and the inductor adds no copy of a weight.

``begin`` and ``join`` stand at the ends of a forward. ``join`` reads what the model returns and a tensor of every unit,
so it comes last. Dynamo compiles the hooks of the module that is called first by themselves, so the model's own ops
are traced by the wrapper around its ``forward``: one graph holds both, unless the forward has a graph break. A CUDA
graph of it may then leave copies to run beside later layers; ``begin`` is told so (``whole``) when ``join`` is traced.

All of them declare the offload's one ``token`` as mutated. It keeps them in the order of the program and from being
dropped as dead code. Without it nothing would hold the ``wait`` of a unit after the ``release`` of the one before it
in the same slot, because the compiler must not see that both view one memory: it would rebuild their tensors from
a common base, which it cannot do for several dtypes, and its cache would hand that code to a plan with other slots. So
every tensor in a slot has a storage of its own (``BoundStorage.point_at_slot``). The tag is not declared mutated: a
backend may hand a mutated tensor over as a copy, and the tag is identified by its address.

The unit is named by ``tag``, a one-element tensor identified by its address, and not by a number: a number would be a
constant of the graph, and an engine that compiles one layer and reuses the code for its siblings could not. Tags and
the token are attributes of the modules themselves, and tensors are found by their paths from there, so that code kept
on disk finds them again in the next process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from headrace.errors import StateError
from headrace.model.live_tensors import leave_placeholders
from headrace.model.tracing import traced_graph

# Hooks of modules and forwards (hooks.py), by the address of their tag.
HOOK_BY_TAG: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

_library = torch.library.Library("headrace", "DEF")


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The tensors in the nested containers of ``output``."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _hook_of(tag: torch.Tensor) -> Any:
    hook = HOOK_BY_TAG.get(tag.data_ptr())
    if hook is None:
        raise StateError(
            "compiled code refers to an offload that is gone; compile the model again (torch._dynamo.reset())"
        )
    return hook


def _define(name: str, signature: str, run: Callable[..., Any], fake: Callable[..., Any] = lambda *_: None) -> None:
    """Register the op ``name`` with its kernel, and ``fake`` for fake tensors: an op without output does nothing."""
    _library.define(name + signature)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"headrace::{name}", fake, lib=_library)


_Tensors = Sequence[torch.Tensor]


def _wait(tag: torch.Tensor, token: torch.Tensor, tensors: _Tensors, inputs: _Tensors) -> None:
    _hook_of(tag).enter_compiled(tensors)


def _release(tag: torch.Tensor, token: torch.Tensor, tensors: _Tensors, outputs: _Tensors) -> None:
    _hook_of(tag).leave_compiled(tensors)


def _begin(tag: torch.Tensor, token: torch.Tensor, whole: bool) -> None:
    _hook_of(tag).begin_compiled(whole)


def _join(tag: torch.Tensor, token: torch.Tensor, inputs: _Tensors) -> None:
    _hook_of(tag).join_compiled()


_define("wait", "(Tensor tag, Tensor(a!) token, Tensor(b!)[] tensors, Tensor(c!)[] inputs) -> ()", _wait)
_define("release", "(Tensor tag, Tensor(a!) token, Tensor(b!)[] tensors, Tensor(c!)[] outputs) -> ()", _release)
_define("begin", "(Tensor tag, Tensor(a!) token, bool whole) -> ()", _begin)
_define("join", "(Tensor tag, Tensor(a!) token, Tensor[] inputs) -> ()", _join)


def mark_whole_forward() -> None:
    """Tell the ``begin`` of the join just traced that the same graph holds both."""
    graph = traced_graph()
    if graph is None:
        return
    join = next(iter(reversed(graph.nodes)))
    for node in graph.find_nodes(op="call_function", target=torch.ops.headrace.begin):
        if node.args[0] is join.args[0]:
            node.args = (*node.args[:2], True)


mark_whole_forward._dynamo_marked_constant = True  # type: ignore[attr-defined] # see UnitHook.pin_to_slots in hooks.py


# Inductor takes the offset of as_strided from where a graph input begins, instead of where its storage does.
_MISREADS_OFFSETS = torch.__version__ < "2.13"


def leave_out_graph_inputs() -> None:
    """Take from the wait or release just traced what its graph is given, and has not computed.

    Where layers are compiled one by one a hook is a graph of its own, whose inputs may be views of one storage.
    Inductor copies such an input if an op writes it, before torch 2.13 from the wrong offset.

    Raises:
        StateError: such an input is kept, because the graph may have written it in place.
    """
    graph = traced_graph()
    if graph is None:
        return
    node = next(iter(reversed(graph.nodes)))
    *others, ordered = node.args
    ops = {torch.ops.headrace.wait, torch.ops.headrace.release}

    def is_given(tensor: torch.fx.Node) -> bool:
        # A wait may be early; a release must follow what writes an input in place.
        is_used = any(user.target not in ops for user in tensor.users)
        return tensor.op == "placeholder" and (node.target is torch.ops.headrace.wait or not is_used)

    kept = [tensor for tensor in ordered if not is_given(tensor)]
    for tensor in kept if _MISREADS_OFFSETS else ():
        if tensor.op == "placeholder" and tensor.meta["example_value"].storage_offset() != 0:
            raise StateError(
                f"a module returns {tensor.name}, an input of the compiled code that begins inside of its storage, and "
                f"torch {torch.__version__} would read it elsewhere: give the model a copy of it (.clone()), or use "
                f"torch 2.13 or newer"
            )
    node.args = (*others, kept)


leave_out_graph_inputs._dynamo_marked_constant = True  # type: ignore[attr-defined] # see UnitHook.pin_to_slots in hooks.py


# A backward pass of compiled code ends where it comes to the output of a unit's module: see UnitHook._trace_after. To
# autograd that output depends on this tensor, for which an op that raises would make the gradient, and on `sources`:
# autograd runs only what leads to the tensors whose gradients are asked for.
with torch.inference_mode(False):
    END_OF_GRADIENTS = torch.zeros(1, device="cpu", requires_grad=True)


def _refuse_backward(tag: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    raise _hook_of(tag).backward_error()


def _end_gradients(tag: torch.Tensor, end: torch.Tensor, output: torch.Tensor, sources: _Tensors) -> torch.Tensor:
    return output.clone()  # an op may not return what it is given


def _save_tag(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.shapes = [source.shape for source in inputs[3]]


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    refused = torch.ops.headrace.refuse_backward(*ctx.saved_tensors, gradient)
    # All are made of what is refused, or a compiler would drop the op where only they are asked for.
    of_sources = [refused.to(gradient.device).expand(shape) for shape in ctx.shapes]
    return None, refused, None, of_sources


_define(
    "end_gradients",
    "(Tensor tag, Tensor end, Tensor output, Tensor[] sources) -> Tensor",
    _end_gradients,
    _end_gradients,
)
leave_placeholders(_library, "end_gradients")  # such as the experts of a cache, of which it only needs the history
_define("refuse_backward", "(Tensor tag, Tensor gradient) -> Tensor", _refuse_backward, lambda *_: torch.empty(1))
torch.library.register_autograd("headrace::end_gradients", _backward, setup_context=_save_tag, lib=_library)
