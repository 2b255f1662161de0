"""What the layers of a transformers model keep between steps, by the shapes of their projections.

As ``transformers.cache_utils`` stores it (5.23, https://github.com/huggingface/transformers/blob/main/src/transformers/
cache_utils.py): full attention, keys and values of every token; sliding and chunked attention, those of the last
``window``, the one of the step included; latent attention (MLA), the latents, where the attention expands them after
it has read the cache, else keys and values per head; linear attention and state spaces, a convolution's inputs and
one recurrent state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

__all__ = ["LayerCache", "attention_bytes_per_token", "caching_attentions", "layers_of", "source_tokens", "width_out"]

_SEPARATE = (("k_proj", "v_proj"), ("key", "value"), ("k", "v"), ("k_lin", "v_lin"), ("key_proj", "value_proj"))
_FUSED = ("qkv_proj", "c_attn", "query_key_value", "Wqkv", "qkv", "in_proj_qkv", "att_proj")
_CACHE_ARGUMENTS = {"past_key_values", "past_key_value", "layer_past", "cache_params"}
_CROSS = ("encoder_attn", "EncDecAttention", "crossattention", "cross_attn", "cross_attention")
_WINDOW_OF = {
    "sliding_attention": "sliding_window",
    "hybrid_sliding": "sliding_window",
    "reference_sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
_FLOAT32_BYTES = 4
_INDEX_BYTES = 3 * 8


@dataclass(frozen=True)
class LayerCache:
    """What one module keeps.

    Attributes:
        kv_bytes: per token of a sequence.
        window: tokens that it keeps at most; 0 means all.
        cross_bytes: per token of the source that a decoder attends to.
        state_bytes: per sequence, whatever its length.
    """

    kv_bytes: int = 0
    window: int = 0
    cross_bytes: int = 0
    state_bytes: int = 0


def layers_of(model: nn.Module, config: Any, dtype: torch.dtype) -> list[LayerCache]:
    """The caches of all modules of ``model`` that have one; ``dtype`` is that of its activations."""
    attention = [_attention_cache(*found, config, dtype) for found in caching_attentions(model, config)]
    return attention + [_state_cache(mixer, dtype) for mixer in _mixers(model)]


def attention_bytes_per_token(model: nn.Module, config: Any, dtype: torch.dtype) -> int:
    """Peak of what one layer's attention makes anew in every step, per token of every sequence.

    The default cache grows by concatenation, so the old keys or values live beside the new ones. Latent attention
    expands the latents of the whole context: keys and values per head, and the keys once more with their rotary part.
    The eager implementation repeats keys and values for the query heads that share them and makes scores, with the mask
    added, their float32 softmax and its rounded copy; the fused ones read the cache as it is. Masks and positions take
    up to three int64 per token.
    """
    growth = expanded = 0
    eager = getattr(config, "_attn_implementation", None) == "eager"
    for name, module in caching_attentions(model, config):
        keys, values = _widths(module, config)
        if not (_is_cross(name) or _window(module, config)):
            growth = max(growth, max(keys, values) * dtype.itemsize)
            expanded = max(expanded, _expanded_width(module, eager) * dtype.itemsize)
    if growth and eager:
        expanded += _eager_bytes(config, dtype)
    return max(growth, expanded) + _INDEX_BYTES if growth else 0


def _eager_bytes(config: Any, dtype: torch.dtype) -> int:
    heads = int(getattr(config, "num_attention_heads", 1))
    shared = heads != (getattr(config, "num_key_value_heads", None) or heads)
    repeated = 2 * _head_dim(config) * dtype.itemsize if shared else 0
    return heads * (repeated + 2 * dtype.itemsize + 2 * _FLOAT32_BYTES)


def source_tokens(config: Any) -> int:
    """Tokens of an encoder whose output has one length (audio); 0 where it follows the input."""
    return int(getattr(config, "max_source_positions", None) or 0)


def caching_attentions(model: nn.Module, config: Any) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every attention that writes a cache; encoders' do not, nor do those that share another's."""
    sharing = getattr(config, "kv_sharing_modes", None) or ()
    for name, module in model.named_modules():
        if not (_has_projections(module) and _takes_cache(module)):
            continue
        index = getattr(module, "layer_idx", None)
        shared = getattr(module, "is_kv_shared_layer", False) or (
            index is not None and sharing[index:][:1] == ["reuse"]
        )
        decodes = getattr(module, "is_decoder", True) and getattr(module, "is_causal", True) is not False
        # Layers that share their weights (Zamba) say in each call which of them it is.
        is_cached = index is not None or "layer_idx" in _arguments(type(module).forward)
        if is_cached and not shared and (decodes or _is_cross(name)):
            yield name, module


def width_out(linear: Any) -> int:
    """Features that a linear layer of any kind returns; 0 if it is none."""
    for attr in ("out_features", "nf"):
        if isinstance(size := getattr(linear, attr, None), int):
            return size
    return 0


