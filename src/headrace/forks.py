"""Forked child processes: what an offload has of threads and streams stays in the parent."""

from __future__ import annotations

import os

from headrace.errors import StateError


class OwnProcess:
    """The process that offloads a model."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of it, where a lock that another thread held stays locked."""
        return os.getpid() != self._pid

    def require_own_process(self) -> None:
        """Raise ``StateError`` in a forked child."""
        if self.is_forked:
            raise StateError(
                "this process is a fork of the one that offloaded the model, and has none of the threads and streams "
                "that move its weights: offload in the child, or start it with the method 'spawn'"
            )
