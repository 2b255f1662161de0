"""The other processes of an offload: a process group of ``torch.distributed``, and what it is used for.

Ranks of one group have to make the same plan for the same weights; stores that span processes check that before
anything is allocated. Everything one rank waits for another is bounded by the timeout of the group, and never longer
than :data:`MAX_WAIT_S`.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from penstock.errors import OptionError, TransferError

__all__ = ["MAX_WAIT_S", "Channel", "PeerWatch", "Peers", "require_peers"]

# The default timeout of NCCL groups; gloo's is three times as long, and too long to wait for a rank that is lost.
MAX_WAIT_S = 600.0

T = TypeVar("T")


@dataclass(frozen=True)
class Peers:
    """Processes that share bytes at rest or a way to the device.

    Attributes:
        group: ranks that hold the same weights; ``shm_cpu`` keeps one copy per host, and is content with a group that
            has a store and no backend.
        pool_links: every rank copies a part of each unit over its own link and passes it on to the others.
    """

    group: dist.ProcessGroup
    pool_links: bool = False

    @property
    def rank(self) -> int:
        """Of this process in the group."""
        return int(self.group.rank())

    @property
    def size(self) -> int:
        """Processes in the group."""
        return int(self.group.size())

    @property
    def timeout_s(self) -> float:
        """How long this rank waits for another: the timeout of the group, at most :data:`MAX_WAIT_S`."""
        for kind in ("cuda", "cpu"):
            with suppress(RuntimeError, AttributeError):  # no backend for that kind of device
                timeout: timedelta = self.group._get_backend(torch.device(kind)).options._timeout
                return min(MAX_WAIT_S, timeout.total_seconds())
        return MAX_WAIT_S

    def agree_on_name(self) -> str:
        """A name that nobody has had before, the same in all ranks. Collective."""
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, group=self.group, group_src=0)
        return name[0]

    def look_for_cause(self) -> None:
        """A connection is lost: raise ``PeerError`` if it is known why. Nobody has asked here; a subclass has."""


def require_peers(peers: Peers | None, what: str) -> Peers:
    """``peers``, or an error that says where to get them."""
    if peers is None:
        raise OptionError(
            f"{what} spans processes and no process group was given: pass group=torch.distributed.group.WORLD (after "
            f"torch.distributed.init_process_group) to penstock.offload"
        )
    return peers


class Channel:
    """Gloo connections among the ranks of ``peers`` for this purpose alone; for host memory.

    Collectives of one group are matched by their order, so whoever communicates from another thread, or at times of its
    own, needs a channel for itself. It is a process group that is not registered with ``torch.distributed``: one made
    by ``new_group`` with local synchronisation takes its name, and so its keys in the store, from the ranks alone, and
    finds the addresses of an earlier one that has been destroyed.
    """

    def __init__(self, peers: Peers) -> None:
        """Collective: every rank makes its channels in the same order.

        Raises:
            TransferError: a rank did not come within the timeout of the group.
            PeerError: the same in the course of an offload, where more is known: why it did not.
        """
        self._peers = peers
        self.rank = peers.rank
        self.size = peers.size
        self.timeout_s = peers.timeout_s
        self._group: Any = self._bounded(lambda: self._connect(peers), "joined the group")

    def _connect(self, peers: Peers) -> Any:
        store = c10d.PrefixStore(f"penstock/{peers.agree_on_name()}", c10d._get_process_group_store(peers.group))
        return dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=self.timeout_s))

    def gather(self, value: T) -> list[T]:
        """``value`` (picklable) of every rank, by rank. Collective.

        Raises:
            TransferError: a rank is gone, or did not come in time.
        """
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        blobs = [torch.empty(size, dtype=torch.uint8) for size in self.gather_numbers(data.numel())]
        blobs[self.rank] = data
        for rank, blob in enumerate(blobs):
            self.broadcast(blob, rank)
        return [pickle.loads(blob.numpy().tobytes()) for blob in blobs]

    def gather_numbers(self, number: int) -> list[int]:
        """The same for one number, at least 0."""
        row = torch.zeros(self.size, dtype=torch.int64)
        row[self.rank] = number
        self._bounded(lambda: self._open().allreduce(row).wait(), "answered")
        return [int(value) for value in row]

    def broadcast(self, blob: torch.Tensor, source: int) -> None:
        """Give ``blob`` (uint8, 1-D, host) of rank ``source`` to all others, in place. Collective.

        Raises:
            TransferError: a rank is gone, or did not come in time.
        """
        if blob.numel():
            self._bounded(lambda: self._open().broadcast(blob, source).wait(), "passed on its part")

    def close(self) -> None:
        """Leave; a rank that still waits for this one hears of it at once. Idempotent."""
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
            self._peers.look_for_cause()
            raise TransferError(f"rank {self.rank} of {self.size}: {self._reason(error, waited_s, what)}") from error

    def _reason(self, error: RuntimeError, waited_s: float, what: str) -> str:
        """Gloo's own words are for those who know its sources; they stay with the cause."""
        text = str(error).lower()
        if any(words in text for words in _CLOSED):
            other = f"rank {1 - self.rank}" if self.size == 2 else "another rank"
            return (
                f"the connection to {other} was closed: it has ended, or failed here before; look for its error, "
                f"and restart all ranks together"
            )
        if waited_s < 0.9 * self.timeout_s:
            return f"not every other rank has {what} ({_first_line(error)}); restart all ranks together"
        return (
            f"not every other rank has {what} within {self.timeout_s:.0f} s: one hangs, or makes other calls; restart "
            f"all ranks together"
        )


# What gloo says of a connection whose other end is no longer there.
_CLOSED = ("connection closed", "connection reset", "broken pipe", "connection refused", "socket closed")


def _first_line(error: BaseException) -> str:
    """Without where in gloo's sources it was raised."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return line.partition("] ")[2] or line if line.startswith("[") else line


@dataclass(frozen=True)
class _Process:
    host: str
    namespace: str
    pid: int


class PeerWatch:
    """Tells whether the other ranks still live, without asking them: through descriptors of their processes.

    See pidfd_open(2), Linux 5.3. Where there is no such call, or ranks see other process numbers, nobody counts as lost
    and only the timeouts find out.
    """

    def __init__(self, channel: Channel) -> None:
        """Collective."""
        me = _Process(socket.gethostname(), _namespace(), os.getpid())
        ranks = channel.gather(me)
        self.on_one_host = len({process.host for process in ranks}) == 1
        self._fds: dict[int, int] = {}
        self._poll = select.poll()
        for rank, process in enumerate(ranks):
            if process != me and (process.host, process.namespace) == (me.host, me.namespace):
                self._watch(rank, process.pid)
        self._close = weakref.finalize(self, _close_all, list(self._fds))

    def _watch(self, rank: int, pid: int) -> None:
        with suppress(OSError):
            fd = os.pidfd_open(pid)
            self._fds[fd] = rank
            self._poll.register(fd, select.POLLIN)

    @property
    def lost(self) -> list[int]:
        """Ranks whose process has ended; never blocks."""
        return sorted(self._fds[fd] for fd, _ in self._poll.poll(0)) if self._fds else []

    def require_alive(self) -> None:
        """Raise ``TransferError`` if a rank has ended."""
        if lost := self.lost:
            raise TransferError(
                f"rank {', '.join(map(str, lost))} has ended, and with it the part of each unit that it brought; "
                f"restart all ranks together"
            )

    def close(self) -> None:
        """Close the descriptors; idempotent."""
        self._fds.clear()
        self._close()


def _namespace() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
