"""The promise: a plan says what speculation brings under a stated assumption, and refuses it where it loses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from headrace import Prefetch, Speculation
from headrace import plan_model as plan_module
from headrace.config import UVA, Budget, Workload
from headrace.errors import BudgetError, OptionError, OptionTypeError
from headrace.plan.plan import Plan
from headrace.plan.speculation import DraftCost, forecast_speculation
from headrace.plan_model import PlanResult, plan_model
from headrace.planning.request import PlanRequest


def planned(policy: Prefetch | UVA | Budget, layers: int = 8, experts: bool = False) -> PlanResult:
    """For a nominal 4090."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": layers, "num_attention_heads": 16, "vocab_size": 32000}
    moe = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 768, "num_key_value_heads": 4}
    with torch.device("meta"):
        model = (
            Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **moe))
            if experts
            else LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=8192))
        )
    return plan_model(PlanRequest(model.bfloat16(), policy, machine="4090"))


EVERYTHING = Prefetch(1, 1, 2)


def test_tokens_a_pass_are_those_published() -> None:
    """Of a small draft, and what was measured of n-grams."""
    made = planned(EVERYTHING)
    for guesser, guesses, published in (("draft", 4, 3.28), ("draft", 8, 4.04), ("lookup", 4, 1.39)):
        cost = DraftCost(0, 0.0) if guesser == "draft" else None
        found = forecast_speculation(Speculation(guesser, guesses), made.planner, made.plan, 0, cost, on_gpu=True)
        assert found.tokens_per_pass == pytest.approx(published, rel=0.03)
        assert found.is_assumed


def test_a_pass_costs_what_one_token_costs() -> None:
    """All weights cross the link for five rows as for one."""
    made = planned(EVERYTHING)
    plain = made.planner.forecast(made.plan, 1).step_s
    found = forecast_speculation(Speculation("lookup", 4, accepted=3.5), made.planner, made.plan, 0, None, on_gpu=True)
    assert found.pass_s == pytest.approx(plain, rel=0.02)
    assert found.tokens_per_s == pytest.approx(3.5 * found.plain_tokens_per_s, rel=0.02)
    found.require_faster()
    assert "3.5 tokens a pass (as given)" in str(found)


@pytest.mark.slow
def test_the_fastest_number_of_guesses() -> None:
    made = planned(EVERYTHING)
    step_s = made.planner.forecast(made.plan, 1).step_s
    guesses = {}
    for pass_s in (0.0, step_s / 50, step_s / 5):
        cost = DraftCost(0, pass_s)
        best = forecast_speculation(Speculation("draft"), made.planner, made.plan, 0, cost, on_gpu=True)
        others = (
            forecast_speculation(Speculation("draft", k), made.planner, made.plan, 0, cost, on_gpu=True)
            for k in range(1, 17)
        )
        assert best.tokens_per_s == max(each.tokens_per_s for each in others)
        guesses[pass_s] = best.guesses
    assert sorted(guesses.values(), reverse=True) == list(guesses.values())
    assert len(set(guesses.values())) == 3


@pytest.mark.parametrize(
    ("speculation", "draft_steps"),
    [(Speculation("lookup", 8), None), (Speculation("draft", 4), 1.0)],
    ids=["experts over the link", "a draft as slow as the model"],
)
def test_where_it_loses(speculation: Speculation, draft_steps: float | None) -> None:
    made = planned(UVA(params=["experts"]) if draft_steps is None else EVERYTHING, experts=draft_steps is None)
    step_s = made.planner.forecast(made.plan, 1).step_s
    draft = None if draft_steps is None else DraftCost(0, draft_steps * step_s)
    found = forecast_speculation(speculation, made.planner, made.plan, 0, draft, on_gpu=True)
    assert found.tokens_per_s < found.plain_tokens_per_s
    with pytest.raises(OptionError, match=r"tokens/s in place of .*: leave --speculate out, or state what you"):
        found.require_faster()
    with pytest.raises(OptionError, match=r"\(as given\).*: leave --speculate out$"):
        replace(found, is_assumed=False).require_faster()


def test_an_eager_pass_takes_python_its_time() -> None:
    """A pass is verified eagerly, which a resident model waits for; one over the link does not."""
    made = planned(Budget(10**12))
    found = forecast_speculation(Speculation("lookup", 4), made.planner, made.plan, 0, None, on_gpu=True)
    assert found.pass_s == pytest.approx(8 * 31.4e-3 / 36)
    assert not found.is_faster
    on_cpu = forecast_speculation(Speculation("lookup", 4), made.planner, made.plan, 0, None, on_gpu=False)
    assert on_cpu.pass_s < found.pass_s


def small_model(random: Random) -> PreTrainedModel:
    """With experts or without, on ``meta``."""
    sizes: dict[str, Any] = {
        "hidden_size": random.choice([256, 512]), "num_hidden_layers": random.choice([2, 3, 5]), "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": random.choice([256, 8000]),
    }  # fmt: skip
    moe = {"num_experts": random.choice([4, 8]), "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    with torch.device("meta"):
        if random.random() < 0.5:
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **moe, experts_implementation="grouped_mm")).bfloat16()
        return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=1024)).bfloat16()


