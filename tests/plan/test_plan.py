"""The promise: a plan never needs more than its budget, places everything once, and says exactly what it will need.

All of it holds for any model, so most tests draw models at random. They live on ``meta`` and cost nothing.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import headrace
from headrace.config import ALL_MODEL_PARAMS, UVA, Budget, Codec, Mode, Prefetch
from headrace.errors import BudgetError, HeadraceWarning, OptionError, SelectionError
from headrace.formatting import in_unit, size_unit
from headrace.model.inventory import Inventory, take_inventory
from headrace.model.layers import find_stacks
from headrace.plan.build import build_plan
from headrace.plan.plan import Plan
from headrace.plan.units import group_rule
from models import MoE, OddStack, Reader, ReaderDict, ScaledStack, Stack, all_layers
from plans import KIB, check_plan, holder, models, plan_for, plan_text


def attempt(inventory: Inventory, budget: Budget) -> tuple[Plan | None, BudgetError | None]:
    try:
        return plan_for(inventory, budget), None
    except BudgetError as error:
        return None, error


class TestBudget:
    @pytest.mark.slow
    @given(models(), st.floats(0.0, 1.2), st.sampled_from(["none", "auto", "exp3"]))
    @settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
    def test_a_code_keeps_to_any_budget(self, model: nn.Module, share: float, codec: Codec) -> None:
        inventory = take_inventory(model)
        num_bytes = int(inventory.num_bytes * share)
        assume(num_bytes > 0)
        try:
            plan, _ = attempt(inventory, Budget(num_bytes, (ALL_MODEL_PARAMS,), "cpu", codec=codec))
        except OptionError:  # nothing can be offloaded, or nothing of it has a code
            return
        if plan is not None:
            assert plan.device_bytes <= num_bytes
            check_plan(plan, inventory)

    @pytest.mark.slow
    @given(models(), st.floats(0.0, 1.2), st.sampled_from(["cpu", "disk"]), st.sampled_from([(), (ALL_MODEL_PARAMS,)]))
    @settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
    def test_any_model_any_budget(self, model: nn.Module, share: float, mode: Mode, params: tuple[str, ...]) -> None:
        inventory = take_inventory(model)
        budget = int(inventory.num_bytes * share)
        assume(budget > 0)
        plan, refusal = attempt(inventory, Budget(budget, params, mode))
        if refusal is not None:
            minimum = refusal.minimum_bytes
            assert minimum > budget
            assert f"({minimum} bytes)" in str(refusal)
            plan, _ = attempt(inventory, Budget(minimum, params, mode))
            assert plan is not None
            assert plan.device_bytes <= minimum
            below, again = attempt(inventory, Budget(max(minimum - 1, 1), params, mode))
            assert minimum == 1 or (below is None and again is not None and again.minimum_bytes == minimum)
        else:
            assert plan is not None
            assert plan.device_bytes <= budget
            assert (plan.offloaded_bytes > 0) == (inventory.num_bytes > budget)
        check_plan(plan, inventory)

    def test_minimum_with_units_of_unequal_size(self) -> None:
        """Through two slots a part of the units can need less than all of them; through one slot it cannot."""
        sizes = [100, 4, 100, 4, 100, 4, 100]
        model = nn.Module()
        model.layers = nn.ModuleList(holder(w=torch.empty(n * KIB, device="meta")) for n in sizes)
        inventory = take_inventory(model)
        with pytest.raises(BudgetError) as caught:
            build_plan(inventory, Budget(1))
        minimum = caught.value.minimum_bytes
        assert build_plan(inventory, Budget(minimum)).device_bytes <= minimum
        with pytest.raises(BudgetError):
            build_plan(inventory, Budget(minimum - 1))

    @pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
    def test_spread_evenly(self, share: float) -> None:
        """Units that stay in the pipe carry the same bytes each, at even distances."""
        with torch.device("meta"):
            model = Stack(24, dim=256)
        inventory = take_inventory(model)
        plan = build_plan(inventory, Budget(int(inventory.num_bytes * share)))
        check_plan(plan, inventory)
        assert len({unit.payload_bytes for unit in plan.units}) == 1
        layers = [int(unit.module_fqn.split(".")[1]) for unit in plan.units]
        gaps = {second - first for first, second in itertools.pairwise(layers)}
        assert max(gaps) - min(gaps) <= 1
        assert plan.num_slots == 2

    def test_a_smaller_role_in_every_layer_before_whole_layers(self) -> None:
        """A sixth of every layer, not every sixth layer."""
        model = nn.Module()
        model.layers = nn.ModuleList(
            ReaderDict({f"p{i}": holder(w=torch.empty(100 * KIB, device="meta")) for i in "abcdef"}) for _ in range(12)
        )
        inventory = take_inventory(model)
        plan = build_plan(inventory, Budget(int(inventory.num_bytes * 0.87)))
        assert len(plan.units) == 12
        assert {len(unit.entries) for unit in plan.units} == {1}

    def test_what_fits_stays_and_says_so(self) -> None:
        inventory = take_inventory(Stack(3))
        with pytest.warns(HeadraceWarning, match="nothing is offloaded"):
            plan = build_plan(inventory, Budget(inventory.num_bytes))
        assert (plan.units, plan.num_slots, plan.uva) == ((), 0, {})
        assert plan.resident_bytes == inventory.num_bytes

    @pytest.mark.parametrize("mode", ["cpu", "disk"])
    def test_lookup_tables_are_read_in_place(self, mode: Mode) -> None:
        """If leaving the table where it rests is enough, nothing else moves."""
        model = nn.Module()
        model.embed = nn.Embedding(1000, 64, device="meta")
        model.layers = nn.ModuleList(holder(w=torch.empty(100 * KIB, device="meta")) for _ in range(4))
        inventory = take_inventory(model)
        layer_bytes = 4 * 400 * KIB
        plan = build_plan(inventory, Budget(layer_bytes, mode=mode))
        assert (plan.uva, plan.units) == ({"embed.weight": 256_000}, ())
        plan = build_plan(inventory, Budget(layer_bytes - 1, mode=mode))
        assert plan.uva == {"embed.weight": 256_000}
        assert len(plan.units) > plan.num_slots

    def test_only_what_is_outside_the_layers(self) -> None:
        model = nn.Module()
        model.layers = nn.ModuleList(holder(w=torch.empty(100, device="meta")) for _ in range(4))
        model.tower = holder(w=torch.empty(100 * KIB, device="meta"))
        model.head = holder(w=torch.empty(100 * KIB, device="meta"))
        inventory = take_inventory(model)
        plan = build_plan(inventory, Budget(500 * KIB, ["tower", "head"]))
        assert [unit.module_fqn for unit in plan.units] == ["tower", "head"]
        assert plan.num_slots == 1

    def test_a_module_around_the_layers_keeps_its_weights(self) -> None:
        """Its slot would be taken while the layers run (a position table on the model itself, say)."""
        model = Reader()
        model.register_parameter("pos", nn.Parameter(torch.empty(100 * KIB, device="meta")))
        model.layers = nn.ModuleList(holder(w=torch.empty(100 * KIB, device="meta")) for _ in range(4))
        inventory = take_inventory(model)
        for params in ((), (ALL_MODEL_PARAMS,)):
            plan = build_plan(inventory, Budget(1300 * KIB, params))
            assert plan.mechanism_of("pos") == "resident"
            assert len(plan.units) > 1


class TestGroupRule:
    @given(st.integers(0, 40), st.integers(1, 12), st.data())
    def test_of_every_group_the_last(self, num_layers: int, group_size: int, data: st.DataObject) -> None:
        num_in_group = data.draw(st.integers(1, group_size))
        chosen = group_rule(num_layers, group_size, num_in_group)
        for start in range(0, num_layers, group_size):
            group = list(range(start, start + group_size))
            assert [i for i in group if i in chosen] == [i for i in group[-num_in_group:] if i < num_layers]
        assert all(0 <= index < num_layers for index in chosen)

    def test_examples(self) -> None:
        assert group_rule(12, 4, 1) == [3, 7, 11]
        assert group_rule(10, 4, 2) == [2, 3, 6, 7]
        assert group_rule(3, 1, 1) == [0, 1, 2]
        assert group_rule(3, 4, 1) == []

    @pytest.mark.slow
    @given(models(), st.integers(1, 4), st.integers(1, 10), st.data())
    @settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
    def test_any_model(self, model: nn.Module, group_size: int, prefetch_step: int, data: st.DataObject) -> None:
        inventory = take_inventory(model)
        num_in_group = data.draw(st.integers(1, group_size))
        policy = Prefetch(group_size, num_in_group, prefetch_step, [ALL_MODEL_PARAMS])
        assume(inventory.storages)
        stacks = find_stacks(inventory).values()
        if not any(group_rule(len(layers), group_size, num_in_group) for layers in stacks):
            with pytest.raises(SelectionError, match=f"group rule {group_size}/{num_in_group} selects none"):
                plan_for(inventory, policy)
            return
        try:
            plan = plan_for(inventory, policy)
        except SelectionError:  # the layers are there, but hold nothing of their own
            return
        check_plan(plan, inventory)
        allowed = {layers[index] for layers in stacks for index in group_rule(len(layers), group_size, num_in_group)}
        assert {unit.module_fqn for unit in plan.units} <= allowed
        assert plan.num_slots == min(prefetch_step, len(plan.units))

    def test_more_slots_than_units_warns(self) -> None:
        with pytest.warns(HeadraceWarning, match=r"prefetch_step = 9 .*3 slot\(s\) are used"):
            plan = build_plan(take_inventory(Stack(3)), all_layers(9))
        assert plan.num_slots == 3
        assert plan.moved_bytes == 0, "each unit has a slot to itself"

    def test_one_unit(self) -> None:
        plan = build_plan(take_inventory(Stack(4)), all_layers(1, group_size=4))
        assert [unit.module_fqn for unit in plan.units] == ["layers.3"]
        assert (plan.num_slots, plan.moved_bytes) == (1, 0)

    def test_no_units(self) -> None:
        with pytest.raises(SelectionError, match="group rule 9/1 selects none of the 4 layers"):
            build_plan(take_inventory(Stack(4)), all_layers(1, group_size=9))
        for model in (Stack(3, dim=8), nn.ReLU()):
            with pytest.raises(
                SelectionError, match="no parameter of this model has 64 KiB or more; name smaller ones"
            ):
                build_plan(take_inventory(model), Prefetch())

    def test_tiny_tensors_stay_unless_named(self) -> None:
        inventory = take_inventory(Stack(3, dim=128))
        plan = build_plan(inventory, Prefetch())
        assert {e.storage.split(".", 2)[2] for u in plan.units for e in u.entries} == {"linear.weight"}
        plan = build_plan(inventory, all_layers())
        assert {len(unit.entries) for unit in plan.units} == {4}

    def test_a_pattern_without_effect_warns(self) -> None:
        """Trap 15: names outside the layers that the group rule never reaches."""
        inventory = take_inventory(Stack(4))
        with pytest.warns(HeadraceWarning, match="pattern 'head' selects nothing in the layers"):
            build_plan(inventory, Prefetch(params=["linear", "head"]))
        with pytest.warns(HeadraceWarning, match=r"pattern 'layers\.0' selects nothing"):
            build_plan(inventory, Prefetch(2, 1, params=["layers.3", "layers.0"]))
        with pytest.raises(SelectionError):
            build_plan(inventory, Prefetch(params=["head"]))


class TestLayers:
    def layers(self, model: nn.Module) -> list[tuple[str, ...]]:
        return [tuple(layers) for layers in find_stacks(take_inventory(model)).values()]

    def test_numbered_children_outermost(self) -> None:
        assert self.layers(Stack(3)) == [("layers.0", "layers.1", "layers.2")]
        model = nn.ModuleDict({"encoder": Stack(2), "decoder": Stack(3)})
        assert self.layers(model) == [
            ("encoder.layers.0", "encoder.layers.1"),
            ("decoder.layers.0", "decoder.layers.1", "decoder.layers.2"),
        ]

    def test_any_module_has_layers(self) -> None:
        assert self.layers(nn.Linear(2, 2)) == [("",)]
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ModuleDict({"c": nn.Linear(2, 2), "d": nn.ReLU()})})
        assert self.layers(model) == [("a", "b.c")]

    def test_layers_are_never_nested(self) -> None:
        model = nn.Module()
        model.register_parameter("w", nn.Parameter(torch.empty(3)))
        model.a = holder(w=torch.empty(3))
        model.a.b = holder(w=torch.empty(3))
        assert self.layers(model) == [("a.b",)]

    def test_a_module_that_reads_its_childs_weight_is_one_layer(self) -> None:
        assert self.layers(nn.MultiheadAttention(8, 2)) == [("",)]
        model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "out": nn.Linear(8, 8)})
        assert self.layers(model) == [("attention", "out")]


class TestOtherPolicies:
    def test_uva_up_to_a_limit_in_model_order(self) -> None:
        inventory = take_inventory(Stack(3, dim=128))
        plan = build_plan(inventory, UVA("150KiB"))
        assert list(plan.uva) == ["layers.0.linear.weight", "layers.1.linear.weight"]
        check_plan(plan, inventory)
        assert plan.device_bytes == inventory.num_bytes - 2 * 64 * KIB
        assert list(build_plan(inventory, UVA(params=["head"])).uva) == ["head.weight", "head.bias"]

    def test_uva_experts_first(self) -> None:
        inventory = take_inventory(MoE(2))
        plan = build_plan(inventory, UVA("64KiB", params=[ALL_MODEL_PARAMS]))
        assert all("experts" in name for name in list(plan.uva)[:4])

    def test_a_limit_below_the_smallest(self) -> None:
        with pytest.raises(SelectionError, match=r"limit of 100 bytes offloads nothing: .*has \d+"):
            build_plan(take_inventory(Stack(3, dim=128)), UVA(100))

    @pytest.mark.parametrize("limit", [None, "1GiB"])
    def test_a_model_of_small_tensors_alone(self, limit: str | None) -> None:
        with pytest.raises(SelectionError, match="no parameter of this model has 64 KiB or more; name smaller ones"):
            build_plan(take_inventory(Stack(3, dim=8)), UVA(limit))

    @pytest.mark.parametrize("model", [MoE(), OddStack(), ScaledStack()], ids=lambda m: type(m).__name__)
    def test_odd_models(self, model: nn.Module) -> None:
        inventory = take_inventory(model)
        for policy in (all_layers(2), all_layers(1, group_size=2), UVA(params=["layers"]), Budget("48KiB", ["layers"])):
            check_plan(plan_for(inventory, policy), inventory)


class TestPredictions:
    @pytest.mark.parametrize("model", [Stack(5), MoE(3), OddStack(5), ScaledStack(5)], ids=lambda m: type(m).__name__)
    @pytest.mark.parametrize("slots", [1, 2, 3])
    def test_slots_have_the_predicted_size(self, model: nn.Module, slots: int) -> None:
        with headrace.offload(model.eval(), all_layers(slots)) as handle:
            plan = handle.plan
            memory = [handle._session.prefetcher.slot_memory(index) for index in range(slots)]
            assert [slot.untyped_storage().nbytes() for slot in memory] == list(plan.slot_bytes)
            assert len({slot.data_ptr() for slot in memory}) == slots
            names = take_inventory(model).by_name
            for unit in plan.units:
                start = memory[unit.slot].data_ptr()
                for entry in unit.entries:
                    assert {names[entry.storage].num_bytes} == {entry.num_bytes}
            live = dict(model.named_parameters())
            plain = [(u, e) for u in plan.units for e in u.entries if e.storage in live and ":" not in e.storage]
            for unit, entry in plain:
                start = memory[unit.slot].data_ptr()
                bound = handle._session._bound[entry.storage].tensors[0]  # rests, unless its module runs
                assert bound.tensor is live[entry.storage]
                assert bound.in_slot.data_ptr() == start + entry.offset, entry.storage

    def test_mechanism_of(self) -> None:
        plan = build_plan(take_inventory(MoE()), all_layers())
        assert plan.mechanism_of("embed.weight") == "resident"
        assert plan.mechanism_of("layers.0.mlp.gate.weight") == "prefetch"
        assert build_plan(take_inventory(MoE()), UVA(params=["experts"])).mechanism_of(
            "layers.0.mlp.experts.up_proj"
        ) == "uva"  # fmt: skip
        with pytest.raises(OptionError, match=r"'head\.weight': no storage of this plan"):
            plan.mechanism_of("head.weight")


class TestForeignPlans:
    def test_of_another_model(self) -> None:
        plan = build_plan(take_inventory(Stack(5)), all_layers())
        for other in (Stack(4), Stack(6), Stack(5, dim=16), MoE()):
            before = {name: t.data_ptr() for name, t in other.state_dict().items()}
            with pytest.raises(OptionError, match=r"for another model: \d+ of \d+ storages differ: .* bytes"):
                headrace.offload(other, plan)
            assert {name: t.data_ptr() for name, t in other.state_dict().items()} == before

    def test_made_on_meta_used_on_the_real_model(self) -> None:
        with torch.device("meta"):
            plan = build_plan(take_inventory(MoE()), all_layers())
        model = MoE().eval()
        with headrace.offload(model, plan) as handle:
            assert handle.plan is plan
            assert handle.stats().bytes_moved > 0


def test_report_shows_the_figures_of_the_plan() -> None:
    with torch.device("meta"):
        inventory = take_inventory(Stack(8, dim=4096))
    plan = build_plan(inventory, Budget("300MiB"))
    text = plan_text(plan, name="tiny/stack")
    assert "tiny/stack" in text
    for num_bytes in (plan.weight_bytes, plan.device_bytes, plan.moved_bytes, plan.resident_bytes):
        assert in_unit(num_bytes, size_unit(plan.weight_bytes)) in text
    assert f"{len(plan.units)} units" in text
    assert "layers.*.linear.weight" in text
