"""The promise: whatever an engine captures, replays and runs by hand, compute reads the unit that it waited for.

Without a GPU: a device of two streams that does what it was given in any order that events allow. The pipeline is the
real one; the link of device_model.py gives its copies, marks and waits to that device, or to the graph captured.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from device_model import BYTES, Device, DeviceLink, Graph, Op, plan_and_store
from headrace.errors import HeadraceWarning, SlotConflictError, StateError
from headrace.graphs.own_graphs import capturing, replaying
from headrace.runtime import forwards
from headrace.runtime.prefetcher import Prefetcher
from headrace.runtime.slot import SlotState
from headrace.stats import Recorder
from headrace.stores.store import Load
from headrace.transfer.link import ComputeEvent, Transfer

# By seed: which units are coded.
CODED: list[Callable[[int], bool]] = [lambda unit: False, lambda unit: True, lambda unit: unit % 3 < 2]


class Engine:
    """Runs forwards over a pipeline as an engine does: by hand, captured, replayed after an announcement."""

    def __init__(self, num_units: int, num_slots: int, seed: int, announced: bool) -> None:
        self.device = Device(seed)
        self.link = DeviceLink(self.device)
        self.plan, store = plan_and_store(num_units, num_slots, CODED[seed % len(CODED)])
        self.pipeline = Prefetcher(
            self.plan, store, self.link, Recorder(), replays_announced=announced, break_capture=self._break_capture
        )
        self.pipeline.prefetch_first()
        self._random = random.Random(seed)
        self.graphs: list[Graph] = []
        self.pieces: list[list[Graph]] = []
        self.segmented: list[list[Callable[[], None]]] = []
        self._segments: list[Callable[[], None]] | None = None  # of the capture under way
        self.reads = 0

    def forward(self, skipped: Sequence[int] = ()) -> None:
        self.pipeline.begin_forward()
        for unit in range(len(self.plan.units)):
            if unit not in skipped:
                self.run_unit(unit)
        self.pipeline.finish_forward()

    def run_unit(self, unit: int) -> None:
        self.pipeline.wait(unit)
        memory = self.pipeline.slot_memory(unit)
        self.link.give(self.link.current, self._reader(unit, memory))
        self.pipeline.release(unit)

    def _reader(self, unit: int, memory: torch.Tensor) -> Callable[[], None]:
        def read() -> None:
            found = memory[:BYTES].unique().tolist()
            assert found == [unit], f"unit {unit} read {found}"
            self.reads += 1

        return read

    def skip_last(self) -> None:
        self.forward([len(self.plan.units) - 1])

    def skip_first(self) -> None:
        self.forward([0])

    def capture(self, forward: Callable[[], None] | None = None) -> None:
        self.pipeline.wait_all()
        self.link.graph = Graph()
        (forward or self.forward)()
        self.pipeline.wait_all()
        self.graphs.append(self.link.graph)
        self.link.graph = None

    def capture_pieces(self) -> None:
        """Each unit in a graph of its own, between the hooks of a model that runs by hand."""
        pieces: list[Graph] = []
        self.pipeline.begin_forward()
        for unit in range(len(self.plan.units)):
            self.pipeline.wait_all()
            self.link.graph = Graph()
            self.run_unit(unit)
            self.pipeline.wait_all()
            pieces.append(self.link.graph)
            self.link.graph = None
        self.pipeline.finish_forward()
        self.pieces.append(pieces)

    def capture_segments(self) -> None:
        """Graphs with host code in between, which a replay runs without the model."""
        self.pipeline.wait_all()
        self._segments = []
        self.link.graph = Graph()
        self.forward()
        self.pipeline.wait_all()
        self._end_segment()
        self.segmented.append(self._segments)
        self._segments = None

    def _break_capture(self, action: Callable[[], None]) -> bool:
        if self._segments is None or self.link.graph is None:
            return False
        self._end_segment()
        action()
        self._segments.append(action)
        self.link.graph = Graph()
        return True

    def _end_segment(self) -> None:
        graph, self.link.graph = self.link.graph, None
        assert graph is not None
        assert self._segments is not None
        assert all(stream == "compute" for stream, _, _ in graph.ops), "a copy in a graph that does not join it"
        self._segments.append(lambda: graph.launch(self.device))

    def replay_segments(self, which: int) -> None:
        self.pipeline.wait_all()
        for action in self.segmented[which % len(self.segmented)]:
            action()

    def capture_cuts(self) -> None:
        """What lies between the units, in graphs of its own: a model that is cut at both ends of each unit."""
        self.pipeline.begin_forward()
        for unit in range(len(self.plan.units)):
            self.pipeline.wait_all()
            self.link.graph = Graph()
            self.pipeline.wait_all()
            self.link.graph = None
            self.run_unit(unit)
        self.pipeline.finish_forward()

    def replay_pieces(self, which: int) -> None:
        self.pipeline.begin_forward()
        for graph in self.pieces[which % len(self.pieces)]:
            self.pipeline.wait_all()
            graph.launch(self.device)
        self.pipeline.finish_forward()

    def replay(self, which: int) -> None:
        self.pipeline.wait_all()
        self.graphs[which % len(self.graphs)].launch(self.device)

    def has_graphs(self, step: str) -> bool:
        """Whether there is what ``step`` replays."""
        return bool({"replay": self.graphs, "replay_segments": self.segmented}.get(step, True))

    def run(self, step: str, which: int) -> None:
        getattr(self, step)(which) if step.startswith("replay") else getattr(self, step)()

    def run_all(self, steps: Sequence[str], seed: int) -> None:
        for number, step in enumerate(steps):
            if self.has_graphs(step):
                self.run(step, seed + number)
        self.device.finish()

    def announce(self) -> None:
        """Of a replay of something else, a draft model perhaps."""
        self.pipeline.wait_all()

    def prepare(self) -> None:
        self.pipeline.finish_forward(whole=False)


class ForeignEngine(Engine):
    """Captures and replays as torch's cudagraph trees do, which call nothing of ours before or after: whole forwards,
    and forwards that are cut anywhere, of which some parts are graphs and others run."""

    def __init__(self, num_units: int, num_slots: int, seed: int) -> None:
        super().__init__(num_units, num_slots, seed, announced=False)
        self.parts: list[list[Graph | list[Callable[[], None]]]] = []

    def _captured(self, actions: Sequence[Callable[[], None]]) -> Graph:
        self.device.finish()  # torch.cuda.graph synchronizes
        self.link.graph = Graph()
        for action in actions:
            action()
        graph, self.link.graph = self.link.graph, None
        graph.launch(self.device)
        return graph

    def capture(self, forward: Callable[[], None] | None = None) -> None:
        self.graphs.append(self._captured([forward or self.forward]))

    def _actions(self, whole: bool) -> Iterator[Callable[[], None]]:
        yield lambda: self.pipeline.begin_forward(whole=whole)
        for unit in range(len(self.plan.units)):
            memory = self.pipeline.slot_memory(unit)
            yield partial(self.pipeline.wait, unit)
            yield lambda unit=unit, memory=memory: self.link.give(self.link.current, self._reader(unit, memory))
            yield partial(self.pipeline.release, unit)
        yield self.pipeline.finish_forward

    def capture_parts(self) -> None:
        actions = list(self._actions(whole=False))
        parts: list[Graph | list[Callable[[], None]]] = []
        start, in_graph = 0, False
        while start < len(actions):
            if start % 3 == 1:  # not between the wait and the release of a unit, which run in the same way
                in_graph = self._random.random() < 0.6
            end = self._random.randint(start + 1, len(actions))
            part, start = actions[start:end], end
            if in_graph:
                parts.append(self._captured(part))
            else:
                parts.append(part)
                for action in part:
                    action()
        self.parts.append(parts)

    def capture_one(self) -> None:
        """A module by itself, with no forward around it."""
        unit = self._random.randrange(len(self.plan.units))
        self.graphs.append(self._captured([lambda: self.run_unit(unit)]))

    def replay_parts(self, which: int) -> None:
        for part in self.parts[which % len(self.parts)]:
            if isinstance(part, Graph):
                part.launch(self.device)
            else:
                for action in part:
                    action()

    def replay(self, which: int) -> None:
        self.graphs[which % len(self.graphs)].launch(self.device)

    def has_graphs(self, step: str) -> bool:
        return bool({"replay": self.graphs, "replay_parts": self.parts}.get(step, True))


class OwnEngine(ForeignEngine):
    """Graphs that this project captures itself, between eager forwards."""

    def __init__(self, num_units: int, num_slots: int, seed: int) -> None:
        super().__init__(num_units, num_slots, seed)
        self.copied: list[list[int]] = []

    def disown(self) -> None:
        """The graphs are freed."""
        self.device.finish()
        self.graphs, self.copied = [], []
        self.pipeline.replays.release_graphs()

    def capture(self, forward: Callable[[], None] | None = None) -> None:
        self.device.finish()  # torch.cuda.graph synchronizes
        with capturing(self.pipeline) as copied:
            self.link.graph = Graph()
            (forward or self.forward)()
            self.graphs.append(self.link.graph)
            self.link.graph = None
        self.copied.append(copied)
        self.replay(-1)

    def replay(self, which: int) -> None:
        with replaying(self.pipeline, self.copied[which % len(self.graphs)]):
            self.graphs[which % len(self.graphs)].launch(self.device)


class RoughEngine(Engine):
    """Also stops in the middle, runs modules by hand, gives captures up, and captures forwards that skip modules."""

    def cut(self, reading: bool = False) -> None:
        """A module raises; ``reading``: inside compiled code, which does not release then."""
        self.pipeline.begin_forward()
        last = self._random.randrange(len(self.plan.units))
        for unit in range(last):
            self.run_unit(unit)
        if reading:
            self.pipeline.wait(last)
            self.link.give(self.link.current, self._reader(last, self.pipeline.slot_memory(last)))
        self.pipeline.finish_forward(whole=False)

    def backwards(self) -> None:
        """From the last unit to the first: before there are graphs, the order that is expected from then on."""
        self.pipeline.begin_forward()
        for unit in reversed(range(len(self.plan.units))):
            self.run_unit(unit)
        self.pipeline.finish_forward()

    def capture_backwards(self) -> None:
        self.capture(self.backwards)

    def cut_while_reading(self) -> None:
        self.cut(reading=True)

    def by_hand(self) -> None:
        self.run_unit(self._random.randrange(len(self.plan.units)))

    def abort(self) -> None:
        self.capture(self.cut)
        self.graphs.pop()

    def capture_some(self) -> None:
        units = range(len(self.plan.units))
        self.capture(lambda: self.forward([unit for unit in units if self._random.random() < 0.4]))


KINDS = ["forward", "capture", "replay", "replay", "prepare", "skip_last", "skip_first", "announce", "capture_cuts"]
KINDS += ["capture_segments", "replay_segments"]
FOREIGN = ["forward", "capture", "replay", "skip_last", "capture_parts", "replay_parts", "capture_one"]
OWN = ["forward", "capture", "replay", "replay", "skip_last", "run_first", "disown"]
PIECES = ["forward", "capture", "replay", "capture_pieces", "replay_pieces", "replay_pieces"]
SEEDS = st.integers(0, 1000)


def lists_of(kinds: list[str], min_size: int = 1, max_size: int = 14) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(kinds), min_size=min_size, max_size=max_size)


STEPS = lists_of(KINDS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*offloaded modules did not run")
@given(STEPS, st.integers(1, 7), st.integers(1, 4), SEEDS, st.booleans())
@settings(max_examples=400, deadline=None)
def test_every_read_finds_its_unit(
    steps: list[str], num_units: int, num_slots: int, seed: int, announced: bool
) -> None:
    engine = Engine(num_units, num_slots, seed, announced)
    expected = 0
    for number, step in enumerate(steps):
        if not engine.has_graphs(step):
            continue
        whole = step in ("forward", "replay", "replay_segments", "capture_cuts")
        expected += num_units * whole + (num_units - 1) * step.startswith("skip")
        engine.run(step, seed + number)
    engine.device.finish()
    assert engine.reads == expected
    skips = any(step.startswith("skip") for step in steps)
    assert skips or all(stats.misses == 0 for stats in engine.pipeline.stats)


@pytest.mark.slow
@given(STEPS, st.integers(1, 7), st.integers(1, 4), SEEDS)
@settings(max_examples=200, deadline=None)
def test_every_forward_leaves_the_first_units_in_the_slots(
    steps: list[str], num_units: int, num_slots: int, seed: int
) -> None:
    """That is what graphs begin with; once there are some, the slot of the last unit is held back instead."""
    engine = Engine(num_units, num_slots, seed, announced=False)
    for step in steps:
        if not step.startswith("replay"):
            engine.run(step, seed)
        held_back = engine.pipeline.replays.held_back
        for slot in engine.pipeline.replays.live:
            if slot.index == held_back:
                assert slot.state is SlotState.HELD_BACK
            else:
                assert slot.state in (SlotState.COPYING, SlotState.READY)
                assert slot.unit == slot.index


def test_an_announced_replay_gets_slots_that_hold_nothing() -> None:
    """It may leave any unit in them; a unit that has its slot alone stays."""
    engine = Engine(3, 2, 0, announced=True)
    engine.capture()
    engine.replay(0)
    assert [slot.state for slot in engine.pipeline.replays.slots()] == [SlotState.EMPTY, SlotState.READY]
    engine.prepare()
    assert [slot.state for slot in engine.pipeline.replays.live] == [SlotState.COPYING, SlotState.READY]
    engine.forward()
    assert [slot.state for slot in engine.pipeline.replays.live] == [SlotState.HELD_BACK, SlotState.READY]


@pytest.mark.parametrize("whole", [True, False], ids=["beside whole graphs", "alone"])
def test_a_replay_in_segments_copies_each_unit_once(whole: bool) -> None:
    engine = Engine(6, 2, 0, announced=True)
    engine.capture_segments()
    if whole:
        engine.capture()
        engine.replay(0)
        engine.prepare()
    engine.replay_segments(0)
    for _ in range(3):
        before = sum(stats.copies for stats in engine.pipeline.stats)
        engine.replay_segments(0)
        assert sum(stats.copies for stats in engine.pipeline.stats) - before == 6
    engine.device.finish()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a CUDA graph holds a part of a forward")
@given(lists_of(FOREIGN), st.integers(1, 7), st.integers(1, 4), SEEDS)
# A copy that the beginning of a forward starts, beside the replay of a part: found once in 14,000 runs.
@example(["capture_parts", "skip_last", "capture_parts", "replay_parts", "replay", "replay_parts"], 2, 1, 2)
@settings(max_examples=400, deadline=None)
def test_every_read_finds_its_unit_in_captures_of_others(
    steps: list[str], num_units: int, num_slots: int, seed: int
) -> None:
    """A graph of a part of a forward leaves no copy to its end, and trusts none from before it."""
    engine = ForeignEngine(num_units, num_slots, seed)
    engine.run_all(steps, seed)
    assert engine.reads >= num_units * sum(step in ("forward", "capture", "capture_parts") for step in steps)


@pytest.mark.slow
@given(lists_of(OWN), st.integers(1, 7), st.integers(1, 4), SEEDS)
@settings(max_examples=400, deadline=None)
def test_every_read_finds_its_unit_beside_graphs_of_our_own(
    steps: list[str], num_units: int, num_slots: int, seed: int
) -> None:
    engine = OwnEngine(num_units, num_slots, seed)
    expected = 0
    for number, step in enumerate(steps):
        if engine.has_graphs(step):
            whole = step in ("forward", "capture", "replay")
            expected += num_units * whole + (num_units - 1) * (step == "skip_last") + (step == "run_first")
            engine.run_unit(0) if step == "run_first" else engine.run(step, seed + number)
    engine.device.finish()
    assert engine.reads == expected
    engine.disown()
    reads = engine.reads
    ForeignEngine.capture(engine)  # type: ignore[arg-type]
    engine.forward()
    engine.device.finish()
    assert engine.reads == reads + 2 * num_units


def test_copies_of_our_own_replays_are_counted() -> None:
    """Each replay copies every unit once, in the graph or before it."""
    engine = OwnEngine(5, 2, 0)
    engine.capture()
    before = [stats.copies for stats in engine.pipeline.stats]
    for _ in range(3):
        engine.replay(0)
    assert [stats.copies - earlier for stats, earlier in zip(engine.pipeline.stats, before, strict=True)] == [3] * 5


def test_copies_of_the_next_step_run_between_two_of_our_own_replays() -> None:
    engine = OwnEngine(4, 2, 0)
    engine.capture()
    engine.device.finish()
    never = Op(lambda: None, [Op(lambda: None)])  # generate() chooses a token
    engine.replay(0)
    engine.link.give("compute", never.run, never.after)
    engine.device.run_ready()
    assert first_units_there(engine)


def test_a_replay_of_our_own_begins_before_the_second_slot_is_filled() -> None:
    """Compute waits for each copy where it reads it, so the link does not idle until the first slot is refilled."""
    engine = OwnEngine(4, 2, 0)
    engine.capture()
    engine.device.finish()
    stuck = Op(lambda: None, [Op(lambda: None)])  # the copy into slot 1 does not end
    engine.device.streams["copy"].append(stuck)
    engine.link.leave_copy_event(1)
    reads = engine.reads
    engine.graphs[0].launch(engine.device)
    engine.device.run_ready()
    assert engine.reads == reads + 1


def test_our_own_graphs_and_others_exclude_one_another() -> None:
    engine = OwnEngine(4, 2, 0)
    engine.capture()
    with pytest.raises(StateError, match="generate\\(\\) has graphs of its own"):
        Engine.capture(engine)
    engine.link.graph = None
    engine.replay(0)
    engine.forward()
    engine.device.finish()
    foreign = ForeignEngine(4, 2, 0)
    foreign.capture()
    assert not foreign.pipeline.replays.can_capture()


@pytest.mark.parametrize("stuck", range(4))
def test_a_replay_of_our_own_after_compiled_code_that_raised(stuck: int) -> None:
    """All of the model was one graph, so nothing has ended its forward, and the slots hold what that had come to."""
    engine = OwnEngine(4, 2, 0)
    engine.capture()
    engine.pipeline.begin_forward()
    for unit in range(stuck):
        engine.run_unit(unit)
    engine.pipeline.wait(stuck)
    engine.device.finish()
    for _ in range(2):
        engine.replay(0)
        engine.device.finish()
    engine.forward()
    engine.device.finish()


def test_a_replay_waits_for_forwards_of_other_threads() -> None:
    """A module of one that has its unit, and has not launched what reads it, would find another."""
    engine = OwnEngine(4, 2, 0)
    engine.capture()
    inside, go_on, replayed = threading.Event(), threading.Event(), threading.Event()

    def other() -> None:
        engine.pipeline.begin_forward()
        inside.set()
        go_on.wait(60)
        assert not replayed.is_set()
        engine.pipeline.finish_forward()

    def mine() -> None:
        engine.replay(0)
        replayed.set()

    threads = [threading.Thread(target=other), threading.Thread(target=mine)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    assert not replayed.wait(0.2)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert replayed.is_set()


@pytest.mark.parametrize("then", ["another graph", "no graph"])
def test_a_graph_that_ends_inside_its_forward_is_an_error(then: str) -> None:
    """A compiler has cut what was traced as one graph: its replay would leave other units than the next one expects."""
    engine = ForeignEngine(4, 2, 0)
    begin, *middle, finish = engine._actions(whole=True)
    engine._captured([begin, *middle[:6]])
    with pytest.raises(StateError, match="a CUDA graph ended inside a forward"):
        engine._captured([*middle[6:], finish]) if then == "another graph" else middle[6]()


def test_a_part_of_a_forward_in_a_graph_is_reported() -> None:
    engine = ForeignEngine(4, 2, 0)
    with pytest.warns(HeadraceWarning, match="a CUDA graph holds a part of a forward"):
        engine.capture_one()


WRONGS = ["cut", "cut_while_reading", "by_hand", "abort", "capture_some"]
ROUGH = lists_of([*KINDS[:5], *KINDS[7:], "backwards", "capture_backwards", *WRONGS], min_size=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*offloaded modules did not run")
@given(ROUGH, st.integers(1, 6), st.integers(1, 4), SEEDS, st.booleans())
@settings(max_examples=400, deadline=None)
def test_every_read_finds_its_unit_after_what_went_wrong(
    steps: list[str], num_units: int, num_slots: int, seed: int, announced: bool
) -> None:
    engine = RoughEngine(num_units, num_slots, seed, announced)
    engine.run_all(steps, seed)


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "joined"])
def test_a_graph_has_the_order_of_the_forward_before_it(announced: bool) -> None:
    """Each unit is then copied once in it, and every replay finds what it needs."""
    engine = RoughEngine(7, 3, 0, announced)
    engine.backwards()
    missed = sum(stats.misses for stats in engine.pipeline.stats)
    assert missed > 0
    engine.capture_backwards()
    for _ in range(3):
        engine.replay(0)
        engine.prepare()
    engine.backwards()
    engine.device.finish()
    assert sum(stats.misses for stats in engine.pipeline.stats) == missed
    assert all(stats.captured_copies <= 1 for stats in engine.pipeline.stats)


@pytest.mark.filterwarnings("ignore:.*offloaded modules did not run")
@pytest.mark.parametrize("first", ["forward", "capture"])
@pytest.mark.parametrize("announced", [True, False], ids=["announced", "joined"])
def test_a_module_run_by_hand_leaves_in_its_slot_what_a_replay_expects(first: str, announced: bool) -> None:
    for unit in range(5):
        engine = Engine(5, 2, unit, announced)
        getattr(engine, first)()
        engine.run_unit(unit)
        engine.capture()
        engine.run_unit(unit) if first == "capture" else None
        engine.replay(0)
        engine.forward()
        engine.device.finish()


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "joined"])
def test_a_module_run_by_hand_on_another_stream_overtakes_no_forward(announced: bool) -> None:
    """What has read a slot whose refill is left to the next forward still counts."""
    for seed in range(20):
        engine = Engine(4, 2, seed, announced)
        engine.capture()
        engine.forward()
        engine.link.current = "another"
        engine.run_unit(seed % 4)
        engine.device.finish()


def test_two_runs_at_once_of_a_coded_unit_on_two_streams_both_count() -> None:
    """As of two threads: what is decoded next waits for the reads of both, in whatever order they end."""
    for streams in (("compute", "another"), ("another", "compute")):
        engine = Engine(3, 3, 1, announced=False)
        pipeline, memory, late = engine.pipeline, engine.pipeline.slot_memory(0), Op(lambda: None)
        pipeline.begin_forward()
        for engine.link.current in streams:
            pipeline.wait(0)
        engine.device.finish()
        for engine.link.current in streams:
            after = [late] if engine.link.current == streams[0] else []
            engine.link.give(engine.link.current, engine._reader(0, memory), after)
            pipeline.release(0)
        engine.run_unit(1)
        engine.device.run_ready()
        late.done = True
        pipeline.finish_forward()
        engine.device.finish()
        assert engine.reads == 3


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "joined"])
def test_a_replay_after_compiled_code_that_raised(announced: bool) -> None:
    """Between its wait and its release, so that the slot still counts as being read."""
    for stuck in range(4):
        engine = Engine(4, 2, stuck, announced)
        engine.capture()
        engine.forward()
        engine.pipeline.begin_forward()
        for unit in range(stuck):
            engine.run_unit(unit)
        engine.pipeline.wait(stuck)
        engine.pipeline.finish_forward(whole=False)
        engine.replay(0)
        engine.device.finish()


@pytest.mark.filterwarnings("ignore:.*offloaded modules did not run")
def test_copies_wait_for_a_graph_that_leaves_no_mark() -> None:
    """It skips the last unit of a slot; the mark of that slot is then another graph's, and long reached."""
    for seed in range(30):
        engine = Engine(4, 1, seed, announced=True)
        engine.capture()
        engine.capture(engine.skip_last)
        for which in (0, 1, 0, 1):
            engine.replay(which)
            engine.prepare()
        engine.device.finish()


