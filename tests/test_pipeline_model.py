"""The promise: the step that the planner plays on paper takes as long as the schedule says.

The reference below moves events by hand, one candidate at a time, from the rules of ``plan/schedule.py``; the planner's
version works on arrays over candidates. On top of that: the figures of a measured machine.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.pipeline import StageTimes, step_s
from penstock.plan.schedule import first_units, next_in_chain, slot_of

times = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5, 7.0])


def played(compute: list[float], copies: list[float], num_slots: int) -> float:
    """One candidate through the planner's version."""
    return play_all(compute, [copies], [num_slots])[0]


def play_all(compute: list[float], copies: list[list[float]], slots: list[int]) -> list[float]:
    count = len(copies)
    stages = [
        StageTimes(np.full(count, seconds), np.zeros(count), np.array([row[index] for row in copies]))
        for index, seconds in enumerate(compute)
    ]
    units = np.array([sum(copy > 0 for copy in row) for row in copies])
    return [float(value) for value in step_s(stages, np.minimum(slots, units), units)]


def reference(compute: list[float], copies: list[float], num_slots: int, steps: int = 4) -> float:
    """The length of the last of ``steps`` steps, from a queue of copies that are asked for and carried out in order."""
    units = [copy for copy in copies if copy > 0]
    slots = min(num_slots, len(units))
    now = link_free = 0.0
    arrival: dict[int, float] = {}  # unit -> when it is in its slot

    def fetch(unit: int, asked: float) -> None:
        nonlocal link_free
        link_free = max(link_free, asked) + units[unit]
        arrival[unit] = link_free

    held_back = slot_of(len(units) - 1, slots) if len(units) > slots else None
    for unit in first_units(len(units), slots):
        if unit != held_back:
            fetch(unit, now)
    begun = now
    for _ in range(steps):
        now = begun = max(now, link_free)
        if held_back is not None:
            fetch(held_back, now)
        unit = -1
        for seconds, copy in zip(compute, copies, strict=True):
            if not copy:
                now += seconds
                continue
            unit += 1
            now = max(now, arrival[unit]) + seconds
            following = next_in_chain(unit, len(units), slots)
            if following != unit and slot_of(unit, slots) != (held_back if unit == len(units) - 1 else None):
                fetch(following, now)
    return max(now, link_free) - begun


@given(
    stages=st.lists(st.tuples(times.filter(bool), times), min_size=1, max_size=14),
    num_slots=st.integers(1, 5),
)
@settings(max_examples=400, deadline=None)
def test_equals_a_queue_of_copies(stages: list[tuple[float, float]], num_slots: int) -> None:
    compute, copies = [list(column) for column in zip(*stages, strict=True)]
    assert played(compute, copies, num_slots) == pytest.approx(reference(compute, copies, num_slots))


@given(
    compute=st.lists(times.filter(bool), min_size=6, max_size=6),
    copies=st.lists(st.lists(times, min_size=6, max_size=6), min_size=1, max_size=6),
    slots=st.lists(st.integers(1, 4), min_size=6, max_size=6),
)
@settings(max_examples=100, deadline=None)
def test_candidates_do_not_touch_one_another(compute: list[float], copies: list[list[float]], slots: list[int]) -> None:
    together = play_all(compute, copies, slots[: len(copies)])
    assert together == [played(compute, row, count) for row, count in zip(copies, slots, strict=False)]


@given(stages=st.lists(st.tuples(times.filter(bool), times), min_size=1, max_size=12), num_slots=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_never_below_the_floor(stages: list[tuple[float, float]], num_slots: int) -> None:
    compute, copies = [list(column) for column in zip(*stages, strict=True)]
    units = [copy for copy in copies if copy > 0]
    slots = min(num_slots, max(1, len(units)))
    moved = sum(copy for unit, copy in enumerate(units) if next_in_chain(unit, len(units), slots) != unit)
    assert played(compute, copies, num_slots) >= max(sum(compute), moved) - 1e-9


@given(stages=st.lists(st.tuples(times.filter(bool), times.filter(bool)), min_size=2, max_size=9))
@settings(max_examples=100, deadline=None)
def test_with_one_slot_nothing_overlaps_where_every_stage_has_a_unit(stages: list[tuple[float, float]]) -> None:
    compute, copies = [list(column) for column in zip(*stages, strict=True)]
    assert played(compute, copies, 1) == pytest.approx(sum(compute) + sum(copies))


@pytest.mark.parametrize(
    ("resident_ms", "every", "num_slots", "measured_ms", "tolerance"),
    [
        # One H200, 36 layers of 386 MB, 55.5 GB/s: docs/benchmarks, steps on one H200.
        (5.19, 4, 2, 63.01, 0.01),
        (46.39, 4, 2, 65.82, 0.04),
        (46.39, 4, 1, 75.92, 0.03),
        (46.39, 4, 3, 62.59, 0.01),
        (192.04, 4, 2, 191.61, 0.01),
        (5.19, 1, 2, 250.14, 0.01),
    ],
)
def test_agrees_with_a_measured_machine(
    resident_ms: float, every: int, num_slots: int, measured_ms: float, tolerance: float
) -> None:
    copies = [385.9e6 / 55.5e9 * 1e3 if index % every == every - 1 else 0.0 for index in range(36)]
    assert played([resident_ms / 36] * 36, copies, num_slots) == pytest.approx(measured_ms, rel=tolerance)


def test_reading_in_place_takes_the_link_from_the_copies() -> None:
    """Two units that would hide behind ten seconds of compute, but for a stage that reads in place for as long."""
    one = np.ones(1)
    stages = [
        StageTimes(5 * one, 0 * one, 4 * one),
        StageTimes(10 * one, 10 * one, 0 * one),
        StageTimes(5 * one, 0 * one, 4 * one),
    ]
    quiet = [StageTimes(stage.compute_s, 0 * one, stage.copy_s) for stage in stages]
    slots, units = np.array([1]), np.array([2])
    assert step_s(stages, slots, units)[0] > step_s(quiet, slots, units)[0]
