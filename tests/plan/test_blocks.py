"""The promise: a model of a few large blocks runs in a tenth of its weights, and in the order that it really has."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import headrace
import unets
from headrace.config import Budget, Workload
from headrace.errors import BudgetError
from headrace.model.inventory import Inventory, take_inventory
from headrace.model.layers import MAX_BLOCK_SHARE, find_layers, find_stacks
from headrace.plan.build import Planner
from headrace.plan.nominal_rates import NOMINAL_GPU
from headrace.testing import assert_same_bits
from models import Reader
from plans import check_plan, holder

MIB = 2**20


def smallest(inventory: Inventory) -> int:
    with pytest.raises(BudgetError) as error:
        Planner(inventory, NOMINAL_GPU).plan(Budget(1))
    assert error.value.minimum_bytes is not None
    return error.value.minimum_bytes


@pytest.fixture(scope="module")
def sdxl() -> Inventory:
    with torch.device("meta"):
        return take_inventory(unets.UNet(unets.SDXL).bfloat16())


class TestSDXL:
    @pytest.mark.slow
    @pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="diffusers is not installed")
    def test_the_model_of_these_tests_is_that_of_diffusers(self) -> None:
        from diffusers import UNet2DConditionModel

        with torch.device("meta"):
            mine, theirs = unets.UNet(unets.SDXL), UNet2DConditionModel(**unets.SDXL_CONFIG)
        shapes = [[(name, p.shape) for name, p in model.named_parameters()] for model in (mine, theirs)]
        assert shapes[0] == shapes[1]

    @pytest.mark.slow
    def test_a_fortieth_of_the_weights_is_enough(self, sdxl: Inventory) -> None:
        least = smallest(sdxl)
        assert 0.02 < least / sdxl.num_bytes < 0.025
        # Two copies of the largest tensor, and what never leaves, are not much less.
        largest = max(s.num_bytes for s in sdxl.storages)
        plan = Planner(sdxl, NOMINAL_GPU).plan(Budget(least))
        check_plan(plan, sdxl)
        assert least == plan.device_bytes < 1.05 * (2 * largest + plan.resident_bytes)

    @pytest.mark.slow
    def test_in_a_tenth_the_link_is_always_busy(self, sdxl: Inventory) -> None:
        planner = Planner(sdxl, NOMINAL_GPU)
        plan = planner.plan(Budget(sdxl.num_bytes // 10, workload=Workload([2048]), codec="none"))
        forecast = planner.forecast(plan, 2048)
        assert plan.num_slots > 1
        assert forecast.bound == "link"
        assert forecast.step_s < 1.05 * forecast.floor_s

    @pytest.mark.slow
    def test_more_memory_is_never_slower(self, sdxl: Inventory) -> None:
        planner, steps = Planner(sdxl, NOMINAL_GPU), []
        for percent in (3, 5, 10, 25, 40, 47, 60, 80, 95):
            budget = Budget(sdxl.num_bytes * percent // 100, workload=Workload([2048]))
            steps.append(planner.forecast(planner.plan(budget), 2048).step_s)
        assert steps == sorted(steps, reverse=True)

    def test_only_large_blocks_are_divided(self, sdxl: Inventory) -> None:
        layers = find_layers(sdxl)
        blocks = [block for stack in find_stacks(sdxl).values() for block in stack]
        assert {"down_blocks.0", "down_blocks.1", "up_blocks.2"} <= set(layers), "each less than a thirtieth"
        assert "up_blocks.0" in blocks
        assert "up_blocks.0" not in layers
        assert "up_blocks.0.attentions.2.transformer_blocks.9" in layers
        for layer in layers:
            size = sum(s.num_bytes for s in sdxl.under(layer))
            assert size <= MAX_BLOCK_SHARE * sdxl.num_bytes


def a_stack(*layers: nn.Module) -> Inventory:
    model = nn.Module()
    model.layers = nn.ModuleList(layers)
    return take_inventory(model)


def mib(count: float) -> nn.Module:
    return holder(weight=torch.empty(int(count * MIB), dtype=torch.int8, device="meta"))


def parent(**children: nn.Module) -> nn.Module:
    module = Reader()
    for name, child in children.items():
        module.add_module(name, child)
    return module


class TestWhatStaysWhole:
    def test_layers_that_are_alike(self) -> None:
        """However few, and however large: as in every language model."""
        inventory = a_stack(*(parent(a=mib(8), b=mib(8)) for _ in range(2)))
        assert find_layers(inventory) == ["layers.0", "layers.1"]

    def test_layers_of_which_none_is_a_tenth(self) -> None:
        """Layers with experts between dense ones, say."""
        inventory = a_stack(*(parent(a=mib(size), b=mib(size)) for size in (1, 8) * 12))
        assert len(find_layers(inventory)) == 24

    @pytest.mark.parametrize("divided", [True, False])
    def test_a_block_with_a_tensor_of_its_own(self, divided: bool) -> None:
        """In none of its children's units, the tensor could not leave the device."""
        block = parent(a=mib(8), b=mib(8))
        if not divided:
            block.weight = nn.Parameter(torch.empty(9, device="meta"))
        inventory = a_stack(parent(a=mib(1)), block)
        assert find_layers(inventory) == ["layers.0", *(["layers.1.a", "layers.1.b"] if divided else ["layers.1"])]

    def test_a_block_whose_children_share_a_module(self) -> None:
        shared = mib(8)
        inventory = a_stack(parent(a=mib(1)), parent(a=parent(x=shared), b=parent(x=shared, y=mib(8))))
        assert find_layers(inventory) == ["layers.0", "layers.1"]

    def test_experts_of_which_a_forward_runs_a_few(self) -> None:
        with torch.device("meta"):
            experts = nn.ModuleList(parent(up=nn.Linear(1024, 2048), down=nn.Linear(2048, 1024)) for _ in range(8))
            mlp = parent(gate=nn.Linear(1024, 8), experts=experts)
            inventory = a_stack(parent(a=nn.Linear(1024, 1024)), parent(attn=nn.Linear(1024, 4096), mlp=mlp))
        assert find_layers(inventory) == ["layers.0", "layers.1.attn", "layers.1.mlp"]

    def test_attention_that_reads_its_children(self) -> None:
        with torch.device("meta"):
            block = parent(attn=nn.MultiheadAttention(1024, 8), up=nn.Linear(1024, 4096))
            inventory = a_stack(parent(a=nn.Linear(8, 8)), block)
        assert find_layers(inventory) == ["layers.0", "layers.1.attn", "layers.1.up"]


