"""Ranks that agree step by step before they share bytes, with bounded waits.

What a rank has to say goes into the key-value store of the process group, under its own key, and the others read it
there. Collectives would do as well while all is fine. But a collective that misses a dead rank ends after the timeout
of the group (half an hour), on an NCCL group it takes device memory and cannot run beside a capture, and afterwards the
group is of no use to anybody. Here a rank that fails says so under a key of its own, ranks of one host are watched by
the kernel (``pidfd_open(2)``), and every wait looks at both: the others learn of a failure or a death in milliseconds,
and of a rank that merely never comes after ``PENSTOCK_PEER_TIMEOUT`` seconds.

Every meeting of a group has a number, which each rank counts for itself in the store. A rank that gave up has left a
mark under the number of that meeting, and a late one that finds it gives up too: both then count alike again.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from penstock.environment import peer_timeout_s
from penstock.errors import PeerError
from penstock.peers import Peers

__all__ = ["MOMENT_S", "Rendezvous", "within"]

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
        """Count the meeting; waits for nobody.

        Args:
            peers: the group.
            purpose: what it is for; meetings of different purposes are counted apart.
            timeout_s: of every single wait; default ``PENSTOCK_PEER_TIMEOUT``.

        Raises:
            PeerError: the store of the group does not answer.
        """
        self.rank, self.size = peers.rank, peers.size
        self._timeout_s = peer_timeout_s() if timeout_s is None else timeout_s
        self._store = peers.group.get_group_store()
        self._watched: dict[int, int] = {}  # pidfd by rank
        number = self._ask(lambda: self._store.add(f"penstock/{purpose}/{self.rank}/meetings", 1))
        self._prefix = f"penstock/{purpose}/{number}"
        self._posted: list[str] = []

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
        while missing := sorted(set(missing).difference(self._who_said(step, missing))):
            self._raise_if_failed()
            self._raise_if_gone(missing, step)
            if time.monotonic() > deadline:
                raise PeerError(
                    f"rank {self.rank} has waited {self._timeout_s:.0f} s for {_listed(missing)} ({step!r} of a shared "
                    f"offload): every rank of the group has to call penstock.offload, in the same order. Look at the "
                    f"errors of those ranks; if they are only slow, raise PENSTOCK_PEER_TIMEOUT"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)
        return self._ask(lambda: {rank: json.loads(self._store.get(self._key(step, rank))) for rank in sorted(ranks)})

    def exchange(self, step: str, value: object) -> dict[int, Any]:
        """:meth:`post`, and :meth:`collect` from every rank."""
        self.post(step, value)
        return self.collect(step, range(self.size))

    def watch(self, pids: Mapping[int, int]) -> None:
        """From now on a wait ends when one of these processes of this host (pid by rank) has ended."""
        for rank, pid in pids.items():
            if rank != self.rank:
                try:
                    self._watched[rank] = os.pidfd_open(pid)
                except ProcessLookupError:
                    raise PeerError(_gone(rank)) from None
                except OSError:  # a kernel without it: the timeout remains
                    return

    def require_running(self, rank: int, within_s: float = 0.0) -> None:
        """Raise ``PeerError`` if any rank has failed, or if ``rank`` is watched and has ended or ends ``within_s``.

        A killed process loses its files some moments before the kernel says that it has ended.
        """
        self._raise_if_failed()
        if rank in self._watched and _has_ended(self._watched[rank], within_s):
            raise PeerError(_gone(rank))

    def fail(self, reason: str) -> None:
        """Tell whoever waits, now or later, that this rank has given up."""
        with suppress(Exception):  # the store may be what has failed
            within(MOMENT_S, lambda: self._store.set(self._key(_FAILED, self.rank), json.dumps(reason)))
        self._close()

    def leave(self) -> None:
        """The meeting is over for everybody but for its last step."""
        with suppress(Exception):
            for step in self._posted[:-1]:
                within(MOMENT_S, partial(self._store.delete_key, self._key(step, self.rank)))
        self._close()

    def _close(self) -> None:
        while self._watched:
            os.close(self._watched.popitem()[1])

    def _key(self, step: str, rank: int) -> str:
        return f"{self._prefix}/{step}/{rank}"

    def _who_said(self, step: str, ranks: Iterable[int]) -> list[int]:
        return self._ask(lambda: [rank for rank in ranks if self._store.check([self._key(step, rank)])])

    def _raise_if_failed(self) -> None:
        for rank in self._who_said(_FAILED, (rank for rank in range(self.size) if rank != self.rank)):
            reason = json.loads(self._ask(partial(self._store.get, self._key(_FAILED, rank))))
            raise PeerError(f"rank {rank} gave up a shared offload, so this rank does too: {reason}")

    def _raise_if_gone(self, missing: Collection[int], step: str) -> None:
        """A rank that ended after it said all it had to is no loss."""
        for rank in missing:
            if rank in self._watched and _has_ended(self._watched[rank]) and not self._who_said(step, [rank]):
                raise PeerError(_gone(rank))

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
            dead = [rank for rank, handle in self._watched.items() if _has_ended(handle)]
            who = _gone(dead[0]) if dead else "the process that holds it may have ended"
            raise PeerError(f"the store of the process group does not answer ({error}): {who}") from error


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


def _gone(rank: int) -> str:
    return (
        f"rank {rank} has ended in the middle of a shared offload; nothing of it is left behind, start all ranks anew"
    )


def _listed(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
