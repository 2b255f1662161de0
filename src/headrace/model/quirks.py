"""What is known of other libraries' modules and tensors, where nothing in their structure says it.

No library is imported here: modules are recognised by attributes that they have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["SIDE_OBJECTS", "self_managed", "without_lora"]

# Attributes of a parameter that are objects with further tensors of it: scales and codes of bitsandbytes' 4 bits, and
# scales of these that are quantised themselves.
SIDE_OBJECTS = ("quant_state", "state2")

_REPACKS = "support_avx512bf16_for_cpu"  # of bitsandbytes' layers, which repack in eval() on such a CPU


def self_managed(module: nn.Module, device: torch.device) -> tuple[str, str] | None:
    """How ``module`` moves, writes or exchanges its weights itself on ``device``, and what to do instead."""
    weight: Any = module._parameters.get("weight")
    state = getattr(weight, "quant_state", None)
    packed = getattr(state, "packing_format_for_cpu", False)
    if not isinstance(module._parameters, dict) or hasattr(module, "ct_decompress_hook"):
        how = "has its weights exchanged by compressed-tensors in the first forward"
        return how, "load it with headrace's load(), or with CompressedTensorsConfig(dequantize=True)"
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
    if getattr(module, "gate_up_proj_precision_config", None) is not None:
        how = "(MXFP4, of transformers) keeps its weights in objects of triton_kernels, which cannot be moved"
        return how, "load it with Mxfp4Config(dequantize=True)"
    return None


def without_lora(name: str) -> str:
    """The name of a tensor before LoRA wrapped its module in one that has it as a child ``base_layer``."""
    return name.replace(".base_layer.", ".")
