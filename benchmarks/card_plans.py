"""What `headrace plan MODEL --machine CARD --device-memory auto` predicts, for the card table of README and docs.

    python benchmarks/card_plans.py --out benchmarks/results/2026-11-26-card-plans.jsonl
    python benchmarks/tables.py

Nothing is run: models are known by name, cards by their published rates, and every figure is a prediction, of one
sequence of up to 4,096 tokens. Another machine has other figures: `headrace probe` measures it.

Of a pipeline it is the time of one image or video. A pass of its transformer takes the longer of two: the copies of the
plan, and the pass that was measured on an H200 with all weights resident, times how much slower the card's arithmetic
is published to be. (Plans count no attention without a cache, so they have no compute time for it.) The weights that a
call needs once are copied once; the compute of text encoders and VAE is not counted.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import append, finish, parser_of
from headrace.errors import HeadraceWarning
from headrace.plan_model import PlanResult, plan_model
from headrace.planning.checks import needs_of
from headrace.planning.request import PlanRequest
from headrace.transfer.cards import CARDS as PUBLISHED

H200_FLOPS_PER_S = 989e12  # of products in bf16, as published; cards.json has those of cards
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


class Pipeline(NamedTuple):
    """What a call of a pipeline does by default, and the raw row of its resident transformer on an H200."""

    steps: int
    passes: int  # of a step; two where guidance runs the transformer with the prompt and without
    table: str

    def pass_s(self, planned: PlanResult, slower: float) -> tuple[float, float]:
        """Seconds of a pass of a transformer, and of copies that a call makes once.

        ``slower``: times as long as on an H200 its arithmetic takes.
        """
        lines = MEASURED.read_text().splitlines()
        found = [row for row in map(json.loads, lines) if row["table"] == self.table and row["case"] == "resident"]
        copies_s: dict[str, float] = {}
        for unit in planned.plan.moved_units:
            part = unit.module_fqn.split(".")[0]
            copies_s[part] = copies_s.get(part, 0.0) + planned.planner.rates.copy_s(unit.num_bytes)
        # A step runs one of the transformers.
        transformers = [name for name in planned.context.inventory.children("") if name.startswith("transformer")]
        link_s = [copies_s.pop(name, 0.0) for name in transformers]
        return max(sum(link_s) / len(link_s), slower * found[0]["ms"] / 1e3), sum(copies_s.values())


MEASURED = Path(__file__).parent / "results" / "2026-11-23-offloaders-h200.jsonl"
PIPELINES = {
    "black-forest-labs/FLUX.1-dev": Pipeline(28, 1, "offloaders-flux"),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": Pipeline(50, 2, "offloaders-wan"),
}


def rows(models: Sequence[str] = (*MODELS, *PIPELINES)) -> Iterator[dict[str, Any]]:
    for model in models:
        pipeline = PIPELINES.get(model)
        what = "predicted_tokens_per_s" if pipeline is None else "predicted_seconds"
        row: dict[str, Any] = {"table": "cards", "case": model, what: {}, "host_bytes": {}}
        for card in CARDS:
            planned = plan_model(PlanRequest(model, "auto", machine=card))
            row["weight_bytes"] = planned.plan.weight_bytes
            if pipeline is None:
                row[what][card] = planned.prediction.forecasts[0].rows_per_s
            else:
                pass_s, once_s = pipeline.pass_s(planned, H200_FLOPS_PER_S / PUBLISHED[card]["flops_per_s"])
                row[what][card] = pipeline.steps * pipeline.passes * pass_s + once_s
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