def test_a_unit_that_has_its_slot_alone_gathers_no_marks() -> None:
    """Each is an event, and nothing waits for it."""
    engine = Engine(3, 2, 0, announced=False)
    for _ in range(20):
        engine.forward()
    assert all(len(slot.events) <= 1 for slot in engine.pipeline.replays.live)


def test_copies_for_the_next_replay_wait_for_the_last_read_and_not_for_the_end() -> None:
    """They run on beside what the engine does after a replay, which is the point of it."""
    engine = Engine(4, 2, 0, announced=True)
    engine.capture()
    engine.replay(0)
    engine.device.finish()
    never = Op(lambda: None, [Op(lambda: None)])  # sampling that does not end
    engine.replay(0)
    engine.link.give("compute", never.run, never.after)
    engine.prepare()
    engine.device.run_ready()
    assert engine.pipeline.slot_memory(0).unique().tolist() == [0]
    assert engine.pipeline.slot_memory(1).unique().tolist() == [1]


def first_units_there(engine: Engine) -> bool:
    return all(engine.pipeline.slot_memory(unit).unique().tolist() == [unit] for unit in range(2))


def test_copies_for_the_next_forward_stand_behind_its_inputs() -> None:
    """Behind a large batch, which runs without a graph: a copy engine would make the inputs wait for our copies."""
    engine = Engine(4, 2, 0, announced=True)
    engine.capture()
    engine.forward()
    engine.prepare()
    engine.device.finish()
    assert not first_units_there(engine)
    inputs = engine.link.give("compute", lambda: None)
    held = Op(lambda: None, [Op(lambda: None)])
    inputs_under_way = engine.device.give("compute", held)
    engine.pipeline.begin_forward()
    engine.device.run_ready()
    assert inputs.done
    assert not inputs_under_way.done
    assert not first_units_there(engine)
    held.after.clear()
    engine.device.finish()
    assert first_units_there(engine)


