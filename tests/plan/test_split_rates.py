"""The promise: units that come from several ranks are predicted, and planned, with the links that bring them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import headrace
from checks import raising
from headrace.cli.commands_plan import rates_of as table_of
from headrace.config import Budget, Workload
from headrace.errors import HeadraceWarning
from headrace.kinds.across_ranks import CHUNK_BYTES
from headrace.model.inventory import take_inventory
from headrace.model.memory_profile import ModelProfile
from headrace.plan.build import Planner, build_plan
from headrace.plan.kinds import kind_of
from headrace.plan.nominal_rates import NOMINAL_CPU, NOMINAL_GPU
from headrace.plan.rates import Curve, Rates
from headrace.transfer import link_rates, machine_probe, measuring
from headrace.transfer.machine_probe import Probe, read_probe
from models import Stack, all_layers
from plan_predictions import build
from plans import memory_curve
from ranks import outcomes

KIB, MIB = 1 << 10, 1 << 20
REPORTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
PROBE = REPORTS / "2026-11-21-plan-h200-probe.json"
SLOW = Rates(
    machine="a test", copy_bytes_per_s=Curve.of({KIB: 1e9}), product_s_per_byte=Curve.of({1: 1e-10}),
    grouped_s_per_byte=Curve.of({1: 1e-10}), in_place_s_per_byte=None, in_place_grouped_s_per_byte=None, kernel_s=2e-6,
    device_bytes_per_s=1e12,
)  # fmt: skip
LINKED = replace(SLOW, peer_bytes_per_s=Curve.of({KIB: 1e11}))


def h200() -> Rates:
    """The published probe of one, and what one pair of them was found to copy at before probes measured it."""
    rates = read_probe(PROBE).gpu_rates()
    assert rates is not None
    return replace(rates, peer_bytes_per_s=Curve.of({256 * MIB: 394e9}))


def published(way: str, num_ranks: int) -> float:
    """Measured bytes per second into each of so many H200, by a graph over units of 200 MB."""
    rows = map(json.loads, (REPORTS / "2026-11-21-stores-h200.jsonl").read_text().splitlines())
    wanted = {"table": f"peers-x{num_ranks}", "case": "units", "way": way, "captured": True}
    found = [row["gb_per_s"] for row in rows if wanted.items() <= row.items()]
    assert len(found) == 1
    return float(found[0]) * 1e9


def predicted(rates: Rates, mode: Any, num_ranks: int) -> float:
    return kind_of(mode).rates(rates, num_ranks).copy_bytes_per_s(200e6)


class TestAgainstMeasurements:
    @pytest.mark.parametrize(
        ("way", "mode", "num_ranks", "low", "high"),
        [
            ("pooled", "sharded_cpu", 2, 1.0, 1.02),
            ("pooled", "sharded_cpu", 4, 1.0, 1.15),
            ("sharded", "sharded_gpu", 2, 1.0, 1.1),
        ],
    )
    def test_a_pair_tells_most(self, way: str, mode: str, num_ranks: int, low: float, high: float) -> None:
        """Each a little too fast: barriers, launches, and four host links at once are not in it."""
        assert low <= predicted(h200(), mode, num_ranks) / published(way, num_ranks) <= high

    def test_a_pair_does_not_tell_what_four_gather_at(self) -> None:
        """Too fast by two thirds: each of four gets 239 GB/s from its peers when all gather at once, and not 394."""
        measured = published("sharded", 4)
        assert 1.6 <= predicted(h200(), "sharded_gpu", 4) / measured <= 1.7
        gathering = replace(h200(), gather_bytes_per_s=Curve.of({2: 394e9, 4: measured * 3 / 4}))
        assert predicted(gathering, "sharded_gpu", 4) == pytest.approx(measured, rel=0.01)
        assert predicted(gathering, "sharded_gpu", 2) == pytest.approx(predicted(h200(), "sharded_gpu", 2))


class TestRates:
    def test_sharded(self) -> None:
        """(N - 1) / N from the peers, by the rate of a copy of so many bytes."""
        rates = replace(SLOW, peer_bytes_per_s=Curve.of({300: 1e8, 3000: 1e9}))
        curve = kind_of("sharded_gpu").rates(rates, 4).copy_bytes_per_s
        assert curve(400) == pytest.approx(1e8 * 4 / 3)
        assert curve(4000) == pytest.approx(1e9 * 4 / 3)

    def test_the_own_part_is_a_device_copy(self) -> None:
        rates = replace(LINKED, device_bytes_per_s=1e9)
        assert kind_of("sharded_gpu").rates(rates, 2).copy_bytes_per_s(MIB) == pytest.approx(1e9)

    @pytest.mark.parametrize(("peer", "expected"), [(1e12, 4e9), (1.5e9, 2e9)])
    def test_sharded_host_memory_is_the_slower_of_both(self, peer: float, expected: float) -> None:
        rates = replace(SLOW, peer_bytes_per_s=Curve.of({KIB: peer}))
        assert kind_of("sharded_cpu").rates(rates, 4).copy_bytes_per_s(64 * MIB) == pytest.approx(expected)

    @pytest.mark.parametrize("num_ranks", [2, 4])
    def test_peers_over_the_own_link_bring_nothing(self, num_ranks: int) -> None:
        """PCIe has to carry every byte of a unit, whoever sends it."""
        rates = replace(SLOW, peer_bytes_per_s=Curve.of({KIB: 1e9}))
        assert kind_of("sharded_cpu").rates(rates, num_ranks).copy_bytes_per_s(64 * MIB) == pytest.approx(1e9)
        assert kind_of("sharded_gpu").rates(rates, num_ranks).copy_bytes_per_s(64 * MIB) > 1.3e9

    def test_sharded_host_memory_is_copied_in_chunks(self) -> None:
        """However long the unit: the rate of a larger copy is not to be had."""
        own = Curve.of({CHUNK_BYTES: 1e9, 4 * CHUNK_BYTES: 2e9})
        rates = replace(LINKED, copy_bytes_per_s=own)
        assert kind_of("sharded_cpu").rates(rates, 2).copy_bytes_per_s(64 * CHUNK_BYTES) == pytest.approx(2e9)

    @given(st.integers(2, 9), st.sampled_from(["sharded_cpu", "sharded_gpu"]), st.integers(1, 2**33))
    def test_no_faster_than_its_parts(self, num_ranks: int, mode: Any, num_bytes: int) -> None:
        rates = h200()
        peer = rates.peer_bytes_per_s
        assert peer is not None
        curve = kind_of(mode).rates(rates, num_ranks).copy_bytes_per_s
        most = 394e9 * num_ranks / (num_ranks - 1)
        if mode == "sharded_cpu":
            most = min(most, num_ranks * max(rate for _, rate in rates.copy_bytes_per_s.points))
        assert 0 < curve(num_bytes) <= most * (1 + 1e-9)
        assert [size for size, _ in curve.points] == sorted({size for size, _ in curve.points})

    @pytest.mark.parametrize("rates", [SLOW, NOMINAL_GPU, NOMINAL_CPU])
    def test_without_a_measured_peer_the_own_link_counts(self, rates: Rates) -> None:
        assert kind_of("sharded_gpu").rates(rates, 4) is rates
        assert kind_of("sharded_cpu").rates(rates, 4) is rates

    def test_one_rank_splits_nothing(self) -> None:
        assert kind_of("sharded_cpu").rates(LINKED, 1) is LINKED


class TestPlanning:
    """A decode step of 8 billion parameters, four ranks, half of the weights' bytes of device memory."""

    BUDGETS = pytest.mark.parametrize("mode", ["sharded_gpu", "sharded_cpu"])

    @pytest.mark.slow
    @BUDGETS
    def test_forecasts_know_the_links(self, mode: Any) -> None:
        planner, budget = self.planner(h200(), mode)
        plan = planner.plan(budget)
        alone = replace(planner, rates=replace(h200(), peer_bytes_per_s=None)).forecast(plan, 1).link_s
        found = planner.forecast(plan, 1)
        assert found.link_s == pytest.approx(plan.moved_bytes / predicted(h200(), mode, 4), rel=0.02)
        assert alone / found.link_s > 3.8
        # What is shown and offered; a plan from a file says itself how many ranks it is for.
        assert planner.predict(budget, plan).forecasts == planner.predict(plan, plan).forecasts == (found,)
        within = [point.step_s[0] for point in memory_curve(planner, budget) if point.device_bytes <= budget.num_bytes]
        assert within[-1] == pytest.approx(found.step_s)

    def test_choices_know_them(self) -> None:
        planner, budget = self.planner(h200(), "sharded_gpu")
        blind = replace(planner, rates=replace(h200(), peer_bytes_per_s=None)).plan(budget)
        made = planner.plan(budget)
        assert planner.forecast(made, 1).step_s < 0.85 * planner.forecast(blind, 1).step_s
        same = build_plan(planner.inventory, budget, rates=h200(), profile=planner.profile, num_ranks=4)
        assert same == made

    def planner(self, rates: Rates, mode: Any) -> tuple[Planner, Budget]:
        model, profile = build("qwen3-8b")
        inventory = take_inventory(model)
        return Planner(inventory, rates, profile, num_ranks=4), Budget(inventory.num_bytes // 2, mode=mode)

    def test_plans_of_every_policy_name_the_ranks(self) -> None:
        planner = Planner(take_inventory(Stack(6)), LINKED, ModelProfile(), num_ranks=4)
        plan = planner.plan(all_layers(2, "sharded_gpu"))
        assert plan.num_ranks == 4
        assert planner.forecast(plan, 1).link_s < replace(planner, rates=SLOW).forecast(plan, 1).link_s / 50


def offload_with_links(rank: int) -> list[list[int]]:
    machine_probe.planning_rates = lambda *_: LINKED  # type: ignore[attr-defined]
    found = []
    for mode, share in (("sharded_gpu", 5 / 6), ("sharded_cpu", 0.7)):
        model = Stack(8, 128).eval()
        inventory = take_inventory(model)
        budget = Budget(int(inventory.num_bytes * share), mode=mode, workload=Workload([1]))  # type: ignore[arg-type]
        with headrace.offload(model, budget, group=dist.group.WORLD) as handle:
            plans = [
                handle.plan,
                *(Planner(inventory, r, ModelProfile(), num_ranks=2).plan(budget) for r in (LINKED, SLOW)),
            ]
        found += [[plan.num_slots, len(plan.units), plan.num_ranks] for plan in plans]
    return found


@pytest.mark.slow
def test_ranks_plan_with_them_and_come_to_one_plan() -> None:
    one, other = outcomes(2, offload_with_links)
    assert one == other
    for made, linked, blind in (one[:3], one[3:]):
        assert made == linked != blind


class TestProbe:
    def test_fields(self) -> None:
        assert read_probe(PROBE).peer_bytes_per_s == {}
        old = read_probe(PROBE).gpu_rates()
        assert old is not None
        assert (old.peer_bytes_per_s, old.gather_bytes_per_s) == (None, None)
        probe = replace(read_probe(PROBE), peer_bytes_per_s={MIB: 3e11}, gather_bytes_per_s={2: 3e11, 4: 2e11})
        again = Probe.from_json(json.loads(json.dumps(probe.to_json())))
        assert again == probe
        rates = again.gpu_rates()
        assert rates is not None
        assert rates.peer_bytes_per_s == Curve.of({MIB: 3e11})
        assert rates.gather_bytes_per_s == Curve.of({2: 3e11, 4: 2e11})
        table = table_of(probe.to_json())
        assert ("device to device, copies of 1024 KiB", "300.0 GB/s") in table
        assert ("into each of 4 devices from all others at once", "200.0 GB/s") in table

    @pytest.mark.parametrize(
        ("count", "apart", "expected"),
        [(0, (), [0]), (1, (), [0]), (4, (), [0, 1, 2, 3]), (4, {(0, 2), (3, 1)}, [0, 1])],
    )
    def test_who_counts_as_a_peer(
        self, count: int, apart: Any, expected: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever can address, and be addressed by, everybody else."""
        self.machine(monkeypatch, count, apart)
        assert [device.index for device in measuring.mutual_peers(torch.device("cuda", 0))] == expected

    def test_nothing_without_peers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for count, apart in ((0, ()), (1, ()), (2, {(0, 1)}), (2, {(1, 0)})):
            self.machine(monkeypatch, count, apart)
            assert measuring.peer_rates(torch.device("cuda", 0)) == {}

    def test_a_device_that_fails_is_said_and_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine(monkeypatch, 2)

        empty = raising(torch.OutOfMemoryError("CUDA out of memory.\nTried to"))
        monkeypatch.setattr(torch, "empty", empty)
        with pytest.warns(HeadraceWarning, match=r"could not be measured: CUDA out of memory\.$"):
            assert measuring.peer_rates(torch.device("cuda", 0)) == {}

    def test_what_is_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The copies and their bytes; on a CPU, whose streams do nothing."""
        self.machine(monkeypatch, 3)
        monkeypatch.setattr(measuring, "mutual_peers", lambda device: [torch.device("cpu")] * 3)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        copied: list[int] = []
        plain = torch.Tensor.copy_
        monkeypatch.setattr(torch.Tensor, "copy_", lambda s, o, **k: copied.append(o.nbytes) or plain(s, o, **k))
        for module in (measuring, link_rates):
            monkeypatch.setattr(module, "median_s", once)
        found = measuring.peer_rates(torch.device("cuda", 0), (KIB, 4 * KIB))
        assert copied == [KIB] * 8 + [4 * KIB] * (2 + 2 * 1 + 3 * 2)
        assert found["peer_bytes_per_s"] == {KIB: 8 * KIB, 4 * KIB: 8 * KIB}
        assert found["gather_bytes_per_s"] == {2: 4 * KIB, 3: 8 * KIB}  # into each

    def machine(self, monkeypatch: pytest.MonkeyPatch, count: int, apart: Any = ()) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) not in apart)


def once(run: Callable[[], object], repeats: int = 5) -> float:
    run()
    return 1.0
