"""What of vLLM runs experts, for its stand-in: the modules, signatures and order of calls that headrace's cache sees.

The kernel adds up products in blocks whose size its configuration says, and that follows the number of experts: a cache
that let vLLM choose it by the number of its rows would return other bits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import packed_kernels

NUM_EXPERTS, TOP_K, INTERMEDIATE = 32, 2, 128

_override: dict[str, int] | None = None


@contextmanager
def override_config(config: dict[str, int]) -> Iterator[None]:
    global _override
    before, _override = _override, config
    yield
    _override = before


def try_get_optimal_moe_config(
    w1_shape: tuple[int, ...],
    w2_shape: tuple[int, ...],
    top_k: int,
    dtype: str | None,
    M: int,  # noqa: N803 (vLLM's name)
    block_shape: list[int] | None = None,
) -> dict[str, int]:
    return _override or {"BLOCK_SIZE_K": 16 if w2_shape[0] <= NUM_EXPERTS else 32}


@dataclass
class FusedMoEQuantDesc:
    scale: Any = None
    bias: torch.Tensor | None = None
    alpha_or_gscale: torch.Tensor | None = None


@dataclass
class FusedMoEQuantConfig:
    _a1: FusedMoEQuantDesc = field(default_factory=FusedMoEQuantDesc)
    _a2: FusedMoEQuantDesc = field(default_factory=FusedMoEQuantDesc)
    _w1: FusedMoEQuantDesc = field(default_factory=FusedMoEQuantDesc)
    _w2: FusedMoEQuantDesc = field(default_factory=FusedMoEQuantDesc)

    def config_name(self, dtype: torch.dtype) -> str | None:
        return None


class TritonExperts:
    block_shape = None

    def __init__(self, quant_config: FusedMoEQuantConfig) -> None:
        self.quant_config = quant_config

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor,
    ) -> tuple[int, int, int, int, int]:  # fmt: skip
        return w1.shape[0], a1.shape[0], w1.shape[1], a1.shape[1], topk_ids.shape[1]

    def apply(
        self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
        topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: str, global_num_experts: int,
        expert_map: torch.Tensor | None,
    ) -> None:  # fmt: skip
        if expert_map is None:
            assert topk_ids.max() < global_num_experts == len(w1)
        else:  # of expert parallelism: counted by row
            assert topk_ids.max() < global_num_experts == len(expert_map)
            assert expert_map.max() < global_num_experts
            topk_ids = expert_map[topk_ids]
        block = try_get_optimal_moe_config(w1.shape, w2.shape, topk_ids.shape[1], None, len(hidden_states))
        scale = self.quant_config._w1.scale
        for token, row in enumerate(hidden_states):
            for at, expert in enumerate(topk_ids[token].tolist()):
                if expert < 0:
                    continue
                up = _product(w1[expert], row, block["BLOCK_SIZE_K"])
                up = up if scale is None else up * scale[expert]
                gate, up = up.chunk(2)
                down = _product(w2[expert], functional.silu(gate) * up, block["BLOCK_SIZE_K"])
                output[token] += topk_weights[token, at] * down


class DeepGemmExperts(TritonExperts):
    pass


def moe_align_block_size(
    topk_ids: torch.Tensor, block_size: int, num_experts: int, expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False, ignore_invalid_experts: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Tiles with one token each, by the number of its expert on this rank; unused tiles are not written."""
    assert topk_ids.max() < num_experts
    assert ignore_invalid_experts
    ids = topk_ids.flatten() if expert_map is None else expert_map[topk_ids].flatten()
    order = ids.sort(stable=True).indices
    order = order[ids[order] >= 0]
    experts = torch.full((ids.numel() + 3,), 10**9, dtype=torch.int32)
    experts[: len(order)] = ids[order]
    tiles = torch.full((len(experts), block_size), -(10**9), dtype=torch.int32)
    tiles[: len(order)] = ids.numel()
    tiles[: len(order), 0] = order
    return tiles.flatten(), experts, torch.tensor([len(order) * block_size])


