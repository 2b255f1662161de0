"""The memory of a staging ring as both of its sides see it: entries, words, and a status that needs no lock.

The sides may be two processes that share it. What one of them says to the other is an aligned word or counter, or, for
a message, bytes and behind them the word that says they are there.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from penstock.memory.pages import Bytes
from penstock.plan.ring_layout import STATUS_BYTES, WORD_BYTES, RingLayout
from penstock.stats import StagingStats

__all__ = ["POISON", "WANTED", "Counter", "RingMemory"]

# Of every byte of an entry that could not be filled: NaN in every floating dtype.
POISON = 0xFF
# The word of the stream's wish; the tag of entry e is word 1 + e.
WANTED = 0
_MESSAGE_AT = 64


class Counter(IntEnum):
    """Places of the status (int64, by number); times in ns of CLOCK_MONOTONIC, which all processes share."""

    BYTES_READ = 0
    STALLS = 1
    STALL_NS = 2
    HELD_SINCE_NS = 3  # since when the stream is being held, 0 while it is not
    MISSES = 4
    SERVING = 5  # 1 from when on somebody looks at the words
    FAILURE_BYTES = 6  # length of the message; 0: nothing has failed
    RETIRED = 7  # 1: the owner is gone, and whoever serves may end when the stream has been done for a while


class RingMemory:
    """Views of one stretch of memory.

    Attributes:
        layout: what lies where.
        entries: uint8, 1-D, ``layout.entry_bytes`` long, by number.
        words: uint32: the wish, then the tags.
        counters: int64, by :class:`Counter`.
    """

    def __init__(self, layout: RingLayout, memory: Bytes) -> None:
        """``memory``: 1-D, writable, ``layout.num_bytes`` long; zeros from its words on before anybody serves."""
        self.layout = layout
        size = layout.entry_bytes
        self.entries = [memory[size * index : size * (index + 1)] for index in range(layout.num_entries)]
        self.words = memory[layout.words_at : layout.status_at].view(np.uint32)[:: WORD_BYTES // 4]
        status = memory[layout.status_at :]
        self.counters = status[:_MESSAGE_AT].view(np.int64)
        self._message = status[_MESSAGE_AT:STATUS_BYTES]

    @property
    def wanted(self) -> int:
        """One more than the position that the stream wants; 0: none."""
        return int(self.words[WANTED])

    def tag(self, entry: int) -> int:
        """One more than the position whose bytes lie in ``entry``; 0: none."""
        return int(self.words[1 + entry])

    def set_tag(self, entry: int, value: int) -> None:
        """Say what lies in ``entry``."""
        self.words[1 + entry] = value

    @property
    def failure(self) -> str | None:
        """Why the ring has failed for good; ``None``: it has not."""
        length = int(self.counters[Counter.FAILURE_BYTES])
        return self._message[:length].tobytes().decode(errors="ignore") if length else None

    def fail(self, message: str) -> None:
        """Say that the ring has failed; the first message stays."""
        if self.counters[Counter.FAILURE_BYTES]:
            return
        said = (message or "no reason given").encode(errors="replace")[: len(self._message)]
        self._message[: len(said)] = np.frombuffer(said, np.uint8)
        self.counters[Counter.FAILURE_BYTES] = len(said)

    def stats(self, now_ns: int) -> StagingStats:
        """Counters since the ring was made; a stall that goes on at ``now_ns`` is counted so far."""
        read, stalls, stall_ns, held_since_ns, misses = self.counters[: Counter.SERVING].tolist()
        held_ns = max(0, now_ns - held_since_ns) if held_since_ns else 0
        return StagingStats(read, stalls, (stall_ns + held_ns) / 1e9, misses)
