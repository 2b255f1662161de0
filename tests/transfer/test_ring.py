"""The promise: through the staging ring every unit arrives whole, in any order, replayed or not; failures never hang.

The real pipeline over the real ring and its threads; only the stream is a thread of the test (tests/support/rings.py).
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from checks import eventually, raising
from headrace.errors import TransferError
from headrace.plan.schedule import next_in_chain, steady_order
from headrace.plan.staging_ring import STATUS_BYTES, RingLayout, lay_out_ring
from headrace.stats import StagingStats
from headrace.stores.file_reads import DiskOptions
from headrace.testing import assert_same_bits, offload_over
from headrace.transfer.ring import Counter, RingMemory
from models import QuantStack, Stack, all_layers, rows, save
from rings import PATIENCE_S, FakeRingLink, Machine, Op

Make = Callable[..., Machine]
CASES = [(n, s) for n in range(1, 9) for s in range(1, min(n, 4) + 1)]


@pytest.fixture
def make() -> Iterator[Make]:
    """Machines that are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(contextlib.closing(Machine(*args, **options)))


class TestLayout:
    @given(st.lists(st.integers(1, 100_000), min_size=1, max_size=12), st.data())
    def test_any_stretch_of_the_cycle_lies_in_different_entries(self, sizes: list[int], data: st.DataObject) -> None:
        slots = data.draw(st.integers(1, len(sizes)))
        most = data.draw(st.integers(1, 20))
        layout = lay_out_ring(sizes, slots, 4096, most)
        assert layout.num_entries <= most
        length = sum(len(layout.of_unit[unit]) for unit in set(steady_order(len(sizes), slots)))
        laps = -(-length // most)
        depth = length // laps if laps else 0
        for start in range(length):
            entries = [layout.pieces[(start + i) % length].entry for i in range(depth)]
            assert len(set(entries)) == depth
        assert all(0 <= piece.entry < layout.num_entries for piece in layout.pieces)

    @given(st.lists(st.integers(1, 100_000), min_size=1, max_size=12), st.data())
    def test_pieces_make_up_the_units(self, sizes: list[int], data: st.DataObject) -> None:
        layout = lay_out_ring(sizes, data.draw(st.integers(1, len(sizes))), 4096, 5)
        assert sorted(p for positions in layout.of_unit.values() for p in positions) == list(range(len(layout.pieces)))
        for unit, size in enumerate(sizes):
            at = 0
            for position in layout.of_unit[unit]:
                piece = layout.pieces[position]
                assert (piece.unit, piece.start) == (unit, at)
                assert 0 < piece.num_bytes <= layout.entry_bytes
                at += piece.num_bytes
            assert at == size

    @given(st.integers(1, 1 << 22), st.integers(1, 1 << 20))
    def test_a_unit_is_cut_into_few_pieces_of_one_size(self, size: int, most: int) -> None:
        layout = lay_out_ring([size] * 2, 1, most)
        pieces = [layout.pieces[position] for position in layout.of_unit[0]]
        assert len(pieces) <= -(-size // (-(-most // 4096) * 4096))
        assert {piece.num_bytes for piece in pieces[:-1]} <= {layout.entry_bytes}
        assert pieces[-1].num_bytes > layout.entry_bytes - 4096 * len(pieces)

    @pytest.mark.parametrize(("units", "slots"), CASES)
    def test_the_cycle_is_the_order_of_refills(self, units: int, slots: int) -> None:
        layout = lay_out_ring([5000] * units, slots, 4096, 4)
        moving = [u for u in range(units) if next_in_chain(u, units, slots) != u]
        walked, position = [], 0
        for _ in range(2 * len(moving)):
            walked.append(layout.pieces[position].unit)
            position = layout.following[position] or 0
        assert walked[::2] == steady_order(units, slots)
        assert sorted(walked[::2]) == moving

    def test_host_memory_is_bounded(self) -> None:
        layout = lay_out_ring([3 << 30] * 60, 2)
        assert layout.num_bytes <= 129 << 20
        assert len({p.entry for p in layout.pieces}) == layout.num_entries

    def test_a_small_model_takes_no_more_than_it_weighs(self) -> None:
        layout: RingLayout = lay_out_ring([4096] * 6, 2)
        assert layout.num_bytes < 8 * 4096, "a page is for the status"


class TestBytes:
    @pytest.mark.parametrize(("units", "slots"), CASES)
    @pytest.mark.parametrize("entries", [1, 2, 3, 8])
    def test_every_small_case_live_and_replayed(self, make: Make, units: int, slots: int, entries: int) -> None:
        machine = make(units, slots, max_entries=entries)
        machine.forward()
        machine.forward()
        graphs = [machine.capture(), machine.capture()]
        for turn in range(3):
            machine.link.stream.replay(graphs[turn % 2])
        machine.forward()
        machine.link.stream.replay(graphs[0])
        machine.check()

    @pytest.mark.slow
    @settings(deadline=None, max_examples=40)
    @given(st.data())
    def test_any_order_of_units_at_any_speed(self, data: st.DataObject) -> None:
        """Skipped, repeated, backwards; eager, captured, replayed in any order."""
        units, slots = data.draw(st.sampled_from(CASES))
        pause_s = data.draw(st.sampled_from([0.0, 0.001]))
        max_entries = data.draw(st.integers(1, 5))
        orders = st.lists(st.integers(0, units - 1), max_size=8)
        kinds = st.sampled_from(["live", "odd", "capture", "odd graph", "replay"])
        steps = data.draw(st.lists(st.tuples(kinds, orders), max_size=8))
        # Nothing is drawn from here on: hypothesis may end an example at a draw, and the machine would never be closed.
        machine = Machine(units, slots, pause_s, max_entries=max_entries)
        graphs: list[list[Op]] = []
        for kind, order in steps:
            if kind == "live":
                machine.forward()
            elif kind == "odd":
                machine.forward(order)
            elif kind == "replay":
                for graph in graphs[-2:]:
                    machine.link.stream.replay(graph)
            else:
                machine.check()  # torch synchronises before a capture
                graphs.append(machine.capture(None if kind == "capture" else order))
        machine.check()
        machine.close()

    def test_a_forward_without_its_last_unit_before_a_replay(self, make: Make) -> None:
        """Found by the test above: the slot that is held back kept a unit, which the replay then replaced."""
        machine = make(2, 1)
        graph = machine.capture()
        machine.forward([])
        machine.link.stream.replay(graph)
        machine.checked_forward()

    @pytest.mark.parametrize(("units", "slots"), [(8, 2), (7, 2), (7, 3), (8, 4)])
    def test_in_the_steady_state_nothing_is_read_twice(self, make: Make, units: int, slots: int) -> None:
        machine = make(units, slots, max_entries=4)
        machine.read_nothing_twice()

    @pytest.mark.slow
    def test_a_piece_left_out_does_not_hold_up_reading_ahead(self, make: Make) -> None:
        """The first forward begins out of the order of the cycle, and leaves out what was read ahead for it."""
        machine = make(5, 2, max_entries=8)
        server, layout = machine.link.server, machine.link.layout
        length = sum(len(layout.of_unit[unit]) for unit in steady_order(5, 2))
        full = min(layout.num_entries, length)

        def catch_up() -> None:
            machine.check()
            assert eventually(lambda: sum(map(server._holds, [*server._ahead])) >= full - 1), "read-ahead stopped"

        # The server keeps pace with the first forward; all of the ring between two looks of it would be out of order.
        machine.pipeline.begin_forward()
        for unit in range(5):
            machine.run(unit)
            catch_up()
        machine.pipeline.finish_forward(whole=True)
        catch_up()
        before = machine.link.ring.memory.stats
        for _ in range(4):
            machine.forward()
            catch_up()
        assert machine.link.ring.memory.stats.misses == before.misses

    def test_reads_run_ahead_of_a_stream_that_stands_still(self, make: Make) -> None:
        machine = make(8, 2, max_entries=4)
        machine.check()
        sources = machine.store.sources.values()
        assert eventually(lambda: sum(s.reads > 0 for s in sources) >= 3), "nothing is read before it is asked for"

    def test_order_that_is_not_kept_counts_as_misses(self, make: Make) -> None:
        machine = make(8, 2, max_entries=4)
        machine.checked_forward([5, 1, 6])
        assert machine.link.ring.memory.stats.misses > 0

    def test_a_slow_disk_is_seen_as_stalls(self, make: Make) -> None:
        machine = make(4, 2, max_entries=2)
        machine.check()
        for source in machine.store.sources.values():
            source.before = lambda: time.sleep(0.02)
        machine.checked_forward()
        stats = machine.link.ring.memory.stats
        assert stats.stalls >= 1
        assert stats.stall_s > 0.02


def broken(machine: Machine, error: BaseException) -> None:
    for source in machine.store.sources.values():
        source.before = raising(error)


class TestModels:
    @pytest.mark.parametrize(
        ("slots", "entries", "options"),
        [
            (1, 1, DiskOptions()),
            (2, 3, DiskOptions()),
            (2, 1, DiskOptions(direct=True)),
            (3, 3, DiskOptions(direct=True)),
        ],
    )
    @pytest.mark.parametrize("build", [lambda: Stack(5), lambda: Stack(5, 70), QuantStack])
    @torch.no_grad()
    def test_a_model_out_of_its_checkpoint(
        self, build: Callable[[], nn.Module], slots: int, entries: int, options: DiskOptions, tmp_path: Path
    ) -> None:
        model = build()
        x = rows(70 if isinstance(model, Stack) and model.head.in_features == 70 else 32)
        expected = model.eval()(x)
        link = FakeRingLink(max_pause_s=0.001, max_entries=entries, blocking=True)
        policy = all_layers(slots, "disk")
        with offload_over(model, policy, link, checkpoint=save(model, tmp_path), disk=options) as handle:
            assert_same_bits(model(x), expected)
            link.stream.synchronize()
            first = link.ring.memory.stats  # the first units come in an order of their own
            for _ in range(2):
                assert_same_bits(model(x), expected)
            link.stream.synchronize()  # the refills behind the last forward
            staging = handle.stats().staging
            assert staging is not None
            assert staging.bytes_read >= handle.stats().bytes_moved
            assert staging.misses == first.misses
        assert_same_bits(model(x), expected)


class TestFailure:
    def test_every_call_of_the_host_raises_from_then_on(self, make: Make) -> None:
        machine = make(6, 2)
        machine.checked_forward()
        broken(machine, TransferError("the disk is gone"))
        with pytest.raises(TransferError, match=r"the disk is gone.*remove\(\)"):
            machine.forwards(1000)
        for call in (machine.forward, machine.pipeline.begin_forward, machine.pipeline.snapshot, machine.capture):
            with pytest.raises(TransferError, match="the disk is gone"):
                call()
        with pytest.raises(TransferError, match="the disk is gone"):
            machine.pipeline.finish_forward()

    def test_a_replay_in_flight_ends_and_gives_nan(self, make: Make) -> None:
        machine = make(6, 2, max_entries=2)
        machine.checked_forward()
        graph = machine.capture()
        broken(machine, OSError(5, "Input/output error"))
        for _ in range(3):
            machine.link.stream.replay(graph)
        machine.link.stream.synchronize()
        assert machine.wrong
        slot = machine.pipeline.slot_memory(4)
        size = machine.plan.units[4].entries[0].num_bytes
        machine.link.stream.replay(graph)
        machine.link.stream.synchronize()
        assert slot[:size].eq(0xFF).all(), "the last unit of its chain is poison, not an older unit"
        with pytest.raises(TransferError, match="Input/output error"):
            machine.pipeline.begin_forward()

    @pytest.mark.parametrize("unit", range(6))
    def test_what_did_not_arrive_whole_is_poison_at_once(self, make: Make, unit: int) -> None:
        """Not what the entry held before, and not half of the piece."""
        machine = make(6, 2, max_entries=2)
        machine.checked_forward()
        graph = machine.capture()
        machine.store.sources[f"l{unit}.w"].before = lambda: time.sleep(0.01)
        machine.link.stream.replay(graph)
        machine.check()
        source, calls = machine.store.sources[f"l{unit}.w"], iter(range(1000))

        def every_second() -> None:
            if next(calls) % 2:
                raise TransferError("half of it is gone")

        source.before = every_second
        machine.replay_poison(graph, 2)
        with pytest.raises(TransferError, match="half of it"):
            machine.link.check()

    def test_a_read_that_never_ends_does_not_hang_the_stream(self, make: Make) -> None:
        machine = make(6, 2, stuck_s=0.2)
        machine.checked_forward()
        gate = threading.Event()
        for source in machine.store.sources.values():
            source.before = lambda: gate.wait(PATIENCE_S)
        with pytest.raises(TransferError, match=r"no read has ended for 0 s.* hangs \(under way: \d+ bytes at \d+ of"):
            machine.forwards(3)
        gate.set()

    @pytest.mark.slow
    def test_an_idle_ring_is_not_taken_for_a_stuck_one(self, make: Make) -> None:
        machine = make(6, 2, stuck_s=0.1)
        for _ in range(3):
            machine.checked_forward()
            time.sleep(0.2)
        machine.link.check()

    def test_an_error_of_the_server_itself_lets_the_stream_go_on(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine = make(6, 2)
        machine.check()

        monkeypatch.setattr(machine.link.server, "_read_ahead", raising(RuntimeError("a bug")))
        with pytest.raises(TransferError, match="a bug"):
            machine.forwards(100)


class TestStatus:
    def memory(self) -> RingMemory:
        layout = lay_out_ring([5000] * 3, 2, 4096, 2)
        return RingMemory(layout, np.zeros(layout.num_bytes, np.uint8))

    def test_the_first_failure_stays(self) -> None:
        memory = self.memory()
        assert memory.failure is None
        memory.fail("größer")
        memory.fail("later")
        assert memory.failure == "größer"

    def test_a_message_without_words_is_one(self) -> None:
        memory = self.memory()
        memory.fail("")
        assert memory.failure

    @pytest.mark.parametrize("shift", range(3))
    def test_a_long_message_is_cut_between_letters_and_stays_in_its_place(self, shift: int) -> None:
        memory = self.memory()
        memory.fail("x" * shift + "€" * 5000)
        assert memory.failure is not None
        assert set(memory.failure[shift:]) == {"€"}
        assert 3900 < len(memory.failure.encode()) <= STATUS_BYTES
        assert memory.stats == StagingStats()
        assert not memory.words.any()


class TestEnd:
    def test_close_ends_every_thread(self) -> None:
        before = set(threading.enumerate())
        machine = Machine(6, 2)
        machine.forward()
        machine.close()
        machine.link.server.close()
        assert set(threading.enumerate()) <= before

    @pytest.mark.slow
    def test_a_retired_ring_serves_what_is_under_way_and_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.transfer.ring.IDLE_EXIT_S", 0.2)
        before = set(threading.enumerate())
        machine = Machine(6, 2, 0.002)
        machine.forward()
        machine.link.ring.memory.counters[Counter.CLOSE_WHEN_IDLE] = 1
        machine.check()
        machine.link.stream.stop()
        assert eventually(lambda: set(threading.enumerate()) <= before), "the threads of a retired ring stay"

    @pytest.mark.slow
    def test_an_ended_ring_leaves_no_memory(self) -> None:
        machine = Machine(6, 2)
        machine.forward()
        machine.close()
        gone = weakref.ref(machine.link.server)
        del machine
        gc.collect()
        assert gone() is None
