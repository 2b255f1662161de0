"""Tiny mixtures of experts of transformers, and how tests offload and run them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from headrace import Rules

IDS = torch.arange(7).reshape(1, 7) * 13 % 97


def qwen(implementation: str = "grouped_mm", **changes: Any) -> Qwen3MoeForCausalLM:
    sizes: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_experts": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 2}
    torch.manual_seed(3)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **heads, "vocab_size": 100, **changes})).eval()
    model.set_experts_implementation(implementation)
    return model


def gpt_oss() -> GptOssForCausalLM:
    """Experts with biases, whose rows are small, and transposed weights."""
    sizes = {
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_local_experts": 6, "head_dim": 32,
    }  # fmt: skip
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    torch.manual_seed(3)
    model = GptOssForCausalLM(GptOssConfig(**sizes, **heads, vocab_size=100)).eval()
    model.set_experts_implementation("grouped_mm")
    return model


def outputs(model: nn.Module) -> list[torch.Tensor]:
    """Of a prompt, and of several steps of one token."""
    with torch.inference_mode():
        return [model(IDS).logits, *(model(IDS[:, at : at + 1]).logits for at in (0, 4, 0))]


def cached(num_slots: int) -> Rules:
    return Rules([("experts", "cache")], expert_slots=num_slots)
