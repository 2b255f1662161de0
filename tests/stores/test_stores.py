"""The promise: a plan with units in host memory and units in files says so, and runs with the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import headrace
from checks import require_forwards
from headrace.config import Budget
from headrace.errors import OptionError
from headrace.memory.system import Needs
from headrace.model.inventory import take_inventory
from headrace.model.memory_profile import ModelProfile
from headrace.plan.build import Planner, build_plan
from headrace.plan.candidates import Spill
from headrace.plan.plan import Machine, Plan
from headrace.plan.prediction import PlanPrediction
from headrace.plan.schedule import steady_order
from headrace.plan.staging_ring import lay_out_ring
from headrace.plan.units import move_on_demand
from headrace.planning.checks import needs_of
from headrace.stores import plain_host
from headrace.stores.pinned_host import open_pinned
from headrace.stores.store import Opened
from headrace.testing import assert_same_bits, offload_over
from models import MoE, QuantStack, Stack, all_layers, on_meta, rows, save
from plans import layered, plan_for, plan_text
from registrars import Ledger
from rings import FakeRingLink
from spills import DISK, GIB, KIB, PLACES, SPILL, require_bytes_of_each_store, staged

pytestmark = pytest.mark.usefixtures("no_grad")


# -- what a plan says --------------------------------------------------------------------------------------------------


def two_stores(model: nn.Module, slots: int = 2, *indices: int) -> Plan:
    return staged(build_plan(take_inventory(model), all_layers(slots)), *(indices or (1, 4)))


class TestWhatAPlanSays:
    def test_bytes_by_store(self) -> None:
        made = two_stores(Stack(6))
        spilled = sum(made.units[index].payload_bytes for index in (1, 4))
        assert made.spilled_bytes == spilled
        assert made.store_bytes == {
            "resident": made.resident_bytes,
            "slots": sum(made.slot_bytes),
            "cpu": made.offloaded_bytes - spilled,
            "disk": spilled,
        }
        assert made.placements["layers.1.linear.weight"].store == "disk"
        assert made.placements["layers.2.linear.weight"].store == "cpu"
        assert made.placements["head.weight"].store is None

    def test_a_file_keeps_them(self, tmp_path: Path) -> None:
        made = two_stores(Stack(6))
        made.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == made
        assert [unit["store"] for unit in made.to_json()["units"]] == ["cpu", "disk", "cpu", "cpu", "disk", "cpu"]

    def test_a_report_keeps_them_apart(self) -> None:
        unit = replace(two_stores(Stack(6)).units[0], num_bytes=2 * GIB)
        big = [replace(unit.entries[0], num_bytes=2 * GIB)]
        units = [replace(unit, index=i, slot=0, entries=(replace(big[0], storage=f"layers.{i}.w"),)) for i in range(2)]
        made = Plan(
            (units[0], replace(units[1], store="disk")), 1, "cpu", {"head": GIB}, {}, made_for=Machine("gpu", 1)
        )
        text = plan_text(made)
        assert "4.000 GiB moved per forward, 2.000 GiB of them read from files" in text
        lines = [line.split() for line in text.splitlines()]
        assert ["prefetched", "1", "unit", "2.000"] in lines
        assert sum(line[:3] == ["prefetched", "1", "unit"] for line in lines) == 2
        assert any(line[:2] == ["staging", "ring"] for line in lines)
        assert ["role", "count", "total", "resident", "prefetched", "from", "files"] in lines
        assert "from files" not in plan_text(replace(made, units=tuple(units)))
        alone = tuple(replace(unit, slot=unit.index) for unit in made.units)
        assert "0 B moved per forward\n" in plan_text(replace(made, units=alone, num_slots=2)), "they stay"

    def test_host_memory_that_it_needs(self) -> None:
        made = two_stores(Stack(6))
        host = sum(unit.num_bytes for unit in made.units if unit.store == "cpu")
        ring = made.lay_out_ring().num_bytes
        sizes = [made.units[index].num_bytes for index in (1, 4)]
        assert ring == lay_out_ring(sizes, 1).num_bytes
        assert needs_of(made, on_gpu=True) == Needs(sum(made.slot_bytes), host + ring, host + ring)
        names = {storage.name for storage in take_inventory(Stack(6)).storages}
        read = needs_of(made, on_gpu=False, elsewhere=names, on_meta=names)
        assert read == Needs(host_bytes=made.device_bytes + made.store_bytes["cpu"])

    def test_other_pairs_of_stores_are_refused(self) -> None:
        made = two_stores(Stack(6))
        inventory = take_inventory(Stack(6))
        made.check(inventory)
        for mode, store in (("shm_cpu", "disk"), ("disk", "cpu"), ("cpu", "meta")):
            units = [replace(u, store=store if u.index == 1 else mode) for u in made.units]
            message = rf"unit 1 \(layers.1\) is stored in '{store}', and the plan has mode '{mode}'"
            with pytest.raises(OptionError, match=message):
                replace(made, mode=mode, units=tuple(units)).check(inventory)

    def test_the_ring_knows_the_units_in_files_alone(self) -> None:
        made = two_stores(Stack(7), 3, 0, 2, 5)
        layout = made.lay_out_ring(entry_bytes=4096, max_entries=3)
        assert set(layout.of_unit) == {0, 2, 5}
        cycle = list(dict.fromkeys(piece.unit for piece in layout.pieces))
        assert cycle == [unit for unit in steady_order(7, 3) if unit in (0, 2, 5)]

    def test_what_moves_on_demand_joins_the_unit_where_it_rests(self) -> None:
        made = two_stores(Stack(6))
        first = made.units[1].entries[0]
        units = [replace(u, entries=u.entries[1:]) if u.index == 1 else u for u in made.units]
        in_place = replace(made, units=tuple(units), uva={first.storage: first.num_bytes})
        moved = move_on_demand(take_inventory(Stack(6)), in_place)
        assert moved.units == made.units

    def test_more_host_memory_is_an_alternative(self) -> None:
        inventory = layered(12, 400 * KIB)
        planner = Planner(inventory, DISK, ModelProfile(), spill=Spill(ring_bytes=0))
        budget = Budget(inventory.num_bytes // 2, host_memory=800 * KIB)
        made = planner.plan(budget)
        prediction = planner.predict(budget, made)
        assert prediction.forecasts[0].bound == "disk"
        assert prediction.to_json()["steps"][0]["disk_s"] > 0
        found = [a for a in prediction.alternatives if "more host memory" in a.text]
        assert len(found) == 1
        assert found[0].speedup >= 1.3
        more = planner.plan(replace(budget, host_memory=GIB))
        assert planner.forecast(more, 1).step_s <= found[0].step_s * (1 + 1e-9)
        assert not more.staged_units
        assert "host memory" not in text_of(planner.predict(replace(budget, host_memory=GIB), more))


def text_of(prediction: PlanPrediction) -> str:
    return " ".join(alternative.text for alternative in prediction.alternatives)


# -- carried out -------------------------------------------------------------------------------------------------------


class TestCarriedOut:
    @pytest.mark.parametrize("from_meta", [True, False], ids=["from meta", "live"])
    @PLACES
    def test_same_bits_and_bytes_of_each_store(
        self, slots: int, indices: tuple[int, ...], from_meta: bool, tmp_path: Path
    ) -> None:
        resident = Stack(6).eval()
        save(resident, tmp_path)
        model = resident
        if from_meta:
            model = on_meta(Stack, 6)
        expected = resident(rows())
        plan = two_stores(model, slots, *indices)
        handle = headrace.offload(model, plan, checkpoint=tmp_path)
        require_bytes_of_each_store(handle, expected, slots)
        stores = handle.stats().store_bytes
        assert stores["file"] == plan.spilled_bytes
        assert stores.get("host" if from_meta else "adopted", 0) == plan.store_bytes["cpu"]
        state = model.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in state_in(tmp_path).items())
        handle.remove()
        assert_same_bits(model(rows()), expected)
        assert not any(parameter.is_meta for parameter in model.parameters())

    @pytest.mark.parametrize("make", [MoE, QuantStack])
    def test_with_what_is_read_in_place_and_a_tie(self, make: type[nn.Module], tmp_path: Path) -> None:
        resident = make().eval()
        save(resident, tmp_path)
        model = on_meta(make)
        inputs = torch.arange(9) if make is MoE else rows()
        inventory = take_inventory(model)
        sizes = {"device_memory": int(inventory.num_bytes * 0.7), "host_memory": int(inventory.num_bytes * 0.3)}
        plan = plan_for(inventory, Budget(**sizes, params=["ALL_MODEL_PARAMS"]), rates=DISK, spill=SPILL)
        assert plan.spilled_bytes
        with headrace.offload(model, plan, checkpoint=tmp_path) as handle:
            for _ in range(3):
                assert_same_bits(model(inputs), resident(inputs))
            assert handle.stats().store_bytes["file"] == plan.spilled_bytes

    @pytest.mark.parametrize("from_meta", [True, False], ids=["from meta", "live"])
    @pytest.mark.parametrize("slots", [1, 2, 3])
    def test_as_a_gpu_does_it(
        self, slots: int, from_meta: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Pinned slabs of host units on the stream of the test between pieces from the ring, whose order is its own."""
        resident = QuantStack().eval()
        save(resident, tmp_path)
        expected = resident(rows())
        ledger = Ledger()
        monkeypatch.setattr(
            plain_host, "open_units", lambda request, _, bound: Opened(*open_pinned(request.plan, bound, ledger))
        )
        with torch.device("meta" if from_meta else "cpu"):
            model = QuantStack().eval()
        if not from_meta:
            model.load_state_dict(resident.state_dict())
        plan = two_stores(model, slots, 1, 3)
        link = FakeRingLink(blocking=True, max_pause_s=0.0005)
        handle = offload_over(model, plan, link, checkpoint=tmp_path)
        require_forwards(handle, rows(), expected, 6)
        assert {piece.unit for piece in link.layout.pieces} == {1, 3}
        staging = handle.stats().staging
        assert staging is not None
        assert staging.misses == 0
        assert staging.bytes_read >= 5 * sum(plan.units[index].payload_bytes for index in (1, 3))
        kept = sum(unit.num_bytes for unit in plan.units if unit.store == "cpu")
        assert handle.stats().store_bytes["host_pinned"] == sum(ledger.held.values()) == kept
        handle.remove()
        assert_same_bits(model(rows()), expected)

    def test_without_a_checkpoint_it_is_refused_before_anything_is_allocated(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = Stack(6).eval()
        before = [parameter.data_ptr() for parameter in model.parameters()]
        monkeypatch.setattr("headrace.stores.plain_host.open_units", lambda *args: pytest.fail("allocates"))
        with pytest.raises(OptionError, match=r"2 of the plan's 6 units \(.* KiB\) are in safetensors.*checkpoint="):
            headrace.offload(model, two_stores(model))
        assert [parameter.data_ptr() for parameter in model.parameters()] == before


def state_in(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
