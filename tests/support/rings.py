"""A staging ring without a GPU: a stream that a thread carries out some time later, and a link over it."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.checkpoint.weight_map import FilePart, TensorSource
from headrace.memory.shared import SharedMemory
from headrace.model.inventory import Inventory, Location, StorageInfo, TensorInfo
from headrace.plan.plan import Plan, UnitSpec, assemble
from headrace.plan.staging_ring import WORD_BYTES, RingLayout
from headrace.runtime.prefetcher import Prefetcher
from headrace.stats import Recorder, StagingStats
from headrace.stores.checkpoint_files import DiskStore
from headrace.stores.file_reads import DiskOptions
from headrace.stores.sources import ByteRange, Copy, Source
from headrace.stores.store import Load, Store
from headrace.transfer.link import ComputeEvent, Link, Transfer
from headrace.transfer.ring import READ_BYTES, RingServer
from headrace.transfer.ring_process import RingTask
from headrace.transfer.ring_readers import ReaderProcess
from headrace.transfer.ring_streams import StagingRing, reads_of

PATIENCE_S = 30.0
ENTRY_BYTES = 4096

Op = Callable[[], None]

_random = random.Random()  # hypothesis watches the module's own


class FakeStream:
    """Does one thing after the other in a thread of its own, with random pauses; or records a graph of them."""

    def __init__(self, words: torch.Tensor, max_pause_s: float = 0.0) -> None:
        self._words = words.view(torch.int32)[:: WORD_BYTES // 4]
        self._max_pause_s = max_pause_s
        self.stalls = 0
        self._ops: queue.SimpleQueue[Op | None] = queue.SimpleQueue()
        self.graph: list[Op] | None = None
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def give(self, op: Op) -> None:
        if self.graph is not None:
            self.graph.append(op)
        else:
            self._ops.put(op)

    def replay(self, graph: Sequence[Op]) -> None:
        for op in graph:
            self._ops.put(op)

    def write(self, word: int, value: int) -> None:
        self.give(lambda: self._words[word].fill_(value))

    def wait_equal(self, word: int, value: int) -> None:
        def wait() -> None:
            end = time.monotonic() + PATIENCE_S
            self.stalls += int(self._words[word]) != value
            while int(self._words[word]) != value:
                assert time.monotonic() < end, f"word {word} never became {value}"
                time.sleep(0)

        self.give(wait)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.numel() == source.numel()

        def copy() -> None:
            half = target.numel() // 2  # in two halves: a source that changes in between shows
            target[:half] = source[:half]
            self._pause()
            target[half:] = source[half:]

        self.give(copy)

    def synchronize(self) -> None:
        done = threading.Event()
        self._ops.put(done.set)
        assert done.wait(PATIENCE_S), "the stream hangs"
        if self.errors:
            raise self.errors[0]

    def stop(self) -> None:
        self._ops.put(None)
        self._thread.join(PATIENCE_S)

    def _pause(self) -> None:
        if self._max_pause_s and _random.random() < 0.3:
            time.sleep(_random.uniform(0, self._max_pause_s))

    def _run(self) -> None:
        while (op := self._ops.get()) is not None:
            self._pause()
            try:
                op()
            except BaseException as error:
                self.errors.append(error)


@dataclass(frozen=True)
class _Given:
    unit: int
    done: bool = True


def serve_in_thread(server: RingServer) -> threading.Thread:
    """Serve in this process until the server is closed."""
    thread = threading.Thread(target=server.serve, name="ring server", daemon=True)
    thread.start()
    return thread


class FakeRingLink(Link):
    """What the link of a GPU does, copies and compute on one :class:`FakeStream`."""

    def __init__(
        self, *, max_pause_s: float = 0.0, max_entries: int = 4, num_threads: int = 2, stuck_s: float = PATIENCE_S,
        blocking: bool = False, read_bytes: int = READ_BYTES,
    ) -> None:  # fmt: skip
        """``blocking``: compute is the caller's own, so that waiting has to hold the caller.

        ``read_bytes``: of a read at most; by default more than a piece has, so that a piece is read at once.
        """
        self._blocking, self._read_bytes = blocking, read_bytes
        self._pause_s, self._entries, self._threads, self._stuck_s = max_pause_s, max_entries, num_threads, stuck_s
        self.log: list[int] = []

    def prepare(self, plan: Plan, loads: Sequence[Load]) -> None:
        self.layout: RingLayout = plan.lay_out_ring(entry_bytes=ENTRY_BYTES, max_entries=self._entries)
        memory = torch.full((self.layout.num_bytes,), 0xEE, dtype=torch.uint8)
        memory[self.layout.words_at :] = 0
        self.ring = StagingRing(self.layout, memory)
        reads = reads_of(self.layout, loads, self._read_bytes)
        self.server = RingServer(reads, self.ring.memory, num_threads=self._threads, stuck_s=self._stuck_s)
        self.serving = serve_in_thread(self.server)
        self.stream = FakeStream(memory[self.layout.words_at : self.layout.status_at], self._pause_s)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xDD, dtype=torch.uint8)

    @property
    def capturing(self) -> bool:
        return self.stream.graph is not None

    def record_compute(self) -> ComputeEvent | None:
        return None

    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> Transfer:
        self.ring.check()
        self.log.append(load.unit)
        if load.slab is not None:
            self.stream.copy(slot[: load.slab.numel()], load.slab)
        else:
            self.ring.enqueue(load.unit, slot, self.stream)
        return _Given(load.unit)

    def wait(self, transfer: Transfer, measure: bool = False) -> float:
        self.ring.check()
        if self._blocking:
            self.stream.synchronize()
        return 0.0

    def check(self) -> None:
        self.ring.check()

    def staging_stats(self) -> StagingStats | None:
        return self.ring.memory.stats

    def close(self) -> None:
        if not hasattr(self, "stream"):  # never prepared
            return
        try:
            self.stream.synchronize()
        finally:
            self.stream.stop()
            self.server.close()
            self.serving.join(PATIENCE_S)


class ProcessRingLink(FakeRingLink):
    """The same with the readers in their process, over memory that it shares."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._closed = False

    def prepare(self, plan: Plan, loads: Sequence[Load]) -> None:
        self.layout = plan.lay_out_ring(entry_bytes=ENTRY_BYTES, max_entries=self._entries)
        task = RingTask(self.layout, reads_of(self.layout, loads, self._read_bytes), self._threads, self._stuck_s)
        shared = SharedMemory.create(self.layout.num_bytes)
        memory = shared.map(0, self.layout.num_bytes)
        self.ring = StagingRing(self.layout, memory)
        self.readers = ReaderProcess(task, self.ring.memory, shared.fileno())
        shared.close()
        try:
            self.readers.serve()
        except BaseException:
            self.readers.close()
            raise
        self.stream = FakeStream(memory[self.layout.words_at : self.layout.status_at], self._pause_s)

    def close(self) -> None:
        if self._closed or not hasattr(self, "stream"):
            return
        self._closed = True
        try:
            self.stream.synchronize()
        finally:
            self.stream.stop()
            self.readers.close()


