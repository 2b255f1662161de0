"""What ``vllm_two_against_four.py`` compares, what plans predict for it, and its rows; nothing is run here.

    python benchmarks/two_four_plans.py --out benchmarks/results/DATE-two-against-four.jsonl

The model is Llama-3.3-70B's shape with 40 of its 80 layers, 72.7 GB in bf16: a rank of two holds 36.3 GB of it, more
than ``LEFT_BYTES`` leave it, and a rank of four 18.2 GB. Two ranks offload every second layer.

A plan is made for what one rank holds: heads, the width of the MLP and the vocabulary divided by the ranks, with the
rates of an H200 (an H100's products in bf16 are as fast; its memory, which resident decode steps wait for, is slower).
Added are two all-reduces a layer, at the rates below. Attention, launches and the server are not counted, in neither
case, so the requests per second are upper bounds; their ratio is what the prediction is for.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from harness import append, finish, parser_of
from headrace.config import Prefetch
from headrace.plan.cost_model import Forecaster
from headrace.planning import plan_model
from headrace.runtime.planner_factory import PlanRequest
from published_configs import LLAMA_3_3_70B
from seeded_models import write_config
from vllm_cases import Recipe

CONFIG = {**LLAMA_3_3_70B, "num_hidden_layers": 40}
# The same family for a CPU.
TINY = {
    **LLAMA_3_3_70B,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
# Every second layer, into two slots: a layer's copy takes longer than the layer before it computes, so one slot would
# show a quarter of a prefill step.
GROUP = {"offload_group_size": 2, "offload_num_in_group": 1, "offload_prefetch_step": 2}
LEFT_BYTES = 34 * 10**9  # of each GPU, for everything
STEP_TOKENS = 8192  # of a prefill step
ONE_STEP_S = 0.02  # within which tokens of one step come
# A step of 128 tokens takes long where weights are copied, so nothing is asked twice.
RECIPES = {
    "2047 in, 1 out": Recipe(2047, 1, 64, None),
    "128 in, 128 out; 1 at once": Recipe(128, 128, 1, 1, warmups=0),
    "128 in, 128 out; 4 at once": Recipe(128, 128, 4, 4, warmups=0),
    "128 in, 128 out; 16 at once": Recipe(128, 128, 16, 16, warmups=0),
}
TINY_RECIPES = {
    "60 in, 1 out": Recipe(60, 1, 4, None),
    "8 in, 8 out; 1 at once": Recipe(8, 8, 1, 1, warmups=0),
}


class Case(NamedTuple):
    """A server. ``worker``: a class of ``vllm_two_against_four.py``; ``num_recipes``: that it is asked."""

    ranks: int
    worker: str
    is_capped: bool = True
    num_recipes: int = len(RECIPES)


CASES = {
    "two": Case(2, "Worker"),
    "still": Case(2, "NoCopyWorker", is_capped=False),
    "four": Case(4, "ResidentWorker"),
    "two-again": Case(2, "Worker", num_recipes=1),
    "four-again": Case(4, "ResidentWorker", num_recipes=1),
}
# Bus bandwidth of an all-reduce of 1 GiB, by ranks, on the machines with H100s that are lent for this.
REDUCED_BYTES_PER_S = {2: 329e9, 4: 355e9}
# Of a row that only says what was not run.
UNKNOWN = ("requests_per_s_gpu", "tokens_per_s", "median_ttft_ms", "median_tpot_ms", "moved_bytes", "start_s")


def predictions() -> Iterator[dict[str, Any]]:
    """A row for each recipe of both splits."""
    for name in ("two", "four"):
        rank = Rank(CASES[name].ranks, offloads=name == "two")
        for recipe in RECIPES:
            yield {**unknown(name, recipe), "status": "predicted", **rank.predicted(RECIPES[recipe])}


def unknown(case: str, recipe: str) -> dict[str, Any]:
    """The row of what was not run."""
    asked = {**RECIPES, **TINY_RECIPES}[recipe]
    row = {"case": case, "recipe": recipe, "status": "not run", "ranks": CASES[case].ranks, "requests": asked.requests}
    return row | dict.fromkeys(UNKNOWN)


def shard(config: dict[str, Any], num_ranks: int) -> dict[str, Any]:
    """The shape of what a tensor-parallel rank holds."""
    split = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    return config | {name: config[name] // num_ranks for name in split}


class Rank:
    """A rank's plan, and what it predicts."""

    def __init__(self, num_ranks: int, offloads: bool) -> None:
        self._num_ranks = num_ranks
        with tempfile.TemporaryDirectory() as folder:
            write_config(Path(folder), shard(CONFIG, num_ranks))
            policy = Prefetch(*GROUP.values()) if offloads else None
            planned = plan_model(PlanRequest(folder, policy, machine="h200"))
        self._plan, self._planner = planned.plan, planned.planner
        self._inventory = planned.context.inventory

    @property
    def weight_bytes(self) -> int:
        """Of everything that the rank holds, on whichever memory."""
        return self._plan.weight_bytes

    def _step_s(self, rows: int) -> float:
        forecaster = Forecaster(self._inventory, self._planner.rates, self._planner.profile, rows)
        num_bytes = rows * CONFIG["hidden_size"] * 2 * 2 * (self._num_ranks - 1) / self._num_ranks
        reduced_s = 2 * CONFIG["num_hidden_layers"] * num_bytes / REDUCED_BYTES_PER_S[self._num_ranks]
        return forecaster(self._plan).step_s + reduced_s

    def predicted(self, recipe: Recipe) -> dict[str, Any]:
        """The fields of a row."""
        at_once = recipe.at_once or recipe.requests
        num_prefills = -(-at_once * recipe.tokens_in // STEP_TOKENS)
        prefill_s = self._step_s(min(STEP_TOKENS, at_once * recipe.tokens_in))
        step_s = self._step_s(at_once) if recipe.tokens_out > 1 else 0.0
        seconds = num_prefills * prefill_s + (recipe.tokens_out - 1) * step_s
        steps = num_prefills + recipe.tokens_out - 1
        tokens = at_once * (recipe.tokens_in + 1 if recipe.tokens_out == 1 else recipe.tokens_out)
        return {
            "requests_per_s_gpu": at_once / seconds / self._num_ranks,
            "tokens_per_s": tokens / seconds,
            "median_ttft_ms": (num_prefills + 1) / 2 * prefill_s * 1e3,
            "median_tpot_ms": step_s * 1e3 if recipe.tokens_out > 1 else None,
            "prefill_step_ms": prefill_s * 1e3,
            "moved_bytes": self._plan.moved_bytes * steps,
            "rank_weight_bytes": self.weight_bytes,
            "rank_device_bytes": self._plan.device_bytes,
        }


def with_missing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``rows``, and one for each recipe that no server was asked."""
    wanted = [(name, recipe) for name, case in CASES.items() for recipe in list(RECIPES)[: case.num_recipes]]
    done = {(row["case"], row["recipe"]) for row in rows if row["status"] == "measured"}
    return [*rows, *(unknown(*pair) for pair in wanted if pair not in done)]


def step_ms(found: dict[str, Any]) -> list[float]:
    """Each step as the client of ``vllm bench serve`` sees it (``--save-detailed``).

    Of one request's tokens; where only one token comes out, between the first tokens of all requests, the first step
    from the first request on.
    """
    if found["itls"][0]:
        return [seconds * 1e3 for seconds in found["itls"][0]]
    begin = min(found["start_times"])
    tokens = sorted(sent + s - begin for sent, s in zip(found["start_times"], found["ttfts"], strict=True))
    ends = [
        at for at, following in zip(tokens, [*tokens[1:], float("inf")], strict=True) if following - at > ONE_STEP_S
    ]
    return [(end - start) * 1e3 for start, end in itertools.pairwise([0.0, *ends])]


def describe(row: dict[str, Any]) -> str:
    """One line about a row."""
    start = f"{row['case']:10} {row['ranks']} GPUs  {row['recipe']:28} {row['status']:9}"
    if row["status"] == "not run":
        return start
    step = "" if row["median_tpot_ms"] is None else f"{row['median_tpot_ms']:8.2f} ms/token, "
    return (
        f"{start} {row['requests_per_s_gpu']:8.4f} requests/s and GPU, {step}first after "
        f"{row['median_ttft_ms']:8.1f} ms, {row['moved_bytes'] / 1e9:8.1f} GB moved a rank"
    )


def ratios(rows: list[dict[str, Any]]) -> list[str]:
    """Of requests per second and GPU, of two against four; the bar is 1.07 with long prompts."""
    lines = []
    for status in ("measured", "predicted"):
        found = {(row["case"], row["recipe"]): row["requests_per_s_gpu"] for row in rows if row["status"] == status}
        for (case, recipe), rate in found.items():
            if case.startswith("two") and (beside := found.get((case.replace("two", "four"), recipe))):
                lines.append(f"{case:10} {recipe:28} {status:9} {rate / beside:.3f} x four without")
    return lines


def main() -> None:
    given = parser_of(__doc__).parse_args()
    rows = with_missing(list(predictions()))
    for row in rows:
        append({"table": "two-four", **row}, given.out)
    print("\n".join([*map(describe, rows), *ratios(rows)]))
    finish("two_four_plans", rows)


if __name__ == "__main__":
    main()
