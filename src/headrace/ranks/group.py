"""The ranks that share one offload: their processes, whether these are alive, and the exchanges among them.

Ranks exchange small values through the key-value store of their process group and not by collectives. A collective that
misses a dead rank ends only after the timeout of the group (half an hour), needs device memory on an NCCL group, cannot
run beside a graph capture, and leaves the group unusable. In an exchange every wait is bounded by one timeout, and a
failure or a death in one rank is an error in all:

* A rank that fails writes its reason under one key of the group. The others read it when they next wait, or when they
  begin the call late.
* The processes of one host watch each other through ``pidfd_open(2)``, which reports a death in milliseconds.
* Anything else (a rank that never calls, a death on another host) ends after :attr:`RankGroup.timeout_s`.

The failure key is never deleted, so a process group that has failed once refuses every later call. Retrying in the same
group would need all ranks to agree on which of their calls belong together, and a new group is cheap.

Bytes in host memory go from rank to rank through a :class:`GlooChannel`; its failures, too, end in the error of the
rank that caused them, where that is known.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined,unused-ignore]

from headrace.config import peer_timeout_s
from headrace.errors import PeerError, TransferError

T = TypeVar("T")

# Gloo's messages for a connection whose other end no longer exists.
_CLOSED = ("connection closed", "connection reset", "broken pipe", "connection refused", "socket closed")

_FAILED = "headrace/failed"
_POLL_S = 0.005
_MAX_POLL_S = 0.05

# A killed process loses its sockets and files some moments before the kernel reports its end.
GRACE_S = 2.0


class RankGroup:
    """All ranks of a process group during one call of ``headrace.offload``; make one with :meth:`open`.

    Attributes:
        process_group: ranks that hold the same weights. Only its key-value store is needed for an exchange, so a group
            without a backend will do for mode ``shm_cpu``.
        rank, size: of this process in the group, and how many there are.
        watch: the processes of the other ranks on this host, as far as they have begun a call.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.rank, self.size = int(process_group.rank()), int(process_group.size())
        self.watch = ProcessWatch()
        self._unknown = set(range(self.size)) - {self.rank}  # ranks whose process is not known yet
        self._call = 0
        self._num_exchanges = 0
        self._is_open = True

    @classmethod
    @contextmanager
    def open(cls, process_group: dist.ProcessGroup) -> Iterator[RankGroup]:
        """Begin a call of all ranks, without waiting for them; whatever is raised inside is reported to all ranks.

        Raises:
            PeerError: the key-value store does not answer, or the group has failed before.
        """
        ranks = cls(process_group)
        try:
            process = json.dumps({"pid": os.getpid(), "host": this_host()})
            ranks._ask(lambda: ranks.store.set(f"headrace/process/{ranks.rank}", process))
            ranks._call = ranks._ask(lambda: ranks.store.add(f"headrace/calls/{ranks.rank}", 1))
            if failure := ranks._failure():
                raise PeerError(failure)
            yield ranks
        except BaseException as error:
            ranks._report(error)
            raise
        finally:
            ranks._is_open = False

    @property
    def timeout_s(self) -> float:
        """How long this rank waits for another: ``HEADRACE_PEER_TIMEOUT``, or the group's timeout if it is shorter."""
        return self._limit()[0]

    @property
    def store(self) -> Any:
        """The key-value store of the process group."""
        return self.process_group.get_group_store()

    @property
    def prefix(self) -> str:
        """Prefix of keys that belong to this call alone; the same in all ranks, which have made equally many calls."""
        return f"headrace/{self._call}"

    def exchange(self, step: str, value: object = None) -> list[Any]:
        """``value`` (of JSON's types) of every rank, by rank. All ranks make the same exchanges in the same order.

        Args:
            step: what it is for, as shown in error messages.
            value: this rank's.

        Raises:
            PeerError: a rank failed, ended or did not come in time.
        """
        self._num_exchanges += 1
        keys = [f"{self.prefix}/{self._num_exchanges} {step}/{rank}" for rank in range(self.size)]
        self._ask(lambda: self.store.set(keys[self.rank], json.dumps(value)))
        deadline = time.monotonic() + self.timeout_s
        pause_s = _POLL_S
        while True:
            # Failures and deaths are read before the values: what a rank said before it failed or ended still counts.
            failure, ended, is_late = self._failure(), self.watch.ended, time.monotonic() > deadline
            self._watch_ranks()
            if self._has(*keys):
                return [json.loads(self._get(key)) for key in keys]
            if failure:
                raise PeerError(failure)
            if ended or is_late:
                missing = [rank for rank, key in enumerate(keys) if not self._has(key)]
                if ended.intersection(missing):
                    raise PeerError(_gone(ended))
                if is_late and missing:
                    timeout_s, setting = self._limit()
                    raise PeerError(
                        f"rank {self.rank} has waited {timeout_s:.0f} s for {_listed(missing)} ({step!r} of a shared "
                        f"offload): every rank of the group has to call headrace.offload, in the same order (in vLLM: "
                        f"to start). Look at the errors of those ranks; if they are only slow, raise {setting}"
                    )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)

    def look_for_cause(self) -> None:
        """Something of another rank is gone: raise ``PeerError`` if that rank reports why, or ends, within moments.

        No effect once the call is over.
        """
        deadline = time.monotonic() + GRACE_S
        while self._is_open and time.monotonic() < deadline:
            ended = self.watch.ended
            if failure := self._failure():
                raise PeerError(failure)
            if ended:
                raise PeerError(_gone(ended))
            time.sleep(_MAX_POLL_S)

    # -- the key-value store ---------------------------------------------------------------------------------------

    def _report(self, error: BaseException) -> None:
        """Make ``error`` the failure of the group, unless it has one."""
        failure = json.dumps({"rank": self.rank, "reason": f"{type(error).__name__}: {error}"})
        with suppress(Exception):  # the store may be what has failed
            call_within(GRACE_S, lambda: self.store.compare_set(_FAILED, "", failure))

    def _failure(self) -> str:
        """The first failure in any call of the group, in words; empty if there is none."""
        if not self._has(_FAILED):
            return ""
        found = json.loads(self._get(_FAILED))
        return (
            f"rank {found['rank']} gave up a shared offload of this process group, so all its ranks do: "
            f"{found['reason']}. To try again, make a new group on all ranks (torch.distributed.new_group; in vLLM: "
            f"start all engines again)"
        )

    def _watch_ranks(self) -> None:
        """Watch the ranks of this host that have begun a call, this one or an earlier one."""
        for rank in [rank for rank in self._unknown if self._has(f"headrace/process/{rank}")]:
            process = json.loads(self._get(f"headrace/process/{rank}"))
            self._unknown.discard(rank)
            if process["host"] == this_host():
                self.watch.add(rank, process["pid"])

    def _has(self, *keys: str) -> bool:
        """Whether the store has all ``keys``."""
        return bool(self._ask(lambda: self.store.check(list(keys))))

    def _get(self, key: str) -> bytes:
        return bytes(self._ask(lambda: self.store.get(key)))

    def _ask(self, call: Callable[[], T]) -> T:
        """Ask the key-value store by ``call``; bounded, whatever happens to the process that holds it.

        Raises:
            PeerError: the store does not answer.
        """
        try:
            return call_within(self.timeout_s, call)
        except (RuntimeError, OSError) as error:  # DistError, DistStoreError and DistNetworkError are RuntimeErrors
            if isinstance(error, PeerError):
                raise
            # All that ended: the first to end need not have been the one that held the store.
            ended = self.watch.wait_for_end(GRACE_S)
            cause = _gone(ended) if ended else "the process that holds it may have ended"
            reason = str(error).partition("\n")[0]
            raise PeerError(f"the store of the process group does not answer ({reason}): {cause}") from error

    def _limit(self) -> tuple[float, str]:
        """The timeout in seconds, and the setting it comes from."""
        limits = [(peer_timeout_s(), "HEADRACE_PEER_TIMEOUT")]
        for kind in ("cuda", "cpu"):
            with suppress(RuntimeError, AttributeError):  # the group has no backend for that kind of device
                timeout: timedelta = self.process_group._get_backend(torch.device(kind)).options._timeout
                limits.append((timeout.total_seconds(), "the timeout of the process group"))
        return min(limits)


