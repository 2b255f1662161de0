"""The protocol of every benchmark: variants take turns in rounds, so that a drift of the machine hits all of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from penstock.memory.pinned import pinned_region

__all__ = ["LinkProbe", "Step", "Timing", "capture", "interleave", "time_cuda", "time_host"]

WARM_UP_S = 0.2

Step = Callable[[], object]
Timer = Callable[[Step, int], list[float]]


@dataclass(frozen=True)
class Timing:
    """Times of one variant over all rounds, in ms."""

    samples_ms: tuple[float, ...]

    @property
    def ms(self) -> float:
        """Median."""
        return statistics.median(self.samples_ms)

    @property
    def spread_ms(self) -> float:
        """Distance between the quartiles."""
        if len(self.samples_ms) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.samples_ms, n=4)
        return third - first


def time_cuda(step: Step, repeats: int) -> list[float]:
    """Device time of each of ``repeats`` runs in ms, by events; the runs of the first 0.2 s are not counted."""
    # A variant that waits for the link cools the device, and the next one runs at a higher clock for a while.
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_UP_S:
        step()
        torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    marks[-1].synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def time_host(step: Step, repeats: int) -> list[float]:
    """Wall time of each of ``repeats`` runs in ms; the run before them is not counted."""
    step()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def interleave(steps: Mapping[str, Step], rounds: int, repeats: int, timer: Timer) -> dict[str, Timing]:
    """Time every step ``repeats`` times in each of ``rounds`` rounds, in a new (seeded) order each round."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    shuffle = random.Random(0)
    for _ in range(rounds):
        for name in shuffle.sample(list(steps), len(steps)):
            samples[name] += timer(steps[name], repeats)
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def capture(step: Callable[[], torch.Tensor]) -> tuple[Step, torch.Tensor]:
    """Capture ``step``, which has run before, in one CUDA graph.

    Returns:
        The replay of the graph, and the tensor that each replay writes.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    # Slots have the contents of the last replay, not of the capture: two replays reach the steady state.
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, out


class LinkProbe:
    """One large copy from pinned memory to the device: the rate that the floor is computed with."""

    num_bytes = 1 << 30

    def __init__(self, device: torch.device) -> None:
        self._host = pinned_region(self.num_bytes)
        self._slot = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def copy(self) -> None:
        """Move 1 GiB."""
        self._slot.copy_(self._host, non_blocking=True)
