"""The contract every link keeps: record compute, copy, wait.

* ``record_compute()`` records an event behind everything that compute has been given so far. A copy that is given this
  event starts only after it, so the last kernel that reads a slot is done before the slot is overwritten.
* ``copy()`` starts moving a unit and returns a :class:`Transfer` at once.
* ``wait()`` holds compute (not necessarily the caller) until a transfer is done.

On a CPU compute is synchronous, so there is no event and waiting blocks the caller. On a GPU transfers end in events,
and waiting orders streams without blocking the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from penstock.plan.plan import Plan
from penstock.stats import StagingStats
from penstock.stores.store import Load

__all__ = ["ComputeEvent", "Link", "Transfer"]


class ComputeEvent(Protocol):
    """A point in compute, made by :meth:`Link.record_compute`."""


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
        """Begin what can go on while weights are loaded; called at most once, with the arguments of :meth:`prepare`.

        Raises:
            StateError, OptionError: this link cannot be set up here and now.
        """

    def prepare(self, plan: Plan, loads: Sequence[Load]) -> None:
        """Called once, before anything is moved, with what will be moved, by unit; for links that read ahead.

        Raises:
            StateError, OptionError: this link cannot be set up here and now.
        """

    @property
    def capturing(self) -> bool:
        """Whether compute is being recorded into a graph instead of run."""
        return False

    @abstractmethod
    def record_compute(self) -> ComputeEvent | None:
        """Record an event behind all that compute has been given so far; ``None`` where compute is synchronous."""

    def leave_replay_event(self, slot: int) -> None:
        """In a capture: record an event behind all that compute has been given so far, at every replay of the graph.

        There is one event per slot, which all graphs share.
        """

    def replay_event(self, slot: int) -> ComputeEvent | None:
        """The event that the latest replay has recorded or will record; ``None`` where no graph does."""
        return None

    @abstractmethod
    def copy(self, load: Load, slot: torch.Tensor, after: Sequence[ComputeEvent]) -> Transfer:
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
        """Raise ``TransferError`` if bytes failed to arrive while no caller waited for them, as in a replay."""

    def staging_stats(self) -> StagingStats | None:
        """Counters of the staging between store and copies; ``None`` for a link without any."""
        return None

    def last_stall_s(self, unit: int) -> float | None:
        """Seconds compute was held at the latest wait for ``unit``; ``None`` if this link does not measure it.

        May block until the device has passed that point.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Finish what is under way and give back threads and streams; idempotent."""
