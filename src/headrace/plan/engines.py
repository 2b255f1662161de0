"""Predictions for vLLM's kernels beside those of ``headrace generate``, where they were measured.

vLLM fuses the kernels of a layer and captures a step in one graph. What its resident steps took on an H100 and an H200
beside the reading of their weights is one time per layer and format; weights are read, and missing experts fetched, by
the rates of the machine that a plan is for. ``tests/plan/test_engines.py`` holds the result against every measured row.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from headrace.config import Budget
from headrace.errors import BudgetError, OptionError
from headrace.formatting import format_rate
from headrace.model.records import Inventory
from headrace.plan.build import Planner
from headrace.plan.cost_model import experts_in
from headrace.plan.plan import Plan, assemble
from headrace.plan.prediction import Engine, EngineStep

ENGINES: tuple[Engine, ...] = ("generate", "vllm")

_NAMES: dict[Engine, str] = {"generate": "headrace generate", "vllm": "vLLM with headrace"}
# Seconds of a layer beside the reading of its weights, by format and whether layers have experts; resident steps of one
# sequence in docs/benchmarks, of 2026-11-25-vllm-four-bits-h100 (gpt-oss-20b and -120b; Qwen3-30B-A3B in GPTQ),
# 2026-11-26-vllm-experts-h200 (GLM-4.5-Air in AWQ), 2026-11-26-vllm-budgets-h100 (DeepSeek-V2-Lite in fp8) and
# 2026-11-21-vllm-h200 (the same, and Qwen3-8B, in bf16).
_LAYER_S = {
    ("MXFP4", True): 65e-6,
    ("int4", True): 80e-6,
    ("fp8", True): 67e-6,
    ("bf16", True): 68e-6,
    ("bf16", False): 29e-6,
}
MOST_ROWS = 16  # sequences of those steps
# Classes of layers that none of these models has.
_OTHER_LAYERS = re.compile(r"Mamba|DeltaNet|LightningAttention|LinearAttention|ShortConv|Indexer|HyperConnection|PLE")
# What vLLM takes beside weights and KV cache: graphs, workspaces, the context of CUDA.
BESIDE_BYTES = 1 << 30


def weight_format(inventory: Inventory) -> str:
    """The format of most bytes of the layers' weights, as people call it."""
    sizes: Counter[str] = Counter()
    for storage in inventory.storages:
        tensor = storage.tensors[0]
        if len(tensor.shape) > 1 and not storage.is_lookup:
            sizes[_format_of(tensor.locations[0].attr, tensor.shape, str(tensor.dtype))] += storage.num_bytes
    return max(sizes, key=sizes.__getitem__, default="bf16")


def _format_of(attr: str, shape: tuple[int, ...], dtype: str) -> str:
    if dtype.endswith("bfloat16"):
        return "bf16"
    if "float8" in dtype:
        return "fp8"
    if dtype.endswith("int32"):
        return "int4"
    if "uint8" in dtype and (len(shape) == 4 or "blocks" in attr):
        return "MXFP4"
    nvfp4 = "uint8" in dtype and "packed" in attr
    return "NVFP4" if nvfp4 or "float4" in dtype else "bitsandbytes" if shape[-1] == 1 else dtype.split(".")[-1]


def why_not_generate(inventory: Inventory) -> str:
    """Why ``headrace generate`` cannot run the weights, which engines can; empty: it can."""
    forms = (s.tensors[0].locations[0].attr for s in inventory.storages if experts_in(inventory, s) > 1)
    apart = any(attr.endswith("qweight") for attr in forms)
    return "headrace generate runs no experts in GPTQ or AWQ, and vLLM does" if apart else ""


def vllm_planner(planner: Planner) -> Planner:
    """``planner`` with vLLM's kernels, which cache experts of every layer and read no weights from files.

    Raises:
        OptionError: no measurement for the format or the layers of the model.
    """
    inventory = planner.inventory
    experts = {s.name for s in inventory.storages if experts_in(inventory, s) > 1}
    key = weight_format(inventory), bool(experts)
    others = sorted(name for name in set(inventory.modules.values()) if _OTHER_LAYERS.search(name))
    if others or key not in _LAYER_S:
        what = f"layers of {others[0]}" if others else f"{key[0]}{'' if key[1] else ' in a dense model'}"
        raise OptionError(f"no measurement for vLLM with {what}")
    profile = replace(planner.profile, kernels_per_step=None, copied_experts_bytes_per_row=0)
    rates = replace(planner.rates, layer_s=_LAYER_S[key])
    return replace(planner, rates=rates, profile=profile, cacheable=frozenset(experts), spill=None)


def step_in_vllm(planner: Planner, budget: Budget, model: str, device_bytes: int | None) -> EngineStep:
    """Prediction of vLLM within ``budget``.

    Args:
        planner: the one of ``generate``.
        budget: its device memory holds weights, KV cache and all else of the engine.
        model: name or folder, for the command.
        device_bytes: memory of the GPU.
    """
    rows, context = budget.workload.batch_sizes[0], budget.workload.context
    if rows > MOST_ROWS:
        return EngineStep("vllm", None, note=f"no measurement for vLLM with more than {MOST_ROWS} sequences")
    try:
        theirs = vllm_planner(planner)
        plan = plan_in_vllm(theirs, budget)
    except OptionError as error:
        return EngineStep("vllm", None, note=f"vLLM: {error}" if isinstance(error, BudgetError) else str(error))
    command = f"headrace serve {shlex.quote(model)} --engine vllm"
    beside = theirs.profile.workload_bytes(max(budget.workload.batch_sizes), context)
    weights = (budget.num_bytes - beside - BESIDE_BYTES) >> 20
    command += f" --device-memory {weights}MiB" if plan.offloaded_bytes else ""
    command += f" --max-model-len {context}" if context else ""
    if device_bytes is not None:
        command += f" --gpu-memory-utilization {min(95, budget.num_bytes * 100 // device_bytes) / 100:g}"
    note = f"kernels in {weight_format(planner.inventory)} as measured on Hopper, scaled by this machine's rates"
    return EngineStep("vllm", theirs.forecast(plan, rows, context).rows_per_s, command, note)


def plan_in_vllm(theirs: Planner, budget: Budget) -> Plan:
    """The plan of ``theirs``, a :func:`vllm_planner`, within ``budget`` less what the engine itself takes.

    Raises:
        BudgetError: too little is left.
    """
    plan = assemble(theirs.inventory, [], 0, "cpu")
    left = budget.num_bytes - BESIDE_BYTES
    if plan.device_bytes <= left - theirs.profile.workload_bytes(
        max(budget.workload.batch_sizes), budget.workload.context
    ):
        return plan
    return theirs.plan(replace(budget, device_memory=max(1, left), codec="none"))


def faster_engine(steps: Sequence[EngineStep]) -> str:
    """A sentence on which of the engines is faster, with its command; why there is no comparison; or nothing."""
    known = sorted((step for step in steps if step.rows_per_s), key=lambda step: -(step.rows_per_s or 0.0))
    notes = [step.note for step in steps if step.note]
    if not known or (known[0].engine == "generate" and len(known) < len(steps)):
        return "; ".join(notes)
    rates = ", ".join(f"{_NAMES[step.engine]} {format_rate(step.rows_per_s or 0.0)}" for step in known)
    return f"tokens/s: {rates} ({'; '.join(notes)}). {'The faster' if len(known) > 1 else 'Run'}: {known[0].command}"
