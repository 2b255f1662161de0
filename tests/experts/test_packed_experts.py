"""Experts in objects of triton_kernels: their bytes are a parameter's, and tiles find the rows of a cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import packed_kernels
from headrace.experts.packed import at_rows, hold_in_parameter, is_held, route_by_rows

NUM_EXPERTS = 6


class Rows:
    """Every expert has a row, in no order."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = torch.tensor(rows, dtype=torch.int32)
        self.asked: list[int] = []

    def admit(self, ids: torch.Tensor) -> torch.Tensor:
        is_expert = (ids >= 0) & (ids < NUM_EXPERTS)
        self.asked += ids[is_expert].tolist()
        return torch.where(is_expert, self.rows[torch.where(is_expert, ids, 0).long()], ids + 1000)


def tokens_of(data: Any, height: int) -> list[tuple[int, int, int]]:
    """Expert or row, count and first token of each tile, in their order, as a kernel finds them."""
    tiles = [tile for tile in data.block_pid_map[height].tolist() if tile != -1]
    return [(tile & 0xFFFF, int(data.hist[tile & 0xFFFF]), int(data.token_offs_raw[tile & 0xFFFF])) for tile in tiles]


@settings(max_examples=40, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(-1, NUM_EXPERTS - 1), min_size=2, max_size=2), min_size=1, max_size=9),
    rows=st.permutations(range(2 * NUM_EXPERTS)),
    heights=st.sampled_from([(16,), (2, 4), (1, 2, 8)]),
)
def test_tiles_keep_their_order_and_tokens(ids: list[list[int]], rows: list[int], heights: tuple[int, ...]) -> None:
    chosen = torch.tensor(ids)
    routing, *_ = packed_kernels.route(chosen, torch.ones(chosen.shape), NUM_EXPERTS, heights)
    before = copy.deepcopy(routing)
    cache = Rows(rows[:NUM_EXPERTS])
    routed, asked, found = route_by_rows(routing, cache, 2 * NUM_EXPERTS)  # type: ignore[arg-type]
    assert set(cache.asked) == {each for each in chosen.flatten().tolist() if each >= 0}
    assert asked.shape == found.shape
    for height in heights:
        expected = [(rows[expert], *others) for expert, *others in tokens_of(before.expt_data, height)]
        assert tokens_of(routed.expt_data, height) == expected
        places = before.expt_data.block_pid_map[height] >> 16
        assert torch.equal(routed.expt_data.block_pid_map[height] >> 16, places)
        # The same alignment is the same kernel of Triton's.
        assert routed.expt_data.block_pid_map[height].data_ptr() % 16 == 0
    assert routed.expt_data.token_offs_raw.data_ptr() % 16 == 0
    assert (routed.n_expts_tot, routed.n_expts_act) == (NUM_EXPERTS, 2)
    for height in heights:  # what came in is as it was
        assert torch.equal(routing.expt_data.block_pid_map[height], before.expt_data.block_pid_map[height])
    assert routing.expt_data.hist.tolist() == before.expt_data.hist.tolist()


def test_a_prompt_has_more_tiles_than_one_program_takes() -> None:
    ids = torch.randint(0, NUM_EXPERTS, (1200, 2))
    routing, *_ = packed_kernels.route(ids, torch.ones(ids.shape), NUM_EXPERTS)
    expected = [(11 - expert, *others) for expert, *others in tokens_of(routing.expt_data, 2)]
    routed, *_ = route_by_rows(routing, Rows([11 - expert for expert in range(NUM_EXPERTS)]), 12)  # type: ignore[arg-type]
    assert len(expected) > 1024
    assert tokens_of(routed.expt_data, 2) == expected


def test_an_object_follows_its_parameter() -> None:
    module, values = nn.Module(), torch.randn(NUM_EXPERTS, 8, 4)
    tensor = packed_kernels.swizzled(values)
    assert not is_held(tensor)
    assert hold_in_parameter(module, "values", tensor, NUM_EXPERTS)
    assert is_held(tensor)
    assert not hold_in_parameter(module, "again", tensor, NUM_EXPERTS)
    assert module.values.is_contiguous()
    assert torch.equal(tensor.storage.unswizzled(), values.mT)
    module.values.data = module.values.data * 2
    assert torch.equal(tensor.storage.unswizzled(), values.mT * 2)
    assert tensor.storage.layout == "mirrored"
    tensor.storage.data = tensor.storage.data.view(torch.float32)  # as matmul_ogs does
    twin = copy.deepcopy(module)
    made = at_rows(tensor, {"values": torch.cat([module.values.data, module.values.data])})
    assert made.shape == made.shape_max == [2 * NUM_EXPERTS, 4, 8]
    assert torch.equal(made.storage.unswizzled()[NUM_EXPERTS:], values.mT * 2)
    assert tensor.shape == [NUM_EXPERTS, 4, 8]
    assert torch.equal(twin.values, module.values)


@pytest.mark.parametrize("data", [
    torch.zeros(1, NUM_EXPERTS, 4, 2, 8), torch.zeros(1, NUM_EXPERTS * 4, 8).mT, torch.zeros(8, 4, NUM_EXPERTS).mT.mT,
    torch.zeros(NUM_EXPERTS, 8, 4)[..., :2].mT,
], ids=["Blackwell's scales", "no experts", "experts last", "gaps"])  # fmt: skip
def test_a_layout_that_mixes_experts_is_not_held(data: torch.Tensor) -> None:
    module = nn.Module()
    tensor = packed_kernels.Tensor(packed_kernels.Storage(data), list(data.shape))
    assert not hold_in_parameter(module, "values", tensor, NUM_EXPERTS)
    assert not list(module.parameters())
    assert not hold_in_parameter(module, "values", torch.zeros(NUM_EXPERTS, 2, 2), NUM_EXPERTS)
