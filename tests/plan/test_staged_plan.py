"""The promise: what mode ``disk`` takes of a machine with a GPU is known before: rates, host memory, what is pinned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.checkpoint.weight_map import WeightMap
from headrace.config import Budget
from headrace.memory.system import Needs
from headrace.model.inventory import take_inventory
from headrace.model.memory_profile import ModelProfile
from headrace.plan.build import build_plan
from headrace.plan.cost_model import Forecaster
from headrace.plan.nominal_rates import NOMINAL_GPU
from headrace.plan.plan import Machine, Plan
from headrace.plan.rates import Curve, Rates
from headrace.plan.slabs import slab_bytes
from headrace.plan.staging_ring import lay_out_ring
from headrace.planning.checks import needs_of
from headrace.stores.checkpoint_files import DiskStore
from headrace.transfer.machine_probe import Probe
from models import MoE, Stack, all_layers, save
from plans import plan_text

GPU = Machine("a GPU", 2**34)


def plan_of(mode: str) -> Plan:
    plan = build_plan(take_inventory(Stack(6)), all_layers(2, mode))
    return replace(plan, made_for=GPU)


class TestRates:
    def test_files_of_a_cpu_are_its_copies(self) -> None:
        assert replace(NOMINAL_GPU, file_bytes_per_s=None).file_s_per_byte == 0
        assert replace(NOMINAL_GPU, file_bytes_per_s=4e9).file_s_per_byte == 1 / 4e9

    @pytest.mark.parametrize(("direct", "expected"), [(3e9, 3e9), (None, 8e9)])
    def test_a_probe_tells_them(self, direct: float | None, expected: float) -> None:
        curve = {1: 1e-12}
        probe = Probe(
            {"devices": "x"},
            h2d_bytes_per_s={1: 5e10},
            kernel_s=1e-6,
            device_copy_bytes_per_s=1e12,
            product_s_per_byte=curve,
            grouped_s_per_byte=curve,
            in_place_s_per_byte=curve,
            in_place_grouped_s_per_byte=curve,
            disk_read_bytes_per_s=direct,
            cached_read_bytes_per_s=8e9,
        )
        rates = probe.gpu_rates()
        assert isinstance(rates, Rates)
        assert rates.file_bytes_per_s == expected

    def test_a_forecast_counts_with_them(self) -> None:
        inventory = take_inventory(Stack(6))
        rates = replace(NOMINAL_GPU, copy_bytes_per_s=Curve.of({1: 16e6}), file_bytes_per_s=1e6)
        host, files = (Forecaster(inventory, rates, ModelProfile(), 1)(plan_of(mode)) for mode in ("cpu", "disk"))
        assert files.link_s == host.link_s > 0 == host.disk_s
        assert files.disk_s == pytest.approx(16 * host.link_s)
        assert files.floor_s == files.disk_s > host.floor_s
        assert files.bound == "disk"
        assert files.disk_s * (1 - 1e-9) <= files.step_s <= files.disk_s + files.resident_s + files.link_s

    def test_a_budget_reads_only_lookups_in_place(self) -> None:
        """Anything else read in place would be a copy in host memory, which is what files are to save."""
        inventory = take_inventory(MoE(6, 256).eval())
        budget = Budget(int(inventory.num_bytes * 0.5), mode="disk")
        plan = build_plan(inventory, budget, rates=NOMINAL_GPU, zero_copy=True)
        assert plan.units
        assert all(inventory.by_name[name].is_lookup for name in plan.uva)


class TestHostMemory:
    def test_needs_of_a_gpu(self) -> None:
        plan = plan_of("disk")
        ring = lay_out_ring([unit.num_bytes for unit in plan.units], plan.num_slots).num_bytes
        assert plan.ring_bytes == ring > 0
        assert needs_of(plan, on_gpu=True) == Needs(sum(plan.slot_bytes), ring, ring)
        table = replace(plan, uva={"table": 1000})
        assert needs_of(table, on_gpu=True).pinned_bytes == ring + slab_bytes([1000])

    @pytest.mark.parametrize("mode", ["cpu", "meta"])
    def test_other_modes_have_no_ring(self, mode: str) -> None:
        assert plan_of(mode).ring_bytes == 0

    def test_the_report_says_so(self) -> None:
        text = plan_text(replace(plan_of("disk"), uva={"table": 2**30}))
        assert "staging ring" in text
        in_place = next(line for line in text.splitlines() if "read in place" in line)
        assert in_place.split() == ["read", "in", "place", "1", "tensor", "1.000"]
        on_cpu = replace(plan_of("disk"), made_for=Machine("cpu"))
        assert "staging ring" not in plan_text(on_cpu)

    def test_what_is_read_in_place_is_a_copy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HEADRACE_DISABLE_PIN_MEMORY", "1")  # there is no driver to pin with
        model = MoE()
        weights = WeightMap.open(save(model, tmp_path))
        info = take_inventory(model).by_name["embed.weight"]
        store = DiskStore({"embed.weight": weights.source(info)}, pin_in_place=True)
        with pytest.warns(UserWarning, match="HEADRACE_DISABLE_PIN_MEMORY"):
            buffer = store.in_place("embed.weight")
        assert torch.equal(buffer.view(torch.float32), model.embed.weight.detach().reshape(-1))
        assert store.in_place("embed.weight") is buffer
        assert store.host_bytes == info.num_bytes
        store.close()
        assert store.host_bytes == 0
