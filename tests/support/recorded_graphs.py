"""A CUDA graph without a GPU: the operators of one call, run again on the same tensors at each replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from headrace.experts.rows import CUT
from headrace.graphs import decoding

if TYPE_CHECKING:
    from headrace.graphs.decoding import Inputs

# Sizes of models whose steps are recorded.
SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 2048, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
WINDOWS = {"sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"] * 2}


class NotCapturableHereError(RuntimeError):
    """What a capture raises for an operator that reads a value of the device."""


class _Recorder(TorchDispatchMode):
    """Keeps operators with their arguments and outputs, and what they overwrote of tensors from before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise NotCapturableHereError("operation not permitted when stream is capturing")
        names = [argument.name for argument in func._schema.arguments]
        for argument, value in [*zip(func._schema.arguments, args, strict=False)]:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.overwritten += [(leaf, leaf.clone()) for leaf in _tensors(value)]
        out = kwargs.get("out") if "out" in names else None
        self.overwritten += [(leaf, leaf.clone()) for leaf in _tensors(out)]
        result = func(*args, **kwargs)
        if func is not torch.ops.headrace.expert_rows.default or CUT.get() is None:
            self.calls.append((func, args, kwargs, result))
        return result


class RecordedStep:
    """In place of :class:`headrace.graphs.decoding.StepGraph`: Python runs once, and nothing has changed
    after the capture but what Python has."""

    num_bytes, pool = 0, None

    def __init__(
        self, call: Callable[..., Any], inputs: Inputs, device: torch.device, pool: Any = None, in_parts: bool = False
    ) -> None:
        self._inputs = tree_map_only(torch.Tensor, torch.clone, dict(inputs))
        graph = RecordedGraph()
        with Capture(graph):
            self._output = call(**self._inputs)
        self._graph = graph

    def replay(self, inputs: Inputs) -> Any:
        for mine, given in zip(_tensors(self._inputs), _tensors(dict(inputs)), strict=True):
            mine.copy_(given)
        self._graph.replay()
        return tree_map_only(torch.Tensor, torch.clone, self._output)


class RecordedGraph:
    """In place of ``torch.cuda.CUDAGraph``."""

    current: ClassVar[RecordedGraph | None] = None  # that is captured

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def capture_begin(self, *pool: Any, **options: Any) -> None:
        assert RecordedGraph.current is None
        RecordedGraph.current, Capture.recorders[-1].calls = self, self._calls

    def capture_end(self) -> None:
        if RecordedGraph.current is not self:
            raise RuntimeError("operation failed due to an illegal state")
        RecordedGraph.current, Capture.recorders[-1].calls = None, []

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def replay(self) -> None:
        for func, args, kwargs, outputs in self._calls:
            for kept, new in zip(_tensors(outputs), _tensors(func(*args, **kwargs)), strict=True):
                if kept.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    kept.copy_(new)


class Capture:
    """In place of ``torch.cuda.graph``."""

    recorders: ClassVar[list[_Recorder]] = []

    def __init__(self, cuda_graph: RecordedGraph, *options: Any) -> None:
        self.cuda_graph = cuda_graph

    def __enter__(self) -> None:
        self.recorders.append(_Recorder())
        self.cuda_graph.capture_begin()
        self.recorders[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        recorder = self.recorders[-1]
        recorder.__exit__(*error)
        self.cuda_graph.capture_end()
        for tensor, before in reversed(self.recorders.pop().overwritten):
            tensor.copy_(before)


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have steps be captured on a CPU, by this in place of CUDA graphs alone."""
    for name, value in {
        "graph": Capture, "CUDAGraph": RecordedGraph, "device": lambda _: nullcontext(), "memory_snapshot": list,
        "current_stream": lambda _: None, "stream": lambda _: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(decoding, "_capture_stream", lambda device: None)
    monkeypatch.setattr(decoding, "GRAPH_DEVICES", ("cpu",))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
