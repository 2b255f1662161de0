"""Admission of requests: the pool of cache blocks that they share, and the queue of those that wait for it.

A request reserves the blocks for its prompt and its longest answer before it starts, so a running request never runs
out of blocks. Requests start in the order in which they came. A request that has to run alone starts when the others
have ended, and those behind it wait, too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from headrace.serving.request_body import RequestError


@dataclass(frozen=True)
class Pool:
    """The cache that requests share.

    Attributes:
        num_blocks: blocks of all requests together.
        block_tokens: tokens that a block holds, all of one request.
        longest: tokens of the longest sequence, prompt and answer.
    """

    num_blocks: int
    block_tokens: int
    longest: int

    @classmethod
    def of(cls, sequences: int, longest: int, block_tokens: int) -> Pool:
        """A pool for that many sequences of the longest length, or for more shorter ones."""
        return cls(sequences * -(-longest // block_tokens), block_tokens, longest)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit if every block is full."""
        return self.num_blocks * self.block_tokens

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that a sequence of that length takes."""
        return -(-num_tokens // self.block_tokens)


class Admission:
    """The queue and the reservations of requests, which it knows by name. Not thread-safe.

    Args:
        pool: the blocks to reserve.
        max_waiting: requests that may wait in the queue.
    """

    def __init__(self, pool: Pool, max_waiting: int) -> None:
        self.pool, self.max_waiting = pool, max_waiting
        # By name: the blocks of a request, and the batch that it belongs to.
        self._waiting: dict[str, tuple[int, Hashable]] = {}
        self._running: dict[str, tuple[int, Hashable]] = {}

    def enter(self, name: str, prompt_tokens: int, max_tokens: int, batch: Hashable) -> None:
        """Put a request into the queue; it runs only beside requests of an equal ``batch``.

        Raises:
            RequestError: with status 400 if the request can never run, 429 if the queue is full.
        """
        if prompt_tokens + max_tokens > self.pool.longest:
            left = self.pool.longest - prompt_tokens
            fix = f"send max_tokens of {left} or less" if left > 0 else "send a shorter prompt"
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens, and max_tokens is {max_tokens}: together more than the "
                f"{self.pool.longest} that a sequence may have here (--context); {fix}",
                "max_tokens" if left > 0 else None,
            )
        if self.waiting >= self.max_waiting:
            raise RequestError(
                f"{self.running} requests run and {self.waiting} wait, the limit of --max-queue; try again later",
                status=429,
            )
        self._waiting[name] = self.pool.blocks_of(prompt_tokens + max_tokens), batch

    def start(self) -> list[str]:
        """Take the requests out of the queue that may run from now on, in order; all belong to one batch."""
        started = []
        for name, (num_blocks, batch) in list(self._waiting.items()):
            running = next(iter(self._running.values()), (0, batch))
            if running[1] != batch or num_blocks * self.pool.block_tokens > self.pool.num_tokens - self.reserved_tokens:
                break
            self._running[name] = self._waiting.pop(name)
            started.append(name)
        return started

    def leave(self, name: str) -> None:
        """Free the blocks of a request that has ended or was cancelled; an unknown one is ignored."""
        self._running.pop(name, None)
        self._waiting.pop(name, None)

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
        """Tokens of the pool that running requests have reserved."""
        return self.pool.block_tokens * sum(num_blocks for num_blocks, _ in self._running.values())
