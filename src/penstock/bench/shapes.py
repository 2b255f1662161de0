"""Decoder stacks of published shapes with seeded random weights and without attention state.

A step of such a stack reads every weight a decode step of the real model reads, in the same order and sizes, and needs
neither a tokenizer nor a KV cache, so that what is measured is the offloading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["QWEN3_8B", "DecoderShape", "Stack", "build_stack", "fill"]

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a dense decoder layer with grouped-query attention and a gated MLP, in elements.

    Attributes:
        hidden, intermediate: widths of the residual stream and of the MLP.
        query, key_value: widths of the query and of each of the key and value projections.
    """

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    query: int
    key_value: int


# Qwen3-8B: config.json of the published checkpoint (32 query and 8 key-value heads of 128).
QWEN3_8B = DecoderShape("qwen3-8b", 36, 4096, 12288, 4096, 1024)


class Layer(nn.Module):
    """The projections of one decoder layer; attention is replaced by an elementwise mix of the same widths."""

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device)

        self.input_norm = nn.RMSNorm(shape.hidden, eps=1e-6, dtype=dtype, device=device)
        self.q_proj = linear(shape.hidden, shape.query)
        self.k_proj = linear(shape.hidden, shape.key_value)
        self.v_proj = linear(shape.hidden, shape.key_value)
        self.o_proj = linear(shape.query, shape.hidden)
        self.post_norm = nn.RMSNorm(shape.hidden, eps=1e-6, dtype=dtype, device=device)
        self.gate_proj = linear(shape.hidden, shape.intermediate)
        self.up_proj = linear(shape.hidden, shape.intermediate)
        self.down_proj = linear(shape.intermediate, shape.hidden)
        self._repeat = shape.query // shape.key_value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [rows, hidden]."""
        h = self.input_norm(x)
        mixed = self.q_proj(h) + (self.k_proj(h) * self.v_proj(h)).repeat(1, self._repeat)
        x = x + self.o_proj(mixed)
        h = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """``num_layers`` layers, nothing else."""

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape, dtype, device) for _ in range(shape.num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [rows, hidden] -> the same."""
        for layer in self.layers:
            x = layer(x)
        return x


def build_stack(
    shape: DecoderShape, dtype: torch.dtype, rest: torch.device | str, generate_on: torch.device | str, seed: int = 0
) -> Stack:
    """A stack whose weights rest on ``rest``.

    Random numbers are drawn on ``generate_on``, layer by layer, so that a stack that is too large for the device can
    be filled at the device's speed. The scale keeps activations finite through any number of layers.
    """
    with torch.device("meta"):
        stack = Stack(shape, dtype, "meta")
    return fill(stack, rest, generate_on, seed)


def fill(model: Model, rest: torch.device | str, generate_on: torch.device | str, seed: int = 0) -> Model:
    """Give ``model``, which is on ``meta``, weights that rest on ``rest``; see :func:`build_stack`."""
    model.eval().requires_grad_(False)
    generator = torch.Generator(device=generate_on).manual_seed(seed)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                value = torch.empty(parameter.shape, dtype=parameter.dtype, device=generate_on)
                value.fill_(1.0) if value.dim() == 1 else value.normal_(0.0, 0.02, generator=generator)
                setattr(module, name, nn.Parameter(value.to(rest), requires_grad=False))
    return model
