"""The promise: loading brings every byte once, in one pass, in order, and never holds a model twice."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import headrace
from checks import raising, require_forwards
from headrace import Prefetch
from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.checkpoint.weight_map import WeightMap
from headrace.errors import StateError, TransferError
from headrace.memory.pinned import CudaRegistrar
from headrace.model.inventory import take_inventory
from headrace.model.live_tensors import bind
from headrace.plan.plan import Plan
from headrace.planning.request import PlanRequest
from headrace.runtime.prepare import prepare
from headrace.runtime.session import OffloadSession, SessionOptions
from headrace.stores.checkpoint_files import DiskStore
from headrace.stores.loader import Delivery, Read, WeightLoader, deliver
from headrace.stores.pinned_host import PinnedStore
from headrace.stores.sources import ByteRange, Copy, Source, writable_view
from headrace.stores.store import Load, Store
from headrace.testing import assert_same_bits
from headrace.transfer.link import ThreadLink
from models import MoE, all_layers, save
from registrars import Ledger, pin_by

SUPPORT = Path(__file__).resolve().parents[1] / "support"

KIB = 1 << 10


def delivery(name: str, data: torch.Tensor, cuts: list[int], into: torch.Tensor) -> Delivery:
    """``data`` in stretches that end at ``cuts``."""
    ends = [*sorted(cuts), data.numel()]
    starts = [0, *ends[:-1]]
    copies = [Copy(ByteRange.of(data[a:b]), a) for a, b in zip(starts, ends, strict=True) if b > a]
    return Delivery(name, lambda: copies, into)


class Ring:
    """An uploader whose device is ``other``: host memory in disguise."""

    piece_bytes = 64

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.finished = 0
        self.there: dict[int, torch.Tensor] = {}

    def upload(self, reads: list[Read]) -> None:
        self.sizes.append(sum(read.into.numel() for read in reads))
        for read in reads:
            read.src.read(writable_view(read.into.host))  # type: ignore[attr-defined]

    def finish(self) -> None:
        self.finished += 1


class Elsewhere:
    """Looks like a tensor of a device to the loader."""

    is_cpu = False

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host

    def __getitem__(self, index: slice) -> Elsewhere:
        return Elsewhere(self.host[index])

    def numel(self) -> int:
        return self.host.numel()


class TestDeliver:
    @pytest.mark.slow
    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(1, 300), st.lists(st.integers(0, 300), max_size=3), st.booleans()), max_size=8),
        st.integers(1, 130),
        st.integers(1, 3),
    )
    def test_every_byte_arrives_in_order(
        self, shapes: list[tuple[int, list[int], bool]], piece: int, threads: int
    ) -> None:
        data = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size, _, _ in shapes]
        rooms = [torch.zeros_like(buffer) for buffer in data]
        landed: list[str] = []
        moved: list[int] = []
        ring = Ring()

        def check(name: str) -> None:
            landed.append(name)
            assert torch.equal(rooms[int(name)], data[int(name)]), "reported before it was there"

        deliver(
            (
                delivery(str(i), buffer, [c for c in cuts if c < size], Elsewhere(room) if up else room)  # type: ignore[arg-type]
                for i, (buffer, room, (size, cuts, up)) in enumerate(zip(data, rooms, shapes, strict=True))
            ),
            num_threads=threads,
            uploader=ring,
            on_loaded=check,
            on_progress=moved.append,
            piece_bytes=piece,
        )
        assert landed == [str(i) for i in range(len(shapes))]
        assert sum(moved) == sum(buffer.numel() for buffer in data)
        assert max(moved, default=0) <= piece
        assert max(ring.sizes, default=0) <= min(piece, 64)
        assert ring.finished == 1

    def test_small_neighbours_share_a_job_and_large_ones_are_split(self) -> None:
        data = [torch.ones(size, dtype=torch.uint8) for size in (10, 10, 10, 1000)]
        moved: list[int] = []
        deliver(
            [delivery(str(i), buffer, [], torch.zeros_like(buffer)) for i, buffer in enumerate(data)],
            num_threads=2,
            on_progress=moved.append,
            piece_bytes=400,
        )
        assert moved == [30, 400, 400, 200]

    @pytest.mark.parametrize("place", ["source", "on_loaded", "on_progress", "copies"])
    def test_a_failure_stops_everything(self, place: str) -> None:
        fail = raising(TransferError("planted"))

        class Broken(Source):
            def read(self, offset: int, into: memoryview) -> None:
                fail()

        room = torch.zeros(100, dtype=torch.uint8)
        source = ByteRange(Broken(), 0, 100) if place == "source" else ByteRange.of(torch.ones(100, dtype=torch.uint8))
        first = Delivery("a", fail if place == "copies" else lambda: [Copy(source, 0)], room)
        threads = set(threading.enumerate())
        with pytest.raises(TransferError, match="planted"):
            deliver(
                [first] * 50,
                num_threads=2,
                on_loaded=fail if place == "on_loaded" else lambda name: None,
                on_progress=fail if place == "on_progress" else lambda num_bytes: None,
                piece_bytes=10,
            )
        assert set(threading.enumerate()) <= threads

    def test_a_source_that_does_not_add_up(self) -> None:
        buffer = torch.ones(10, dtype=torch.uint8)
        short = Delivery("w", lambda: [Copy(ByteRange.of(buffer[:10]), 0)], torch.zeros(11, dtype=torch.uint8))
        with pytest.raises(TransferError, match="w: expected sources of 11 bytes, found 10"):
            deliver([short], num_threads=1)

    @pytest.mark.slow
    def test_what_has_landed_is_let_go_of_before_the_rest_is_opened(self) -> None:
        """At most the jobs under way hold their sources: 2 threads, 2 jobs each, and the one being made."""
        alive: list[weakref.ref[np.ndarray[Any, Any]]] = []
        most = 0

        def deliveries() -> Iterator[Delivery]:
            nonlocal most
            for i in range(40):
                array = np.ones(100, np.uint8)
                alive.append(weakref.ref(array))
                buffer = torch.from_numpy(array)
                del array
                most = max(most, sum(ref() is not None for ref in alive))
                copies = [Copy(ByteRange.of(buffer), 0)]
                del buffer
                yield Delivery(str(i), copies.copy, torch.empty(100, dtype=torch.uint8))
                del copies

        deliver(deliveries(), num_threads=2, piece_bytes=100)
        assert 1 <= most <= 6
        gc.collect()
        assert not any(ref() is not None for ref in alive)


class TestOffload:
    @pytest.mark.slow
    @pytest.mark.parametrize("on_meta", [True, False])
    def test_exact_bytes_and_the_model_comes_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_meta: bool
    ) -> None:
        ledger = Ledger()
        stores = pin_by(ledger, monkeypatch)
        source = MoE(4).eval()
        tokens = torch.arange(9)
        expected = source(tokens)
        with torch.device("meta" if on_meta else "cpu"):
            model = MoE(4).eval()
        if not on_meta:
            model.load_state_dict(source.state_dict())
        tensors = dict(model.named_parameters())
        checkpoint = save(source, tmp_path) if on_meta else None
        for files in (checkpoint, None):
            handle = headrace.offload(model, all_layers(2, "cpu"), checkpoint=files)
            require_forwards(handle, tokens, expected, 1)
            assert stores[-1].host_bytes == sum(ledger.held.values()) == sum(u.num_bytes for u in handle.plan.units)
            assert stores[-1].host_bytes <= 1.01 * handle.plan.offloaded_bytes + 256 * len(handle.plan.units) * 6
            handle.remove()
            del handle
            gc.collect()
            assert ledger.held == {}
            assert_same_bits(model(tokens), expected)
            if not on_meta:
                assert all(parameter is tensors[name] for name, parameter in model.named_parameters())

    def test_progress_covers_the_whole_pass(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pin_by(Ledger(), monkeypatch)
        folder = save(MoE(4), tmp_path)
        with torch.device("meta"):
            model = MoE(4).eval()
        seen: list[tuple[int, int]] = []
        handle = headrace.offload(
            model, all_layers(2, "cpu"), checkpoint=folder, progress=lambda done, total: seen.append((done, total))
        )
        total = handle.plan.weight_bytes
        assert [done for done, _ in seen] == sorted({done for done, _ in seen})
        assert (seen[0], seen[-1]) == ((0, total), (total, total))
        handle.remove()

    def test_a_file_written_to_meanwhile_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pin_by(Ledger(), monkeypatch)
        folder = save(MoE(4), tmp_path)
        (file,) = Checkpoint.open(folder).files
        with torch.device("meta"):
            model = MoE(4).eval()

        def write(done: int, total: int) -> None:
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)

        with pytest.raises(TransferError, match="it was written to while in use"):
            headrace.offload(model, all_layers(2, "cpu"), checkpoint=folder, progress=write)
        assert all(parameter.is_meta for parameter in model.parameters())

    @pytest.mark.slow
    def test_so_is_one_that_is_put_back_before_the_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pin_by(Ledger(), monkeypatch)
        monkeypatch.setattr("headrace.stores.loader.PIECE_BYTES", 1 << 16)  # most is read after the write
        folder = save(nn.Sequential(*(nn.Linear(1 << 10, 1 << 10, bias=False) for _ in range(12))), tmp_path)
        (file,) = Checkpoint.open(folder).files
        content, at = file.read_bytes(), file.stat()
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(1 << 10, 1 << 10, bias=False) for _ in range(12))).eval()
        calls: list[int] = []

        def write(done: int, total: int) -> None:
            calls.append(done)
            if len(calls) == 2:
                file.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
            elif done == total:
                file.write_bytes(content)
                os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))

        with pytest.raises(TransferError, match="it was written to while in use"):
            headrace.offload(model, Prefetch(1, 1, 2, params=["weight"]), checkpoint=folder, progress=write)
        assert calls[-1] < len(content)

    def test_capture_is_refused_before_anything_moves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pin_by(Ledger(capturing=True), monkeypatch)
        model = MoE(4).eval()
        before = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
        with pytest.raises(StateError, match="before the capture begins"):
            headrace.offload(model, all_layers(2, "cpu"))
        assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == before

    def test_a_failure_after_tensors_have_moved_leaves_a_working_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ledger = Ledger()
        pin_by(ledger, monkeypatch)
        model = MoE(4).eval()
        tensors = dict(model.named_parameters())
        tokens = torch.arange(9)
        expected = model(tokens)

        monkeypatch.setattr("headrace.runtime.session.StateGuard", raising(MemoryError))
        with pytest.raises(MemoryError):
            headrace.offload(model, all_layers(2, "cpu"))
        assert all(parameter is tensors[name] for name, parameter in model.named_parameters())
        assert ledger.held == {}
        assert_same_bits(model(tokens), expected)

    @pytest.mark.slow
    def test_large_live_tensors_are_adopted_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.memory.pinned.MIN_ADOPTED_BYTES", 1 << 20)
        monkeypatch.setattr("headrace.memory.pinned.is_anonymous", lambda *args: True)
        ledger = Ledger()
        stores = pin_by(ledger, monkeypatch)
        model = nn.Sequential(*(nn.Linear(600, 600, bias=False) for _ in range(4))).eval()
        before = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
        x = torch.randn(2, 600)
        with torch.no_grad():
            expected = model(x)
            handle = headrace.offload(model, Prefetch(1, 1, 2, params=["weight"]))
            assert stores[-1].adopted == set(before)
            assert ledger.held == dict.fromkeys(before.values(), 600 * 600 * 4)
            require_forwards(handle, x, expected, 1)
        handle.remove()
        assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == before
        gc.collect()
        assert ledger.held == {}


class Beginning(ThreadLink):
    """Says when it was told what."""

    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self._told = told

    def start(self, plan: Plan, loads: Sequence[Load]) -> None:
        assert [load.unit for load in loads] == [unit.index for unit in plan.units]
        self._told.append("start")

    def prepare(self, plan: Plan, loads: Sequence[Load]) -> None:
        self._told.append("prepare")

    def close(self) -> None:
        self._told.append("close")
        super().close()


def attach(model: nn.Module, folder: Path, link: ThreadLink, **options: Any) -> OffloadSession:
    """``model`` is on ``meta``, its checkpoint in ``folder``."""
    prepared = prepare(PlanRequest(model, all_layers(2, "disk"), checkpoint=WeightMap.open(folder)))
    session = OffloadSession(prepared, SessionOptions(link=link, **options))
    session.attach()
    return session


@pytest.mark.parametrize("fails", [False, True])
def test_a_link_begins_before_weights_are_loaded(fails: bool, tmp_path: Path) -> None:
    folder = save(MoE(4), tmp_path)
    with torch.device("meta"):
        model = MoE(4).eval()
    told: list[str] = []

    def progress(done: int, total: int) -> None:
        told.append("load")
        if fails:
            raise InterruptedError

    if fails:
        with pytest.raises(InterruptedError):
            attach(model, folder, Beginning(told), progress=progress)
        assert told == ["start", "load", "close"]
    else:
        attach(model, folder, Beginning(told), progress=progress).remove()
        assert list(dict.fromkeys(told)) == ["start", "load", "prepare", "close"]
    assert all(parameter.is_meta for parameter in model.parameters()) is fails


def test_what_undoes_an_offload_goes_on_behind_an_error(tmp_path: Path) -> None:
    """A device that cannot be waited for, say: the model is the caller's all the same."""

    class Broken(ThreadLink):
        def prepare(self, plan: Plan, loads: Sequence[Load]) -> None:
            raise StateError("planted in prepare")

        def close(self) -> None:
            super().close()
            raise RuntimeError("planted in close")

    folder = save(MoE(4), tmp_path)
    with torch.device("meta"):
        model = MoE(4).eval()
    with pytest.raises(RuntimeError, match="planted in close"):
        attach(model, folder, Broken())
    assert all(parameter.is_meta for parameter in model.parameters())


