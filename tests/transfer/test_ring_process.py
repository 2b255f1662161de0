"""The promise: readers in a process of their own bring the same bytes, and whichever process ends first, nothing hangs.

The real program over real files and shared memory; only the stream is a thread of the test (tests/support/rings.py).
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import rings
from checks import eventually
from faulty_readers import Faults
from headrace.errors import OptionError, StateError, TransferError
from headrace.memory.pinned import PinnedBuffer
from headrace.memory.shared import SharedMemory
from headrace.plan.staging_ring import WORD_BYTES
from headrace.stores.file_reads import DiskOptions
from headrace.stores.store import Store
from headrace.testing import assert_same_bits, offload_over
from headrace.transfer import ring_readers, ring_streams
from headrace.transfer.ring import RingMemory, RingServer
from headrace.transfer.ring_process import RingTask
from headrace.transfer.ring_readers import ReaderProcess
from headrace.transfer.ring_streams import RingLink, StagingRing, reads_of
from models import Stack, all_layers, rows, save
from registrars import Ledger
from rings import ENTRY_BYTES, Machine, ProcessRingLink, disk_store, make_plan, save_patterns, serve_in_thread

Make = Callable[..., Machine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Machines over a file with the bytes of their plan; closed at the end."""
    made: list[tuple[Machine, Store]] = []

    def build(units: int = 6, slots: int = 2, options: DiskOptions | None = None, **link: object) -> Machine:
        store = disk_store(save_patterns(make_plan(units, slots)[1], tmp_path), options)
        machine = Machine(units, slots, link=ProcessRingLink(**link), store=store)  # type: ignore[arg-type]
        made.append((machine, store))
        return machine

    yield build
    for machine, store in made:
        machine.link.close()
        store.close()


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    monkeypatch.setattr(ring_readers, "PROGRAM", "faulty_readers")
    return Faults(tmp_path / "faults", monkeypatch.setenv)


def pid_of(machine: Machine) -> int:
    assert isinstance(machine.link, ProcessRingLink)
    return machine.link.readers.pid


class TestBytes:
    @pytest.mark.slow
    @pytest.mark.parametrize(("units", "slots", "entries", "options"), [
        (1, 1, 1, DiskOptions()), (5, 2, 3, DiskOptions(True)), (8, 3, 8, DiskOptions(None, True)),
        (7, 2, 2, DiskOptions(True)), (7, 2, 2, DiskOptions()),
    ], ids=str)  # fmt: skip
    def test_live_and_replayed(self, make: Make, units: int, slots: int, entries: int, options: DiskOptions) -> None:
        machine = make(units, slots, options, max_entries=entries)
        machine.forward()
        graphs = [machine.capture(), machine.capture()]
        for turn in range(4):
            machine.link.stream.replay(graphs[turn % 2])
        machine.checked_forward()
        moved = sum(machine.plan.units[unit].payload_bytes for unit in machine.link.log)
        assert machine.link.ring.memory.stats.bytes_read >= moved > 0

    @pytest.mark.slow
    @torch.no_grad()
    def test_a_model_out_of_its_checkpoint(self, tmp_path: Path) -> None:
        model = Stack(5).eval()
        expected = model(rows())
        link = ProcessRingLink(blocking=True, max_entries=3)
        with offload_over(model, all_layers(2, "disk"), link, checkpoint=save(model, tmp_path)) as handle:
            for _ in range(3):
                assert_same_bits(model(rows()), expected)
            staging = handle.stats().staging
            assert staging is not None
            # The last copies wait for the next forward, and may not be read yet.
            assert eventually(lambda: link.ring.memory.stats.bytes_read >= handle.stats().bytes_moved)
        assert_same_bits(model(rows()), expected)

    def test_what_is_in_no_file_is_refused(self) -> None:
        plan, store = make_plan(3, 1)
        with pytest.raises(OptionError, match=r"unit \d: what comes to a GPU .* has to be in files, found .*Pattern"):
            ProcessRingLink().prepare(plan, [store.load(unit) for unit in plan.units])


