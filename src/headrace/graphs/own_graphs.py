"""Graphs that this project captures itself, of whole forwards: ``generate`` replays them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headrace.runtime.prefetcher import Prefetcher


@contextmanager
def capturing(prefetcher: Prefetcher) -> Iterator[list[int]]:
    """Within, a whole forward is captured that is replayed within :func:`replaying` alone.

    Yields:
        empty; at the end the units that each replay copies.
    """
    with prefetcher.forwards.lock:
        before, copied = [stats.captured_copies for stats in prefetcher.stats], list[int]()
        prefetcher.replays.own()
    try:
        with replaying(prefetcher):  # a capture too begins with the first units in the slots
            yield copied
    finally:
        prefetcher.replays.end_own()
        for unit, (stats, earlier) in enumerate(zip(prefetcher.stats, before, strict=True)):
            copied += [unit] * (stats.captured_copies - earlier)


@contextmanager
def replaying(prefetcher: Prefetcher, copied: Sequence[int] = ()) -> Iterator[None]:
    """Within, a graph of :func:`capturing`, which gave ``copied``, is replayed beside no other forward."""
    forwards = prefetcher.forwards
    with forwards.lock:
        forwards.end()  # of compiled code that raised, which does not end it
        forwards.wait_until(lambda: not forwards.numbers, "a graph is replayed alone, beside no forward, and one")
        prefetcher.wait_all()
        try:
            yield
            for unit in copied:
                prefetcher.count_copy(unit)
        finally:
            prefetcher.finish_forward(whole=False)
