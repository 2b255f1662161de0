"""The promise: between a GPU and experts in files, host memory holds what is in no slot, and bits are the resident's.

Here both tiers are memory of a CPU: a plan for one that has host memory above the files runs the same code.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_model

import headrace
import interrupts
from checks import run_threads
from expert_layers import Graph, Layers, X, fail_read, steps
from headrace import Handle, Plan, Rules
from headrace.adapters.transformers import load
from headrace.checkpoint.safetensors_header import Checkpoint
from headrace.errors import HeadraceWarning, OptionError, RaceError, StateError, TransferError
from headrace.experts.rows import CUT
from headrace.graphs.decoding import CapturedSteps
from headrace.memory import split_range
from headrace.model.inventory import take_inventory
from headrace.plan import cached_experts
from headrace.plan.build import build_plan
from headrace.plan.cached_experts import (
    CachedLayer,
    host_memory_bytes,
    staging_rows,
    with_host_slots,
    with_slots,
)
from headrace.planning.checks import needs_of
from headrace.stores import expert_files
from headrace.testing import assert_same_bits
from headrace.transfer import expert_tiers
from headrace.transfer.expert_reads import ExpertReader, FileCache
from headrace.transfer.expert_tiers import TieredCache
from moe_models import IDS, gpt_oss, outputs, qwen
from recorded_graphs import RecordedGraph, record_graphs

MIB = 2**20
ALL = torch.arange(40)
CPU = torch.device("cpu")
EXPERT_BYTES = 4 * (192 * 128 + 192)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows for what is read, also without host memory above the files, so that every step uses them again."""
    monkeypatch.setattr(cached_experts, "_STAGING_BYTES", 1)
    monkeypatch.setattr(expert_files, "staging_rows", lambda layers, on_gpu: staging_rows(layers, on_gpu=True))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(Layers(), str(tmp_path / "model.safetensors"))
    return tmp_path


def tiered(model: torch.nn.Module, num_slots: int, host_slots: int, pattern: str = "layers") -> Plan:
    plan = build_plan(take_inventory(model), Rules([(pattern, "cache")], expert_slots=num_slots, mode="disk"))
    return replace(plan, cached=tuple(with_host_slots(layer, host_slots) for layer in plan.cached))


def offloaded(folder: Path, num_slots: int = 6, host_slots: int = 10) -> tuple[Layers, Handle]:
    model = Layers().eval()
    return model, headrace.offload(model, tiered(model, num_slots, host_slots), checkpoint=folder, device="cpu")


def caches(handle: Handle) -> Iterator[TieredCache]:
    for _, cache in handle._session._caches:
        assert isinstance(cache, TieredCache)
        yield cache


def require_exclusive(handle: Handle, resident: Layers) -> None:
    """No expert is in both tiers, each has a row of its own there, and rows hold its bytes."""
    for cache, layer in zip(caches(handle), resident.layers, strict=True):
        slots, places = cache._slot_of, cache._place_of
        assert not slots.keys() & places.keys()
        assert len(set(slots.values())) == len(slots) <= cache.num_slots
        assert len(set(places.values())) == len(places) <= cache._host_slots
        weights = [weight.detach().flatten(1).view(torch.uint8) for weight in (layer.up, layer.bias)]
        for (rows, _), held, weight in zip(cache._parts, cache._held, weights, strict=True):
            assert all(torch.equal(rows[row], weight[expert]) for expert, row in slots.items())
            assert all(torch.equal(held[place], weight[expert]) for expert, place in places.items())


