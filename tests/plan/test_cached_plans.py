"""The promise: a budget caches experts where that is fastest, within its memory, and says what it assumes."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from headrace.config import Budget, Policy, Rules, Workload
from headrace.errors import BudgetError, OptionError
from headrace.flags import OffloadFlags
from headrace.formatting import format_time
from headrace.model.inventory import take_inventory
from headrace.model.memory_profile import profile_of
from headrace.model.records import ModelProfile
from headrace.plan.build import Planner
from headrace.plan.candidates import mean_log
from headrace.plan.nominal_rates import NOMINAL_GPU
from headrace.plan.plan import DeviceName, Machine
from headrace.plan.routing_traces import ExpertHits, FixedHits, Recorded, seeded_trace
from headrace.planning.checks import finalize_plan, needs_of
from headrace.planning.context import make_planner
from headrace.transfer.machine_probe import named_machine
from models import Stack

MIB = 2**20


@cache
def planner(implementation: str = "grouped_mm", vocab_size: int = 32000) -> Planner:
    """Of a shape near Qwen3-30B-A3B's: 8 layers, 64 experts of 9.4 MB, of which a token uses 4."""
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 8, "num_experts": 64}
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts_per_tok=4, vocab_size=vocab_size)).bfloat16()
    return planner_of(model, implementation)


def planner_of(model: Any, implementation: str) -> Planner:
    model.set_experts_implementation(implementation)
    inventory, profile = take_inventory(model), profile_of(model)
    names = {s.name for s in inventory.storages if not s.modules.isdisjoint(profile.row_readers)}
    rates = replace(NOMINAL_GPU, fetch_bytes_per_s=20e9)
    return Planner(inventory, rates, profile, zero_copy=True, cacheable=frozenset(names))


WEIGHTS = planner().inventory.num_bytes


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(300 * MIB, WEIGHTS), st.integers(0, 2000 * MIB), st.sampled_from([(1,), (16,), (1, 64)]))
def test_within_the_budget_and_no_slower_with_more(budget: int, more: int, rows: tuple[int, ...]) -> None:
    workload = Workload(rows)
    plans = [planner().plan(Budget(size, workload=workload)) for size in (budget, budget + more)]
    for plan, size in zip(plans, (budget, budget + more), strict=True):
        assert plan.device_bytes <= max(size, WEIGHTS if size >= WEIGHTS else 0)
        plan.check(planner().inventory)
    score = [torch.tensor([planner().forecast(p, r).step_s for r in rows]).log().mean() for p in plans]
    # Memory comes in pieces: as many slots may be spread over the layers otherwise.
    assert score[1] <= score[0] + 5e-3


def test_units_in_a_code_leave_less_room_for_experts() -> None:
    """They are decoded in memory of their own, which the slots of experts once took, too."""
    rules = [("self_attn", "prefetch"), ("experts", "cache")]
    for size in range(440 * MIB, 560 * MIB, 23 * MIB):
        plan = planner().plan(Budget(size, workload=Workload((16,)), rules=rules, codec="exp3"))
        assert plan.cached
        assert plan.decoding_bytes
        assert plan.device_bytes <= size


@cache
def dense_planner(vocab_size: int = 8000, is_tied: bool = False) -> Planner:
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 10, "num_attention_heads": 8}
    names = {"vocab_size": vocab_size, "tie_word_embeddings": is_tied}
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, **names, num_key_value_heads=2)).bfloat16()
    return Planner(take_inventory(model), NOMINAL_GPU, profile_of(model), zero_copy=True)


@pytest.mark.parametrize(
    ("make", "size", "rows", "stated"),
    [
        # The best plan without a code copies nothing, and reads in place.
        (dense_planner, 80_188_629, 1, {"codec": "exp3"}),
        (dense_planner, 121_588_053, 16, {"codec": "exp3"}),
        # Plans that cache experts were compared with coded ones as if these had no code.
        (planner, 1_697_593_535, 256, {"rules": [("experts", "prefetch")]}),
        pytest.param(planner, 2_125_892_930, 256, {"rules": [("experts", "prefetch")]}, marks=pytest.mark.slow),
        (planner, 471_690_484, 1, {"expert_slots": 2}),  # there is room for few slots alone
        # What attention leaves to experts, which are nearly all in slots, brings more than its copies take.
        pytest.param(planner, 4_964_673_423, 16, {"rules": [("self_attn", "prefetch")]}, marks=pytest.mark.slow),
        pytest.param(planner, 4_953_672_381, 256, {"rules": [("self_attn", "prefetch")]}, marks=pytest.mark.slow),
        # A head that is larger than the budget was read in place only where no experts were cached.
        (partial(planner, vocab_size=400_000), 1_000_000_000, 1, {"rules": [("experts", "cache")]}),
        # A head that is the embedding, too, and is in no unit, always stayed.
        (partial(dense_planner, 100_000, is_tied=True), 215_000_000, 1, {"rules": [("lm_head", "uva")]}),
    ],
)
def test_no_slower_than_what_may_be_stated(make: Any, size: int, rows: int, stated: dict[str, Any]) -> None:
    alone, other = (make().plan(Budget(size, workload=Workload((rows,)), **more)) for more in ({}, stated))
    assert alone.cached or alone.codec == other.codec == "exp3"
    assert make().forecast(alone, rows).step_s <= 1.01 * make().forecast(other, rows).step_s


