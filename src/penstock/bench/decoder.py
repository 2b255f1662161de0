"""Decode steps of real ``transformers`` models of published shapes, with seeded random weights and a static cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV2Config, PreTrainedConfig, Qwen3Config, StaticCache

__all__ = ["CONFIGS", "DecodeStep", "build_model", "own_routing", "routers", "routing", "spread_routing"]

PROMPT_TOKENS = 128
MAX_CACHE_TOKENS = 256


def _qwen3_8b() -> PreTrainedConfig:
    return Qwen3Config(
        num_hidden_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=False,
    )


def _deepseek_v2_lite() -> PreTrainedConfig:
    return DeepseekV2Config(
        num_hidden_layers=27,
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        vocab_size=102400,
        topk_method="greedy",
        tie_word_embeddings=False,
    )


# Sizes of the published config.json files.
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-8b": _qwen3_8b,
    "deepseek-v2-lite": _deepseek_v2_lite,
}


def build_model(
    config: PreTrainedConfig, rest: torch.device | str, device: torch.device | str, experts: str | None = None
) -> nn.Module:
    """A bf16 model whose weights rest on ``rest``; random numbers are drawn on ``device``.

    ``experts``: the experts implementation, where the model has any.
    """
    if experts is not None:
        config._experts_implementation = experts
    with torch.device("meta"):
        factory: Any = AutoModelForCausalLM
        model: nn.Module = factory.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator(device=device).manual_seed(0)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                value.fill_(1.0) if value.dim() == 1 else value.normal_(0.0, 0.02, generator=generator)
                setattr(module, name, nn.Parameter(value.to(rest), requires_grad=False))
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                # The rotary frequencies are the only buffers of these models, and computed from the config.
                with torch.device(device):
                    setattr(module, name, type(module)(config).get_buffer(name))
    return model.eval()


def routers(model: nn.Module) -> list[Any]:
    """The routers of ``model``, in order of the layers."""
    return [module for module in model.modules() if type(module).__name__ == "DeepseekV2TopkRouter"]


def routing(router: Any, layer: int, num_rows: int) -> torch.Tensor:
    """Experts drawn uniformly without replacement for every row, seeded by the layer: [num_rows, top_k]."""
    generator = torch.Generator().manual_seed(layer)
    draws = [torch.randperm(router.num_experts, generator=generator)[: router.top_k] for _ in range(num_rows)]
    return torch.stack(draws)


def spread_routing(model: nn.Module, num_rows: int, device: torch.device) -> None:
    """Route the rows of every layer as :func:`routing` says, instead of an earlier call's way or the router's own.

    Random weights send almost every token to the same experts, which would measure a best case.
    """
    for layer, router in enumerate(routers(model)):
        chosen = routing(router, layer, num_rows).to(device)
        router._forward_hooks.clear()
        router.register_forward_hook(lambda module, args, out, chosen=chosen: (out[0], out[1], chosen))


def own_routing(model: nn.Module) -> None:
    """Let the routers decide again."""
    for router in routers(model):
        router._forward_hooks.clear()


class DecodeStep:
    """One token for each of ``batch`` sequences behind a prompt; the position is fixed, so all steps are the same."""

    def __init__(self, model: Any, run: Callable[..., Any], batch: int, device: torch.device) -> None:
        self._run = run
        self._cache = StaticCache(model.config, max_cache_len=MAX_CACHE_TOKENS)
        generator = torch.Generator(device=device).manual_seed(batch)
        vocabulary = model.config.vocab_size
        prompt = torch.randint(0, vocabulary, (batch, PROMPT_TOKENS), device=device, generator=generator)
        model(prompt, past_key_values=self._cache, logits_to_keep=1)
        self._token = torch.randint(0, vocabulary, (batch, 1), device=device, generator=generator)
        self._position = torch.full((batch, 1), PROMPT_TOKENS, device=device)
        layers: Any = self._cache.layers
        self._lengths: list[Any] = [layer.cumulative_length for layer in layers]

    def __call__(self) -> torch.Tensor:
        """Logits: [batch, 1, vocabulary]."""
        torch._foreach_zero_(self._lengths)
        torch._foreach_add_(self._lengths, PROMPT_TOKENS)
        out = self._run(self._token, past_key_values=self._cache, position_ids=self._position)
        return out.logits  # type: ignore[no-any-return]
