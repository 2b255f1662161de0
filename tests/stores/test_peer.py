"""The promise: units in the memory of another GPU come before those in host memory, with the same bits, or are refused.

Ordinary memory stands in for that of the other GPU; tests/gpu/test_peer_gpu.py has two of them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import headrace
from checks import raising, require_forwards
from commands import TINY, error_of, run, succeed
from cuda_driver import Driver
from headrace import Budget, Workload
from headrace.cli.demo_run import ensure_model
from headrace.errors import BudgetError, HeadraceWarning, LimitError, OptionError, RaceError
from headrace.memory import split_range
from headrace.memory.system import Limits
from headrace.model.inventory import take_inventory
from headrace.model.memory_profile import ModelProfile
from headrace.plan.build import Planner, build_plan
from headrace.plan.candidates import Spill, mean_log
from headrace.plan.cost_model import Forecaster
from headrace.plan.nominal_rates import NOMINAL_GPU
from headrace.plan.plan import DeviceName, Machine, Plan
from headrace.plan.rates import Curve
from headrace.plan.units import move_on_demand
from headrace.planning.checks import check_limits, finalize_plan, needs_of, require_one_process
from headrace.planning.request import peer_of
from headrace.stores import peer, plain_host
from headrace.stores.pinned_host import open_pinned
from headrace.stores.store import Opened
from headrace.testing import assert_moved, assert_same_bits, offload_over
from models import MoE, OddStack, QuantStack, ScaledStack, Stack, aligned, all_layers, on_meta, rows, save
from peers import NEAR, on_peer, stand_in
from plans import check_plan, layered, models, plan_for
from registrars import Ledger
from rings import FakeRingLink
from spills import DISK, KIB, MIB, PLACES, SPILL, require_bytes_of_each_store, staged

pytestmark = pytest.mark.usefixtures("no_grad")

PCIE = Curve.of({2**20: 12e9})  # between GPUs that have no bridge


def planned(model: nn.Module, slots: int = 2, *indices: int) -> Plan:
    return on_peer(build_plan(take_inventory(model), all_layers(slots)), *(indices or (1, 4)))


# -- what a plan says --------------------------------------------------------------------------------------------------


class TestWhatAPlanSays:
    def test_bytes_by_place(self, tmp_path: Path) -> None:
        made = planned(Stack(6))
        on_it = sum(made.units[index].payload_bytes for index in (1, 4))
        assert made.store_bytes["peer"] == on_it
        assert made.store_bytes["cpu"] == made.offloaded_bytes - on_it
        assert made.placements["layers.1.linear.weight"].store == "peer"
        needs = needs_of(made, on_gpu=True)
        assert needs.peer_bytes == made.peer_bytes == sum(made.units[index].num_bytes for index in (1, 4))
        assert needs.pinned_bytes == sum(unit.num_bytes for unit in made.units if unit.store == "cpu")
        made.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == made
        text = " ".join(str(made).split())
        assert "what count device peer GPU host" in text
        assert "layers.* peer GPU 2 1, 4" in text

    def test_beside_host_memory_alone(self) -> None:
        made = planned(Stack(6))
        made.check(take_inventory(Stack(6)))
        with pytest.raises(OptionError, match=r"unit 0 \(layers.0\) is stored in 'cpu', and the plan has mode 'disk'"):
            replace(made, mode="disk").check(take_inventory(Stack(6)))
        units = [replace(unit, store="disk" if unit.store == "cpu" else "peer") for unit in made.units]
        with pytest.raises(OptionError, match=r"unit 1 \(layers.1\) is stored in 'peer', and the plan has mode 'disk'"):
            replace(made, mode="disk", units=tuple(units)).check(take_inventory(Stack(6)))

    def test_what_moves_on_demand_joins_the_unit_where_it_rests(self) -> None:
        inventory = take_inventory(Stack(6))
        plan = build_plan(inventory, headrace.Rules([("linear.bias", "uva"), ("layers", "prefetch")]))
        assert plan.uva
        moved = move_on_demand(inventory, on_peer(plan, 1, 4))
        assert [unit.store for unit in moved.units] == ["cpu", "peer", "cpu", "cpu", "peer", "cpu"]


# -- the planner -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(models(), st.floats(0.05, 1), st.floats(0, 1), st.floats(0, 1), st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_within_all_limits(model: nn.Module, device: float, peer: float, host: float, has_files: bool) -> None:
    inventory = take_inventory(model)
    device_bytes, peer_bytes, limit = (max(1, int(inventory.num_bytes * share)) for share in (device, peer, host))
    budget = Budget(device_bytes, host_memory=limit, peer_memory=peer_bytes)
    try:
        made = plan_for(inventory, budget, rates=NEAR, zero_copy=True, spill=SPILL if has_files else None)
    except BudgetError:
        return
    check_plan(made, inventory)
    assert made.device_bytes <= device_bytes
    assert made.peer_bytes <= peer_bytes
    assert needs_of(made, on_gpu=True).pinned_bytes - made.ring_bytes <= limit
    left = peer_bytes - made.peer_bytes
    assert all(unit.num_bytes > left for unit in made.units if unit.store != "peer"), "there was room for it"


@pytest.mark.slow
def test_every_candidate_is_timed_as_its_plan_is() -> None:
    inventory = layered(5, 300 * KIB, 100 * KIB, 64 * KIB, head=200 * KIB)
    budget = Budget(inventory.num_bytes, workload=Workload([1, 256]), peer_memory=700 * KIB, codec="none")
    planner = Planner(inventory, NEAR, zero_copy=True, spill=Spill(["head.weight"], ring_bytes=999))
    checked = 0
    for limit in (200 * KIB, 700 * KIB, None):
        for group in planner.candidates(budget).families:
            fitting = group.fitting(float("inf"), limit)[::13]
            seen = group.step_s(fitting, limit)
            assert (group.least_score(fitting) <= mean_log(seen)).all()
            for index, row in enumerate(fitting):
                made = group.plan(int(row), limit)
                for batch, size in enumerate((1, 256)):
                    expected = Forecaster(inventory, NEAR, ModelProfile(), size)(made)
                    assert expected.step_s == pytest.approx(seen[batch, index])
                    assert expected.step_s >= expected.floor_s * (1 - 1e-9)
                checked += bool(made.peer_bytes and made.store_bytes["cpu"])
    assert checked > 50


def test_units_there_come_at_its_rate() -> None:
    inventory = layered(12, 2 * MIB, 8 * MIB)
    steps = {}
    for share in (0, 0.3, 1):
        peer_memory = int(share * inventory.num_bytes) or None
        made = build_plan(inventory, Budget(inventory.num_bytes // 2, peer_memory=peer_memory), rates=NEAR)
        forecast = Forecaster(inventory, NEAR, ModelProfile(), 1)(made)
        slow = Forecaster(inventory, DISK, ModelProfile(), 1)(made)  # without a measurement: the link's rate
        steps[share] = forecast.step_s
        assert (forecast.link_s < slow.link_s) == bool(share)
    assert steps[1] < steps[0.3] < steps[0]
    assert made.store_bytes["cpu"] == 0
    spread = build_plan(inventory, Budget(inventory.num_bytes // 2, peer_memory=40 * MIB), rates=NEAR)
    there = [unit.index for unit in spread.units if unit.store == "peer"]
    assert 1 < len(there) < len(spread.units)
    assert max(b - a for a, b in itertools.pairwise(there)) <= 2 * len(spread.units) / len(there) + 1


def test_what_was_asked_for_is_used_or_warned_of() -> None:
    """Without a measured rate, too: in host memory one row is read in place as fast as the link copies."""
    inventory = layered(12, 2 * MIB, 8 * MIB)
    budget = Budget(inventory.num_bytes // 2, peer_memory=inventory.num_bytes)
    made = build_plan(inventory, budget, rates=NOMINAL_GPU, zero_copy=True)
    assert made.peer_bytes > 0 == made.store_bytes["cpu"]
    for size, rates in ((64 * KIB, NOMINAL_GPU), (inventory.num_bytes, replace(NOMINAL_GPU, peer_bytes_per_s=PCIE))):
        with pytest.warns(HeadraceWarning, match="--peer-memory has no effect"):
            made = build_plan(inventory, replace(budget, peer_memory=size), rates=rates, zero_copy=True)
        assert made.peer_bytes == 0 < made.store_bytes["cpu"]


@pytest.mark.slow
def test_another_machine_is_planned_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Stack(40, dim=4000)
    alone, beside = (
        headrace.make_plan(model, Budget("1GiB", peer_memory=size), machine="h200") for size in (None, "1GiB")
    )
    assert 0.5 * 2**30 < beside.peer_bytes <= 2**30
    assert beside.store_bytes["cpu"] < alone.store_bytes["cpu"]
    assert "peer GPU" in str(beside)


# -- carried out -------------------------------------------------------------------------------------------------------


class TestCarriedOut:
    @pytest.fixture(autouse=True)
    def _peer(self) -> Iterator[None]:
        with stand_in():
            yield

    @pytest.mark.parametrize("from_meta", [True, False], ids=["from meta", "live"])
    @PLACES
    def test_same_bits_and_bytes_of_each_place(
        self, slots: int, indices: tuple[int, ...], from_meta: bool, tmp_path: Path
    ) -> None:
        resident = Stack(6).eval()
        save(resident, tmp_path)
        expected, state = resident(rows()), {name: t.clone() for name, t in resident.state_dict().items()}
        with torch.device("meta" if from_meta else "cpu"):
            model = Stack(6).eval()
        if not from_meta:
            model.load_state_dict(state)
        plan = planned(model, slots, *indices)
        handle = headrace.offload(model, plan, checkpoint=tmp_path if from_meta else None)
        require_bytes_of_each_store(handle, expected, slots)
        stores = handle.stats().store_bytes
        assert stores["peer"] == plan.peer_bytes
        assert stores.get("host" if from_meta else "adopted", 0) == plan.store_bytes["cpu"]
        assert_same_bits(dict(model.state_dict()), state)
        handle.remove()
        assert_same_bits(model(rows()), expected)
        assert_same_bits(dict(model.state_dict()), state)

    @pytest.mark.parametrize("make", [Stack, OddStack, ScaledStack, MoE, QuantStack])
    def test_budgets(self, make: type[nn.Module]) -> None:
        model = make().eval()
        inputs = torch.arange(9) if make is MoE else rows()
        expected = model(inputs)
        num_bytes = take_inventory(model).num_bytes
        budget = Budget(num_bytes * 7 // 10, ["ALL_MODEL_PARAMS"], peer_memory=num_bytes // 4)
        with headrace.offload(model, budget) as handle:
            require_forwards(handle, inputs, expected, 2)
            assert 0 < handle.stats().store_bytes["peer"] <= num_bytes // 4
            assert handle.stats().moved_by_store["peer"] > 0
        assert_same_bits(model(inputs), expected)

    def test_every_arrival_is_compared_with_what_rests_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HEADRACE_DEBUG", "1")
        model = Stack(6).eval()
        expected = model(rows())
        with headrace.offload(model, planned(model)) as handle:
            assert_same_bits(model(rows()), expected)
            handle._session._store.in_place("layers.4.linear.weight").add_(1)
            with pytest.raises(RaceError, match=r"unit 4 \(layers.4\): checksum"):
                model(rows())

    @pytest.mark.parametrize("slots", [1, 2, 3])
    def test_as_a_gpu_does_it(self, slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Slabs of the peer and of pinned host memory, and pieces of files, all on one stream."""
        resident = QuantStack().eval()
        save(resident, tmp_path)
        expected, ledger = resident(rows()), Ledger()
        monkeypatch.setattr(
            plain_host, "open_units", lambda request, _, bound: Opened(*open_pinned(request.plan, bound, ledger))
        )
        model = on_meta(QuantStack)
        plan = staged(planned(model, slots, 2), 1, 3)
        handle = offload_over(model, plan, FakeRingLink(blocking=True, max_pause_s=0.0005), checkpoint=tmp_path)
        require_forwards(handle, rows(), expected, 6)
        stores = handle.stats().store_bytes
        assert stores["peer"] == plan.units[2].num_bytes
        assert stores["file"] == plan.spilled_bytes
        assert stores["host_pinned"] == sum(unit.num_bytes for unit in plan.units if unit.store == "cpu")
        handle.remove()
        assert_same_bits(model(rows()), expected)

    @pytest.mark.parametrize("warm", [False, True])
    @pytest.mark.parametrize("slots", [1, 2])
    def test_what_is_written_goes_there(self, slots: int, warm: bool) -> None:
        """And not to host memory: merging an adapter, say."""
        model, twin = Stack(6).eval().requires_grad_(False), Stack(6).eval().requires_grad_(False)
        twin.load_state_dict(model.state_dict())
        handle = headrace.offload(model, planned(model, slots, *range(6)))
        if warm:
            assert_same_bits(model(rows()), twin(rows()))
        delta = torch.randn_like(twin.layers[1].linear.weight)
        for each in (model, twin):
            each.layers[1].linear.weight.data += delta
        assert not handle.stats().notes, "not resident"
        for _ in range(2):
            assert_same_bits(model(rows()), twin(rows()))
        assert handle.stats().moved_by_store["peer"] >= 2 * handle.plan.moved_bytes
        assert_same_bits(dict(model.state_dict()), dict(twin.state_dict()))
        handle.remove()
        assert_same_bits(model(rows()), twin(rows()))

    def test_used_outside_it_becomes_resident(self) -> None:
        model = Stack(6).eval()
        weight = model.layers[1].linear.weight.clone()
        handle = headrace.offload(model, planned(model))
        with pytest.warns(HeadraceWarning, match="resident from now on"):
            doubled = model.layers[1].linear.weight * 2
        assert_same_bits(doubled, weight * 2)
        handle.remove()

    @pytest.mark.slow
    def test_a_folder(self, tmp_path: Path) -> None:
        """With ``load``, and with ``headrace generate``."""
        from headrace.adapters.transformers import load

        ensure_model(tmp_path / "model", TINY)
        ids = torch.arange(9)[None]
        model, handle = load(tmp_path / "model", Budget("2MiB", mode="cpu", peer_memory="600KiB"), device="cpu")
        found = model(ids).logits
        assert_moved(handle, 1)
        moved = handle.stats().moved_by_store
        assert all(moved[place] > 0 for place in ("peer", "cpu"))
        assert_same_bits(found, aligned(type(model).from_pretrained(tmp_path / "model"))(ids).logits)
        handle.remove()
        args = ("generate", tmp_path / "model", "--prompt", "Water", "--max-new-tokens", 8, "--device", "cpu")
        beside = succeed(*args, "--device-memory", "2MiB", "--offload-mode", "cpu", "--peer-memory", "600KiB")
        assert beside.stdout == run(*args).stdout
        assert "peer GPU" in beside.stderr

    def test_no_room_is_an_error_that_leaves_the_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, closed = Stack(6).eval(), []
        before = [parameter.data_ptr() for parameter in model.parameters()]

        close = plain_host.CpuStore.close
        monkeypatch.setattr(plain_host.CpuStore, "close", lambda store: (closed.append(store), close(store)))
        monkeypatch.setattr(peer, "peer_memory", raising(BudgetError("no room", 1)))
        with pytest.raises(BudgetError, match="no room"):
            headrace.offload(model, planned(model))
        assert closed
        assert [parameter.data_ptr() for parameter in model.parameters()] == before
        headrace.offload(model, all_layers(2)).remove()


