"""Tracers: Dynamo, whose graph hooks read and change, and those that would record the bytes of a slot."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from headrace.errors import StateError
from headrace.model import torch_private
from headrace.model.live_tensors import reading_pinned


def traced_graph(check: Callable[[fx.Graph], Iterable[int]] | None = None) -> fx.Graph | None:
    """The graph that Dynamo is tracing; ``None`` under another tracer, such as torch.export without Dynamo.

    ``check``: our hooks are in it, or around it, so what is compiled of it may read pinned placeholders. Called with
    the graph when it is finished; returns the positions of inputs that nothing in it waits for.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        output: Any = InstructionTranslator.current_tx().output
        graph: fx.Graph = output.graph
    except AttributeError:
        return None
    if check is not None and not hasattr(output, "checks_at_end"):
        output.checks_at_end, compiler = set(), output.compiler_fn

        @functools.wraps(compiler)
        def compile_checked(module: fx.GraphModule, *args: Any) -> Any:
            found = {position for check_end in output.checks_at_end for position in check_end(module.graph)}
            return reading_pinned(compiler(module, *args), found)

        output.compiler_fn = compile_checked
    if check is not None:
        output.checks_at_end.add(check)
    return graph


def refuse_tracers(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    """Raise ``StateError`` under a tracer, which would record what slots hold at this moment."""
    tracer = None
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        tracer = "torch.jit.trace"
    elif torch_private.transform() is not None:
        tracer = "a transform of torch.func (vmap, grad, linearize, ...)"
    elif torch_private.proxy_mode() is not None:
        tracer = "make_fx"
    elif True in [isinstance(value, torch.fx.Proxy) for value in (*args, *(kwargs or {}).values())]:
        tracer = "torch.fx.symbolic_trace"
    if tracer is not None:
        raise StateError(
            f"{tracer} would record what slots hold at this moment: call handle.remove() first, trace, then offload "
            f"again; torch.compile needs no removal"
        )


def refuse_export() -> None:
    """Raise ``StateError`` under torch.export, whose program would hold slots for weights, and ops of this process."""
    if torch.compiler.is_exporting():
        raise StateError(
            "torch.export would record where weights of an offloaded model are at this moment: call handle.remove() "
            "first, export, then offload again"
        )


refuse_export._dynamo_marked_constant = True  # type: ignore[attr-defined] # see UnitHook.pin_to_slots