class TestFiles:
    @pytest.mark.slow
    @pytest.mark.parametrize(("harm", "options"), [
        ("rewrite", DiskOptions()), ("rewrite", DiskOptions(True)), ("truncate", DiskOptions(True)),
        ("truncate", DiskOptions(None)),
    ], ids=str)  # fmt: skip
    def test_one_that_is_written_to_is_an_error(
        self, make: Make, harm: str, options: DiskOptions, tmp_path: Path
    ) -> None:
        machine = make(options=options)
        machine.checked_forward()
        time.sleep(0.02)  # times of files have the grain of the kernel's clock
        path = tmp_path / "model.safetensors"
        whole = path.read_bytes()
        if harm == "rewrite":
            path.write_bytes(whole[:-4000] + bytes(4000))
        else:
            os.truncate(path, len(whole) // 4)
        with pytest.raises(TransferError, match=r"model\.safetensors: expected .* while in use"):
            machine.forwards(10)

    @pytest.mark.parametrize(("harm", "before_the_start"), [("remove", False), ("replace", True)], ids=str)
    def test_one_that_goes_is_still_open(self, harm: str, before_the_start: bool, tmp_path: Path) -> None:
        path = save_patterns(make_plan(6, 2)[1], tmp_path)
        store = disk_store(path, DiskOptions(direct=None))

        def go() -> None:
            other = path.with_suffix(".new")
            other.write_bytes(bytes(path.stat().st_size))
            path.unlink() if harm == "remove" else other.rename(path)

        if before_the_start:
            go()
        machine = Machine(6, 2, link=ProcessRingLink(), store=store)
        if not before_the_start:
            machine.forward()
            go()
        for _ in range(3):
            machine.checked_forward()
        machine.close()
        store.close()

    def test_what_the_caller_closes_stays_open_for_the_readers(self, tmp_path: Path) -> None:
        store = disk_store(save_patterns(make_plan(6, 2)[1], tmp_path))
        machine = Machine(6, 2, link=ProcessRingLink(), store=store)
        store.close()
        machine.checked_forward()
        machine.close()


class TestFailure:
    def test_an_error_of_the_disk_is_poison_and_told(self, make: Make, faults: Faults) -> None:
        machine = make(max_entries=2)
        machine.checked_forward()
        graph = machine.capture()
        faults.error(5)
        machine.replay_poison(graph, 3)
        with pytest.raises(TransferError, match=r"model\.safetensors: reading .* Input/output error.*remove\(\)"):
            machine.pipeline.begin_forward()

    @pytest.mark.slow
    def test_a_read_that_never_ends_is_named(self, make: Make, faults: Faults) -> None:
        machine = make(stuck_s=0.5)
        machine.checked_forward()
        faults.never()
        begin = time.monotonic()
        message = r"no read has ended for 0 s.*\(under way: \d+ bytes at \d+ of /.*model\.safetensors"
        with pytest.raises(TransferError, match=message):
            machine.forwards(3)
        assert time.monotonic() - begin < 10
        machine.close()
        assert not psutil.pid_exists(pid_of(machine))

    @pytest.mark.parametrize("victims", ["server", "stand-by", "group"])
    def test_killed_readers_are_poison_and_told(
        self, make: Make, monkeypatch: pytest.MonkeyPatch, victims: str
    ) -> None:
        if victims == "server":  # then the stand-by answers, and no thread of this process has to
            monkeypatch.setattr(ReaderProcess, "_watch", lambda self: self._process.wait())
        machine = make(max_entries=2)
        machine.checked_forward()
        graph = machine.capture()
        (server,) = psutil.Process(pid_of(machine)).children()
        if victims == "group":
            os.killpg(pid_of(machine), signal.SIGKILL)
        else:
            os.kill(server.pid if victims == "server" else pid_of(machine), signal.SIGKILL)
        begin = time.monotonic()
        machine.replay_poison(graph, 3)
        assert time.monotonic() - begin < 10
        for call in (machine.forward, machine.pipeline.snapshot):
            with pytest.raises(TransferError, match=r"reads files for the GPU .* ended by signal 9.*remove\(\)"):
                call()
        machine.close()
        assert not threads()

    def test_what_they_wrote_last_is_told(self, monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
        monkeypatch.setattr(ring_readers, "PROGRAM", "no_such_program")
        with pytest.raises(OptionError, match=r"(?s)does not serve .* exit status 1.*no_such_program.*set_e"):
            make()
        assert not threads()

    @pytest.mark.parametrize("name", ["headrace-readers-stderr", "headrace-readers-task"])
    def test_no_more_open_files(self, name: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        create = os.memfd_create

        def refuse(wanted: str, flags: int) -> int:
            if wanted == name:
                raise OSError(errno.EMFILE, "Too many open files")
            return create(wanted, flags)

        monkeypatch.setattr(os, "memfd_create", refuse)
        with pytest.raises(OptionError, match=r"cannot be started \(.*Too many open files\).*ulimit -n"):
            make()
        assert not threads()

    @pytest.mark.parametrize(("path", "words"), [("/bin/false", "exit status 1"), ("/no/such", "cannot be started")])
    def test_an_interpreter_that_is_none(
        self, path: str, words: str, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ring_readers, "get_executable", lambda: path)
        with pytest.raises(OptionError, match=rf"(?s){words}.*multiprocessing\.set_executable"):
            make()

    @pytest.mark.slow
    def test_one_that_does_not_come_so_far(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ring_readers, "START_S", 0.3)
        monkeypatch.setattr(ring_readers, "_command", lambda: ["/bin/sh", "-c", "exec sleep 60", "sh"])
        monkeypatch.setattr(ring_readers, "JOIN_S", 0.3)
        with pytest.raises(OptionError, match=r"does not serve after 0 s at most: it has not ended"):
            make()
        assert eventually(lambda: not threads())

    @pytest.mark.parametrize("executable", ["", None])
    def test_a_program_without_an_interpreter(
        self, executable: str | None, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ring_readers, "get_executable", lambda: executable)
        with pytest.raises(OptionError, match=r"the Python interpreter of this program is not known .*mode 'cpu'"):
            make()


def threads() -> list[threading.Thread]:
    """Those of rings of this process."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("headrace-ring")]


def descriptors() -> int:
    gc.collect()  # garbage of an earlier test may hold some
    return len(os.listdir("/proc/self/fd"))


def ring_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:headrace-")


class TestEnd:
    @pytest.mark.slow
    def test_nothing_is_left(self, make: Make, tmp_path: Path) -> None:
        store = disk_store(save_patterns(make_plan(6, 2)[1], tmp_path))
        before = (descriptors(), ring_mappings(), psutil.Process().children())
        for _ in range(3):
            machine = Machine(6, 2, link=ProcessRingLink(), store=store)
            pid = pid_of(machine)
            (server,) = psutil.Process(pid).children()
            machine.forward()
            assert ring_mappings() > before[1]
            machine.close()
            del machine
            assert not psutil.pid_exists(pid)
            assert not psutil.wait_procs([server], 5)[1]
            assert not threads()
        assert (descriptors(), ring_mappings(), psutil.Process().children()) == before
        store.close()

    @pytest.mark.slow
    def test_readers_that_ended_earlier_are_not_signalled(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = make()
        os.killpg(pid_of(machine), signal.SIGKILL)
        assert eventually(lambda: not psutil.pid_exists(pid_of(machine)))
        monkeypatch.setattr(os, "killpg", lambda *args: pytest.fail("the number may be that of other processes by now"))
        machine.close()

    def test_closing_does_not_wait_for_a_read(self, make: Make, faults: Faults) -> None:
        machine = make()
        machine.checked_forward()
        faults.never()
        machine.forward([5])
        begin = time.monotonic()
        assert isinstance(machine.link, ProcessRingLink)
        machine.link.readers.close()
        assert time.monotonic() - begin < 3
        assert not psutil.pid_exists(pid_of(machine))
        # The stream of the test still waits for a piece.
        answers = RingServer((), machine.link.ring.memory, num_threads=0)
        answers.fail(TransferError("the readers were closed"))
        serve_in_thread(answers)
        machine.link.close()
        answers.close()

    @pytest.mark.slow
    def test_a_retired_ring_serves_what_is_under_way_and_gives_its_memory_back(
        self, tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its last owner is the thread that listens; this process may never pin or unpin anything else."""
        faults.linger(0.2)
        plan, patterns = make_plan(6, 2)
        store = disk_store(save_patterns(patterns, tmp_path))
        layout = plan.lay_out_ring(entry_bytes=ENTRY_BYTES, max_entries=4)
        ledger = Ledger()
        shared = SharedMemory.create(layout.num_bytes)
        pinned = PinnedBuffer(shared.map(0, layout.num_bytes))
        pinned.register(ledger)
        ring = StagingRing(layout, pinned.buffer)
        reads = reads_of(layout, [store.load(unit) for unit in plan.units])
        readers = ReaderProcess(RingTask(layout, reads, 2, 60.0), ring.memory, shared.fileno())
        readers.serve()
        memory = ring.memory
        for position in range(3):
            memory.words[0] = position + 1
            if position == 1:
                readers.close_when_idle()
            tag = memory.words[1 + layout.pieces[position].entry :][:1]
            assert eventually(partial(np.array_equal, tag, [position + 1]))
            memory.words[0] = 0
            tag[0] = 0
        process = weakref.ref(readers._process)
        del readers, ring, pinned, memory, tag
        assert eventually(lambda: not ledger.held), "the memory of a retired ring stays pinned"
        assert eventually(lambda: process() is None)
        assert ring_failure(shared, layout) is None
        shared.close()
        store.close()

    @pytest.mark.slow
    def test_the_end_of_a_forked_process_is_not_the_owners(self, make: Make, faults: Faults) -> None:
        faults.linger(0.1)
        machine = make()
        assert isinstance(machine.link, ProcessRingLink)
        readers = machine.link.readers
        machine.checked_forward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 3.12 warns of threads, which is what this is about
            forked = os.fork()
        if forked == 0:
            readers.close_when_idle()
            readers.close()
            os._exit(0)
        assert os.waitpid(forked, 0)[1] == 0
        time.sleep(0.5)
        machine.checked_forward()
        machine.link.check()


class Copies(rings.FakeStream):
    """The copy stream of a link, over the words at ``address``."""

    def __init__(self, stream: object, address: int) -> None:
        words = (ctypes.c_uint8 * (4 * WORD_BYTES)).from_address(address)
        super().__init__(torch.frombuffer(words, dtype=torch.uint8))

    def try_out(self) -> None:
        self.write(0, 1)
        self.wait_equal(0, 1)
        self.write(0, 0)
        self.synchronize()


class TestLink:
    """The link of a GPU, with a driver and a stream of the test's."""

    @pytest.fixture
    def ledger(self, monkeypatch: pytest.MonkeyPatch) -> Ledger:
        ledger = Ledger()
        monkeypatch.setattr("headrace.transfer.cuda_stream._create_stream", lambda device: None)
        monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
        monkeypatch.setattr(ring_streams, "CudaRegistrar", lambda device: ledger)
        monkeypatch.setattr(ring_streams, "CudaCopyStream", Copies)
        return ledger

    @pytest.fixture
    def prepare(self, tmp_path: Path) -> Iterator[Callable[..., RingLink]]:
        plan, patterns = make_plan(6, 2)
        store = disk_store(save_patterns(patterns, tmp_path))

        def build(*, ahead: Callable[[RingLink], None] | None = None) -> RingLink:
            link = RingLink(torch.device("cuda", 0), entry_bytes=ENTRY_BYTES, max_entries=3, num_threads=2)
            loads = [store.load(unit) for unit in plan.units]
            if ahead is not None:
                link.start(plan, loads)
                ahead(link)
            link.prepare(plan, loads)
            return link

        yield build
        store.close()

    def check(self, link: RingLink) -> None:
        plan, patterns = make_plan(6, 2)
        assert link._ring is not None
        assert isinstance(link._copies, Copies)
        for unit in (0, 1, 2, 5, 5, 3):
            expected = patterns.sources[f"l{unit}.w"].bytes
            slot = torch.zeros(plan.units[unit].num_bytes, dtype=torch.uint8)
            link._ring.enqueue(unit, slot, link._copies)
            link._copies.synchronize()
            assert torch.equal(slot[: expected.numel()], expected)

    @pytest.mark.slow
    def test_it_pins_its_ring_once_and_gives_everything_back(
        self, ledger: Ledger, prepare: Callable[[], RingLink]
    ) -> None:
        before = (descriptors(), ring_mappings())
        link = prepare()
        assert list(ledger.held.values()) == [
            make_plan(6, 2)[0].lay_out_ring(entry_bytes=ENTRY_BYTES, max_entries=3).num_bytes
        ]
        self.check(link)
        stats = link.staging_stats()
        assert stats is not None
        assert stats.bytes_read > 0
        assert isinstance(link._copies, Copies)
        link._copies.stop()
        link.close()
        last = link.staging_stats()
        assert last is not None
        assert last.bytes_read >= stats.bytes_read, "what was counted last stays"
        assert ledger.held == {}
        assert not threads()
        assert (descriptors(), ring_mappings()) == before

    @pytest.mark.slow
    def test_readers_that_come_up_ahead(self, ledger: Ledger, prepare: Callable[..., RingLink]) -> None:
        """Of weights being loaded, while which nothing is pinned or read for it."""
        before = (descriptors(), ring_mappings())
        seen: list[object] = []

        def ahead(link: RingLink) -> None:
            stats = link.staging_stats()
            assert stats is not None
            seen.extend([set(threads()), dict(ledger.held), stats.bytes_read])

        link = prepare(ahead=ahead)
        assert seen == [set(threads()), {}, 0], "one process, started once"
        assert len(threads()) == 1
        self.check(link)
        assert isinstance(link._copies, Copies)
        link._copies.stop()
        link.close()
        assert ledger.held == {}
        assert (descriptors(), ring_mappings()) == before

    @pytest.mark.slow
    @pytest.mark.parametrize("end", ["close", "refusal"])
    def test_readers_that_came_up_in_vain(self, ledger: Ledger, prepare: Callable[..., RingLink], end: str) -> None:
        before = (descriptors(), ring_mappings())
        links: list[RingLink] = []

        def ahead(link: RingLink) -> None:
            links.append(link)
            assert threads()
            ledger.refusals = [2]
            if end == "close":
                link.close()
                raise InterruptedError

        with pytest.raises(InterruptedError if end == "close" else OptionError):
            prepare(ahead=ahead)
        assert not threads()
        assert (descriptors(), ring_mappings()) == before
        links[0].close()  # the code that undoes an offload closes it once more

    @pytest.mark.slow
    def test_readers_that_came_up_for_nobody(self, ledger: Ledger, prepare: Callable[..., RingLink]) -> None:
        """Whoever undoes an offload may be interrupted himself."""
        links: list[weakref.ref[RingLink]] = []

        def ahead(link: RingLink) -> None:
            links.append(weakref.ref(link))
            assert threads()
            raise InterruptedError

        with pytest.raises(InterruptedError):
            prepare(ahead=ahead)
        gc.collect()
        assert links[0]() is None
        assert eventually(lambda: not threads())

    @pytest.mark.parametrize(("cores", "readers"), [(1, 1), (2, 2), (7, 7), (8, 7), (15, 14), (16, 14), (32, 14)])
    def test_one_core_in_eight_is_left_to_others(
        self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, cores: int, readers: int
    ) -> None:
        monkeypatch.delenv("HEADRACE_READERS")
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
        assert RingLink(torch.device("cuda", 0))._num_threads == readers

    @pytest.mark.slow
    def test_one_that_nobody_closes(self, ledger: Ledger, prepare: Callable[[], RingLink], faults: Faults) -> None:
        faults.linger(0.2)
        link = prepare()
        self.check(link)
        assert isinstance(link._copies, Copies)
        link._copies.stop()
        del link
        assert eventually(lambda: not threads())
        assert ledger.held == {}

    def test_a_driver_that_refuses(self, ledger: Ledger, prepare: Callable[[], RingLink]) -> None:
        ledger.refusals = [2]
        with pytest.raises(OptionError, match=r"refused to register \d+ bytes .* error 2\); check `ulimit -l`, or use"):
            prepare()
        assert not threads()

    def test_within_a_capture(self, ledger: Ledger, prepare: Callable[[], RingLink]) -> None:
        ledger.capturing = True
        with pytest.raises(StateError, match="while a CUDA graph is being captured"):
            prepare()
        assert not threads()


def ring_failure(shared: SharedMemory, layout: object) -> str | None:
    return RingMemory(layout, shared.map(0, shared.num_bytes).numpy()).failure  # type: ignore[arg-type]


PARENT = """
import json, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job of a shell has to do without
sys.path[:] = json.loads(sys.argv[1])
from pathlib import Path
from rings import Machine, ProcessRingLink, disk_store
from headrace.transfer import ring_readers
ring_readers.PROGRAM = "faulty_readers"
machine = Machine(6, 2, link=ProcessRingLink(), store=disk_store(Path(sys.argv[2])))
machine.checked_forward()
if sys.argv[3] and os.fork() == 0:  # keeps the pipes open
    time.sleep(60)
    os._exit(0)
Path(os.environ["FAULTY_READERS"]).write_text(sys.argv[3])
machine.forward()
print(machine.link.readers.pid, flush=True)
if sys.argv[3]:
    time.sleep(60)
while True:
    try:
        machine.checked_forward()
        print("forward", flush=True)
    except KeyboardInterrupt:
        machine.checked_forward()
        print("interrupted", flush=True)
"""


class Parent:
    """A process that offloads, in a group of its own, for signals."""

    def __init__(self, path: Path, fault: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT, json.dumps(sys.path), str(path), fault],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        stand_by = psutil.Process(int(self.line()))
        self.readers = [stand_by, *stand_by.children()]
        self.forked = [child for child in psutil.Process(self.process.pid).children() if child != stand_by]

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for child in self.forked:
            child.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def path(tmp_path: Path, faults: Faults) -> Path:
    return save_patterns(make_plan(6, 2)[1], tmp_path)


class TestParents:
    @pytest.mark.slow
    def test_a_system_without_pidfd(self, make: Make, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
        """Then the end of their input is what ends the readers."""
        monkeypatch.setenv("FAULTY_READERS_NO_PIDFD", "1")
        machine = make()
        machine.checked_forward()
        stand_by = psutil.Process(pid_of(machine))
        readers = [stand_by, *stand_by.children()]
        assert len(readers) == 2
        machine.link.close()
        assert eventually(lambda: not any(map(psutil.Process.is_running, readers)), 5)

    def test_readers_are_a_group_in_the_session_of_their_parent(self, make: Make) -> None:
        """Linux shares processors out among sessions: one of the readers' own has little of a busy one."""
        pid = pid_of(make())
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) == pid != os.getpgid(0)

    @pytest.mark.slow
    @pytest.mark.parametrize("fault", ["slow 0.01", "never"])
    def test_readers_end_with_a_parent_that_is_killed(self, path: Path, fault: str) -> None:
        """In the middle of their reads, and although a child that it has forked keeps its end of the pipes open."""
        parent = Parent(path, fault)
        assert [process.is_running() for process in parent.readers] == [True, True]
        assert len(parent.forked) == 1
        parent.process.kill()
        parent.process.wait()
        assert eventually(lambda: not any(map(psutil.Process.is_running, parent.readers)), 5)
        parent.end()

    @pytest.mark.slow
    def test_an_interrupt_for_the_group_is_not_for_the_readers(self, path: Path) -> None:
        parent = Parent(path, "")
        assert parent.line() == "forward"
        os.killpg(parent.process.pid, signal.SIGINT)
        for process in parent.readers:
            process.send_signal(signal.SIGINT)
        said = [parent.line()]
        while said[-1] == "forward":
            said.append(parent.line())
        assert said[-1] == "interrupted"
        assert parent.line() == "forward"
        assert [process.is_running() for process in parent.readers] == [True, True]
        parent.end()


class TestProgram:
    def test_it_imports_no_torch(self) -> None:
        code = (
            "import sys; import headrace.transfer.ring_process; "
            "assert 'numpy' in sys.modules; print(*{'torch', 'safetensors', 'psutil'} & set(sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == ""

    def test_it_is_small_and_starts_soon(self, make: Make) -> None:
        begin = time.monotonic()
        machine = make(max_entries=1)
        took_s = time.monotonic() - begin
        stand_by = psutil.Process(pid_of(machine))
        used = [process.memory_full_info().pss for process in (stand_by, *stand_by.children())]
        print(f"readers: ready after {took_s:.2f} s, {used[0] / 2**20:.0f} + {used[1] / 2**20:.0f} MiB")
        assert took_s < 5, "0.15 s on a machine with nothing else to do"
        assert sum(used) < 60 << 20

    def test_neither_the_folder_nor_a_start_file_of_the_caller_matters(
        self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("json", "numpy", "headrace", "sitecustomize", "usercustomize"):
            (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file of the caller')")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "json.py"))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        machine = make()
        machine.checked_forward()

    def test_a_path_that_is_no_text(self, tmp_path: Path) -> None:
        folder = tmp_path / os.fsdecode(b"\xff\xfe")
        folder.mkdir()
        machine = Machine(6, 2, link=ProcessRingLink(), store=disk_store(self.moved(tmp_path, folder)))
        machine.checked_forward()
        machine.close()

    @pytest.mark.slow
    def test_a_parent_without_standard_streams(self, tmp_path: Path) -> None:
        """The next files that it opens get their numbers, which in a child are its own streams."""
        path = save_patterns(make_plan(6, 2)[1], tmp_path)
        code = f"""
            import os, sys
            sys.path[:] = {[path for path in sys.path if path]!r}
            from pathlib import Path
            from rings import Machine, ProcessRingLink, disk_store
            for fd in (0, 1, 2):
                os.close(fd)
            machine = Machine(6, 2, link=ProcessRingLink(), store=disk_store(Path({str(path)!r})))
            machine.checked_forward()
            machine.close()
            Path({str(tmp_path / "done")!r}).write_text("the bytes were right")
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, timeout=120)
        assert (tmp_path / "done").read_text() == "the bytes were right"

    @staticmethod
    def moved(tmp_path: Path, folder: Path) -> Path:
        """safetensors itself writes to no such folder."""
        return save_patterns(make_plan(6, 2)[1], tmp_path).rename(folder / "model.safetensors")
