"""The promise: a name pattern picks what it says, and one that picks nothing is an error that helps."""

from __future__ import annotations

import pytest
from torch import nn

from headrace.config import ALL_MODEL_PARAMS
from headrace.errors import SelectionError
from headrace.model.inventory import Inventory, take_inventory
from headrace.model.patterns import compile_pattern, select
from models import MoE, OddStack, ScaledStack, Stack

MOE = take_inventory(MoE(2))
DENSE = take_inventory(Stack(2))


def names(pattern: str, inventory: Inventory = MOE) -> list[str]:
    return [storage.name for storage in select(inventory, [pattern])]


def expert_names(*layers: int) -> list[str]:
    return [f"layers.{i}.mlp.experts.{w}" for i in layers for w in ("up_proj", "down_proj")]


class TestSegments:
    def test_whole_segments_only(self) -> None:
        assert names("experts") == expert_names(0, 1)
        with pytest.raises(SelectionError, match="'expert' matches none"):
            select(MOE, ["expert"])

    def test_neighbouring_segments(self) -> None:
        assert names("mlp.experts") == expert_names(0, 1)
        assert names("layers.1.mlp.experts") == expert_names(1)
        with pytest.raises(SelectionError):
            select(MOE, ["layers.experts"])

    def test_a_number_is_a_segment(self) -> None:
        assert all(name.startswith("layers.1.") for name in names("1"))
        assert compile_pattern("1")("layers.1.w")
        assert not compile_pattern("1")("layers.11.w")

    def test_the_whole_name(self) -> None:
        assert names("embed.weight") == ["embed.weight"]

    def test_any_name_of_a_tie(self) -> None:
        assert names("head") == ["embed.weight"]

    def test_inner_tensors_of_a_subclass(self) -> None:
        scaled = take_inventory(ScaledStack(1))
        assert names("weight", scaled) == ["layers.0.weight:data_int8", "layers.0.weight:scale"]
        assert names("scale", scaled) == ["layers.0.weight:scale"]

    def test_a_dot_is_a_dot(self) -> None:
        with pytest.raises(SelectionError):
            select(MOE, ["mlp_experts"])


class TestGlobs:
    def test_matches_the_whole_name(self) -> None:
        assert names("*.experts.up_proj") == ["layers.0.mlp.experts.up_proj", "layers.1.mlp.experts.up_proj"]
        with pytest.raises(SelectionError):
            select(MOE, ["experts.*"])

    def test_question_mark_and_set(self) -> None:
        assert names("layers.?.norm.weight", DENSE) == ["layers.0.norm.weight", "layers.1.norm.weight"]
        assert names("layers.[1-9].norm.weight", DENSE) == ["layers.1.norm.weight"]


class TestRegularExpressions:
    def test_matches_the_whole_name(self) -> None:
        assert names(r"re:.*\.experts\.(up|down)_proj") == expert_names(0, 1)
        with pytest.raises(SelectionError):
            select(MOE, ["re:experts"])

    def test_a_bad_one_says_what_is_bad(self) -> None:
        with pytest.raises(SelectionError, match=r"'re:\(' is not a regular expression: missing \)"):
            select(MOE, ["re:("])


class TestGroups:
    def test_segments_come_first(self) -> None:
        """In vLLM's meaning, which engines' users know: `mlp` is all below a module of that name."""
        assert names("mlp") == [s.name for s in MOE.storages if ".mlp." in s.name]
        assert names("head") == ["embed.weight"]

    def test_a_word_that_is_no_segment(self) -> None:
        assert names("embeddings") == ["embed.weight"]
        assert names("lm_head") == ["embed.weight"]
        assert names("shared_experts") == names("shared_expert")
        assert names("mlp", DENSE) == names("linear", DENSE)

    def test_forced(self) -> None:
        assert names("@experts") == expert_names(0, 1)
        model = nn.Module()
        model.layers = nn.ModuleList(nn.ModuleDict({"mlp": nn.Linear(4, 4), "ffn": nn.Linear(4, 4)}) for _ in range(2))
        inventory = take_inventory(model)
        assert len(names("mlp", inventory)) == 4
        assert len(names("@mlp", inventory)) == 8

    def test_among_other_patterns(self) -> None:
        found = [s.name for s in select(MOE, ["@embeddings", "*.0.mlp.experts.*"])]
        assert found == ["embed.weight", *expert_names(0)]

    def test_no_such_group(self) -> None:
        with pytest.raises(SelectionError, match=r"'@atention': expected one of the groups @attention, @mlp, @experts"):
            select(MOE, ["@atention"])

    def test_empty_in_this_model(self) -> None:
        groups = "the groups @experts, @shared_experts, @embeddings, @lm_head"
        with pytest.raises(SelectionError, match=f"'@vision': this group is empty in this model, which has {groups};"):
            select(MOE, ["@vision"])
        with pytest.raises(SelectionError, match=f"'vision' matches none .* has {groups}; the group @vision is empty"):
            select(MOE, ["vision"])

    def test_a_misspelt_word(self) -> None:
        with pytest.raises(SelectionError, match=r"the nearest are .*embeddings"):
            select(MOE, ["embedings"])


class TestEverything:
    def test_dense_and_moe(self) -> None:
        assert [s.name for s in MOE.storages] == names(ALL_MODEL_PARAMS)
        assert [s.name for s in DENSE.storages] == names(ALL_MODEL_PARAMS, DENSE)

    def test_several_patterns_in_model_order_without_repeats(self) -> None:
        found = [s.name for s in select(DENSE, ["head", "norm", "layers.0"])]
        assert found == [
            s.name for s in DENSE.storages if "head" in s.name or "norm" in s.name or "layers.0." in s.name
        ]

    def test_buffers_can_be_named(self) -> None:
        odd = take_inventory(OddStack(1))
        assert names("mask", odd) == ["layers.0.mask"]


class TestNothing:
    def test_empty_pattern(self) -> None:
        with pytest.raises(SelectionError, match="an empty name pattern"):
            select(MOE, [""])

    def test_one_of_several(self) -> None:
        with pytest.raises(SelectionError, match="'attention' matches none of the 14 tensor names"):
            select(MOE, ["experts", "attention"])

    @pytest.mark.parametrize(
        ("misspelt", "near"),
        [
            ("experst", "experts"),
            ("share_expert", "shared_expert"),
            ("layers.0.mlp.expert.up_proj", expert_names(0)[0]),
        ],
    )
    def test_nearest_names(self, misspelt: str, near: str) -> None:
        with pytest.raises(SelectionError, match=f"the nearest are .*{near}") as caught:
            select(MOE, [misspelt])
        assert "whole dotted segments" in str(caught.value)

    def test_nothing_near_shows_what_there_is(self) -> None:
        with pytest.raises(SelectionError, match=r"the nearest are embed\.weight, head\.weight, layers\.0\.mlp\.gate"):
            select(MOE, ["zzzzzz"])

    def test_no_tensors_at_all(self) -> None:
        with pytest.raises(SelectionError, match="none of the 0 tensor names"):
            select(take_inventory(nn.ReLU()), ["mlp"])
