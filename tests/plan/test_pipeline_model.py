"""The promise: the simulated step takes as long as the rules of the schedule imply.

The reference below moves events by hand, one candidate at a time, from the rules of ``plan/schedule.py``; the planner's
version works on arrays over candidates. On top of that: the figures of a measured machine.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan.cost_model import StageTimes, step_s
from headrace.plan.schedule import next_in_chain, slot_of

times = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5, 7.0])


def played(compute: list[float], copies: list[float], num_slots: int) -> float:
    """One candidate through the planner's version."""
    return play_all(compute, [copies], [num_slots])[0]


def play_all(compute: list[float], copies: list[list[float]], slots: list[int]) -> list[float]:
    count = len(copies)
    stages = [
        StageTimes(np.full(count, seconds), np.zeros(count), np.array([row[index] for row in copies]), np.zeros(count))
        for index, seconds in enumerate(compute)
    ]
    units = np.array([sum(copy > 0 for copy in row) for row in copies])
    return [float(value) for value in step_s(stages, np.minimum(slots, units), units)]


def reference(compute: list[float], copies: list[float], reads: list[float], slots: int, ring: float) -> float:
    """The length of a late step, from a queue of copies that are asked for and carried out in order.

    A disk works ahead of them; ``reads``: its seconds for each, 0 for what is in host memory.
    """
    units = [(copy, read) for copy, read in zip(copies, reads, strict=True) if copy > 0]
    slots = min(slots, len(units))
    now = link_free = disk_free = 0.0
    arrival: dict[int, float] = {}  # unit -> when it is in its slot

    def fetch(unit: int, asked: float) -> None:
        nonlocal link_free, disk_free
        copy, read = units[unit]
        start = max(link_free, asked)
        ahead = min(ring, read, start - disk_free)  # what lies in the ring by then
        link_free = max(start + copy, start + read - ahead) if read else start + copy
        disk_free = link_free if read else disk_free
        arrival[unit] = link_free

    held_back = slot_of(len(units) - 1, slots) if len(units) > slots else None
    for unit in range(min(len(units), slots)):
        if unit != held_back:
            fetch(unit, now)
    begun = now
    for _ in range(6):
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


@pytest.mark.slow
@given(stages=st.lists(st.tuples(times.filter(bool), times), min_size=1, max_size=14), num_slots=st.integers(1, 5))
@settings(max_examples=400, deadline=None)
def test_equals_a_queue_of_copies(stages: list[tuple[float, float]], num_slots: int) -> None:
    compute, copies = [list(column) for column in zip(*stages, strict=True)]
    expected = reference(compute, copies, [0.0] * len(copies), num_slots, 0.0)
    assert played(compute, copies, num_slots) == pytest.approx(expected)


@pytest.mark.slow
@given(
    compute=st.lists(times.filter(bool), min_size=6, max_size=6),
    copies=st.lists(st.lists(times, min_size=6, max_size=6), min_size=1, max_size=6),
    slots=st.lists(st.integers(1, 4), min_size=6, max_size=6),
)
@settings(max_examples=100, deadline=None)
def test_candidates_do_not_touch_one_another(compute: list[float], copies: list[list[float]], slots: list[int]) -> None:
    together = play_all(compute, copies, slots[: len(copies)])
    assert together == [played(compute, row, count) for row, count in zip(copies, slots, strict=False)]


@pytest.mark.slow
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
        StageTimes(5 * one, 0 * one, 4 * one, 0 * one),
        StageTimes(10 * one, 10 * one, 0 * one, 0 * one),
        StageTimes(5 * one, 0 * one, 4 * one, 0 * one),
    ]
    quiet = [StageTimes(stage.compute_s, 0 * one, stage.copy_s, 0 * one) for stage in stages]
    slots, units = np.array([1]), np.array([2])
    assert step_s(stages, slots, units)[0] > step_s(quiet, slots, units)[0]


# -- with a disk before the link ---------------------------------------------------------------------------------------


def played_ahead(compute: list[float], copies: list[float], reads: list[float], slots: int, ring: float) -> float:
    one = np.ones(1)
    stages = [StageTimes(c * one, 0 * one, m * one, d * one) for c, m, d in zip(compute, copies, reads, strict=True)]
    units = np.array([sum(copy > 0 for copy in copies)])
    return float(step_s(stages, np.minimum(slots, units), units, ring_s=ring)[0])


STAGES = st.lists(st.tuples(times.filter(bool), times, times), min_size=1, max_size=10)


@pytest.mark.slow
@given(STAGES, st.integers(1, 4), st.sampled_from([0.5, 2.0, 100.0]))
@settings(max_examples=400, deadline=None)
def test_a_step_with_a_disk_is_a_queue_of_reads_and_copies(
    stages: list[tuple[float, float, float]], slots: int, ring: float
) -> None:
    """Of what the ring has at the beginning of a step, only what is sure counts: never too fast, by a ring too slow."""
    compute, copies, reads = [list(column) for column in zip(*stages, strict=True)]
    reads = [read if copy else 0.0 for read, copy in zip(reads, copies, strict=True)]
    found, expected = (each(compute, copies, reads, slots, ring) for each in (played_ahead, reference))
    assert expected - 1e-9 <= found <= expected + ring + 1e-9


@pytest.mark.slow
@given(STAGES, st.integers(1, 4), st.integers(0, 9), st.sampled_from([0.5, 2.0]))
@settings(max_examples=300, deadline=None)
def test_one_unit_fewer_on_disk_is_never_slower(
    stages: list[tuple[float, float, float]], slots: int, which: int, ring: float
) -> None:
    compute, copies, reads = [list(column) for column in zip(*stages, strict=True)]
    fewer = [0.0 if index == which else read for index, read in enumerate(reads)]
    assert played_ahead(compute, copies, fewer, slots, ring) <= played_ahead(compute, copies, reads, slots, ring) + 1e-9


def test_the_disk_works_ahead_while_host_units_are_copied() -> None:
    """Reads of 4 s: one after the other nothing hides them, spaced out the ring does."""
    compute, copies = [0.1] * 8, [1.0] * 8
    together = played_ahead(compute, copies, [4.0, 4.0, 0, 0, 0, 0, 0, 0], 2, ring=3.0)
    apart = played_ahead(compute, copies, [4.0, 0, 0, 0, 4.0, 0, 0, 0], 2, ring=3.0)
    assert apart < together
    assert apart == pytest.approx(8.1, abs=0.5)
