"""Modules of libraries that move, write or exchange their weights themselves, so that nothing else may."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headrace.adapters.layerwise_casting import casting_of, why_not_cast
from headrace.errors import OptionError

__all__ = ["reject_self_managed_weights"]

_REPACKS = "support_avx512bf16_for_cpu"  # of bitsandbytes' layers, which repack in eval() on such a CPU


def reject_self_managed_weights(name: str, module: nn.Module, device: torch.device) -> None:
    """Refuse a module that moves, writes or exchanges its weights itself when it runs on ``device``.

    Raises:
        OptionError: such a module, with what to do instead.
    """
    if (found := _self_managed(module, device)) is not None:
        how, fix = found
        raise OptionError(
            f"{f'module {name!r}' if name else 'the model'} ({type(module).__name__}): expected weights that stay "
            f"where they are put, found a module that {how}; {fix}"
        )


def _self_managed(module: nn.Module, device: torch.device) -> tuple[str, str] | None:
    """How ``module``, recognised by its attributes, manages its weights itself on ``device``, and the fix."""
    weight: Any = module._parameters.get("weight")
    state = getattr(weight, "quant_state", None)
    packed = getattr(state, "packing_format_for_cpu", False)
    hook: Any = getattr(module, "_hf_hook", None)
    hooks = " ".join(getattr(getattr(module, "_diffusers_hook", None), "hooks", ()))
    if "offload" in hooks:
        how = "has its weights moved by diffusers (group offloading)"
        return how, "build or load it anew without that, and offload it instead: a budget saves the memory"
    if casting_of(module) is not None and (why := why_not_cast(module)) is not None:
        return why, "build or load it anew, and enable layerwise casting last, with enable_layerwise_casting()"
    each_hook = getattr(hook, "hooks", (hook,))
    if any(hasattr(each, "storage_dtype") for each in each_hook):
        how = "has its weights cast by accelerate (attach_layerwise_casting_hooks) in every forward"
        return how, "build or load it anew without that, and use diffusers.hooks.apply_layerwise_casting instead"
    if any(getattr(each, "offload", False) for each in each_hook):
        how = "is given its weights anew by accelerate (device_map and the like) in every forward"
        removed = "accelerate.hooks.remove_hook_from_module(model, recurse=True)"
        return how, f"load it with headrace's load(), or without a device_map, or call {removed} first"
    if not isinstance(module._parameters, dict) or hasattr(module, "ct_decompress_hook"):
        how = "has its weights exchanged by compressed-tensors in the first forward"
        other = "CompressedTensorsConfig(dequantize=True) and transformers 5.23 or newer"
        return how, f"load it with headrace's load(), or with {other}"
    if type(weight).__name__ == "Int8Params":
        how = "(bitsandbytes, 8 bits) writes its weight in every forward"
        return how, "quantise it to 4 bits, or with torchao"
    if packed and device.type != "cpu":
        how = "(bitsandbytes, 4 bits) has packed its weight for a CPU"
        return how, "offload it before its first forward there"
    if state is not None and not packed and device.type == "cpu" and getattr(module, _REPACKS, False):
        return "(bitsandbytes, 4 bits) repacks its weight in its first forward", "run the model once before"
    if getattr(module, "q_handle", None) is not None:
        return "(ExLlama, of GPTQModel) runs on addresses that it took once", "load it with another backend"
    if getattr(module, "gate_up_proj_precision_config", None) and "gate_up_proj_bytes" not in module._parameters:
        how = "(MXFP4, of transformers) keeps its weights in objects of triton_kernels, which cannot be moved"
        return how, "load it with headrace's load(), or with Mxfp4Config(dequantize=True)"
    return None
