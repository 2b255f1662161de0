"""Routers for vLLM's models with experts whose choices are stated. Random weights route almost every token alike.

:func:`drive_routing`: expert ``e`` is chosen with a probability in proportion to ``1 / (rank of e) ** skew`` (Zipf),
without replacement, by a hash of the bits of the hidden state: equal bits choose equal experts in every engine.

:func:`replay_routing`: each step of the model takes its choices from a table, in a captured graph too.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl

NAME = "headrace_driven"
_ROWS = 512  # of a table; a step of more tokens repeats them


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


class Replay:
    """The choices of every layer: those of one step after another of a table, from the beginning again at its end.

    Layers begin evenly spread over the table, as texts differ from one stretch of it to the next.

    Attributes:
        num_layers: with experts; a step of the model asks so often.
    """

    def __init__(self, num_layers: int, num_steps: int, top_k: int, device: str = "cuda") -> None:
        self.num_layers = num_layers
        self._table = torch.zeros(num_steps, _ROWS, top_k, dtype=torch.int32, device=device)
        self._asked = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self, choices: torch.Tensor) -> None:
        """Take ``choices``, int [steps, rows, top_k], from the next step on; a shorter table and fewer rows repeat."""
        steps, rows = self._table.shape[:2]
        at, row = torch.arange(steps) % choices.shape[0], torch.arange(rows) % choices.shape[1]
        self._table.copy_(choices[at][:, row])
        self._asked.zero_()

    def route(self, num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and experts of the tokens of a layer, [tokens, top_k] each."""
        top_k, device = self._table.shape[2], self._table.device
        ids = torch.empty(num_tokens, top_k, dtype=dtype, device=device)
        weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
        _replay_kernel[(1,)](
            self._table, self._asked, ids, weights, num_tokens * top_k, self.num_layers, len(self._table), _ROWS, top_k
        )
        return weights, ids


@triton.jit
def _replay_kernel(table, asked, ids, weights, count, layers, steps, ROWS: tl.constexpr, TOP_K: tl.constexpr):  # noqa: N803
    call = tl.load(asked)
    step = (call // layers + call % layers * steps // layers) % steps
    for start in range(0, count, 512):
        at = start + tl.arange(0, 512)
        choice = tl.load(table + step * (ROWS * TOP_K) + at % (ROWS * TOP_K), mask=at < count)
        tl.store(ids + at, choice.to(ids.dtype.element_ty), mask=at < count)
        tl.store(weights + at, tl.full([512], 1 / TOP_K, tl.float32), mask=at < count)
    tl.store(asked, call + 1)


def replay_routing(num_layers: int, num_steps: int, top_k: int) -> Replay:
    """Register a router with vLLM that replays tables, and have the engines of this process use it."""
    from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulator, RoutingStrategy

    replay = Replay(num_layers, num_steps, top_k)

    class Replayed(RoutingStrategy):  # type: ignore[misc]
        def route_tokens(
            self, hidden_states: torch.Tensor, router_logits: torch.Tensor, top_k: int, indices_type: Any = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return replay.route(len(hidden_states), indices_type or torch.long)

        supports_monolithic_logits = True  # a kernel that chooses itself: the stated experts are far ahead, all alike

        def generate_monolithic_logits(self, router_logits: torch.Tensor) -> torch.Tensor:
            _, ids = replay.route(len(router_logits), torch.long)
            return torch.full_like(router_logits, -1e4).scatter_(1, ids, 0.0)

    RoutingSimulator.register_strategy(NAME, Replayed())
    os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = NAME
    return replay
