"""Facts of a model beyond names and sizes: experts, context, caches, activations.

Caches are measured: two forwards on ``meta``, of two lengths, return them as transformers makes them. A third one, of
one more token, counts the kernels of a decoding step.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.errors import OptionError
from headrace.model.patterns import compile_pattern
from headrace.model.records import ModelProfile

# Implementations of experts in transformers that compute the same bits whatever the order of the rows. `eager` adds up
# the experts of a token in the order of their numbers.
ROW_IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "headrace")

# By the implementation of experts in transformers: what it reads of those in place.
_NOTES = {
    "grouped_mm": "each routed expert is read once per step, the others not at all",
    "batched_mm": "only routed experts are read, once per token that chose them; 'grouped_mm' reads each once",
    "headrace": "only routed experts are read, up to 8 rows once per token that chose them",
    "eager": "only routed experts are read, but the host waits for the routing and the step cannot be captured; "
    "model.set_experts_implementation('grouped_mm') does without",
}

# A tensor of a cache, and how many tokens its layer keeps at most; 0 means all.
_Kept = tuple[torch.Tensor, int]
# Tokens of the longer forward that is measured; the other has half as many.
_LENGTH = 32
# Every model has this attention, and these experts run on `meta` in every dtype.
_ON_META = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
# Mixtral, Qwen, DeepSeek, GPT-OSS; Hunyuan, DBRX, ERNIE, Aria, Gemma 4.
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "moe_num_active_experts", "top_k_experts", "top_k")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MAX_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions")
# Products of matrices, whose time is that of their weights, and operations that launch no kernel although no views.
_NOT_COUNTED = ("mm", "bmm", "addmm", "baddbmm", "_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty")
_FLOAT32_BYTES = 4
_INDEX_BYTES = 3 * 8


def profile_of(model: nn.Module, context: int = 0) -> ModelProfile:
    """The profile of ``model``, which may be on ``meta``; with a ``context``, memory too (:func:`measured`).

    For a model without a transformers configuration these are the defaults. Touches no data.
    """
    read = getattr(getattr(model, "config", None), "get_text_config", None)
    if not callable(read):
        return ModelProfile()
    config: Any = read(decoder=True)  # of the part that generates text
    profile = ModelProfile(
        experts_per_token=_experts_per_token(config),
        max_context=_max_context(config),
        row_readers=tuple(n for n, m in model.named_modules() if _reads_rows(m)),
    )
    return measured(profile, model) if context else profile


@torch.no_grad()
def measured(profile: ModelProfile, model: nn.Module) -> ModelProfile:
    """``profile`` with the memory that ``model`` takes beside its weights and the kernels of a step; a second or so of
    forwards on ``meta``.

    It is that of transformers' default caches (``DynamicCache``) and of one step of ``generate``, in the model's dtype.
    For an encoder-decoder the source counts as long as the context, unless the configuration fixes its length
    (Whisper); of several window lengths the largest counts for all.

    Raises:
        OptionError: the model keeps a cache, and none could be measured.
    """
    # Of a wrapper (peft) the model within. The caches of an engine, whose models are its own, are the engine's.
    source: Any = next((m for m in model.modules() if callable(getattr(type(m), "_from_config", None))), None)
    if source is None:
        return profile
    config, dtype = source.config.get_text_config(decoder=True), source.dtype
    if not (dtype.is_floating_point and dtype.itemsize > 1):
        dtype = torch.get_default_dtype()
    long = max(2, min(_LENGTH, profile.max_context or _LENGTH))
    pairs, why, twin, kernels = [], "its forward returns none", source, None
    try:
        from transformers.initialization import meta_device_safe_creation_ops

        by_mask = _config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
        safe = meta_device_safe_creation_ops()
        with torch.device("meta"), by_mask, safe, _OnMeta() as meter:
            twin = type(source)._from_config(copy.deepcopy(source.config), dtype=dtype, **_ON_META).eval()
            kept = [_forward(twin, tokens, dtype) for tokens in (long // 2, long)]
            pairs = list(zip(*(list(_tensors_in(each, set())) for each in kept), strict=True))
            before = meter.kernels
            with suppress(Exception):  # memory is known without
                if chosen_by(source) == "headrace":
                    twin.set_experts_implementation("headrace")
                if pairs:
                    _forward(twin, 1, dtype, kept[1])
                    kernels = meter.kernels - before
    except Exception as error:  # the code of any model, on tensors without data
        why = f"{type(error).__name__}: {error}"
    decodes = getattr(config, "is_decoder", True) or source.config.is_encoder_decoder
    if not pairs and decodes and getattr(config, "use_cache", False) and source.can_generate():
        raise OptionError(
            f"context: expected a cache that can be measured, as {type(source).__name__} keeps one (use_cache in its "
            f"configuration), found none ({why}); leave the context out (--context), and leave room for the cache"
        )
    caches, growth = _sizes(pairs, long // 2, long)
    return replace(
        profile,
        **caches,
        activation_bytes_per_row=_activation_bytes(twin, config, dtype.itemsize),
        attention_bytes_per_token=_attention_bytes(twin, config, growth, dtype.itemsize),
        kernels_per_step=kernels,
        copied_experts_bytes_per_row=_copied_experts_bytes(profile, twin),
    )


def _copied_experts_bytes(profile: ModelProfile, model: nn.Module) -> int:
    """Bytes of the experts of a row, which ``batched_mm`` copies to multiply with them: on a GPU decoding uses it."""
    if not profile.row_readers or chosen_by(model) == "headrace":
        return 0
    layers = (_fused_experts(module) for module in model.modules() if chosen_implementation(module))
    of_one = max((sum(weight[0].nbytes for weight in weights) for weights in layers), default=0)
    return (profile.experts_per_token or 1) * of_one


def _reads_rows(module: nn.Module) -> bool:
    return is_routed(module) or chosen_implementation(module) in ROW_IMPLEMENTATIONS


def is_routed(module: nn.Module) -> bool:
    """Whether ``module`` is transformers' experts in MXFP4, which triton_kernels runs with a routing of its own."""
    return hasattr(module, "forward_routed")


