"""What every store reads from; free of torch, for processes that only read."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Source"]


class Source(Protocol):
    """A stretch of bytes at rest that any thread may read, any part at a time."""

    def read(self, start: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``start`` on; raises ``TransferError`` when they cannot be had."""