class Uploads:
    """In place of the uploader to a GPU: says what would pin its buffers."""

    piece_bytes = 1 << 20
    made: list[tuple[torch.device, Any]]

    def __init__(self, device: torch.device, registrar: Any) -> None:
        self.made.append((device, registrar))

    def upload(self, reads: list[Read]) -> None:
        pass

    def finish(self) -> None:
        pass


class TestUploads:
    """Residents on their way to a device; here they lie on ``meta``, which is no host memory either."""

    @pytest.fixture
    def load(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Store], Any]:
        made: list[tuple[torch.device, Any]] = []
        monkeypatch.setattr(Uploads, "made", made, raising=False)
        monkeypatch.setattr("headrace.stores.loader.CudaUploader", Uploads)
        monkeypatch.setattr("headrace.stores.loader.cpus_near", lambda device: None)
        model = nn.Linear(4, 4, bias=False)
        bound = bind(model, take_inventory(model).storages)
        residents = {"weight": torch.empty(64, dtype=torch.uint8, device="meta")}

        def run(store: Store) -> Any:
            made.clear()
            WeightLoader(bound, store, {}, residents, device=torch.device("cuda", 1)).run()
            assert [device for device, _ in made] == [torch.device("cuda", 1)] * len(made)
            assert made
            return made[-1][1]

        return run

    @pytest.mark.parametrize("store", [DiskStore({}), PinnedStore([], {}, None)])
    def test_use_pinned_buffers_with_every_store_unless_forbidden(
        self, store: Store, load: Callable[[Store], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of the copies of mode 'disk' none was: 7.5 GB/s on an H200's host, where mode 'cpu' had 13 and more."""
        assert isinstance(load(store), CudaRegistrar)
        monkeypatch.setenv("HEADRACE_DISABLE_PIN_MEMORY", "1")
        assert load(store) is None


GROWTH = """
import gc, json, sys, torch, headrace
from torch import nn
sys.path.insert(0, sys.argv[1])
import pytest
from registrars import Ledger
from registrars import pin_by
from headrace.memory.system import PeakMeter, rss_bytes

torch.set_num_threads(1)
side = int(sys.argv[2])

def build(layers, side):
    return nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(layers))).eval()

def run(layers, side):
    with torch.no_grad():
        model = build(layers, side)
        handle = headrace.offload(model, headrace.Prefetch(1, 1, 2, params=["weight"]))
        model(torch.zeros(1, side))
    return model, handle

with pytest.MonkeyPatch.context() as patch:
    pin_by(Ledger(), patch)
    run(4, 64)[1].remove()
    gc.collect()
    start, meter = rss_bytes(), PeakMeter()
    model, handle = run(24, side)
    plan = handle.plan
    print(json.dumps([rss_bytes() - start, meter.growth_bytes(), plan.offloaded_bytes, sum(plan.slot_bytes)]))
"""


class TestMemory:
    @pytest.mark.slow
    @pytest.mark.parametrize("side", [1536, 3000], ids=["copied", "adopted"])
    def test_a_live_model_is_never_there_twice(self, side: int) -> None:
        """24 tensors, 9 MiB each to be copied or 34 MiB each to be adopted, against the bar of 1 % and 64 MiB."""
        command = [sys.executable, "-c", textwrap.dedent(GROWTH), str(SUPPORT), str(side)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        growth, peak, offloaded, slots = json.loads(done.stdout)
        assert offloaded == 24 * side * side * 4
        assert growth <= 1.01 * offloaded + slots + (64 << 20)
        assert peak <= 1.01 * offloaded + slots + (64 << 20)
