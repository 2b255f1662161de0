"""The promise of the readers' side alone, checked word by word: in any order of pieces and with reads at any time, an
entry holds its own piece or poison, and the counters say what happened."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import eventually
from headrace.checkpoint.safetensors_header import opened
from headrace.errors import TransferError
from headrace.plan.staging_ring import cut, lay_out_ring
from headrace.stores.file_reads import DiskOptions, File
from headrace.stores.sources import ByteRange, Copy
from headrace.stores.store import Load
from headrace.transfer.ring import PAUSE_S, POISON, WANTED, RingMemory, RingServer
from headrace.transfer.ring_process import RingTask
from headrace.transfer.ring_streams import reads_of
from rings import PATIENCE_S, Machine, serve_in_thread

PIECE_BYTES = 4096


class Numbered:
    """Bytes that say which piece they are of, from 1 on."""

    def __init__(self, position: int, before: Callable[[int, int], None], look: Callable[[], object]) -> None:
        self._position, self._before, self._look = position, before, look

    def read(self, start: int, into: memoryview) -> None:
        self._before(self._position, start)
        into[:] = bytes([self._position + 1]) * len(into)

    def require_unchanged(self) -> None:
        self._look()


class Ring:
    """A ring of one piece per unit, without a stream: the test writes the words when it takes a piece."""

    def __init__(
        self, num_pieces: int, num_entries: int, read_bytes: int, look: Callable[[], object] = lambda: None,
        **options: object,
    ) -> None:  # fmt: skip
        self.layout = lay_out_ring([PIECE_BYTES] * num_pieces, 1, PIECE_BYTES, num_entries)
        self.memory = RingMemory(self.layout, np.zeros(self.layout.num_bytes, np.uint8))
        self.before: Callable[[int, int], None] = lambda position, start: None
        reads = [
            [
                Copy(ByteRange(Numbered(position, lambda *at: self.before(*at), look), start, size), start)
                for start, size in cut(PIECE_BYTES, read_bytes)
            ]
            for position in range(num_pieces)
        ]
        self.server = RingServer(reads, self.memory, num_threads=2, **options)  # type: ignore[arg-type]

    def take(self, position: int, before_it_is_copied: Callable[[], None] = lambda: None) -> list[int]:
        """The different bytes of a piece, as a copy would find them."""
        entry = self.layout.pieces[position].entry
        self.want(position)
        end = time.monotonic() + PATIENCE_S
        while self.memory.tag(entry) != position + 1:
            assert time.monotonic() < end, f"piece {position} never came"
            time.sleep(0)
        before_it_is_copied()
        found: list[int] = np.unique(self.memory.entries[entry]).tolist()
        self.memory.words[WANTED] = 0
        self.memory.set_tag(entry, 0)
        return found

    def want(self, position: int) -> None:
        self.memory.words[WANTED] = position + 1

    def through(self, entry: int) -> list[int]:
        return [position for position, piece in enumerate(self.layout.pieces) if piece.entry == entry]


@contextmanager
def serving(num_pieces: int, num_entries: int, read_bytes: int = PIECE_BYTES, **options: object) -> Iterator[Ring]:
    ring = Ring(num_pieces, num_entries, read_bytes, **options)
    serve_in_thread(ring.server)
    try:
        yield ring
    finally:
        ring.server.close()


class TestReads:
    @pytest.mark.slow
    @given(st.data())
    def test_make_up_every_piece(self, data: st.DataObject) -> None:
        sizes = data.draw(st.lists(st.integers(1, 20_000), min_size=1, max_size=4))
        read_bytes = data.draw(st.sampled_from([1000, 4096, 8192, 1 << 20]))
        layout = lay_out_ring(sizes, 1, 8192, 3)
        loads = []
        for unit, size in enumerate(sizes):
            middle = data.draw(st.integers(0, size))  # two tensors, wherever the first ends
            halves = ((f"{unit}a", 0, middle), (f"{unit}b", middle, size - middle))
            copies = [Copy(ByteRange(name, 0, n), at) for name, at, n in halves if n]  # type: ignore[arg-type]
            loads.append(Load(unit, tuple(copies)))
        for piece, reads in zip(layout.pieces, reads_of(layout, loads, read_bytes), strict=True):
            found = []
            for read in reads:
                assert 0 < read.num_bytes <= read_bytes
                copy = next(copy for copy in loads[piece.unit].copies if copy.src.source is read.src.source)
                assert copy.dst_offset + read.src.offset == piece.start + read.dst_offset
                found += range(read.dst_offset, read.dst_end)
            assert found == list(range(piece.num_bytes))

    @pytest.mark.parametrize("read_bytes", [700, 1 << 20])
    def test_of_any_size_bring_the_same_bytes(self, read_bytes: int) -> None:
        machine = Machine(7, 2, 0.001, max_entries=3, read_bytes=read_bytes)
        for _ in range(4):
            machine.forward()
        graph = machine.capture()
        for _ in range(4):
            machine.link.stream.replay(graph)
        machine.check()
        most_reads = max(map(len, machine.link.server._reads))
        assert most_reads == (7 if read_bytes == 700 else 2)  # of 4096 bytes that lie in two stretches
        machine.close()

    def test_in_vain_are_never_handed_over(self) -> None:
        """Of a piece with two reads under way and two that wait, the first half would be there and the rest not."""
        slow, gate, inside = 2, threading.Event(), threading.Semaphore(0)

        def wait(position: int, start: int) -> None:
            if position == slow and start < PIECE_BYTES // 2 and not gate.is_set():
                inside.release()
                gate.wait(PATIENCE_S)

        for _ in range(20):
            gate.clear()
            with serving(12, 4, PIECE_BYTES // 4) as ring:
                ring.before = wait
                assert [ring.take(0), ring.take(1)] == [[1], [2]]
                assert inside.acquire(timeout=PATIENCE_S)
                assert inside.acquire(timeout=PATIENCE_S)
                far = next(p for p in range(7, 12) if ring.layout.pieces[p].entry == 3)
                ring.want(far)
                time.sleep(0.005)  # the server looks, and takes the order from there
                gate.set()
                assert ring.take(far) == [far + 1]
                assert ring.take(slow) == [slow + 1]


class TestCounters:
    @pytest.mark.slow
    @pytest.mark.parametrize("read_s", [0.0005, 0.005])
    def test_every_wait_of_the_stream_is_a_stall(self, read_s: float) -> None:
        machine = Machine(8, 2, max_entries=4)
        machine.checked_forward()
        for source in machine.store.sources.values():
            source.before = lambda: time.sleep(read_s)
        before, waited = machine.link.ring.memory.stats.stalls, machine.link.stream.stalls
        for _ in range(10):
            machine.checked_forward()
        counted, waited = machine.link.ring.memory.stats.stalls - before, machine.link.stream.stalls - waited
        machine.close()
        assert waited > 50
        assert 0.9 * waited <= counted <= 1.1 * waited  # a wait may begin or end between two looks at a word

    @pytest.mark.slow
    def test_leaving_out_all_that_is_in_the_ring_is_a_miss(self) -> None:
        """The piece behind it is the one that would be read next, but what was read ahead was of no use."""
        with serving(12, 4) as ring:
            assert ring.take(0) == [1]
            for turn in range(1, 4):
                assert eventually(lambda: all(ring.memory.tag(entry) for entry in range(4)))
                beyond = ring.server._next
                assert beyond is not None
                assert ring.take(beyond) == [beyond + 1]
                assert ring.memory.stats.misses == turn


class TestWatchdog:
    def test_a_pause_of_the_readers_is_no_dead_disk(self) -> None:
        """Stopped and continued, or frozen with its container: no read could have ended in that time."""
        ring = Ring(8, 2, PIECE_BYTES, stuck_s=60.0)
        now = time.monotonic()
        ring.server._turn(now)
        ring.server._start(0, ring.layout.pieces[0].entry, now)
        ring.server._turn(now + 1000)  # the first thread that wakes
        soon = [now + 1000 + 0.9 * PAUSE_S * step for step in range(1, 65)]
        for at in soon:
            ring.server._turn(at)
        later = soon[-1] + 0.9 * PAUSE_S * 3
        ring.server._last_turn = later - PAUSE_S
        with pytest.raises(TransferError, match="no read has ended for 60 s"):
            ring.server._turn(later)

    def test_names_the_read_behind_which_looking_at_the_file_hangs(self) -> None:
        gate = threading.Event()
        with serving(8, 2, stuck_s=0.2, look=lambda: gate.wait(PATIENCE_S)) as ring:
            assert ring.take(0) == [POISON]
            gate.set()
        assert ring.memory.failure is not None
        assert f"{PIECE_BYTES} bytes at 0 of" in ring.memory.failure


class TestPoison:
    @staticmethod
    def fail_beside_a_read(ring: Ring) -> tuple[int, threading.Event]:
        """Piece 1 fails while piece 2 is being read; returns the entry of that one, and what lets it end."""
        gate, begun = threading.Event(), threading.Event()

        def before(position: int, start: int) -> None:
            if position == 1:
                assert begun.wait(PATIENCE_S)
                raise TransferError("written to while in use")
            if position == 2:
                begun.set()
                gate.wait(PATIENCE_S)

        ring.before = before
        assert ring.take(0) == [1]
        assert ring.take(1) == [POISON]
        return ring.layout.pieces[2].entry, gate

    def test_is_not_overwritten_by_a_read_that_comes_late(self) -> None:
        with serving(8, 2) as ring:
            entry, gate = self.fail_beside_a_read(ring)
            ring.want(ring.through(entry)[-1])
            time.sleep(0.05)
            assert ring.memory.tag(entry) == 0, "an answer while a read may still land on top of it"
            gate.set()
            assert ring.take(ring.through(entry)[-1], lambda: time.sleep(0.05)) == [POISON]

    @pytest.mark.slow
    def test_comes_all_the_same_when_that_read_hangs(self) -> None:
        with serving(8, 2, stuck_s=0.3) as ring:
            entry, gate = self.fail_beside_a_read(ring)
            assert ring.take(ring.through(entry)[-1]) == [POISON]
            gate.set()


def test_the_readers_look_at_a_file_once_for_a_piece(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(2 * PIECE_BYTES))
    layout = lay_out_ring([PIECE_BYTES] * 2, 1, PIECE_BYTES, 2)
    with opened(path) as (_, stamp):
        file = File(path, DiskOptions(), stamp)
    reads = [[Copy(ByteRange(file, position * PIECE_BYTES, PIECE_BYTES), 0)] for position in range(2)]
    sent = RingTask(layout, reads, 1, 60.0)
    kept = [os.dup(fd) for fd in sent.descriptors]  # the copy takes the originals over
    task = pickle.loads(pickle.dumps(sent))
    mine = task.reads[0][0].src.source
    into = bytearray(PIECE_BYTES)
    mine.require_unchanged()
    os.utime(path, ns=(1, 1))
    mine.read(0, memoryview(into))
    with pytest.raises(TransferError, match="it was written to while in use"):
        mine.require_unchanged()
    with pytest.raises(TransferError, match="it was written to while in use"):
        ByteRange(file, 0, PIECE_BYTES).read(memoryview(into))
    file._leftover.detach()
    mine.close()
    for fd in kept:
        os.close(fd)
