"""The promise: every unit is waited for before anything reads it, whatever the tree of modules looks like.

So its module has a forward that runs, and every path to its tensors leads through this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.config import ALL_MODEL_PARAMS, UVA, Budget, Prefetch, Rules
from headrace.errors import CheckpointError, HeadraceWarning, OptionError, RuleError, SelectionError
from headrace.model.inventory import take_inventory
from headrace.model.layers import find_stacks
from headrace.plan.build import build_plan
from headrace.plan.plan import Plan, UnitSpec, assemble
from headrace.plan.units import plan_group_rule
from headrace.testing import assert_same_bits
from models import DIM, Reader, ReaderDict, all_layers, rows, save
from plans import plan_for

pytestmark = pytest.mark.usefixtures("no_grad")


def linear() -> nn.Linear:
    return nn.Linear(DIM, DIM)


class Block(nn.Module):
    """A layer with an inner module, which may be another layer's too."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.outer = linear()
        self.inner = inner or linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(torch.tanh(self.outer(x))))


class Model(nn.Module):
    """Runs ``step`` with itself and the input; ``parts`` are its children."""

    def __init__(self, step: Callable[[Any, torch.Tensor], torch.Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.step = step
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(self, x)


def in_pairs(model: Any, x: torch.Tensor) -> torch.Tensor:
    for attention, feed_forward in model.layers:
        x = x + feed_forward(torch.tanh(attention(x)))
    return x


def by_key(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = x + layer["ff"](torch.tanh(layer["attn"](x)))
    return x


def one_by_one(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = torch.tanh(layer(x))
    return x


def by_weight(model: Any, x: torch.Tensor) -> torch.Tensor:
    for weight in model.weights:
        x = torch.tanh(x @ weight)
    return one_by_one(model, x)


def across_lists(model: Any, x: torch.Tensor) -> torch.Tensor:
    for attention, norm1, norm2 in zip(model.attentions, model.layer_norm1, model.layer_norm2, strict=True):
        x = norm2(x + attention(norm1(x)))
    return x


class Coder(nn.Module):
    """A namespace with methods and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(), linear()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x))

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(x))


def weights(count: int) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.randn(DIM, DIM) / 4) for _ in range(count))


def list_of(make: Callable[[], nn.Module], count: int = 4) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(count))


def coders(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = x + layer.decode(layer.encode(x))
    return x


def sharing() -> nn.Sequential:
    shared = linear()
    return nn.Sequential(Block(shared), Block(), Block(shared), Block())


def repeated() -> nn.Module:
    block = Block()
    return Model(one_by_one, layers=nn.ModuleList([block] * 4))


def alternating() -> nn.Module:
    one, other = Block(), Block()
    return Model(one_by_one, layers=nn.ModuleList([one, other] * 3))


def two_lists() -> nn.Module:
    """A layer of the first list is a layer of the second."""
    first = list_of(Block, 3)
    return Model(
        lambda m, x: one_by_one(m, x) + sum(layer(x) for layer in m.others),
        layers=first,
        others=nn.ModuleList([first[1], Block(), Block()]),
    )


def inside_of_another() -> nn.Module:
    """Layers of one list are parts of the layers of another."""
    parts = list_of(linear, 4)
    wrapped = nn.ModuleList(Block(part) for part in parts)
    return Model(lambda m, x: one_by_one(m, x) + sum(part(x) for part in m.parts), parts=parts, layers=wrapped)


def tied_inside() -> nn.Module:
    down, up = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))
    up.weight = down.weight
    encoder = Model(lambda m, x: m.up(torch.tanh(m.down(x))), down=down, up=up)
    return Model(lambda m, x: m.head(m.encoder(x)), encoder=encoder, head=linear())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "list of lists": lambda: Model(in_pairs, layers=list_of(lambda: nn.ModuleList([linear(), linear()]))),
    "list of dicts": lambda: Model(by_key, layers=list_of(lambda: nn.ModuleDict({"attn": linear(), "ff": linear()}))),
    "list of coders": lambda: Model(coders, layers=list_of(Coder)),
    "parameter list": lambda: Model(by_weight, weights=weights(3), layers=list_of(Block)),
    "lists side by side": lambda: Model(
        across_lists,
        attentions=list_of(linear),
        layer_norm1=list_of(lambda: nn.LayerNorm(DIM)),
        layer_norm2=list_of(lambda: nn.LayerNorm(DIM)),
    ),
    "shared inside layers": sharing,
    "repeated layer": repeated,
    "alternating layers": alternating,
    "layer of two lists": two_lists,
    "layer inside a layer": inside_of_another,
    "tied inside": tied_inside,
}
POLICIES = {
    "prefetch": Prefetch(params=[ALL_MODEL_PARAMS], prefetch_step=1),
    "two slots": Prefetch(params=[ALL_MODEL_PARAMS], prefetch_step=2),
    "rules": Rules([(ALL_MODEL_PARAMS, "prefetch")], prefetch_step=1),
    "uva": UVA(params=[ALL_MODEL_PARAMS]),
}


@pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("build", MODELS)
def test_the_same_bits(build: str, policy: str) -> None:
    torch.manual_seed(0)
    model = MODELS[build]().eval()
    expected = model(rows())
    with headrace.offload(model, POLICIES[policy]) as handle:
        for _ in range(3):
            assert_same_bits(model(rows()), expected)
        assert handle.plan.offloaded_bytes > 0
    assert_same_bits(model(rows()), expected)


@pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("build", MODELS)
def test_the_same_bits_within_a_budget(build: str, share: float) -> None:
    torch.manual_seed(0)
    model = MODELS[build]().eval()
    expected = model(rows())
    total = take_inventory(model).num_bytes
    try:
        handle = headrace.offload(model, Budget(int(total * share), [ALL_MODEL_PARAMS], mode="cpu"))
    except headrace.errors.BudgetError as error:
        handle = headrace.offload(model, Budget(error.minimum_bytes, [ALL_MODEL_PARAMS], mode="cpu"))
    for _ in range(2):
        assert_same_bits(model(rows()), expected)
    handle.remove()


def fqns(model: nn.Module, policy: Any = POLICIES["two slots"]) -> list[str]:
    return [unit.module_fqn for unit in plan_for(take_inventory(model), policy).units]


class TestModulesWithoutForward:
    def test_a_layer_without_one_is_the_modules_inside_it(self) -> None:
        assert fqns(MODELS["list of lists"]())[:3] == ["layers.0.0", "layers.0.1", "layers.1.0"]
        assert fqns(MODELS["list of dicts"]())[:3] == ["layers.0.attn", "layers.0.ff", "layers.1.attn"]

    def test_lists_side_by_side_are_no_stack(self) -> None:
        found = [
            (name, len(layers)) for name, layers in find_stacks(take_inventory(MODELS["lists side by side"]())).items()
        ]
        assert found == [("attentions", 4), ("layer_norm1", 4), ("layer_norm2", 4)]

    def test_a_module_with_a_forward_of_its_own_instance_runs(self) -> None:
        layer = nn.Module()
        layer.inner = linear()
        layer.forward = lambda x: layer.inner(x)
        assert take_inventory(layer).containers == frozenset()

    def test_what_a_list_holds_goes_to_the_module_around_it(self) -> None:
        """Which has to run around no other unit, and is not the model."""
        model = Reader()
        model.tower = Reader()
        model.tower.weights = weights(2)
        model.head = linear()
        assert fqns(model) == ["tower", "head"]
        rules = Rules([("tower", "prefetch"), ("head", "resident")])
        assert fqns(model, rules) == ["tower"]
        model.tower.inner = linear()
        assert fqns(model, rules) == ["tower.inner"]

    @pytest.mark.parametrize("policy", [POLICIES["prefetch"], Budget("24KiB", [ALL_MODEL_PARAMS])], ids=repr)
    def test_what_only_the_model_reads_stays_with_one_warning(self, policy: Any) -> None:
        inventory = take_inventory(MODELS["parameter list"]())
        with pytest.warns(HeadraceWarning) as caught:
            plan = build_plan(inventory, policy)
        stranded = [str(w.message) for w in caught if "no forward" in str(w.message)]
        assert len(stranded) == 1
        assert stranded[0].startswith(
            "3 tensors (weights.0, weights.1, weights.2): cannot be prefetched, because weights"
        )
        assert {f"weights.{i}" for i in range(3)} <= plan.resident.keys()
        assert plan.units

    def test_a_rule_that_nothing_can_obey_says_why(self) -> None:
        inventory = take_inventory(MODELS["parameter list"]())
        with pytest.raises(RuleError, match=r"because weights \(ParameterList\), which holds it, has no forward"):
            build_plan(inventory, Rules([("weights", "prefetch")]))
        assert list(build_plan(inventory, Rules([("weights", "uva")])).uva) == ["weights.0", "weights.1", "weights.2"]

    def test_a_model_of_lists_alone_offloads_nothing(self) -> None:
        model = Reader()
        model.weights = weights(4)
        with pytest.warns(HeadraceWarning, match="4 tensors"), pytest.raises(SelectionError, match="selects none"):
            build_plan(take_inventory(model), Prefetch(params=["weights"]))

    def test_a_plan_that_hooks_a_unit_there_is_refused(self, tmp_path: Path) -> None:
        """As in plans made before a unit's module had to have a forward."""
        model = MODELS["list of lists"]()
        inventory = take_inventory(model)
        specs = [UnitSpec(f"layers.{i}", tuple(inventory.under(f"layers.{i}"))) for i in range(4)]
        assemble(inventory, specs, 2, "cpu").save(tmp_path / "plan.json")
        message = r"unit at 'layers\.0' \(ModuleList\), which has no forward.*headrace plan"
        with pytest.raises(OptionError, match=message):
            headrace.offload(model, Plan.load(tmp_path / "plan.json"))

    def test_layers_of_lists_are_split_into_no_parts_but_their_modules(self) -> None:
        """What engines do: the stack is given, and parts of its layers get units of their own."""

        def part() -> nn.ModuleList:
            return nn.ModuleList([nn.Linear(600, 600), nn.Linear(600, 600)])

        with torch.device("meta"):
            lists = nn.ModuleList(part() for _ in range(2))
            layers = nn.ModuleList(ReaderDict({"a": nn.Linear(600, 600), "b": part()}) for _ in range(2))
        for stack, expected in ((lists, ["0.0", "0.1", "1.0", "1.1"]), (layers, ["0", "1"])):
            inventory = take_inventory(stack)
            plan = plan_group_rule(inventory, Prefetch(), [["0", "1"]], by_part=True)
            assert [unit.module_fqn for unit in plan.units] == expected
            plan.check(inventory)

    def test_nor_inside_a_module_that_reads_its_childrens_weights(self) -> None:
        model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
        inventory = take_inventory(model)
        plan = assemble(inventory, [UnitSpec("0.out_proj", tuple(inventory.under("0.out_proj")))], 1, "cpu")
        with pytest.raises(OptionError, match=r"'0\.out_proj' .* is not called by the module around it"):
            plan.check(inventory)


class TestSharedModules:
    def test_what_two_layers_share_is_in_neither_unit(self) -> None:
        inventory = take_inventory(sharing())
        plan = build_plan(inventory, POLICIES["two slots"])
        assert [unit.module_fqn for unit in plan.units] == ["0", "1", "2", "3"]
        assert plan.mechanism_of("0.inner.weight") == "resident"
        plan.check(inventory)

    def test_a_rule_for_it_alone_moves_it(self) -> None:
        assert fqns(sharing(), Rules([("0.inner", "prefetch")])) == ["0.inner"]

    def test_one_layer_in_all_places_is_one_unit_under_its_first_name(self) -> None:
        plan = build_plan(take_inventory(repeated()), all_layers(1))
        assert [unit.module_fqn for unit in plan.units] == ["layers.0"]
        assert len(plan.units[0].entries) == 4
        assert fqns(alternating()) == ["layers.0", "layers.1"]

    def test_every_name_counts(self) -> None:
        inventory = take_inventory(sharing())
        assert inventory.by_name["2.inner.weight"].names == ("0.inner.weight", "2.inner.weight")
        assert build_plan(inventory, Rules([("2.inner.bias", "uva")])).uva == {"0.inner.bias": DIM * 4}

    @pytest.mark.slow
    def test_a_checkpoint_may_use_any_name(self, tmp_path: Path) -> None:
        from safetensors.torch import save_file

        model = sharing().eval()
        expected = model(rows())
        state = {name: t for name, t in model.state_dict().items() if not name.startswith("0.inner")}
        save_file(state, tmp_path / "model.safetensors")
        rules = Rules([("0.inner", "prefetch"), (ALL_MODEL_PARAMS, "resident")], mode="disk")
        with headrace.offload(model, rules, checkpoint=tmp_path):
            assert_same_bits(model(rows()), expected)

    def test_a_plan_with_it_in_a_layers_unit_is_refused(self) -> None:
        inventory = take_inventory(sharing())
        plan = build_plan(inventory, POLICIES["two slots"])
        size = plan.resident["0.inner.weight"]
        entry = replace(plan.units[0].entries[0], storage="0.inner.weight", offset=plan.units[0].num_bytes)
        unit = replace(plan.units[0], entries=(*plan.units[0].entries, entry), num_bytes=entry.offset + size)
        resident = {name: size for name, size in plan.resident.items() if name != "0.inner.weight"}
        wrong = replace(plan, units=(unit, *plan.units[1:]), resident=resident)
        message = r"0\.inner\.weight in the unit of '0', but .* is used in another place as well"
        with pytest.raises(OptionError, match=message):
            wrong.check(inventory)

    def test_a_plan_with_units_nested_on_another_path_is_refused(self) -> None:
        inventory = take_inventory(sharing())
        names = ["0.inner", "2"]
        specs = [UnitSpec(name, tuple(inventory.under(name))) for name in names]
        with pytest.raises(OptionError, match=r"units 1 and 0 at '2' and '0\.inner'"):
            assemble(inventory, specs, 2, "cpu").check(inventory)

    def test_many_paths_and_a_module_inside_itself_take_no_time(self) -> None:
        inner: nn.Module = linear()
        for _ in range(40):
            inner = nn.Sequential(inner, inner)
        model = Model(lambda m, x: x, deep=inner)
        model.me = model
        inventory = take_inventory(model)
        first = inventory.storages[0]
        assert first.name in first.names
        assert len(first.names) < 100_000
        assert inventory.dominators("deep")[-1] == "deep"
        assert fqns(model) != []


class TestTiesInsideOneModule:
    def test_their_common_parent_holds_them(self) -> None:
        assert fqns(tied_inside(), Rules([("encoder", "prefetch")])) == ["encoder"]
        assert fqns(tied_inside(), POLICIES["rules"]) == ["encoder", "head"]

    def test_not_around_another_unit(self) -> None:
        model = tied_inside()
        model.encoder.down.bias = nn.Parameter(torch.zeros(DIM))
        with pytest.warns(HeadraceWarning, match="runs around other units"):
            plan = build_plan(take_inventory(model), Rules([("encoder", "prefetch")]))
        assert [unit.module_fqn for unit in plan.units] == ["encoder.down"]


class TestCheckpointOfALiveModel:
    def model(self) -> nn.Module:
        model = Model(one_by_one, layers=list_of(Block))
        for layer in model.layers:
            layer.register_buffer("scratch", torch.randn(DIM, DIM), persistent=False)
        return model.eval()

    @pytest.mark.parametrize("policy", [POLICIES["prefetch"], Budget("26KiB", [ALL_MODEL_PARAMS])], ids=repr)
    def test_buffers_that_no_file_holds_stay(self, policy: Any, tmp_path: Path) -> None:
        model = self.model()
        expected = model(rows())
        save(model, tmp_path)
        policy = replace(policy, mode="disk")
        with pytest.warns(HeadraceWarning, match=r"4 tensors \(layers\.0\.scratch, .*not persistent.*stay resident"):
            handle = headrace.offload(model, policy, checkpoint=tmp_path)
        assert_same_bits(model(rows()), expected)
        assert {name for name in handle.plan.resident if "scratch" in name} == {f"layers.{i}.scratch" for i in range(4)}
        handle.remove()

    @pytest.mark.parametrize("policy", [POLICIES["prefetch"], POLICIES["rules"]], ids=repr)
    def test_files_with_other_names_or_shapes_are_for_the_adapter(self, policy: Any, tmp_path: Path) -> None:
        from safetensors.torch import save_file

        model = Model(one_by_one, layers=list_of(Block)).eval()
        state = model.state_dict()
        older = {name.replace("outer", "dense"): tensor for name, tensor in state.items()}
        unfused = {name: tensor.unsqueeze(0).clone() for name, tensor in state.items()}
        for wrong in (older, unfused):
            save_file(wrong, tmp_path / "model.safetensors")
            with pytest.raises(CheckpointError, match=r"headrace\.adapters\.transformers\.load"):
                headrace.offload(model, replace(policy, mode="disk"), checkpoint=tmp_path)

    def test_rules_say_so_too(self, tmp_path: Path) -> None:
        model = self.model()
        with pytest.warns(HeadraceWarning, match="a buffer that is not persistent"):
            handle = headrace.offload(
                model, Rules([(ALL_MODEL_PARAMS, "prefetch")], mode="disk"), checkpoint=save(model, tmp_path)
            )
        handle.remove()


def xlm(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(emb_dim=32, n_heads=2, n_layers=3, vocab_size=50)
    return getattr(transformers, f"{kind}Model")(config)


def funnel() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"block_sizes": [2, 2], "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64, "num_decoder_layers": 2}
    return transformers.FunnelModel(transformers.FunnelConfig(vocab_size=50, **sizes))


def gemma() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 16}
    config = transformers.GemmaConfig(vocab_size=50, num_hidden_layers=3, num_key_value_heads=2, **sizes)
    return transformers.GemmaForCausalLM(config)


class TestTransformers:
    """Models in which units once had modules that never ran, or that the planner could not cost."""

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")
    @pytest.mark.parametrize(
        "build",
        [lambda: xlm("XLM"), lambda: xlm("Flaubert"), funnel, gemma],
        ids=["xlm", "flaubert", "funnel", "gemma"],
    )
    def test_the_same_bits(self, build: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        model = build().eval()
        ids = torch.arange(1, 9)[None]
        expected = model(input_ids=ids)[0]
        budget = Budget(take_inventory(model).num_bytes * 3 // 4, [ALL_MODEL_PARAMS], mode="cpu")
        for policy in (*POLICIES.values(), budget):
            with headrace.offload(model, policy) as handle:
                for _ in range(2):
                    assert_same_bits(model(input_ids=ids)[0], expected)
                assert handle.plan.offloaded_bytes > 0
