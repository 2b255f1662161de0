"""The engine for an event loop, which reads answers while the thread of the engine runs the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

from headrace.graphs.cache_rows import Rows
from headrace.serving.answers import Answer, Piece
from headrace.serving.engine import Engine, Request
from headrace.serving.request_body import RequestError

Updates = AsyncIterator[list[tuple[Answer, list[Piece]]]]
_CHECK_S = 1.0
_STOP_S = 30.0  # for the forward that runs


class AsyncEngine:
    """Runs the answers of HTTP requests; belongs to one event loop.

    Args:
        model: a causal language model, offloaded or not.
        num_rows: answers that decode together.
        longest: tokens of the longest sequence, prompt and answer.
        max_waiting: answers that may wait for others to end.

    Attributes:
        engine: the thread that runs the model.
        prompt_tokens, generated_tokens: of answers that have ended without an error.
        on_idle: called when all answers have ended.
    """

    def __init__(self, model: Any, num_rows: int, longest: int, max_waiting: int) -> None:
        self.engine = Engine(Rows(model, num_rows, longest), model.device, max_waiting, self._tell)
        self.prompt_tokens = self.generated_tokens = 0
        self._running: dict[Request, tuple[Answer, asyncio.Queue[Any]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: str | None = None
        self.on_idle: Callable[[], None] = lambda: None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and answer."""
        return self.engine.rows.num_tokens

    @property
    def is_busy(self) -> bool:
        """Whether answers run or wait."""
        return bool(self._running)

    def submit(self, answers: Sequence[Answer]) -> Updates:
        """Queue the requests of answers.

        Returns:
            their new pieces, until all have ended; raises the error of a request, or why the engine has ended.

        Raises:
            RequestError: one of them can never run, or the queue is full; then none runs.
        """
        self.require_alive()
        if self._loop is None:
            self.engine.start()
            self._loop = asyncio.get_running_loop()
        news: asyncio.Queue[Any] = asyncio.Queue()
        try:
            for answer in answers:
                self._running[answer.request] = answer, news
                self.engine.submit(answer.request)
        except RequestError:
            self.cancel(answers)
            raise
        return self._updates(set(answers), news)

    def cancel(self, answers: Sequence[Answer]) -> None:
        """End answers and free their rows; those that have ended are ignored."""
        ended = [answer for answer in answers if self._running.pop(answer.request, None) is not None]
        for answer in ended:
            self.engine.cancel(answer.request)
        if ended and not self._running:
            self.on_idle()

    async def _updates(self, left: set[Answer], news: asyncio.Queue[Any]) -> Updates:
        while left:
            try:
                async with asyncio.timeout(_CHECK_S):
                    found = [await news.get()]
            except TimeoutError:
                self.require_alive()
                continue
            while not news.empty():
                found.append(news.get_nowait())
            merged: dict[Answer, list[Piece]] = {}
            for answer, pieces in found:
                if isinstance(pieces, BaseException):
                    raise pieces
                merged.setdefault(answer, []).extend(pieces)
            left -= {answer for answer in merged if answer.finish_reason is not None}
            yield list(merged.items())

    def _tell(self, requests: Sequence[Request]) -> None:
        """Pass on the newest tokens of each, from the thread of the engine to the event loop."""
        news = [(each, len(each.tokens), each.has_ended, each.error) for each in requests]
        with suppress(RuntimeError):  # the loop is closed, and no request waits
            self._loop.call_soon_threadsafe(self._put, news)  # type: ignore[union-attr]

    def _put(self, news: Sequence[tuple[Request, int, bool, BaseException | None]]) -> None:
        for request, num_tokens, has_ended, error in news:
            if request not in self._running:
                continue
            answer, queue = self._running[request]
            try:
                if error is not None:
                    raise error
                queue.put_nowait((answer, answer.read(num_tokens, has_ended)))
            except BaseException as found:  # of the request alone, or of the engine
                is_dead = found is self.engine.error
                queue.put_nowait((answer, RequestError(self.why_dead() or "", status=503) if is_dead else found))
                self.cancel([answer])  # now, and not when its client has read that
            if answer.finish_reason is not None:
                self.prompt_tokens += len(request.prompt)
                self.generated_tokens += answer.num_tokens
                self.cancel([answer])  # a stop string has ended it, which the engine does not know

    def stop(self) -> None:
        """Stop the engine; answers that have not ended fail."""
        self._error = "the server stops"
        for answer, queue in self._running.values():
            queue.put_nowait((answer, RequestError(self._error, status=503)))
        self.engine.stop(_STOP_S)

    def why_dead(self) -> str | None:
        """Why no request can run any more; ``None``: the engine is alive."""
        return self._error or self.engine.why_dead()

    def require_alive(self) -> None:
        """Raise a RequestError with the reason if no request can run."""
        if (reason := self.why_dead()) is not None:
            raise RequestError(reason, status=503)
