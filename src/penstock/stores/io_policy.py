"""Past the page cache or through it: counted, and tried out where nobody can know which is faster.

Which of the two is faster for a file that is not in the cache depends on the machine: on one virtual disk direct reads
gave 3.4 GB/s and buffered ones 2.0, on another 1.2 and 2.0. So a load tries both on its first bytes, goes on in the way
that was faster, and tries the other again from time to time, because such a disk changes from minute to minute and may
be faster for its first second than ever after.
"""

from __future__ import annotations

import threading

from penstock.stats import ReadStats

__all__ = ["Ways"]

# Some blocks for each of sixteen threads, so that a trial is more than its first and last reads.
TRIAL_BYTES = 256 << 20
FIRST_TRIALS = 2
# Between later trials: at first, and in the end.
BETWEEN_BYTES = 1 << 30
MAX_BETWEEN_BYTES = 4 << 30
# By how much the other way has to be faster then, because figures of two stretches differ for nothing, too.
CLEARLY = 1.1


class Ways:
    """What the readers of one load share: counters, and the choice of a way; called by several threads."""

    def __init__(self, trial_bytes: int = TRIAL_BYTES, between_bytes: int = BETWEEN_BYTES) -> None:
        self._trial_bytes = trial_bytes
        self._between_bytes = between_bytes
        self._lock = threading.Lock()
        self._counts: dict[tuple[int, str], int] = {}  # by thread and way
        self._seconds = {True: 0.0, False: 0.0}
        self._direct = True  # the way now on
        self._favourite: bool | None = None  # the way that was faster; None: the first trials are not over
        self._first_trials = FIRST_TRIALS
        self._left = trial_bytes
        # Bytes and thread seconds of the last stretch of each way, by whether it is direct.
        self._measured = {True: (0, 0.0), False: (0, 0.0)}

    @property
    def stats(self) -> ReadStats:
        """What was read so far."""
        with self._lock:
            counts = dict.fromkeys(("direct", "cached", "buffered"), 0)
            for (_, way), num_bytes in list(self._counts.items()):
                counts[way] += num_bytes
            return ReadStats(**counts, direct_s=self._seconds[True], buffered_s=self._seconds[False])

    def count(self, way: str, num_bytes: int) -> None:
        """``num_bytes`` were read: ``direct``, ``cached`` or ``buffered``."""
        mine = (threading.get_ident(), way)  # no lock, which an interrupt of this thread could leave to it
        self._counts[mine] = self._counts.get(mine, 0) + num_bytes

    def choose(self, num_bytes: int) -> bool:
        """Whether the next ``num_bytes`` that are not in the page cache are to be read directly."""
        with self._lock:
            if self._left <= 0:
                self._next_stretch()
            self._left -= num_bytes
            return self._direct

    def took(self, direct: bool, num_bytes: int, seconds: float) -> None:
        """A thread has read ``num_bytes`` the way :meth:`choose` said."""
        self.count("direct" if direct else "buffered", num_bytes)
        with self._lock:
            self._seconds[direct] += seconds
            before_bytes, before_s = self._measured[direct]
            self._measured[direct] = before_bytes + num_bytes, before_s + seconds

    def _next_stretch(self) -> None:
        self._first_trials -= 1
        if self._first_trials > 0:
            self._direct, self._left = not self._direct, self._trial_bytes
        elif any(seconds == 0 for _, seconds in self._measured.values()):
            self._left = self._trial_bytes  # no thread has come back yet
        elif self._direct is self._favourite:
            self._begin(not self._direct, self._trial_bytes)
        else:
            self._favourite = self._faster()
            self._begin(self._favourite, self._between_bytes)
            self._between_bytes = min(2 * self._between_bytes, MAX_BETWEEN_BYTES)

    def _begin(self, direct: bool, num_bytes: int) -> None:
        self._direct, self._left = direct, num_bytes
        self._measured[direct] = 0, 0.0

    def _faster(self) -> bool:
        """The way to go on in, as things were measured last."""
        if self._favourite is None:
            return self._rate(True) >= self._rate(False)
        other = not self._favourite
        return other if self._rate(other) > CLEARLY * self._rate(self._favourite) else self._favourite

    def _rate(self, direct: bool) -> float:
        """Bytes per second of one thread, which is the whole divided by the number of threads."""
        num_bytes, seconds = self._measured[direct]
        return num_bytes / seconds
