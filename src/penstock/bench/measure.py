"""Interleaved timing: every variant is run in every round, so that a drift of the machine hits all of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

__all__ = ["Timing", "interleave", "time_cuda", "time_host"]

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
    """Device time of each of ``repeats`` runs in ms, by events; 0.2 s of runs before them is not counted.

    A variant that waits for the link cools the device, and what comes after it runs at a higher clock for a while.
    """
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
    """Wall time of each of ``repeats`` runs in ms; one run before them is not counted."""
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
