"""What `headrace plan MODEL --machine CARD` predicts, for the card tables of README and docs.

    python benchmarks/card_plans.py --out benchmarks/results/2026-11-29-card-plans.jsonl [MODEL...]
    python benchmarks/tables.py

Nothing is run: models are known by name, cards by their published rates, and every figure is a prediction, of one
sequence of up to 4,096 tokens. Another machine has other figures: `headrace probe` measures it. A row has the faster
of `headrace generate` and vLLM, without a limit of host memory, and beside 24 GB of device memory with 32, 64 and 128
GB of it where the plans need more; 4 GiB of each are left to the system.

Of a pipeline it is the time of one image or video. A pass of its transformer takes the longer of two: the copies of the
plan, and the pass that was measured on an H200 with all weights resident, times how much slower the card's arithmetic
is published to be. (Plans count no attention without a cache, so they have no compute time for it.) Of a transformer
that was not measured, the pass is that of a measured one, times the ratio of operations that torch's FlopCounterMode
counts. The weights that a call needs once are copied once; the compute of text encoders and VAE is not counted.

Rows of tables ``calls-8``, ``calls-12`` and ``calls-16`` are for the guide to images and video: budgets that leave room
for activations on cards of so many GB, with weights in bf16 and stored in fp8.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from harness import append, finish, parser_of
from headrace.config import Budget, Workload
from headrace.errors import BudgetError, HeadraceWarning, OptionError
from headrace.plan.build import Planner
from headrace.plan.engines import plan_in_vllm, vllm_planner, why_not_generate
from headrace.plan.plan import Plan
from headrace.plan_model import PlanResult, plan_model
from headrace.planning.checks import needs_of
from headrace.planning.request import PlanRequest
from headrace.transfer.cards import CARDS as PUBLISHED

H200_FLOPS_PER_S = 989e12  # of products in bf16, as published; cards.json has those of cards
GIB = 2**30
SYSTEM_BYTES = 4 * GIB
UNUSED_GIB = 0.5  # of a card's memory beside weights and activations: workspaces, fragmentation
CARDS = {"4060": 8, "3060": 12, "4080": 16, "4090": 24, "5090": 32, "h100": 80}
CLASSES = {8: ("4060",), 12: ("3060", "4070"), 16: ("4060ti", "5060ti")}
HOST_GB, BESIDE = (32, 64, 128), "4090"
HOST_BANDWIDTH = 89.6  # GB/s: two channels of DDR5-5600
README_MODELS = (
    "Qwen/Qwen3.5-9B",
    "openai/gpt-oss-20b",
    "Qwen/Qwen3-32B-AWQ",
    "Qwen/Qwen3.5-27B-GPTQ-Int4",
    "Qwen/Qwen3.6-27B",
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4",
    "zai-org/GLM-4.7-Flash",
    "Qwen/Qwen3.6-35B-A3B",
    "openai/gpt-oss-120b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "et0dev/MiniMax-M2.7-AWQ-4bit",
    "Qwen/Qwen3.5-122B-A10B",
    "Qwen/Qwen3-235B-A22B-GPTQ-Int4",
)
MODELS = (
    *README_MODELS,
    "Qwen/Qwen3-8B",
    "google/gemma-3-27b-it",
    "Qwen/Qwen3-32B",
    "unsloth/Llama-3.3-70B-Instruct-bnb-4bit",
    "Qwen/Qwen3-30B-A3B",
    "zai-org/GLM-4.5-Air",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "QuantTrio/GLM-4.7-AWQ",
    "MiniMaxAI/MiniMax-M2.7",
)


class Pipeline(NamedTuple):
    """What a call of a pipeline does by default, and the raw row of its resident transformer on an H200."""

    steps: int
    passes: int  # of a step; two where guidance runs the transformer with the prompt and without
    table: str
    activation_gib: float  # the peak beside the weights with a VAE in tiles, counted by a call on meta
    size: float = 1.0  # times the operations of the transformer that was measured

    def pass_s(self, planned: PlanResult, slower: float) -> tuple[float, float]:
        """Seconds of a pass of a transformer, and of copies that a call makes once.

        ``slower``: times as long as on an H200 its arithmetic takes.
        """
        link_s, once_s = self.copies_s(planned)
        return max(link_s, slower * self.resident_s), once_s

    @property
    def resident_s(self) -> float:
        """Seconds of a pass on an H200 with all weights resident."""
        lines = MEASURED.read_text().splitlines()
        found = [row for row in map(json.loads, lines) if row["table"] == self.table and row["case"] == "resident"]
        return float(self.size * found[0]["ms"] / 1e3)

    @staticmethod
    def copies_s(planned: PlanResult) -> tuple[float, float]:
        """Seconds of copies in a pass, and of those that a call makes once."""
        copies_s: dict[str, float] = {}
        for unit in planned.plan.moved_units:
            part = unit.module_fqn.split(".")[0]
            copies_s[part] = copies_s.get(part, 0.0) + planned.planner.rates.copy_s(unit.num_bytes)
        # A step runs one of the transformers.
        transformers = [name for name in planned.context.inventory.children("") if name.startswith("transformer")]
        link_s = [copies_s.pop(name, 0.0) for name in transformers]
        return sum(link_s) / len(link_s), sum(copies_s.values())


MEASURED = Path(__file__).parent / "results" / "2026-11-23-offloaders-h200.jsonl"
PIPELINES = {
    "black-forest-labs/FLUX.1-dev": Pipeline(28, 1, "offloaders-flux", 2.38),
    "black-forest-labs/FLUX.2-dev": Pipeline(50, 1, "offloaders-flux", 2.41, 282.6 / 74.4),
    "Qwen/Qwen-Image": Pipeline(50, 2, "offloaders-flux", 0.38, 73.1 / 74.4),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": Pipeline(50, 2, "offloaders-wan", 3.49),
    # A step by default: with the prompt, without, with blocks left out, and with video and audio apart.
    "Lightricks/LTX-2": Pipeline(30, 4, "offloaders-wan", 5.38, 193.6 / 1678.4),
    # 61 frames of 544 x 960. Guidance is an input of the transformer.
    "hunyuanvideo-community/HunyuanVideo": Pipeline(50, 1, "offloaders-wan", 3.75, 1245.0 / 1678.4),
}


def rows(models: Sequence[str] = (*MODELS, *PIPELINES)) -> Iterator[dict[str, Any]]:
    for model in models:
        yield pipeline_row(model) if model in PIPELINES else model_row(model)


def pipeline_row(model: str) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    row: dict[str, Any] = {"table": "card-pipelines", "case": model, "predicted_seconds": seconds, "host_bytes": {}}
    for card in CARDS:
        planned, pipeline = plan_model(PlanRequest(model, "auto", machine=card)), PIPELINES[model]
        pass_s, once_s = pipeline.pass_s(planned, H200_FLOPS_PER_S / PUBLISHED[card]["flops_per_s"])
        row["weight_bytes"] = planned.plan.weight_bytes
        seconds[card] = pipeline.steps * pipeline.passes * pass_s + once_s
        row["host_bytes"][card] = host_bytes(planned.plan)
    return row


def call_rows(models: Sequence[str] = tuple(PIPELINES)) -> Iterator[dict[str, Any]]:
    for gigabytes, cards in CLASSES.items():
        for model in models:
            for stored in ("bf16", "fp8"):
                yield call_row(model, stored, gigabytes, cards)


def call_row(model: str, stored: str, gigabytes: int, cards: Sequence[str]) -> dict[str, Any]:
    pipeline, (components, workload, cast_weights) = PIPELINES[model], components_of(model, stored == "fp8")
    half_gib = int(2 * (PUBLISHED[cards[0]]["gib"] - UNUSED_GIB - pipeline.activation_gib))
    budget = Budget(half_gib * GIB // 2, workload=workload)
    row: dict[str, Any] = {"table": f"calls-{gigabytes}", "case": model, "stored": stored, "calls": {}}
    row |= {"budget_bytes": budget.num_bytes, "host_bytes": 0}
    for card in cards:
        planned, published = plan_model(PlanRequest(components, budget, machine=card)), PUBLISHED[card]
        link_s, once_s = pipeline.copies_s(planned)
        # A cast reads a byte of a weight and writes two.
        compute_s = pipeline.resident_s * H200_FLOPS_PER_S / published["flops_per_s"]
        compute_s += 3 * cast_weights / published["memory_bytes_per_s"]
        seconds = pipeline.steps * pipeline.passes * max(link_s, compute_s) + once_s
        row["calls"][card] = {"predicted_seconds": seconds, "waits_for_link": link_s > compute_s}
        row["host_bytes"] = max(row["host_bytes"], host_bytes(planned.plan))
    return row


def components_of(model: str, in_fp8: bool) -> tuple[Any, Workload, int]:
    """The pipeline's modules on meta, planned as ``load`` plans them, and how many weights a pass casts."""
    import torch

    from known_models import PIPELINES as KNOWN

    known, components, cast_weights = KNOWN[model], torch.nn.Module(), 0
    names = [name for name in known.parts if name.startswith("transformer")]
    for name, make in known.parts.items():
        with torch.device("meta"):
            part = make().to(torch.bfloat16).eval()
        if in_fp8 and name in names:
            part.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
            cast_weights = sum(each.numel() for each in part.parameters() if each.itemsize == 1)
        components.add_module(name, part)
    patterns = tuple(f"re:{name}\\..*" for name in names)
    return components, Workload(batch_sizes=(known.rows,), repeated=patterns), cast_weights


