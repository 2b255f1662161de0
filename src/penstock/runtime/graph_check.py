"""The graph that torch.compile traces: a slot may be used between a unit's wait and its release, and nowhere else.

Weights that compiled code uses do not rest (it relies on addresses), so nothing would notice such a use at run time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from penstock.errors import OutsideAccessError
from penstock.model.live_tensors import BoundTensor
from penstock.model.tensor_guards import storage_id

__all__ = ["check_trace"]


def check_trace(tensors: Sequence[BoundTensor]) -> None:
    """Check what Dynamo has traced so far for uses of ``tensors``; no effect under another tracer.

    Raises:
        OutsideAccessError: an operator takes one of them, or a view of it, outside of its window, or its module returns
            a view of it.
    """
    graph = _graph_being_traced()
    if graph is None:
        return
    by_id = {id(bound.tensor): bound for bound in tensors}
    bound_by_storage = {
        storage: by_id[id(example)]
        for node in graph.find_nodes(op="placeholder")
        if (example := _example_of(node)) is not None
        and id(example) in by_id
        and (storage := _storage_of(node)) is not None
    }
    _check(graph, bound_by_storage)


def _graph_being_traced() -> fx.Graph | None:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        translator = InstructionTranslator.current_tx()
    except AttributeError:  # torch.export without Dynamo
        return None
    graph: fx.Graph = translator.output.graph
    return graph


def _check(graph: fx.Graph, bound_by_storage: dict[int, BoundTensor]) -> None:
    wait, release, join = (getattr(torch.ops.penstock, name) for name in ("wait", "release", "join"))
    waited, released = (_storages(node.args[2] for node in graph.nodes if _calls(node, op)) for op in (wait, release))
    # A window that began in the graph before this one (a graph break inside a layer) is open from the start.
    open_now = released - waited
    for node in graph.nodes:
        if _calls(node, wait):
            open_now |= _storages([node.args[2]])
        elif _calls(node, release):
            open_now -= _storages([node.args[2]])
            for storage in _storages([node.args[3]]) & bound_by_storage.keys():
                raise _outside(bound_by_storage[storage], "is returned by its module, whole or as a view")
        elif node.op in ("call_function", "call_method", "call_module") and not _calls(node, join):
            for storage in (_storages([node.all_input_nodes]) & bound_by_storage.keys()) - open_now:
                raise _outside(bound_by_storage[storage], f"is used by {node.target}")


def _outside(bound: BoundTensor, how: str) -> OutsideAccessError:
    name = bound.info.name
    return OutsideAccessError(
        f"{name} {how} outside of the forward that it is on the device for, in code that torch.compile traces: keep it "
        f"resident (rules=[({name!r}, 'resident')], --offload-rule {name}=resident)"
    )


def _calls(node: fx.Node, packet: Any) -> bool:
    return node.target in (packet, packet.default)


def _storages(groups: Iterable[Any]) -> set[int]:
    nodes = (node for group in groups for node in group if isinstance(node, fx.Node))
    return {storage for node in nodes if (storage := _storage_of(node)) is not None}


def _storage_of(node: fx.Node) -> int | None:
    """The storage of the fake tensor that stands for ``node``; views share it."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or hasattr(value, "__tensor_flatten__"):
        return None
    return storage_id(value)


def _example_of(node: fx.Node) -> torch.Tensor | None:
    """The live tensor behind a graph input."""
    argument = node.meta.get("grapharg")
    example = None if argument is None else argument.example
    return example if isinstance(example, torch.Tensor) else None
