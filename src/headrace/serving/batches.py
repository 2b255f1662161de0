"""The engine: transformers' continuous batching, behind the interface of the generation managers of its server.

One request too large for the cache ends a continuous-batching manager for all, so requests pass
:class:`~headrace.serving.admission.Admission` first. All requests share one manager, which has the sampling of each;
a request with a seed has a manager of its own, because a manager samples from one generator.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    CBWorkerDeadError,
    _StreamError,
    response_events_to_chunks,
)
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingTopKLogitsWarper

from headrace.errors import OptionError
from headrace.serving.admission import Admission, Pool
from headrace.serving.request_body import GenerationRequest, RequestError

__all__ = ["BLOCK_TOKENS", "Batches", "batch_settings", "pool_blocks", "settings_of"]

BLOCK_TOKENS = 32
_STEP_TOKENS = 2048
_ANSWER_TOKENS = 1024
_CHECK_S = 1.0


# -- sampling ----------------------------------------------------------------------------------------------------------


def settings_of(request: GenerationRequest, default: GenerationConfig) -> GenerationConfig:
    """The generation config of a request: the default, changed by the fields of the request.

    Raises:
        RequestError: a field has no effect on greedy decoding.
    """
    settings: Any = copy.deepcopy(default)
    settings.max_new_tokens, settings.max_length = request.max_tokens, None
    if request.temperature is not None:
        settings.do_sample, settings.temperature = request.temperature > 0, request.temperature
    for name, value in (("top_p", request.top_p), ("top_k", request.top_k)):
        if value is None:
            continue
        if request.temperature is None and not settings.do_sample:
            raise RequestError(f"{name} has no effect on greedy decoding, the default here; add temperature", name)
        setattr(settings, name, value)
    if request.ignore_eos:
        settings.eos_token_id = -1  # no token has it
    settings.seed = request.seed if settings.do_sample else None
    settings.stop_strings = request.stop
    return settings  # type: ignore[no-any-return]


def _sampling_of(settings: Any) -> dict[str, Any]:
    """The arguments of transformers' processors for one request; greedy decoding is a ``top_k`` of 1."""
    if not settings.do_sample:
        return {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
    top_k = settings.top_k if settings.top_k and settings.top_k > 0 else 2**31 - 1
    return {"temperature": float(settings.temperature or 1), "top_k": top_k, "top_p": float(settings.top_p or 1)}


def batch_settings(model: Any, default: GenerationConfig) -> GenerationConfig:
    """The generation config of a manager: with a temperature, top_k and top_p that every request replaces.

    Raises:
        OptionError: continuous batching would not choose tokens as ``generate`` does with ``default``.
    """
    settings: Any = copy.deepcopy(default)
    settings.use_cache = False  # the manager has its own
    # A value that changes nothing would leave the processor out.
    settings.do_sample, settings.temperature, settings.top_k, settings.top_p = True, 0.5, 50, 0.5
    # The manager drops unsupported processors, with a warning in the log.
    unfit = [each for each in model._get_logits_processor(settings) if not each.supports_continuous_batching]
    if unfit:
        names = ", ".join(type(each).__name__ for each in unfit)
        raise OptionError(f"{names}: transformers does not apply this in a batch of several requests")
    return settings  # type: ignore[no-any-return]


class _TopK(ContinuousBatchingTopKLogitsWarper):
    """transformers' own, but a ``top_k`` of 1 keeps only the token of greedy decoding, not all equally likely ones."""

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        top_k = tensor_arg[: scores.size(0)].clamp(max=scores.size(-1))  # up to 5.23 theirs needs it
        first = scores.argmax(-1, keepdim=True)
        only = torch.full_like(scores, self.filter_value).scatter(-1, first, scores.gather(-1, first))
        return torch.where((top_k == 1).unsqueeze(-1), only, super().__call__(scores, top_k))


# -- the manager -------------------------------------------------------------------------------------------------------


def pool_blocks(config: Any, num_blocks: int) -> int:
    """The blocks that transformers' cache needs to hold ``num_blocks`` of every layer, for layers of any kinds.

    Raises:
        OptionError: continuous batching has no cache for some layers.
    """
    try:
        grouped: Any = group_layers_by_attn_type(config)
    except ValueError as error:
        raise OptionError(
            f"{config.model_type}: transformers' server batches only models of full and sliding attention ({error}); "
            f"use --engine vllm, or headrace generate"
        ) from error
    if isinstance(grouped, tuple):  # up to transformers 5.19: groups of layers share the blocks
        return num_blocks * len(grouped[0])
    sizes = [len(layers) for layers in grouped.values()]
    if len(sizes) == 1:
        return num_blocks
    # Each kind of layers is given sectors, which its blocks fill; the last sector of each may be partly filled.
    return num_blocks + len(sizes) * -(-math.lcm(*sizes) // sum(sizes))


def _new_manager(model: Any, pool: Pool, seed: int | None) -> Any:
    known = {row.name for row in fields(ContinuousBatchingConfig)}
    options: dict[str, Any] = {
        # Graphs and asynchronous batches would double the memory, and save nothing where the link is the limit.
        "use_cuda_graph": False,
        "use_async_batching": False,
        "auto_switch_to_flash": False,
        "page_size" if "page_size" in known else "block_size": pool.block_tokens,  # the latter up to transformers 5.19
        "num_blocks": pool_blocks(model.config.get_text_config(), pool.num_blocks),
        "max_batch_tokens": min(_STEP_TOKENS, pool.num_tokens),
        "per_request_processors": True,
        "seed": seed,
    }
    torch.seed() if seed is None else torch.manual_seed(seed)  # up to transformers 5.20 the configuration has no seed
    manager = model.init_continuous_batching(
        generation_config=batch_settings(model, model.generation_config),
        continuous_batching_config=ContinuousBatchingConfig(**{k: v for k, v in options.items() if k in known}),
    )
    processors = manager.logit_processor.logits_processor
    for index, processor in enumerate(processors):
        if isinstance(processor, ContinuousBatchingTopKLogitsWarper):
            processors[index] = _TopK(processor)  # type: ignore[arg-type] # it has the attributes that are copied
    manager.start()
    return manager


# -- requests ----------------------------------------------------------------------------------------------------------


class _Job:
    """One request, and its answer up to a stop string: a queue of texts that ends with ``None``.

    transformers' handlers use it as the streamer.
    """

    def __init__(self, inputs: Any, settings: Any, tokenizer: Any, is_streaming: bool, parser: Any = None) -> None:
        self.prompt, self.settings, self.is_streaming = list(inputs["input_ids"]), settings, is_streaming
        self.stops = settings.stop_strings or []
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.tokens: list[int] = []
        self.text = ""
        self.error: str | None = None
        self.has_started = False
        # Special tokens are left to the parser of transformers, if there is one.
        self._tokenizer, self._parser, self._skips = tokenizer._tokenizer, parser, tokenizer.response_template is None
        self._stream: Any = DecodeStream([], skip_special_tokens=self._skips)
        self._num_sent = 0
        if parser is not None:
            self._put(response_events_to_chunks(parser.initial_events))

    @property
    def total_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens)

    def cancel(self) -> None:
        """Nothing: :class:`RequestMiddleware` cancels the request when its client has left."""

    def add(self, tokens: list[int], is_last: bool) -> bool:
        """Append further tokens; whether the answer has ended with them."""
        is_stopped = False
        for token in tokens:
            self.tokens.append(token)
            self.text += self._stream.step(self._tokenizer, token) or ""
            is_stopped = self._cut()
            if is_stopped:
                break
        if is_last and not is_stopped:
            # With the bytes of a character that the last token leaves incomplete.
            text = self._tokenizer.decode(self.tokens, skip_special_tokens=self._skips)
            self.text = text if text.startswith(self.text) else self.text
            is_stopped = self._cut()
        ends = self.settings.eos_token_id
        if is_stopped or self.tokens[-1] in (ends if isinstance(ends, list) else [ends]):
            self.settings.max_new_tokens = None  # by it transformers' handlers tell "length" from "stop"
        has_ended = is_last or is_stopped
        # Text that may begin a stop string has to wait for the next tokens.
        num_held = (
            0 if has_ended else max((_overlap(self.text[self._num_sent :], stop) for stop in self.stops), default=0)
        )
        text = self.text[self._num_sent : len(self.text) - num_held]
        self._num_sent += len(text)
        if text:
            self._put([text] if self._parser is None else response_events_to_chunks(self._parser.feed(text)))
        if has_ended:
            if self._parser is not None:
                with suppress(ValueError, RuntimeError):  # the answer ends within a tool call
                    self._put(response_events_to_chunks(self._parser.finalize()[1]))
            self._put([None])
        return has_ended

    def fail(self, message: str) -> None:
        """End without an answer."""
        self.error = message
        self._put([_StreamError(json.dumps(message)[1:-1])])  # transformers puts it between quotes

    def _cut(self) -> bool:
        found = [at for stop in self.stops if (at := self.text.find(stop)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def _put(self, items: Iterable[Any]) -> None:
        for item in items:
            self.queue.put_nowait(item)


def _overlap(text: str, stop: str) -> int:
    """The number of characters at the end of ``text`` that ``stop`` begins with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


class Batches(BaseGenerateManager):
    """Runs the requests of transformers' handlers; belongs to one event loop.

    Args:
        model: a causal language model, offloaded or not.
        pool: the cache that requests share.
        max_waiting: requests that may wait for it.
    """

    def __init__(self, model: Any, pool: Pool, max_waiting: int) -> None:
        self.model = model
        self.admission = Admission(pool, max_waiting)
        self.prompt_tokens = self.generated_tokens = 0  # of requests that ended without an error
        self._jobs: dict[str, _Job] = {}
        self._manager: Any = None
        self._alone: str | None = None  # the request that has the manager to itself
        self._admitted: asyncio.Queue[str] = asyncio.Queue()  # have their part of the cache, and are to be started
        self._starter: asyncio.Task[None] | None = None
        self._error: str | None = None

    # -- what transformers' handlers call ------------------------------------------------------------------------------

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Nothing: a manager is made when the first request starts."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], Any]:
        """A queue of texts that ends with ``None``, and the request, which counts its tokens.

        Raises:
            RequestError: the request can never run, or the queue is full.
        """
        job = _Job(inputs, gen_config, processor, True, response_parser)
        self._enter(request_id, job)
        return job.queue, job

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """The text, the number of tokens of the prompt, and the tokens of the answer.

        Raises:
            RequestError: the request can never run, or the queue is full.
            CBWorkerDeadError: the batch ended with an error.
        """
        job = _Job(inputs, gen_config, processor, False)
        self._enter(request_id, job)
        while (item := await job.queue.get()) is not None:
            if isinstance(item, _StreamError):
                raise CBWorkerDeadError(job.error)
        # Handlers parse the answer as it was cut, not the tokens behind a stop string.
        parse = processor.parse_response
        processor.parse_response = lambda _, *args, **options: parse(job.text, *args, **options)
        return job.text, len(job.prompt), job.tokens

    def cancel_request(self, request_id: str) -> None:
        """End a request, and free its part of the cache; an unknown one is ignored."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return
        self.admission.leave(request_id)
        if job.has_started and self._manager is not None:
            self._manager.cancel_request(request_id)
            self._manager.output_router.result_handlers.pop(request_id, None)
        self._admit()

    def stop(self) -> None:
        """Stop the engine; requests that still run or wait fail."""
        self._fail_all("the server stops")
        if self._starter is not None:
            self._starter.cancel()
        if self._manager is not None:
            self._manager.stop(block=True)
            self._manager = None

    def dead_reason(self) -> str | None:
        """Why no request can run any more; ``None``: the engine is alive."""
        if self._error is None and self._manager is not None:
            error = self._manager.background_thread_status.fatal_error
            if error is not None or not self._manager.is_running():
                self._error = f"the batching loop has ended: {error or 'it gave no reason'}"
        return self._error

    # -- the life of a request -----------------------------------------------------------------------------------------

    def _enter(self, name: str, job: _Job) -> None:
        if not job.prompt:
            raise RequestError("the prompt has no tokens; a causal language model needs at least one to continue")
        largest, vocabulary = max(job.prompt), self.model.get_input_embeddings().num_embeddings
        if largest >= vocabulary:
            raise RequestError(f"token {largest} of the prompt: the model has embeddings for {vocabulary}")
        if job.settings.max_new_tokens is None:
            job.settings.max_new_tokens = max(1, min(_ANSWER_TOKENS, self.admission.pool.longest - len(job.prompt)))
        reason = self.dead_reason()
        if reason is not None:
            raise CBWorkerDeadError(reason)
        alone = None if job.settings.seed is None else name
        self.admission.enter(name, len(job.prompt), job.settings.max_new_tokens, alone)
        self._jobs[name] = job
        if self._starter is None:
            self._starter = asyncio.get_running_loop().create_task(self._start_requests())
        self._admit()

    def _admit(self) -> None:
        """Reserve cache for requests that wait; at once, so that none that could run counts as waiting."""
        for name in self.admission.start():
            self._admitted.put_nowait(name)

    async def _start_requests(self) -> None:
        """Start requests when they are admitted."""
        try:
            while self.dead_reason() is None:
                name: str | None = None
                with suppress(TimeoutError):
                    name = await asyncio.wait_for(self._admitted.get(), _CHECK_S)
                if name in self._jobs:  # else it was cancelled meanwhile
                    await self._start(name, self._jobs[name])
                while self._manager is not None and self._manager.get_result(timeout=0) is not None:
                    pass  # drop the last tokens of cancelled requests
        except Exception as error:  # no manager can be made
            self._error = f"no batch can be made: {type(error).__name__}: {error}"
        self._fail_all(str(self._error))

    async def _start(self, name: str, job: _Job) -> None:
        alone = None if job.settings.seed is None else name
        if self._manager is None or self._alone != alone:
            # Its requests have ended. It is removed first, or requests that come meanwhile would find a dead engine.
            ended, self._manager = self._manager, None
            if ended is not None:
                await asyncio.to_thread(ended.stop, block=True)
            del ended  # and its cache, before the next one is allocated
            self._manager = await asyncio.to_thread(_new_manager, self.model, self.admission.pool, job.settings.seed)
            self._alone = alone
            if name not in self._jobs:
                return

        def on_output(output: Any) -> None:
            if name not in self._jobs:
                return
            if output.error is not None:
                self.cancel_request(name)
                job.fail(str(output.error))
            elif job.add(output.generated_tokens[job.total_tokens :], output.is_finished()):
                self.prompt_tokens += len(job.prompt)
                self.generated_tokens += job.total_tokens
                self.cancel_request(name)

        self._manager.register_result_handler(name, on_output)
        job.has_started = True
        self._manager.add_request(
            job.prompt,
            request_id=name,
            max_new_tokens=job.settings.max_new_tokens,
            streaming=job.is_streaming or bool(job.stops),
            eos_token_id=job.settings.eos_token_id,
            **_sampling_of(job.settings),
        )

    def _fail_all(self, message: str) -> None:
        for name, job in list(self._jobs.items()):
            self.cancel_request(name)
            job.fail(message)
