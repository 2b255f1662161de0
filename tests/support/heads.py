"""Checkpoints of tiny Mellums with a head of multi-token prediction, which guesses the last token once more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import MellumConfig, MellumForCausalLM

from checkpoints import rewrite

LAYERS, WIDTH = 4, 128


def mellum(folder: Path, kind: str = "dense", *, vocabulary: int = 64, tied: bool = False) -> Path:
    """``kind``: of the layers, the head's included, ``dense`` or ``sparse`` (experts)."""
    if not hasattr(MellumConfig(), "num_mtp_layers"):
        pytest.skip("this transformers runs no heads of Mellum")
    torch.manual_seed(0)
    saved = MellumForCausalLM(_config(LAYERS + 1, kind, vocabulary, tied))  # its last layer becomes the head's
    saved.save_pretrained(folder)
    rewrite(folder, _with_head(tied))
    head = {"num_nextn_predict_layers": 1, "mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": [kind]}
    config = _config(LAYERS, kind, vocabulary, tied, **head)
    config.architectures, config.dtype = ["MellumForCausalLM"], torch.float32
    config.save_pretrained(folder)
    return folder


def _config(layers: int, kind: str, vocabulary: int, tied: bool, **head: object) -> MellumConfig:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 256, "moe_intermediate_size": 64, "vocab_size": vocabulary}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 256}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "mlp_layer_types": [kind] * layers}
    return MellumConfig(**sizes, **heads, **experts, num_hidden_layers=layers, tie_word_embeddings=tied, **head)


def _with_head(tied: bool) -> Callable[[dict[str, torch.Tensor]], None]:
    def alter(tensors: dict[str, torch.Tensor]) -> None:
        last = f"model.layers.{LAYERS}."
        for name in [name for name in tensors if name.startswith(last)]:
            value = tensors.pop(name)
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))  # nothing, so that the embedding gets through
            tensors["mtp.layers.0." + name.removeprefix(last)] = torch.zeros_like(value) if adds else value
        tensors["mtp.fc.weight"] = torch.eye(WIDTH, 2 * WIDTH)
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            tensors[f"mtp.{norm}.weight"] = torch.ones(WIDTH)
        if not tied:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    return alter
