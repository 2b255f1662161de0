"""The promise: a module that runs inside another one, in the same thread, gives the right bits or an error.

No unit's module lies inside another's. But any module may call any other that it knows, and a hook may call the model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import headrace
from checks import raising
from headrace.errors import SlotConflictError
from headrace.testing import assert_same_bits
from models import DIM, Stack, all_layers, rows

pytestmark = pytest.mark.usefixtures("no_grad")


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

    def test_the_error_gives_a_rule_that_helps(self) -> None:
        """In Python and on a command line."""
        model = Model().eval()
        expected = model(rows())
        message = (
            r"use another prefetch_step \(--offload-prefetch-step\), .*rules=\[\('layers\.0', 'resident'\)\], --off"
        )
        with headrace.offload(model, all_layers()), pytest.raises(SlotConflictError, match=message):
            model(rows())
        policy = headrace.Rules([("layers.0", "resident"), ("layers", "prefetch")], prefetch_step=2)
        with headrace.offload(model, policy) as handle:
            assert_same_bits(model(rows()), expected)
            assert handle.stats().bytes_moved > 0

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
