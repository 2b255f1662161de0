"""A model -> its :class:`~penstock.model.profile_facts.ModelProfile`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.model.profile_activations import activation_bytes_per_row, experts_per_token, first_int
from penstock.model.profile_caches import attention_bytes_per_token, layers_of, source_tokens
from penstock.model.profile_facts import ModelProfile

__all__ = ["traits_of"]

_MAX_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions")


def traits_of(model: nn.Module) -> ModelProfile:
    """Read the configuration and the modules of ``model``, which may be on ``meta``; touches no data.

    Figures are those of transformers' default caches (``DynamicCache``) and of one step of ``generate``, in the
    model's dtype. For an encoder-decoder the source counts as long as the context, unless the configuration fixes its
    length (Whisper); of several window lengths the largest counts for all.

    Returns:
        the traits; for a model without a transformers configuration the defaults.
    """
    config = text_config(model)
    if config is None:
        return ModelProfile()
    dtype = _dtype(model)
    layers = layers_of(model, config, dtype)
    windows = [layer.window for layer in layers if layer.window]
    cross = sum(layer.cross_bytes for layer in layers)
    fixed_source = source_tokens(config)
    return ModelProfile(
        experts_per_token=experts_per_token(config),
        kv_bytes_per_token=sum(s.kv_bytes for s in layers if not s.window) + (0 if fixed_source else cross),
        kv_window_bytes_per_token=sum(layer.kv_bytes for layer in layers if layer.window),
        window=max(windows, default=0),
        state_bytes_per_sequence=sum(layer.state_bytes for layer in layers) + cross * fixed_source,
        activation_bytes_per_row=activation_bytes_per_row(model, config, dtype),
        attention_bytes_per_token=attention_bytes_per_token(model, config, dtype),
        max_context=first_int(config, _MAX_CONTEXT),
    )


def text_config(model: nn.Module) -> Any | None:
    """The configuration of the part that generates text; ``None`` if ``model`` has none of transformers' kind."""
    read = getattr(getattr(model, "config", None), "get_text_config", None)
    return read(decoder=True) if callable(read) else None


def _dtype(model: nn.Module) -> torch.dtype:
    stated = getattr(model, "dtype", None)
    if isinstance(stated, torch.dtype) and stated.is_floating_point and stated.itemsize > 1:
        return stated
    return torch.get_default_dtype()
