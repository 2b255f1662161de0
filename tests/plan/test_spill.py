"""The promise: what host memory has no room for stays in the files, as little as can be, and where it costs least."""

from __future__ import annotations

import itertools
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from headrace.checkpoint.weight_map import WeightMap
from headrace.config import Budget, Workload
from headrace.errors import BudgetError, HeadraceWarning
from headrace.memory.system import Limits
from headrace.model.inventory import Inventory, take_inventory
from headrace.model.memory_profile import ModelProfile
from headrace.plan.build import Planner, build_plan
from headrace.plan.candidates import Spill, spill_order
from headrace.plan.cost_model import Forecaster
from headrace.plan.nominal_rates import NOMINAL_GPU
from headrace.plan.plan import Plan, UnitSpec, assemble
from headrace.plan.rates import Rates
from headrace.plan.staging_ring import RING_BYTES
from headrace.planning import context as planning_context
from headrace.planning.checks import needs_of
from headrace.planning.context import make_planner
from headrace.transfer import machine_probe
from models import MoE, Reader, Stack, save
from plans import assignments, check_plan, layered, models, plan_for
from spills import DISK, GIB, KIB, MIB, SPILL

pytestmark = pytest.mark.usefixtures("no_grad")


# -- the order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5, 36, 61, 64])
def test_every_beginning_of_the_order_is_spread_over_the_forward(count: int) -> None:
    order = spill_order(count)
    assert sorted(order) == list(range(count))
    for number in range(2, count + 1):
        chosen = sorted(order[:number])
        gaps = [b - a for a, b in itertools.pairwise([*chosen, chosen[0] + count])]
        assert max(gaps) <= 2 * count / number + 1, (number, chosen)


# -- the solver --------------------------------------------------------------------------------------------------------


def spilling(
    inventory: Inventory,
    device_bytes: int,
    host_bytes: int | None,
    spill: Spill = SPILL,
    rates: Rates = DISK,
    batch: int = 1,
    profile: ModelProfile = ModelProfile(),  # noqa: B008
    zero_copy: bool = True,
) -> Plan:
    budget = Budget(device_bytes, host_memory=host_bytes, workload=Workload([batch]))
    return plan_for(inventory, budget, rates=rates, profile=profile, zero_copy=zero_copy, spill=spill)


def host_bytes(plan: Plan, ring: int = 0) -> int:
    """What a GPU pins for ``plan``, with ``ring`` bytes of a ring where one is needed."""
    return needs_of(plan, on_gpu=True).pinned_bytes - plan.ring_bytes + (ring if plan.staged_units else 0)


@pytest.mark.slow
@given(
    models(), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.sampled_from([1, 1024]), st.data()
)
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_within_both_budgets_and_no_slower_with_more(
    model: nn.Module, device: float, more_device: float, host: float, more_host: float, batch: int, data: st.DataObject
) -> None:
    inventory = take_inventory(model)
    names = [storage.name for storage in inventory.storages]
    ring = data.draw(st.sampled_from([0, 5000]))
    spill = Spill(frozenset(data.draw(st.lists(st.sampled_from([*names, "none"]), max_size=2))), ring_bytes=ring)
    seen: dict[tuple[float, float], float] = {}
    low, high = sorted((device, more_device)), sorted((host, more_host))
    for share, host_share in itertools.product(low, high):
        budget, limit = (max(1, int(inventory.num_bytes * part)) for part in (share, host_share))
        try:
            made = spilling(inventory, budget, limit, spill, batch=batch)
        except BudgetError:
            seen[share, host_share] = float("inf")
            continue
        check_plan(made, inventory)
        assert made.device_bytes <= budget
        assert host_bytes(made, ring) <= limit
        in_files = {entry.storage for unit in made.staged_units for entry in unit.entries}
        assert in_files.isdisjoint(spill.unstreamable)
        assert made == spilling(inventory, budget, limit, spill, batch=batch), "deterministic"
        assert Plan(**{f: getattr(made, f) for f in ("units", "num_slots", "mode", "resident", "uva")}) == made
        seen[share, host_share] = Planner(inventory, DISK).forecast(made, batch).step_s
    for share in low:
        assert seen[share, high[1]] <= seen[share, high[0]] * (1 + 1e-8), "more host memory"
    for share in high:
        assert seen[low[1], share] <= seen[low[0], share] * (1 + 1e-8), "more device memory"


