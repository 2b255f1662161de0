"""The contract every link keeps: fork, copy, done, wait.

* ``fork()`` marks the point that compute has reached. A copy given that mark starts only after everything compute did
  before it, so the last kernel that reads a slot is done before the slot is overwritten.
* ``copy()`` starts moving a unit and returns a :class:`Transfer` at once.
* ``wait()`` holds compute (not necessarily the caller) until a transfer is done.

On a CPU compute is synchronous, so a mark is nothing and waiting blocks the caller. On a GPU marks and transfers are
events, and waiting orders streams without blocking anybody.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from penstock.plan.plan import Plan
from penstock.stats import StagingStats
from penstock.stores.store import Load

__all__ = ["Link", "Mark", "Transfer"]


class Mark(Protocol):
    """A point in compute, made by :meth:`Link.fork`."""


class Transfer(Protocol):
    """A copy under way."""

    @property
    def unit(self) -> int:
        """Index of the unit that is moved."""

    @property
    def done(self) -> bool:
        """Whether the bytes have arrived (or the copy has failed); never blocks."""


class Link(ABC):
    """Moves units from a store into slots."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory for one slot: uint8, 1-D, on the link's device, fixed address."""

    def start(self, plan: Plan, loads: Sequence[Load]) -> None:
        """Told before weights are loaded, if at all: what can begin meanwhile; arguments as of :meth:`prepare`.

        Raises:
            StateError, OptionError: this link cannot be set up here and now.
        """

    def prepare(self, plan: Plan, loads: Sequence[Load]) -> None:
        """Told once, before anything is moved: what will be, by unit; for links that read ahead.

        Raises:
            StateError, OptionError: this link cannot be set up here and now.
        """

    @property
    def capturing(self) -> bool:
        """Whether compute is being recorded into a graph instead of run."""
        return False

    @abstractmethod
    def fork(self) -> Mark | None:
        """Mark what compute has been given so far; ``None`` where compute is synchronous."""

    def leave_replay_mark(self, slot: int) -> None:
        """In a capture: mark what compute has been given so far, for every replay of the graph to come by.

        There is one mark per slot, in whichever graphs leave it.
        """

    def replay_mark(self, slot: int) -> Mark | None:
        """The mark that the latest replay left, or is about to leave; ``None`` where no graph does."""
        return None

    @abstractmethod
    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[Mark]) -> Transfer:
        """Start moving a unit into ``slot`` once all of ``after`` is reached. Copies arrive in order of submission."""

    @abstractmethod
    def wait(self, transfer: Transfer, measure: bool = False) -> float:
        """Hold compute until ``transfer`` is done.

        ``measure``: this is the wait of a module for its unit; :meth:`last_stall_s` will tell how long it took.

        Returns:
            seconds the caller was held; 0.0 when the bytes were there already.

        Raises:
            TransferError: the copy failed.
        """

    def check(self) -> None:
        """Raise ``TransferError`` if bytes failed to arrive where no caller was there to be told, as in a replay."""

    def staging_stats(self) -> StagingStats | None:
        """Counters of what lies between the store and the copies; ``None`` where nothing does."""
        return None

    def last_stall_s(self, unit: int) -> float | None:
        """Seconds compute was held at the latest wait for ``unit``; ``None`` if this link does not measure it.

        May block until the device has passed that point.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Finish what is under way and give back threads and streams; idempotent."""
