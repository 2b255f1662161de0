"""The threads inside a forward of one model: they share its slots, and end before the offload does."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection

from headrace.errors import SlotConflictError, StateError
from headrace.forks import OwnProcess

# A forward that holds a slot for longer than this is taken to be stuck, not slow.
CONFLICT_TIMEOUT_S = 600.0

# The end of a thread notifies nothing.
_ASK_AGAIN_S = 0.5

# How long remove() waits for forwards of other threads.
STOP_TIMEOUT_S = 30.0


class Forwards(OwnProcess):
    """Forwards of one model, by thread.

    Attributes:
        lock: of slots and schedule, too. Held directly, for a Ctrl-C inside the condition's own Python code could leave
            it locked forever.
        numbers: idents of the threads inside a forward of the model -> its number.
        closed: the offload has ended.
        parked: why no forward can begin until the offload is resumed; empty while it is not parked.
    """

    def __init__(self, has_bytes: bool) -> None:
        """``has_bytes``: the model has weights, so that a forward can be right."""
        super().__init__()
        self.lock = threading.RLock()
        self.numbers: dict[int, int] = {}
        self.closed = False
        self.parked = ""
        self._has_bytes = has_bytes
        self._changed = threading.Condition(self.lock)
        self._next_number = itertools.count()
        self._stopping = False

    def begin(self) -> None:
        """One begins in the calling thread, in place of any before."""
        self.numbers[threading.get_ident()] = next(self._next_number)

    def end(self) -> bool:
        """End the forward of the calling thread, if there is one; returns whether there was."""
        return self.numbers.pop(threading.get_ident(), None) is not None

    def notify(self) -> None:
        """A forward or a run of a module has ended: let threads that wait ask again."""
        self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Let other threads go on until ``condition`` holds; ``what`` they run, for the error if it never does."""
        until = time.monotonic() + CONFLICT_TIMEOUT_S
        while not self._changed.wait_for(condition, min(_ASK_AGAIN_S, CONFLICT_TIMEOUT_S)):
            if time.monotonic() < until:
                continue
            raise SlotConflictError(
                f"{what} another thread has been running for {CONFLICT_TIMEOUT_S:.0f} s; use one offloaded model per "
                f"thread"
            )

    def stop(self, readers: Callable[[], Collection[int]]) -> None:
        """Let no more begin, and wait for those of other threads; ``readers``: idents of those that read slots.

        Raises:
            StateError: one has not ended after ``STOP_TIMEOUT_S`` seconds.
        """
        self._stopping = True
        self.end()

        def is_idle() -> bool:
            alive = {thread.ident for thread in threading.enumerate()}
            return alive.isdisjoint({*readers(), *self.numbers} - {threading.get_ident()})

        if not self._changed.wait_for(is_idle, STOP_TIMEOUT_S):
            self._stopping = False
            raise StateError(
                f"another thread has been inside a forward of the model for {STOP_TIMEOUT_S:.0f} s: let it end, "
                f"then make this call (such as remove()) again. Where compiled code raised, nothing shows that it did: "
                f"call the model once more in that thread, or end the thread"
            )

    def resume(self) -> None:
        """Let forwards begin again."""
        with self.lock:
            self._stopping = False

    def require_open(self, begins: bool) -> None:
        """Raise ``StateError`` if no forward can go on; ``begins``: or begin."""
        if self.closed:
            raise StateError("this offload was removed while a forward was running; call the model again")
        if not self._has_bytes:
            raise StateError(
                "mode 'meta' keeps no weights, so no forward can be right: it is for sizes and plans; offload with "
                "mode 'cpu' or 'disk' (--offload-mode) to run the model"
            )
        if self._stopping and begins:
            raise StateError(
                self.parked
                or "this offload is being removed, parked or updated: call the model when that call has returned; if "
                "it was interrupted, call it again first"
            )


def release_left(lock: threading.RLock) -> None:
    """Give up what an interrupt at the very end of a ``with`` block has left to the calling thread."""
    while lock._is_owned():  # type: ignore[attr-defined]
        lock.release()
