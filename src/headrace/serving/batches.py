"""Requests of transformers' handlers, behind the interface of the generation managers of its server.

The handlers run in the event loop, and the model in the thread of :class:`~headrace.serving.engine.Engine`.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PrefixConstrainedLogitsProcessor
from transformers.cli.serving import utils

from headrace.formatting import TokenText
from headrace.graphs.cache_rows import Rows
from headrace.serving.engine import Engine, Request
from headrace.serving.request_body import Completion, GenerationRequest, RequestError
from headrace.serving.structured import GrammarProcessor

_ANSWER_TOKENS = 1024
_CHECK_S = 1.0
_STOP_S = 30.0  # for the forward that runs


# -- sampling ----------------------------------------------------------------------------------------------------------


def settings_of(
    request: GenerationRequest, default: GenerationConfig, grammar: GrammarProcessor | None = None
) -> SimpleNamespace:
    """How a request generates: as ``default``, changed by the fields of the request.

    Args:
        grammar: forbids other answers than the request wants.

    Raises:
        RequestError: a field has no effect on greedy decoding.
    """
    given = request.model_dump(include={"temperature", "top_k", "top_p", "min_p"}, exclude_none=True)
    samples = given.get("temperature", bool(default.do_sample)) > 0
    idle = [name for name, value in given.items() if value not in (1, 0, -1)]  # all tokens, or only the likeliest
    if idle and not samples and "temperature" not in given:
        name = idle[0]
        raise RequestError(f"{name} has no effect on greedy decoding, the default here; add temperature", name)
    temperature, top_k, top_p = (given.get(name, getattr(default, name)) for name in ("temperature", "top_k", "top_p"))
    changes: dict[str, Any] = {"repetition_penalty": request.repetition_penalty, "min_new_tokens": request.min_tokens}
    if samples:
        changes |= {"temperature": float(temperature or 1), "top_p": float(top_p or 1)}
        changes["top_k"] = top_k if top_k and top_k > 0 else 0
        changes["min_p"] = request.min_p or None
    bias = {(int(token),): float(value) for token, value in (request.logit_bias or {}).items()}
    changes["sequence_bias"] = bias or None
    stop_tokens, allowed = request.stop_token_ids or [], request.allowed_token_ids or []
    ends, own = default.eos_token_id, default.stop_strings or []
    ends = [] if request.ignore_eos or ends is None else ends if isinstance(ends, list) else [ends]
    return SimpleNamespace(
        max_new_tokens=request.max_tokens,
        most_tokens=default.max_new_tokens or _ANSWER_TOKENS,
        tools=getattr(request, "tools", None),
        one_call=getattr(request, "parallel_tool_calls", None) is False,
        stops=[*(request.stop or []), *([own] if isinstance(own, str) else own)],
        continues=isinstance(request, Completion),
        samples=samples,
        seed=None if request.seed == -1 or not samples else request.seed,
        ends=[*ends, *stop_tokens, *(grammar.ends if grammar else [])],
        grammar=grammar,
        stop_tokens=stop_tokens,
        allowed=allowed,
        tokens_of={
            "logit_bias": [each for (each,) in bias],
            "stop_token_ids": stop_tokens,
            "allowed_token_ids": allowed,
        },
        bad_words=request.bad_words or [],
        penalties=(request.presence_penalty or 0, request.frequency_penalty or 0),
        changes={name: value for name, value in changes.items() if value is not None},
    )


class _AnswerPenalty(LogitsProcessor):
    """Lowers tokens by how often the answer has them, by OpenAI's formula."""

    def __init__(self, num_prompt: int, presence: float, frequency: float) -> None:
        self._num_prompt, self._presence, self._frequency = num_prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        answer = input_ids[:, self._num_prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


def _sequences(words: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Tokens of texts at the beginning of a text and within one, by vLLM's rule."""
    found: list[list[int]] = []
    for word in words:
        first, within = (tokenizer.encode(f"{space}{word.lstrip()}", add_special_tokens=False) for space in ("", " "))
        found += [first] if within[:1] == first[:1] or len(within) != len(first) else [first, within]
    return [each for each in found if each]


def _processors(model: Any, settings: SimpleNamespace, num_prompt: int, tokenizer: Any) -> LogitsProcessorList:
    """Logits processors of ``generate`` for the tokens of a request, and those that it has not."""
    config = copy.deepcopy(model.generation_config)
    vars(config).update(settings.changes, do_sample=settings.samples, eos_token_id=settings.ends or None)
    bad_words = [*(config.bad_words_ids or []), *_sequences(settings.bad_words, tokenizer)]
    config.bad_words_ids = bad_words or None
    model._prepare_special_tokens(config, device=model.device)
    more = LogitsProcessorList()
    if any(settings.penalties):
        more.append(_AnswerPenalty(num_prompt, *settings.penalties))
    if settings.allowed:
        more.append(PrefixConstrainedLogitsProcessor(lambda *_: settings.allowed, 1))
    if settings.grammar is not None:
        more.append(settings.grammar)
    found: LogitsProcessorList = model._get_logits_processor(
        config, num_prompt, logits_processor=more, device=model.device
    )
    return found


# -- requests ----------------------------------------------------------------------------------------------------------


class _Job(utils.CBStreamer):
    """One request, as transformers' streamer, but with the answer up to a stop string."""

    task: asyncio.Task[None]
    request: Request
    status = 503  # of an error

    def __init__(
        self, batches: Batches, name: str, processor: Any, inputs: Any, settings: Any, parser: Any = None
    ) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()  # of texts, and of what the parser finds; ends with None
        tokenizer, loop = processor._tokenizer, asyncio.get_running_loop()
        super().__init__(batches, name, tokenizer, loop, self.queue, parser)  # type: ignore[arg-type] # to cancel
        self.name, self.prompt, self.settings = name, list(inputs["input_ids"]), settings
        self.tokens: list[int] = []
        self.text = ""
        self.ended = asyncio.Future[None]()
        # Special tokens are left to the parser of transformers, if there is one.
        decode = partial(tokenizer.decode, skip_special_tokens=processor.response_template is None)
        self._new_text = TokenText(decode, self.prompt if settings.continues else ())
        # Text that may begin a stop string has to wait for the next tokens.
        self._num_held = max(map(len, settings.stops), default=1) - 1
        self._num_sent, self._has_called = 0, False

    def put(self, token: int | None, has_ended: bool, error: RequestError | None) -> None:  # type: ignore[override]
        """Take a further token of the answer from the engine."""
        if self.ended.done():
            return
        if token is None or error is not None:
            self.ended.set_exception(error or RequestError("no token", status=500))
            return
        self.tokens.append(token)
        found: list[int] = []
        shown = [] if token in self.settings.stop_tokens else [token]
        for each in [*shown, *[None] * has_ended]:
            self.text += self._new_text.add(each)
            found = [at for stop in self.settings.stops if (at := self.text.find(stop)) >= 0]
            if found:
                self.text = self.text[: min(found)]
                break
        self.total_tokens = len(self.tokens)
        if found or token in self.settings.ends:
            self.settings.max_new_tokens = None  # by it transformers' handlers tell "length" from "stop"
        has_ended = has_ended or bool(found)
        ready = self.text[self._num_sent : None if has_ended or not self._num_held else -self._num_held]
        self._num_sent += len(ready)
        parser: Any = self._parser
        chunks = [ready] * bool(ready) if parser is None else _found(parser.feed, ready)
        if has_ended:
            self.ended.set_result(None)
            chunks += [None] if parser is None else [*_found(lambda: parser.finalize()[1]), None]
        for chunk in chunks:
            is_call = isinstance(chunk, utils.ToolCall)
            if not (is_call and self._has_called and self.settings.one_call):
                self.queue.put_nowait(chunk)
            self._has_called |= is_call


def _found(read: Callable[..., Any], *texts: str) -> list[Any]:
    """Tool calls that transformers' parser finds; nothing in a call that is incomplete, no JSON, or without a name."""
    with suppress(Exception):  # of any type: transformers takes any JSON of a model for a call
        chunks = utils.response_events_to_chunks(read(*texts))
        if all(chunk.name.encode() for chunk in chunks if isinstance(chunk, utils.ToolCall)):
            return chunks
    return []


def _message(chunks: list[Any]) -> dict[str, Any]:
    """The message of an answer, of what was found in it."""
    calls = [chunk for chunk in chunks if isinstance(chunk, utils.ToolCall)]
    return {
        "thinking": "".join(chunk for chunk in chunks if isinstance(chunk, utils.ReasoningText)) or None,
        "content": "".join(chunk for chunk in chunks if type(chunk) is str),
        "tool_calls": [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls],
    }


class Batches(utils.BaseGenerateManager):
    """Runs the requests of transformers' handlers; belongs to one event loop.

    Args:
        model: a causal language model, offloaded or not.
        num_rows: requests that decode together.
        longest: tokens of the longest sequence, prompt and answer.
        max_waiting: requests that may wait for others to end.
    """

    def __init__(self, model: Any, num_rows: int, longest: int, max_waiting: int) -> None:
        self.model = model
        self.longest, self.max_waiting = longest, max_waiting
        self.prompt_tokens = self.generated_tokens = 0  # of requests that ended without an error
        self._jobs: dict[str, _Job] = {}
        self._requests: dict[Request, _Job] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.engine = Engine(Rows(model, num_rows, longest), model.device, max_waiting, self._tell)
        self._error: str | None = None

    # -- what transformers' handlers call ------------------------------------------------------------------------------

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], Any]:
        """A queue of texts that ends with ``None``, and the request, which counts its tokens.

        Raises:
            RequestError: the request can never run, or the queue is full.
        """
        job = _Job(self, request_id, processor, inputs, gen_config, response_parser)
        settings, num_tokens = job.settings, len(job.prompt)
        if not job.prompt:
            raise RequestError("the prompt has no tokens; a causal language model needs at least one to continue")
        vocabulary = self.model.get_input_embeddings().num_embeddings
        for field, ids in {"prompt": job.prompt, **settings.tokens_of}.items():
            if (largest := max(ids, default=0)) >= vocabulary:
                raise RequestError(f"{field}: token {largest}, and the model has embeddings for {vocabulary}", field)
        if settings.max_new_tokens is None:
            settings.max_new_tokens = max(1, min(settings.most_tokens, self.longest - num_tokens))
        self.require_alive()
        if self._loop is None:
            self.engine.start()
            self._loop = asyncio.get_running_loop()
        processors = partial(_processors, self.model, settings, num_tokens, processor)
        most, ends = settings.max_new_tokens, settings.ends
        job.request = Request(job.prompt, most, ends, processors, settings.samples, settings.seed)
        self._jobs[job.name] = self._requests[job.request] = job
        try:
            self.engine.submit(job.request)
        except RequestError:
            del self._jobs[job.name], self._requests[job.request]
            raise
        job.task = asyncio.create_task(self._run(job))
        return job.queue, job

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """The text, the number of tokens of the prompt, and the tokens of the answer.

        Raises:
            RequestError: the request can never run, the queue is full, or the engine ended with an error.
        """
        about = [processor, model, inputs["input_ids"], gen_config.tools]
        takes = len(inspect.signature(utils.build_response_parser).parameters)  # up to transformers 5.17 no tools
        parser: Any = utils.build_response_parser(*about[:takes])
        queue, job = self.generate_streaming(model, processor, inputs, gen_config, request_id, parser)
        chunks: list[Any] = []
        while (item := await queue.get()) is not None:
            if isinstance(item, utils._StreamError):
                raise RequestError(json.loads(f'"{item.msg}"'), status=job.status)
            chunks.append(item)
        # Handlers would parse the tokens, also those behind a stop string, and fail at an incomplete tool call.
        processor.parse_response = lambda *_, **__: _message(chunks)
        return job.text, len(job.prompt), job.tokens

    def cancel_request(self, request_id: str) -> None:
        """End a request, and free its row; an unknown one is ignored."""
        if request_id in self._jobs:
            self._jobs[request_id].task.cancel("the request was cancelled")

    def stop(self) -> None:
        """Stop the engine; requests that still run or wait fail."""
        self._error = "the server stops"
        for job in self._jobs.values():
            job.task.cancel(self._error)
        self.engine.stop(_STOP_S)

    def dead_reason(self) -> str | None:
        """Why no request can run any more; ``None``: the engine is alive."""
        return self._error or self.engine.why_dead()

    def require_alive(self) -> bool:
        """``True``, or a RequestError with the reason why no request can run."""
        if (reason := self.dead_reason()) is not None:
            raise RequestError(reason, status=503)
        return True

    # -- the life of a request -----------------------------------------------------------------------------------------

    def _tell(self, requests: Sequence[Request]) -> None:
        """Pass on the newest token of each, from the thread of the engine to the event loop."""
        news = [(each, each.tokens[-1] if each.tokens else None, each.has_ended, each.error) for each in requests]
        with suppress(RuntimeError):  # the loop is closed, and no request waits
            self._loop.call_soon_threadsafe(self._put, news)  # type: ignore[union-attr]

    def _put(self, news: Sequence[tuple[Request, int | None, bool, BaseException | None]]) -> None:
        for request, token, has_ended, error in news:
            refusal = None
            if error is not None:  # of the request alone, or of the engine
                reason = self.dead_reason() if error is self.engine.error else None
                refusal = RequestError(reason or f"{type(error).__name__}: {error}", status=503 if reason else 500)
                if isinstance(error, RequestError):
                    refusal = error
            if (job := self._requests.get(request)) is not None:
                job.put(token, has_ended, refusal)

    async def _run(self, job: _Job) -> None:
        """A request from its place in the queue to its end."""
        try:
            while not (await asyncio.wait({job.ended}, timeout=_CHECK_S))[0]:
                self.require_alive()
            await job.ended
            self.prompt_tokens += len(job.prompt)
            self.generated_tokens += job.total_tokens
        except (Exception, asyncio.CancelledError) as error:
            # transformers puts it between quotes.
            job.queue.put_nowait(utils._StreamError(json.dumps(str(error))[1:-1]))
            job.status = getattr(error, "status", 503)
        finally:
            del self._jobs[job.name], self._requests[job.request]
            job.ended.cancel()
            self.engine.cancel(job.request)
