"""A router for vLLM's models with experts whose choices follow a stated distribution.

Random weights route almost every token to the same experts. Here expert ``e`` is chosen with a probability in
proportion to ``1 / (rank of e) ** skew`` (Zipf), without replacement, by a hash of the bits of the hidden state: equal
bits choose equal experts in every engine.
"""

from __future__ import annotations

import os
from typing import Any

import torch

NAME = "headrace_driven"


def drive_routing(skew: float = 1.0) -> None:
    """Register the router with vLLM, and have the engines of this process use it."""
    from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulator, RoutingStrategy

    class Driven(RoutingStrategy):  # type: ignore[misc]
        def route_tokens(
            self, hidden_states: torch.Tensor, router_logits: torch.Tensor, top_k: int, indices_type: Any = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            chosen = choices(hidden_states, router_logits.shape[-1], top_k, skew)
            weights = torch.full(chosen.shape, 1 / top_k, dtype=torch.float32, device=chosen.device)
            return weights, chosen.to(indices_type or torch.long)

    RoutingSimulator.register_strategy(NAME, Driven())
    os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = NAME


def choices(hidden_states: torch.Tensor, num_experts: int, top_k: int, skew: float) -> torch.Tensor:
    """Experts of each token: int64, (tokens, top_k), all of a token different."""
    device = hidden_states.device
    words = hidden_states[:, :32].contiguous().view(torch.int16).long()
    token = (words * (2 * torch.arange(words.shape[-1], device=device) + 1) * 0x9E3779B1).sum(-1, keepdim=True)
    expert = torch.arange(num_experts, device=device)
    mixed = _mix(_mix(token) + expert * 0x85EBCA6B)
    uniform = ((mixed & 0xFFFFF) + 0.5) / 2**20
    # Gumbel's trick: the largest k are a sample without replacement.
    rank = (expert * 37) % num_experts + 1  # popular experts do not lie side by side
    score = -skew * rank.double().log() - (-uniform.double().log()).log()
    return score.topk(top_k, dim=-1).indices


def _mix(value: torch.Tensor) -> torch.Tensor:
    value = (value ^ (value >> 31)) * 0x7FEB352D
    value = (value ^ (value >> 29)) * 0x846CA68B
    return value ^ (value >> 32)
