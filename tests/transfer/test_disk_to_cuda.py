"""The promise: through threads and pinned buffers every unit arrives whole, in any order; failures never hang.

The real prefetcher over the real link and its threads; the two streams and their events are threads of the test.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from models import Stack, all_layers, rows, save
from penstock.errors import StateError, TransferError
from penstock.loading.upload import Upload
from penstock.stores.store import CpuStore, Load, SpillStore
from penstock.testing import assert_same_bits, offload_over
from penstock.transfer import disk_to_cuda
from penstock.transfer.disk_to_cuda import DiskToCudaLink
from rings import PATIENCE_S, FakeStream, Machine, disk_store, make_plan, save_patterns

CASES = [(n, s) for n in range(1, 7) for s in range(1, min(n, 3) + 1)]


class Event:
    """A point in a :class:`Stream`."""

    def __init__(self, **options: object) -> None:
        self.reached = threading.Event()
        self.reached.set()

    def record(self, stream: Stream) -> None:
        self.reached = threading.Event()
        stream.give(self.reached.set)

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        assert self.reached.wait(PATIENCE_S), "a stream hangs"


class Stream(FakeStream):
    device = torch.device("cpu")

    def __init__(self, max_pause_s: float = 0.0) -> None:
        super().__init__(torch.zeros(64, dtype=torch.uint8), max_pause_s)

    def wait_event(self, event: Event) -> None:
        reached = event.reached

        def wait() -> None:
            assert reached.wait(PATIENCE_S), "an event is never reached"

        self.give(wait)


class FakeDiskLink(DiskToCudaLink):
    """The link as it is; ``stream`` is that of compute."""

    def __init__(self, max_pause_s: float = 0.0, num_threads: int = 3) -> None:
        self.stream = Stream(max_pause_s)
        super().__init__(torch.device("cpu"), num_threads=num_threads)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xDD, dtype=torch.uint8)

    @property
    def capturing(self) -> bool:
        return self.stream.graph is not None

    def _enqueue(self, load: Load, slot: torch.Tensor) -> None:
        for start, piece in load.in_memory:
            self._stream.copy(slot[start : start + piece.numel()], piece)

    def close(self) -> None:
        super().close()
        self.stream.synchronize()
        self.stream.stop()
        self._stream.synchronize()
        self._stream.stop()


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeDiskLink]:
    """What makes a link; small pieces, few buffers, and streams that are threads."""
    current: list[FakeDiskLink] = []

    def start(stream: Stream, uploads: Sequence[Upload], *, blocking: bool) -> Callable[[], None]:
        assert blocking
        for into, staged in uploads:
            stream.copy(into, staged)
        done = Event()
        done.record(stream)
        return done.synchronize

    def make(**options: float) -> FakeDiskLink:
        current.append(FakeDiskLink(**options))  # type: ignore[arg-type]
        return current[-1]

    monkeypatch.setattr(disk_to_cuda, "PIECE_BYTES", 1024)
    monkeypatch.setattr(disk_to_cuda, "_BUFFER_BYTES", 1024 + 8192)
    monkeypatch.setattr(disk_to_cuda, "NUM_BUFFERS", 4)
    monkeypatch.setattr(disk_to_cuda, "start_copies", start)
    monkeypatch.setattr(disk_to_cuda, "pinned_region", lambda size: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(disk_to_cuda, "refuse_capture", lambda registrar: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1].stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return make


@pytest.mark.parametrize(("units", "slots"), CASES)
@pytest.mark.parametrize("pause_s", [0.0, 0.001])
def test_every_small_case(units: int, slots: int, pause_s: float, device: Callable[..., FakeDiskLink]) -> None:
    machine = Machine(units, slots, pause_s, link=device(max_pause_s=pause_s))  # type: ignore[arg-type]
    for _ in range(4):
        machine.forward()
    machine.settle()
    machine.close()


@pytest.mark.parametrize("threads", [1, 8])
def test_units_skipped_repeated_and_backwards(threads: int, device: Callable[..., FakeDiskLink]) -> None:
    machine = Machine(5, 2, 0.0005, link=device(num_threads=threads))  # type: ignore[arg-type]
    for order in ([], [4, 3, 2, 1, 0], [0, 0, 1, 1], [2], [0, 1, 2, 3, 4], [3, 1, 4]):
        machine.forward(order)
        machine.forward()
    machine.settle()
    machine.close()


def test_units_in_files(tmp_path: Path, device: Callable[..., FakeDiskLink]) -> None:
    _, patterns = make_plan(4, 2)
    store = disk_store(save_patterns(patterns, tmp_path))
    link = device()
    machine = Machine(4, 2, link=link, store=store)  # type: ignore[arg-type]
    for _ in range(3):
        machine.forward()
    machine.settle()
    stats = link.staging_stats()
    assert stats.bytes_read >= 2 * machine.plan.moved_bytes
    machine.close()
    assert link.staging_stats().bytes_read >= stats.bytes_read, "counters outlive the link"
    store.close()


def test_a_model_over_it_gives_the_same_bits(tmp_path: Path, device: Callable[..., FakeDiskLink]) -> None:
    model = Stack(4).eval()
    path = save(model, tmp_path)
    x = rows()
    expected = model(x)
    link = device()

    plain_wait = link.wait

    def wait(transfer: object, measure: bool = False) -> float:
        """Compute is the caller's own, so that waiting has to hold the caller."""
        held_s = plain_wait(transfer, measure)  # type: ignore[arg-type]
        link.stream.synchronize()
        return held_s

    link.wait = wait  # type: ignore[method-assign, assignment]
    handle = offload_over(model, all_layers(2, mode="disk"), link, checkpoint=path)
    for _ in range(3):
        assert_same_bits(model(x), expected)
    handle.remove()
    assert_same_bits(model(x), expected)