def chosen_implementation(module: nn.Module) -> str | None:
    """The implementation that runs the experts which ``module`` holds; ``None`` unless they are of transformers."""
    return chosen_by(module) if hasattr(module, "num_experts") and _fused_experts(module) else None


def chosen_by(module: nn.Module | None) -> str | None:
    """The implementation of experts that the configuration of ``module`` names."""
    chosen: str | None = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return chosen


def notes_on_experts(model: nn.Module | None, in_place: Iterable[str]) -> list[str]:
    """Notes for ``stats()`` on experts that transformers runs: by what, and how it reads those ``in_place``."""
    chosen = chosen_by(model)
    if chosen is None:
        return []
    notes = ["experts of up to 8 rows run by 'headrace', of more by 'grouped_mm'"] * (chosen == "headrace")
    if any(map(compile_pattern("experts"), in_place)):
        meaning = _NOTES.get(chosen, "whether it reads only the routed experts is not known to headrace")
        notes.append(f"experts are read in place by {chosen!r}: {meaning}")
    return notes


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


# -- caches ------------------------------------------------------------------------------------------------------------


def _sizes(pairs: Iterable[tuple[_Kept, _Kept]], short: int, long: int) -> tuple[dict[str, Any], int]:
    """A profile's sizes from caches after ``short`` and ``long`` tokens; and the most that a tensor grows by."""
    states, growths = 0, [0]
    windows: dict[int, int] = {}
    for (tensor, window), (longer, _) in pairs:
        # A layer with a window keeps its last tokens but for the one of the next step.
        if window and tensor.shape[-2] == (tokens := min(short, window - 1)):
            windows[window] = windows.get(window, 0) + tensor.nbytes // tokens
        else:
            growths.append(math.ceil((longer.nbytes - tensor.nbytes) / (long - short)))
            states += max(0, tensor.nbytes - growths[-1] * short)
    return {
        "kv_bytes_per_token": sum(growths),
        "kv_window_bytes_per_token": sum(windows.values()),
        "window": max(windows, default=0),
        "state_bytes_per_sequence": states,
    }, max(growths)


