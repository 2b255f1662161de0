"""Sleep mode and new weights of vLLM: which allocations vLLM does not save, and how its loaders are let in."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from headrace.errors import OptionError, StateError

_OWN_TAG = "headrace"  # of what sleep() neither keeps as "weights" nor brings back
_WRITES_SLOTS = "load_weights would write into slots, which the next copy overwrites, and not into the store; call "


def own_allocations(refillable: Collection[int]) -> dict[int, Any]:
    """Entries of vLLM's allocator by address: those in which nothing lies but ``refillable`` allocations of torch.

    Empty without sleep mode, and on a CPU.
    """
    module = sys.modules.get("vllm.device_allocator.cumem")
    allocator = None if module is None else module.CuMemAllocator.instance
    if allocator is None:
        return {}
    used = {
        segment["address"]: {block["address"] for block in segment["blocks"] if block["state"] != "inactive"}
        for segment in torch.cuda.memory_snapshot()
    }
    weights = {address: data for address, data in allocator.pointer_to_data.items() if data.tag == "weights"}
    return {address: data for address, data in weights.items() if used.get(address) and used[address] <= {*refillable}}


@contextmanager
def not_saved(entries: Iterable[Any]) -> Iterator[None]:
    """Within, vLLM's allocator unmaps ``entries`` without a copy."""
    entries = list(entries)
    try:
        for data in entries:
            data.tag = _OWN_TAG
        yield
    finally:
        for data in entries:
            data.tag = "weights"


def refuse_loading(model: nn.Module) -> None:
    """Make ``load_weights`` of ``model`` and its modules raise: worker extensions call it past the worker."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise StateError(f"{_WRITES_SLOTS}reload_weights of the worker")

    for module in model.modules():
        if hasattr(module, "load_weights"):
            vars(module)["load_weights"] = refuse


@contextmanager
def loading_allowed(model: nn.Module, is_quantised: bool) -> Iterator[None]:
    """Within, vLLM loads weights; afterwards it refuses again.

    Raises:
        OptionError: a tensor of the model was given in part (one of q, k and v): the rest of it is undefined then.
    """
    modules = [module for module in model.modules() if vars(module).pop("load_weights", None) is not None]
    load = getattr(model, "load_weights", None)

    def load_whole(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)  # type: ignore[misc]
        if not is_quantised and (parts := _given_in_part(model)):
            raise OptionError(
                f"new weights: {parts[0]} was given in part ({len(parts)} modules in all); nothing was changed. Give "
                f"all tensors that vLLM joins to one (q, k and v; gate and up), or none of them"
            )
        return loaded

    if load is not None:
        vars(model)["load_weights"] = load_whole
    try:
        yield
    except BaseException:
        for info in _reload_infos(model):
            info.reset()
        raise
    finally:
        if modules:
            refuse_loading(model)


def _given_in_part(model: nn.Module) -> list[str]:
    infos = zip(model.named_modules(), _reload_infos(model), strict=False)
    return [
        name
        for (name, module), info in infos
        # The rows beyond the vocabulary are in no file.
        if not isinstance(module, VocabParallelEmbedding) and 0 < info.load_numel < (info.load_numel_total or 0)
    ]


def _reload_infos(model: nn.Module) -> Sequence[Any]:
    """Notes of vLLM about each module while it loads new weights; none in versions that take none."""
    module = sys.modules.get("vllm.model_executor.model_loader.reload.layerwise")
    return [] if module is None else [module.get_layerwise_info(each) for each in model.modules()]
