"""Interleaved timing: every variant is run in every round, so that a drift of the machine hits all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

__all__ = ["Timing", "interleave", "time_cuda", "time_host"]

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
    """Device time of each of ``repeats`` runs in ms, by events; one run before them is not counted."""
    step()
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
    """Time every step ``repeats`` times in each of ``rounds`` rounds, in rotating order."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for round_ in range(rounds):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            samples[name] += timer(steps[name], repeats)
    return {name: Timing(tuple(values)) for name, values in samples.items()}
