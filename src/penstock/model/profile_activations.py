"""The peak of intermediate tensors of a step, by the widths of the modules that make them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from penstock.model.profile_caches import caching_attentions, width_out

__all__ = ["activation_bytes_per_row", "experts_per_token", "first_int"]

_FLOAT32_BYTES = 4

# Mixtral, Qwen, DeepSeek, GPT-OSS; Hunyuan, DBRX, ERNIE, Aria, Gemma 4.
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "moe_num_active_experts", "top_k_experts", "top_k")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def first_int(config: Any, names: Sequence[str]) -> int | None:
    """The first positive integer that ``config`` has under one of ``names``."""
    values = (getattr(config, name, None) for name in names)
    for value in values:
        value = max(value, default=0) if isinstance(value, list) else value  # one per layer (Hunyuan)
        if isinstance(value, int) and value > 0:
            return value
    return None


def experts_per_token(config: Any) -> int | None:
    """How many experts a row is routed to; ``None`` for a model without any (``top_k`` alone is for sampling)."""
    return first_int(config, _TOP_K) if first_int(config, _EXPERTS) else None


def activation_bytes_per_row(model: nn.Module, config: Any, dtype: torch.dtype) -> int:
    """Bytes per row of the widest of these moments of a decoding step; ``e`` is the itemsize of ``dtype``.

    Layers run one after another, so only one of them has intermediates at a time. Beside them live the residual, its
    normed copy and the output of the block, of two where attention and MLP run in parallel, ``4 * hidden * e``. On top
    of these come

    - attention: ``(5 * query + 4 * keys) * e``: projected, rotated (two products and a turned copy), and the result;
    - the MLP: ``4 * inner * e``, ``inner`` the input of the projection back: gate, activated gate, up and their
      product; as many for an activation that is written out in several operations;
    - experts: ``(top_k * (3 * hidden + 2 * widest) + 4 * inner of a shared MLP) * e``, with ``widest`` what one expert
      makes of a row at once, gate and up together, and ``5 * widest`` for experts with biases, which are gathered
      per row; and the router's float32 scores, ``3 * 4 * experts``;
    - a norm that computes in float32: ``3 * 4 * hidden``;
    - the logits of one position: ``vocabulary * (e + 4)``, with the float32 copy of ``generate``.
    """
    itemsize, hidden = dtype.itemsize, _hidden_size(config)
    attention = {id(child) for _, module in caching_attentions(model, config) for child in module.children()}
    layer = max(
        _attention_width(model, config),
        4 * _widest_inner(model, [*attention, id(_head(model))]),
        _expert_width(model, config),
    )
    return 4 * hidden * itemsize + max(
        layer * itemsize + 3 * _FLOAT32_BYTES * _num_experts(model),
        3 * _FLOAT32_BYTES * hidden,
        width_out(_head(model)) * (itemsize + _FLOAT32_BYTES),
    )


def _hidden_size(config: Any) -> int:
    return int(getattr(config, "hidden_size", None) or getattr(config, "d_model", None) or 0)


def _head(model: nn.Module) -> nn.Module | None:
    """What makes logits; ``None`` for a model without."""
    found: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    return found


def _attention_width(model: nn.Module, config: Any) -> int:
    widths = [0]
    for _, module in caching_attentions(model, config):
        widest = max((width_out(child) for child in module.children()), default=0)
        widths.append(5 * widest + 4 * _narrowest_key(module, widest))
    return max(widths)


def _narrowest_key(module: nn.Module, widest: int) -> int:
    for name in ("k_proj", "key", "k"):
        if width := width_out(getattr(module, name, None)):
            return width
    return 0  # fused: the widest holds keys and values already


def _widest_inner(model: nn.Module, without: Sequence[int] = ()) -> int:
    """The largest input of a linear layer in ``model``, that is, of the projection back from inside an MLP."""
    return max((_width_in(m) for m in model.modules() if id(m) not in without and width_out(m)), default=0)


def _width_in(linear: Any) -> int:
    size = getattr(linear, "in_features", None) or getattr(linear, "nx", None)
    return size if isinstance(size, int) else 0


def _num_experts(model: nn.Module) -> int:
    return max((p.shape[0] for _, module in model.named_modules() for p in _fused(module)), default=0)


def _expert_width(model: nn.Module, config: Any) -> int:
    """Elements per row that all experts of the row make together, and the MLP that shares their block."""
    hidden, top_k = max(1, _hidden_size(config)), experts_per_token(config) or 1
    widths = [0]
    for name, module in model.named_modules():
        if weights := _fused(module):
            widest = max(math.prod(weight.shape[1:]) // hidden for weight in weights)
            made = 3 * hidden + (5 if _is_biased(module) else 2) * widest
            block = model.get_submodule(name.rpartition(".")[0])
            widths.append(top_k * made + 4 * _widest_inner(block))
    return max(widths)


def _fused(module: nn.Module) -> list[nn.Parameter]:
    """Weights of fused experts: the first of their three dimensions counts experts (of a convolution, channels)."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return []
    return [p for p in module._parameters.values() if p is not None and p.dim() == 3]


def _is_biased(experts: nn.Module) -> bool:
    return any(p is not None and p.dim() == 2 and name.endswith("bias") for name, p in experts._parameters.items())
