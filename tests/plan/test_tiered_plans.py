"""The promise: a plan for experts in files below a GPU says what is on the device and in host memory, to the byte.

Neither memory is exceeded, more of either is never slower, and what cannot be is refused with a size that can.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace import Budget, Plan, Rules
from headrace.adapters.transformers.load_folder import build_meta_model
from headrace.checkpoint.weight_map import WeightMap
from headrace.errors import BudgetError, OptionError, PlanFileError
from headrace.model.inventory import take_inventory
from headrace.model.records import ModelProfile
from headrace.plan.build import Planner, build_plan
from headrace.plan.cached_experts import CachedLayer, fill_host_memory, staging_rows, with_host_slots, with_slots
from headrace.plan.candidates import Spill
from headrace.plan.cost_model import cached_cost, read_experts_s
from headrace.plan.cpu_share import slowdown
from headrace.plan.nominal_rates import NOMINAL_GPU
from headrace.plan.plan import DeviceName, Machine
from headrace.plan.routing_traces import ExpertHits
from headrace.planning.checks import needs_of
from headrace.planning.context import PlanContext
from headrace.planning.request import PlanRequest, Target
from moe_models import qwen

MIB = 2**20
CARD = Machine("NVIDIA GeForce RTX 4090")
GIANT = "Qwen/Qwen3-235B-A22B"
RULES = [("experts", "cache")]
EXPERT_BYTES = 2 * 3 * 256 * 512
STAGING_BYTES = 32 * EXPERT_BYTES  # no more rows than a layer has experts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    model = qwen(hidden_size=256, moe_intermediate_size=512, num_experts=32, num_hidden_layers=3)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def planned(folder: Path, device: int, host: int | None, **options: Any) -> Plan:
    """Sizes in MiB."""
    limit = None if host is None else f"{host}MiB"
    policy = Budget(f"{device}MiB", host_memory=limit, rules=RULES, mode="disk", **options)
    return headrace.make_plan(folder, policy, machine="4090")


def tokens_per_s(plan: Plan) -> float:
    prediction: Any = plan.prediction
    rate: float = prediction.forecasts[0].rows_per_s
    return rate


LAYERS = [CachedLayer(f"layers.{i}", 32, 4, {"up": 32 << 20, "bias": 32 << 10}, 28, 0) for i in range(3)]


class TestSizes:
    @pytest.mark.parametrize("room", [0, 1 << 20, 3 * (1 << 20), 20 << 20, 84 << 20, 85 << 20, 1 << 30, float("inf")])
    def test_host_memory_is_filled_evenly(self, room: float) -> None:
        filled = fill_host_memory(LAYERS, room)
        counts = [layer.host_slots for layer in filled]
        assert all(count is not None and 0 <= count <= 28 for count in counts)
        assert counts == sorted(counts, reverse=True)
        assert counts[0] - counts[-1] <= 1
        taken = sum(layer.host_bytes for layer in filled)
        assert taken == sum(count * LAYERS[0].expert_bytes for count in counts)
        assert taken <= room
        assert counts[-1] == 28 or taken + LAYERS[0].expert_bytes > room

    def test_more_slots_leave_fewer_for_host_memory(self) -> None:
        held = [with_host_slots(layer, 28) for layer in LAYERS]
        assert [layer.host_slots for layer in with_slots(held, 20)] == [12] * 3
        assert [layer.host_slots for layer in with_slots(LAYERS, 20)] == [0] * 3

    def test_rows_for_what_is_read(self) -> None:
        """Enough bytes for all threads while a layer computes; none for a CPU."""
        assert staging_rows(LAYERS, on_gpu=True) == (32, (1 << 20) + 1024)
        large = [CachedLayer("layers.0", 128, 4, {"up": 128 * 37 << 20}, 124, 0)]
        assert staging_rows(large, on_gpu=True) == (7, 37 << 20)
        assert staging_rows(LAYERS, on_gpu=False) == (0, 0)
        assert staging_rows([], on_gpu=True) == (0, 0)
        assert staging_rows([CachedLayer("layers.0", 32, 4, {"up": 32 << 20})], on_gpu=True) == (0, 0)


class TestMemory:
    @pytest.mark.parametrize("device", [46, 60, 69])
    @pytest.mark.parametrize("host", [24, 25, 31, 40, 59, 200, None])
    def test_to_the_byte(self, folder: Path, device: int, host: int | None) -> None:
        plan = planned(folder, device, host)
        assert plan.device_bytes <= device * MIB
        needs = needs_of(plan, on_gpu=True)
        held = sum(layer.host_slots or 0 for layer in plan.cached)
        assert needs.pinned_bytes == needs.host_bytes == STAGING_BYTES + held * EXPERT_BYTES
        full = all(layer.host_slots == layer.num_experts - layer.num_slots for layer in plan.cached)
        if host is None:
            assert full
        else:
            assert needs.pinned_bytes <= host * MIB
            assert full or needs.pinned_bytes + EXPERT_BYTES > host * MIB

    def test_a_table_says_it(self, folder: Path) -> None:
        plan = planned(folder, 60, 40)
        layer = plan.cached[0]
        assert f"experts above files {layer.host_slots} of 32" in " ".join(str(plan).split())
        prediction: Any = plan.prediction
        text = f"experts: {layer.num_slots} of 32 on the device, {layer.host_slots} in host memory, the rest in files"
        assert any(text in note for note in prediction.notes)

    def test_rules_take_what_is_free(self, folder: Path) -> None:
        """Of another machine that is not known."""
        plan = headrace.make_plan(folder, Rules(RULES, expert_slots=3, mode="disk"), machine="4090")
        assert {(layer.num_slots, layer.host_slots) for layer in plan.cached} == {(3, 29)}

    def test_a_cpu_has_no_second_tier(self, folder: Path) -> None:
        plan = headrace.make_plan(folder, Rules(RULES, expert_slots=3, mode="disk"), device="cpu")
        assert {layer.host_slots for layer in plan.cached} == {0}
        assert needs_of(plan, on_gpu=False).host_bytes == plan.cache_bytes + plan.slots_bytes


class TestTimes:
    def test_more_memory_is_not_slower(self, folder: Path) -> None:
        rates = [tokens_per_s(planned(folder, 50, host)) for host in (24, 30, 36, 48, 60, 100)]
        assert rates == sorted(rates)
        assert rates[0] < rates[-1]
        rates = [tokens_per_s(planned(folder, device, 40)) for device in (44, 48, 52, 60, 66)]
        assert all(now <= then * 1.001 for now, then in pairwise(rates))

    def test_both_hit_as_one_cache_of_both(self) -> None:
        layer, hits, rates = with_host_slots(LAYERS[0], 10), ExpertHits(), NOMINAL_GPU
        profile = ModelProfile(experts_per_token=4)
        read_s = read_experts_s(layer, 1, rates, profile, hits)
        missed = 4 * (1 - hits(14, 32, 4, 4))
        assert read_s == pytest.approx(missed * layer.expert_bytes * rates.file_s_per_byte)
        extra_s, link_s = cached_cost(layer, 1, rates, profile, hits)
        fetched = 4 * (1 - hits(4, 32, 4, 4)) * layer.expert_bytes / rates.expert_bytes_per_s
        assert link_s == pytest.approx(2 * fetched)  # there and back
        assert extra_s > read_s + link_s
        assert read_experts_s(with_host_slots(layer, 28), 1, rates, profile, hits) == 0
        less = cached_cost(with_host_slots(layer, 0), 1, rates, profile, hits)
        assert less[1] == pytest.approx(fetched)

    def test_the_cpu_has_no_share(self) -> None:
        rates = replace(NOMINAL_GPU, cpu_bytes_per_s={"bf16": 20e9, "f32": 20e9})
        inventory = take_inventory(qwen().to(torch.bfloat16))
        plan = build_plan(inventory, Rules(RULES, expert_slots=3, mode="disk"))
        found = slowdown(plan.cached, inventory, rates, ModelProfile(experts_per_token=2), ExpertHits(), 1)
        assert "in files" in str(found)


class TestChoice:
    def test_a_model_larger_than_both_memories(self) -> None:
        """A plain budget caches experts from the files where units in files are slower."""
        policy = Budget("22GiB", host_memory="64GiB")
        plan = headrace.make_plan("Qwen/Qwen3-235B-A22B", policy, machine="4090")
        assert (plan.mode, len(plan.cached)) == ("disk", 94)
        assert plan.device_bytes <= 22 << 30
        assert needs_of(plan, on_gpu=True).pinned_bytes <= 64 << 30
        prediction: Any = plan.prediction
        (forecast,) = prediction.forecasts
        assert forecast.bound == "disk"
        assert forecast.disk_s <= forecast.floor_s <= forecast.step_s
        assert forecast.rows_per_s > 0.1  # 0.008 with units in files

    @pytest.mark.parametrize("converted", [False, True])
    def test_units_that_a_gpu_cannot_read(self, folder: Path, converted: bool) -> None:
        """Weights of another dtype in the files stay in host memory, so such a plan is not chosen."""
        inventory = take_inventory(build_meta_model(folder))
        experts = frozenset(s.name for s in inventory.storages if ".experts." in s.name)
        others = frozenset(s.name for s in inventory.storages) - experts
        spill = Spill(others if converted else (), ring_bytes=MIB)
        rates, profile = replace(NOMINAL_GPU, file_bytes_per_s=2e7), ModelProfile(experts_per_token=2)
        planner = Planner(inventory, rates, profile, spill=spill, cacheable=experts)
        slow = planner.plan(Rules([("experts", "prefetch")], mode="disk"))
        rules = [*RULES, ("self_attn", "prefetch")]
        other = Budget("60MiB", host_memory="200MiB", rules=rules, mode="disk")
        found = planner._faster(slow, other, None, None)
        assert (found is slow) == converted
        assert converted or (found.cached and found.staged_units)

    @pytest.mark.parametrize("may_cache", [True, False])
    def test_an_offload_that_is_resized_keeps_its_store(self, folder: Path, may_cache: bool) -> None:
        """A resize to or from a cache above files is refused, so a budget does not choose one there."""
        inventory = take_inventory(build_meta_model(folder))
        experts = frozenset(s.name for s in inventory.storages if ".experts." in s.name)
        rates = replace(NOMINAL_GPU, file_bytes_per_s=2e7)
        spill = Spill((), 25 * MIB, ring_bytes=MIB, may_cache=may_cache)
        planner = Planner(inventory, rates, ModelProfile(experts_per_token=2), spill=spill, cacheable=experts)
        assert planner.plan(Budget("47MiB", codec="none")).mode == ("disk" if may_cache else "cpu")

    def test_a_resize_plans_so(self, folder: Path) -> None:
        inventory, target = take_inventory(build_meta_model(folder)), Target(DeviceName("cuda"), CARD, NOMINAL_GPU)
        request, weights = PlanRequest(folder, Budget("60MiB")), WeightMap.expected(inventory, folder)
        context = PlanContext(request, target, inventory, ModelProfile, weights)
        for held_bytes in (None, 0, MIB):
            spill = replace(context, held_bytes=held_bytes).planner.spill
            assert spill is not None
            assert spill.may_cache == (held_bytes is None)

    @pytest.mark.parametrize("free", [24, 25])
    def test_a_code_takes_no_more_host_memory_than_is_free(self, folder: Path, free: int) -> None:
        """Of a plan without units, too: that for experts in files, which the coded one is compared with."""
        inventory = take_inventory(build_meta_model(folder))
        experts = frozenset(s.name for s in inventory.storages if ".experts." in s.name)
        rates = replace(NOMINAL_GPU, file_bytes_per_s=2e7)
        spill = Spill((), free * MIB, ring_bytes=MIB)
        planner = Planner(inventory, rates, ModelProfile(experts_per_token=2), spill=spill, cacheable=experts)
        found = planner.plan(Budget("47MiB", codec="auto"))
        assert needs_of(found, on_gpu=True).host_bytes <= free * MIB

    def test_host_memory_is_enough(self, folder: Path) -> None:
        plan = headrace.make_plan(folder, Budget("40MiB", host_memory="200MiB"), machine="4090")
        assert plan.mode == "cpu"
        assert all(layer.host_slots is None for layer in plan.cached)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return headrace.make_plan(GIANT, Budget("22GiB", host_memory="64GiB", codec="none"), machine="4090")


class TestReport:
    def test_what_is_suggested_is_that_of_the_plan(self, plan: Plan) -> None:
        """Half of the device memory that is suggested does not do as well, and all of it does."""
        prediction: Any = plan.prediction
        device, *_ = [each for each in prediction.alternatives if "device memory" in each.text]
        half = (device.device_bytes + (22 << 30)) // 2
        steps = [
            headrace.make_plan(GIANT, Budget(size, host_memory="64GiB", codec="none"), machine="4090").prediction
            for size in (half, device.device_bytes)
        ]
        less, enough = (each.forecasts[0].step_s for each in steps if each is not None)
        assert enough <= 1.02 * device.step_s
        assert less > 1.05 * enough
        assert less > prediction.forecasts[0].step_s / 1.5
        (host,) = [each.text for each in prediction.alternatives if "host memory" in each.text]
        assert "no experts are left in files" in host

    def test_a_rule_that_fetches_experts_is_never_as_fast_as_resident(self) -> None:
        policy = Budget("22GiB", host_memory="64GiB", rules=RULES, mode="disk")
        prediction: Any = headrace.make_plan(GIANT, policy, machine="4090").prediction
        assert prediction.alternatives
        assert not any("as fast as resident" in each.text for each in prediction.alternatives)

    def test_more_hits_are_faster(self, plan: Plan) -> None:
        """And the expected ones lie between: host memory holds what the device does not, whatever that hits."""
        prediction: Any = plan.prediction
        for point in prediction.caches:
            rates = [rate for _, rate in point.at_hits]
            assert rates == sorted(rates)
            assert all(rate >= 0.99 * point.rows_per_s for hits, rate in point.at_hits if hits >= point.hits)


class TestRefusals:
    def test_host_memory_below_what_is_read_at_a_time(self, folder: Path) -> None:
        with pytest.raises(BudgetError, match=r"--host-memory 8\.00 MiB .*at least 24\.00 MiB.*--host-memory 24MiB"):
            planned(folder, 70, 8)
        assert {layer.host_slots for layer in planned(folder, 46, 24).cached} == {0}

    def test_device_memory_below_a_layer(self, folder: Path) -> None:
        with pytest.raises(BudgetError, match="too small") as caught:
            planned(folder, 20, 100)
        plan = planned(folder, -(-caught.value.minimum_bytes >> 20), 100)
        assert {layer.num_slots + layer.overflow_rows for layer in plan.cached} == {32}

    def test_host_memory_has_no_effect_without_cached_experts(self, folder: Path) -> None:
        policy = Budget("40MiB", host_memory="40MiB", mode="disk", rules=[("experts", "prefetch")])
        with pytest.warns(headrace.HeadraceWarning, match="--host-memory has no effect"):
            headrace.make_plan(folder, policy, machine="4090")


class TestFiles:
    def test_a_plan_comes_back(self, folder: Path, tmp_path: Path) -> None:
        plan = planned(folder, 60, 40)
        plan.save(tmp_path / "plan.json")
        found = Plan.load(tmp_path / "plan.json")
        assert found == plan
        assert found.cached == plan.cached
        assert headrace.make_plan(folder, found, machine="4090") == plan

    @pytest.mark.parametrize("held", [-1, 31])
    def test_more_than_there_are(self, folder: Path, tmp_path: Path, held: int) -> None:
        path = tmp_path / "plan.json"
        planned(folder, 60, 40).save(path)
        data = json.loads(path.read_text())
        data["cached"][1]["host_slots"] = held
        path.write_text(json.dumps(data))
        with pytest.raises(PlanFileError, match=r"cached\[1\]\.host_slots"):
            Plan.load(path)

    def test_of_another_mode(self, folder: Path) -> None:
        """Host memory that stores all experts is no tier above files, and the other way round."""
        plan = planned(folder, 60, 40)
        inventory = take_inventory(build_meta_model(folder))
        stored = build_plan(inventory, Rules(RULES, expert_slots=3))
        for mixed in (replace(plan, cached=stored.cached), replace(stored, cached=plan.cached)):
            with pytest.raises(OptionError, match="that are not there"):
                mixed.check(inventory)