class PatternSource(Source):
    """Bytes that tell unit and position: ``(7 * unit + position // 64) mod 251``."""

    def __init__(self, unit: int, num_bytes: int, max_pause_s: float = 0.0) -> None:
        self.bytes = ((7 * unit + torch.arange(num_bytes) // 64) % 251).to(torch.uint8)
        self._max_pause_s = max_pause_s
        self.before: Callable[[], None] = lambda: None
        self.reads = 0

    def read(self, offset: int, into: memoryview) -> None:
        self.reads += 1
        self.before()
        if self._max_pause_s and _random.random() < 0.3:
            time.sleep(_random.uniform(0, self._max_pause_s))
        into[:] = memoryview(self.bytes.numpy())[offset : offset + len(into)]


class PatternStore(Store):
    """One :class:`PatternSource` per storage."""

    def __init__(self, sources: dict[str, PatternSource]) -> None:
        self.sources = sources

    def copies(self, storage: str) -> list[Copy]:
        source = self.sources[storage]
        half = source.bytes.numel() // 2  # two copies, so that pieces begin and end within either
        return [Copy(ByteRange(source, 0, half), 0), Copy(ByteRange(source, half, source.bytes.numel() - half), half)]

    def in_place(self, storage: str) -> torch.Tensor:
        return self.sources[storage].bytes

    @property
    def host_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


def make_plan(num_units: int, num_slots: int, pause_s: float = 0.0) -> tuple[Plan, PatternStore]:
    """Units of one to three pieces, sizes all different."""
    sizes = [1000 + 2900 * (u % 4) + u for u in range(num_units)]
    storages = [
        StorageInfo((TensorInfo((Location(f"l{u}", "w", "parameter"),), 0, (size,), (1,), torch.uint8),), size)
        for u, size in enumerate(sizes)
    ]
    inventory = Inventory(tuple(storages), (), {f"l{u}": "Linear" for u in range(num_units)})
    plan = assemble(inventory, [UnitSpec(f"l{u}", (s,)) for u, s in enumerate(storages)], num_slots, "disk")
    sources = {s.name: PatternSource(u, s.num_bytes, pause_s) for u, s in enumerate(storages)}
    return plan, PatternStore(sources)


def reader_of(expected: torch.Tensor, slot: torch.Tensor, found: list[str], what: str) -> Op:
    """Compute: compares the slot with what should be in it when the stream comes to it."""

    def read() -> None:
        bytes_ = slot[: expected.numel()]
        if not torch.equal(bytes_, expected):
            poison = bool(((bytes_ == expected) | (bytes_ == 0xFF)).all())
            found.append(f"{what}: {'poison' if poison else bytes_.unique().tolist()}")

    return partial(read)


class Machine:
    """A pipeline over a ring, and a way to run units, live or in a graph."""

    def __init__(
        self, num_units: int, num_slots: int, pause_s: float = 0.0, link: FakeRingLink | None = None,
        store: Store | None = None, **options: object,
    ) -> None:  # fmt: skip
        """``link``: default a ring in this process, with these ``options``. ``store``: default patterns in memory."""
        self.plan, self.store = make_plan(num_units, num_slots, pause_s)
        self.link = link or FakeRingLink(max_pause_s=pause_s, **options)  # type: ignore[arg-type]
        self.wrong: list[str] = []
        self.pipeline = Prefetcher(self.plan, store or self.store, self.link, Recorder())
        self.pipeline.prefetch_first()

    def run(self, unit: int) -> None:
        self.pipeline.wait(unit)
        expected = self.store.sources[f"l{unit}.w"].bytes
        self.link.stream.give(reader_of(expected, self.pipeline.slot_memory(unit), self.wrong, f"unit {unit}"))
        self.pipeline.release(unit)

    def forward(self, units: list[int] | None = None) -> None:
        self.pipeline.begin_forward()
        for unit in range(len(self.plan.units)) if units is None else units:
            self.run(unit)
        self.pipeline.finish_forward(whole=units is None)

    def capture(self, units: list[int] | None = None) -> list[Op]:
        graph: list[Op] = []
        self.link.stream.graph = graph
        try:
            self.forward(units)
        finally:
            self.link.stream.graph = None
        return graph

    def forwards(self, count: int) -> None:
        """As many as an error lets through; the bytes are not looked at."""
        for _ in range(count):
            self.forward()
            self.link.stream.synchronize()

    def check(self) -> None:
        """Wait for the stream; every slot held what it should."""
        self.link.stream.synchronize()
        assert self.wrong == []

    def checked_forward(self, units: list[int] | None = None) -> None:
        self.forward(units)
        self.check()

    def replay_poison(self, graph: list[Op], times: int) -> None:
        """Replays after which slots held poison instead of what did not arrive."""
        for _ in range(times):
            self.link.stream.replay(graph)
        self.link.stream.synchronize()
        assert self.wrong
        assert all(text.endswith("poison") for text in self.wrong), self.wrong

    def read_nothing_twice(self) -> None:
        """In the steady state of replays: all that is read moves, and is read in the expected order."""
        self.checked_forward()
        graph = self.capture()
        self.link.stream.replay(graph)
        self.link.stream.synchronize()
        before = self.link.ring.memory.stats
        for _ in range(5):
            self.link.stream.replay(graph)
            self.check()
        time.sleep(0.05)
        after = self.link.ring.memory.stats
        assert after.misses == before.misses
        read = after.bytes_read - before.bytes_read
        assert abs(read - 5 * self.plan.moved_bytes) <= 4 * ENTRY_BYTES  # what lies in the ring at either end

    def close(self) -> None:
        self.pipeline.close()


def save_patterns(store: PatternStore, folder: Path) -> Path:
    """The checkpoint of a plan of :func:`make_plan`."""
    path = folder / "model.safetensors"
    save_file({name: source.bytes for name, source in store.sources.items()}, path)
    return path


def disk_store(path: Path, options: DiskOptions | None = None) -> DiskStore:
    """Of a checkpoint, stamped as an offload stamps it."""
    checkpoint = Checkpoint.open(path)
    sources = {name: TensorSource((FilePart(t),), t.shape, t.dtype) for name, t in checkpoint.tensors.items()}
    return DiskStore(sources, options, stamps=checkpoint.stamps)
