"""Records which experts tokens choose: on the device, by a few small kernels per layer, also in captured graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headrace.errors import OptionError
from headrace.model.memory_profile import chosen_implementation
from headrace.plan.routing_traces import Recorded


class RoutingRecorder:
    """Records the choices of every layer of experts of a transformers model, from its creation to :meth:`close`.

    The last ``capacity`` tokens are kept; ids only.
    """

    def __init__(self, model: nn.Module, device: torch.device, capacity: int = 16384) -> None:
        """
        Args:
            model: offloaded or not.
            device: where it runs.
            capacity: tokens per layer; each takes 2 bytes per chosen expert.

        Raises:
            OptionError: the model has no experts that transformers runs.
        """
        self._layers = [module for module in model.modules() if chosen_implementation(module) is not None]
        top_k = getattr(getattr(model, "config", None), "num_experts_per_tok", None)
        if not self._layers or not isinstance(top_k, int):
            raise OptionError(
                f"{type(model).__name__} has no experts whose choices could be recorded: expected a transformers model "
                f"with num_experts_per_tok in its configuration; run it without a recorder (--expert-trace)"
            )
        self._ids = torch.zeros(len(self._layers), capacity, top_k, dtype=torch.int16, device=device)
        self._num_tokens = torch.zeros(len(self._layers), 1, dtype=torch.int64, device=device)
        self._handles = [self._watch(index, layer) for index, layer in enumerate(self._layers)]

    def _watch(self, index: int, layer: nn.Module) -> RemovableHandle:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
            ids = ids.reshape(-1, ids.shape[-1])[-self._ids.shape[1] :]
            # The position is on the device, so that a replayed graph writes after the one before.
            positions = (self._num_tokens[index] + torch.arange(len(ids), device=ids.device)) % self._ids.shape[1]
            self._ids[index].index_copy_(0, positions, ids.to(torch.int16))
            self._num_tokens[index] += len(ids)

        return layer.register_forward_pre_hook(record, with_kwargs=True)

    def close(self) -> Recorded:
        """Stop, and return the recorded choices.

        Raises:
            OptionError: the model did not run.
        """
        for handle in self._handles:
            handle.remove()
        counts = self._num_tokens.flatten().tolist()
        if not all(counts):
            raise OptionError("no choices of experts were recorded: run the model before the recording ends")
        num_tokens = min([*counts, self._ids.shape[1]])
        layers = []
        for ids, count in zip(self._ids, counts, strict=True):
            in_order = ids.roll(-(count % len(ids)), 0) if count > len(ids) else ids[:count]
            layers.append(in_order[-num_tokens:].to(torch.int32).cpu().numpy())
        return Recorded(tuple(layers), int(self._layers[0].num_experts))  # type: ignore[arg-type]