def small_budget(random: Random, num_bytes: int, experts: bool) -> Budget:
    """Mostly too small for a model of so many bytes."""
    options: dict[str, list[Any]] = {
        "codec": ["auto", "none", "exp3"],
        "host_memory": [max(1, int(num_bytes * random.random()))],
        "workload": [Workload([1], 128), Workload([4], 1024)],
        "peer_memory": [int(num_bytes * random.uniform(0.05, 0.5))],
        "rules": [[("lm_head", "resident")], [("re:.*self_attn.*", "uva")], [("re:.*self_attn.*", "resident")]],
        "params": [("ALL_MODEL_PARAMS",)],
    }
    if experts:
        options["rules"] += [[("experts", "cache")]]
    chosen = {name: random.choice(values) for name, values in options.items() if random.random() < 0.3}
    if ("experts", "cache") in chosen.get("rules", ()):
        chosen["expert_slots"] = random.choice([None, 1, 4])
    return Budget(max(1, int(num_bytes * random.choice([0, 0.1, 0.4]) * random.random())), **chosen)


def refusal(model: PreTrainedModel, budget: Budget, machine: str, draft_bytes: int) -> OptionError | None:
    speculation = Speculation("mtp") if draft_bytes else None
    context = plan_module._context(PlanRequest(model, budget, machine=machine, speculation=speculation))
    try:
        context.with_draft(plan_module._context, lambda _: DraftCost(draft_bytes, 1e-3, 1)).plan()
    except OptionError as error:
        return error
    return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::headrace.errors.HeadraceWarning")
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 100), marks=pytest.mark.slow)], ids=["few", "many"])
def test_what_an_error_names_as_the_least_is_accepted(seeds: range) -> None:
    """With a draft's or heads' memory, codes, cached experts, and the host memory that is named beside it."""
    refused = 0
    for seed in seeds:
        random = Random(seed)
        model = small_model(random)
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        machine, draft_bytes = random.choice(["3060", "4090", "h200"]), random.choice([0, 1, num_bytes // 7])
        budget = small_budget(random, num_bytes, "Moe" in type(model).__name__)
        error = refusal(model, budget, machine, draft_bytes)
        if not isinstance(error, BudgetError):
            continue
        refused += 1
        host = re.search(r"(?:use|with) --host-memory (\d+)MiB or more", str(error))
        limit = budget.host_memory if host is None else int(host[1]) << 20
        least = replace(budget, device_memory=error.minimum_bytes, host_memory=limit)
        assert refusal(model, least, machine, draft_bytes) is None, (seed, budget, str(error))
    assert refused > len(seeds) * 0.4


def test_it_is_printed_with_the_plan() -> None:
    made = planned(EVERYTHING)
    context = replace(made.context, request=replace(made.context.request, speculation=Speculation("lookup", 4)))
    again = plan_model(replace(context.request, model=context.request.model))
    assert isinstance(again.plan, Plan)
    assert "speculation with 4 guesses by lookup: 1.4 tokens a pass (assumed)" in str(again.with_prediction())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"guesser": ""}, "expected 'lookup', 'mtp' or a draft model"),
        ({"guesser": "lookup", "guesses": 0}, "guesses = 0: expected at least 1"),
        ({"guesser": "lookup", "guesses": 4, "accepted": 5.5}, "5.5 tokens a pass: expected 1 to 5"),
        ({"guesser": "lookup", "accepted": float("nan")}, "expected 1 to 17"),
        ({"guesser": "lookup", "accepted": "1.5"}, "accepted: expected a number of tokens a pass"),
    ],
)
def test_wrong_values(values: dict[str, object], message: str) -> None:
    with pytest.raises((OptionError, OptionTypeError), match=message):
        Speculation(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "Expecting value"),
        ("[]", "expected"),
        ('{"guesser": "lookup", "guesses": 4, "passes": 0, "tokens": 0}', "0 tokens in 0 passes"),
        ('{"guesser": "lookup", "guesses": 4, "passes": 9, "tokens": 3}', "3 tokens in 9 passes"),
        ('{"guesser": "other", "guesses": 4, "passes": 2, "tokens": 6}', "4 by other"),
        ('{"guesser": "lookup", "guesses": 5, "passes": 2, "tokens": 6}', "5 by lookup"),
        ('{"guesser": "lookup", "guesses": "4", "passes": 2, "tokens": 6}', "expected"),
    ],
)
def test_files_of_something_else(content: str, found: str, tmp_path: Path) -> None:
    path = tmp_path / "accepted.json"
    path.write_text(content)
    with pytest.raises(OptionError, match=r"--accepted-from .*: expected") as error:
        Speculation.measured("lookup", path, 4)
    assert found in str(error.value)


def test_a_file_that_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "accepted.json"
    path.write_text(json.dumps({"guesser": "lookup", "guesses": 4, "passes": 20, "tokens": 64}))
    assert Speculation.measured("lookup", path) == Speculation("lookup", 4, 3.2)
