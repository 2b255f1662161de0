"""The peak of intermediate tensors of a step, by the widths of the modules that make them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from penstock.traits.caches import caching_attentions, width_out

__all__ = ["activation_bytes_per_row"]

_FLOAT32_BYTES = 4


def activation_bytes_per_row(model: nn.Module, config: Any, dtype: torch.dtype) -> int:
    """Bytes per row of the widest of these moments of a decoding step; ``e`` is the itemsize of ``dtype``.

    Layers run one after another, so only one of them has intermediates at a time; beside them live the residual and
    its normed copy, ``2 * hidden``:

    - attention: ``(2 * hidden + 5 * query + 2 * (keys + values)) * e``: projected, rotated (two products and a
      turned copy), and the result;
    - the MLP: ``(2 * hidden + 4 * inner) * e``: gate, activated gate, up and their product; as many for an activation
      that is written out in several operations;
    - experts: ``(2 * hidden + top_k * (2 * hidden + 2 * widest) + shared MLP) * e``, with ``widest`` what one expert
      makes of a row at once, gate and up together; and the router's float32 scores, ``3 * 4 * experts``;
    - a norm that computes in float32: ``2 * hidden * e + 3 * 4 * hidden``;
    - the logits of one position: ``2 * hidden * e + vocabulary * (e + 4)``, a float32 copy with ``generate``.
    """
    itemsize, hidden = dtype.itemsize, _hidden_size(config)
    vocabulary = _vocabulary(model, config)
    inner = 4 * _widest_inner(model, config, vocabulary)
    layer = max(_attention_width(model, config), inner, _expert_width(model, config) + inner)
    beside = 2 * hidden * itemsize
    return beside + max(
        layer * itemsize + 3 * _FLOAT32_BYTES * _num_experts(model),
        3 * _FLOAT32_BYTES * hidden,
        vocabulary * (itemsize + _FLOAT32_BYTES),
    )


def _hidden_size(config: Any) -> int:
    return int(getattr(config, "hidden_size", None) or getattr(config, "d_model", None) or 0)


def _vocabulary(model: nn.Module, config: Any) -> int:
    """Logits per position; 0 for a model without a head for them."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return width_out(head) if head is not None else 0


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


def _widest_inner(model: nn.Module, config: Any, vocabulary: int) -> int:
    """The widest linear layer outside attention and head."""
    attention = {id(child) for _, module in caching_attentions(model, config) for child in module.children()}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linears = (m for m in model.modules() if width_out(m) and id(m) not in attention and m is not head)
    return max((max(width_out(m), _width_in(m)) for m in linears), default=0)


def _width_in(linear: Any) -> int:
    size = getattr(linear, "in_features", None) or getattr(linear, "nx", None)
    return size if isinstance(size, int) else 0


def _experts(model: nn.Module) -> list[nn.Parameter]:
    """Weights of fused experts: three dimensions, the first of which counts experts."""
    return [p for module in model.modules() for p in module._parameters.values() if p is not None and p.dim() == 3]


def _num_experts(model: nn.Module) -> int:
    return max((weight.shape[0] for weight in _experts(model)), default=0)


def _expert_width(model: nn.Module, config: Any) -> int:
    """Elements per row that all experts of the row make together."""
    hidden = _hidden_size(config)
    widest = max((math.prod(weight.shape[1:]) // max(1, hidden) for weight in _experts(model)), default=0)
    top_k = next(
        (value for name in ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k", "moe_top_k")
         if isinstance(value := getattr(config, name, None), int)), 1,
    )  # fmt: skip
    return top_k * (2 * hidden + 2 * widest) if widest else 0
