"""A CUDA graph without a GPU: the operators of one call, run again on the same tensors at each replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

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
        self.calls.append((func, args, kwargs, result))
        return result


class RecordedStep:
    """In place of :class:`headrace.graphs.decoding.StepGraph`: Python runs once, and nothing has changed
    after the capture but what Python has."""

    num_bytes, pool = 0, None

    def __init__(self, call: Callable[..., Any], inputs: Inputs, device: torch.device, pool: Any = None) -> None:
        self._inputs = tree_map_only(torch.Tensor, torch.clone, dict(inputs))
        recorder = _Recorder()
        try:
            with recorder:
                self._output = call(**self._inputs)
        finally:
            for tensor, before in reversed(recorder.overwritten):
                tensor.copy_(before)
        self._calls = recorder.calls

    def replay(self, inputs: Inputs) -> Any:
        for mine, given in zip(_tensors(self._inputs), _tensors(dict(inputs)), strict=True):
            mine.copy_(given)
        for func, args, kwargs, outputs in self._calls:
            for kept, new in zip(_tensors(outputs), _tensors(func(*args, **kwargs)), strict=True):
                if kept.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    kept.copy_(new)
        return tree_map_only(torch.Tensor, torch.clone, self._output)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
