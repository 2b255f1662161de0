"""Decoder models of published shapes with seeded random weights: a mixture-of-experts stack, and transformers models.

The dense stack is :class:`headrace.cli.bench_step.Stack`. Random weights would send almost every token to the
same experts, which is a best case for reads in place; so the experts of every row are drawn uniformly, seeded by the
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    StaticCache,
)
from transformers.masking_utils import create_masks_for_generate

import published_configs
from headrace.cli.bench_step import fill
from headrace.plan.routing_traces import Trace

__all__ = [
    "CONFIGS",
    "DEEPSEEK_V2_LITE",
    "DecodeStep",
    "FollowedTraces",
    "MoeShape",
    "MoeStack",
    "build_model",
    "own_routing",
    "routers",
    "routing",
    "spread_routing",
]


# -- a stack without attention state -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MoeShape:
    """Sizes of a decoder with latent attention and routed experts, in elements.

    Attributes:
        hidden: width of the residual stream.
        query, latent, rope, value: widths of the query, of the compressed keys and values, of the part of the key that
            carries the position, and of the values.
        dense: inner width of the MLP of the first layer, which has no experts.
        expert: inner width of one expert.
        num_experts, experts_per_token, num_shared: routed experts, how many a row is sent to, and those all rows share.
    """

    name: str
    num_layers: int
    hidden: int
    query: int
    latent: int
    rope: int
    value: int
    dense: int
    expert: int
    num_experts: int
    experts_per_token: int
    num_shared: int


# DeepSeek-V2-Lite: config.json of the published checkpoint (16 heads of 128 + 64).
DEEPSEEK_V2_LITE = MoeShape("deepseek-v2-lite", 27, 2048, 3072, 512, 64, 2048, 10944, 1408, 64, 6, 2)


class Attention(nn.Module):
    """The projections of latent attention; attention itself is replaced by an elementwise mix of the same widths."""

    def __init__(self, shape: MoeShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.q_proj = nn.Linear(shape.hidden, shape.query, bias=False, dtype=dtype)
        self.kv_a_proj = nn.Linear(shape.hidden, shape.latent + shape.rope, bias=False, dtype=dtype)
        self.kv_b_proj = nn.Linear(shape.latent, 2 * shape.value, bias=False, dtype=dtype)
        self.o_proj = nn.Linear(shape.value, shape.hidden, bias=False, dtype=dtype)
        self._latent, self._value = shape.latent, shape.value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [rows, hidden]."""
        key, value = self.kv_b_proj(self.kv_a_proj(x)[:, : self._latent]).chunk(2, dim=-1)
        return self.o_proj(self.q_proj(x)[:, : self._value] + key * value)


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, hidden: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(hidden, inner, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(inner, hidden, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [rows, hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Routed experts in two fused parameters, run by grouped products, which read the experts that have rows."""

    def __init__(self, shape: MoeShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(shape.num_experts, 2 * shape.expert, shape.hidden, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(shape.num_experts, shape.hidden, shape.expert, dtype=dtype))

    def forward(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """``x``: [rows, hidden]; ``expert``: [rows, experts per token], which experts each row goes to."""
        rows, per_row = expert.shape
        of_row, order = expert.flatten().sort(stable=True)
        every = torch.arange(len(self.down_proj), device=x.device)
        ends = torch.searchsorted(of_row, every, right=True, out_int32=True)
        gate, up = F.grouped_mm(x[order // per_row], self.gate_up_proj.mT, offs=ends).chunk(2, dim=-1)
        out = F.grouped_mm(F.silu(gate) * up, self.down_proj.mT, offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        # Summed in a fixed order; adding into the rows by index would not repeat its own bits.
        return out[back].view(rows, per_row, -1).mean(dim=1)


class MoeLayer(nn.Module):
    """One decoder layer; the first has a dense MLP."""

    def __init__(self, shape: MoeShape, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(shape.hidden, eps=1e-6, dtype=dtype)
        self.self_attn = Attention(shape, dtype)
        self.post_norm = nn.RMSNorm(shape.hidden, eps=1e-6, dtype=dtype)
        self.shape, self.index = shape, index
        if index == 0:
            self.mlp = Mlp(shape.hidden, shape.dense, dtype)
        else:
            self.experts = Experts(shape, dtype)
            self.shared_experts = Mlp(shape.hidden, shape.expert * shape.num_shared, dtype)
        self._routes: dict[tuple[int, torch.device], torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [rows, hidden]."""
        x = x + self.self_attn(self.input_norm(x))
        h = self.post_norm(x)
        if self.index == 0:
            return x + self.mlp(h)
        return x + self.experts(h, self._route(h)) + self.shared_experts(h)

    def _route(self, x: torch.Tensor) -> torch.Tensor:
        key = (x.shape[0], x.device)
        if key not in self._routes:  # made in the eager run that precedes a capture
            generator = torch.Generator().manual_seed(self.index)
            scores = torch.rand(x.shape[0], self.shape.num_experts, generator=generator)
            self._routes[key] = scores.topk(self.shape.experts_per_token).indices.to(x.device)
        return self._routes[key]


class MoeStack(nn.Module):
    """``num_layers`` layers, nothing else."""

    def __init__(self, shape: MoeShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoeLayer(shape, index, dtype) for index in range(shape.num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [rows, hidden] -> the same."""
        for layer in self.layers:
            x = layer(x)
        return x


# -- transformers models -----------------------------------------------------------------------------------------------

PROMPT_TOKENS = 128
MAX_CACHE_TOKENS = 256


# The names in --model.
CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "qwen3-8b": partial(Qwen3Config, **published_configs.QWEN3_8B),
    "deepseek-v2-lite": partial(DeepseekV2Config, **published_configs.DEEPSEEK_V2_LITE),
    "qwen3-30b-a3b": partial(Qwen3MoeConfig, **published_configs.QWEN3_30B_A3B),
    "llama-3.3-70b-nf4": partial(
        LlamaConfig,
        **published_configs.LLAMA_3_3_70B,
        quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    # In bf16, as transformers runs MXFP4 without the package kernels, with the experts that generate() decodes with.
    # Its window of 128 tokens would be full, and move on with every step.
    "gpt-oss-20b": partial(
        GptOssConfig,
        **published_configs.GPT_OSS_20B | {"sliding_window": MAX_CACHE_TOKENS, "experts_implementation": "batched_mm"},
    ),
}


def build_model(
    config: PreTrainedConfig, rest: torch.device | str, device: torch.device | str, experts: str | None = None
) -> nn.Module:
    """A bf16 model whose weights rest on ``rest``; random numbers are drawn on ``device``.

    With a ``quantization_config`` the linear layers of its decoder are in NF4 of bitsandbytes with quantised scales,
    layer by layer.

    ``experts``: the experts implementation, where the model has any.
    """
    if experts is not None:
        config._experts_implementation = experts
    with torch.device("meta"):
        factory: Any = AutoModelForCausalLM
        model: nn.Module = factory.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is None:
        fill(model, rest, device)
    else:
        _fill_in_four_bits(model, rest, device)
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                # The rotary frequencies are the only buffers of these models, and computed from the config.
                with torch.device(device):
                    setattr(module, name, type(module)(config).get_buffer(name))
    return model


def _fill_in_four_bits(model: Any, rest: torch.device | str, device: torch.device | str) -> None:
    """Weights of one layer at a time, in bf16 and then in NF4; outside of the layers in bf16."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    options = {"compress_statistics": True, "quant_type": "nf4"}
    outside = (model.model.embed_tokens, model.model.norm, model.lm_head)
    for seed, module in enumerate(outside):
        fill(module, rest, device, seed)
    for seed, layer in enumerate(model.model.layers, start=len(outside)):
        fill(layer, device, device, seed)
        for name, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear):
                sizes = linear.in_features, linear.out_features
                packed = Linear4bit(*sizes, False, torch.bfloat16, **options, device=torch.device("meta"))
                weight = Params4bit(linear.weight.data, requires_grad=False, **options)
                packed.weight = weight.to(device).to(rest)  # the first move quantises
                packed.quant_state = packed.weight.quant_state
                layer.set_submodule(name, packed.eval())


def routers(model: nn.Module) -> list[Any]:
    """The routers of ``model``, in order of the layers."""
    kinds = ("DeepseekV2TopkRouter", "Qwen3MoeTopKRouter", "GptOssTopKRouter")
    return [module for module in model.modules() if type(module).__name__ in kinds]


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


class FollowedTraces:
    """Has the routers of ``model`` take the choices of one sequence from traces: its token ``t`` those of row ``t``."""

    def __init__(self, model: nn.Module, traces: Sequence[Trace], device: torch.device) -> None:
        self._at = torch.zeros(len(traces), dtype=torch.long, device=device)  # there, so that graphs count, too
        self._hooks = [
            router.register_forward_hook(partial(self._choose, layer, torch.from_numpy(trace).to(device, torch.long)))
            for layer, (router, trace) in enumerate(zip(routers(model), traces, strict=True))
        ]

    def restart(self) -> None:
        """The next token is the first one of a sequence."""
        self._at.zero_()

    def remove(self) -> None:
        """Let routers choose by themselves."""
        for hook in self._hooks:
            hook.remove()

    def _choose(self, layer: int, table: torch.Tensor, router: nn.Module, args: Any, out: Any) -> Any:
        logits, weights, chosen = out
        rows = torch.arange(len(chosen), device=table.device) + self._at[layer]
        self._at[layer] += len(chosen)
        return logits, weights, table.index_select(0, rows)


class DecodeStep:
    """One token for each of ``batch`` sequences behind a prompt; the position is fixed, so all steps are the same."""

    def __init__(self, model: Any, run: Callable[..., Any], batch: int, device: torch.device) -> None:
        self._run = run
        self._cache = StaticCache(model.config, max_cache_len=MAX_CACHE_TOKENS)
        generator = torch.Generator(device=device).manual_seed(batch)
        vocabulary = model.config.vocab_size
        prompt = torch.randint(0, vocabulary, (batch, PROMPT_TOKENS), device=device, generator=generator)
        of_steps = model.config._experts_implementation
        if of_steps == "batched_mm":  # it copies the experts of each token, so generate() has others for the prompt
            model.set_experts_implementation("grouped_mm")
        model(prompt, past_key_values=self._cache, logits_to_keep=1)
        if of_steps == "batched_mm":
            model.set_experts_implementation(of_steps)
        self._token = torch.randint(0, vocabulary, (batch, 1), device=device, generator=generator)
        self._position = torch.full((batch, 1), PROMPT_TOKENS, device=device)
        layers: Any = self._cache.layers
        self._lengths: list[Any] = [layer.cumulative_length for layer in layers]
        self._mask: Any = None
        if model.config._attn_implementation == "eager":  # it would copy a scalar from the host, which no graph may
            self._return_to_prompt()
            hidden = torch.empty(batch, 1, model.config.hidden_size, dtype=model.dtype, device=device)
            self._mask = create_masks_for_generate(model.config, hidden, None, self._cache, self._position)

    def __call__(self) -> torch.Tensor:
        """Logits: [batch, 1, vocabulary]."""
        self._return_to_prompt()
        out = self._run(
            self._token, attention_mask=self._mask, past_key_values=self._cache, position_ids=self._position
        )
        return out.logits

    def _return_to_prompt(self) -> None:
        torch._foreach_zero_(self._lengths)
        torch._foreach_add_(self._lengths, PROMPT_TOKENS)
