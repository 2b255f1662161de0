"""Do vLLM's kernels of packed experts repeat their bits, and do they give the same with cached experts?

    python benchmarks/vllm_kernel_bits.py [--formats mxfp4,int4] [--rows 1,2,8,16,64,512] [--out FILE]   (vLLM, a GPU)

One layer of Qwen3-30B-A3B's shape with random packed weights in Marlin's own layout; for ``mxfp4 by triton_kernels``
one of gpt-oss-120b's, in the layout that vLLM chooses for this GPU. For each number of rows and of ``--repeats``
inputs, whose tokens choose experts by a seeded trace, the resident kernel runs twice, and then the one that reads a
cache with a quarter of the experts in slots: its bits should differ no more often. After each call of the cached kernel
the rows that it has read are compared with the store: a difference ends the script.
``us``: one call in a CUDA graph, resident, and cached with all experts in slots.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import config as quant_configs
from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, MoEActivation
from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as packed_moe
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.utils.mxfp4_utils import _swizzle_mxfp4, mx_scale_kwargs

from harness import append, counts, finish, parser_of, time_cuda, words_of
from headrace.experts.cache import ExpertCache
from headrace.plan.cached_experts import CachedLayer, with_slots
from headrace.plan.routing_traces import seeded_trace
from headrace.stores.expert_ranges import ExpertRanges

EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768
PRODUCTS = {"w13": (HIDDEN, 2 * INNER), "w2": (INNER, HIDDEN)}  # size of a sum, and outputs
PACKED, PACKED_TOP_K, WIDTH = "mxfp4 by triton_kernels", 4, 2880  # of gpt-oss, both hidden and inner
DTYPE = torch.bfloat16
REPEATS_UP_TO = 8  # rows; with more, Marlin differs from itself


def _words(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, (EXPERTS, rows, columns), dtype=torch.int32, device="cuda")


def _scales(groups: int, outputs: int) -> torch.Tensor:
    return (torch.rand(EXPERTS, groups, outputs, device="cuda") * 0.01 + 0.005).to(DTYPE)


def _mxfp4() -> tuple[dict[str, torch.Tensor], Callable[..., Any]]:
    made = {}
    for name, (size, outputs) in PRODUCTS.items():
        made[f"{name}_weight"] = _words(size // 16, outputs * 2)
        exponents = torch.randint(117, 121, (EXPERTS, size // 32, outputs), dtype=torch.uint8, device="cuda")
        made[f"{name}_weight_scale"] = exponents.view(torch.float8_e8m0fnu)
        made[f"{name}_bias"] = torch.randn(EXPERTS, outputs, device="cuda").to(DTYPE)
    return made, lambda m: quant_configs.mxfp4_w4a16_moe_quant_config(
        m.w13_weight_scale, m.w2_weight_scale, m.w13_bias, m.w2_bias
    )


def _int4(zeros: bool = False) -> tuple[dict[str, torch.Tensor], Callable[..., Any]]:
    made = {}
    for name, (size, outputs) in PRODUCTS.items():
        made[f"{name}_weight"] = _words(size // 16, outputs * 2)
        made[f"{name}_scales"] = _scales(size // 128, outputs)
        if zeros:
            made[f"{name}_qzeros"] = _words(size // 128, outputs // 8)
    return made, lambda m: quant_configs.int4_w4a16_moe_quant_config(
        m.w13_scales, m.w2_scales, getattr(m, "w13_qzeros", None), getattr(m, "w2_qzeros", None), block_shape=[0, 128]
    )


def _fp8() -> tuple[dict[str, torch.Tensor], Callable[..., Any]]:
    made = {}
    for name, (size, outputs) in PRODUCTS.items():
        made[f"{name}_weight"] = _words(size // 16, outputs * 4) & 0x3F3F3F3F  # no NaN
        made[f"{name}_weight_scale"] = _scales(1, outputs) * 2.0**120  # vLLM's fp8_fused_exponent_bias_into_scales
    return made, lambda m: quant_configs.fp8_w8a16_moe_quant_config(m.w13_weight_scale, m.w2_weight_scale)


def _packed() -> tuple[dict[str, Any], Callable[..., Any]]:
    """Objects of triton_kernels, made as vLLM makes them when it loads gpt-oss."""
    made: dict[str, Any] = {}
    for name, outputs in (("w13", 2 * WIDTH), ("w2", WIDTH)):
        packed = torch.randint(0, 256, (EXPERTS, outputs, WIDTH // 2), dtype=torch.uint8, device="cuda")
        exponents = torch.randint(117, 121, (EXPERTS, outputs, WIDTH // 32), dtype=torch.uint8, device="cuda")
        made[f"{name}_weight"], _, scale = _swizzle_mxfp4(packed, exponents)
        made[f"{name}_config"] = quant_configs.PrecisionConfig(**mx_scale_kwargs(scale))
        made[f"{name}_bias"] = torch.randn(EXPERTS, outputs, device="cuda")
    return made, lambda m: quant_configs.mxfp4_w4a16_moe_quant_config(
        made["w13_config"], made["w2_config"], m.w13_bias, m.w2_bias
    )


FORMATS: dict[str, Callable[[], tuple[dict[str, Any], Callable[..., Any]]]]
FORMATS = {
    "mxfp4": _mxfp4,
    "int4": _int4,
    "int4 with zero points": partial(_int4, zeros=True),
    "fp8": _fp8,
    PACKED: _packed,
}


class Layer:
    """One layer of experts: resident, and cached."""

    def __init__(self, kind: str, num_slots: int, debug: bool = True) -> None:
        """``debug``: compare the rows that a kernel has read with the store, after each call."""
        self._debug = debug
        self._is_packed = kind == PACKED
        given, config_of = FORMATS[kind]()
        module: Any = object.__new__(RoutedExperts)
        nn.Module.__init__(module)
        for name, value in given.items():
            is_tensor = isinstance(value, torch.Tensor)
            setattr(module, name, nn.Parameter(value, requires_grad=False) if is_tensor else value)
        kernel: Any = object.__new__(packed_moe.OAITritonMxfp4ExpertsMonolithic if self._is_packed else MarlinExperts)
        kernel.quant_config, kernel.input_dtype = config_of(module), None
        kernel.activation_config = ApplyMoEActivationConfig()
        kernel.topk, kernel.renormalize = PACKED_TOP_K, True
        module.local_num_experts = EXPERTS
        module.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=kernel))
        self.module, self.kernel = module, kernel
        self._kernels().hold_packed(module)
        self.cache = self._cached(dict(module.named_parameters()), num_slots)

    def _kernels(self) -> Any:
        return importlib.import_module("headrace.adapters.vllm.experts").KernelExperts  # importing it needs vLLM

    def _cached(self, tensors: Mapping[str, torch.Tensor], num_slots: int) -> ExpertCache:
        sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
        (layer,) = with_slots([CachedLayer("", EXPERTS, 1, sizes)], num_slots)
        self._ranges = ranges = ExpertRanges([layer], torch.device("cuda", 0))
        for name, tensor in tensors.items():
            ranges.destinations[name].copy_(tensor.data.view(torch.uint8).view(-1))
        ranges.finish()
        home = layer.first_row + torch.arange(EXPERTS, device="cuda")
        overflow = range(layer.first_overflow_row, layer.first_overflow_row + layer.overflow_rows)
        rows = {name: ranges.rows(name) for name in tensors}
        cache = ExpertCache(list(rows.values()), home, layer.num_slots, overflow, debug=self._debug)
        by_attr = {name: rows[name].view(-1).view(t.dtype).view(-1, *t.shape[1:]) for name, t in tensors.items()}
        self._kernels()(self.module, by_attr, cache).attach()
        return cache

    def run(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, cached: bool) -> torch.Tensor:
        """The output of the experts: [rows, hidden]."""
        if self._is_packed:
            return self._run_packed(x, weights, ids, cached)
        rows = len(x)
        workspaces = {
            "workspace13": torch.empty(rows * TOP_K * max(INNER, HIDDEN), dtype=DTYPE, device="cuda"),
            "workspace2": torch.empty(rows * TOP_K * max(2 * INNER, HIDDEN), dtype=DTYPE, device="cuda"),
        }
        output = torch.empty_like(x)
        apply = self.kernel.apply if cached else partial(MarlinExperts.apply, self.kernel)
        apply(
            output=output, hidden_states=x, w1=self.module.w13_weight, w2=self.module.w2_weight, topk_weights=weights,
            topk_ids=ids, activation=MoEActivation.SILU, global_num_experts=EXPERTS, expert_map=None, a1q_scale=None,
            a2_scale=None, expert_tokens_meta=None, apply_router_weight_on_input=False, **workspaces,
        )  # fmt: skip
        return output

    def _run_packed(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, cached: bool) -> torch.Tensor:
        logits = torch.full((len(x), EXPERTS), -100.0, dtype=DTYPE, device="cuda")
        logits.scatter_(1, ids.long(), weights.to(DTYPE))
        apply = self.kernel.apply if cached else partial(packed_moe.OAITritonMxfp4ExpertsMonolithic.apply, self.kernel)
        output: torch.Tensor = apply(
            hidden_states=x, w1=self.module.w13_weight, w2=self.module.w2_weight, router_logits=logits,
            activation=MoEActivation.SWIGLUOAI, global_num_experts=EXPERTS, expert_map=None, a1q_scale=None,
            apply_router_weight_on_input=False,
        )  # fmt: skip
        return output


def inputs(kind: str, rows: int, repeats: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Hidden states, and weights and numbers of the experts of each row."""
    top_k, width = (PACKED_TOP_K, WIDTH) if kind == PACKED else (TOP_K, HIDDEN)
    trace = torch.as_tensor(seeded_trace(0, rows * repeats, EXPERTS, top_k), dtype=torch.int32).cuda()
    for ids in trace.split(rows):
        x = torch.randn(rows, width, device="cuda").to(DTYPE)
        yield x, torch.rand(rows, top_k, device="cuda"), ids.contiguous()


