"""Gloo connections among the ranks of one offload, for bytes in host memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined,unused-ignore]

from penstock.errors import TransferError
from penstock.ranks.group import RankGroup

__all__ = ["GlooChannel"]

T = TypeVar("T")

# What gloo says of a connection whose other end no longer exists.
_CLOSED = ("connection closed", "connection reset", "broken pipe", "connection refused", "socket closed")


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
        row = torch.zeros(self.size, dtype=torch.int64)
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
