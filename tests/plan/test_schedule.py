"""The promise: a slot is overwritten only after the last read of it, a unit is read only when it is there (contract 4).

First the schedule alone, as a pure function, over all small cases; then the real pipeline over links that do their
copies at the worst moments.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import StateError
from headrace.model.inventory import Inventory, Location, StorageInfo, TensorInfo
from headrace.plan.plan import Plan, UnitSpec, assemble
from headrace.plan.schedule import Schedule, chain, next_in_chain, slot_of
from headrace.runtime.prefetcher import Prefetcher
from headrace.stats import Recorder
from headrace.stores.plain_host import CpuStore
from headrace.stores.sources import fill
from headrace.stores.store import Load
from headrace.transfer.link import ComputeEvent, Link, Transfer

MAX_UNITS, MAX_SLOTS, ROUNDS = 12, 8, 3
CASES = [(n, s) for n in range(1, MAX_UNITS + 1) for s in range(1, min(n, MAX_SLOTS) + 1)]

Rule = Callable[[int, int, int], int]


def broken_rule(unit: int, num_units: int, num_slots: int) -> int:
    """Trap 1: what engines have used. Right only where ``num_slots`` divides ``num_units``."""
    return (unit + num_slots) % num_units


def violations(num_units: int, num_slots: int, rounds: int, rule: Rule) -> Iterator[str]:
    """Run the schedule; a refill goes to the slot of the unit that refills, as a graph's fixed addresses demand."""
    slots: list[int | None] = [None] * num_slots
    unread = [False] * num_slots
    for unit in range(num_slots):
        slots[slot_of(unit, num_slots)], unread[slot_of(unit, num_slots)] = unit, True
    for turn, unit in itertools.product(range(rounds), range(num_units)):
        slot = slot_of(unit, num_slots)
        if slots[slot] != unit:
            yield f"round {turn}: unit {unit} runs while slot {slot} holds {slots[slot]}"
        unread[slot] = False
        refill = rule(unit, num_units, num_slots)
        target = slot_of(refill, num_slots)
        if unread[target] and slots[target] != refill:
            yield f"round {turn}: after unit {unit}, {refill} overwrites {slots[target]} in slot {target}, not read yet"
        slots[target], unread[target] = refill, True


@pytest.mark.parametrize(("num_units", "num_slots"), CASES)
def test_no_slot_is_lost_or_read_too_early(num_units: int, num_slots: int) -> None:
    assert list(violations(num_units, num_slots, ROUNDS, next_in_chain)) == []


def test_the_simulation_sees_the_broken_rule() -> None:
    found = {case: list(violations(*case, ROUNDS, broken_rule)) for case in CASES}
    broken = {case for case in CASES if found[case]}
    assert broken == {(n, s) for n, s in CASES if n % s}
    assert any("overwrites" in text for text in itertools.chain.from_iterable(found.values()))


@pytest.mark.parametrize(("num_units", "num_slots"), CASES)
def test_chains_part_the_units(num_units: int, num_slots: int) -> None:
    chains = [list(chain(slot, num_units, num_slots)) for slot in range(num_slots)]
    assert sorted(itertools.chain.from_iterable(chains)) == list(range(num_units))
    for slot, units in enumerate(chains):
        assert {slot_of(unit, num_slots) for unit in units} == {slot}
        assert [next_in_chain(unit, num_units, num_slots) for unit in units] == [*units[1:], units[0]]


# -- the real pipeline ----------------------------------------------------------------------------------------------


