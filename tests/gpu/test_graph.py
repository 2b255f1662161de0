"""Copies are nodes of the graph, they overlap compute, and the debug switch sees a planted race."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from gpu_files import captured
from gpu_models import offloaded, twins
from torch import nn
from torch.profiler import ProfilerActivity, profile

import headrace
from headrace import Prefetch
from headrace.errors import RaceError
from headrace.transfer.cuda_stream import StreamLink

pytestmark = pytest.mark.usefixtures("no_grad")


def copies_to_device(run) -> list[tuple[str, float]]:
    """Name and duration in µs of every host-to-device copy that ``run`` makes, by the device's own record."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        run()
        torch.cuda.synchronize()
    events = profiler.events()
    return [(e.name, e.device_time_total) for e in events if "Memcpy HtoD" in e.name]


def test_copies_are_inside_the_graph() -> None:
    resident, model = twins()
    ids = torch.arange(8, device="cuda")
    with offloaded(model, Prefetch(1, 1, 2)) as handle:
        graph, out = captured(model, ids)
        moved = handle.stats().bytes_moved
        assert sum(unit.captured_copies for unit in handle.stats().units) == len(handle.plan.units)
        assert len(copies_to_device(graph.replay)) == len(handle.plan.units)
        assert torch.equal(out, resident(ids))
        assert handle.stats().bytes_moved == moved, "a replay is not a live copy"


class Spin(nn.Module):
    """A layer whose compute takes a given number of device cycles and whose weight takes time to copy."""

    def __init__(self, megabytes: int, cycles: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(megabytes << 20, dtype=torch.uint8), requires_grad=False)
        self.cycles = cycles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.weight[:1].to(x.dtype)
        torch.cuda._sleep(self.cycles)
        return x


@pytest.mark.alone
@pytest.mark.parametrize("graphed", [False, True])
def test_copies_overlap_compute(graphed: bool) -> None:
    """Against a serial baseline: copies and compute take about as long as the longer of them, not as both."""
    cycles = 3_000_000
    x = torch.zeros(1, device="cuda")
    alone = nn.Sequential(*(Spin(1, cycles) for _ in range(8))).cuda()
    copies_only = nn.Sequential(*(Spin(64, 1) for _ in range(8)))
    both = nn.Sequential(*(Spin(64, cycles) for _ in range(8)))
    headrace.offload(copies_only, Prefetch(1, 1, 2), device="cuda")
    handle = headrace.offload(both, Prefetch(1, 1, 2), device="cuda", measure_stalls=True)
    times = []
    for model in (alone, copies_only, both):
        run = partial(model, x)
        run()
        torch.cuda.synchronize()
        if graphed:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            run = graph.replay
        run()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(5):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    compute, copy_, together = times
    serial = compute + copy_
    assert together < serial - 0.6 * min(compute, copy_), f"{compute=} {copy_=} {together=}"
    stalls = [unit.last_stall_s for unit in handle.stats().units]
    assert all(stall is not None and stall >= 0 for stall in stalls)


def test_the_copy_stream_is_none_of_torchs_pool() -> None:
    """Compute or a capture on the copy stream would serialize both; torch hands out its 32 streams again and again."""
    pooled = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    assert len(pooled) < 64
    handle = headrace.offload(nn.Sequential(*(Spin(1, 1) for _ in range(8))), Prefetch(1, 1, 2), device="cuda")
    assert handle._session is not None
    assert handle._session.prefetcher._link._stream.cuda_stream not in pooled  # type: ignore[union-attr]


class Hasty(StreamLink):
    """Slow copies for which nobody waits: the race that the events prevent."""

    def copy(self, load, slot, after):
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(2_000_000_000)
        return super().copy(load, slot, after)

    def wait(self, transfer, measure=False) -> float:
        return 0.0


def test_debug_switch_catches_a_planted_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    x = torch.zeros(1, device="cuda")
    model = nn.Sequential(*(Spin(64, 1000) for _ in range(6)))
    for index, layer in enumerate(model):
        layer.weight.fill_(index + 1)
    with offloaded(model, Prefetch(1, 1, 2), device="cuda") as handle:
        for _ in range(3):
            assert model(x).item() == 21
        assert handle.stats().bytes_moved > 0
    monkeypatch.setattr("headrace.transfer.cuda_stream.StreamLink", Hasty)
    handle = headrace.offload(model, Prefetch(1, 1, 2), device="cuda")
    with pytest.raises(RaceError):
        model(x)
    handle.remove(graphs_released=True)