# -- its memory --------------------------------------------------------------------------------------------------------


class TestItsMemory:
    @pytest.fixture(autouse=True)
    def _no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.device", nullcontext)
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
        monkeypatch.setattr("torch.cuda.synchronize", lambda: None)

    def map(self, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> split_range._Mapped:
        monkeypatch.setattr(split_range, "import_module", lambda name: driver)
        return split_range._Mapped(2 * MIB, 2 * MIB, 10 * MIB, torch.device("cuda", 0), torch.device("cuda", 3))

    def test_it_lies_behind_some_of_the_device_s_own_which_alone_addresses_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver = Driver()
        mapped = self.map(driver, monkeypatch)
        made = [
            (given[0], given[1].location.type, given[1].location.id)
            for name, given in driver.calls
            if name == "cuMemCreate"
        ]
        assert made == [(2 * MIB, "device", 0), (8 * MIB, "device", 3)]
        places = [given[:2] for name, given in driver.calls if name == "cuMemMap"]
        assert places == [(1 << 40, 2 * MIB), ((1 << 40) + 2 * MIB, 8 * MIB)]
        readers = [[each.location.id for each in given[2]] for name, given in driver.calls if name == "cuMemSetAccess"]
        assert readers == [[0], [0]]
        del mapped
        assert [given for name, given in driver.calls if name == "cuMemUnmap"] == places

    @pytest.mark.parametrize(
        ("call", "code", "error", "message"),
        [
            ("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", BudgetError, r"no room for 10485760 bytes of units on cuda:3"),
            (
                "cuMemSetAccess",
                "CUDA_ERROR_NOT_SUPPORTED",
                OptionError,
                r"address memory of cuda:3; leave --peer-memory out",
            ),
        ],
    )
    def test_what_the_driver_refuses_names_both(
        self, call: str, code: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(error, match=f"cuda:0.* {message}"):
            self.map(Driver(**{call: code}), monkeypatch)


# -- refused -----------------------------------------------------------------------------------------------------------


class TestRefused:
    def test_a_cpu(self, tmp_path: Path) -> None:
        model = Stack(6).eval()
        for policy in (Budget("20KiB", ["ALL_MODEL_PARAMS"], peer_memory="1MiB"), planned(model)):
            with pytest.raises(OptionError, match="expected a GPU as the device, and another one whose memory holds"):
                headrace.offload(model, policy)
            with pytest.raises(OptionError, match="expected a GPU as the device"):
                headrace.make_plan(model, policy)

    @pytest.mark.parametrize("mode", ["disk", "shm_cpu", "sharded_gpu", "meta"])
    def test_another_store(self, mode: Any, tmp_path: Path) -> None:
        model = Stack(6).eval()
        with pytest.raises(OptionError, match=f"peer_memory: expected mode 'cpu', .* found '{mode}'"):
            headrace.offload(model, Budget("20KiB", mode=mode, peer_memory="1MiB"))
        save(model, tmp_path)
        with pytest.raises(OptionError, match="found 'disk', the default on a CPU; leave --peer-memory out"):
            headrace.offload(model, Budget("20KiB", peer_memory="1MiB"), checkpoint=tmp_path)

    @pytest.mark.parametrize("peers", [{}, {2}, {0, 2}])
    def test_no_gpu_that_can_be_addressed(self, peers: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
        """Else it is the next one, of those that CUDA_VISIBLE_DEVICES names."""
        monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
        monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda here, other: other in peers)
        device = torch.device("cuda", 1)
        if peers:
            assert peer_of(device) == torch.device("cuda", 2)
            assert peer_of(DeviceName("cuda")) == torch.device("cuda", 2)
            return
        monkeypatch.setattr("headrace.planning.checks._warn_of_memory", lambda *_: None)
        inventory = take_inventory(Stack(6))
        message = r"memory cuda:1 can address \(nvidia-smi topo -p2p r\), found none among 3"
        with pytest.raises(OptionError, match=message):
            finalize_plan(planned(Stack(6)), inventory, device, Machine("gpu"))
        finalize_plan(build_plan(inventory, all_layers(2)), inventory, device, Machine("gpu"))

    def test_several_processes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plan = planned(Stack(6))
        with pytest.raises(OptionError, match=r"for one process beside an idle GPU.*mode 'sharded_gpu' with group="):
            require_one_process(SimpleNamespace())  # type: ignore[arg-type]
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        model = Stack(6).eval()
        with stand_in(), pytest.raises(OptionError, match="this is one of 2"):
            headrace.offload(model, plan)

    def test_less_memory_than_it_asks_for(self) -> None:
        plan = planned(Stack(6))
        needs = needs_of(plan, on_gpu=True)
        check_limits(plan, Limits(peer_free_bytes=plan.peer_bytes), needs)
        for device_bytes in (None, 10 * MIB):
            message = r"of memory of the peer GPU, .* use a smaller --peer-memory"
            with pytest.raises(LimitError, match=message) as caught:
                check_limits(plan, Limits(device_bytes, peer_free_bytes=plan.peer_bytes - 1), needs)
            assert (caught.value.limit, caught.value.budget_bytes) == ("memory of the peer GPU", None)

    def test_the_command_line(self, tmp_path: Path) -> None:
        ensure_model(tmp_path / "model", TINY)
        flags = ("--device-memory", "2MiB", "--peer-memory", "1MiB")
        assert "found 'disk'" in error_of("plan", tmp_path / "model", *flags, "--device", "cpu")
        message = error_of(
            "generate", tmp_path / "model", "--prompt", "a", *flags, "--device", "cpu", "--offload-mode", "cpu"
        )
        assert "expected a GPU as the device" in message
        assert "has no effect without --device-memory" in error_of("plan", tmp_path / "model", *flags[2:])
        assert "--peer-memory: size" in error_of("plan", tmp_path / "model", *flags[:2], "--peer-memory", "many")
        shown = run("plan", tmp_path / "model", *flags, "--machine", "h200", "--json")
        data = json.loads(shown.stdout)
        assert 0 < data["store_bytes"]["peer"] <= MIB
        assert {unit["store"] for unit in data["units"]} <= {"peer", "cpu"}