# -- running -----------------------------------------------------------------------------------------------------------


def moved_and_missed(handle: Any) -> tuple[int, int]:
    stats = handle.stats()
    return stats.bytes_moved, stats.misses


@torch.no_grad()
def assert_runs(model: nn.Module, inputs: Sequence[torch.Tensor], budget: int) -> None:
    """The same bits in ``budget`` bytes; after the first forward no miss, and no byte copied twice."""
    expected = model(*inputs)
    with headrace.offload(model, budget) as handle:
        assert handle.plan.device_bytes <= budget
        assert_same_bits(model(*inputs), expected)
        for _ in range(2):
            moved, missed = moved_and_missed(handle)
            assert_same_bits(model(*inputs), expected)
            now = moved_and_missed(handle)
            assert now == (moved + handle.plan.moved_bytes, missed)
            assert handle.plan.moved_bytes > 0


@pytest.mark.slow
def test_a_small_unet_of_that_structure_runs_in_its_smallest_budget() -> None:
    torch.manual_seed(0)
    model = unets.UNet(unets.TINY).eval()
    least = smallest(take_inventory(model))
    assert least < 0.06 * take_inventory(model).num_bytes, "many of its tensors are too tiny to be moved"
    assert_runs(model, model.example(), least)


class Nested(nn.Module):
    """Runs its children, and matrices of its own, in an order that is not that of their names."""

    def __init__(self, children: Sequence[nn.Module], own: int, order: Sequence[int]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.own = nn.ParameterList(torch.randn(160, 160) / 13 for _ in range(own))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.own:
            x = torch.tanh(x @ weight)
        for index in self.order:
            x = self.parts[index](x)
        return x


@st.composite
def nested(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        width = draw(st.sampled_from([160, 320, 640]))
        return nn.Sequential(nn.Linear(160, width), nn.Tanh(), nn.Linear(width, 160))
    children = draw(st.lists(nested(depth - 1), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(children))))
    return Nested(children, draw(st.sampled_from([0, 0, 1])), order)


@pytest.mark.slow
@given(st.lists(nested(), min_size=2, max_size=4))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_nested_modules_run_in_their_smallest_budget(blocks: list[nn.Module]) -> None:
    model = Nested(blocks, 0, range(len(blocks))[::-1]).eval()
    assert_runs(model, [torch.randn(2, 160)], smallest(take_inventory(model)))
