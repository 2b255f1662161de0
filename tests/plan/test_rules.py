"""The promise: offload rules do what they say, the first match counts, and rules that cannot be obeyed are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import headrace
from checks import require_forwards
from headrace.config import Budget, Mode, Rule, Rules
from headrace.errors import HeadraceWarning, OptionError, OptionTypeError, RuleError, SelectionError
from headrace.flags import parse_rules
from headrace.model.inventory import Inventory, take_inventory
from headrace.model.patterns import matching
from headrace.plan.build import build_plan
from headrace.plan.units import resolve_rules
from headrace.testing import assert_moved, assert_same_bits
from models import MoE, ReaderDict, Stack, rows, save

INVENTORY = take_inventory(MoE(3))
PATTERNS = [
    "@experts", "shared_expert", "layers.0", "layers.2", "*.mlp.*", r"re:.*\.gate\..*", "embed", "ALL_MODEL_PARAMS",
]  # fmt: skip


def refusal(rules: list[Rule], inventory: Inventory = INVENTORY) -> str:
    with pytest.raises(RuleError) as caught:
        resolve_rules(inventory, rules)
    return str(caught.value)


class TestFirstMatch:
    @pytest.mark.slow
    @given(st.lists(st.tuples(st.sampled_from(PATTERNS), st.sampled_from(["resident", "uva"])), max_size=5))
    def test_any_rules(self, rules: list[Rule]) -> None:
        """Every tensor has the mechanism of the first rule that matches it; refused where a rule has none left."""
        expected = {}
        for storage in INVENTORY.storages:
            for pattern, mechanism in rules:
                if storage.name in matching(INVENTORY, pattern):
                    expected[storage.name] = mechanism
                    break
        claims = [matching(INVENTORY, pattern) for pattern, _ in rules]
        dead = [mine <= frozenset().union(*claims[:index]) for index, mine in enumerate(claims)]
        if any(dead):
            assert "can never apply" in refusal(rules)
        else:
            assert resolve_rules(INVENTORY, rules) == expected

    def test_narrow_before_wide(self) -> None:
        forced = resolve_rules(INVENTORY, [("layers.0", "resident"), ("experts", "uva")])
        assert forced["layers.0.mlp.experts.up_proj"] == "resident"
        assert forced["layers.1.mlp.experts.up_proj"] == "uva"
        assert "layers.1.mlp.gate.weight" not in forced

    def test_a_tie_goes_by_any_of_its_names(self) -> None:
        assert resolve_rules(INVENTORY, [("head", "uva")]) == {"embed.weight": "uva"}
        assert (
            resolve_rules(INVENTORY, [("@lm_head", "uva"), ("ALL_MODEL_PARAMS", "prefetch")])["embed.weight"] == "uva"
        )

    def test_no_rules(self) -> None:
        assert resolve_rules(INVENTORY, []) == {}


class TestRefusals:
    def test_nothing_matched(self) -> None:
        with pytest.raises(SelectionError, match="'expert' matches none"):
            resolve_rules(INVENTORY, [("experts", "uva"), ("expert", "prefetch")])

    def test_one_pattern_two_mechanisms(self) -> None:
        with pytest.raises(RuleError, match=r"^rules 'experts=uva' and 'experts=prefetch' contradict"):
            Rules([("experts", "uva"), ("gate", "resident"), ("experts", "prefetch")])

    def test_a_rule_behind_a_wider_one(self) -> None:
        message = refusal([("mlp", "prefetch"), ("experts", "uva")])
        assert (
            "rule 'experts=uva' can never apply: all that it matches is matched by 'mlp=prefetch' before it" in message
        )
        assert "--offload-rule" in message

    def test_a_rule_behind_several(self) -> None:
        message = refusal([("up_proj", "prefetch"), ("down_proj", "resident"), ("embed", "uva"), ("experts", "uva")])
        assert "matched by 'up_proj=prefetch' and 'down_proj=resident' before it" in message

    def test_the_same_rule_twice(self) -> None:
        assert "can never apply" in refusal([("experts", "uva"), ("experts", "uva")])

    def test_what_no_unit_can_hold(self) -> None:
        """The tied table is read by two modules, so a slot for it could be overwritten between them."""
        message = r"rule 'head=prefetch': 1 of the 1 tensors .*\(embed\.weight\).*several modules"
        with pytest.raises(RuleError, match=message):
            resolve_rules(INVENTORY, [("head", "prefetch")])
        with pytest.warns(HeadraceWarning, match=r"'ALL_MODEL_PARAMS=prefetch': 1 of the .*stay resident"):
            forced = resolve_rules(INVENTORY, [("ALL_MODEL_PARAMS", "prefetch")])
        assert {name for name, mechanism in forced.items() if mechanism == "resident"} == {"embed.weight"}

    def test_what_the_files_do_not_hold(self) -> None:
        fixed = ["layers.0.mlp.experts.up_proj"]
        for mechanism in ("prefetch", "uva"):
            with pytest.warns(HeadraceWarning, match=r"1 of the 6 tensors .*cannot be streamed from the files.*cpu"):
                forced = resolve_rules(INVENTORY, [("experts", mechanism)], fixed)
            assert forced[fixed[0]] == "resident"
        assert resolve_rules(INVENTORY, [("experts", "resident")], fixed)[fixed[0]] == "resident"
        with pytest.raises(RuleError, match=r"1 of the 1 tensors"):
            resolve_rules(INVENTORY, [("layers.0.mlp.experts.up_proj", "uva")], fixed)

    def test_everything_resident(self) -> None:
        with pytest.raises(RuleError, match=r"the 2 rule\(s\) keep everything resident.*--offload-rule experts=uva"):
            build_plan(INVENTORY, Rules([("experts", "resident"), ("gate", "resident")]))


class TestForm:
    @pytest.mark.parametrize(
        ("text", "rule"),
        [
            ("experts=uva", ("experts", "uva")),
            ("@attention=prefetch", ("@attention", "prefetch")),
            (r"re:.*(?=\.weight).*=resident", (r"re:.*(?=\.weight).*", "resident")),
            ("a=b=uva", ("a=b", "uva")),
        ],
    )
    def test_right(self, text: str, rule: Rule) -> None:
        assert parse_rules("--offload-rule", [text]) == (rule,)

    @pytest.mark.parametrize("text", ["experts", "=uva", "experts=", "experts=cpu", "uva=experts", "", "experts=UVA"])
    def test_wrong_shows_the_form(self, text: str) -> None:
        with pytest.raises(OptionError, match="write PATTERN=MECHANISM with one of resident, prefetch, uva") as caught:
            parse_rules("--offload-rule", [text])
        assert repr(text) in str(caught.value)

    @pytest.mark.parametrize("rules", ["experts=uva", 3, [("experts",)], ["experts=uva"], [("experts", 3)]])
    def test_wrong_types(self, rules: object) -> None:
        with pytest.raises(OptionTypeError, match="write rules like"):
            Rules(rules)  # type: ignore[arg-type]

    def test_wrong_values(self) -> None:
        with pytest.raises(OptionError, match="expected at least one"):
            Rules([])
        with pytest.raises(OptionError, match="expected one of resident, prefetch, uva"):
            Rules([("experts", "gpu")])  # type: ignore[list-item]
        with pytest.raises(OptionError, match="prefetch_step = 0"):
            Rules([("experts", "uva")], prefetch_step=0)


class TestPlans:
    def test_one_unit_per_layer_and_per_module_outside(self) -> None:
        model = nn.Module()
        model.tower = nn.Linear(8, 8)
        model.layers = nn.ModuleList(ReaderDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}) for _ in range(3))
        model.head = nn.Linear(8, 8)
        plan = build_plan(
            take_inventory(model), Rules([("bias", "resident"), ("b", "uva"), ("ALL_MODEL_PARAMS", "prefetch")])
        )
        assert [unit.module_fqn for unit in plan.units] == ["tower", "layers.0", "layers.1", "layers.2", "head"]
        assert [[entry.storage for entry in unit.entries] for unit in plan.units][1] == ["layers.0.a.weight"]
        assert list(plan.uva) == [f"layers.{index}.b.weight" for index in range(3)]
        assert set(plan.resident) == {s.name for s in take_inventory(model).storages if s.name.endswith("bias")}
        assert plan.num_slots == 2

    def test_what_no_rule_matches_stays(self) -> None:
        plan = build_plan(INVENTORY, Rules([("@experts", "uva")]))
        assert (plan.units, plan.num_slots) == ((), 0)
        assert plan.resident.keys() | plan.uva.keys() == {s.name for s in INVENTORY.storages}
        assert all("experts" in name for name in plan.uva)

    @pytest.mark.parametrize("mode", ["cpu", "disk", "meta"])
    def test_step_and_mode(self, mode: Mode) -> None:
        plan = build_plan(INVENTORY, Rules([("layers", "prefetch")], 3, mode))
        assert (plan.mode, plan.num_slots, len(plan.units)) == (mode, 3, 3)
        with pytest.warns(HeadraceWarning, match="prefetch_step = 9"):
            build_plan(INVENTORY, Rules([("layers", "prefetch")], 9, mode))

    def test_the_files_count_in_mode_disk_alone(self) -> None:
        fixed = ["layers.0.mlp.experts.up_proj"]
        with pytest.warns(HeadraceWarning, match="cannot be streamed"):
            plan = build_plan(INVENTORY, Rules([("experts", "uva")], mode="disk"), unstreamable=fixed)
        assert fixed[0] in plan.resident
        assert fixed[0] in build_plan(INVENTORY, Rules([("experts", "uva")]), unstreamable=fixed).uva

    def test_with_a_budget(self) -> None:
        """A rule settles what the planner would have chosen otherwise."""
        inventory = take_inventory(Stack(8, dim=256))
        budget = inventory.num_bytes // 2
        free = build_plan(inventory, Budget(budget))
        first = free.units[0].entries[0].storage
        plan = build_plan(inventory, Budget(budget, rules=[(first, "resident"), ("layers.7.linear.weight", "uva")]))
        assert plan.device_bytes <= budget
        assert plan.mechanism_of(first) == "resident"
        assert plan.mechanism_of("layers.7.linear.weight") == "uva"
        with pytest.raises(RuleError, match="contradict"):
            build_plan(inventory, Budget(budget, rules=[("linear", "uva"), ("linear", "prefetch")]))


RULES: list[list[Rule]] = [
    [("@experts", "uva"), ("layers", "prefetch")],
    [("layers.0", "resident"), ("@experts", "prefetch"), ("@embeddings", "uva")],
    [("@shared_experts", "prefetch")],
]


def check_same_bits(model: nn.Module, rules: Rules, checkpoint: Path | None = None) -> None:
    with torch.no_grad():
        expected = model(torch.arange(6))
        with headrace.offload(model, rules, checkpoint=checkpoint) as handle:
            for _ in range(3):
                assert_same_bits(model(torch.arange(6)), expected)
            assert_moved(handle, 3)
            assert handle.plan.moved_bytes > 0


class TestRuns:
    @pytest.mark.parametrize("rules", RULES, ids=lambda rules: " ".join("=".join(rule) for rule in rules))
    def test_same_bits(self, rules: list[Rule]) -> None:
        check_same_bits(MoE(4).eval(), Rules(rules))

    def test_same_bits_from_files(self, tmp_path: Path) -> None:
        model = MoE(4).eval()
        model.head = nn.Linear(model.head.in_features, model.head.out_features)
        rules = Rules([("@experts", "prefetch"), ("@embeddings", "uva")], mode="disk")
        check_same_bits(model, rules, save(model, tmp_path))

    def test_offload_takes_rules(self) -> None:
        model = Stack(4, dim=32).eval()
        with torch.no_grad():
            expected = model(rows())
            with headrace.offload(model, Rules([("linear", "prefetch")])) as handle:
                require_forwards(handle, rows(), expected, 1)
        with pytest.raises(OptionTypeError, match=r"headrace\.Rules"):
            headrace.offload(model, object())  # type: ignore[arg-type]
