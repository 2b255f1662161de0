"""What the planner needs of a model beyond names and sizes, read from a transformers model and its configuration.

Caches are counted as ``transformers.cache_utils`` stores them (5.23, https://github.com/huggingface/transformers/blob/
main/src/transformers/cache_utils.py): full attention, keys and values of every token; sliding and chunked attention,
those of the last ``window``, the one of the step included; latent attention (MLA), the latents, where the attention
expands them after it has read the cache, else keys and values per head; linear attention and state spaces, a
convolution's inputs and one recurrent state.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from headrace.model.records import ModelProfile

__all__ = ["ROW_IMPLEMENTATIONS", "ModelProfile", "chosen_implementation", "profile_of"]

# Implementations of experts in transformers that compute the same bits whatever the order of the rows. `eager` adds up
# the experts of a token in the order of their numbers.
ROW_IMPLEMENTATIONS = ("grouped_mm", "batched_mm")

_SEPARATE = (("k_proj", "v_proj"), ("key", "value"), ("k", "v"), ("k_lin", "v_lin"), ("key_proj", "value_proj"))
_FUSED = ("qkv_proj", "c_attn", "query_key_value", "Wqkv", "qkv", "in_proj_qkv", "att_proj")
_PROJECTIONS = {"kv_a_proj_with_mqa", *_FUSED, *(keys for keys, _ in _SEPARATE)}
_CACHE_ARGUMENTS = {"past_key_values", "past_key_value", "layer_past", "cache_params"}
_CROSS = ("encoder_attn", "EncDecAttention", "crossattention", "cross_attn", "cross_attention")
_SLIDING = ("sliding_attention", "hybrid_sliding", "reference_sliding_attention")
_WINDOW_OF = {**dict.fromkeys(_SLIDING, "sliding_window"), "chunked_attention": "attention_chunk_size"}
# Mixtral, Qwen, DeepSeek, GPT-OSS; Hunyuan, DBRX, ERNIE, Aria, Gemma 4.
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "moe_num_active_experts", "top_k_experts", "top_k")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MAX_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions")
_FLOAT32_BYTES = 4
_INDEX_BYTES = 3 * 8


def profile_of(model: nn.Module) -> ModelProfile:
    """Read the configuration and the modules of ``model``, which may be on ``meta``; touches no data.

    Figures are those of transformers' default caches (``DynamicCache``) and of one step of ``generate``, in the
    model's dtype. For an encoder-decoder the source counts as long as the context, unless the configuration fixes its
    length (Whisper); of several window lengths the largest counts for all.

    Returns:
        the profile; for a model without a transformers configuration the defaults.
    """
    read = getattr(getattr(model, "config", None), "get_text_config", None)
    if not callable(read):
        return ModelProfile()
    config: Any = read(decoder=True)  # of the part that generates text
    dtype = getattr(model, "dtype", None)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        dtype = torch.get_default_dtype()
    itemsize = dtype.itemsize
    attentions = list(_caching_attentions(model, config))
    kv = kv_window = window = cross = 0
    for name, module in attentions:
        elements, own_window = sum(_widths(module, config)), _window(module, config)
        if _layer_type(module, config) == "indexed_attention":  # sparse attention keeps a key of its index, too
            elements += int(getattr(config, "index_head_dim", 0))
        num_bytes = elements * itemsize
        if _is_cross(name):
            cross += num_bytes
        elif own_window:
            kv_window, window = kv_window + num_bytes, max(window, own_window)
        else:
            kv += num_bytes
    # Tokens of an encoder whose output has one length (audio); 0 where it follows the input.
    fixed_source = int(getattr(config, "max_source_positions", None) or 0)
    return ModelProfile(
        experts_per_token=_experts_per_token(config),
        kv_bytes_per_token=kv + (0 if fixed_source else cross),
        kv_window_bytes_per_token=kv_window,
        window=window,
        state_bytes_per_sequence=_state_bytes(model, itemsize) + cross * fixed_source,
        activation_bytes_per_row=_activation_bytes(model, config, [module for _, module in attentions], itemsize),
        attention_bytes_per_token=_attention_bytes(config, attentions, itemsize),
        max_context=_max_context(config),
        row_readers=tuple(n for n, m in model.named_modules() if chosen_implementation(m) in ROW_IMPLEMENTATIONS),
    )


def chosen_implementation(module: nn.Module) -> str | None:
    """The implementation that runs the experts which ``module`` holds; ``None`` unless they are of transformers."""
    if not hasattr(module, "num_experts") or not _fused_experts(module):
        return None
    chosen: str | None = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return chosen


def _max_context(config: Any) -> int | None:
    """The longest context, in tokens, with the stretching of rotary positions that ``config`` asks for."""
    stated, rope = _first_int(config, _MAX_CONTEXT), getattr(config, "rope_parameters", None)
    # The others, and models with several kinds of layers (Gemma 3), state the length they reach.
    if stated is None or not isinstance(rope, dict) or rope.get("rope_type") not in ("yarn", "linear", "dynamic"):
        return stated
    original = rope.get("original_max_position_embeddings") or stated
    return max(stated, int(original * (rope.get("factor") or 1)))


def _first_int(config: Any, names: Sequence[str]) -> int | None:
    """The first positive integer that ``config`` has under one of ``names``."""
    for name in names:
        value: Any = getattr(config, name, None)
        value = max(value, default=0) if isinstance(value, list) else value  # one per layer (Hunyuan)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _experts_per_token(config: Any) -> int | None:
    """How many experts a row is routed to; ``None`` for a model without any (``top_k`` alone is for sampling)."""
    return _first_int(config, _TOP_K) if _first_int(config, _EXPERTS) else None


# -- caches of attention -----------------------------------------------------------------------------------------------


def _caching_attentions(model: nn.Module, config: Any) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every attention that writes a cache: not in encoders, and not where it reads another's."""
    sharing = getattr(config, "kv_sharing_modes", None) or ()
    for name, module in model.named_modules():
        if _PROJECTIONS.isdisjoint(module._modules) or not _takes_cache(module):
            continue
        index = getattr(module, "layer_idx", None)
        reuses = index is not None and sharing[index:][:1] == ["reuse"]
        decodes = getattr(module, "is_decoder", True) and getattr(module, "is_causal", True) is not False
        # Layers that share their weights (Zamba) say in each call which of them it is.
        is_cached = index is not None or "layer_idx" in _arguments(type(module).forward)
        shares = reuses or getattr(module, "is_kv_shared_layer", False)
        if is_cached and not shares and (decodes or _is_cross(name)):
            yield name, module