class WorstLink(Link):
    """Copies at once, which shows an overwrite of what is still read, or at the last moment: shows a read too early."""

    def __init__(self, *, lazy: bool) -> None:
        self.lazy = lazy
        self.pending: list[tuple[Load, torch.Tensor]] = []
        self.log: list[tuple[str, int]] = []
        self.interrupt = False

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)

    def record_compute(self) -> ComputeEvent | None:
        return None

    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> Transfer:
        self.log.append(("copy", load.unit))
        transfer = _Done(load.unit)
        self.pending.append((load, slot))
        if not self.lazy:
            self._flush()
        return transfer

    def wait(self, transfer: Transfer, measure: bool = False) -> float:
        if self.interrupt:
            self.interrupt = False
            raise KeyboardInterrupt
        self.log.append(("wait", transfer.unit))
        self._flush()
        return 0.0

    def close(self) -> None:
        self._flush()

    def _flush(self) -> None:
        for load, slot in self.pending:
            fill(slot, load.copies)
        self.pending.clear()


@dataclass(frozen=True)
class _Done:
    unit: int
    done: bool = True


def make_pipeline(num_units: int, num_slots: int, link: Link, repeats: bool = False) -> tuple[Prefetcher, Plan]:
    """Unit ``u`` consists of ``8 + u`` bytes of value ``u``."""
    storages = [
        StorageInfo((TensorInfo((Location(f"l{u}", "w", "parameter"),), 0, (8 + u,), (1,), torch.uint8),), 8 + u)
        for u in range(num_units)
    ]
    inventory = Inventory(tuple(storages), (), {f"l{u}": "Linear" for u in range(num_units)})
    plan = assemble(inventory, [UnitSpec(f"l{u}", (s,)) for u, s in enumerate(storages)], num_slots, "cpu")
    store = CpuStore({s.name: torch.full((s.num_bytes,), u, dtype=torch.uint8) for u, s in enumerate(storages)})
    return Prefetcher(plan, store, link, Recorder(), repeats=repeats), plan


def run_unit(pipeline: Prefetcher, unit: int) -> None:
    pipeline.wait(unit)
    read = pipeline.slot_memory(unit)[: 8 + unit]
    assert read.eq(unit).all(), f"unit {unit} reads {read.unique().tolist()}"
    pipeline.release(unit)


@pytest.mark.parametrize("lazy", [False, True], ids=["at once", "at the last moment"])
def test_pipeline_over_all_small_cases(lazy: bool) -> None:
    for num_units, num_slots in CASES:
        link = WorstLink(lazy=lazy)
        pipeline, plan = make_pipeline(num_units, num_slots, link)
        pipeline.prefetch_first()
        for _ in range(ROUNDS):
            pipeline.begin_forward()
            for unit in range(num_units):
                run_unit(pipeline, unit)
            pipeline.finish_forward()
        first = sum(unit.payload_bytes for unit in plan.units[:num_slots])
        assert sum(stats.bytes_moved for stats in pipeline.stats) == first + ROUNDS * plan.moved_bytes
        assert sum(stats.misses for stats in pipeline.stats) == 0
        assert [stats.runs for stats in pipeline.stats] == [ROUNDS] * num_units
        # The first units first, then each unit that shares its slot once per round.
        copies = [unit for what, unit in link.log if what == "copy"]
        moving = [u for u in range(num_units) if len(chain(slot_of(u, num_slots), num_units, num_slots)) > 1]
        assert copies[:num_slots] == list(range(num_slots))
        assert sorted(copies[num_slots:]) == sorted(moving * ROUNDS)
        pipeline.close()


@pytest.mark.slow
@given(st.data())
@settings(deadline=None, max_examples=150)
def test_any_order_of_units_reads_the_right_bytes(data: st.DataObject) -> None:
    """Skipped, repeated, backwards (trap 10): slower, and counted, never wrong."""
    num_units, num_slots = data.draw(st.sampled_from(CASES))
    repeats = data.draw(st.booleans())
    pipeline, _ = make_pipeline(num_units, num_slots, WorstLink(lazy=data.draw(st.booleans())), repeats)
    pipeline.prefetch_first()
    for _ in range(ROUNDS):
        pipeline.begin_forward()
        for unit in data.draw(st.lists(st.integers(0, num_units - 1), max_size=20)):
            run_unit(pipeline, unit)
        pipeline.finish_forward(whole=repeats)
    if num_units == num_slots:
        assert sum(stats.misses for stats in pipeline.stats) == 0


