"""Whether the planner's search finds plans as fast as the full search that was recorded; needs no GPU.

    python benchmarks/plan_search.py [--models qwen3-8b] [--record]

For 90 budgets on an H200 (three models, six shares of the weights, five workloads) the predicted step of today's plan
is divided by the recorded one, of 31a43b5. The bars are 1.000 in the median and 1.02 at worst. ``--record`` writes the
predictions anew.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import published_configs
from decoder_models import CONFIGS
from headrace.config import Budget, Workload
from headrace.errors import BudgetError
from headrace.model.inventory import take_inventory
from headrace.model.memory_profile import profile_of
from headrace.plan.build import Planner
from headrace.plan.cost_model import BETWEEN_TOKENS_S
from headrace.transfer.machine_probe import named_machine

RECORD = Path(__file__).with_name("plan_search.json")
MODELS = {
    "qwen3-8b": CONFIGS["qwen3-8b"],
    "llama-3.3-70b": partial(LlamaConfig, **published_configs.LLAMA_3_3_70B),
    "qwen3-30b-a3b": CONFIGS["qwen3-30b-a3b"],
}
SHARES = (0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
WORKLOADS = (
    Workload([1]), Workload([16], 4096), Workload([1, 16]), Workload([1, 4, 16, 64], 1024), Workload([256, 2048]),
)  # fmt: skip


def predictions(
    name: str, shares: Sequence[float] = SHARES, workloads: Sequence[Workload] = WORKLOADS
) -> Iterator[tuple[str, float]]:
    """(which budget, geometric mean of the predicted steps in seconds) of one model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.bfloat16, trust_remote_code=False)
    inventory, (_, rates) = take_inventory(model), named_machine("h200")
    for workload in workloads:
        planner = Planner(inventory, rates, profile_of(model, workload.context), zero_copy=True)
        beside = planner.profile.workload_bytes(max(workload.batch_sizes), workload.context)
        for share in shares:
            # The record is from before there were codes, and before the time between two tokens was counted.
            budget = Budget(int(inventory.num_bytes * share) + beside, workload=workload, codec="none")
            try:
                plan = planner.plan(budget)
            except BudgetError as error:
                plan = planner.plan(replace(budget, device_memory=error.minimum_bytes))
            between_s = BETWEEN_TOKENS_S if planner.profile.kernels_per_step is not None else 0.0
            steps = [planner.forecast(plan, rows, workload.context).step_s - between_s for rows in workload.batch_sizes]
            sizes = "+".join(map(str, workload.batch_sizes))
            yield f"{name}, {share:.0%}, batch {sizes} at {workload.context}", statistics.geometric_mean(steps)


def main() -> None:
    """Record, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    parser.add_argument("--record", action="store_true", help="write the predictions instead of comparing them")
    args = parser.parse_args()
    begin = time.process_time()
    found = {key: step_s for name in args.models.split(",") for key, step_s in predictions(name)}
    seconds = time.process_time() - begin
    if args.record:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} predictions recorded in {seconds:.0f} s of CPU time")
        return
    recorded = json.loads(RECORD.read_text())
    ratios = {key: step_s / recorded[key] for key, step_s in found.items()}
    worst = max(ratios, key=lambda key: ratios[key])
    median = statistics.median(ratios.values())
    print(f"{len(ratios)} plans in {seconds:.0f} s of CPU time: predicted step over the recorded one")
    print(f"median {median:.4f}, worst {ratios[worst]:.4f} ({worst}), best {min(ratios.values()):.4f}")
    if median > 1.0005 or ratios[worst] > 1.02:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
