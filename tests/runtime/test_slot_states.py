"""The promise: the state of a slot names the owner of its bytes, and no transition takes them from it."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from device_model import Copy, Event
from headrace.errors import StateError
from headrace.runtime.slot import Reader, Slot, SlotState

EMPTY, HELD_BACK, COPYING, READY, IN_USE = SlotState

LEGAL = {
    (EMPTY, EMPTY), (EMPTY, HELD_BACK), (EMPTY, COPYING),
    (HELD_BACK, EMPTY), (HELD_BACK, HELD_BACK), (HELD_BACK, COPYING),
    (COPYING, EMPTY), (COPYING, HELD_BACK), (COPYING, READY),
    (READY, EMPTY), (READY, HELD_BACK), (READY, IN_USE),
    (IN_USE, IN_USE),
}  # fmt: skip


def move(slot: Slot, target: SlotState) -> None:
    if target is EMPTY:
        slot.to_empty()
    elif target is HELD_BACK:
        slot.to_held_back()
    elif target is COPYING:
        slot.to_copying(3, Copy(3, Event()))
    elif target is READY:
        slot.to_ready()
    else:
        slot.to_in_use(Reader())


def slot_in(state: SlotState) -> Slot:
    slot = Slot(1, torch.zeros(4, dtype=torch.uint8))
    way = {EMPTY: [], HELD_BACK: [HELD_BACK], COPYING: [COPYING], READY: [COPYING, READY]}
    for step in way.get(state, [COPYING, READY, IN_USE]):
        move(slot, step)
    assert slot.state is state
    return slot


@pytest.mark.parametrize(("state", "target"), list(itertools.product(SlotState, SlotState)))
def test_a_transition_is_legal_or_an_error(state: SlotState, target: SlotState) -> None:
    slot = slot_in(state)
    if (state, target) in LEGAL:
        move(slot, target)
        assert slot.state is target
    else:
        with pytest.raises(StateError, match=rf"slot 1 .* cannot become {target.name}, because it is {state.name}"):
            move(slot, target)
        assert slot.state is state


@given(st.lists(st.sampled_from([*SlotState, None]), max_size=30))
@settings(deadline=None)
def test_there_is_a_unit_exactly_where_the_state_says_so(steps: list[SlotState | None]) -> None:
    """``None``: the latest reader ends."""
    slot = Slot(1, torch.zeros(4, dtype=torch.uint8))
    for step in steps:
        if step is None:
            del slot.readers[-1:]
        elif (slot.state, step) in LEGAL:
            move(slot, step)
        assert (slot.unit is None) == (slot.state in (EMPTY, HELD_BACK))
        assert bool(slot.readers) == (slot.state is IN_USE)


def test_only_runs_of_this_thread_that_do_not_go_on_are_stale() -> None:
    slot = slot_in(READY)
    compiled, by_hand, of_another = Reader(forward=7), Reader(), Reader(forward=7)
    of_another.thread += 1
    for reader in (compiled, by_hand, of_another):
        slot.to_in_use(reader)
    assert slot.stale_readers(7) == [by_hand]
    assert slot.stale_readers(8) == slot.stale_readers(None) == [compiled, by_hand]
    assert slot.latest_reader() is by_hand
