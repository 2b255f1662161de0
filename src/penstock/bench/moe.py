"""A mixture-of-experts stack of a published shape, with set routing and without attention state.

Random weights would send almost every token to the same experts, which measures a best case for reading in place; so
the experts of every row are drawn uniformly, seeded by the layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["DEEPSEEK_V2_LITE", "MoeShape", "MoeStack"]


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
        return self.o_proj(self.q_proj(x)[:, : self._value] + key * value)  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, hidden: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(hidden, inner, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(inner, hidden, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [rows, hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


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
            return x + self.mlp(h)  # type: ignore[no-any-return]
        return x + self.experts(h, self._route(h)) + self.shared_experts(h)  # type: ignore[no-any-return]

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
