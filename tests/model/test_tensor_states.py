"""The promise: the state of an offloaded tensor says what it views, and steps follow the table of legal moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from engines import build, ids, resident
from headrace.errors import StateError
from headrace.model.inventory import take_inventory
from headrace.model.live_tensors import TensorState, bind, is_placeholder
from headrace.testing import assert_same_bits
from interrupts import Interrupter
from models import Stack, all_layers, rows

RESIDENT, FIXED, PLACEHOLDER, OPEN, PINNED, PARKED, LOST = TensorState

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.filterwarnings("ignore::headrace.HeadraceWarning")]


class Subject:
    """A weight, its slot, and the steps that the hooks and the session take."""

    def __init__(self) -> None:
        self.module = nn.Linear(4, 4, bias=False)
        (storage,) = bind(self.module, take_inventory(self.module).storages).values()
        self.bytes = storage.original_bytes().clone()
        self.slot = self.bytes.clone()
        (self.bound,) = storage.tensors
        self.weight = self.module.weight

    def fix(self) -> None:
        self.bound.point_at_slot(self.slot, None)

    def defer(self) -> None:
        self.bound.point_at_slot(self.slot, lambda *_: (self.bound.copy_of(self.bytes), None))

    def open(self) -> None:
        self.bound.open()

    def close(self) -> None:
        assert self.bound.to_placeholder() is None

    def leave(self) -> None:
        self.bound.leave_slot(lambda *_: (self.bound.copy_of(self.bytes), None))

    def stay(self) -> None:
        self.bound.stay_in_slot()

    def pin(self) -> None:
        self.bound.pin_to_slot()

    def park(self) -> None:
        self.bound.park(lambda *_: (self.bound.copy_of(self.bytes), None))

    def promote(self) -> None:
        self.bound.point_at(self.bytes)

    def restore(self) -> None:
        self.bound.restore()

    def give_back(self) -> None:
        self.bound.return_to(self.bytes.view(torch.float32).view(4, 4))

    def lose(self) -> None:
        self.module.weight = nn.Parameter(torch.zeros(4, 4))
        self.bound.open()

    def find(self) -> None:
        self.module.weight = self.weight
        self.bound.open()


WAYS: dict[tuple[TensorState, str], list[Callable[[Subject], None]]] = {
    (RESIDENT, ""): [],
    (FIXED, ""): [Subject.fix],
    (PLACEHOLDER, ""): [Subject.defer],
    (PLACEHOLDER, "FIXED before"): [Subject.fix, Subject.leave],
    (OPEN, ""): [Subject.defer, Subject.open],
    (PINNED, ""): [Subject.defer, Subject.pin],
    (PINNED, "in a window"): [Subject.defer, Subject.open, Subject.pin],
    (PARKED, ""): [Subject.park],
    (PARKED, "PLACEHOLDER before"): [Subject.defer, Subject.park],
    (LOST, "FIXED before"): [Subject.fix, Subject.lose],
    (LOST, "PLACEHOLDER before"): [Subject.defer, Subject.lose],
}
# What each step makes of a tensor; others leave it as it is.
MOVES: dict[Callable[[Subject], None], dict[TensorState, TensorState]] = {
    Subject.fix: {RESIDENT: FIXED, PARKED: FIXED},
    Subject.defer: {RESIDENT: PLACEHOLDER, PARKED: PLACEHOLDER},
    Subject.open: {PLACEHOLDER: OPEN},
    Subject.close: {OPEN: PLACEHOLDER},
    Subject.leave: {FIXED: PLACEHOLDER},
    Subject.stay: {PLACEHOLDER: FIXED, OPEN: FIXED, PINNED: FIXED},
    Subject.pin: {PLACEHOLDER: PINNED, OPEN: PINNED},
    Subject.park: dict.fromkeys(TensorState, PARKED),
    Subject.promote: dict.fromkeys(TensorState, RESIDENT),
    Subject.restore: dict.fromkeys(TensorState, RESIDENT),
    Subject.give_back: dict.fromkeys(TensorState, RESIDENT),
    Subject.lose: {FIXED: LOST, PLACEHOLDER: LOST, OPEN: LOST},
    Subject.find: {PLACEHOLDER: OPEN},
}
TAKES_SLOT = (RESIDENT, PARKED)
REFUSED = {(state, step) for state in TensorState for step in (Subject.fix, Subject.defer) if state not in TAKES_SLOT}


def subject_in(way: tuple[TensorState, str]) -> Subject:
    subject = Subject()
    for step in WAYS[way]:
        step(subject)
    require_state(subject, way[0])
    return subject


def require_state(subject: Subject, state: TensorState) -> None:
    """The state, and what it says of the tensor."""
    bound, weight = subject.bound, subject.weight
    assert bound.state is state
    if state in (FIXED, OPEN, PINNED):
        assert torch.Tensor.data_ptr(weight) == subject.slot.data_ptr()
    elif state is RESIDENT:
        assert torch.Tensor.data_ptr(weight) != subject.slot.data_ptr()
    if state in (RESIDENT, FIXED, PLACEHOLDER, OPEN):
        assert is_placeholder(weight) == (state is PLACEHOLDER)
        assert (subject.module.weight is weight) or state is RESIDENT
    assert (bound.bare is not None) or state is not PINNED
    assert state is LOST or not bound.has_other_data
    assert_same_bits(weight * 1, subject.bytes.view(torch.float32).view(4, 4))


@pytest.mark.parametrize(("way", "step"), list(itertools.product(WAYS, MOVES)))
def test_a_step_is_a_legal_move_or_an_error(way: tuple[TensorState, str], step: Callable[[Subject], None]) -> None:
    subject, state = subject_in(way), way[0]
    if (state, step) in REFUSED:
        with pytest.raises(StateError, match=r"weight cannot get a slot, because it is .* bug in headrace"):
            step(subject)
        require_state(subject, state)
    elif (state, step) == (LOST, Subject.find):
        step(subject)
        require_state(subject, FIXED if way[1] == "FIXED before" else OPEN)
    else:
        step(subject)
        require_state(subject, MOVES[step].get(state, state))


def test_pinned_again_after_it_was_parked() -> None:
    subject = subject_in((PINNED, ""))
    subject.park()
    require_state(subject, PARKED)
    subject.defer()
    require_state(subject, PINNED)


STEPS: list[tuple[tuple[TensorState, str], Callable[[Subject], None]]] = [
    ((PLACEHOLDER, ""), Subject.open), ((OPEN, ""), Subject.close), ((FIXED, ""), Subject.leave),
    ((PLACEHOLDER, ""), Subject.stay), ((OPEN, ""), Subject.stay), ((PINNED, ""), Subject.stay),
    ((PLACEHOLDER, ""), Subject.pin), ((OPEN, ""), Subject.pin), ((RESIDENT, ""), Subject.fix),
    ((RESIDENT, ""), Subject.defer), ((RESIDENT, ""), Subject.park), ((PLACEHOLDER, ""), Subject.park),
    ((PARKED, ""), Subject.defer),
]  # fmt: skip


@pytest.mark.parametrize(("way", "step"), STEPS)
def test_an_interrupt_at_any_line_of_a_step(way: tuple[TensorState, str], step: Callable[[Subject], None]) -> None:
    """Windows, the step itself and the end of the offload go on from there."""
    subject = subject_in(way)
    step(subject)  # once without an interrupt: what is made at first use is no part of it
    subject = subject_in(way)
    counted = Interrupter(-1)
    counted.run(lambda: step(subject))
    reached = subject.bound.state
    endings = ("restore",) if way[0] is RESIDENT else ("step", "window", "restore")  # as offload() and hooks do
    if step is Subject.park or way[0] is PARKED:
        endings = ("step", "restore")
    for at, after in itertools.product(range(counted.lines), endings):
        subject = subject_in(way)
        interrupter = Interrupter(at)
        _, error = interrupter.run(lambda subject=subject: step(subject))
        assert isinstance(error, KeyboardInterrupt)
        assert way[0] in (RESIDENT, PARKED) or not subject.bound.has_other_data, interrupter.place
        if after == "step":
            if way[0] is PARKED:
                subject.park()  # as resume() does
            step(subject)
            if reached is PLACEHOLDER and way[0] is not PARKED:
                subject.close()
            require_state(subject, reached)
            assert subject.bound.bare is None or is_bare(subject.bound.bare), interrupter.place
        elif after == "window":
            subject.open()
            assert torch.Tensor.data_ptr(subject.weight) == subject.slot.data_ptr(), interrupter.place
            subject.close()
        subject.restore()
        require_state(subject, RESIDENT)


def is_bare(tensor: torch.Tensor) -> bool:
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.Tensor.data_ptr(tensor)
    return True


def states(offload: Any, name: str = "linear.weight") -> set[TensorState]:
    """Those of the weights of this name in ``offload``, a handle or an offloader."""
    tensors = [tensor for storage in offload._session._bound.values() for tensor in storage.tensors]
    return {tensor.state for tensor in tensors if tensor.info.name.endswith(name)}


class TestEveryStateIsReached:
    """Through the library's own front door."""

    def test_in_eager_code(self) -> None:
        model, found = Stack(3).eval(), []
        expected, weights = model(rows()), [layer.linear.weight for layer in model.layers]
        with headrace.offload(model, all_layers(1)) as handle:
            assert states(handle) == {PLACEHOLDER}
            hook = model.layers[1].linear.register_forward_hook(lambda *_: found.append(states(handle)))
            assert_same_bits(model(rows()), expected)
            hook.remove()
            assert found == [{PLACEHOLDER, OPEN}]
            assert states(handle) == {PLACEHOLDER}
            weights[0].sum()
            assert states(handle) == {PLACEHOLDER, RESIDENT}
            model.layers[1].linear.weight = nn.Parameter(weights[1] * 1)  # which promotes the old one
            model.layers[2].linear.weight = nn.Parameter(torch.zeros_like(weights[2]))
            model(rows())
            assert states(handle) == {RESIDENT, LOST}
            model.layers[2].linear.weight = weights[2]
            assert_same_bits(model(rows()), expected)
            assert states(handle) == {RESIDENT, PLACEHOLDER}
            assert handle.stats().bytes_moved > 0
            handle.park()
            assert states(handle) == {PARKED, RESIDENT}  # in the memory that it came with, which the store has, too
            handle.resume()

    @pytest.mark.slow
    def test_in_compiled_code(self) -> None:
        model = Stack(3).eval()
        expected = model(rows())
        with headrace.offload(model, all_layers(1)) as handle:
            for forward in (torch.compile(model, backend="eager"), model):
                assert_same_bits(forward(rows()), expected)
                assert states(handle) == {PINNED}
            assert handle.stats().bytes_moved > 0
        torch._dynamo.reset()

    def test_in_an_engine(self) -> None:
        model, offloader = build(headrace.Prefetch(2, 1, 1, ["mlp"]), num_layers=2)
        assert states(offloader, "mlp.down_proj.weight") == {RESIDENT, FIXED}  # every other layer stays on the device
        expected = resident(2)(ids())
        assert_same_bits(model(ids()), expected)
        assert offloader.stats().units[0].bytes_moved > 0
        with offloader.as_placeholders():
            assert states(offloader, "mlp.down_proj.weight") == {RESIDENT, PLACEHOLDER}
            assert_same_bits(model(ids()), expected)
        assert states(offloader, "mlp.down_proj.weight") == {RESIDENT, FIXED}