def _attention_cache(name: str, module: nn.Module, config: Any, dtype: torch.dtype) -> LayerCache:
    num_bytes = sum(_widths(module, config)) * dtype.itemsize
    if _is_cross(name):
        return LayerCache(cross_bytes=num_bytes)
    if _layer_type(module, config) == "indexed_attention":  # sparse attention keeps a key of its index, too
        num_bytes += int(getattr(config, "index_head_dim", 0)) * dtype.itemsize
    return LayerCache(kv_bytes=num_bytes, window=_window(module, config))


def _widths(module: nn.Module, config: Any) -> tuple[int, int]:
    """Elements that a token's keys take in the cache, and its values."""
    rank: Any = getattr(module, "kv_lora_rank", None)
    if isinstance(rank, int):
        rope: Any = module.qk_rope_head_dim
        return (rank, rope) if hasattr(module, "expand_kv") else _head_widths(module)
    for keys, values in _SEPARATE:
        if width := width_out(getattr(module, keys, None)):
            return width, width_out(getattr(module, values, None)) or width  # without a projection the keys serve
    if not hasattr(config, "hidden_size"):  # of several models in one (Bark), each with a configuration of its own
        config = getattr(module, "config", config)
    heads: Any = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 1)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        heads = 1
    return int(heads) * _head_dim(config), int(heads) * _head_dim(config)


def _head_widths(module: nn.Module) -> tuple[int, int]:
    """Elements of a token's keys and of its values over all heads of a latent attention."""
    sizes: Any = module
    return sizes.num_heads * sizes.qk_head_dim, sizes.num_heads * sizes.v_head_dim


def _expanded_width(module: nn.Module, eager: bool) -> int:
    """Elements per token that a latent attention expands its cache to: (no-rope keys, values), and whole keys."""
    if not hasattr(module, "expand_kv"):
        return 0
    sizes: Any = module
    keys, values = _head_widths(module)
    copied = values if eager else 0  # the values are a part of a projection, which a matrix product lays out anew
    return int(keys + values + sizes.num_heads * sizes.qk_nope_head_dim + copied)


def _head_dim(config: Any) -> int:
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)


def _layer_type(module: nn.Module, config: Any) -> str:
    index: Any = getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if types is not None and index is not None:
        return str(types[index]) if index < len(types) else "full_attention"
    # The library's own rule for configurations that name no types.
    if getattr(config, "sliding_window", None) is not None:
        return "sliding_attention"
    return "chunked_attention" if getattr(config, "attention_chunk_size", None) is not None else "full_attention"


def _window(module: nn.Module, config: Any) -> int:
    attr = _WINDOW_OF.get(_layer_type(module, config))
    return int(getattr(config, attr, None) or 0) if attr else 0


def _is_cross(name: str) -> bool:
    return any(part in _CROSS for part in name.split("."))


def _has_projections(module: nn.Module) -> bool:
    children = module._modules
    return "kv_a_proj_with_mqa" in children or any(
        name in children for name in (*_FUSED, *(keys for keys, _ in _SEPARATE))
    )


def _takes_cache(module: nn.Module) -> bool:
    return not _CACHE_ARGUMENTS.isdisjoint(_arguments(type(module).forward))


@cache
def _arguments(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


# -- recurrent layers --------------------------------------------------------------------------------------------------


def _mixers(model: nn.Module) -> Iterator[nn.Module]:
    """Every module with a causal convolution that keeps its inputs between steps."""
    for module in model.modules():
        convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
        if convolves and getattr(module, "layer_idx", None) is not None and _takes_cache(module):
            yield module


def _state_cache(mixer: nn.Module, dtype: torch.dtype) -> LayerCache:
    kernels = [child for child in mixer.children() if isinstance(child, nn.Conv1d)]
    inputs = sum(kernel.in_channels * kernel.kernel_size[0] for kernel in kernels) * dtype.itemsize
    # Recurrences run in float32, and the cache takes the dtype of the first state that it is given.
    return LayerCache(state_bytes=inputs + _recurrent_elements(mixer) * _FLOAT32_BYTES)


def _recurrent_elements(mixer: Any) -> int:
    """Elements of the recurrent state: a matrix per head (delta rules, Mamba 2) or a row per channel (Mamba)."""
    decay = getattr(mixer, "A_log", None)
    if decay is None:
        return 0
    if all(hasattr(mixer, name) for name in ("num_v_heads", "head_k_dim", "head_v_dim")):
        return int(mixer.num_v_heads * mixer.head_k_dim * mixer.head_v_dim)
    if decay.dim() >= 2:  # a row per channel, or a matrix per head with all its elements (Zamba)
        return int(decay.numel())
    return int(mixer.num_heads * mixer.head_dim * getattr(mixer, "ssm_state_size", mixer.head_dim))