def test_units_in_memory_keep_their_turn(device: Callable[..., FakeDiskLink]) -> None:
    plan, patterns = make_plan(4, 2)
    names = {entry.storage for unit in plan.units if unit.index % 2 for entry in unit.entries}

    class Slabs(CpuStore):
        def load(self, unit: object) -> Load:
            blob = patterns.sources[f"l{unit.index}.w"].bytes  # type: ignore[attr-defined]
            return Load(unit.index, tuple(self.unit_copies(unit)), blob)  # type: ignore[attr-defined, arg-type]

    host = Slabs({name: patterns.sources[name].bytes for name in names})
    mixed = SpillStore(host, patterns, patterns.sources.keys() - names)
    mixed.load = lambda unit: (host if unit.index % 2 else patterns).load(unit)  # type: ignore[method-assign]
    machine = Machine(4, 2, link=device(), store=mixed)  # type: ignore[arg-type]
    for _ in range(4):
        machine.forward()
    machine.settle()
    machine.close()


def test_a_capture_is_refused_with_the_reason(device: Callable[..., FakeDiskLink]) -> None:
    machine = Machine(4, 2, link=device())  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"unit \d rests in files, .* cannot be captured .*: mode 'cpu'"):
        machine.capture()
    machine.settle()
    machine.close()


def test_a_failed_read_is_an_error_and_nothing_hangs(device: Callable[..., FakeDiskLink]) -> None:
    machine = Machine(4, 2, link=device())  # type: ignore[arg-type]

    def fail() -> None:
        raise OSError("planted")

    machine.forward()
    for source in machine.store.sources.values():
        source.before = fail
    with pytest.raises(TransferError, match=r"unit \d did not arrive: OSError\('planted'\)"):
        machine.forwards(3)
    machine.close()


def test_threads_end_with_a_link_that_was_not_closed(device: Callable[..., FakeDiskLink]) -> None:
    plan, patterns = make_plan(3, 1)
    link = device()
    link.prepare(plan, [patterns.load(unit) for unit in plan.units])
    reads = link._reads
    assert reads is not None
    threads = list(reads._threads)
    assert all(thread.is_alive() for thread in threads)
    link._reads = None
    del reads
    gc.collect()
    end = time.monotonic() + PATIENCE_S
    while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(thread.is_alive() for thread in threads)
    link.close()