def host_bytes(plan: Plan) -> int:
    return needs_of(plan, on_gpu=True).host_bytes


def model_row(model: str) -> dict[str, Any]:
    table = "cards" if model in README_MODELS else "more-cards"
    row: dict[str, Any] = {"table": table, "case": model, "predicted": {}}
    for card in CARDS:
        planned = plan_model(PlanRequest(model, "auto", machine=card))
        row["weight_bytes"] = planned.plan.weight_bytes
        row["predicted"][card] = on_card(planned, HOST_GB if card == BESIDE else ())
    return row


def cpu_rows(models: Sequence[str]) -> Iterator[dict[str, Any]]:
    """``generate`` of mixtures with the CPU's share in missed experts, where plans cache experts that it computes."""
    for model in models:
        found: dict[str, Any] = {}
        for card in CARDS:
            planned = plan_model(PlanRequest(model, "auto", machine=card, host_bandwidth=HOST_BANDWIDTH))
            share = planned.cpu_share
            found[card] = None if isinstance(share, str) else [share.link_rows_per_s, share.rows_per_s]
        if any(found.values()):
            yield {"table": "card-cpu", "case": model, "host_bandwidth": HOST_BANDWIDTH, "predicted": found}


def on_card(planned: PlanResult, host_gb: Sequence[int]) -> dict[str, Any]:
    """Tokens per second, engine and host memory: without a limit (""), and with ``host_gb`` where they are short."""
    given, device_bytes = planned.context.request.given, planned.context.target.machine.device_bytes or 0
    budget = given if isinstance(given, Budget) else Budget(device_bytes - GIB, workload=planned.workload)
    planners: dict[str, Planner] = {}
    if not why_not_generate(planned.context.inventory):
        planners["generate"] = planned.planner
    with suppress(OptionError):
        planners["vllm"] = vllm_planner(planned.planner)
    kept = {name: made for name in planners if (made := plan_of(planners[name], name, budget, planned)) is not None}
    found: dict[str, Any] = {"": fastest(planners, kept, budget)}
    for gigabytes in reversed(host_gb):
        limit = gigabytes * 10**9 - SYSTEM_BYTES
        if all(host_bytes(plan) <= limit for plan in kept.values()):
            continue
        less = replace(budget, host_memory=limit)
        plans = {
            name: plan if host_bytes(plan) <= limit else plan_of(planners[name], name, less, None)
            for name, plan in kept.items()
        }
        found[str(gigabytes)] = fastest(planners, {name: plan for name, plan in plans.items() if plan}, budget)
    return found


def plan_of(planner: Planner, engine: str, budget: Budget, planned: PlanResult | None) -> Plan | None:
    try:
        if engine == "vllm":
            return plan_in_vllm(planner, budget)
        return planned.plan if planned is not None else planner.plan(budget)
    except BudgetError:
        return None


def fastest(planners: dict[str, Planner], plans: dict[str, Plan], budget: Budget) -> dict[str, Any] | None:
    steps = {name: planners[name].forecast(plan, 1, budget.workload.context) for name, plan in plans.items()}
    if not steps:
        return None
    name = max(steps, key=lambda each: steps[each].rows_per_s)
    return {"tokens_per_s": steps[name].rows_per_s, "engine": name, "host_bytes": host_bytes(plans[name])}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="*", default=[*MODELS, *PIPELINES])
    args = parser.parse_args()
    warnings.simplefilter("ignore", HeadraceWarning)  # that these are known by name
    made = []
    models = [name for name in args.models if name not in PIPELINES]
    for row in (*rows(args.models), *call_rows([n for n in args.models if n in PIPELINES]), *cpu_rows(models)):
        append(row, args.out)
        made.append(row)
    finish("card_plans", made)


if __name__ == "__main__":
    main()
