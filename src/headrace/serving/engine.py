"""The thread that runs the model of a server: prompts in chunks, and between them a step of all rows together."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList

from headrace.graphs.cache_rows import Rows
from headrace.serving.request_body import RequestError

_log = logging.getLogger(__name__)
# Of a forward: more of an eager prompt would let the others wait, and take more memory.
_PROMPT_TOKENS = 2048
# Of one whose tokens' log-probabilities are wanted: the logits of all of them take 4 bytes a token and word.
_LOGPROB_TOKENS = 256
# Of a prompt that an earlier one begins with, and that are copied from its row; fewer are run again.
_LEAST_SHARED = 32
_STEP_S = 600  # of the longest forward, of a model on a slow disk


class TokenLogprob(NamedTuple):
    """A token, its log-probability by the logits as the model gives them, and the likeliest with theirs, in order."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(eq=False)
class Request:
    """A prompt and its answer.

    Attributes:
        prompt: token ids.
        most_tokens: tokens of the longest answer.
        ends: tokens that end the answer.
        processors: makes the logits processors of ``generate``; called once, by the thread of the engine.
        samples: tokens are drawn; else the likeliest are taken.
        seed: of the generator that they are drawn from; ``None``: a random one.
        num_logprobs: likeliest tokens to report beside each token; ``None``: nothing is reported.
        reports_prompt: they are reported for the prompt, too, from its second token on.
        tokens: the answer so far.
        logprobs, prompt_logprobs: what is reported of them.
        error: why it ended early.
    """

    prompt: list[int]
    most_tokens: int
    ends: Collection[int]
    processors: Callable[[], LogitsProcessorList]
    samples: bool = False
    seed: int | None = None
    num_logprobs: int | None = None
    reports_prompt: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: BaseException | None = None
    is_cancelled: bool = False

    @property
    def cached(self) -> list[int]:
        """Tokens whose keys and values its row holds, while it decodes: the newest has not run yet."""
        return [*self.prompt, *self.tokens[:-1]]

    @property
    def has_ended(self) -> bool:
        """Whether no further token follows."""
        return (
            self.error is not None
            or len(self.tokens) >= self.most_tokens
            or (bool(self.tokens) and self.tokens[-1] in self.ends)
        )