def test_a_replay_behind_an_eager_forward_finds_its_first_units() -> None:
    engine = Engine(4, 2, 0, announced=True)
    engine.capture()
    engine.forward()
    engine.pipeline.wait_all()
    engine.device.finish()
    assert first_units_there(engine)


def test_without_graphs_a_forward_copies_ahead_for_the_next() -> None:
    """Then small batches run like that, too, and the link is what they wait for."""
    engine = Engine(4, 2, 0, announced=True)
    engine.forward()
    engine.device.finish()
    assert first_units_there(engine)


def test_where_only_pieces_are_graphs_a_forward_copies_ahead_for_the_next() -> None:
    """Then small batches run no other way than large ones, and the link is what they wait for."""
    engine = Engine(4, 2, 0, announced=True)
    engine.capture_cuts()
    engine.forward()
    engine.prepare()
    engine.device.finish()
    assert first_units_there(engine)


def test_the_test_sees_a_replay_that_was_not_announced() -> None:
    engine = Engine(4, 2, 0, announced=True)
    engine.capture()
    engine.replay(0)
    engine.graphs[0].launch(engine.device)
    with pytest.raises(AssertionError, match="unit 0 read"):
        engine.device.finish()


def test_the_test_sees_a_copy_that_waits_for_nothing() -> None:
    class Careless(DeviceLink):
        def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> Transfer:
            return super().copy(load, slot, ())

    wrong = 0
    for seed in range(20):
        engine = Engine(4, 2, seed, announced=True)
        engine.link.__class__ = Careless
        try:
            engine.forward()
            engine.device.finish()
        except AssertionError:
            wrong += 1
    assert wrong > 0