def measure(kind: str, rows: int, repeats: int) -> dict[str, Any]:
    """How often bits differ, for one format and number of rows."""
    layer = Layer(kind, EXPERTS // 4)
    given = list(inputs(kind, rows, repeats))
    other = differing = spread = 0.0
    for each in given:
        expected, again, found = (layer.run(*each, cached=cached) for cached in (False, False, True))
        if not (expected.isfinite().all() and expected.abs().max() > 0):
            raise RuntimeError(f"{kind}: expected finite outputs")
        other += not torch.equal(again, expected)
        differing += not torch.equal(found, expected)
        spread = max(spread, (found - expected).abs().max().item())
    moved = layer.cache.counts()
    row = {
        "table": "kernel-bits", "format": kind, "rows": rows, "repeats": repeats, "resident_differs": int(other),
        "cached_differs": int(differing), "largest_difference": spread, "fetched": moved.fetched,
        "overflow": moved.in_place, "slots": layer.cache.num_slots,
    }  # fmt: skip
    if rows == 1:
        layer, one = Layer(kind, EXPERTS // 4, debug=False), given[0]
        row |= {
            f"us_{how}": _graph_us(partial(layer.run, *one, cached=how == "cached")) for how in ("resident", "cached")
        }
    return row


def _graph_us(run: Callable[[], Any]) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            run()
    return statistics.median(time_cuda(graph.replay, 7)) * 1e3 / 20


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--formats", type=words_of(list(FORMATS)), default=list(FORMATS))
    parser.add_argument("--rows", type=counts, default=[1, 2, 8, 16, 64, 512])
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    torch.manual_seed(0)
    results = []
    for kind in given.formats:
        for rows in given.rows:
            row = measure(kind, rows, given.repeats)
            results.append({**row, "bit_equal": row["cached_differs"] == 0, "case": kind})
            append(results[-1], given.out)
            print(" ".join(f"{name}={value}" for name, value in row.items() if name != "table"), flush=True)
    compared = [row for row in results if row["rows"] <= REPEATS_UP_TO or row["format"] == PACKED]
    finish("vLLM's kernels of experts", compared)


if __name__ == "__main__":
    main()