def _takes_cache(module: nn.Module) -> bool:
    return not _CACHE_ARGUMENTS.isdisjoint(_arguments(type(module).forward))


@cache
def _arguments(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def _is_cross(name: str) -> bool:
    return any(part in _CROSS for part in name.split("."))


def _widths(module: Any, config: Any) -> tuple[int, int]:
    """Elements that a token's keys take in the cache, and its values."""
    if isinstance(getattr(module, "kv_lora_rank", None), int):
        return (module.kv_lora_rank, module.qk_rope_head_dim) if hasattr(module, "expand_kv") else _head_widths(module)
    for keys, values in _SEPARATE:
        if width := _width_out(getattr(module, keys, None)):
            return width, _width_out(getattr(module, values, None)) or width  # without a projection the keys serve
    if not hasattr(config, "hidden_size"):  # of several models in one (Bark), each with a configuration of its own
        config = getattr(module, "config", config)
    heads: Any = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 1)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        heads = 1
    return int(heads) * _head_dim(config), int(heads) * _head_dim(config)


def _head_widths(module: Any) -> tuple[int, int]:
    """Elements of a token's keys and of its values over all heads of a latent attention."""
    return module.num_heads * module.qk_head_dim, module.num_heads * module.v_head_dim


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


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
    """Tokens that ``module`` keeps at most; 0 means all."""
    attr = _WINDOW_OF.get(_layer_type(module, config))
    return int(getattr(config, attr, None) or 0) if attr else 0


# -- recurrent states --------------------------------------------------------------------------------------------------


def _state_bytes(model: nn.Module, itemsize: int) -> int:
    """Bytes per sequence of every module with a causal convolution that keeps its inputs between steps."""
    total = 0
    for module in model.modules():
        kernels = [child for child in module.children() if isinstance(child, nn.Conv1d)]
        if kernels and getattr(module, "layer_idx", None) is not None and _takes_cache(module):
            total += sum(kernel.in_channels * kernel.kernel_size[0] for kernel in kernels) * itemsize
            # Recurrences run in float32, and the cache takes the dtype of the first state that it is given.
            total += _recurrent_elements(module) * _FLOAT32_BYTES
    return total


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


# -- intermediate tensors ----------------------------------------------------------------------------------------------


