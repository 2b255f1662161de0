"""A small engine of the kind that builds its model layer by layer, for tests of what engines see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from headrace.offloaders.base import BaseOffloader, NoopOffloader
from headrace.offloaders.layerwise import EngineOffloader, EnginePolicy, EngineTraits

VOCABULARY, WIDTH = 300, 160  # a projection is 100 KiB: more than what stays resident for being tiny


class Table(nn.Module):
    """A lookup table that is no ``nn.Embedding``, as engines have."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, width), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight)


class Head(Table):
    """Multiplied with by hand: its forward is never called."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("LMHead's weights should be used by hand")


class Wrapped(nn.Module):
    """As LoRA wraps a linear module."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x)


class Linear(nn.Module):
    """A weight with a loader's attributes, like an engine's parallel linear."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width_out, width_in) / width_in**0.5, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight)


class Attention(nn.Module):
    """Fused projections, without the attention between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv_proj = Linear(width, 3 * width)
        self.o_proj = Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        return self.o_proj(torch.sigmoid(q * k) * v)


class Mlp(nn.Module):
    """Gate and up in one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(width, 4 * width)
        self.down_proj = Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)


class Layer(nn.Module):
    """Takes and returns the residual beside the hidden states."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.self_attn = Attention(width)
        self.mlp = Mlp(width)
        self.norm = nn.LayerNorm(width)

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x if residual is None else x + residual
        x = self.self_attn(self.norm(residual))
        return self.mlp(x), residual


class Decoder(nn.Module):
    """What an engine compiles."""

    def __init__(self, num_layers: int, width: int, wrap: Callable[..., list[nn.Module]]) -> None:
        super().__init__()
        self.embed_tokens = Table(VOCABULARY, width)
        self.layers = nn.ModuleList(wrap(Layer(width) for _ in range(num_layers)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, residual = self.embed_tokens(ids), None
        positions = torch.arange(ids.shape[-1], device=ids.device)
        for layer in self.layers:
            x, residual = layer(positions, x, residual)
        assert residual is not None
        return x + residual


class EngineModel(nn.Module):
    """Decoder, a tower of layers that the engine does not build as layers, and a head.

    ``hands_over``: like vLLM since 0.29, give a tower that is built to an offloader that takes towers.
    """

    def __init__(
        self, offloader: BaseOffloader, num_layers: int = 8, width: int = WIDTH, hands_over: bool = False
    ) -> None:
        super().__init__()
        self.visual = nn.ModuleList(Linear(width, width) for _ in range(2))
        if hands_over and offloader.supports_tower_offload:
            offloader.wrap_modules((tower for tower in [self.visual]), prefix="visual")
        self.model = Decoder(num_layers, width, offloader.wrap_modules)
        self.lm_head = Head(VOCABULARY, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.model(ids)
        for layer in self.visual:
            x = layer(x)
        return functional.linear(x, self.lm_head.weight)


def is_lookup(module: nn.Module) -> bool:
    return isinstance(module, Table) and not isinstance(module, Head)


TRAITS = EngineTraits(is_lookup)


def resident(num_layers: int = 8, width: int = WIDTH) -> EngineModel:
    """The model as it is without an offloader, with the weights of the functions below."""
    torch.manual_seed(7)
    return EngineModel(NoopOffloader(), num_layers, width)


def unfinished(
    policy: EnginePolicy, kind: type[EngineOffloader] = EngineOffloader, traits: EngineTraits = TRAITS, **options: Any
) -> tuple[EngineModel, EngineOffloader]:
    """A model whose layers an offloader was given while they were built, before ``post_init``; ``options``: of it."""
    torch.manual_seed(7)
    offloader = kind(policy, lambda: model, traits)
    model = EngineModel(offloader, **options)
    return model, offloader


def build(
    policy: EnginePolicy, kind: type[EngineOffloader] = EngineOffloader, **options: Any
) -> tuple[EngineModel, EngineOffloader]:
    model, offloader = unfinished(policy, kind, **options)
    offloader.post_init()
    return model, offloader


def ids(rows: int = 3) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, 5), generator=torch.Generator().manual_seed(rows))
