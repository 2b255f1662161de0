"""The promise: a module that runs inside another one, in the same thread, gives the right bits or an error.

No unit's module lies inside another's. But any module may call any other that it knows, and a hook may call the model.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from checks import raising
from headrace import Budget, Prefetch, Rules
from headrace.errors import SlotConflictError
from headrace.testing import assert_same_bits
from models import DIM, Stack, all_layers, rows

pytestmark = pytest.mark.usefixtures("no_grad")

WIDE = 256


class Caller(nn.Module):
    """Two matrix products with calls of other layers between them; a list hides those from the tree of modules."""

    def __init__(self, *others: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.others = [others]
        self.depth = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        for other in self.others[0]:
            y = y + other(y)
        if self.depth:
            self.depth -= 1
            y = y + self(y)
            self.depth += 1
        return x + self.second(y)


class Model(nn.Module):
    """Four of them; layer 2 calls layer 0 if ``calls``."""

    def __init__(self, calls: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Caller() for _ in range(4))
        if calls:
            self.layers[2].others = [(self.layers[0],)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TestAnotherLayer:
    @pytest.mark.parametrize("slots", [1, 2])
    def test_in_the_same_slot_is_refused(self, slots: int) -> None:
        model = Model().eval()
        expected = model(rows())
        handle = headrace.offload(model, all_layers(slots))
        for _ in range(2):
            with pytest.raises(SlotConflictError, match=r"^layers\.0 \(unit 0\) runs inside layers\.2 \(unit 2\)"):
                model(rows())
        handle.remove()
        assert_same_bits(model(rows()), expected)

    @pytest.mark.parametrize("slots", [3, 4])
    def test_in_another_slot_gives_the_right_bits(self, slots: int) -> None:
        model = Model().eval()
        expected = model(rows())
        with headrace.offload(model, all_layers(slots)) as handle:
            for _ in range(3):
                assert_same_bits(model(rows()), expected)
            assert handle.stats().bytes_moved > 0

    @pytest.mark.slow
    def test_in_compiled_code_is_refused_too(self) -> None:
        model = Model().eval()
        compiled = torch.compile(model, backend="eager")
        with headrace.offload(model, all_layers(2)), pytest.raises(SlotConflictError, match=r"runs inside layers\.2"):
            compiled(rows())


class Net(nn.Module):
    """A small network of numbered parts, which are a stack of layers by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[1](torch.relu(self.parts[0](x)))


class Around(nn.Module):
    """Calls a network that it is given between products of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor, net: nn.Module) -> torch.Tensor:
        return x + self.second(torch.tanh(net(self.first(x))))


class Nested(nn.Module):
    """Layers that call one network of the model (``num_nets`` = 1), or each that of its number in a later list."""

    def __init__(self, num_nets: int) -> None:
        super().__init__()
        layers, nets = [Around() for _ in range(4)], [Net() for _ in range(num_nets)]
        self.body = nn.ModuleDict(
            {"layers": nn.ModuleList(layers), "nets": nets[0] if num_nets == 1 else nn.ModuleList(nets)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nets = self.body["nets"]
        for index, layer in enumerate(self.body["layers"]):
            x = layer(x, nets if isinstance(nets, Net) else nets[index])
        return x


class TestAdvice:
    """What the error says, followed to the letter, helps at once: in Python and on a command line."""

    @pytest.mark.parametrize(
        "policy",
        [
            Budget(1), Budget(1, codec="none"), Budget(1, mode="cpu", codec="exp3"), Prefetch(1, 1, 1),
            Prefetch(1, 1, 2, codec="exp3"), Rules([("ALL_MODEL_PARAMS", "prefetch")], 1),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("num_nets", [1, 4])
    def test_helps_where_layers_call_networks_beside_them(self, num_nets: int, policy: Any) -> None:
        model, x = Nested(num_nets).eval().bfloat16(), rows(WIDE).bfloat16()
        expected = model(x)
        if isinstance(policy, Budget):
            share = 0.7 if num_nets == 1 else 0.75  # a network is among what is offloaded; half may be resident
            policy = replace(policy, device_memory=int(share * sum(p.nbytes for p in model.parameters())))
        with (
            headrace.offload(model, policy),
            pytest.raises(SlotConflictError, match=r"runs inside body\.layers\.0") as found,
        ):
            model(x)
        is_prefetch = isinstance(policy, Prefetch)
        field, flag, value = (
            ("params", "--offload-params", "re:(?!body[.]nets[.]).*")
            if is_prefetch
            else ("rules", "--offload-rule", "body.nets.*=resident")
        )
        ((text, *said),) = re.findall(rf"\b{field}=(\[.*?\]), (--\S+) '(.*?)'", str(found.value))
        assert said == [flag, value]
        given = ast.literal_eval(text) + ([] if is_prefetch else [*policy.rules])
        with headrace.offload(model, replace(policy, **{field: given})) as handle:
            for _ in range(3):
                assert_same_bits(model(x), expected)
            assert handle.stats().bytes_moved > 0

    def test_names_the_inner_layer_of_the_same_list(self) -> None:
        model = Model().eval()
        expected = model(rows())
        with headrace.offload(model, all_layers()), pytest.raises(SlotConflictError, match=r"\('layers\.0\.\*', 're"):
            model(rows())
        policy = headrace.Rules([("layers.0.*", "resident"), ("layers", "prefetch")], prefetch_step=2)
        with headrace.offload(model, policy) as handle:
            assert_same_bits(model(rows()), expected)
            assert handle.stats().bytes_moved > 0


class TestItself:
    @pytest.mark.parametrize("slots", [1, 2])
    def test_a_layer_that_calls_itself(self, slots: int) -> None:
        model = Model(calls=False).eval()
        model.layers[1].depth = 2
        expected = model(rows())
        with headrace.offload(model, all_layers(slots)) as handle:
            for _ in range(3):
                assert_same_bits(model(rows()), expected)
            assert handle.stats().bytes_moved > 0

    def test_a_model_within_its_own_forward(self) -> None:
        model = Stack(5).eval()
        expected = model(rows())
        busy: list[Any] = []

        def again(module: nn.Module, args: object) -> None:
            if not busy:
                busy.append(None)
                model(rows())

        with headrace.offload(model, all_layers(2)):
            hook = model.layers[3].linear.register_forward_pre_hook(again)
            with pytest.raises(SlotConflictError, match=r"layers\.1 \(unit 1\) runs inside layers\.3"):
                model(rows())
            hook.remove()
            assert_same_bits(model(rows()), expected)
        assert busy


class TestInterrupted:
    """What an interrupt leaves in a slot is no module that still runs: torch calls no hooks then."""

    @pytest.mark.parametrize("slots", [1, 2, 3])
    @pytest.mark.parametrize("where", range(5))
    def test_and_run_again(self, slots: int, where: int) -> None:
        model, x = Stack(5).eval(), rows()
        expected, by_hand = model(x), [layer(x) for layer in model.layers]
        with headrace.offload(model, all_layers(slots)):
            for again in (lambda: model(x), lambda: model.layers[(where + slots) % 5](x)):
                hook = model.layers[where].linear.register_forward_pre_hook(raising(KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    model(x)
                hook.remove()
                again()
                assert_same_bits(model(x), expected)
                assert_same_bits([layer(x) for layer in model.layers], by_hand)
