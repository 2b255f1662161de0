"""The cache of experts against a model of it in Python; its kernels run in Triton's interpreter, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import entering
from headrace.errors import RaceError
from headrace.experts.cache import ExpertCache
from headrace.experts.counts import CacheCounts, CountsReader
from headrace.plan.cached_experts import CachedLayer
from headrace.plan.routing_traces import Trace, lru_hits, seeded_trace
from headrace.transfer import measuring


@dataclass
class Model:
    """What the cache promises, in the plainest way."""

    num_experts: int
    num_slots: int
    away: frozenset[int]  # experts of another rank
    held: dict[int, int] = field(default_factory=dict)  # expert: slot
    last_used: dict[int, int] = field(default_factory=dict)  # slot: step
    counts: list[int] = field(default_factory=lambda: [0, 0, 0, 0, 0])
    overflow_rows: range = range(0)

    def admit(self, ids: list[int]) -> dict[int, int]:
        """Returns the overflow row of each expert that has one in this step."""
        chosen = sorted({i for i in ids if 0 <= i < self.num_experts} - self.away)
        step = self.counts[0] + 1
        hits = [expert for expert in chosen if expert in self.held]
        missing = [expert for expert in chosen if expert not in self.held]
        self.last_used |= {self.held[expert]: step for expert in hits}
        free = [slot for slot in range(self.num_slots) if self.last_used.get(slot, 0) < step]
        free.sort(key=lambda slot: self.last_used.get(slot, 0))
        wanted = missing[:-1] if len(missing) > 1 and not hits else missing
        taken = list(zip(wanted, free, strict=False))
        for expert, slot in taken:
            self.held = {e: s for e, s in self.held.items() if s != slot} | {expert: slot}
            self.last_used[slot] = step
        self.counts = [step, self.counts[1] + len(hits), self.counts[2] + len(taken), self.counts[3], 0]
        self.counts[3] += len(missing) - len(taken)
        self.counts[4] = self.counts[2] - len(self.held)
        return dict(zip(missing[len(taken) :], self.overflow_rows, strict=False)) if len(ids) > self.num_slots else {}


class Rig:
    """A cache of small tensors on the CPU, and what kernels would read through its map."""

    def __init__(
        self, num_experts: int, num_slots: int, away: frozenset[int] = frozenset(), dtype: torch.dtype = torch.int32,
        num_overflow_rows: int = 0,
    ) -> None:  # fmt: skip
        # A range may have rows between slots and overflow rows, and between these and experts.
        overflow_rows = range(num_slots + 2, num_slots + 2 + num_overflow_rows)
        first = overflow_rows.stop + 1
        home = torch.arange(num_experts, dtype=dtype) + first
        home[sorted(away)] = -1
        shapes = (16, 48, 40016, 6)  # bytes of a row; one takes two blocks, one is not aligned
        self.rows = [torch.zeros(first + num_experts, size, dtype=torch.uint8) for size in shapes]
        for tensor in self.rows:
            tensor[first:] = torch.randint(0, 256, tensor[first:].shape, dtype=torch.uint8)
        self.experts = [tensor[first:].clone() for tensor in self.rows]
        self.cache = ExpertCache(self.rows, home, num_slots, overflow_rows, debug=True)
        self.model = Model(num_experts, num_slots, away, overflow_rows=overflow_rows)

    def step(self, ids: torch.Tensor) -> None:
        rows = self.cache.admit(ids)
        overflow_row = self.model.admit(ids.flatten().tolist())
        location = self.cache.location.tolist()
        now = {expert: overflow_row.get(expert, row) for expert, row in enumerate(location)}
        assert (rows.dtype, rows.shape) == (ids.dtype, ids.shape)
        assert rows.tolist() == [now.get(i, i) for i in ids.tolist()]
        self.cache.compare(ids, rows)  # an error of counts() below
        for expert, row in overflow_row.items():
            for tensor, bytes_of in zip(self.rows, self.experts, strict=True):
                assert torch.equal(tensor[row], bytes_of[expert]), f"expert {expert} in overflow row {row}"
                tensor[row] = 0  # another layer may write there
        home = self.cache._home.tolist()
        for expert, row in enumerate(location):
            assert row == self.model.held.get(expert, home[expert]), f"expert {expert}"
            if row >= 0:
                for tensor, bytes_of in zip(self.rows, self.experts, strict=True):
                    assert torch.equal(tensor[row], bytes_of[expert]), f"expert {expert} in row {row}"
        slots = {row: expert for expert, row in enumerate(location) if 0 <= row < self.cache.num_slots}
        held = self.cache._expert_in[: self.cache.num_slots].tolist()
        assert [slots.get(slot, -1) for slot in range(self.cache.num_slots)] == held
        assert self.cache.counts() == CacheCounts(*self.model.counts)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[int, int, int, frozenset[int], list[torch.Tensor]]:
    num_experts = draw(st.integers(1, 12))
    num_slots = draw(st.integers(1, num_experts))
    away = draw(st.frozensets(st.integers(0, num_experts - 1), max_size=num_experts // 2))
    ids = st.integers(-2, num_experts + 1)  # padding, and what is no expert
    num_overflow_rows = draw(st.integers(0, num_experts - num_slots))
    step = st.lists(ids, max_size=20) | st.lists(ids, min_size=1, max_size=20).map(lambda some: some * 400)
    steps = draw(st.lists(step, min_size=1, max_size=8))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return num_experts, num_slots, num_overflow_rows, away, [torch.tensor(step, dtype=dtype) for step in steps]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(workloads())
def test_equals_its_model(workload: tuple[int, int, int, frozenset[int], list[torch.Tensor]]) -> None:
    """Every chosen expert is read where its bytes are, none is held twice, and no slot in use is given away."""
    num_experts, num_slots, num_overflow_rows, away, steps = workload
    rig = Rig(num_experts, num_slots, away, steps[0].dtype, num_overflow_rows)
    for ids in steps:
        rig.step(ids)


@pytest.mark.parametrize(
    ("num_slots", "ids", "counts"),
    [
        pytest.param(4, [], CacheCounts(2, 0, 0, 0, 0), id="an empty batch"),
        pytest.param(4, [-1, -1, 8, 99], CacheCounts(2, 0, 0, 0, 0), id="padding"),
        pytest.param(1, [3, 3, 3], CacheCounts(2, 1, 1, 0, 0), id="one slot"),
        pytest.param(8, [*range(8)], CacheCounts(2, 7, 8, 1, 0), id="a slot for each, but one in place at first"),
        pytest.param(2, [*range(8)] * 40, CacheCounts(2, 2, 2, 12, 0), id="more experts than slots"),
    ],
)
def test_twice_the_same_step(num_slots: int, ids: list[int], counts: CacheCounts) -> None:
    rig = Rig(8, num_slots)
    for _ in range(2):
        rig.step(torch.tensor(ids, dtype=torch.int32))
    assert rig.cache.counts() == counts


@pytest.mark.slow
def test_a_large_step_copies_what_has_no_slot() -> None:
    rig = Rig(8, 3, num_overflow_rows=4)
    for ids in ([0, 1, 2], [*range(8)] * 33, [5], [*range(8)] * 33, [7, 7, 6] * 100):
        rig.step(torch.tensor(ids, dtype=torch.int32))
    assert rig.cache.counts().in_place > 0


@pytest.mark.slow
def test_the_least_recently_used_leaves() -> None:
    rig = Rig(8, 3)
    for ids in ([0, 1, 2], [0], [2], [5]):
        rig.step(torch.tensor(ids, dtype=torch.int32))
    assert [expert for expert, row in enumerate(rig.cache.location.tolist()) if row < 3] == [0, 2, 5]


PLANTED: dict[str, Callable[[Rig, torch.Tensor], object]] = {
    "a byte of a slot": lambda rig, _: rig.rows[2][1, 40015].add_(1),
    "two experts in each other's slots": lambda rig, _: rig.rows[0][:2].copy_(rig.rows[0][:2].flip(0)),
    "the row of another expert": lambda _, rows: rows[1].copy_(rows[2]),
    "a small row": lambda rig, _: rig.rows[3][2].zero_(),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_rows_that_differ_from_the_store_are_found(fault: str) -> None:
    """Whatever a kernel computes of them: in the step that reads them, and once for each word."""
    rig = Rig(8, 4)
    rig.step(torch.tensor([0]))
    ids = torch.tensor([0, 5, 6], dtype=torch.int32)
    rows = rig.cache.admit(ids)
    rig.cache.compare(ids, rows)
    assert rig.cache.counts().fetched == 3
    PLANTED[fault](rig, rows)
    rig.cache.compare(ids, rows)
    with pytest.raises(RaceError, match=r"\d+ words in rows that a kernel read differ from the store"):
        rig.cache.counts()
    reader = CountsReader([rig.cache])
    reader.begin()
    with pytest.raises(RaceError):
        reader.result()


def test_a_fetch_that_does_not_happen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(8, 4)
    monkeypatch.setattr("headrace.experts.cache.fetch_kernel", defaultdict(lambda: lambda *_, **__: None))
    ids = torch.tensor([0, 5], dtype=torch.int32)
    rig.cache.compare(ids, rig.cache.admit(ids))
    with pytest.raises(RaceError):
        rig.cache.counts()


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which a caller with a model on another GPU need not have set."""
    rig, current, launched = Rig(8, 4), list[torch.Tensor](), []
    monkeypatch.setattr(torch.cuda, "device_of", entering(current))
    for name in ("admit_kernel", "fetch_kernel", "compare_kernel"):
        launch = defaultdict(lambda name=name: lambda *_, **__: launched.append((name, len(current))))  # type: ignore[misc]
        monkeypatch.setattr(f"headrace.experts.cache.{name}", launch)
    ids = torch.tensor([0, 5], dtype=torch.int32)
    rig.cache.compare(ids, rig.cache.admit(ids) * 0)
    names = ["admit_kernel", *["fetch_kernel"] * 2, *["compare_kernel"] * 2]
    assert launched == [(name, 1) for name in names]