@pytest.mark.slow
@given(st.data())
@settings(deadline=None, max_examples=150)
def test_an_order_that_a_forward_has_shown_is_expected_from_then_on(data: st.DataObject) -> None:
    num_units, num_slots = data.draw(st.sampled_from(CASES))
    pipeline, plan = make_pipeline(num_units, num_slots, WorstLink(lazy=data.draw(st.booleans())))
    pipeline.prefetch_first()
    for order in data.draw(st.lists(st.permutations(range(num_units)), min_size=1, max_size=3)):
        seen = []
        for _ in range(3):
            pipeline.begin_forward()
            for unit in order:
                run_unit(pipeline, unit)
            pipeline.finish_forward()
            totals = [(stats.misses, stats.bytes_moved) for stats in pipeline.stats]
            seen.append([sum(column) for column in zip(*totals, strict=True)])
        assert seen[2][0] == seen[1][0] == seen[0][0], "no miss"
        assert seen[2][1] - seen[1][1] == plan.moved_bytes
    pipeline.close()


@pytest.mark.parametrize("ran", [[2, 1], [2, 1, 0, 1], []], ids=str)
def test_a_forward_that_skips_or_repeats_shows_no_order(ran: list[int]) -> None:
    pipeline, _ = make_pipeline(3, 1, WorstLink(lazy=False))
    misses = []
    for order in (ran, [0, 1, 2]):
        pipeline.begin_forward()
        for unit in order:
            run_unit(pipeline, unit)
        pipeline.finish_forward()
        misses.append(sum(stats.misses for stats in pipeline.stats))
    assert misses[1] == misses[0]
    assert (misses[0] > 0) == (ran != [])


@pytest.mark.slow
@given(st.data())
@settings(deadline=None, max_examples=150)
def test_of_a_pipeline_the_latest_call_is_expected_again(data: st.DataObject) -> None:
    """With units that run several times and others that do not run at all: no miss, and no byte more than needed."""
    num_units, num_slots = data.draw(st.sampled_from(CASES))
    link = WorstLink(lazy=data.draw(st.booleans()))
    pipeline, _ = make_pipeline(num_units, num_slots, link, repeats=True)
    call = data.draw(st.lists(st.integers(0, num_units - 1), min_size=1, max_size=20))
    copies, misses = [], []
    for _ in range(3):
        link.log.clear()
        pipeline.begin_forward()
        for unit in call:
            run_unit(pipeline, unit)
        pipeline.finish_forward()
        copies.append([unit for what, unit in link.log if what == "copy"])
        misses.append(sum(stats.misses for stats in pipeline.stats))
    assert misses[2] == misses[1] == misses[0]
    # A slot is refilled where its next unit is another one, the first of the next call at the end included.
    expected = 0
    for slot in range(num_slots):
        uses = [unit for unit in call if slot_of(unit, num_slots) == slot]
        expected += sum(now != then for now, then in zip(uses, [*uses[1:], *uses[:1]], strict=True))
    assert len(copies[1]) == len(copies[2]) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "then"), [(10, 10), (10, 4), (10, 25), (900, 900)], ids=str)