def exhaustive(inventory: Inventory, device: int, host: int) -> float:
    """The fastest of all assignments of a mechanism to every storage and a store to every unit, any number of slots."""
    best = float("inf")
    for specs, uva in assignments(inventory):
        for stores in itertools.product(("cpu", "disk"), repeat=len(specs)):
            units = [UnitSpec(a, tuple(s), store) for (a, s), store in zip(specs.items(), stores, strict=True)]
            for slots in range(1, max(1, len(units)) + 1):
                made = assemble(inventory, units, slots, "cpu", uva=uva)
                if made.device_bytes <= device and host_bytes(made) <= host:
                    best = min(best, Forecaster(inventory, DISK, ModelProfile(), 1)(made).step_s)
    return best


@pytest.mark.slow
@pytest.mark.parametrize("host", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("device", [0.5, 0.7])
@pytest.mark.parametrize(
    "inventory",
    [layered(3, 300 * KIB, 100 * KIB), layered(5, 400 * KIB), layered(4, 256 * KIB, head=512 * KIB)],
    ids=["two roles", "one role", "a head"],
)
def test_close_to_the_best_there_is(inventory: Inventory, device: float, host: float) -> None:
    """The worst case, 1.29, is three layers whose best plan reads the light role of two of them in place."""
    limits = int(inventory.num_bytes * device), int(inventory.num_bytes * host)
    best = exhaustive(inventory, *limits)
    found = Forecaster(inventory, DISK, ModelProfile(), 1)(spilling(inventory, *limits)).step_s
    assert best <= found * (1 + 1e-9)
    assert found <= 1.3 * best


@pytest.mark.slow
def test_every_candidate_is_timed_as_its_plan_is() -> None:
    inventory = layered(5, 300 * KIB, 100 * KIB, 64 * KIB, head=200 * KIB)
    budget = Budget(inventory.num_bytes, workload=Workload([1, 256]), codec="none")
    planner = Planner(inventory, DISK, zero_copy=True, spill=Spill(["head.weight"], ring_bytes=999))
    checked = 0
    for limit in (200 * KIB, 700 * KIB):
        for group in planner.candidates(budget).families:
            fitting = group.fitting(float("inf"), limit)[::7]
            seen = group.step_s(fitting, limit)
            for index, row in enumerate(fitting):
                made = group.plan(int(row), limit)
                assert made.device_bytes == group.memory.device_bytes[row]
                assert host_bytes(made, 999) <= limit
                for batch, size in enumerate((1, 256)):
                    expected = Forecaster(inventory, DISK, ModelProfile(), size)(made)
                    assert expected.step_s == pytest.approx(seen[batch, index])
                    assert expected.step_s >= expected.floor_s * (1 - 1e-9)
                checked += bool(made.staged_units)
    assert checked > 50


def test_all_in_files_are_timed_as_their_plans_are() -> None:
    inventory = layered(6, 300 * KIB, 100 * KIB, head=200 * KIB)
    for group in Planner(inventory, DISK).candidates(Budget(inventory.num_bytes, mode="disk")).families:
        every = group.fitting(float("inf"))[::11]
        seen = group.step_s(every)[0]
        for index, row in enumerate(every):
            made = group.plan(int(row))
            assert Forecaster(inventory, DISK, ModelProfile(), 1)(made).step_s == pytest.approx(seen[index])


def test_no_more_on_disk_than_needed_and_nothing_without_need() -> None:
    inventory = layered(12, 400 * KIB)
    device = inventory.num_bytes // 2
    slab = 400 * KIB
    for limit in range(slab, 9 * slab, slab):
        made = spilling(inventory, device, limit, zero_copy=False)
        least = sum(unit.num_bytes for unit in made.units) - limit
        assert 0 <= sum(unit.num_bytes for unit in made.staged_units) - max(0, least) < slab
    assert not spilling(inventory, device, inventory.num_bytes).staged_units
    assert not spilling(inventory, device, None).staged_units, "no limit is known"
    free = Spill(free_bytes=2 * slab, ring_bytes=0)
    assert host_bytes(spilling(inventory, device, None, free)) <= 2 * slab
    assert host_bytes(spilling(inventory, device, 4 * slab, free)) > 2 * slab, "what the user says counts"


def test_experts_of_few_rows_stay_in_place_and_the_rest_goes_to_disk() -> None:
    """One row reads two of sixteen experts where they lie; a unit in files is read whole."""
    inventory = take_inventory(wide_moe())
    profile = ModelProfile(experts_per_token=2)
    total = inventory.num_bytes
    fast = replace(DISK, file_bytes_per_s=4e9)
    made = spilling(inventory, total // 5, int(total * 0.7), profile=profile, rates=fast)
    moved = {e.storage: unit.store for unit in made.units for e in unit.entries if "experts" in e.storage}
    assert set(moved.values()) == {"disk"}
    assert made.uva_bytes > total // 2
    assert all("experts" in name for name in made.uva)


def test_memory_of_the_device_that_is_left_keeps_experts() -> None:
    """Beside those in place and those in files: what stays need not be read, so more memory has to show."""
    inventory = take_inventory(wide_moe())
    profile, total = ModelProfile(experts_per_token=2), inventory.num_bytes
    fast = replace(DISK, file_bytes_per_s=4e9)
    made = [spilling(inventory, int(total * share), total // 2, profile=profile, rates=fast) for share in (0.2, 0.35)]
    for plan in made:
        assert plan.uva_bytes > total // 3
        assert plan.staged_units
    kept = [sum(size for name, size in plan.resident.items() if "experts" in name) for plan in made]
    assert kept[1] >= kept[0] + MIB, "those of a layer"
    assert made[1].spilled_bytes < made[0].spilled_bytes
    assert made[1].device_bytes > 0.3 * total


def wide_moe(num_layers: int = 10) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList()
    for _ in range(num_layers):
        layer = Reader()
        layer.proj = nn.Linear(128, 128, bias=False, device="meta")
        layer.experts = nn.Module()
        layer.experts.up_proj = nn.Parameter(torch.empty(16, 128, 64, device="meta"))
        layer.experts.down_proj = nn.Parameter(torch.empty(16, 64, 128, device="meta"))
        model.layers.append(layer)
    return model


class TestWhoMaySpill:
    INVENTORY = layered(6, 400 * KIB)

    @pytest.mark.parametrize("mode", ["cpu", "disk", "meta"])
    def test_who_names_a_store_gets_that_one(self, mode: str) -> None:
        budget = Budget(self.INVENTORY.num_bytes // 2, mode=mode)  # type: ignore[arg-type]
        made = build_plan(self.INVENTORY, budget, rates=DISK, spill=Spill(free_bytes=1, ring_bytes=0))
        assert {unit.store for unit in made.units} == {mode}

    def test_host_memory_without_effect_is_said(self) -> None:
        budget = Budget(self.INVENTORY.num_bytes // 2, mode="disk", host_memory="1GiB")
        with pytest.warns(HeadraceWarning, match="--host-memory has no effect: mode 'disk' stores"):
            build_plan(self.INVENTORY, budget, rates=DISK)

    def test_ranks_do_not(self) -> None:
        budget = Budget(self.INVENTORY.num_bytes // 2, mode="sharded_cpu")
        made = build_plan(self.INVENTORY, budget, rates=DISK, spill=Spill(free_bytes=1), num_ranks=2)
        assert not made.staged_units

    def test_without_files_the_refusal_says_how_much_and_what_to_do(self) -> None:
        half = self.INVENTORY.num_bytes // 2
        with pytest.raises(BudgetError, match=r"more than --host-memory 1\.0 KiB.*MiB too much.*checkpoint=FOLDER"):
            build_plan(self.INVENTORY, Budget(half, host_memory="1KiB"), rates=DISK)

    def test_with_files_that_are_of_no_use_too(self) -> None:
        half, names = self.INVENTORY.num_bytes // 2, [s.name for s in self.INVENTORY.storages]
        with pytest.raises(BudgetError, match="more than the free host memory of 1000 B") as caught:
            spilling(self.INVENTORY, half, None, Spill(names, free_bytes=1000, ring_bytes=0), zero_copy=False)
        found = spilling(
            self.INVENTORY, caught.value.minimum_bytes, None, Spill(names, 1000, ring_bytes=0), zero_copy=False
        )
        assert host_bytes(found) <= 1000
        size = str(caught.value).split("--host-memory ")[1].split("MiB")[0]
        allowed = spilling(self.INVENTORY, half, int(size) * MIB, Spill(names, ring_bytes=0), zero_copy=False)
        assert not allowed.staged_units

    @pytest.mark.parametrize("spill", [None, SPILL])
    @pytest.mark.parametrize("rules", [(), [("parta", "prefetch")], [("parta", "uva")]])
    @pytest.mark.parametrize("device", [0.01, 0.3, 0.6, 0.9])
    @pytest.mark.parametrize("host", [1, 300 * KIB, 900 * KIB])
    def test_what_a_refusal_advises_is_enough(self, spill: Spill | None, rules: list, device: float, host: int) -> None:
        inventory = layered(6, 4000 * KIB)
        budget = Budget(int(inventory.num_bytes * device), rules=rules, host_memory=host * 10)
        planner = Planner(inventory, DISK, ModelProfile(), zero_copy=True, spill=spill)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HeadraceWarning)
            try:
                planner.plan(budget)
            except BudgetError as error:
                found = dict(re.findall(r"--(device|host)-memory (\d+)MiB", str(error)))
                assert found
                sizes = {f"{side}_memory": int(size) * MIB for side, size in found.items()}
                together = "with --host-memory" in str(error)
                for more in [sizes] if together else [{key: size} for key, size in sizes.items()]:
                    planner.plan(replace(budget, **more))

    def test_the_ring_counts(self) -> None:
        """A ring for half a GiB is no way to save less than that."""
        made = spilling(self.INVENTORY, self.INVENTORY.num_bytes // 2, RING_BYTES, Spill())
        assert not made.staged_units
        with pytest.raises(BudgetError, match="with the staging ring"):
            spilling(self.INVENTORY, self.INVENTORY.num_bytes // 2, 500 * KIB, Spill())

    def test_on_a_gpu_with_a_checkpoint(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = MoE()
        inventory, weights = take_inventory(model), WeightMap.open(save(model, tmp_path))
        asked: list[int] = []

        def limits(device: torch.device, pinned_bytes: int = 0) -> Limits:
            asked.append(pinned_bytes)
            return Limits(host_available_bytes=32 * GIB, cgroup_available_bytes=16 * GIB)

        monkeypatch.setattr(planning_context, "read_limits", limits)
        monkeypatch.setattr(machine_probe, "planning_rates", lambda *_: NOMINAL_GPU)
        gpu = torch.device("cuda", 0)
        spill = make_planner(inventory, ModelProfile(), gpu, weights).spill
        assert spill is not None
        assert spill.unstreamable == frozenset()
        largest = max(storage.num_bytes for storage in inventory.storages)
        assert spill.free_bytes == 16 * GIB - largest - GIB
        assert asked == [inventory.num_bytes]
        elsewhere = make_planner(inventory, ModelProfile(), gpu, weights, NOMINAL_GPU, ["head.weight"]).spill
        assert elsewhere == Spill(frozenset(["head.weight"]), None), "another machine's memory is not known here"
        assert make_planner(inventory, ModelProfile(), gpu).spill is None
        assert make_planner(inventory, ModelProfile(), torch.device("cpu"), weights).spill is None
        monkeypatch.setenv("HEADRACE_DISABLE_PIN_MEMORY", "1")
        assert make_planner(inventory, ModelProfile(), gpu, weights).spill is None

    def test_files_of_another_form_are_not_streamed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        weights = WeightMap.open(save(Stack(3), tmp_path))
        model = Stack(4).half()
        inventory = take_inventory(model)
        spill = make_planner(inventory, ModelProfile(), torch.device("cuda", 0), weights, NOMINAL_GPU).spill
        assert spill is not None
        assert spill.unstreamable == {storage.name for storage in inventory.storages}

    def test_a_thousand_times_the_tokens_are_written_out(self) -> None:
        """A disk so slow that rows cost nothing."""
        planner = Planner(self.INVENTORY, replace(DISK, file_bytes_per_s=1e6), ModelProfile(), spill=SPILL)
        budget = Budget(self.INVENTORY.num_bytes // 2, host_memory=500 * KIB)
        texts = [found.text for found in planner.alternatives(budget, planner.plan(budget))]
        assert any(
            re.fullmatch(r"batch 1024 instead of 1: 1,0\d\dx the tokens for 0% more step time", t) for t in texts
        )


def test_a_code_has_to_fit_into_what_is_free() -> None:
    """Nothing in a code is in files: where neither fits, the error is that of the budget, before limits are asked."""
    inventory = take_inventory(Stack(8, 256).to(torch.bfloat16))
    facts = {"spill": Spill(free_bytes=64 * KIB), "zero_copy": True}
    with pytest.raises(BudgetError, match=r"free host memory of 64.0 KiB .* with the staging ring"):
        build_plan(inventory, Budget(inventory.num_bytes // 2), **facts)