def test_the_probe_counts_experts_that_were_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without a hit leaves one expert in host memory, which is not to count as copied."""
    home, ran, counts = 6, [], []
    admit, layer_of_16_bytes = ExpertCache.admit, partial(CachedLayer, storages={"": 8 * 16})

    class Ranges:
        def __init__(self, *_: object) -> None:
            pass

        def rows(self, _: str) -> torch.Tensor:
            return torch.arange(home + 8, dtype=torch.uint8)[:, None].repeat(1, 16)

    def seconds(run: Callable[[], None]) -> float:
        ran.append(run)
        return 1.0

    monkeypatch.setattr(CachedLayer, "first_row", home)
    monkeypatch.setattr(measuring, "CachedLayer", lambda *args, storages, **sizes: layer_of_16_bytes(*args, **sizes))
    monkeypatch.setattr(measuring, "ExpertRanges", Ranges)
    monkeypatch.setattr(measuring, "_graph", lambda run: [run(), run][1])
    monkeypatch.setattr(measuring, "_timed", seconds)

    def noted(cache: ExpertCache, ids: torch.Tensor) -> torch.Tensor:
        rows = admit(cache, ids)
        assert int(rows.max()) < cache.num_slots or not counts, "an expert was left in host memory"
        counts.append(cache.counts().fetched)
        return rows

    monkeypatch.setattr(ExpertCache, "admit", noted)
    rate = measuring._fetch_rate(torch.device("cpu"))
    assert len(ran) == 1
    assert rate == (counts[3] - counts[1]) * 16 == 6 * 16


@pytest.mark.slow
def test_hits_are_those_of_the_trace() -> None:
    trace = seeded_trace(3, 60, 16, 3)
    rig = Rig(16, 6)
    for row in trace:
        rig.step(torch.from_numpy(row))
    counts = rig.cache.counts()
    assert 0 < counts.in_place < 5  # in steps without any hit
    # Slots of one step leave in the order of their numbers, and there in the order of the row.
    assert counts.hits / trace.size == pytest.approx(lru_hits(trace, 6), abs=0.03)


_COMPILE = """
import re, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headrace.experts.kernels import fetch_kernel
types = dict.fromkeys(fetch_kernel.arg_names, "*i32") | {"tensors": "*i64"}
types |= dict.fromkeys(["NUM_TENSORS", "WORD", "BLOCK"], "constexpr")
source = ASTSource(fetch_kernel, types, constexprs={"NUM_TENSORS": 2, "WORD": tl.int64, "BLOCK": 4096})
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
print(*(len(re.findall(rf"{which}\\.global\\.v2\\.b64", ptx)) for which in ("ld", "st")))
"""


@pytest.mark.slow
def test_a_thread_copies_16_bytes_at_a_time() -> None:
    """With 8 bytes a load the same programs fill less of the link. Compiled for a GPU, which takes none."""
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", _COMPILE], capture_output=True, text=True, check=False, env=without)
    assert done.stdout.split() == ["16", "16"], done.stderr


_COMPILE_AHEAD = """
import contextlib, json, torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver
from headrace.experts.cache import ExpertCache, compile_kernels
from headrace.plan.cached_experts import CachedLayer