def test_a_loop_is_expected_to_go_on_from_its_second_round(steps: int, then: int) -> None:
    """Also in the first call, which knows the order of the plan alone, and in one with more or fewer steps."""
    pipeline, _ = make_pipeline(9, 2, WorstLink(lazy=False), repeats=True)
    pipeline.prefetch_first()
    misses = []
    for count in (steps, then):
        pipeline.begin_forward()
        for unit in (0, 1, *(2, 3, 4, 5, 6) * count, 7, 8):
            run_unit(pipeline, unit)
        pipeline.finish_forward()
        misses.append(sum(stats.misses for stats in pipeline.stats))
    # Two units where the loop begins again, two where it ends; and where it goes on beyond what was expected of it.
    most = 4 * (1 + 5 * steps // 4096)
    assert 0 < misses[0] <= most
    assert misses[1] - misses[0] <= (0 if then == steps else most)


@pytest.mark.slow
def test_what_is_expected_of_a_pipeline_is_bounded() -> None:
    """Whatever is run by hand between calls, and however a call jumps about."""
    pipeline, _ = make_pipeline(6, 2, WorstLink(lazy=False), repeats=True)
    for _ in range(2):
        pipeline.begin_forward()
        for unit in [0, 1, *[2, 3] * 3000, *[4, 5, 4, 2, 5, 3] * 500]:
            run_unit(pipeline, unit)
        pipeline.finish_forward()
        for unit in [0, 1] * 50:
            run_unit(pipeline, unit)
    assert len(pipeline._order.schedule.order) == 2 + 6000 + 3000
    pipeline.begin_forward()
    for unit in random.Random(0).choices(range(6), k=3000):
        run_unit(pipeline, unit)
    assert len(pipeline._order.schedule.order) < 2**18
    pipeline.finish_forward(whole=False)


def test_of_a_pipeline_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would find units of other components in the slots."""
    link = WorstLink(lazy=False)
    pipeline, _ = make_pipeline(4, 2, link, repeats=True)
    pipeline.prefetch_first()
    with monkeypatch.context() as patch:
        patch.setattr(WorstLink, "capturing", True)
        with pytest.raises(StateError, match="a CUDA graph was being captured of a part of an offloaded pipeline"):
            pipeline.wait(0)
    pipeline.begin_forward()
    for unit in range(4):
        run_unit(pipeline, unit)
    pipeline.finish_forward()


def test_the_order_of_the_plan_is_a_schedule_too() -> None:
    for num_units, num_slots in CASES:
        made = Schedule(tuple(range(num_units)), num_slots)
        assert made.chains == [list(chain(slot, num_units, num_slots)) for slot in range(num_slots)]
        assert list(made.first.items()) == [(slot, slot) for slot in range(num_slots)]
        for unit in range(num_units):
            assert made.find(unit, num_units) == unit
            assert made.following(slot_of(unit, num_slots), unit) == next_in_chain(unit, num_units, num_slots)


def test_an_interrupted_wait_leaves_the_copy_on_record() -> None:
    """Ctrl-C while an abandoned copy is awaited: it goes on, and the next one must still not start before its end."""
    link = WorstLink(lazy=True)
    pipeline, _ = make_pipeline(4, 2, link)
    pipeline.prefetch_first()
    link.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        pipeline.wait(2)
    link.log.clear()
    run_unit(pipeline, 2)
    assert link.log[:2] == [("wait", 0), ("copy", 2)]


def test_a_repeated_unit_is_a_miss_and_moves_again() -> None:
    pipeline, plan = make_pipeline(4, 2, WorstLink(lazy=True))
    pipeline.prefetch_first()
    for unit in (0, 0, 1):
        run_unit(pipeline, unit)
    assert [stats.misses for stats in pipeline.stats] == [1, 0, 0, 0]
    assert pipeline.stats[0].bytes_moved == 2 * plan.units[0].payload_bytes


def test_a_thread_that_reads_a_slot_keeps_it() -> None:
    pipeline, _ = make_pipeline(2, 1, WorstLink(lazy=False))
    pipeline.prefetch_first()
    pipeline.wait(0)
    other = threading.Thread(target=run_unit, args=(pipeline, 1))
    other.start()
    other.join(0.05)
    assert other.is_alive()
    assert pipeline.slot_memory(0)[:8].eq(0).all()
    pipeline.release(0)
    other.join(10)
    assert not other.is_alive()
    assert pipeline.stats[1].misses == 0, "the unit was on its way already when the slot came free"