class _Chooser:
    """Chooses the tokens of one request from logits, as ``generate`` does."""

    def __init__(self, request: Request, device: torch.device) -> None:
        self._processors, self._samples = request.processors(), request.samples
        self._ids: Any = torch.zeros(1, len(request.prompt) + request.most_tokens, dtype=torch.long, device=device)
        self._ids[0, : len(request.prompt)] = torch.tensor(request.prompt)
        self._num = len(request.prompt)
        self._generator = torch.Generator(device)
        self._generator.seed() if request.seed is None else self._generator.manual_seed(request.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the likeliest of the logits as they are."""
        return not self._processors and not self._samples

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token, [1], from logits, [1, vocabulary]; -1: there is none that the processors allow."""
        scores = self._processors(self._ids[:, : self._num], logits)
        if self._samples:  # of no probabilities a kernel would fail, and with it the device
            token = torch.multinomial(scores.softmax(-1).nan_to_num(1.0), 1, generator=self._generator)[0]
        else:
            token = scores.argmax(-1)
        self._ids[0, self._num] = token[0]
        self._num += 1
        return torch.where(scores.amax(-1) > -torch.inf, token, -1)


class Engine:
    """Decodes requests in the rows of one cache, in the order in which they come.

    Args:
        rows: the cache, and the forwards of the model.
        device: where the model computes.
        max_waiting: requests that may wait for a row.
        tell: called by the thread of the engine with the requests that have a further token, or have ended.
    """

    def __init__(
        self, rows: Rows, device: torch.device, max_waiting: int, tell: Callable[[Sequence[Request]], None]
    ) -> None:
        self.rows, self._device, self.max_waiting, self._tell = rows, device, max_waiting, tell
        self._changed = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._prompts: list[Request] = []  # whose prompts run, in the rows behind those of ``_active``
        self._first, self._start = 0, 0  # row of the first of them, and their tokens that have run
        self._num_alone = 0  # of those that wait, each of whose prompts runs alone
        self._active: list[Request] = []  # by row
        self._choosers: dict[Request, _Chooser] = {}
        self._guess: tuple[Request, Callable[[Sequence[int]], list[int]]] | None = None  # what guesses tokens of it
        self._held: list[list[int]] = [[] for _ in range(rows.num_rows)]  # tokens that free rows still hold
        self._is_stopping = False
        self.error: BaseException | None = None  # which ended the thread
        self._begin_s: float | None = None  # of the forward that runs
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return sum(not request.is_cancelled for request in [*self._active, *self._prompts])

    @property
    def waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._waiting)

    @property
    def used_tokens(self) -> int:
        """Tokens of the cache that hold those of requests."""
        requests = [request for request in [*self._active, *self._prompts] if not request.is_cancelled]
        return sum(len(request.prompt) + len(request.tokens) for request in requests)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: with status 400 if the request can never run, 429 if the queue is full.
        """
        num, longest = len(request.prompt), self.rows.num_tokens
        if num + request.most_tokens > longest:
            left = longest - num
            fix = f"send max_tokens of {left} or less" if left > 0 else "send a shorter prompt"
            raise RequestError(
                f"the prompt has {num} tokens, and max_tokens is {request.most_tokens}: together more than the "
                f"{longest} that a sequence may have here (--context); {fix}",
                "max_tokens" if left > 0 else None,
            )
        with self._changed:
            if len(self._waiting) >= self.max_waiting + self.rows.num_rows - self.running:
                raise RequestError(
                    f"{self.running} requests run and {self.waiting} wait, the limit of --max-queue; try again later",
                    status=429,
                )
            self._waiting.append(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """End a request whose answer is not wanted; its row is free with the next step."""
        with self._changed:
            request.is_cancelled = True
            if request in self._waiting:
                self._waiting.remove(request)

    def stop(self, timeout_s: float | None = None) -> None:
        """End the thread after the forward that runs."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def rest(self) -> None:
        """Return when no forward runs, those of cancelled requests included, with the memory of all rows freed."""
        while not self._is_stopping:
            with self._changed:
                if not (self._active or self._prompts):
                    self._held = [[] for _ in self._held]
                    self.rows.clear()
                    return
            time.sleep(0.001)

    def why_dead(self) -> str | None:
        """Why no request can run; ``None``: the thread is alive."""
        if self.error is not None:
            return f"the engine has ended: {type(self.error).__name__}: {self.error}"
        if self._thread.ident is not None and not self._thread.is_alive() and not self._is_stopping:
            return "the engine has ended: its thread is gone"
        begin_s = self._begin_s
        if begin_s is not None and (seconds := time.monotonic() - begin_s) > _STEP_S:
            return f"the model hangs: its step has run for {seconds:.0f} s"
        return None

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._next():
                self._begin_s = time.monotonic()
                if self._prompts:
                    self._run_prompts()
                if self._active:
                    self._step()
                self._begin_s = None
        except BaseException as error:  # SystemExit too: requests would wait for good
            _log.error("the engine has ended", exc_info=error)
            self.error = error
            with self._changed:
                left = [*self._active, *self._prompts, *self._waiting]
                self._active, self._prompts = [], []
                self._waiting.clear()
            for request in left:
                request.error = error
            self._tell(left)
        finally:
            self._begin_s = None

    def _next(self) -> bool:
        """Wait for work and give rows to requests; ``False`` when the engine is to stop."""
        with self._changed:
            while not (self._is_stopping or self._waiting or self._prompts or self._active):
                self._changed.wait()
            for row in reversed(range(len(self._active))):
                if self._active[row].is_cancelled:
                    self._leave(row)
            if not self._prompts:
                self._admit()
            return not self._is_stopping

    def _admit(self) -> None:
        """Take the first requests that wait, whose prompts run in one forward; a long or a shared one alone."""
        self._first, self._start, longest = len(self._active), 0, 0
        while self._waiting and self._first + len(self._prompts) < self.rows.num_rows:
            request = self._waiting[0]
            row, shared = self._longest_prefix(request)
            longest, is_alone = max(longest, len(request.prompt)), bool(shared or request.reports_prompt)
            runs_alone = is_alone or self._num_alone or self.rows.has_states
            if self._prompts and (runs_alone or longest * (len(self._prompts) + 1) > _PROMPT_TOKENS):
                break
            self._held[self._first + len(self._prompts)] = []
            self._prompts.append(self._waiting.popleft())
            if shared and row != self._first:
                self.rows.move(row, self._first, shared)
            if is_alone:
                self._start = shared
                break
        self._num_alone -= bool(self._prompts and self._num_alone)

    def _longest_prefix(self, request: Request) -> tuple[int, int]:
        """The row that holds most of the beginning of a prompt, and how many tokens; 0: too few."""
        # What is drawn by a seed depends on nothing that was before, to the last bit.
        if request.seed is not None or request.reports_prompt or self.rows.has_states:
            return 0, 0
        held = [*(other.cached for other in self._active), *self._held[len(self._active) :]]
        row, shared = max(enumerate(_num_equal(request.prompt[:-1], each) for each in held), key=lambda pair: pair[1])
        return row, shared if shared >= _LEAST_SHARED else 0

    def _run_prompts(self) -> None:
        """Run a chunk; after the last one the requests have their first tokens, and decode with the others."""
        requests, start = self._prompts, self._start
        reports = requests[0].reports_prompt  # it runs alone
        try:
            most = _LOGPROB_TOKENS if reports else _PROMPT_TOKENS
            end = start + (most if self.rows.continues else self.rows.num_tokens)
            logits = self.rows.prompts(self._first, [each.prompt[start:end] for each in requests], start, reports)
            if reports:
                next_tokens = requests[0].prompt[start + 1 : end + 1]
                found = _logprobs(logits[: len(next_tokens)], next_tokens, requests[0].num_logprobs or 0)
                requests[0].prompt_logprobs += found
                logits = logits[-1:]
        except (RuntimeError, ValueError, TypeError) as error:  # of these alone, unless the device has failed
            if isinstance(error, torch.AcceleratorError):
                raise
            self._prompts = []
            if len(requests) > 1:
                self._run_again(requests)
                return
            requests[0].error = error
            self._tell(requests)
            return
        self._start = end
        if end < len(requests[0].prompt):
            if requests[0].is_cancelled:  # its row holds a part of the prompt, which no other may share
                self._prompts = []
            return
        tokens = self._choose(requests, logits)
        with self._changed:
            for row, request in enumerate(requests, self._first):
                if row > len(self._active):  # others have left meanwhile
                    self.rows.move(row, len(self._active), len(request.prompt))
                    self._held[len(self._active)] = []
                self._active.append(request)
            self._prompts = []
        self._take(requests, tokens)

    def _run_again(self, requests: Sequence[Request]) -> None:
        """Let prompts run one by one, of which an unknown one has raised an error."""
        with self._changed:
            left = [request for request in requests if not request.is_cancelled]
            self._waiting.extendleft(reversed(left))
            self._num_alone = len(left)

    def _step(self) -> None:
        requests = list(self._active)
        if len(requests) == 1 and not self._prompts and self._verify(requests[0]):
            return
        positions = [len(request.prompt) + len(request.tokens) - 1 for request in requests]
        logits = self.rows.step([request.tokens[-1] for request in requests], positions)
        self._take(requests, self._choose(requests, logits))

    def _verify(self, request: Request) -> bool:
        """Run guesses behind the newest token of the only row, and take those that are right; ``False``: none fit."""
        guesser = self.rows.guesser
        if guesser is None or request.most_tokens - len(request.tokens) <= guesser.counts.guesses:
            return False
        if self._guess is None or self._guess[0] is not request:
            self._guess = request, guesser.of_sequence(self.rows.num_tokens)
        ids = [*request.prompt, *request.tokens]
        if not (guesses := self._guess[1](ids)):
            return False
        guesses += [ids[-1]] * (guesser.counts.guesses - len(guesses))  # a step of one shape is captured once
        logits, before = self.rows.verify([ids[-1], *guesses], len(ids) - 1), len(request.tokens)
        for at, guess in enumerate([*guesses, None]):
            tokens = self._choose([request], logits[at : at + 1])
            self._take([request], tokens)
            if tokens != [guess] or request.has_ended or request.is_cancelled:
                break
        guesser.count(1, len(request.tokens) - before)
        return True

    def _choose(self, requests: Sequence[Request], logits: torch.Tensor) -> list[int]:
        tokens = logits.argmax(-1)
        for at, request in enumerate(requests):
            try:
                if request not in self._choosers:
                    self._choosers[request] = _Chooser(request, self._device)
                if not (chooser := self._choosers[request]).is_greedy:
                    tokens[at] = chooser.choose(logits[at : at + 1])[0]
            except Exception as error:  # of the request's processors alone, unless the device has failed
                if isinstance(error, torch.AcceleratorError):
                    raise
                request.error, tokens[at] = error, -1
        chosen: list[int] = tokens.tolist()
        self.rows.check()
        for at, request in enumerate(requests):
            if request.num_logprobs is not None and chosen[at] >= 0:
                request.logprobs += _logprobs(logits[at : at + 1], chosen[at : at + 1], request.num_logprobs)
        return chosen

    def _take(self, requests: Sequence[Request], tokens: Sequence[int]) -> None:
        for request, token in zip(requests, tokens, strict=True):
            if token >= 0:
                request.tokens.append(token)
            elif request.error is None:
                request.error = RequestError("no token is left: its fields, or those of the model, forbid all of them")
        with self._changed:
            for row in reversed(range(len(self._active))):
                if self._active[row].has_ended:
                    self._leave(row)
        self._tell(requests)

    def _leave(self, row: int) -> None:
        """Free ``row``; the last one takes its place."""
        request, last = self._active[row], len(self._active) - 1
        self._choosers.pop(request, None)
        if row < last:
            self.rows.swap(row, last, max(len(request.cached), len(self._active[last].cached)))
            self._active[row] = self._active[last]
        self._active.pop()
        self._held[last] = request.cached


def _num_equal(ids: Sequence[int], others: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others)))


def _logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Log-probabilities of ``tokens`` by float32 logits, [tokens, vocabulary]."""
    found = logits.log_softmax(-1)
    own = found.gather(1, torch.tensor(tokens, device=found.device)[:, None])[:, 0].tolist()
    best = found.topk(min(num_top, found.shape[1]))
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, list(zip(*top, strict=True)))
        for token, logprob, top in zip(tokens, own, tops, strict=True)
    ]
