"""What ``vllm_offload.py`` measures: shapes of models, ways to offload them, loads; what ``vllm bench serve`` asks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from published_configs import DEEPSEEK_V2_LITE, QWEN3_8B

_SHORT = {**QWEN3_8B, "num_hidden_layers": 8}
SHAPES = {
    "qwen": QWEN3_8B,
    "qwen-12": {**QWEN3_8B, "num_hidden_layers": 12},
    "qwen-prefill": QWEN3_8B,
    "deepseek": DEEPSEEK_V2_LITE,
    "experts": {**DEEPSEEK_V2_LITE, "num_hidden_layers": 8},
    "qwen-short": _SHORT,
    "qwen-draft": {**QWEN3_8B, "num_hidden_layers": 2},
    "qwen-short-tp": _SHORT,
    "qwen-short-pp": _SHORT,
}
WORKER = "headrace.adapters.vllm.Worker"
NO_COPY = "no_copy.Worker"  # the reference: compiled as WORKER is, and nothing moves
FLEXTENSOR = "flextensor.contrib.vllm.worker.FlexTensorOffloadWorker"
CODED: dict[str, Any] = {"additional_config": {"headrace": {"codec": "exp3"}}}
GROUP: dict[str, Any] = {"offload_group_size": 4, "offload_num_in_group": 1, "offload_prefetch_step": 1}
# The model's name is a shape above.
DRAFT = {"speculative_config": {"method": "draft_model", "model": "qwen-draft", "num_speculative_tokens": 2}}
# Decoding too, which otherwise is one whole graph.
SEGMENTS = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
EXPERTS = {"cpu_offload_gb": 40, "cpu_offload_params": {"experts"}}
DRIVEN = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 16, 64]}}
# With TORCHINDUCTOR_DETERMINISTIC=1, two compiles round alike: Inductor tunes a combined kernel by time, and with
# it the reductions of norms that it holds.
ONE_ROUNDING = {"inductor_compile_config": {"combo_kernels": False, "benchmark_combo_kernel": False}}
# Shapes whose router follows a stated distribution (driven_routing.py).
DRIVEN_SHAPES = {"experts"}


def same_memory(config: dict[str, Any]) -> int:
    """Bytes of the device that a Qwen3 takes under ``GROUP``: what is resident, and the slots."""
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    attention = hidden * config["head_dim"] * 2 * (heads + config["num_key_value_heads"])
    size = 4 if config["torch_dtype"] == "float32" else 2
    layer = size * (attention + 3 * hidden * config["intermediate_size"])
    # By part, the slots take a little more than one layer.
    return int((layers - layers // 4 + 1 + 1 / 15) * layer) + size * 2 * config["vocab_size"] * hidden


def _budget(shape: str, num_bytes: int | None = None) -> dict[str, Any]:
    size = f"{(num_bytes or same_memory(SHAPES[shape])) >> 10}KiB"
    batch = sorted({load[0] for load in LOADS[shape] if load[2] > 1})
    return {"worker_cls": WORKER, "additional_config": {"headrace": {"device_memory": size, "batch": batch}}}


# sequences, tokens in, tokens out, repeats
_LONG = [(1, 128, 64, 2), (16, 128, 64, 2), (256, 128, 64, 2), (256, 128, 1, 3), (64, 2047, 1, 3)]
LOADS = {
    "qwen": _LONG,
    "qwen-12": _LONG,
    "qwen-prefill": [(64, 2047, 1, 3)],
    **{name: [(1, 128, 16, 2), (16, 300, 16, 2)] for name in ("qwen-short", "qwen-short-tp", "qwen-short-pp")},
    "deepseek": [(1, 128, 32, 4)],
    "experts": [(2, 16, 32, 2), (16, 16, 32, 2), (64, 16, 32, 2)],
}


def _contest(shape: str, behind: str) -> dict[str, tuple[str, int, dict[str, Any]]]:
    """What the newest vLLM runs, each in the same device memory."""
    return {
        f"resident-v2{behind}": (shape, 2, {}),
        f"headrace-v2{behind}": (shape, 2, {**GROUP, "worker_cls": WORKER}),
        f"budget-v2{behind}": (shape, 2, _budget(shape)),
        f"vllm-v2{behind}": (shape, 2, GROUP),
        f"still-v2{behind}": (shape, 2, {**GROUP, "worker_cls": NO_COPY}),
        f"flextensor{behind}": (shape, 2, {"worker_cls": FLEXTENSOR}),
    }


# name: (shape, model runner, arguments of the engine)
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "resident": ("qwen", 1, {}),
    "vllm": ("qwen", 1, GROUP),
    "headrace": ("qwen", 1, {**GROUP, "worker_cls": WORKER}),
    "budget": ("qwen", 1, _budget("qwen")),
    **_contest("qwen", ""),
    **_contest("qwen-12", "-12"),
    "still": ("qwen", 1, {**GROUP, "worker_cls": NO_COPY}),
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
    "coded": ("qwen", 2, {**GROUP, **CODED, "worker_cls": WORKER}),
    "coded-eager": ("qwen-short", 1, {**GROUP, **CODED, "worker_cls": WORKER, "enforce_eager": True}),
    "headrace-short": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER}),
    "vllm-short": ("qwen-short", 2, GROUP),
    "breakable": ("qwen-short", 2, SEGMENTS),
    "headrace-breakable": ("qwen-short", 2, {**GROUP, **SEGMENTS, "worker_cls": WORKER}),
    "breakable-full": ("qwen-short", 2, {}),
    "headrace-breakable-full": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER}),
    "still-short": ("qwen-short", 2, {**GROUP, "worker_cls": NO_COPY}),
    "sleep-short": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER, "enable_sleep_mode": True}),
    # The memory of graphs is saved, too.
    "sleep-graphs-short": (
        "qwen-short",
        2,
        {**GROUP, "worker_cls": WORKER, "enable_sleep_mode": True, "sleep_mode_offload_cudagraph": True},
    ),
    # vLLM raises where a step makes the host wait for the GPU.
    "sync-check-short": ("qwen-short", 2, {}),
    "headrace-sync-check-short": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER}),
    "headrace-sync-check-eager": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER, "enforce_eager": True}),
    "lora-short": ("qwen-short", 2, {**GROUP, "worker_cls": WORKER, "enable_lora": True, "max_lora_rank": 16}),
    "draft-short": ("qwen-short", 1, DRAFT),
    "headrace-draft-short": ("qwen-short", 1, {**GROUP, **DRAFT, "worker_cls": WORKER}),
    "fp8-short": ("qwen-short", 1, {"quantization": "fp8"}),
    "headrace-fp8-short": ("qwen-short", 1, {**GROUP, "worker_cls": WORKER, "quantization": "fp8"}),
    "tp": ("qwen-short-tp", 2, {"tensor_parallel_size": 2}),
    "headrace-tp": ("qwen-short-tp", 2, {**GROUP, "worker_cls": WORKER, "tensor_parallel_size": 2}),
    "budget-tp": ("qwen-short-tp", 2, {**_budget("qwen-short-tp", int(1.4 * 2**30)), "tensor_parallel_size": 2}),
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
    "still-experts": ("experts", 2, {**EXPERTS, **DRIVEN, "worker_cls": NO_COPY}),
    "moe-resident": ("deepseek", 1, {}),
    "moe-vllm": ("deepseek", 1, EXPERTS),
    "moe-headrace": ("deepseek", 1, {**EXPERTS, "worker_cls": WORKER}),
    "moe-prefetch": (
        "deepseek",
        1,
        {**GROUP, "offload_params": {"w13_weight", "w2_weight"}, "worker_cls": WORKER},
    ),
}


class Recipe(NamedTuple):
    """What ``vllm bench serve`` asks."""

    tokens_in: int
    tokens_out: int
    requests: int
    at_once: int | None  # None: all
    warmups: int = 1


RECIPES = {
    "2047 in, 1 out": Recipe(2047, 1, 64, None),
    "128 in, 128 out; 1 at once": Recipe(128, 128, 4, 1),
    "128 in, 128 out; 4 at once": Recipe(128, 128, 8, 4),
    "128 in, 128 out; 16 at once": Recipe(128, 128, 32, 16),
}


def python_path(out: Path) -> str:
    """PYTHONPATH with which Python begins without the modules that ``BENCH_WITHOUT`` names."""
    given = os.environ.get("PYTHONPATH", "")
    without = [*filter(None, os.environ.get("BENCH_WITHOUT", "").split(","))]
    if not without:
        return given
    folder = out / "without"
    folder.mkdir(parents=True, exist_ok=True)
    # Every process of an engine begins with it, its workers too.
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({without})\n")
    return os.pathsep.join([str(folder), given])