class MarlinExperts(TritonExperts):
    """Sums in an order that depends on the position of a tile and on the number of experts."""

    def apply(
        self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
        topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: str, global_num_experts: int,
        expert_map: torch.Tensor | None,
    ) -> None:  # fmt: skip
        align = sys.modules["vllm.model_executor.layers.fused_moe.experts.marlin_moe"].moe_align_block_size
        pairs, experts, count = align(topk_ids, 8, global_num_experts, expert_map, ignore_invalid_experts=True)
        config = self.quant_config
        scale, alphas = config._w1.scale, (config._w1.alpha_or_gscale, config._w2.alpha_or_gscale)
        assert all(each is None or len(each) == len(w1) for each in alphas)
        for tile, pair in enumerate(pairs[: int(count) : 8].tolist()):
            token, at = divmod(pair, topk_ids.shape[1])
            block = 8 << ((tile + len(w1)) % 3)
            up = _product(_row(w1, experts[tile]), hidden_states[token], block)
            up = up if scale is None else up * _row(scale, experts[tile])
            factors = [1 if each is None else _row(each, experts[tile]) for each in alphas]
            gate, up = (up * factors[0]).chunk(2)
            down = _product(_row(w2, experts[tile]), functional.silu(gate) * up, block)
            output[token] += topk_weights[token, at] * factors[1] * down


# -- triton_kernels: MXFP4 ---------------------------------------------------------------------------------------------


def triton_kernel_fused_experts(
    output_tensor: torch.Tensor, hidden_states: torch.Tensor, w1: Any, w2: Any, routing_data: Any, gather_indx: Any,
    scatter_indx: Any, topk: int, quant_config: Any = None, **kinds: Any,
) -> torch.Tensor:  # fmt: skip
    assert topk == routing_data.n_expts_act
    return packed_kernels.fused_experts(output_tensor, hidden_states, w1, w2, routing_data, gather_indx, quant_config)


class OAITritonExperts:
    def __init__(self, quant_config: FusedMoEQuantConfig) -> None:
        self.quant_config = quant_config

    def apply(
        self, output: torch.Tensor, hidden_states: torch.Tensor, w1: Any, w2: Any, topk_weights: torch.Tensor,
        topk_ids: torch.Tensor, activation: str, global_num_experts: int, expert_map: torch.Tensor | None,
    ) -> None:  # fmt: skip
        assert topk_ids.max() < global_num_experts
        ids = topk_ids if expert_map is None else expert_map[topk_ids]
        run = sys.modules[PACKED_MOE].triton_kernel_fused_experts
        routed = packed_kernels.route(ids, topk_weights, w1.shape[0])
        run(output, hidden_states, w1, w2, *routed, topk=topk_ids.shape[1], quant_config=self.quant_config)