class Driver:  # of a GPU that is not there
    get_current_device = get_current_stream = lambda *_: 0
    get_current_target = lambda _: GPUTarget("cuda", 90, 32)

driver.set_active(Driver())
torch.cuda.device = lambda _: contextlib.nullcontext()
run, names = JITFunction.run, []
JITFunction.run = lambda kernel, *args, warmup, **more: run(kernel, *args, warmup=True, **more)  # launches nothing
knobs.compilation.listener = lambda *, metadata, **_: names.append(metadata["name"])
layer = CachedLayer("", 128, 40, {"up": 128 << 20, "down": 128 << 19, "scale": 128 * 6}, overflow_rows=5)
compile_kernels([layer, layer], torch.device("cuda"))
print(json.dumps(names))
names.clear()
for slots, tokens in ((40, 1), (40, 7), (33, 20), (64, 16), (50, 33)):
    rows = [torch.zeros(300, size, dtype=torch.uint8) for size in (32, 16, 6)]
    cache = ExpertCache(rows, 90 + torch.arange(128), slots, range(70, 70 + slots // 8), shift=90 + slots)
    cache.admit(torch.zeros(tokens, 8, dtype=torch.int64))
print(json.dumps(names))
"""


@pytest.mark.slow
def test_kernels_are_compiled_ahead_for_all_budgets_and_prompts(tmp_path: Path) -> None:
    """Once with overflow rows and once without; a fetch by words of 8 bytes and one by bytes."""
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env, command = without | {"TRITON_CACHE_DIR": str(tmp_path)}, [sys.executable, "-c", _COMPILE_AHEAD]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    ahead, then = map(json.loads, done.stdout.splitlines()) if done.returncode == 0 else (done.stderr, None)
    assert (ahead, then) == (["admit_kernel"] * 2 + ["fetch_kernel"] * 2, [])


def reuse_distances(trace: Trace) -> list[int]:
    """Of every choice but the first of each expert: tokens since the expert was last chosen."""
    last: dict[int, int] = {}
    found = []
    for token, row in enumerate(trace.tolist()):
        found += [token - last[expert] for expert in row if expert in last]
        last.update(dict.fromkeys(row, token))
    return found


class TestTraces:
    def test_locality_is_the_published_one(self) -> None:
        """Of Qwen3-30B-A3B: half again within 2 tokens, 80 % within 8; 51 of its 128 experts hit 90 %."""
        traces = [seeded_trace(seed, 1024, 128, 8) for seed in range(4)]
        distances = [distance for trace in traces for distance in reuse_distances(trace)]
        assert 0.5 <= sum(distance <= 2 for distance in distances) / len(distances) <= 0.6
        assert 0.75 <= sum(distance <= 8 for distance in distances) / len(distances) <= 0.85
        assert 0.88 <= sum(lru_hits(trace, 51, warm_up=128) for trace in traces) / len(traces) <= 0.95

    def test_no_expert_twice_in_a_row(self) -> None:
        trace = seeded_trace(0, 200, 8, 6)
        assert all(len(set(row)) == 6 for row in trace.tolist())
        assert trace.min() >= 0
        assert trace.max() < 8

    def test_a_seed_is_a_trace(self) -> None:
        assert (seeded_trace(1, 50, 8, 2) == seeded_trace(1, 50, 8, 2)).all()
        assert (seeded_trace(1, 50, 8, 2) != seeded_trace(2, 50, 8, 2)).any()

    def test_a_cache_begins_empty(self) -> None:
        assert lru_hits(seeded_trace(1, 1, 8, 4), 4) == 0