def test_copies_are_what_the_store_says() -> None:
    """The link above reads them itself, so they have to be right."""
    plan, store = plan_and_store(2, 1)
    assert [(copy.dst_offset, copy.num_bytes) for copy in store.load(plan.units[1]).copies] == [(0, BYTES)]


@pytest.mark.slow
@given(lists_of(PIECES, max_size=12), st.integers(1, 6), st.integers(1, 3), SEEDS)
@settings(max_examples=300, deadline=None)
def test_graphs_of_pieces(steps: list[str], num_units: int, num_slots: int, seed: int) -> None:
    """Where an engine keeps units inside the graphs of pieces, replays are not announced as such."""
    engine = Engine(num_units, num_slots, seed, announced=False)
    expected = 0
    for number, step in enumerate(steps):
        kind, _, pieces = step.partition("_")
        if kind == "replay" and not (engine.pieces if pieces else engine.graphs):
            continue
        expected += num_units * (kind != "capture")
        getattr(engine, step)(*([seed + number] if kind == "replay" else []))
    engine.device.finish()
    assert engine.reads == expected


@pytest.mark.parametrize("what", ["replay", "write"])
def test_what_waits_for_a_stuck_forward_of_another_thread_is_an_error(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(forwards, "CONFLICT_TIMEOUT_S", 0.05)
    engine = Engine(3, 2, 0, announced=False)
    pipeline, done, begun = engine.pipeline, threading.Event(), threading.Event()

    def stuck() -> None:
        pipeline.begin_forward()
        pipeline.wait(0)
        begun.set()
        done.wait(10)
        pipeline.release(0)
        pipeline.finish_forward()

    other = threading.Thread(target=stuck)
    other.start()
    assert begun.wait(10)
    entered = []
    message = r"another thread has been running for .* one offloaded model per thread"
    waiting = replaying(pipeline) if what == "replay" else pipeline.rewriting(0)
    with pytest.raises(SlotConflictError, match=message), waiting:
        entered.append(what)
    done.set()
    other.join()
    assert entered == []
    engine.forward()


def test_compiled_code_that_raised_in_another_thread_is_named_where_it_holds_up_remove(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs no op at its end, so the thread is taken to be inside a forward until it begins another one."""
    monkeypatch.setattr(forwards, "STOP_TIMEOUT_S", 0.05)
    engine = Engine(3, 2, 0, announced=False)
    raised, again, ran, done = (threading.Event() for _ in range(4))

    def other() -> None:
        engine.pipeline.begin_forward()
        engine.pipeline.wait(0)
        raised.set()
        again.wait(10)
        engine.forward()
        ran.set()
        done.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert raised.wait(10)
    with pytest.raises(StateError, match=r"compiled code raised.*call the model once more in that thread"):
        engine.pipeline.stop(graphs_released=False)
    again.set()
    assert ran.wait(10)
    engine.pipeline.stop(graphs_released=False)
    done.set()
    thread.join()