class GlooChannel:
    """Gloo connections for one purpose.

    Collectives of one group are matched by their order, so a thread of its own needs a channel of its own. The group is
    not registered with ``torch.distributed``: ``new_group`` with local synchronisation derives its keys in the store
    from the ranks alone, and would find the addresses of an earlier group that has been destroyed.
    """

    def __init__(self, ranks: RankGroup, purpose: str) -> None:
        """Connect. Collective, and every rank makes its channels in the same order.

        Args:
            ranks: during a call.
            purpose: unique among the channels of this call.

        Raises:
            PeerError: a rank failed, ended or did not come in time.
            TransferError: the ranks cannot be connected.
        """
        self._ranks = ranks
        self.rank, self.size, self.timeout_s = ranks.rank, ranks.size, ranks.timeout_s
        ranks.exchange(f"connect {purpose}")  # while gloo connects, it does not notice a rank that fails before
        store = PrefixStore(f"{ranks.prefix}/gloo/{purpose}", ranks.store)
        timeout = timedelta(seconds=self.timeout_s)
        self._group: Any = self._bounded(
            lambda: dist.ProcessGroupGloo(store, self.rank, self.size, timeout), "joined the group"
        )

    def gather_numbers(self, number: int) -> list[int]:
        """``number`` (at least 0) of every rank, by rank. Collective.

        Raises:
            TransferError: a rank has ended, or did not come in time.
        """
        row = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        row[self.rank] = number
        self._bounded(lambda: self._open().allreduce(row).wait(), "answered")
        return [int(value) for value in row]

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """Give ``buffer`` (uint8, 1-D, host) of rank ``source`` to all others, in place. Collective.

        Raises:
            TransferError: a rank has ended, or did not come in time.
        """
        if buffer.numel():
            self._bounded(lambda: self._open().broadcast(buffer, source).wait(), "passed on its part")

    def close(self) -> None:
        """Leave; a rank that still waits for this one gets an error at once. Idempotent."""
        self._group = None

    def _open(self) -> Any:
        if self._group is None:
            raise RuntimeError("this channel is closed")
        return self._group

    def _bounded(self, call: Callable[[], T], what: str) -> T:
        begin = time.monotonic()
        try:
            return call()
        except RuntimeError as error:  # DistError is one
            waited_s = time.monotonic() - begin
            self._ranks.look_for_cause()
            reason = self._reason(error, waited_s, what)
            raise TransferError(f"rank {self.rank} of {self.size}: {reason}; restart all ranks together") from error

    def _reason(self, error: RuntimeError, waited_s: float, what: str) -> str:
        """Gloo's own words mean something only to readers of its sources; they stay with the cause."""
        if any(words in str(error).lower() for words in _CLOSED):
            other = f"rank {1 - self.rank}" if self.size == 2 else "another rank"
            return f"the connection to {other} was closed: it has ended, or failed here before; look for its error"
        if waited_s < 0.9 * self.timeout_s:
            # The first line, without where in gloo's sources it was raised ("[file:line] text").
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            line = (line.partition("] ")[2] or line) if line.startswith("[") else line
            return f"not every other rank has {what} ({line})"
        return f"not every other rank has {what} within {self.timeout_s:.0f} s: one hangs, or makes other calls"