def _forward(model: Any, length: int, dtype: torch.dtype, cache: Mapping[str, Any] = {}) -> dict[str, Any]:
    """The cache of ``model`` after a forward of ``length`` tokens behind ``cache``, by the name of its argument."""
    from transformers.generation.utils import ALL_CACHE_NAMES
    from transformers.modeling_outputs import BaseModelOutput

    given: dict[str, Any] = {"input_ids": torch.ones(1, length, dtype=torch.int64)}
    if model.config.is_encoder_decoder:
        text = model.config.get_text_config(decoder=True)
        source = getattr(model.get_encoder(), "config", text).get_text_config()
        # Tokens of an encoder whose output has one length (audio); else they follow the input.
        shape = getattr(text, "max_source_positions", None) or length, getattr(source, "hidden_size", None)
        encoded = BaseModelOutput(last_hidden_state=torch.ones(1, shape[0], shape[1] or source.d_model, dtype=dtype))
        encoded.attention_mask = encoded.router_logits = None  # what some encoders return beside
        given = {"encoder_outputs": encoded, "decoder_input_ids": given["input_ids"]}
    elif hasattr(decoder := model.get_decoder(), "config"):
        model = decoder  # without towers, whose input is another
    output = model(**given, **cache, use_cache=True, return_dict=True)
    name = next((name for name in ALL_CACHE_NAMES if output.get(name) is not None), None)
    return {} if name is None else {name: output[name]}


class _OnMeta(TorchDispatchMode):
    """Forwards on ``meta`` that ask for a value get 1, or True; those that ask which rows go to an expert, none.

    Attributes:
        kernels: operations so far that launch kernels on a GPU, without products of matrices.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        self.kernels += _launches(func)
        return func(*args, **(kwargs or {}))


@functools.cache  # asked for every operation of three forwards
def _launches(func: Any) -> bool:
    makes_tensors = any(isinstance(each.type, torch.TensorType) for each in func._schema.returns)
    return makes_tensors and not func.is_view and func.overloadpacket.__name__ not in _NOT_COUNTED


def _tensors_in(value: Any, seen: set[int], window: int = 0) -> Iterator[_Kept]:
    """Every tensor of a cache once, with the tokens that its layer keeps at most; 0 means all."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.dim() > 1:  # the others are counters
            yield value, window
        return
    if getattr(value, "is_sliding", None) is True:
        window = value.sliding_window
    inner = value if isinstance(value, list | tuple | dict) else getattr(value, "__dict__", {})
    for each in inner.values() if isinstance(inner, dict) else inner:
        yield from _tensors_in(each, seen, window)


# -- intermediate tensors ----------------------------------------------------------------------------------------------


def _attention_bytes(model: nn.Module, config: Any, growth: int, itemsize: int) -> int:
    """Peak of what one layer's attention allocates in every step, per token of every sequence, in bytes."""
    # The default cache grows by concatenation: the old keys or values live beside the new ones, i.e. ``growth``.
    expanded, eager = 0, getattr(config, "_attn_implementation", None) == "eager"
    for module in model.modules():
        # Latents of the whole context are expanded: keys and values per head, and the keys once more with their rotary
        # part.
        if hasattr(module, "expand_kv") and getattr(module, "sliding_window", None) is None:
            latent: Any = module
            keys, values = latent.num_heads * latent.qk_head_dim, latent.num_heads * latent.v_head_dim
            copied = values if eager else 0  # a part of a projection, which a matrix product copies
            width = keys + values + latent.num_heads * latent.qk_nope_head_dim + copied
            expanded = max(expanded, int(width) * itemsize)
    if growth and eager:
        # Eager attention repeats keys and values for the query heads that share them. It makes scores, the same with
        # the mask added, their float32 softmax and its rounded copy. Fused kernels read the cache without a copy.
        heads = int(getattr(config, "num_attention_heads", 1))
        shared = heads != (getattr(config, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        repeated = 2 * head_dim * itemsize if shared else 0
        expanded += heads * (repeated + 2 * itemsize + 2 * _FLOAT32_BYTES)
    # Masks and positions take up to three int64 per token.
    return max(growth, expanded) + _INDEX_BYTES if growth else 0


def _activation_bytes(model: nn.Module, config: Any, itemsize: int) -> int:
    """Bytes per row of the largest set of tensors that live at once in a decoding step.

    Layers run one after another, so only one of them has intermediates at a time.
    """
    hidden = int(getattr(config, "hidden_size", None) or getattr(config, "d_model", None) or 0)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    attentions = list(_attentions(model))
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
            # Outputs of one expert for a row, gate and up together. Biases are gathered per row.
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


def _attentions(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that keep a part of the cache and project themselves; a convolution is in those of recurrent layers."""
    for module in model.modules():
        children = list(module.children())
        recurrent = any(isinstance(child, nn.Conv1d) for child in children)
        projects = sum(_width_out(child) > 0 for child in children) > 1
        if getattr(module, "layer_idx", None) is not None and projects and not recurrent:
            yield module


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
