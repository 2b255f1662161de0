"""What `headrace plan MODEL --machine CARD --device-memory auto` predicts, for the card table of README and docs.

    python benchmarks/card_plans.py --out benchmarks/results/2026-11-26-card-plans.jsonl
    python benchmarks/tables.py

Nothing is run: models are known by name, cards by their published rates, and every figure is a prediction, of one
sequence of up to 4,096 tokens. Another machine has other figures: `headrace probe` measures it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from harness import append, finish, parser_of
from headrace.errors import HeadraceWarning
from headrace.planning import plan_model
from headrace.runtime.planner_factory import PlanRequest, needs_of

CARDS = ("3060", "4080", "4090", "5090", "h100")
MODELS = (
    "Qwen/Qwen3-8B",
    "openai/gpt-oss-20b",
    "google/gemma-3-27b-it",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-30B-A3B",
    "unsloth/Llama-3.3-70B-Instruct-bnb-4bit",
    "openai/gpt-oss-120b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "zai-org/GLM-4.5-Air",
    "Qwen/Qwen3-235B-A22B",
)


def rows(models: Sequence[str] = MODELS) -> Iterator[dict[str, Any]]:
    for model in models:
        row: dict[str, Any] = {"table": "cards", "case": model, "predicted_tokens_per_s": {}, "host_bytes": {}}
        for card in CARDS:
            planned = plan_model(PlanRequest(model, "auto", machine=card))
            row["weight_bytes"] = planned.plan.weight_bytes
            row["predicted_tokens_per_s"][card] = planned.outlook.forecasts[0].rows_per_s
            row["host_bytes"][card] = needs_of(planned.plan, on_gpu=True).host_bytes
        yield row


def main() -> None:
    args = parser_of(__doc__).parse_args()
    warnings.simplefilter("ignore", HeadraceWarning)  # that these are known by name
    made = []
    for row in rows():
        append(row, args.out)
        made.append(row)
    finish("card_plans", made)


if __name__ == "__main__":
    main()
