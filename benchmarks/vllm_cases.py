"""What ``vllm_offload.py`` measures: shapes of models, ways to offload them, loads."""

from __future__ import annotations

from typing import Any

from published_configs import DEEPSEEK_V2_LITE, QWEN3_8B

_SHORT = {**QWEN3_8B, "num_hidden_layers": 8}
SHAPES = {
    "qwen": QWEN3_8B,
    "qwen-prefill": QWEN3_8B,
    "deepseek": DEEPSEEK_V2_LITE,
    "experts": {**DEEPSEEK_V2_LITE, "num_hidden_layers": 8},
    "qwen-short": _SHORT,
    "qwen-draft": {**QWEN3_8B, "num_hidden_layers": 2},
    "qwen-short-tp": _SHORT,
    "qwen-short-pp": _SHORT,
}
WORKER = "headrace.adapters.vllm.Worker"
GROUP = {"offload_group_size": 4, "offload_num_in_group": 1, "offload_prefetch_step": 1}
# The model's name is a shape above.
DRAFT = {"speculative_config": {"method": "draft_model", "model": "qwen-draft", "num_speculative_tokens": 2}}
# Decoding too, which otherwise is one whole graph.
SEGMENTS = {"compilation_config": {"cudagraph_capture_sizes": [1, 16, 256], "cudagraph_mode": "PIECEWISE"}}
EXPERTS = {"cpu_offload_gb": 40, "cpu_offload_params": {"experts"}}
DRIVEN = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 16, 64]}}
# Shapes whose router follows a stated distribution (driven_routing.py).
DRIVEN_SHAPES = {"experts"}


def _budget(gib: float, **more: Any) -> dict[str, Any]:
    size = f"{int(gib * 2**20)}KiB"
    return {"worker_cls": WORKER, "additional_config": {"headrace": {"device_memory": size, **more}}}


# Device memory for weights under 4/1/1: what is resident, and one slot.
_QWEN_SAME_MEMORY_GIB = 12.405
# name: (shape, model runner, arguments of the engine)
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "resident": ("qwen", 1, {}),
    "vllm": ("qwen", 1, GROUP),
    "headrace": ("qwen", 1, {**GROUP, "worker_cls": WORKER}),
    "budget": ("qwen", 1, _budget(_QWEN_SAME_MEMORY_GIB, batch=[1, 16, 256])),
    "resident-v2": ("qwen", 2, {}),
    "headrace-v2": ("qwen", 2, {**GROUP, "worker_cls": WORKER}),
    "budget-v2": ("qwen", 2, _budget(_QWEN_SAME_MEMORY_GIB, batch=[1, 16, 256])),
    "still": (
        "qwen",
        1,
        {**GROUP, "worker_cls": WORKER, "additional_config": {"headrace": {"boundaries_only": True}}},
    ),
    "headrace-stalls": (
        "qwen-prefill",
        1,
        {**GROUP, "worker_cls": WORKER, "additional_config": {"headrace": {"measure_stalls": True}}},
    ),
    "eager": ("qwen-short", 1, {"enforce_eager": True}),
    "headrace-eager": ("qwen-short", 1, {**GROUP, "worker_cls": WORKER, "enforce_eager": True}),
    "short": ("qwen-short", 2, {}),
    "short-v1": ("qwen-short", 1, {}),
    "headrace-short-v1": ("qwen-short", 1, {**GROUP, "worker_cls": WORKER}),
    # vLLM measures itself how much memory is left for its cache.
    "headrace-profiled": (
        "qwen-short",
        2,
        {**GROUP, "worker_cls": WORKER, "kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.5},
    ),
    "headrace-short": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER}),
    "vllm-short": ("qwen-short", 2, GROUP),
    "breakable": ("qwen-short", 2, SEGMENTS),
    "headrace-breakable": ("qwen-short", 2, {**GROUP, **SEGMENTS, "worker_cls": WORKER}),
    "breakable-full": ("qwen-short", 2, {}),
    "headrace-breakable-full": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER}),
    "still-short": (
        "qwen-short",
        2,
        {**GROUP, "worker_cls": WORKER, "additional_config": {"headrace": {"boundaries_only": True}}},
    ),
    "sleep-short": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER, "enable_sleep_mode": True}),
    "lora-short": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER, "enable_lora": True, "max_lora_rank": 16}),
    "draft-short": ("qwen-short", 1, DRAFT),
    "headrace-draft-short": ("qwen-short", 1, {**GROUP, **DRAFT, "worker_cls": WORKER}),
    "fp8-short": ("qwen-short", 1, {"quantization": "fp8"}),
    "headrace-fp8-short": ("qwen-short", 1, {**GROUP, "worker_cls": WORKER, "quantization": "fp8"}),
    "tp": ("qwen-short-tp", 2, {"tensor_parallel_size": 2}),
    "headrace-tp": ("qwen-short-tp", 2, {**GROUP, "worker_cls": WORKER, "tensor_parallel_size": 2}),
    "budget-tp": ("qwen-short-tp", 2, {**_budget(1.4, batch=[1, 16]), "tensor_parallel_size": 2}),
    "pp": ("qwen-short-pp", 1, {"pipeline_parallel_size": 2}),
    # Every second layer, so that each of the two stages has more than its slots hold.
    "headrace-pp": (
        "qwen-short-pp",
        1,
        {**GROUP, "offload_group_size": 2, "worker_cls": WORKER, "pipeline_parallel_size": 2},
    ),
    "experts-resident": ("experts", 2, DRIVEN),
    "experts-headrace": ("experts", 2, {**EXPERTS, **DRIVEN, "worker_cls": WORKER}),
    "experts-vllm": ("experts", 2, {**EXPERTS, **DRIVEN}),
    "still-experts": (
        "experts",
        2,
        {
            **EXPERTS,
            **DRIVEN,
            "worker_cls": WORKER,
            "additional_config": {"headrace": {"boundaries_only": True}},
        },
    ),
    "moe-resident": ("deepseek", 1, {}),
    "moe-vllm": ("deepseek", 1, EXPERTS),
    "moe-headrace": ("deepseek", 1, {**EXPERTS, "worker_cls": WORKER}),
    "moe-prefetch": (
        "deepseek",
        1,
        {**GROUP, "offload_params": {"w13_weight", "w2_weight"}, "worker_cls": WORKER},
    ),
}
# sequences, tokens in, tokens out, repeats
LOADS = {
    "qwen": [(1, 128, 64, 2), (16, 128, 64, 2), (256, 128, 64, 2), (256, 128, 1, 3), (64, 2047, 1, 3)],
    "qwen-prefill": [(64, 2047, 1, 3)],
    **{name: [(1, 128, 16, 2), (16, 300, 16, 2)] for name in ("qwen-short", "qwen-short-tp", "qwen-short-pp")},
    "deepseek": [(1, 128, 32, 4)],
    "experts": [(2, 16, 32, 2), (16, 16, 32, 2), (64, 16, 32, 2)],
}
