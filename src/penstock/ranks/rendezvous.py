"""Ranks that agree step by step before they share bytes, with bounded waits.

What a rank has to say goes into the key-value store of the process group, under its own key, and the others read it
there. Collectives would do as well while all is fine. But a collective that misses a dead rank ends after the timeout
of the group (half an hour), on an NCCL group it takes device memory and cannot run beside a capture, and afterwards the
group is of no use to anybody. Here a rank that fails says so under a key of its own, ranks of one host are watched by
the kernel (``pidfd_open(2)``), and every wait looks at both: the others learn of a failure or a death in milliseconds,
and of a rank that merely never comes after ``PENSTOCK_PEER_TIMEOUT`` seconds.

Every meeting of a group has a number, which each rank counts for itself in the store when it enters:

* Whoever fails leaves a mark with its error under that number. Who takes part in the same meeting finds it when next it
  waits, a late one too, and fails as well: all have counted alike.
* Whoever has waited in vain names in its mark the ranks that had not entered yet. For those the number is void: they
  skip it, as they do one that failed and that all others have left behind, and take the next, in which the others come
  back. So a rank that once did not come, because it failed before, does not stay one behind.
* Whoever waits for a rank that has entered a later meeting fails at once: that one did not find the time for a mark.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from penstock.env import peer_timeout_s
from penstock.errors import PeerError
from penstock.ranks.peers import Peers

__all__ = ["MOMENT_S", "Rendezvous", "this_host", "within"]

T = TypeVar("T")

_POLL_S = 0.005
_MAX_POLL_S = 0.05
_FAILED = "failed"

MOMENT_S = 2.0


class Rendezvous:
    """One meeting of all ranks of a group.

    Attributes:
        rank: of this process in the group.
        size: ranks in the group.
    """

    def __init__(self, peers: Peers, purpose: str, timeout_s: float | None = None) -> None:
        """Enter the meeting, and be counted; waits for nobody.

        Args:
            peers: the group.
            purpose: what it is for; meetings of different purposes are counted apart.
            timeout_s: of every single wait; default ``PENSTOCK_PEER_TIMEOUT``.

        Raises:
            PeerError: the store of the group does not answer.
        """
        self.rank, self.size = peers.rank, peers.size
        self._timeout_s, self._limit = MOMENT_S, "PENSTOCK_PEER_TIMEOUT"
        self._store = peers.group.get_group_store()
        self._series = f"penstock/{purpose}"
        self._number = 0
        self._watched: dict[int, int] = {}  # pidfd by rank
        self._ended: set[int] = set()  # before they could be watched
        self._known: set[int] = set()  # ranks whose processes are watched, if they can be
        self._posted: list[str] = []
        self._absent: list[int] = []
        self._was_told = False
        self._over = False
        try:
            self._timeout_s = peer_timeout_s() if timeout_s is None else timeout_s
            self._enter()
        except BaseException as error:
            self.fail(str(error))
            raise

    def limit(self, timeout_s: float, name: str) -> None:
        """From now on wait no longer than this, either; ``name``: what to raise if that is too short."""
        if timeout_s < self._timeout_s:
            self._timeout_s, self._limit = timeout_s, name

    def post(self, step: str, value: object) -> None:
        """Say ``value`` (of JSON's types) to everybody who collects ``step``."""
        self._ask(lambda: self._store.set(self._key(step, self.rank), json.dumps(value)))
        self._posted.append(step)

    def collect(self, step: str, ranks: Collection[int]) -> dict[int, Any]:
        """What ``ranks`` have posted for ``step``, by rank; waits for those that have not.

        Raises:
            PeerError: a rank of the meeting has failed, a watched one is gone, or one has not come in time.
        """
        deadline = time.monotonic() + self._timeout_s
        missing = sorted(ranks)
        pause_s = _POLL_S
        self._watch_known(ranks)
        failed = bool(self._marks())  # always asked first: what was said before a failure counts
        while missing := sorted(set(missing).difference(self._who_said(step, missing))):
            if failed:
                self._raise_if_failed()
            self._watch_known(missing)
            self._raise_if_lost(missing, step)
            if time.monotonic() > deadline:
                self._give_up(missing, step)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)
            failed = bool(self._marks())
        return self._ask(lambda: {rank: json.loads(self._store.get(self._key(step, rank))) for rank in sorted(ranks)})

    def exchange(self, step: str, value: object) -> dict[int, Any]:
        """:meth:`post`, and :meth:`collect` from every rank."""
        self.post(step, value)
        return self.collect(step, range(self.size))

    def watch(self, pids: Mapping[int, int]) -> None:
        """From now on a wait ends when one of these processes of this host (pid by rank) has ended."""
        for rank, pid in pids.items():
            self._known.add(rank)
            if rank != self.rank:
                try:
                    self._watched[rank] = os.pidfd_open(pid)
                except ProcessLookupError:
                    self._ended.add(rank)
                except OSError:  # a kernel without it: the timeout remains
                    return

    def require_running(self, rank: int, within_s: float = 0.0) -> None:
        """Raise ``PeerError`` if any rank has failed, or if ``rank`` is watched and has ended or ends ``within_s``.

        A killed process loses its files some moments before the kernel says that it has ended.
        """
        self._raise_if_failed()
        if self._has_gone(rank, within_s):
            raise PeerError(_gone(rank))

    def settle(self) -> None:
        """Return when every rank has all it needs, and can no longer fail.

        Raises:
            PeerError: another rank failed, ended or did not come in time.
        """
        self.exchange("done", True)
        self._raise_if_failed()

    def look_for_cause(self) -> None:
        """Another way to the other ranks is broken: raise ``PeerError`` if one of them says why, or ends, in a moment.

        Without effect once the meeting is over.
        """
        deadline = time.monotonic() + MOMENT_S
        while not self._over and time.monotonic() < deadline:
            for rank in range(self.size):
                self.require_running(rank)
            time.sleep(_MAX_POLL_S)

    def fail(self, reason: str) -> None:
        """Tell whoever waits, now or later, that this rank has given up. Only the first call has an effect.

        ``reason``: where no exception is being handled; one says it better.
        """
        if self._over:
            return
        self._over = True
        error = sys.exception()
        said = reason if error is None else f"{type(error).__name__}: {error}"
        with suppress(Exception):  # the store may be what has failed
            within(MOMENT_S, partial(self._mark, said))
        self._close()

    def leave(self) -> None:
        """The meeting is over for everybody but for its last step."""
        self._over = True
        with suppress(Exception):
            for step in self._posted[:-1]:
                within(MOMENT_S, partial(self._store.delete_key, self._key(step, self.rank)))
        self._close()

    def _close(self) -> None:
        while self._watched:
            os.close(self._watched.popitem()[1])

    # -- who counts what ------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        process = json.dumps({"pid": os.getpid(), "host": this_host()})
        self._ask(lambda: self._store.set(self._own_key("process", self.rank), process))
        self._ask(self._count)
        while self._is_void():
            self._ask(self._count)

    def _is_void(self) -> bool:
        """Whether this meeting has failed, and nobody will look for this rank in it."""
        marks = self._marks()
        if any(self.rank in mark["absent"] for mark in marks.values()):
            return True
        return bool(marks) and self._ask(lambda: all(self._is_past(rank) for rank in self._others))

    def _count(self) -> None:
        self._number = self._entered(self.rank) + 1
        self._store.set(self._own_key("number", self.rank), str(self._number))

    def _entered(self, rank: int) -> int:
        """The number of the last meeting that ``rank`` has entered."""
        key = self._own_key("number", rank)
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _is_past(self, rank: int) -> bool:
        return self._entered(rank) > self._number

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _mark(self, reason: str) -> None:
        if not self._number:  # interrupted before it was counted
            self._count()
        self._store.set(self._own_key("number", self.rank), str(self._number))  # or before it was said
        mark = {"reason": reason, "absent": self._absent, "was_told": self._was_told}
        self._store.set(self._key(_FAILED, self.rank), json.dumps(mark))

    def _marks(self) -> dict[int, dict[str, Any]]:
        """Of the other ranks, for this meeting."""
        failed = self._who_said(_FAILED, self._others)
        return self._ask(lambda: {rank: json.loads(self._store.get(self._key(_FAILED, rank))) for rank in failed})

    def _give_up(self, missing: Collection[int], step: str) -> None:
        self._absent = self._ask(lambda: [rank for rank in missing if self._entered(rank) < self._number])
        raise PeerError(
            f"rank {self.rank} has waited {self._timeout_s:.0f} s for {_listed(missing)} ({step!r} of a shared "
            f"offload): every rank of the group has to call penstock.offload, in the same order (in vLLM: to start). "
            f"Look at the errors of those ranks; if they are only slow, raise {self._limit}. To try again, call it in "
            f"all ranks"
        )

    # -- what is looked at while waiting ----------------------------------------------------------------------------

    def _own_key(self, name: str, rank: int) -> str:
        return f"{self._series}/{name}/{rank}"

    def _key(self, step: str, rank: int) -> str:
        return f"{self._series}/{self._number}/{step}/{rank}"

    def _who_said(self, step: str, ranks: Iterable[int]) -> list[int]:
        return self._ask(lambda: [rank for rank in ranks if self._store.check([self._key(step, rank)])])

    def _watch_known(self, ranks: Iterable[int]) -> None:
        """Watch those of ``ranks`` that have ever entered a meeting on this host."""
        for rank in ranks:
            key = self._own_key("process", rank)
            if rank not in self._known and self._ask(partial(self._store.check, [key])):
                process = json.loads(self._ask(partial(self._store.get, key)))
                self._known.add(rank)
                if process["host"] == this_host():
                    self.watch({rank: process["pid"]})

    def _raise_if_failed(self) -> None:
        if not self._marks():
            return
        # Again: who was told by another has found that one's mark there, so now the first cause is among them.
        rank, mark = min(self._marks().items(), key=lambda item: (item[1]["was_told"], item[0]))
        self._was_told = True
        raise PeerError(f"rank {rank} gave up a shared offload, so this rank does too: {mark['reason']}")

    def _raise_if_lost(self, missing: Collection[int], step: str) -> None:
        """A rank that ended, or went on to another meeting, after it said all it had to is no loss."""
        for rank in missing:
            gone, past = self._has_gone(rank), self._ask(partial(self._is_past, rank))
            if (gone or past) and not self._who_said(step, [rank]):
                self._raise_if_failed()  # a better reason
                raise PeerError(_gone(rank) if gone else f"rank {rank} gave up a shared offload and began another one")

    def _has_gone(self, rank: int, within_s: float = 0.0) -> bool:
        handle = self._watched.get(rank)
        return rank in self._ended or (handle is not None and _has_ended(handle, within_s))

    def _ask(self, call: Callable[[], T]) -> T:
        """What ``call`` to the store of the group returns; bounded, whatever its process does.

        Raises:
            PeerError: the store does not answer.
        """
        try:
            return within(self._timeout_s, call)
        except PeerError:
            raise
        except (RuntimeError, OSError) as error:  # DistError, DistStoreError and DistNetworkError are RuntimeErrors
            # A killed process loses its sockets some moments before the kernel says that it has ended.
            if self._watched:
                _any_has_ended(self._watched.values(), MOMENT_S)
            dead = [rank for rank in range(self.size) if self._has_gone(rank)]
            # All of them: the first to die may have been another one than that which held the store.
            who = _gone(*dead) if dead else "the process that holds it may have ended"
            reason = str(error).partition("\n")[0]
            raise PeerError(f"the store of the process group does not answer ({reason}): {who}") from error


def this_host() -> list[str]:
    """Processes that agree on this can open each other's memory: same kernel, same PID namespace, same user."""
    boot, namespace = socket.gethostname(), ""
    with suppress(OSError):  # a sandbox without them
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return [boot, namespace, str(os.geteuid())]


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """What ``call`` returns, or raises, in a thread of its own: one to another process may never come back.

    Raises:
        PeerError: it has not after ``timeout_s``; its thread is left behind.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="penstock-ask", daemon=True).start()
    done, _ = wait([outcome], timeout_s)
    if not done:
        raise PeerError(
            f"the store of the process group has not answered for {timeout_s:.0f} s: the process that holds it hangs "
            f"or is stopped; restart all ranks together"
        )
    return outcome.result()


def _has_ended(pidfd: int, within_s: float = 0.0) -> bool:
    return _any_has_ended([pidfd], within_s)


def _any_has_ended(pidfds: Iterable[int], within_s: float) -> bool:
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(int(1e3 * within_s)))


def _gone(*ranks: int) -> str:
    have = "have" if len(ranks) > 1 else "has"
    return (
        f"{_listed(ranks)} {have} ended, and a shared offload needs every rank of its group; nothing of it is left "
        f"behind, restart all ranks together"
    )


def _listed(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