class ProcessWatch:
    """Detects which other processes of this host have ended, without their help; see pidfd_open(2), Linux 5.3.

    Without this call a death is found only by the timeouts. The descriptors are closed with the last reference to this.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}  # by descriptor
        self._ended: set[int] = set()
        self._poll = select.poll()
        weakref.finalize(self, _close_all, self._ranks)

    def add(self, rank: int, pid: int) -> None:
        """Watch ``pid``."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended.add(rank)
        except OSError:  # a kernel without it: the timeout remains
            return
        else:
            self._ranks[descriptor] = rank
            self._poll.register(descriptor, select.POLLIN)

    @property
    def ended(self) -> set[int]:
        """Ranks whose process has ended; never blocks."""
        return self.wait_for_end(0.0)

    def wait_for_end(self, timeout_s: float) -> set[int]:
        """Wait for a failure, at most ``timeout_s``."""
        if self._ranks:
            wait_ms = 0 if self._ended else int(1e3 * timeout_s)
            self._ended.update(self._ranks[descriptor] for descriptor, _ in self._poll.poll(wait_ms))
        return set(self._ended)


def this_host() -> list[str]:
    """Processes that agree on this can open each other's memory: same kernel, same PID namespace, same user."""
    boot, namespace = socket.gethostname(), ""
    with suppress(OSError):  # a sandbox without them
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return [boot, namespace, str(os.geteuid())]


def json_digest(value: object) -> str:
    """SHA-256 of ``value`` as JSON, in hexadecimal digits, to compare among ranks; the order of keys does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def call_within(timeout_s: float, call: Callable[[], T]) -> T:
    """Run ``call`` in a thread of its own, since a request to another process may never come back.

    Raises:
        PeerError: it has not after ``timeout_s``; its thread is left behind.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="headrace-ask", daemon=True).start()
    if not wait([outcome], timeout_s).done:
        raise PeerError(
            f"the store of the process group has not answered for {timeout_s:.0f} s: the process that holds it hangs "
            f"or is stopped; restart all ranks together"
        )
    return outcome.result()


def _close_all(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)


def _gone(ranks: Collection[int]) -> str:
    have = "have" if len(ranks) > 1 else "has"
    return (
        f"{_listed(ranks)} {have} ended, and a shared offload needs every rank of its group; nothing of it is left "
        f"behind, restart all ranks together"
    )


def _listed(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