def _attention_bytes(config: Any, attentions: Sequence[tuple[str, Any]], itemsize: int) -> int:
    """Peak of what one layer's attention allocates in every step, per token of every sequence, in bytes."""
    growth = expanded = 0
    eager = getattr(config, "_attn_implementation", None) == "eager"
    for name, module in attentions:
        if not (_is_cross(name) or _window(module, config)):
            # The default cache grows by concatenation: the old keys or values live beside the new ones.
            growth = max(growth, max(_widths(module, config)) * itemsize)
            # Latents of the whole context are expanded: keys and values per head, and the keys once more with their
            # rotary part.
            if hasattr(module, "expand_kv"):
                keys, values = _head_widths(module)
                copied = values if eager else 0  # a part of a projection, which a matrix product copies
                width = keys + values + module.num_heads * module.qk_nope_head_dim + copied
                expanded = max(expanded, int(width) * itemsize)
    if growth and eager:
        # Eager attention repeats keys and values for the query heads that share them. It makes scores, the same with
        # the mask added, their float32 softmax and its rounded copy. Fused kernels read the cache without a copy.
        heads = int(getattr(config, "num_attention_heads", 1))
        shared = heads != (getattr(config, "num_key_value_heads", None) or heads)
        repeated = 2 * _head_dim(config) * itemsize if shared else 0
        expanded += heads * (repeated + 2 * itemsize + 2 * _FLOAT32_BYTES)
    # Masks and positions take up to three int64 per token.
    return max(growth, expanded) + _INDEX_BYTES if growth else 0


def _activation_bytes(model: nn.Module, config: Any, attentions: Sequence[nn.Module], itemsize: int) -> int:
    """Bytes per row of the largest set of tensors that live at once in a decoding step.

    Layers run one after another, so only one of them has intermediates at a time.
    """
    hidden = int(getattr(config, "hidden_size", None) or getattr(config, "d_model", None) or 0)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    beside = {id(head), *(id(child) for module in attentions for child in module.children())}
    # The MLP: gate, activated gate, up and their product; as many for an activation written out in several operations.
    width = 4 * _widest_inner(model, beside)
    for module in attentions:
        widest = max((_width_out(child) for child in module.children()), default=0)
        # Of a fused projection the widest holds keys and values already.
        keys = next((w for name in ("k_proj", "key", "k") if (w := _width_out(getattr(module, name, None)))), 0)
        # Queries and keys are projected and rotated (two products and a turned copy); then the result.
        width = max(width, 5 * widest + 4 * keys)
    top_k, num_experts = _experts_per_token(config) or 1, 0
    for name, module in model.named_modules():
        if weights := _fused_experts(module):
            num_experts = max(num_experts, *(weight.shape[0] for weight in weights))
            widest = max(math.prod(weight.shape[1:]) // max(1, hidden) for weight in weights)
            biased = any(p is not None and p.dim() == 2 and n.endswith("bias") for n, p in module._parameters.items())
            # What one expert makes of a row at once, gate and up together. Biases are gathered per row.
            made = 3 * max(1, hidden) + (5 if biased else 2) * widest
            # An MLP that all rows share may stand beside the experts.
            width = max(width, top_k * made + 4 * _widest_inner(model.get_submodule(name.rpartition(".")[0])))
    # Beside each of these live the residual, its normed copy, and the output of the block, or of two where attention
    # and MLP run in parallel.
    return 4 * hidden * itemsize + max(
        width * itemsize + 3 * _FLOAT32_BYTES * num_experts,  # a layer; the router scores in float32
        3 * _FLOAT32_BYTES * hidden,  # a norm that computes in float32
        _width_out(head) * (itemsize + _FLOAT32_BYTES),  # logits of one position; generate() makes a float32 copy
    )


def _fused_experts(module: nn.Module) -> list[nn.Parameter]:
    """Weights of fused experts: the first of their three dimensions counts experts (of a convolution, channels)."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return []
    return [p for p in module._parameters.values() if p is not None and p.dim() == 3]


def _widest_inner(model: nn.Module, without: Collection[int] = ()) -> int:
    """The largest input of a linear layer in ``model``, that is, of the projection back from inside an MLP."""
    inputs = (
        getattr(m, "in_features", None) or getattr(m, "nx", None)
        for m in model.modules()
        if id(m) not in without and _width_out(m)
    )
    return max((size for size in inputs if isinstance(size, int)), default=0)


def _width_out(linear: Any) -> int:
    """Features that a linear layer of any kind returns; 0 if it is none."""
    sizes = (getattr(linear, attr, None) for attr in ("out_features", "nf"))
    return next((size for size in sizes if isinstance(size, int)), 0)
