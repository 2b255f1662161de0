"""Counts of caches of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.errors import RaceError


@dataclass(frozen=True)
class CacheCounts:
    """Counts since the cache was made.

    Attributes:
        steps: admissions.
        hits: experts that a step found in slots; each counts once per step.
        fetched: experts that were copied into slots.
        in_place: experts without a free slot: kernels read them in host memory, or in an overflow row.
        evicted: experts whose slot was given to another one.
        read: experts that were read from files, of those fetched or in place.
    """

    steps: int
    hits: int
    fetched: int
    in_place: int
    evicted: int
    read: int = 0


class CountedCache(Protocol):
    """A cache of experts that counts.

    Attributes:
        counters: int64 [6 or 7]: :class:`CacheCounts`, the last one where there are files, and words that differ from
            the store.
    """

    counters: torch.Tensor


class CountsReader:
    """Reads the sums of the counts of several caches without making the host wait."""

    def __init__(self, caches: Sequence[CountedCache]) -> None:
        """``caches``: at least one, all on one device."""
        self._counters = [cache.counters for cache in caches]
        on_gpu = self._counters[0].is_cuda
        self._totals = torch.zeros(len(self._counters[0]), dtype=torch.int64, pin_memory=on_gpu, device="cpu")
        self._copied = torch.cuda.Event() if on_gpu else None

    def begin(self) -> None:
        """Start to read the counts, after the pending work of the current stream."""
        self._totals.copy_(torch.stack(self._counters).sum(0), non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._counters[0].device))

    def result(self) -> CacheCounts | None:
        """The counts of the last :meth:`begin`; ``None``: not read yet. Raises as :func:`checked` does."""
        if self._copied is not None and not self._copied.query():
            return None
        return checked(self._totals)


def checked(counters: torch.Tensor) -> CacheCounts:
    """The counts in ``counters``; see :class:`CacheCounts`.

    Raises:
        RaceError: words differ, see :meth:`headrace.experts.cache.ExpertCache.compare`.
    """
    *counts, differing = counters.tolist()
    if differing:
        raise RaceError(
            f"cached experts: {differing} words in rows that a kernel read differ from the store: rows were "
            f"overwritten before they were read, or hold other experts; this is a bug in headrace: report it, and read "
            f"experts in place meanwhile (experts=uva)"
        )
    return CacheCounts(*counts)
