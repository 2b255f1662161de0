"""A call as a CUDA graph: its inputs are copied into tensors at fixed addresses, then it is replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map_only

__all__ = ["Inputs", "StepGraph", "signature"]

Inputs = Mapping[str, Any]


def signature(inputs: Inputs) -> Hashable:
    """The part of ``inputs`` that is fixed in a graph: all but the values of tensors.

    Objects other than numbers and strings are compared by identity, so the graph has to keep them alive.
    """
    leaves, _ = tree_flatten_with_path(dict(inputs))
    return tuple((path, _constant_part(leaf)) for path, leaf in leaves)


def _constant_part(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return leaf if leaf is None or isinstance(leaf, bool | int | float | str) else id(leaf)


class StepGraph:
    """A captured ``call(**inputs)``.

    Attributes:
        num_bytes: device memory that the graph computes in.
    """

    def __init__(self, call: Callable[..., Any], inputs: Inputs) -> None:
        """``call`` has run before with inputs of this :func:`signature`, so that libraries and kernels are loaded.

        It is captured now: its Python code runs once, and its kernels do not.

        Raises:
            RuntimeError: an operation cannot be captured, such as one that waits for the device.
        """
        self._inputs: Inputs = tree_map_only(torch.Tensor, torch.clone, dict(inputs))
        self._tensors = _tensors_of(self._inputs)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may allocate and launch meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._output = call(**self._inputs)
        segments, pool = torch.cuda.memory_snapshot(), self._graph.pool()
        self.num_bytes = sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == tuple(pool))

    def replay(self, inputs: Inputs) -> Any:
        """The output of ``call(**inputs)`` in new tensors; ``inputs`` has the signature of the captured ones."""
        torch._foreach_copy_(self._tensors, _tensors_of(inputs))
        self._graph.replay()
        return tree_map_only(torch.Tensor, torch.clone, self._output)


def _tensors_of(inputs: Inputs) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(dict(inputs)) if isinstance(leaf, torch.Tensor)]
