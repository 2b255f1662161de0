"""Which requests run together: the pool of cache blocks they share, and the queue of those that wait for it.

A request reserves the blocks of its prompt and of its longest answer before it starts, so that no request that runs
is ever short of one. Requests start in the order they came. The sampling of a batch is one, so a request with another
one waits until the batch has ended, and those behind it wait with it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.serving.request_body import RequestError

__all__ = ["Admission", "Pool"]

_BUSY = 429


@dataclass(frozen=True)
class Pool:
    """The cache that requests share.

    Attributes:
        num_blocks: of all requests together.
        block_tokens: tokens that a block holds, of one request.
        longest: tokens of the longest sequence, prompt and answer.
    """

    num_blocks: int
    block_tokens: int
    longest: int

    @classmethod
    def of(cls, sequences: int, longest: int, block_tokens: int) -> Pool:
        """A pool for so many sequences of the longest kind, or for more shorter ones."""
        return cls(sequences * -(-longest // block_tokens), block_tokens, longest)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit if every block is full."""
        return self.num_blocks * self.block_tokens

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that a sequence takes."""
        return -(-num_tokens // self.block_tokens)


Key = TypeVar("Key")


@dataclass
class _Entry(Generic[Key]):
    num_blocks: int
    batch: Key


class Admission(Generic[Key]):
    """The queue and the reservations; knows requests by their names. Not thread-safe.

    Args:
        pool: what requests reserve parts of.
        max_waiting: requests in the queue.
    """

    def __init__(self, pool: Pool, max_waiting: int) -> None:
        self.pool = pool
        self.max_waiting = max_waiting
        self._waiting: deque[str] = deque()
        self._running: set[str] = set()
        self._entries: dict[str, _Entry[Key]] = {}
        self._free_blocks = pool.num_blocks

    def enter(self, name: str, prompt_tokens: int, max_tokens: int, batch: Key) -> None:
        """Put a request into the queue; ``batch``: it runs beside those alone that gave an equal one.

        Raises:
            RequestError: with status 400 for one that can never run, 429 if the queue is full.
        """
        if prompt_tokens + max_tokens > self.pool.longest:
            left = self.pool.longest - prompt_tokens
            fix = f"send max_tokens of {left} or less" if left > 0 else "send a shorter prompt"
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens, and max_tokens asks for {max_tokens}: together more than the "
                f"{self.pool.longest} that a sequence may have here (--context); {fix}",
                "max_tokens" if left > 0 else None,
            )
        if len(self._waiting) >= self.max_waiting:
            raise RequestError(
                f"{len(self._running)} requests run and {len(self._waiting)} wait, as many as may (--max-queue); try "
                f"again later",
                status=_BUSY,
            )
        self._entries[name] = _Entry(self.pool.blocks_of(prompt_tokens + max_tokens), batch)
        self._waiting.append(name)

    def start(self) -> list[str]:
        """The requests that may run from now on, in their order; all of them belong to one batch."""
        started = []
        while self._waiting:
            entry = self._entries[self._waiting[0]]
            others = next(iter(self._running), None)
            is_other_batch = others is not None and self._entries[others].batch != entry.batch
            if is_other_batch or entry.num_blocks > self._free_blocks:
                break
            self._free_blocks -= entry.num_blocks
            name = self._waiting.popleft()
            self._running.add(name)
            started.append(name)
        return started

    def leave(self, name: str) -> None:
        """A request has ended, or is not wanted any longer; one that is not known is none."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        if name in self._running:
            self._running.remove(name)
            self._free_blocks += entry.num_blocks
        else:
            self._waiting.remove(name)

    @property
    def running(self) -> int:
        """Requests that have their blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def reserved_tokens(self) -> int:
        """Of the pool, by those that run."""
        return (self.pool.num_blocks - self._free_blocks) * self.pool.block_tokens
