"""Which experts tokens choose: recorded one by one on request, and counted for the next offload of such a model.

Choices are recorded on the device, by a few small kernels per layer, in captured graphs too. Counts are kept beside the
probe, and the next offload begins with the most popular experts in slots.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from headrace.config import cache_disabled, cache_folder, read_kept, replace_file
from headrace.errors import OptionError
from headrace.model.memory_profile import chosen_implementation
from headrace.plan.traces import Recorded
from headrace.ranks.group import json_digest

__all__ = ["RoutingRecorder", "keep_uses", "popular_experts"]

_log = logging.getLogger(__name__)


class RoutingRecorder:
    """Records the choices of every layer of experts of a transformers model, from its creation to :meth:`close`.

    The last ``capacity`` tokens are kept; ids only.
    """

    def __init__(self, model: nn.Module, device: torch.device, capacity: int = 16384) -> None:
        """
        Args:
            model: offloaded or not.
            device: where it runs.
            capacity: tokens of each layer; each takes 2 bytes per expert that it chooses.

        Raises:
            OptionError: a model without experts that transformers runs.
        """
        self._layers = [module for module in model.modules() if chosen_implementation(module) is not None]
        top_k = getattr(getattr(model, "config", None), "num_experts_per_tok", None)
        if not self._layers or not isinstance(top_k, int):
            raise OptionError(
                f"{type(model).__name__} has no experts whose choices could be recorded: expected a transformers model "
                f"with num_experts_per_tok in its configuration; leave --expert-trace out"
            )
        self._ids = torch.zeros(len(self._layers), capacity, top_k, dtype=torch.int16, device=device)
        self._num_tokens = torch.zeros(len(self._layers), 1, dtype=torch.int64, device=device)
        self._handles = [self._watch(index, layer) for index, layer in enumerate(self._layers)]

    def _watch(self, index: int, layer: nn.Module) -> RemovableHandle:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
            ids = ids.reshape(-1, ids.shape[-1])[-self._ids.shape[1] :]
            # The position is on the device, so that a replayed graph writes behind the one before.
            places = (self._num_tokens[index] + torch.arange(len(ids), device=ids.device)) % self._ids.shape[1]
            self._ids[index].index_copy_(0, places, ids.to(torch.int16))
            self._num_tokens[index] += len(ids)

        return layer.register_forward_pre_hook(record, with_kwargs=True)

    def close(self) -> Recorded:
        """Stop, and return what was recorded.

        Raises:
            OptionError: the model did not run.
        """
        for handle in self._handles:
            handle.remove()
        counts = self._num_tokens.flatten().tolist()
        if not all(counts):
            raise OptionError("no choices of experts were recorded: run the model before the recording ends")
        kept = min([*counts, self._ids.shape[1]])
        layers = []
        for ids, count in zip(self._ids, counts, strict=True):
            in_order = ids.roll(-(count % len(ids)), 0) if count > len(ids) else ids[:count]
            layers.append(in_order[-kept:].to(torch.int32).cpu().numpy())
        return Recorded(tuple(layers), int(self._layers[0].num_experts))  # type: ignore[arg-type]


def keep_uses(uses: Mapping[str, Sequence[int]]) -> None:
    """Keep how many steps chose each expert, by the name of the layer; replaces what an earlier run kept."""
    path = _path({layer: len(counts) for layer, counts in uses.items()})
    if path is None:
        return
    try:
        replace_file(path, json.dumps({layer: list(counts) for layer, counts in uses.items()}))
    except OSError as error:
        _log.info("the popularity of experts is not kept: %s: %s", path, error.strerror)


def popular_experts(num_experts: Mapping[str, int]) -> dict[str, list[int]]:
    """The experts that were chosen, by layer, most often first; empty for a model that is not known.

    Args:
        num_experts: of each layer, by its name.
    """
    path = _path(num_experts)
    if path is None:
        return {}
    try:
        kept = json.loads(read_kept(path))
        return {layer: _by_uses(kept[layer], count) for layer, count in num_experts.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        _log.info("slots of experts begin empty: %s is no record of their uses (%s)", path, error)
        return {}


def _by_uses(uses: Sequence[int], num_experts: int) -> list[int]:
    if len(uses) != num_experts:
        raise ValueError(f"expected uses of {num_experts} experts, found {len(uses)}")
    return sorted((expert for expert in range(num_experts) if uses[expert] > 0), key=lambda expert: -uses[expert])


def _path(num_experts: Mapping[str, int]) -> Path | None:
    """One file for all models with these layers: a wrong guess costs time and no bits."""
    folder = None if cache_disabled() else cache_folder()
    if folder is None:
        return None
    # Ranks of expert parallelism number their own experts from 0.
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return folder / f"experts-{json_digest([rank, sorted(num_experts.items())])[:16]}.json"