def test_no_step_is_shorter_than_its_bound() -> None:
    checked = 0
    for family in planner().candidates(Budget(WEIGHTS, workload=Workload([1, 64]))).families:
        rows = family.fitting(float("inf"))[::29]
        assert (family.least_score(rows) <= mean_log(family.step_s(rows))).all()
        checked += bool(family.cached) * len(rows)
    assert checked > 100


def test_faster_than_without() -> None:
    """One row, a third of the weights on the device."""
    budget = Budget(WEIGHTS // 3)
    without = replace(planner(), cacheable=frozenset())
    steps = {}
    for name, each in (("cached", planner()), ("without", without)):
        plan = each.plan(budget)
        assert bool(plan.cached) == (name == "cached")
        steps[name] = planner().forecast(plan, 1).step_s
    assert steps["cached"] < steps["without"] / 2


@cache
def with_biases() -> Planner:
    """Of a shape near gpt-oss-20b's."""
    sizes = {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4, "num_local_experts": 32}
    with torch.device("meta"):
        model = GptOssForCausalLM(GptOssConfig(**sizes, num_experts_per_tok=4, vocab_size=32000)).bfloat16()
    return planner_of(model, "grouped_mm")


def test_biases_are_cached_with_their_experts() -> None:
    made = with_biases()
    plan = made.plan(Budget(made.inventory.num_bytes // 3))
    plan.check(made.inventory)
    assert {name.rpartition(".")[2] for name in plan.cached[0].storages} == {
        "gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias",
    }  # fmt: skip


@pytest.mark.parametrize(
    "limits", [{"params": ("experts.gate_up_proj",)}, {"rules": [("experts.down_proj_bias", "resident")]}]
)
def test_no_cache_of_experts_that_may_not_all_leave(limits: dict[str, Any]) -> None:
    made = with_biases()
    plan = made.plan(Budget(made.inventory.num_bytes * 3 // 4, **limits))
    assert plan.offloaded_bytes > 0
    assert not plan.cached


def test_left_over_memory_becomes_slots() -> None:
    plan = planner().plan(Budget(WEIGHTS // 3))
    slots = [layer.num_slots for layer in plan.cached]
    assert max(slots) - min(slots) <= 1
    row_bytes = plan.cached[0].num_bytes // plan.cached[0].num_experts
    assert WEIGHTS // 3 - plan.device_bytes < row_bytes + 2 * MIB


@pytest.mark.slow
def test_more_slots_keep_the_host_limit() -> None:
    """They took the memory left over, and some numbers of them take a few MiB more host memory than others."""
    made = with_biases()
    budget = Budget(3_618_033_174, rules=[("experts", "cache")])
    most = needs_of(made.plan(budget), on_gpu=True).host_bytes
    for limit in range(most - 16 * MIB, most + 16 * MIB, 3 * MIB):
        with suppress(BudgetError):
            assert needs_of(made.plan(replace(budget, host_memory=limit)), on_gpu=True).host_bytes <= limit
    assert made.plan(replace(budget, host_memory=most + 16 * MIB)).cached


def test_a_number_of_slots() -> None:
    for budget in (
        Budget(WEIGHTS // 2, expert_slots=7, rules=[("experts", "cache")]),
        OffloadFlags(device_memory=f"{WEIGHTS // 2}B", expert_slots=7, offload_rule=["experts=cache"]).policy(),
    ):
        assert {layer.num_slots for layer in planner().plan(budget).cached} == {7}
    flags = OffloadFlags(offload_rule=["experts=cache"], expert_slots=7)
    assert flags.policy() == Rules([("experts", "cache")], expert_slots=7)


def test_a_number_of_slots_where_nothing_is_cached() -> None:
    """It was ignored: with all experts resident, on a device without a cache, and beside rules for others."""
    rules = (("@attention", "prefetch"),)
    for each, budget in (
        (planner(), Budget(2 * WEIGHTS, expert_slots=7)),
        (planner("eager"), Budget(WEIGHTS // 2, expert_slots=7)),
        (planner("eager"), Budget(WEIGHTS // 2, rules=rules, expert_slots=7)),
    ):
        with pytest.raises(OptionError, match="expert_slots = 7 has no effect: the plan caches no experts; add the"):
            each.plan(budget)


def test_a_rule_for_the_planner() -> None:
    plan = planner().plan(Budget(WEIGHTS // 2, rules=[("experts", "cache")], workload=Workload((256,))))
    assert len(plan.cached) == 8


def test_experts_that_no_rows_suit_are_not_cached() -> None:
    assert not planner("eager").cacheable
    assert not planner("eager").plan(Budget(WEIGHTS // 3)).cached


def test_hits_follow_the_trace() -> None:
    hits = ExpertHits()
    alone = [hits(slots, 128, 8, 8) for slots in (8, 26, 51, 102, 128)]
    assert alone == sorted(alone)
    assert alone[2] == pytest.approx(0.9, abs=0.03)  # published: 40 % of Qwen3-30B-A3B's experts hit 90 to 95 %
    assert alone[-1] == 1
    assert hits(51, 128, 8, 128) == pytest.approx(51 / 128)
    assert ExpertHits(Recorded((seeded_trace(5, 300, 128, 8),), 128))(51, 128, 8, 8) == pytest.approx(0.9, abs=0.04)


@pytest.mark.slow
def test_the_prediction_says_what_it_assumes() -> None:
    each = planner()
    budget = Budget(WEIGHTS // 3)
    plan = each.plan(budget)
    text = str(plan.with_prediction(each.predict(budget, plan)))
    assert "hits as published ones do" in text.replace("\n", " ")
    prediction = each.predict(budget, plan)
    rates = [cache.rows_per_s for cache in prediction.caches]
    assert rates == sorted(rates)
    for point in prediction.caches:
        below, above = (replace(each, hits=FixedHits(h)).forecast(plan, 1).rows_per_s for h in (0.5, 1.0))
        assert (point.at_hits[0], point.at_hits[-1]) == ((0.5, below), (1.0, above))
    assert prediction.to_json()["caches"][0]["num_slots"] == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "fetch", "is_cached"), [("cuda", 50e9, True), ("cuda", None, False), ("cpu", 50e9, False)]
)
def test_cached_only_where_the_rate_is_known(device: str, fetch: float | None, is_cached: bool) -> None:
    rates = replace(NOMINAL_GPU, fetch_bytes_per_s=fetch)
    made = make_planner(planner().inventory, planner().profile, DeviceName(device), rates=rates)
    assert bool(made.plan(Budget(WEIGHTS // 3)).cached) == is_cached


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["h200", "4090", None])
def test_machines_without_a_probe_cache_too(machine: str | None) -> None:
    """Kernels that fetch experts get the share of the nominal link that they have of an H200's."""
    rates = NOMINAL_GPU if machine is None else named_machine(machine)[1]
    assert rates.fetch_bytes_per_s == pytest.approx(0.92 * rates.copy_bytes_per_s.points[-1][1], rel=0.01)
    made = make_planner(planner().inventory, planner().profile, DeviceName("cuda"), rates=rates)
    assert made.plan(Budget(WEIGHTS // 3)).cached


@pytest.mark.slow
def test_without_triton_budgets_choose_what_needs_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, inventory = torch.device("cuda"), planner().inventory
    budget = Budget(WEIGHTS // 3)
    chosen = make_planner(inventory, planner().profile, gpu, rates=NOMINAL_GPU).plan(budget)
    assert chosen.cached
    with torch.device("meta"):
        dense = take_inventory(Stack(16, 1024).to(torch.bfloat16))
    half = Budget(dense.num_bytes // 2)
    coded = make_planner(dense, ModelProfile(), gpu, rates=NOMINAL_GPU).plan(half)
    assert coded.coded_units
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not make_planner(inventory, planner().profile, gpu, rates=NOMINAL_GPU).plan(budget).cached
    plain = make_planner(dense, ModelProfile(), gpu, rates=NOMINAL_GPU).plan(half)
    assert plain.moved_units
    assert not plain.coded_units
    for plan, of in ((chosen, inventory), (coded, dense)):
        with pytest.raises(OptionError, match="pip install triton"):
            finalize_plan(plan, of, gpu, Machine("a GPU"))


class TestAdvice:
    """A policy that a budget of the same size would beat by more than a tenth says so, with what to type."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "policy", [Rules([("experts", "prefetch")]), Budget(WEIGHTS // 3, rules=[("experts", "uva")])]
    )
    def test_is_given_and_holds(self, policy: Policy) -> None:
        each = planner()
        plan = each.plan(policy)
        (text,) = each.predict(policy, plan).notes
        found = re.fullmatch(
            r"a budget alone would take (\S+ \S+) per step in place of (\S+ \S+): "
            r"--device-memory (\d+MiB)",
            text,
        )
        assert found, text
        step = each.forecast(each.plan(Budget(found[3])), 1).step_s
        assert step * 1.1 < each.forecast(plan, 1).step_s
        assert format_time(step) == found[1]

    @pytest.mark.slow
    @pytest.mark.parametrize("policy", [Budget(WEIGHTS // 3), Budget(WEIGHTS // 3, rules=[("experts", "cache")]), None])
    def test_is_not_given_for_the_best(self, policy: Policy | None) -> None:
        each = planner()
        plan = each.plan(policy or Budget(WEIGHTS // 3))
        assert not any("a budget alone" in text for text in each.predict(policy, plan).notes)