class OAITritonMxfp4ExpertsMonolithic(OAITritonExperts):
    """Chooses the experts, too."""

    def apply(  # type: ignore[override]
        self, hidden_states: torch.Tensor, w1: Any, w2: Any, router_logits: torch.Tensor, activation: str,
        global_num_experts: int, expert_map: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        return triton_kernel_moe_forward(
            hidden_states, w1, w2, router_logits, TOP_K, quant_config=self.quant_config, expert_map=expert_map
        )


def triton_kernel_moe_forward(
    hidden_states: torch.Tensor, w1: Any, w2: Any, gating_output: torch.Tensor, topk: int, quant_config: Any,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    weights, ids = gating_output.softmax(-1).topk(topk)
    routed = packed_kernels.route(ids if expert_map is None else expert_map[ids], weights, w1.shape[0])
    run = sys.modules[PACKED_MOE].triton_kernel_fused_experts
    output = torch.empty_like(hidden_states)
    return run(output, hidden_states, w1, w2, *routed, topk=topk, quant_config=quant_config)


PACKED_MOE = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"


def _row(tensor: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """As a kernel finds it: by its distance from the first, whatever ``tensor`` has."""
    start = tensor.storage_offset() + int(row) * tensor.stride(0)
    return tensor.as_strided(tensor.shape[1:], tensor.stride()[1:], start)


def _product(weight: torch.Tensor, x: torch.Tensor, block: int) -> torch.Tensor:
    total = torch.zeros(len(weight))
    for start in range(0, len(x), block):
        total = total + weight[:, start : start + block] @ x[start : start + block]
    return total


class FusedMoEKernelModularImpl:
    def __init__(self, fused_experts: TritonExperts) -> None:
        self.fused_experts = fused_experts

    def _fused_experts(self, **arguments: Any) -> None:
        self.fused_experts.apply(**arguments)


class Method:
    """Of quantised experts: the kernel is made when the weights are final, and keeps their scales.

    ``scaled``: there is one more for each expert (NVFP4).
    """

    def __init__(self, experts_cls: type[TritonExperts], copies_scales: bool, scaled: bool) -> None:
        self.experts_cls, self._scaled = experts_cls, scaled
        self.moe_kernel: FusedMoEKernelModularImpl | None = None
        self._copies_scales = copies_scales

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        if hasattr(layer, "w13_qweight"):
            layer.w13_weight, layer.w2_weight = layer.w13_qweight, layer.w2_qweight
        scale = layer.w13_weight_scale.data.clone() if self._copies_scales else layer.w13_weight_scale
        config = FusedMoEQuantConfig(_w1=FusedMoEQuantDesc(scale))
        if self._scaled:
            config._w1.alpha_or_gscale, config._w2.alpha_or_gscale = layer.w13_weight_scale_2, layer.w2_weight_scale_2
        if issubclass(self.experts_cls, OAITritonExperts):
            config = _in_objects(layer)
        self.moe_kernel = FusedMoEKernelModularImpl(self.experts_cls(config))


def _in_objects(layer: Any) -> FusedMoEQuantConfig:
    """Weights and scales in objects of triton_kernels, biases in parameters, as vLLM makes them of MXFP4."""
    descs = []
    for part in ("w13", "w2"):
        weight = getattr(layer, f"{part}_weight").data
        scale = weight[..., :4].abs() + 0.5
        layer.register_parameter(f"{part}_bias", nn.Parameter(weight[..., 0].contiguous(), requires_grad=False))
        delattr(layer, f"{part}_weight")
        setattr(layer, f"{part}_weight", packed_kernels.swizzled(weight))
        config = packed_kernels.PrecisionConfig(packed_kernels.swizzled(scale.contiguous()))
        descs.append(FusedMoEQuantDesc(config, getattr(layer, f"{part}_bias")))
    del layer.w13_weight_scale
    return FusedMoEQuantConfig(_w1=descs[0], _w2=descs[1])


@dataclass
class FusedMoEParallelConfig:
    enable_eplb: bool = False
    use_all2all: bool = False

    @property
    def use_all2all_kernels(self) -> bool:
        return self.use_all2all


class RoutedExperts(nn.Module):
    """``divided``: this rank has three quarters of the experts. ``packed``: weights have two names in the end (AWQ)."""

    def __init__(
        self, width: int, experts_cls: type[TritonExperts], copies_scales: bool, divided: bool, with_lora: bool,
        packed: bool, scaled: bool, parallel: FusedMoEParallelConfig,
    ) -> None:  # fmt: skip
        super().__init__()
        self.quant_method: Any = Method(experts_cls, copies_scales, scaled)
        self.moe_config = SimpleNamespace(is_lora_enabled=with_lora, moe_parallel_config=parallel)
        self.local_num_experts = count = 3 * NUM_EXPERTS // 4 if divided else NUM_EXPERTS
        self.expert_map = None
        if divided:
            numbers = torch.arange(NUM_EXPERTS, dtype=torch.int32)
            self.expert_map = torch.where(numbers < count, numbers, -1)
        for name, shape in (
            ("w13_qweight" if packed else "w13_weight", (count, 2 * INTERMEDIATE, width)),
            ("w2_qweight" if packed else "w2_weight", (count, width, INTERMEDIATE)),
            ("w13_weight_scale", (count, 2 * INTERMEDIATE)),
            *((f"{part}_weight_scale_2", (count,)) for part in ("w13", "w2") if scaled),
        ):
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5, requires_grad=False))


class Experts(nn.Module):
    """In the place of an MLP: the router, and what it routes to."""

    def __init__(self, width: int, is_called: bool = True, **kind: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(width, NUM_EXPERTS, bias=False)
        kinds = {
            "experts_cls": TritonExperts,
            "copies_scales": False,
            "divided": False,
            "with_lora": False,
            "packed": False,
            "scaled": False,
        }
        self.experts = RoutedExperts(width, **{**kinds, "parallel": FusedMoEParallelConfig(), **kind})
        self._is_called = is_called

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat, experts = x.reshape(-1, x.shape[-1]), self.experts
        if not self._is_called:
            return x
        logits, output = self.gate(flat), torch.zeros_like(flat)
        if isinstance(experts.quant_method.moe_kernel.fused_experts, OAITritonMxfp4ExpertsMonolithic):
            return experts.quant_method.moe_kernel.fused_experts.apply(
                hidden_states=flat, w1=experts.w13_weight, w2=experts.w2_weight, router_logits=logits,
                activation="silu", global_num_experts=NUM_EXPERTS, expert_map=experts.expert_map,
            ).view_as(x)  # fmt: skip
        weights, ids = logits.softmax(-1).topk(TOP_K)
        experts.quant_method.moe_kernel._fused_experts(
            output=output, hidden_states=flat, w1=experts.w13_weight, w2=experts.w2_weight, topk_weights=weights,
            topk_ids=ids.int(), activation="silu", global_num_experts=NUM_EXPERTS, expert_map=experts.expert_map,
        )  # fmt: skip
        return output.view_as(x)