@pytest.mark.parametrize("num_slots", [1, 7, 33, 64])
def test_ranges_of_a_device_have_all_rows(num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors with rows of other sizes, which begin their overflow rows at the same row."""
    made: list[tuple[int, int, int]] = []

    class Range:
        def __init__(self, near: int, far: int, end: int, device: torch.device, shared: Any = None) -> None:
            made.append((near, *((end, end) if shared is None else (shared[0], shared[0] + shared[1]))))
            assert far == end
            self.whole = torch.empty(end, dtype=torch.uint8, device="meta")

    monkeypatch.setattr(split_range, "MappedMemory", lambda size, *_: size)
    monkeypatch.setattr(split_range, "SplitRange", Range)
    sizes = {"up": 64 * 96 << 10, "down": 64 * 64 << 10, "odd": 64 * 80_000, "bias": 64 * 768}
    layers = [CachedLayer(f"layers.{i}", 64, 1, sizes, host_slots=0) for i in range(2)]
    named = [replace(e, storages={f"{e.module_fqn}.{name}": size for name, size in sizes.items()}) for e in layers]
    (layer, _) = layers = with_slots(named, num_slots)
    rows = expert_files.DeviceRows(layers, torch.device("meta"))
    for name in layer.storages:
        assert len(rows.whole(name)) >= layer.num_rows * layer.row_bytes(name)
    for (near, start, end), name in zip(made, layer.storages, strict=False):
        row = layer.row_bytes(name)
        assert near >= num_slots * row
        assert near <= start <= max(start, layer.first_overflow_row * row)
        assert num_slots == 64 or end >= layer.num_rows * row


SIZES = [(1, 0), (1, 1), (3, 5), (6, 34), (10, 1), (39, 1), (40, 0)]


class TestBits:
    @pytest.mark.parametrize(("num_slots", "host_slots"), SIZES)
    def test_many_steps(self, folder: Path, num_slots: int, host_slots: int) -> None:
        """With fewer experts in both tiers than a step uses, too, and prompts that use all."""
        resident, (model, handle) = Layers(), offloaded(folder, num_slots, host_slots)
        with handle, torch.inference_mode():
            for ids in (*steps(60), ALL, *steps(30, most=30, seed=1), *steps(60, most=3, seed=2), ALL):
                assert_same_bits(model(X, ids), resident(X, ids))
                require_exclusive(handle, resident)
        assert_same_bits(model(X, ALL), resident(X, ALL))

    @pytest.mark.parametrize("make", [qwen, gpt_oss])
    def test_transformers(self, make: Any, tmp_path: Path) -> None:
        """gpt-oss has biases, whose rows are small."""
        model = make()
        expected = outputs(model)
        model.save_pretrained(tmp_path)
        loaded, handle = load(tmp_path, tiered(model, 2, 3, "experts"), device="cpu", dtype=torch.float32)
        with handle:
            assert_same_bits(outputs(loaded), expected)
            assert handle.stats().bytes_moved > 0

    def test_in_and_out_of_inference_mode(self, folder: Path) -> None:
        resident, model = Layers(), Layers().eval()
        with torch.inference_mode():
            handle = headrace.offload(model, tiered(model, 3, 5), checkpoint=folder, device="cpu")
        with handle, torch.no_grad():
            for ids in steps(20):
                assert_same_bits(model(X, ids), resident(X, ids))
                with torch.inference_mode():
                    assert_same_bits(model(X, ids), resident(X, ids))

    def test_threads(self, folder: Path) -> None:
        resident, (model, handle) = Layers(), offloaded(folder)

        def run(seed: int) -> None:
            for ids in steps(40, seed=seed):
                assert_same_bits(model(X, ids), resident(X, ids))

        with handle:
            run_threads([partial(run, seed) for seed in range(3)])
            require_exclusive(handle, resident)


class TestMoves:
    @pytest.mark.parametrize(("slots", "places"), [(6, 10), (6, 4), (10, 3), (8, 1)])
    def test_both_are_one_lru(self, folder: Path, slots: int, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of as many slots as both have; and of each expert as many bytes move as that says."""
        moved = Counter[str]()
        for name in ("_copy_up", "_copy_down", "_land"):
            method = getattr(TieredCache, name)

            def count(*arguments: Any, method: Any = method, name: str = name) -> None:
                moved[name] += 1 if name == "_land" else len(arguments[1])
                method(*arguments)

            monkeypatch.setattr(TieredCache, name, count)
        _model, handle = offloaded(folder, slots, places)
        with handle:
            cache, lru, expected, evicted = next(caches(handle)), list[int](), Counter[str](), 0
            for ids in steps(300, most=6, seed=3):
                used, on_device = sorted(ids.tolist()), lru[-slots:]
                hits = [each for each in used if each in on_device]
                missing = [each for each in used if each not in on_device]
                expected["_copy_up"] += sum(each in lru for each in missing)
                expected["_land"] += sum(each not in lru for each in missing)
                lru = [*(each for each in lru if each not in used), *hits, *missing][-slots - places :]
                leaving = [each for each in on_device if each not in lru[-slots:]]
                evicted += len(leaving)
                expected["_copy_down"] += sum(each in lru for each in leaving)
                cache.admit(ids)
                assert [*cache._place_of, *cache._slot_of] == lru
            assert moved == expected
            assert places < 10 or moved["_land"] < 0.7 * sum(moved.values())
            counts = cache.counts()
            assert counts.fetched == moved["_copy_up"] + moved["_land"]
            assert counts.evicted == evicted >= moved["_copy_down"] > 0
            assert counts.read == moved["_land"]
            assert counts.in_place == 0

    def test_a_prompt_reads_each_expert_once(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """From front to back. Both tiers keep what it uses, and then it reads the rest alone."""
        started, start = list[int](), ExpertReader.start

        def note(reader: ExpertReader, expert: int, *others: Any) -> Any:
            started.append(expert)
            return start(reader, expert, *others)

        monkeypatch.setattr(ExpertReader, "start", note)
        model, handle = offloaded(folder, 6, 10)
        with handle:
            for count in (40, 24, 24):
                before = read_bytes(handle)
                started.clear()
                model(X, ALL.repeat(5))
                assert read_bytes(handle) - before == 2 * count * EXPERT_BYTES
                of_a_layer = sorted(set(started))
                assert started == 2 * [expert for expert in of_a_layer for _ in range(2)]  # tensors of it
                assert len(of_a_layer) == count
            for layer in handle.stats().experts:
                assert (layer.hits, layer.fetched, layer.in_place, layer.read) == (12, 6, 34 * 3, 40 + 24 + 24)
            assert "176 experts read from files" in str(handle.stats())

    def test_a_prompt_reads_ahead(self, folder: Path) -> None:
        """As many as the staging has rows, while the layer before computes; of a layer that is not the last."""
        resident, (model, handle) = Layers(), offloaded(folder, 6, 10)
        (first, second), rows = model.layers, len(handle._session._ranges.staging)
        with handle:
            before = read_bytes(handle)
            first(X, ALL)
            for transfer in (transfer for read in next(caches(handle))._staging.ahead for transfer in read.transfers):
                transfer.join()
            assert read_bytes(handle) - before == (40 + rows) * EXPERT_BYTES
            assert_same_bits(second(X, ALL), resident.layers[1](X, ALL))
            assert read_bytes(handle) - before == 80 * EXPERT_BYTES
            assert not next(caches(handle))._staging.ahead
            first(X, torch.arange(39))
            assert not next(caches(handle))._staging.ahead

    def test_all_experts_are_read_once(self, folder: Path) -> None:
        """Host memory has room for all that are in no slot."""
        model, handle = offloaded(folder, 3, 37)
        with handle:
            before = read_bytes(handle)
            for ids in (ALL, *steps(50)):
                model(X, ids)
            assert read_bytes(handle) - before == 2 * 40 * EXPERT_BYTES


def read_bytes(handle: Handle) -> int:
    reads = handle._session._ranges.reads
    return reads.direct + reads.buffered


class Late:
    """A stream, and an event of one, whose work is done when another waits for it, and no sooner: the latest a GPU may.

    Attributes:
        started: what it has been given and not done; a pair is an event of another stream that it waits for.
        num_done, num_given: how much of all that was given.
    """

    def __init__(self) -> None:
        self.started = deque[Callable[[], object] | Passed]()
        self.num_done = self.num_given = 0

    def give(self, work: Callable[[], object] | Passed) -> None:
        self.started.append(work)
        self.num_given += 1

    def record_event(self) -> Passed:
        return Passed(self, self.num_given)

    def wait_event(self, event: Passed) -> None:
        self.give(event)

    def wait_stream(self, stream: Late) -> None:
        self.give(stream.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def advance(self) -> bool:
        """Do what is next, if it waits for nothing."""
        if not self.started or (isinstance(self.started[0], Passed) and not self.started[0].has_passed):
            return False
        if not isinstance(work := self.started.popleft(), Passed):
            work()
        self.num_done += 1
        return True


class Passed(NamedTuple):
    """A point in a stream."""

    stream: Late
    end: int

    @property
    def has_passed(self) -> bool:
        return self.stream.num_done >= self.end

    def synchronize(self) -> None:
        while not self.has_passed:
            if isinstance(work := self.stream.started[0], Passed):
                work.synchronize()
            self.stream.advance()


class LateStreams:
    """Those of a GPU; ``early`` do all they are allowed to whenever more is given, a part of them or in any order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, early: str) -> None:
        self.up, self.down, self.compute = each = Late(), Late(), Late()
        self._early = [stream for name, stream in zip(("up", "down", "compute"), each, strict=True) if name in early]
        self._chooser = np.random.default_rng(int(early)) if early.isdigit() else None
        monkeypatch.setattr(expert_tiers, "Streams", lambda _: self)
        monkeypatch.setattr(expert_tiers, "_copy", self._copy)

    def _copy(self, stream: Late, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for into, source in pairs:
            self.give(stream, partial(into.copy_, source))

    def give(self, stream: Late, work: Callable[[], object]) -> None:
        stream.give(work)
        while any(early.advance() for early in self._early):
            pass
        if self._chooser is not None:
            for choice in self._chooser.integers(0, 3, self._chooser.integers(0, 4)):
                (self.up, self.down, self.compute)[choice].advance()

    def synchronize(self) -> None:
        for stream in (self.up, self.down, self.compute):
            stream.synchronize()

    def close(self) -> None:
        self.synchronize()


class Kernels:
    """What reads rows of each layer, late."""

    def __init__(self, handle: Handle, streams: LateStreams) -> None:
        self.model, self.num_run = Layers(), 0
        self._caches, self._streams = list(caches(handle)), streams
        self._weights = [[w.detach().flatten(1).view(torch.uint8) for w in (e.up, e.bias)] for e in self.model.layers]

    def step(self, *ids: torch.Tensor, skips: int = 2) -> None:
        """``ids``: of each layer, or of both; ``skips``: the layer that does not run."""
        for layer, cache in enumerate(self._caches):
            if layer != skips:
                rows = cache.admit(ids[-layer]).tolist()
                self._streams.give(self._streams.compute, partial(self._read, layer, ids[-layer].tolist(), rows))

    def _read(self, layer: int, ids: list[int], rows: list[int]) -> None:
        for (memory, _), weight in zip(self._caches[layer]._parts, self._weights[layer], strict=True):
            assert all(torch.equal(memory[row], weight[each]) for each, row in zip(ids, rows, strict=True))
        self.num_run += 1


@pytest.mark.parametrize("early", ["", "up", "down", "compute", "0"])
class TestWheneverCopiesRun:
    """Kernels read the right bytes, though threads read for the next rows before copies have run."""

    @pytest.mark.parametrize(("num_slots", "host_slots"), SIZES)
    def test_steps(
        self, folder: Path, num_slots: int, host_slots: int, early: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        streams = LateStreams(monkeypatch, early)
        _model, handle = offloaded(folder, num_slots, host_slots)
        choices = (*steps(30), ALL, *steps(20, most=30, seed=1), *steps(40, most=3, seed=2), ALL, *steps(20, seed=3))
        with handle:
            kernels = Kernels(handle, streams)
            for ids in choices:
                kernels.step(ids)
            streams.synchronize()
            assert kernels.num_run == 2 * len(choices)
            require_exclusive(handle, kernels.model)

    def test_interrupts(self, folder: Path, early: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """One at each line of an admission, in turn, and in another step each time."""
        monkeypatch.setattr(interrupts, "SOURCES", expert_tiers.__file__)
        streams, choices = LateStreams(monkeypatch, early), steps(500, most=14, seed=9)
        _model, handle = offloaded(folder, 6, 10)
        with handle:
            kernels, places = Kernels(handle, streams), set[str]()
            for number, ids in enumerate(choices):
                interrupter = interrupts.Interrupter(number % 170)
                _, error = interrupter.run(partial(kernels._caches[number % 2].admit, ids))
                assert error is None or isinstance(error, KeyboardInterrupt), error
                places.add(interrupter.place)
                kernels.step(choices[number - 1])
                if number % 9 == 0:
                    streams.synchronize()
                    require_exclusive(handle, kernels.model)
            streams.synchronize()
            assert kernels.num_run == 2 * len(choices)
            assert len(places) > 60

    @pytest.mark.parametrize("rows", [2, 9])
    @pytest.mark.parametrize(("num_slots", "host_slots"), SIZES[::2])
    def test_reads_ahead(
        self, folder: Path, num_slots: int, host_slots: int, rows: int, early: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """For the layer that comes next, for one that does not, and of experts that it does not use."""
        monkeypatch.setattr(cached_experts, "_STAGING_BYTES", rows * EXPERT_BYTES)
        slow_down(monkeypatch)
        streams = LateStreams(monkeypatch, early)
        _model, handle = offloaded(folder, num_slots, host_slots)
        chooser, few, met = np.random.default_rng(7), steps(16, most=30, seed=6), Counter[bool]()
        with handle:
            kernels = Kernels(handle, streams)
            for ids in few:
                met[bool(kernels._caches[1]._ahead)] += 1
                kernels.step(*((ids, ALL)[int(each)] for each in chooser.integers(0, 2, 2)), skips=chooser.integers(3))
            streams.synchronize()
            require_exclusive(handle, kernels.model)
            # Where slots hold all nothing is read after the first prompt.
            assert (met[True] > 2) == (num_slots + host_slots < 40)

    def test_interrupts_of_reads_ahead(self, folder: Path, early: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(interrupts, "SOURCES", expert_tiers.__file__)
        slow_down(monkeypatch)
        streams, choices = LateStreams(monkeypatch, early), steps(100, most=30, seed=9)
        _model, handle = offloaded(folder, 6, 10)
        with handle:
            kernels, places = Kernels(handle, streams), set[str]()
            for number, ids in enumerate(choices):
                interrupter = interrupts.Interrupter(number % 50)
                _, error = interrupter.run(kernels._caches[1].read_ahead)
                assert error is None or isinstance(error, KeyboardInterrupt), error
                places.update([interrupter.place] if error else [])
                kernels.step(choices[number - 1], ids, skips=number % 3)
            streams.synchronize()
            require_exclusive(handle, kernels.model)
            assert len(places) > 15, places


def slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each read take two milliseconds more."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: (time.sleep(2e-3), preadv(*arguments))[1])


def test_one_layer_is_read_ahead(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one waits, and no row is written for both, where the layers between have all experts in slots."""
    slow_down(monkeypatch)
    resident, model = Layers(3).eval(), Layers(3).eval()
    save_model(resident, str(tmp_path / "model.safetensors"))
    plan = tiered(model, 40, 0)
    cached = [
        with_host_slots(with_slots([layer], count)[0], 0) for layer, count in zip(plan.cached, (40, 3, 3), strict=True)
    ]
    with headrace.offload(model, replace(plan, cached=tuple(cached)), checkpoint=tmp_path, device="cpu"):
        for which in (0, 1, 0, 2, 1, 0, 1, 2) * 3:
            assert_same_bits(model.layers[which](X, ALL), resident.layers[which](X, ALL))


@pytest.mark.parametrize("between", [[], [39]])
def test_what_is_read_and_not_used_writes_no_row_later(
    between: list[int], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its tensors lie elsewhere in a row, and copies from there are late."""
    model, resident = Layers().eval(), Layers().eval()
    for each in (model, resident):
        each.layers[1].up = torch.nn.Parameter(resident.layers[1].up[:, :96].detach().clone())
        each.layers[1].bias = torch.nn.Parameter(resident.layers[1].bias[:, :96].detach().clone())
    save_model(resident, str(tmp_path / "model.safetensors"))
    slow, preadv = Checkpoint.open(tmp_path).tensors["layers.1.bias"], os.preadv

    def read(fd: int, views: Any, offset: int) -> int:
        time.sleep(0.1 * (slow.offset - 4096 < offset < slow.offset + slow.num_bytes))
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", read)
    streams = LateStreams(monkeypatch, "")
    with headrace.offload(model, tiered(model, 3, 2), checkpoint=tmp_path, device="cpu") as handle:
        first, second = caches(handle)
        second.admit(torch.arange(35, 40))
        first.admit(ALL)
        assert second._ahead
        second.admit(torch.tensor(between, dtype=torch.int64))
        rows = first.admit(torch.arange(20, 30)).tolist()
        time.sleep(0.3)
        streams.synchronize()
        weight = resident.layers[0].up.detach().flatten(1).view(torch.uint8)
        assert torch.equal(first._parts[0][0][rows], weight[20:30])


def steps_of(model: Any) -> CapturedSteps:
    found: CapturedSteps = vars(model)["_headrace_decode_graphs"]._steps
    return found


def run_all(model: Callable[[torch.Tensor], Any]) -> list[Any]:
    """All experts, eight at a time."""
    return [model(torch.arange(first, first + 8)) for first in range(0, 40, 8)]


class TestGraphs:
    """Of which one ends where the host has to bring experts."""

    @pytest.fixture(autouse=True)
    def recorded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        record_graphs(monkeypatch)

    @pytest.mark.parametrize("debug", ["0", "1"])
    @pytest.mark.parametrize(("num_slots", "host_slots"), SIZES)
    def test_many_steps(
        self, folder: Path, num_slots: int, host_slots: int, debug: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between eager ones."""
        monkeypatch.setenv("HEADRACE_DEBUG", debug)
        resident, (model, handle) = Layers(), offloaded(folder, num_slots, host_slots)
        with handle, torch.inference_mode():
            before = read_bytes(handle)
            graphs = {count: Graph(model, count, CPU) for count in (3, 8, 30)}
            assert read_bytes(handle) == before
            for seed, ids in enumerate((*steps(12), ALL, *steps(6, most=30, seed=1))):
                for count, graph in graphs.items():
                    choice = torch.from_numpy(np.random.default_rng(seed).choice(40, count, replace=False))
                    assert_same_bits(graph(choice), resident(X, choice))
                assert_same_bits(model(X, ids), resident(X, ids))
                require_exclusive(handle, resident)
            assert handle.stats().experts[0].steps == 4 * 19
            assert read_bytes(handle) > before

    def test_an_error_of_the_disk(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        resident, (model, handle) = Layers(), offloaded(folder, 4, 6)
        with handle, torch.inference_mode():
            graph = Graph(model, 8, CPU)
            for failing in (1, 2, 9):
                with monkeypatch.context() as patched:
                    fail_read(patched, failing)
                    with pytest.raises(TransferError, match="Input/output error"):
                        run_all(graph)
                require_exclusive(handle, resident)
                assert_same_bits(run_all(graph), run_all(partial(resident, X)))

    def test_a_row_that_is_damaged(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Is found in a replay with ``HEADRACE_DEBUG=1``."""
        monkeypatch.setenv("HEADRACE_DEBUG", "1")
        model, handle = offloaded(folder)
        with handle, torch.inference_mode():
            graph, cache = Graph(model, 5, CPU), next(caches(handle))
            graph(torch.arange(5))
            assert handle.stats().experts
            cache._parts[0][0][cache._slot_of[3]] += 1
            graph(torch.arange(5))
            with pytest.raises(RaceError, match="words in rows"):
                handle.stats()

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no memory for the graph")])
    @pytest.mark.parametrize("where", ["capture_begin", "capture_end"])
    def test_an_error_of_a_part(
        self, folder: Path, where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Comes out as it is, when the call to the driver has returned or failed, and eager steps go on."""
        resident, (model, handle) = Layers(), offloaded(folder)
        method, count = getattr(RecordedGraph, where), [0]

        def fail(self: RecordedGraph, *arguments: Any, **options: Any) -> None:
            count[0] += 1
            if count[0] != 2 or isinstance(error, KeyboardInterrupt):
                method(self, *arguments, **options)
            elif where == "capture_end":
                RecordedGraph.current = None  # it has ended, without a graph
            if count[0] == 2:
                raise error

        with handle, torch.inference_mode():
            with monkeypatch.context() as patched:
                patched.setattr(RecordedGraph, where, fail)
                with pytest.raises(type(error)) as raised:
                    Graph(model, 5, CPU)
            assert raised.value is error
            assert RecordedGraph.current is None
            assert CUT.get() is None
            for ids in steps(5):
                assert_same_bits(model(X, ids), resident(X, ids))
            assert_same_bits(Graph(model, 5, CPU)(torch.arange(5)), resident(X, torch.arange(5)))

    @pytest.mark.parametrize("make", [qwen, gpt_oss])
    def test_generate(self, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = make()
        model.save_pretrained(tmp_path)
        length: Any = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = model.generate(IDS, **length)
        loaded, handle = load(tmp_path, tiered(model, 2, 3, "experts"), device="cpu", dtype=torch.float32)
        with handle:
            graphs, before = headrace.decode_in_graphs(loaded), read_bytes(handle)
            for _ in range(2):
                assert torch.equal(loaded.generate(IDS, **length), expected)
            assert graphs.replays > 10
            assert read_bytes(handle) > before
            for failing in (1, 20):  # in the prompt, and of gpt-oss in a replay
                with monkeypatch.context() as patched, suppress(TransferError):
                    fail_read(patched, failing)
                    assert torch.equal(loaded.generate(IDS, **length), expected)
                    assert (make, failing) == (qwen, 20)
                assert torch.equal(loaded.generate(IDS, **length), expected)

    @pytest.mark.parametrize("how", ["park", "resize"])
    def test_what_changes_the_offload_waits_for_a_replay(
        self, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And the next one for its end."""
        model = qwen()
        model.save_pretrained(tmp_path)
        length: Any = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected, found = model.generate(IDS, **length), list[torch.Tensor]()
        loaded, handle = load(tmp_path, tiered(model, 2, 3, "experts"), device="cpu", dtype=torch.float32)
        is_inside, admit, times = threading.Event(), FileCache.admit, [0]

        def slow(self: FileCache, ids: torch.Tensor, inputs: torch.Tensor | None = None) -> torch.Tensor:
            times[0] += steps_of(loaded).replaying == {worker.ident}
            if times[0] == 20:
                is_inside.set()
                time.sleep(0.5)
            return admit(self, ids, inputs)

        with handle:
            headrace.decode_in_graphs(loaded)
            assert torch.equal(loaded.generate(IDS, **length), expected)
            worker = threading.Thread(target=lambda: found.append(loaded.generate(IDS, **length)))
            monkeypatch.setattr(FileCache, "admit", slow)
            worker.start()
            assert is_inside.wait(30)
            begin = time.perf_counter()
            if how == "park":
                handle.park(resume="auto")
            else:
                handle.resize(handle.plan.device_bytes * 2)
            assert time.perf_counter() - begin > 0.3
            worker.join(60)
            assert torch.equal(found[0], expected)

    def test_units_beside_run_eagerly(self, tmp_path: Path) -> None:
        """Their copies would go on from one graph to the next."""
        model = qwen()
        model.save_pretrained(tmp_path)
        rules = Rules([("experts", "cache"), ("self_attn", "prefetch")], expert_slots=2, mode="disk")
        loaded, handle = load(tmp_path, rules, device="cpu", dtype=torch.float32)
        with handle:
            assert handle.plan.units
            headrace.decode_in_graphs(loaded)
            with pytest.warns(HeadraceWarning, match="without CUDA graphs: the host reads what layers miss.*units"):
                loaded.generate(IDS, max_new_tokens=4, do_sample=False)


class TestFaults:
    @pytest.mark.parametrize("failing", [1, 2, 7, 20])
    def test_an_error_of_the_disk(self, folder: Path, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
        resident, (model, handle) = Layers(), offloaded(folder, 4, 6)
        with handle:
            for ids in steps(5):
                model(X, ids)
            fail_read(monkeypatch, failing)
            with pytest.raises(TransferError, match="Input/output error"):
                model(X, torch.arange(8, 36))
            require_exclusive(handle, resident)
            for ids in (*steps(20), ALL, *steps(20, seed=1)):
                assert_same_bits(model(X, ids), resident(X, ids))

    def test_a_truncated_file(self, folder: Path) -> None:
        """Both tiers still have what they hold."""
        resident, (model, handle) = Layers(), offloaded(folder, 4, 6)
        model(X, torch.arange(4))
        model(X, torch.arange(4, 8))
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(MIB)
        assert_same_bits(model(X, torch.arange(8)), resident(X, torch.arange(8)))
        assert_same_bits(model(X, torch.arange(2)), resident(X, torch.arange(2)))
        for _ in range(2):
            with pytest.raises(TransferError, match=r"model\.safetensors"):
                model(X, torch.arange(20, 40))
        with pytest.raises(TransferError, match=r"model\.safetensors"):
            handle.remove()
        handle._session._store.close()

    @pytest.mark.parametrize("name", ["_copy_up", "_copy_down", "_land", "_start"])
    @pytest.mark.parametrize("at", range(1, 6))
    def test_an_interrupt(self, folder: Path, name: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
        resident, (model, handle) = Layers(), offloaded(folder, 4, 6)
        count, method = [0], getattr(TieredCache, name)

        def interrupted(*arguments: Any) -> Any:
            count[0] += 1
            if count[0] == at:
                raise KeyboardInterrupt
            return method(*arguments)

        with handle:
            for ids in steps(5):
                model(X, ids)
            with monkeypatch.context() as patched:
                patched.setattr(TieredCache, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    [model(X, ids) for ids in steps(20, most=4, seed=4)]
            require_exclusive(handle, resident)
            for ids in (*steps(20, seed=5), ALL):
                assert_same_bits(model(X, ids), resident(X, ids))
                require_exclusive(handle, resident)

    @pytest.mark.parametrize("runs", [False, True])
    def test_a_forked_child(self, folder: Path, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Which has no threads that read, nor the one inside a forward, and would wait for them forever."""
        slow_down(monkeypatch)
        resident, (model, handle) = Layers(), offloaded(folder)
        with handle:
            other = threading.Thread(target=partial(model.layers[0], X, ALL))
            other.start()
            if not runs:  # but reads ahead
                other.join()
            if (child := os.fork()) == 0:
                signal.alarm(10)
                try:
                    model(X, ALL)
                except StateError:
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            other.join()
            assert_same_bits(model(X, ALL), resident(X, ALL))

    def test_debug(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A byte that changes in host memory is found when its expert is read."""
        monkeypatch.setenv("HEADRACE_DEBUG", "1")
        model, handle = offloaded(folder)
        with handle:
            model(X, torch.arange(9))
            handle.stats()
            cache = next(caches(handle))
            expert, place = next(iter(cache._place_of.items()))
            cache._held[0][place, 0] ^= 1
            model(X, torch.tensor([expert]))
            with pytest.raises(headrace.HeadraceError, match="differ from the store"):
                handle.stats()


class TestLife:
    def test_park(self, folder: Path) -> None:
        """Slots are given back; host memory keeps what it holds."""
        resident, (model, handle) = Layers(), offloaded(folder)
        with handle:
            for _ in range(2):
                for ids in (*steps(9), ALL):
                    assert_same_bits(model(X, ids), resident(X, ids))
                handle.park()
                assert all(len(cache._place_of) == 10 for cache in caches(handle))
                with pytest.raises(StateError, match="park"):
                    model(X, torch.arange(5))
                handle.resume()
                assert not any(cache._slot_of for cache in caches(handle))
                require_exclusive(handle, resident)

    def test_update_is_refused(self, folder: Path) -> None:
        _model, handle = offloaded(folder)
        with handle, pytest.raises(OptionError, match="takes no new values"):
            handle.update({"layers.0.up": torch.zeros(40, 192, 128)})

    def test_memory_is_that_of_the_plan(self, folder: Path) -> None:
        _model, handle = offloaded(folder)
        with handle:
            plan, stats = handle.plan, handle.stats()
            assert host_memory_bytes(plan.cached, on_gpu=False) == (2 * 10 + 2) * EXPERT_BYTES
            assert stats.store_bytes["host"] == (2 * 10 + 2) * EXPERT_BYTES
            assert needs_of(plan, on_gpu=False).host_bytes == plan.cache_bytes + (2 * 10 + 2) * EXPERT_BYTES
            held = sum(part.numel() for cache in caches(handle) for part in cache._held)
            assert held + sum(row.numel() for row in handle._session._ranges.staging) == (2 * 10 + 2) * EXPERT_BYTES
