"""Two stores in one plan on a GPU: same bits in every order of eager runs and replays, bytes where the plan says."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from gpu_files import bytes_read_by_ten, captured, inputs, replay, require_bits_in_any_order, save
from gpu_models import Stack, build, offloaded, twins

import headrace
from headrace import Budget, Plan, Prefetch, Rules
from headrace.config import Policy
from headrace.errors import BudgetError, TransferError
from headrace.memory.system import Limits
from headrace.model.inventory import take_inventory
from headrace.plan import candidates
from headrace.plan.build import build_plan
from headrace.plan.staging_ring import RING_BYTES
from headrace.planning import context as planning_context
from headrace.planning.checks import needs_of

# Policy, and the units of it that rest in files.
PLANS: dict[str, tuple[Policy, tuple[int, ...]]] = {
    "one slot": (Prefetch(1, 1, 1), (0, 3)),
    "two slots": (Prefetch(1, 1, 2), (1, 4, 6)),
    "units mod slots != 0": (Prefetch(1, 1, 3), (2,)),
    "alone in its slot": (Prefetch(1, 1, 6), (5, 0)),
    "all units in files": (Prefetch(1, 1, 2), (0, 1, 2, 3, 4, 5, 6)),
    "table in place": (Rules([("embed", "uva"), ("layers", "prefetch")]), (0, 6)),
}


def plan_of(name: str, model: Stack) -> Plan:
    policy, indices = PLANS[name]
    made = build_plan(take_inventory(model), policy)
    units = [replace(unit, store="disk") if unit.index in indices else unit for unit in made.units]
    return replace(made, units=tuple(units))


@pytest.mark.usefixtures("no_grad")
class TestBits:
    @pytest.mark.usefixtures("ring")
    @pytest.mark.parametrize("from_meta", [False, True], ids=["live", "from meta"])
    @pytest.mark.parametrize("name", PLANS)
    def test_eager_captured_and_replayed_in_any_order(self, name: str, from_meta: bool, tmp_path: Path) -> None:
        resident = build()
        folder = save(resident, tmp_path)
        model = build(device="meta") if from_meta else copy.deepcopy(resident)
        expected = [resident(inputs(seed)).clone() for seed in range(4)]
        plan = plan_of(name, model)
        with offloaded(model, plan, checkpoint=folder, device="cuda") as handle:
            assert handle.plan.units == plan.units
            require_bits_in_any_order(model, expected)
            stores = handle.stats().store_bytes
            assert stores["file"] == plan.spilled_bytes
            kept = sum(unit.num_bytes for unit in plan.units if unit.store == "cpu")
            assert stores.get("host_pinned", 0) >= kept
        assert torch.equal(model(inputs(1)), expected[1])

    def test_a_replay_reads_what_rests_in_files_and_no_more(self, tmp_path: Path) -> None:
        """In the order of the units in files alone: no piece is asked for out of turn."""
        model = build(12)
        made = build_plan(take_inventory(model), Prefetch(1, 1, 2))
        plan = replace(made, units=tuple(replace(u, store="disk") if u.index % 4 == 1 else u for u in made.units))
        handle = headrace.offload(model, plan, checkpoint=save(model, tmp_path))
        graph, _ = captured(model, inputs())
        assert abs(bytes_read_by_ten(graph, handle) - 10 * plan.spilled_bytes) <= plan.spilled_bytes
        moved = handle.stats().moved_by_store
        assert moved["cpu"] > moved["disk"] > 0
        handle.remove(graphs_released=True)

    def test_under_a_compiler(self, tmp_path: Path) -> None:
        resident, model = twins()
        handle = headrace.offload(model, plan_of("two slots", model), checkpoint=save(model, tmp_path))
        compiled = torch.compile(model, fullgraph=True)
        first = compiled(inputs())
        for _ in range(3):
            assert torch.equal(compiled(inputs()), first)
        assert torch.equal(model(inputs()), resident(inputs()))
        handle.remove(graphs_released=True)

    def test_debug_checksums(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HEADRACE_DEBUG", "1")
        resident, model = twins()
        with offloaded(model, plan_of("two slots", model), checkpoint=save(model, tmp_path)):
            for _ in range(3):
                assert torch.equal(model(inputs()), resident(inputs()))


class TestBudget:
    @torch.no_grad()
    def test_what_host_memory_has_no_room_for_stays_in_the_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A budget that names no store; the ring counted at what it takes here and not at half a GiB."""
        spill = candidates.Spill
        monkeypatch.setattr(candidates, "Spill", partial(spill, ring_bytes=0))
        resident, model = twins()
        total = take_inventory(model).num_bytes
        budget = Budget(total // 2, host_memory=total // 5)
        with offloaded(model, budget, checkpoint=save(model, tmp_path)) as handle:
            plan = handle.plan
            assert 0 < plan.store_bytes["cpu"] <= total // 5
            assert plan.spilled_bytes > 0
            assert needs_of(plan, on_gpu=True).pinned_bytes - plan.ring_bytes <= total // 5
            ids = inputs()
            graph, out = captured(model, ids)
            graph.replay()
            assert torch.equal(out, resident(ids))

    @pytest.mark.parametrize("free", [1 << 20, 4 * RING_BYTES])
    def test_the_free_memory_counts(self, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Less than a ring is of no use for anything; with more than the weights nothing stays in files."""
        model = build(2)
        folder = save(model, tmp_path)
        limits = Limits(host_available_bytes=free)
        monkeypatch.setattr(planning_context, "read_limits", lambda device, pinned_bytes=0: limits)
        if free < RING_BYTES:
            with pytest.raises(BudgetError, match=r"free host memory of [\d.]+ [GMK]?i?B .* with the staging ring"):
                headrace.offload(model, "4MiB", checkpoint=folder)
            return
        with offloaded(model, "4MiB", checkpoint=folder) as handle:
            assert handle.plan.offloaded_bytes
            assert not handle.plan.reads_files
            assert handle.stats().staging is None


class TestFailure:
    @torch.no_grad()
    def test_a_file_that_changes_is_told(self, tmp_path: Path) -> None:
        model = build()
        path = save(model, tmp_path) / "model.safetensors"
        headrace.offload(model, plan_of("two slots", model), checkpoint=tmp_path)
        graph, out = captured(model, inputs())
        replay(graph)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 8)
        replay(graph, 4)
        assert out.isnan().all()
        with pytest.raises(TransferError, match="while in use"):
            model(inputs())
